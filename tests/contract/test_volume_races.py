"""Writers that are killed at any instant or race each other, and readers beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from initwarm.edges.reading import verify_root
from initwarm.edges.volume import CacheVolume
from tests.support.volumes import CHILD, bundle_path, child_environment, prepared, publish, racing


@pytest.fixture
def volume(tmp_path: Path) -> CacheVolume:
    return prepared(tmp_path / "cache")


KILLED = """
import os, signal
left = 0
def counted(function):
    def call(*args, **named):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*args, **named)
    return call
for name in ("open", "mkdir", "write", "fsync", "rename", "unlink", "rmdir", "close", "listdir", "chmod", "fchmod"):
    setattr(os, name, counted(getattr(os, name)))
volume.prepare() if sys.argv[3] == "cold" else None
publish(volume, 2)
"""


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_r56_a_writer_killed_at_any_operation_leaves_all_or_nothing(tmp_path: Path, start: str) -> None:
    """The child forks once for each operation, so that Python starts once; the parent looks after each death."""
    driver = """
import os, sys
body = sys.stdin.read()
number = 0
while True:
    root = Path(sys.argv[1]) / str(number)
    if sys.argv[3] == "warm":
        base = CacheVolume(root); base.prepare(); publish(base, 1)
    child = os.fork()
    if child == 0:
        volume = CacheVolume(root)
        exec(body.replace("left = 0", f"left = {number}"))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    from initwarm.edges.reading import verify_root
    reader = CacheVolume(root)
    found = reader.load(IDENTITY, PLAN, 4)[0] if root.exists() else None
    assert not root.exists() or verify_root(root) == (), verify_root(root)
    tactics = None if found is None else found.generation
    print(number, killed, tactics)
    again = CacheVolume(root); again.prepare()
    assert publish(again, 2).digest == again.load(IDENTITY, PLAN, 4)[0].digest
    if not killed:
        break
    number += 1
"""
    command = [sys.executable, "-c", CHILD + driver, str(tmp_path), "-", start]

    done = subprocess.run(command, input=KILLED, capture_output=True, text=True, env=child_environment(), timeout=110)

    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    before, after = ("None", "1") if start == "cold" else ("1", "2")
    seen = [row[2] for row in rows]
    assert len(rows) > 30
    assert rows[-1][1:] == ["False", after]
    assert set(seen) == {before, after}
    assert seen == sorted(seen, key=[before, after].index), "once visible, it stays"


def test_r57_racing_publishers_never_disturb_each_other_or_a_reader(volume: CacheVolume) -> None:
    body = """
me = int(sys.argv[2])
volume.prepare()
sys.stdin.readline()
for round in range(4):
    stored = publish(volume, me * 10 + round, count=20)
    assert volume.load(IDENTITY, PLAN, 4)[0].generation >= stored.generation
    print(stored.generation)
"""

    generations = [int(line) for out in racing(body, volume.root, 8) for line in out.split()]

    assert sorted(generations) == list(range(1, 33))
    assert verify_root(volume.root) == ()
    assert list(volume.root.rglob(".staging*")) == []
    assert not (volume.root / "v1" / "quarantine").exists()


def test_r58_racing_publishers_of_the_same_end_with_one_digest(volume: CacheVolume) -> None:
    body = """
sys.stdin.readline()
print(publish(volume).digest)
"""

    assert len(set(racing(body, volume.root, 4))) == 1
    assert verify_root(volume.root) == ()


def test_r57_racing_readers_set_a_bad_bundle_aside_once(volume: CacheVolume) -> None:
    (bundle_path(volume, publish(volume)) / "bundle.json").write_text("{")
    body = """
sys.stdin.readline()
bundle, aside = volume.load(IDENTITY, PLAN, 4)
assert bundle is None
print(sum(one.moved_to is not None for one in aside))
"""

    assert sorted(racing(body, volume.root, 6)) == ["0\n"] * 5 + ["1\n"]
    assert len(list((volume.root / "v1" / "quarantine").iterdir())) == 1
