"""What goes wrong under the cache volume: full, read-only, forbidden, or its handles lost.

Real mounts and real users where this process may make them; errors that no local file system gives are injected into
the call that would meet them.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from initwarm.edges import volume_reader
from initwarm.edges.files import volume_error
from initwarm.edges.volume import CacheVolume
from initwarm.errors import VolumeError
from tests.support.volumes import CHILD, bundle_path, child_environment, load, prepared, publish


def _can(*command: str) -> bool:
    return shutil.which(command[0]) is not None and not subprocess.run(command, capture_output=True).returncode


needs_mounts = pytest.mark.skipif(not _can("unshare", "-rm", "true"), reason="needs to mount (unshare -rm)")
needs_users = pytest.mark.skipif(
    os.geteuid() != 0 or not _can("setpriv", "--reuid", "1000660000", "--regid", "0", "--clear-groups", "true"),
    reason="needs to become another user (setpriv as root)",
)


def child(body: str, root: Path, *prefix: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run Python on a volume in a process of its own."""
    command = [*prefix, python, "-c", CHILD + body, str(root)]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=60)


def in_mount(body: str, root: Path, mount: str) -> str:
    """Run Python on a volume below a mount of its own; return what it printed."""
    done = child(body, root, "unshare", "-rm", "sh", "-c", f'{mount}; exec "$@"', "sh")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def volume(tmp_path: Path) -> CacheVolume:
    return prepared(tmp_path / "cache")


@needs_mounts
def test_r65_a_full_volume_keeps_the_old_bundle_and_none_of_the_new(tmp_path: Path) -> None:
    said = in_mount(
        """
volume.prepare()
old = publish(volume)
try:
    publish(volume, 2, count=2000)
except VolumeError as problem:
    print(problem)
print([path.name for path in volume.root.rglob(".staging*")], volume.load(IDENTITY, PLAN, 4)[0] == old)
from initwarm.edges.reading import verify_root
print(verify_root(volume.root))
""",
        tmp_path,
        f"mount -t tmpfs -o size=64k tmpfs {tmp_path}",
    )

    lines = said.splitlines()
    assert "is full" in lines[0]
    assert "bytes are free (ENOSPC). The bundle of" in lines[0]
    assert "stays readable. Enlarge the volume" in lines[0]
    assert lines[1:] == ["[] True", "()"]


@needs_mounts
def test_r65_a_volume_that_is_full_from_the_start_can_be_used(tmp_path: Path) -> None:
    said = in_mount(
        """
volume.prepare()
publish(volume)
with (volume.root / "filler").open("wb", buffering=0) as filler:
    try:
        while filler.write(b"x" * 512):
            pass
    except OSError:
        pass
while True:
    try:
        volume.root.joinpath(str(len(list(volume.root.iterdir())))).mkdir()
    except OSError:
        break
volume.prepare()
print(volume.read_only, volume.load(IDENTITY, PLAN, 4)[0] is not None)
print(volume.obstacle)
""",
        tmp_path,
        f"mount -t tmpfs -o size=64k,nr_inodes=40 tmpfs {tmp_path}",
    )

    assert said.startswith("True True\n")
    assert "is full" in said


@needs_mounts
def test_r63_a_read_only_volume_can_be_used_and_not_written(volume: CacheVolume) -> None:
    publish(volume)

    said = in_mount(
        """
volume.prepare()
print(volume.read_only, volume.load(IDENTITY, PLAN, 4)[0] is not None)
print(volume.obstacle)
try:
    publish(volume, 2)
except VolumeError as problem:
    print(problem)
""",
        volume.root,
        f"mount --bind {volume.root} {volume.root} && mount -o remount,ro,bind {volume.root}",
    )

    usable, obstacle, refused = said.splitlines()
    assert usable == "True True"
    assert "is mounted read-only (EROFS). The cache volume cannot be written. Mount it with readOnly: false" in obstacle
    assert "EROFS" in refused
    assert "was not published" in refused


