"""Steps that tests of the cache volume share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from initwarm.edges.volume import CacheVolume, StoredBundle
from initwarm.edges.volume_reader import parts_of
from tests.support.bundles import IDENTITY, PLAN, bundle_files, bundle_of, key, v1_file

REPOSITORY = Path(__file__).resolve().parents[2]
#: What a process of its own begins with: `volume`, and `publish`.
CHILD = """
import sys
from pathlib import Path
from initwarm.edges.volume import CacheVolume
from initwarm.errors import VolumeError
from tests.support.bundles import IDENTITY, PLAN, bundle_files, bundle_of, key, v1_file

def publish(volume, tactic=1, count=1):
    files = bundle_files(v1_file({key(bucket=number): tactic for number in range(count)}))
    return volume.publish(IDENTITY, bundle_of(files), files)

volume = CacheVolume(Path(sys.argv[1]))
"""


def prepared(root: Path) -> CacheVolume:
    """A volume that can be written."""
    volume = CacheVolume(root)
    volume.prepare()
    return volume


def publish(volume: CacheVolume, tactic: int = 1, **changes: Any) -> StoredBundle:
    """Publish a small bundle with this tactic."""
    files = bundle_files(v1_file({key(): tactic}))
    return volume.publish(IDENTITY, bundle_of(files, **changes), files)


def load(volume: CacheVolume, world_size: int = 4) -> StoredBundle | None:
    """The bundle that a group would use."""
    return volume.load(IDENTITY, PLAN, world_size)[0]


def bundle_path(volume: CacheVolume, stored: StoredBundle) -> Path:
    """Where a bundle lies."""
    return volume.root.joinpath(*parts_of(stored.place))


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def child_environment() -> dict[str, str]:
    """For a process that imports this repository and writes no byte code."""
    return {"PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}


def racing(body: str, root: Path, count: int) -> list[str]:
    """Run so many processes on a volume that start together; return what they printed."""
    command = [sys.executable, "-c", CHILD + body, str(root)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    processes = [
        subprocess.Popen([*command, str(number)], text=True, env=child_environment(), **pipes)
        for number in range(count)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        printed.append(out)
    return printed
