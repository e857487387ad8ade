"""The lease on a real directory, between real processes that are killed, stopped, slow, or all want it at once."""

from __future__ import annotations

import errno
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from initwarm.edges.leases import TuningLease
from initwarm.edges.volume_reader import VolumeReader
from initwarm.errors import VolumeError
from initwarm.lease import LeaseSettings
from tests.support.bundles import IDENTITY, OTHER_PLAN, PLAN, schema
from tests.support.volumes import CHILD, child_environment, prepared, tree

DURATION, DEADLINE = 15.0, 10.0
#: The durations that matter are on a clock that the test moves; the thread wakes often to look at it.
QUICK = LeaseSettings(DURATION, DEADLINE, retry_period=0.02)
PATIENCE_SECONDS = 60

LEASE_CHILD = (
    CHILD
    + """
from initwarm.edges.leases import TuningLease
from initwarm.edges.volume_reader import VolumeReader
from initwarm.lease import LeaseSettings

def lease_of(name, *durations, **more):
    return TuningLease(
        VolumeReader(Path(sys.argv[1])), IDENTITY.digest, PLAN, name, "decode-0", LeaseSettings(*durations), **more
    )
"""
)


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return prepared(tmp_path / "cache").root


@pytest.fixture
def clock() -> Clock:
    return Clock()


Maker = Callable[..., TuningLease]


@pytest.fixture
def lease(root: Path, clock: Clock) -> Iterator[Maker]:
    """Makes leases of one volume and plan on one clock."""
    made: list[TuningLease] = []

    def make(name: str = "pod-a", plan: str = PLAN, reader: VolumeReader | None = None) -> TuningLease:
        reader = reader or VolumeReader(root)
        made.append(TuningLease(reader, IDENTITY.digest, plan, name, f"group of {name}", QUICK, clock))
        return made[-1]

    yield make
    for one in made:
        one.release()


def below(root: Path, plan: str = PLAN) -> Path:
    return root / "v1" / "leases" / f"{IDENTITY.digest}-{plan}"


def record(root: Path, term: int) -> dict[str, Any]:
    return dict(json.loads((below(root) / str(term) / "lease.json").read_bytes()))