@needs_mounts
def test_a_bad_bundle_on_a_read_only_volume_is_a_miss_and_said(volume: CacheVolume) -> None:
    stored = publish(volume)
    (bundle_path(volume, stored) / "bundle.json").write_text("{")

    said = in_mount(
        """
bundle, aside = volume.load(IDENTITY, PLAN, 4)
print(bundle, aside[0].moved_to, aside[0].reason)
""",
        volume.root,
        f"mount --bind {volume.root} {volume.root} && mount -o remount,ro,bind {volume.root}",
    )

    assert said.startswith("None None bundle.json is not JSON")
    assert "left in place" in said
    assert "Read-only file system" in said


@needs_mounts
def test_r63_a_missing_root_on_a_read_only_volume_is_an_error(tmp_path: Path) -> None:
    said = in_mount(
        """
try:
    CacheVolume(volume.root / "missing").prepare()
except VolumeError as problem:
    print(problem)
""",
        tmp_path,
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}",
    )

    assert "EROFS" in said


ANOTHER_USER = ("setpriv", "--reuid", "1000660000", "--regid", "0", "--clear-groups")


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """A directory that other users reach, with what they need to run Python on this repository."""
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)
    return tmp_path


@functools.cache
def _python_of_others() -> str | None:
    """A Python that another user can run with this package, since a virtual environment may lie in a closed home."""
    for python in (sys.executable, "/usr/bin/python3"):
        command = [*ANOTHER_USER, python, "-c", "import initwarm.edges.volume, tests.support.bundles"]
        if (
            shutil.which(python)
            and not subprocess.run(command, capture_output=True, env=child_environment(), check=False).returncode
        ):
            return python
    return None


