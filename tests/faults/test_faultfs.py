"""The failing file system fails as it is told, and otherwise is the directory behind it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import fuse
from tests.support.faultfs import GROWING, MODIFYING, ROOT, FaultFS, Rule, clean_up, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"needs FUSE: {why_not()}")
OLD, NEW = b"what was there before", b"what a pod writes" * 100


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FaultFS]:
    with FaultFS(tmp_path / "backing", tmp_path / "mount") as mount:
        yield mount


@pytest.fixture
def pair(tmp_path: Path, mount: FaultFS) -> Iterator[tuple[FaultFS, FaultFS]]:
    """Two hosts of one file server."""
    with FaultFS(mount.backing, tmp_path / "other") as other:
        yield mount, other


def until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(500):
        if is_so():
            return
        pause.wait(0.02)
    raise AssertionError("it did not come to be")


def test_without_rules_it_is_the_directory_behind_it(mount: FaultFS) -> None:
    here = mount.at
    (here / "a" / "b").mkdir(parents=True)
    (here / "a" / "b" / "file").write_bytes(NEW * 1000)
    (here / "a" / "b" / "file").rename(here / "file")
    (here / "a" / "b").rmdir()
    (here / "link").symlink_to("file")
    with (here / "file").open("r+b") as file:
        file.truncate(len(NEW))
        os.fsync(file.fileno())
    (here / "file").chmod(0o640)
    os.utime(here / "file", (1, 2))

    assert (here / "link").read_bytes() == (mount.backing / "file").read_bytes() == NEW
    assert sorted(path.name for path in here.rglob("*")) == ["a", "file", "link"]
    seen, real = (here / "file").stat(), (mount.backing / "file").stat()
    assert (seen.st_mode, seen.st_size, seen.st_mtime) == (real.st_mode, len(NEW), 2)
    assert os.statvfs(here).f_bavail > 0
    (here / "file").unlink()
    assert not (mount.backing / "file").exists()
    assert mount.hits() == []


def test_permissions_are_those_of_the_process_that_asks() -> None:
    # pytest's own directories are closed to other users.
    with tempfile.TemporaryDirectory() as name, FaultFS(Path(name) / "backing", Path(name) / "mount") as mount:
        Path(name).chmod(0o755)
        mount.at.chmod(0o777)
        (mount.at / "closed").write_bytes(OLD)
        (mount.at / "closed").chmod(0o600)

        ended = subprocess.run(
            ["sh", "-c", "echo > mine; cat closed"],
            cwd=mount.at,
            user=12345,
            group=0,
            extra_groups=[],
            stderr=subprocess.PIPE,
        )

        assert b"Permission denied" in ended.stderr
        assert (mount.at / "mine").stat().st_uid == 12345


@pytest.mark.parametrize("name", ["ENOSPC", "EROFS", "EIO", "ESTALE", "EACCES", "EDQUOT"])
def test_an_error_is_raised_as_often_as_told(mount: FaultFS, name: str) -> None:
    (mount.at / "old").write_bytes(OLD)
    mount.inject(Rule(MODIFYING, "v1/*", error=name, skip=1, count=2))

    (mount.at / "v1").mkdir()
    (mount.at / "v1" / "passes").mkdir()
    # The kernel asks twice before it gives ESTALE to the process.
    for _ in range(1 if name == "ESTALE" else 2):
        with pytest.raises(OSError, match="fails") as raised:
            (mount.at / "v1" / "fails").mkdir()
        assert raised.value.errno == getattr(errno, name)
    (mount.at / "v1" / "fails").mkdir()

    assert {(hit["op"], hit["path"]) for hit in mount.hits()} == {("mkdir", "v1/fails")}
    assert mount.hits()[0]["pid"] == threading.get_native_id()
    assert (mount.at / "old").read_bytes() == OLD


def test_a_full_volume_lets_old_files_be_read_and_removed_until_it_is_healed(mount: FaultFS) -> None:
    (mount.at / "old").write_bytes(OLD)
    (mount.at / "more").write_bytes(OLD)
    mount.inject(Rule(GROWING, error="ENOSPC"))

    with pytest.raises(OSError, match="No space left"):
        (mount.at / "new").write_bytes(NEW)
    assert (mount.at / "old").read_bytes() == OLD
    (mount.at / "more").rename(mount.at / "old")

    mount.inject()
    (mount.at / "new").write_bytes(NEW)


def test_chances_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    outcomes = []
    for number, seed in enumerate((7, 7, 8)):
        with FaultFS(tmp_path / f"backing-{number}", tmp_path / f"mount-{number}", seed) as mount:
            mount.inject(Rule(["mkdir"], error="EIO", chance=0.5))
            made = []
            for name in range(40):
                try:
                    (mount.at / str(name)).mkdir()
                    made.append(name)
                except OSError:
                    pass
            outcomes.append(made)

    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert 0 < len(outcomes[0]) < 40


def test_a_short_write_is_told_to_its_writer(mount: FaultFS) -> None:
    mount.inject(Rule(["write"], short=True, count=1))
    descriptor = os.open(mount.at / "file", os.O_WRONLY | os.O_CREAT)

    assert os.write(descriptor, NEW) == len(NEW) // 2
    assert os.write(descriptor, NEW[len(NEW) // 2 :]) == len(NEW) - len(NEW) // 2

    os.close(descriptor)
    assert (mount.backing / "file").read_bytes() == NEW


@pytest.mark.parametrize(("damage", "size"), [("truncate", len(NEW) // 2), ("flip", len(NEW))])
def test_a_file_is_damaged_after_its_writer_has_closed_it(mount: FaultFS, damage: str, size: int) -> None:
    mount.inject(Rule(path="bad*", damage=damage))

    (mount.at / "good").write_bytes(NEW)
    (mount.at / "bad").write_bytes(NEW)

    assert (mount.at / "good").read_bytes() == NEW
    damaged = (mount.at / "bad").read_bytes()
    assert len(damaged) == size
    assert damaged != NEW
    assert [hit["path"] for hit in mount.hits()] == ["bad"]


@pytest.mark.parametrize("kill", ["process", "group"])
def test_a_process_is_killed_before_its_rename_happens(mount: FaultFS, kill: str) -> None:
    (mount.at / "staged").write_bytes(NEW)
    mount.inject(Rule(["rename"], "final", kill=kill))
    # Another thread than the first, since the kernel tells the number of the thread.
    rename = f"threading.Thread(target=os.rename, args={('staged', 'final')!r})"
    script = f"import os, threading; thread = {rename}; thread.start(); thread.join()"
    shell = f'{sys.executable} -c "{script}"; echo survived'

    ended = subprocess.run(["sh", "-c", shell], cwd=mount.at, stdout=subprocess.PIPE, start_new_session=True)

    assert ended.stdout == (b"survived\n" if kill == "process" else b"")
    assert ended.returncode == (0 if kill == "process" else -signal.SIGKILL)
    assert [path.name for path in mount.at.iterdir()] == ["staged"]


def test_a_slow_operation_holds_up_nobody_else(mount: FaultFS) -> None:
    (mount.at / "fast").write_bytes(OLD)
    (mount.at / "slow").write_bytes(OLD)
    mount.inject(Rule(["open"], "slow", delay=(3600, 3600)), Rule(["open"], "fast", delay=(0.001, 0.002)))
    waiting = subprocess.Popen(["cat", "slow"], cwd=mount.at)
    until(lambda: any(hit["path"] == "slow" for hit in mount.hits()))

    assert (mount.at / "fast").read_bytes() == OLD

    assert waiting.poll() is None
    mount.close()
    assert waiting.wait(10) != 0


def test_a_name_that_was_asked_for_too_early_stays_unknown_on_this_host(pair: tuple[FaultFS, FaultFS]) -> None:
    here, there = pair
    here.lag(negative_seconds=3600)
    assert not (here.at / "late").exists()

    (there.at / "staged").write_bytes(NEW)
    (there.at / "staged").rename(there.at / "late")
    (there.at / "unasked").write_bytes(NEW)

    assert not (here.at / "late").exists()
    assert (here.at / "unasked").read_bytes() == NEW
    assert (there.at / "late").read_bytes() == NEW
    (here.at / "late").write_bytes(OLD)
    assert (there.at / "late").read_bytes() == OLD, "what a host makes itself it knows at once"


def test_a_denial_is_forgotten_after_its_time(pair: tuple[FaultFS, FaultFS]) -> None:
    here, there = pair
    here.lag(negative_seconds=0.3)
    assert not (here.at / "late").exists()
    (there.at / "late").write_bytes(NEW)

    until((here.at / "late").exists)


def test_a_listing_is_old_for_as_long_as_told_but_for_what_this_host_did(pair: tuple[FaultFS, FaultFS]) -> None:
    here, there = pair
    (here.at / "first").write_bytes(OLD)
    here.lag(listing_seconds=3600)
    assert os.listdir(here.at) == ["first"]

    (there.at / "theirs").write_bytes(OLD)
    (there.at / "first").unlink()
    (here.at / "mine").write_bytes(OLD)

    assert os.listdir(here.at) == ["first", "mine"]
    assert os.listdir(there.at) == ["mine", "theirs"]
    assert (here.at / "theirs").exists()
    here.lag(listing_seconds=0.3)
    assert os.listdir(here.at) == ["mine", "theirs"]
    (there.at / "later").write_bytes(OLD)
    until(lambda: os.listdir(here.at) == ["later", "mine", "theirs"])


def test_a_directory_that_another_host_moves_stays_open_here(pair: tuple[FaultFS, FaultFS]) -> None:
    here, there = pair
    (here.at / "before").mkdir()
    descriptor = os.open(here.at / "before", os.O_RDONLY)

    (there.at / "before").rename(there.at / "after")
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)

    assert os.listdir(here.at / "after") == ["file"]


def test_there_are_no_locks_and_no_hard_links_where_that_is_wanted(tmp_path: Path) -> None:
    with FaultFS(tmp_path / "backing", tmp_path / "mount", has_locks=False) as mount:
        mount.inject(Rule(["link"], error="EPERM"))
        with (mount.at / "file").open("w") as file:
            for lock in (fcntl.flock, fcntl.lockf):
                with pytest.raises(OSError, match="No locks available"):
                    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(PermissionError):
            os.link(mount.at / "file", mount.at / "second")


def test_locks_and_hard_links_work_where_nothing_else_is_wanted(mount: FaultFS) -> None:
    with (mount.at / "file").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.link(mount.at / "file", mount.at / "second")
    assert (mount.backing / "file").stat().st_nlink == 2


def test_a_lost_connection_to_the_file_server_is_an_error_and_is_unmounted(mount: FaultFS) -> None:
    (mount.at / "file").write_bytes(OLD)

    mount.kill()

    with pytest.raises(OSError, match="Transport endpoint is not connected"):
        (mount.at / "file").read_bytes()
    mount.close()
    assert os.listdir(mount.at) == []


def test_nothing_stays_mounted_when_the_test_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys, threading
from pathlib import Path
from tests.support.faultfs import FaultFS
mount = FaultFS(Path({str(tmp_path / "backing")!r}), Path({str(tmp_path / "mount")!r}))
print(flush=True)
threading.Event().wait()
"""
    test = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert test.stdout is not None
    assert test.stdout.readline() == b"\n"
    assert fuse.mounts_below(tmp_path) == [tmp_path / "mount"]

    test.kill()
    test.communicate()

    until(lambda: fuse.mounts_below(tmp_path) == [])


def test_what_a_killed_run_left_mounted_can_be_taken_away(mount: FaultFS, tmp_path: Path) -> None:
    mount.kill()
    assert fuse.mounts_below(tmp_path) == [mount.at]

    clean_up(tmp_path)

    assert fuse.mounts_below(tmp_path) == []


def test_a_mount_that_is_impossible_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(OSError, match="File exists"):
        FaultFS(tmp_path / "backing", tmp_path / "file")