def until(holds: Callable[[], bool]) -> None:
    """Ask again and again; fail where it takes for ever."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, "it takes for ever"


def advance(clock: Clock, holder: TuningLease) -> None:
    """Let almost so much time pass that the holder would lose the lease, and the holder renew it."""
    clock.now += DEADLINE - 1
    until(lambda: holder._holder.renewed == clock.now)


def child(body: str, root: Path, *arguments: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", LEASE_CHILD + body, str(root), *arguments]
    return subprocess.Popen(command, text=True, env=child_environment(), **pipes)


def ended(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    return out


def test_one_takes_it_the_other_waits_and_gets_it_when_it_is_given_back(root: Path, lease: Maker) -> None:
    one, other = lease("pod-a"), lease("pod-b")

    assert one.try_acquire()
    assert one.is_held
    assert not other.try_acquire()
    assert (other.is_held, other.is_lost) == (False, False)
    assert other.describe() == "term 1, held by pod-a of group group of pod-a, unmoving for 0 s"
    assert one.describe() == "term 1 is held by this process"

    one.release()

    assert (one.is_held, one.is_lost) == (False, False)
    assert other.try_acquire()
    assert record(root, 2)["holder"] == "pod-b"


def test_what_it_writes_follows_its_schema(root: Path, lease: Maker) -> None:
    one = lease()
    assert one.try_acquire()
    jsonschema.validate(record(root, 1), schema("lease"))

    one.release()

    jsonschema.validate(record(root, 1), schema("lease"))
    assert record(root, 1)["released"]


def test_asking_again_for_what_is_held_touches_nothing(lease: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lease()
    assert one.try_acquire()
    monkeypatch.setattr(one, "_ask", lambda: pytest.fail("the volume was asked"))

    assert one.try_acquire()


def test_plans_have_leases_of_their_own(lease: Maker) -> None:
    assert lease("pod-a").try_acquire()
    assert lease("pod-b", OTHER_PLAN).try_acquire()


def test_a_lease_is_given_back_once_and_never_held_again(root: Path, lease: Maker) -> None:
    one = lease()
    assert one.try_acquire()
    for _ in range(3):
        one.release()
    before = tree(root)

    assert not one.try_acquire()
    assert one.describe() == "the lease is given back"
    assert tree(root) == before


def test_who_only_waits_or_never_asked_writes_nothing(root: Path, lease: Maker) -> None:
    lease("pod-z").release()
    assert not below(root).exists()
    (below(root) / "1").mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    waiting = lease("pod-b")
    for _ in range(5):
        assert not waiting.try_acquire()
    waiting.release()

    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_only_the_last_two_terms_are_kept(root: Path, lease: Maker) -> None:
    for number in range(1, 6):
        one = lease(f"pod-{number}")
        assert one.try_acquire()
        one.release()

    assert sorted(path.name for path in below(root).iterdir()) == ["4", "5"]


def test_names_that_are_no_terms_are_passed_over(root: Path, lease: Maker) -> None:
    for name in ("0", "01", "-3", "x", ".staging-9", "٣"):
        (below(root) / name).mkdir(parents=True)

    assert lease().try_acquire()
    assert record(root, 1)["holder"] == "pod-a"


@pytest.mark.parametrize(
    "content", [b'{"schema": 2, "by": "a newer version"}', b"{", b"\xff", b"[" * 9000, b"x" * 100_000]
)
def test_a_record_that_cannot_be_read_is_a_holder_and_stays_where_it_is(
    root: Path, lease: Maker, clock: Clock, content: bytes
) -> None:
    (below(root) / "7").mkdir(parents=True)
    (below(root) / "7" / "lease.json").write_bytes(content)
    one = lease()

    assert not one.try_acquire()
    clock.now += DURATION - 1
    assert not one.try_acquire()
    assert "term 7, held by somebody" in one.describe()
    (below(root) / "7" / "lease.json").write_bytes(b'{"schema": 2, "by": "a newer version", "n": 1}')
    assert not one.try_acquire()
    clock.now += DURATION - 1
    assert not one.try_acquire()
    clock.now += 1

    assert one.try_acquire()
    assert (below(root) / "7" / "lease.json").exists()
    assert not (root / "v1" / "quarantine").exists()


def test_a_link_in_place_of_the_record_is_not_followed(root: Path, lease: Maker, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"schema":1,"holder":"x","group":"y","count":0,"released":true}')
    (below(root) / "1").mkdir(parents=True)
    (below(root) / "1" / "lease.json").symlink_to(tmp_path / "elsewhere")

    assert not lease().try_acquire(), "the record at the other end says that it was released"


def test_a_holder_renews_and_the_others_go_on_waiting(root: Path, lease: Maker, clock: Clock) -> None:
    one, other = lease("pod-a"), lease("pod-b")
    assert one.try_acquire()
    assert not other.try_acquire()

    for count in range(1, 6):
        advance(clock, one)
        assert record(root, 1)["count"] >= count
        assert not other.try_acquire()
        assert one.is_held


def test_a_holder_whose_directory_was_deleted_has_lost_it(root: Path, lease: Maker, clock: Clock) -> None:
    one = lease()
    assert one.try_acquire()
    shutil.rmtree(root / "v1" / "leases")

    clock.now += 1
    until(lambda: one.is_lost)

    assert not one.is_held
    assert one.describe() == "the lease is lost: term 1 is gone from the volume"
    assert one.try_acquire()
    assert (one.is_held, one.is_lost) == (True, False)


def test_a_holder_that_finds_a_later_term_has_lost_it(root: Path, lease: Maker, clock: Clock) -> None:
    one = lease()
    assert one.try_acquire()
    (below(root) / "2").mkdir()

    clock.now += 1
    until(lambda: one.is_lost)

    assert "term 2, held by somebody who has not said who" in one.describe()
    assert not one.try_acquire()


def test_a_holder_that_cannot_renew_has_lost_it_at_its_deadline_and_not_before(
    root: Path, lease: Maker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lease()
    assert one.try_acquire()
    refusals = threading.Semaphore(0)

    def refuse(*_: Any, **__: Any) -> None:
        refusals.release()
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(os, "rename", refuse)
    clock.now += DEADLINE - 1
    assert refusals.acquire(timeout=PATIENCE_SECONDS)
    clock.now += 0.5
    assert refusals.acquire(timeout=PATIENCE_SECONDS)
    assert (one.is_held, one.is_lost) == (True, False)
    clock.now += 0.5

    assert (one.is_held, one.is_lost) == (False, True)
    until(lambda: "ago" in one.describe())
    one.release()
    assert not list(below(root).rglob(".staging*"))
    assert record(root, 1) == {**record(root, 1), "count": 0, "released": False}


# Processes that stand still between two operations.


class Interrupted(VolumeReader):
    """A reader in whose next look something happens after the record was read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.meanwhile: Callable[[], object] | None = None

    def read(self, parts: tuple[str, ...], limit: int) -> bytes:
        data = super().read(parts, limit)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return data