def as_another_user(body: str, root: Path, *prefix: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a volume as another user of group 0."""
    python = _python_of_others()
    if python is None:
        pytest.skip("needs a Python that other users can run")
    return child(body, root, *prefix, *ANOTHER_USER, python=python)


@needs_users
def test_r64_another_user_of_the_group_publishes_and_both_stay_warm(public: Path) -> None:
    volume = prepared(public / "cache")
    mine = publish(volume, 1)

    done = as_another_user(
        """
volume.prepare()
print(volume.read_only, volume.load(IDENTITY, PLAN, 4)[0] is not None, publish(volume, 2).generation)
""",
        volume.root,
    )

    assert done.stdout == "False True 2\n", done.stderr
    found = load(volume)
    assert found is not None
    assert found.generation == 2
    assert publish(volume, 1) == mine
    assert publish(volume, 3).generation == 3


@needs_users
def test_r64_a_user_who_may_not_write_is_told_who_owns_what(public: Path) -> None:
    volume = prepared(public / "cache")
    publish(volume)
    for path in (volume.root, *volume.root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    done = as_another_user(
        """
volume.prepare()
print(volume.read_only, volume.load(IDENTITY, PLAN, 4)[0] is not None)
print(volume.obstacle)
try:
    publish(volume, 2)
except VolumeError as problem:
    print(problem)
""",
        volume.root,
    )

    usable, obstacle, refused = done.stdout.splitlines()
    assert usable == "True True"
    assert "User 1000660000 of groups 0 may not use" in obstacle
    assert "belongs to 0:0, has mode 0555 and lies on" in obstacle
    assert "chmod g+rwxs" in obstacle
    assert "EACCES" in refused


@needs_users
def test_r64_a_volume_that_cannot_even_be_read_is_an_error(public: Path) -> None:
    root = public / "cache"
    root.mkdir(mode=0o700)

    done = as_another_user(
        """
try:
    volume.prepare()
except VolumeError as problem:
    print(problem)
""",
        root,
    )

    assert "may not use" in done.stdout, done.stderr


@needs_users
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_r61_a_consumer_who_may_not_write_opens_nothing_for_writing_and_locks_nothing(public: Path) -> None:
    volume = prepared(public / "cache")
    publish(volume)
    for path in (volume.root, *volume.root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    body = "volume.prepare(); print(volume.load(IDENTITY, PLAN, 4)[0] is not None)"

    done = as_another_user(body, volume.root, "strace", "-f", "-e", "trace=openat,open,flock,fcntl")

    calls = done.stderr.splitlines()
    assert done.stdout == "True\n", done.stderr
    assert any("bundle.json" in call for call in calls)
    assert not [call for call in calls if "flock(" in call or "F_SETLK" in call]
    assert not [call for call in calls if "O_WRONLY" in call or "O_RDWR" in call]


@pytest.mark.parametrize("name", ["cache", "cache/below"])
def test_a_cache_root_that_is_a_file_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "cache").write_text("")

    with pytest.raises(VolumeError, match=r"is a file .*Give the path of a directory"):
        CacheVolume(tmp_path / name).prepare()


def failing(
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    code: int,
    times: int,
    applies: Callable[..., bool] = lambda *_: True,
) -> list[int]:
    """Let an operating system call fail so often, where it applies; returns the list of failures."""
    real = getattr(os, function)
    failures: list[int] = []

    def replacement(*args: Any, **named: Any) -> Any:
        if len(failures) < times and applies(*args):
            failures.append(code)
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    monkeypatch.setattr(os, function, replacement)
    return failures


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(volume_reader, "_pause", waited.append)
    return waited


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_r55_a_handle_that_was_lost_is_opened_again(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch, pauses: list[float], code: int
) -> None:
    stored = publish(volume)
    failing(monkeypatch, "open", code, 2, lambda path, *_: path == "bundle.json")

    assert load(volume) == stored
    assert len(pauses) == 2


@pytest.mark.parametrize(("code", "name"), [(errno.ESTALE, "ESTALE"), (errno.EIO, "EIO")])
def test_r55_a_handle_that_stays_lost_is_an_error_within_a_bound(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch, pauses: list[float], code: int, name: str
) -> None:
    publish(volume)
    failing(monkeypatch, "open", code, 1000, lambda path, *_: path == "bundle.json")

    with pytest.raises(VolumeError, match=rf"{name}\), in each of 5 attempts\. The cache volume cannot be read\."):
        load(volume)
    assert sum(pauses) < 1


@pytest.mark.parametrize("function", ["mkdir", "write", "fsync", "rename"])
@pytest.mark.parametrize("name", ["ENOSPC", "EROFS", "EACCES", "ESTALE", "EDQUOT", "EIO"])
def test_a_publication_that_fails_says_so_and_leaves_the_old_state(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch, function: str, name: str
) -> None:
    old = publish(volume)
    with monkeypatch.context() as patched:
        failures = failing(patched, function, getattr(errno, name), 1)
        with pytest.raises(VolumeError, match=rf"\({name}\).*was not published.*stays readable"):
            publish(volume, 2)

    assert len(failures) == 1
    assert load(volume) == old
    assert list(volume.root.rglob(".staging*")) == []
    assert publish(volume, 2).generation == 2


@pytest.mark.parametrize(
    "name", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "ESTALE", "EIO", "ENOTDIR", "ENOENT", "ENAMETOOLONG"]
)
def test_every_error_has_a_message_of_its_own(name: str, tmp_path: Path) -> None:
    code = getattr(errno, name)

    problem = volume_error(OSError(code, os.strerror(code)), tmp_path, "Nothing was read.")

    assert str(tmp_path) in problem.fact
    assert problem.effect == "Nothing was read."
    assert problem.fix
    assert problem.exit_code == 74


def test_r54_nothing_fails_a_publication_after_its_rename(volume: CacheVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(volume)
    renamed: list[str] = []
    real = os.rename

    def rename(*args: Any, **named: Any) -> None:
        renamed.append(args[1])
        real(*args, **named)

    monkeypatch.setattr(os, "rename", rename)
    for function in ("fsync", "unlink", "rmdir"):
        failing(monkeypatch, function, errno.EBUSY, 1000, lambda *_: bool(renamed))

    assert publish(volume, 2).generation == 2