def before_mkdir(monkeypatch: pytest.MonkeyPatch, name: str, meanwhile: Callable[[], object]) -> None:
    """Let something happen before the directory of this name is made for the first time."""
    real, waiting = os.mkdir, [meanwhile]

    def mkdir(path: Any, *arguments: Any, **named: Any) -> None:
        if path == name and waiting:
            waiting.pop()()
        real(path, *arguments, **named)

    monkeypatch.setattr(os, "mkdir", mkdir)


def test_a_process_that_stood_still_during_its_look_takes_nothing_from_a_living_holder(
    root: Path, lease: Maker, clock: Clock
) -> None:
    one, reader = lease("pod-a"), Interrupted(root)
    other = lease("pod-b", reader=reader)
    assert one.try_acquire()
    assert not other.try_acquire()

    def stand_still() -> None:
        for _ in range(2):
            advance(clock, one)

    reader.meanwhile = stand_still

    assert not other.try_acquire()
    assert not other.try_acquire()
    assert one.is_held


def test_a_look_that_ended_late_counts_from_its_end(root: Path, lease: Maker, clock: Clock) -> None:
    reader = Interrupted(root)
    other = lease("pod-b", reader=reader)
    assert lease("pod-a").try_acquire()

    def stand_still() -> None:
        clock.now += DURATION

    reader.meanwhile = stand_still
    assert not other.try_acquire()

    assert "unmoving for 0 s" in other.describe()


def test_a_process_that_stood_still_before_it_took_a_term_that_has_come_and_gone_takes_nothing(
    root: Path, lease: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others_come_and_go() -> None:
        for number in range(1, 4):
            one = lease(f"other-{number}")
            assert one.try_acquire()
            one.release()
        assert not (below(root) / "1").exists()

    before_mkdir(monkeypatch, "1", others_come_and_go)
    late = lease("late")

    assert not late.try_acquire()
    assert sorted(path.name for path in below(root).iterdir()) == ["2", "3"]
    assert late.try_acquire()
    assert record(root, 4)["holder"] == "late"


def test_a_process_that_stood_still_while_it_took_the_lease_does_not_hold_it(
    root: Path, lease: Maker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_still() -> None:
        clock.now += DEADLINE

    before_mkdir(monkeypatch, "1", stand_still)
    one = lease()

    assert not one.try_acquire()
    assert (one.is_held, one.is_lost) == (False, True)


def test_a_lease_that_was_reported_as_lost_does_not_come_back_with_a_late_renewal(
    root: Path, lease: Maker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lease()
    assert one.try_acquire()
    real, writing, written = os.rename, threading.Event(), threading.Event()

    def rename(*arguments: Any, **named: Any) -> None:
        writing.set()
        assert written.wait(PATIENCE_SECONDS)
        real(*arguments, **named)

    monkeypatch.setattr(os, "rename", rename)
    clock.now += 5
    assert writing.wait(PATIENCE_SECONDS)
    clock.now += 5
    assert one.is_lost
    written.set()

    until(lambda: record(root, 1)["count"] == 1)
    until(lambda: "took too long" in one.describe())
    assert (one.is_held, one.is_lost) == (False, True)


# Volumes that cannot be written, or do not answer.


@pytest.mark.parametrize("name", ["EROFS", "EACCES", "ENOSPC", "EDQUOT", "EIO"])
def test_a_volume_that_cannot_be_written_is_an_error_of_its_own(
    root: Path, lease: Maker, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    code = getattr(errno, name)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    one = lease()
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", refuse)
        with pytest.raises(VolumeError, match=rf"\({name}\).*The lease on tuning was not taken"):
            one.try_acquire()

    assert (one.is_held, one.is_lost) == (False, False)
    assert one.try_acquire()


def test_a_volume_that_fills_up_under_the_first_record_only_delays_the_others(
    root: Path, lease: Maker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one, other = lease("pod-a"), lease("pod-b")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        with pytest.raises(VolumeError, match="ENOSPC"):
            one.try_acquire()
    assert not one.is_held

    assert not other.try_acquire()
    clock.now += DURATION
    assert other.try_acquire()


def test_a_read_only_mount_is_an_error(root: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs to mount (unshare -rm)")
    body = """
try:
    lease_of("pod-a").try_acquire()
except VolumeError as problem:
    print(problem)
"""
    mount = f'mount --bind {root} {root} && mount -o remount,ro,bind {root}; exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-c", LEASE_CHILD + body, str(root)]

    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=60, check=True)

    assert "is mounted read-only (EROFS). The lease on tuning was not taken" in done.stdout


@pytest.mark.parametrize("name", ["v1/leases", "v1/leases/dir"])
def test_a_file_where_a_directory_belongs_is_an_error(root: Path, lease: Maker, name: str) -> None:
    path = below(root) if name.endswith("dir") else root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")

    with pytest.raises(VolumeError, match="Remove it; only directories belong here"):
        lease().try_acquire()


def test_a_bug_reaches_the_caller(root: Path, lease: Maker) -> None:
    reader = Interrupted(root)
    (below(root) / "1").mkdir(parents=True)
    (below(root) / "1" / "lease.json").write_bytes(b"{}")
    reader.meanwhile = lambda: 1 // 0

    with pytest.raises(ZeroDivisionError):
        lease(reader=reader).try_acquire()


def test_names_that_are_no_digests_are_a_bug(root: Path) -> None:
    with pytest.raises(ValueError, match="not digests"):
        TuningLease(VolumeReader(root), "../..", PLAN, "pod-a", "g")


def test_a_volume_that_hangs_holds_up_nobody_and_its_late_answer_is_found(
    root: Path, lease: Maker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    before_mkdir(monkeypatch, "1", lambda: answers.wait(PATIENCE_SECONDS))
    one = lease()

    assert not one.try_acquire()
    clock.now += 3
    assert not one.try_acquire()
    assert one.describe() == "nobody holds the lease; the volume has not answered for 3 s"
    assert threading.active_count() < 10
    answers.set()

    until(one.try_acquire)


def test_a_lease_that_was_given_back_while_the_volume_hung_is_released_with_its_answer(
    root: Path, lease: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    before_mkdir(monkeypatch, "1", lambda: answers.wait(PATIENCE_SECONDS))
    one = lease()
    assert not one.try_acquire()

    one.release()
    assert not one.is_held
    answers.set()

    until(lambda: (below(root) / "1" / "lease.json").exists() and record(root, 1)["released"])
    assert lease("pod-b").try_acquire()


def test_a_process_whose_volume_hangs_can_end(root: Path) -> None:
    body = """
import os, threading
os.mkdir = lambda *_, **__: threading.Event().wait()
lease = lease_of("pod-a")
print(lease.try_acquire())
lease.release()
"""
    assert ended(child(body, root)) == "False\n"


# Real processes.


def test_of_sixteen_processes_that_start_together_one_gets_it_each_time(root: Path) -> None:
    body = """
import os, shutil
for round in range(15):
    gate, opener = os.pipe()
    children = []
    for number in range(16):
        child = os.fork()
        if child == 0:
            os.close(opener)
            lease = lease_of(f"pod-{number}")
            os.read(gate, 1)
            while not (lease.try_acquire() or "held by pod" in lease.describe()):
                pass
            os._exit(17 if lease.is_held else 0)
        children.append(child)
    os.close(opener)
    os.close(gate)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(codes.count(17), codes.count(0))
    shutil.rmtree(Path(sys.argv[1]) / "v1" / "leases")
"""
    assert ended(child(body, root)).splitlines() == ["1 15"] * 15


KILLED = """
import os, signal, shutil, threading

left = -1
def counted(function):
    def call(*args, **named):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*args, **named)
    return call

def live_and_die(phase, number):
    global left
    for name in ("open", "mkdir", "write", "fsync", "rename", "unlink", "rmdir", "close", "listdir", "chmod", "fchmod"):
        setattr(os, name, counted(getattr(os, name)))
    lease = lease_of("killed", 15000, 10000, 3600 if phase != "renew" else 0.01)
    left = number if phase == "take" else -1
    while not lease.try_acquire():
        pass
    if phase == "release":
        left = number
        lease.release()
    elif phase == "renew":
        renewed = int(lease._count)
        left = number
        while lease._count < renewed + 2:
            pass
    os._exit(0)

number = 0
while True:
    child = os.fork()
    if child == 0:
        live_and_die(sys.argv[2], number)
    was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    now = 0.0
    other = lease_of("other", 15, 10, 2, clock=lambda: now)
    is_free = other.try_acquire()
    if not is_free:
        now = 14.9
        assert not other.try_acquire(), number
        now = 15.0
        assert other.try_acquire(), (number, other.describe())
    print(was_killed, is_free)
    other.release()
    shutil.rmtree(Path(sys.argv[1]) / "v1" / "leases")
    if not was_killed:
        break
    number += 1
"""


@pytest.mark.parametrize("phase", ["take", "renew", "release"])
def test_a_holder_killed_at_any_operation_delays_the_others_by_the_duration_at_most(root: Path, phase: str) -> None:
    rows = [line.split() for line in ended(child(KILLED, root, phase)).splitlines()]

    killed, free = [row[0] for row in rows], [row[1] for row in rows]
    assert killed == ["True"] * (len(rows) - 1) + ["False"]
    assert len(rows) > 10
    if phase == "take":
        assert set(free) == {"True", "False"}
        assert free == sorted(free, reverse=True), "free until the directory is made"
    elif phase == "renew":
        assert set(free) == {"False"}
    else:
        assert set(free) == {"True", "False"}
        assert free == sorted(free), "free once the release is there"


HOLDER = """
lease = lease_of("stopped", 0.6, 0.3, 0.1)
while not lease.try_acquire():
    pass
print("held", flush=True)
sys.stdin.readline()
print(lease.is_held, lease.is_lost, flush=True)
sys.stdin.readline()
print(lease.try_acquire(), lease.describe(), flush=True)
"""


def test_a_holder_that_was_stopped_has_lost_it_when_it_goes_on_and_notices_at_once(root: Path) -> None:
    process = child(HOLDER, root)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGSTOP)
    other = TuningLease(VolumeReader(root), IDENTITY.digest, PLAN, "other", "decode-1", LeaseSettings(0.6, 0.3, 0.1))

    until(other.try_acquire)
    process.send_signal(signal.SIGCONT)
    process.stdin.write("go on\n")
    process.stdin.flush()

    assert process.stdout.readline() == "False True\n"
    other.release()
    process.kill()
    process.communicate()


def test_holders_that_are_killed_one_after_the_other_are_followed_until_nobody_is_left(root: Path) -> None:
    body = """
lease = lease_of(sys.argv[2], 1.5, 1.0, 0.05)
while not lease.try_acquire():
    pass
print("held", flush=True)
sys.stdin.readline()
"""
    with selectors.DefaultSelector() as selector:
        for number in range(4):
            process = child(body, root, f"pod-{number}")
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, process)
        for renewals in range(4):
            (holder, _), *_ = selector.select(PATIENCE_SECONDS)
            term = max(int(path.name) for path in below(root).iterdir())
            until(lambda term=term, least=renewals: record(root, term)["count"] >= least)  # type: ignore[misc]
            holder.data.kill()
            assert holder.data.communicate()[0] == "held\n"
            selector.unregister(holder.fileobj)


def test_a_holder_writes_once_in_a_retry_period(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Semaphore(0)
    real = os.rename

    def rename(*arguments: Any, **named: Any) -> None:
        real(*arguments, **named)
        written.release()

    monkeypatch.setattr(os, "rename", rename)
    period, writes = 0.05, 10
    one = TuningLease(VolumeReader(root), IDENTITY.digest, PLAN, "pod-a", "g", LeaseSettings(9, 6, period))

    began = time.monotonic()
    until(one.try_acquire)
    for _ in range(writes):
        assert written.acquire(timeout=PATIENCE_SECONDS)
    took = time.monotonic() - began
    one.release()

    assert took >= (writes - 1) * period
