"""A network file system that can be made to fail while it is mounted: one process per mount, told over its stdin.

Several mounts over one backing directory are several hosts of one file server. The process unmounts and ends when its
stdin does, so that a test that dies leaves nothing mounted.

    with FaultFS(backing, at) as mount:
        mount.inject(Rule(MODIFYING, "v1/*", error="ENOSPC"), Rule(["write"], short=True))
        ...
        assert mount.hits()
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support import fuse
from tests.support.passthrough import PassThrough

ROOT = Path(__file__).parents[2]
#: Operations that need a file system that can be written; the others are in `passthrough.PassThrough`.
MODIFYING = (
    "create", "write", "open_to_write", "mkdir", "unlink", "rmdir", "rename", "link", "symlink", "setattr",
)  # fmt: skip
#: What takes room; removing and renaming work on a full volume.
GROWING = ("create", "write", "mkdir", "link", "symlink")
ANY = ("*",)
_THREADS = 16
_START_SECONDS = 20.0


@dataclass(frozen=True)
class Rule:
    """What goes wrong, where, and how often.

    Args:
        ops: names of operations, or `*`: lookup getattr setattr statfs mkdir symlink link readlink unlink rmdir rename
            open open_to_write create read write close fsync opendir readdir fsyncdir.
        path: a pattern (`fnmatch`, where `*` also matches `/`) for the path below the mount; for a rename the old or
            the new one.
        error: name of the error that is raised, such as ENOSPC.
        kill: before the operation the process that asks for it ("process"), or all of its process group ("group"), is
            killed, and the operation does not happen.
        delay: seconds from and to which the operation is held up.
        short: of a write only the first half is carried out, and its caller is told so.
        damage: "truncate" cuts a file to half when its writer closes it, "flip" changes one bit in its middle.
        skip: so many matches pass unharmed first.
        count: so many matches are harmed; None is for ever.
        chance: of each match to be harmed, from the mount's seeded generator.
    """

    ops: Sequence[str] = ANY
    path: str = "*"
    error: str | None = None
    kill: str | None = None
    delay: tuple[float, float] | None = None
    short: bool = False
    damage: str | None = None
    skip: int = 0
    count: int | None = None
    chance: float = 1.0


class Faults:
    """The rules in force, as the hooks of a mount.

    Args:
        seed: of the generator behind chances and delays.
    """

    def __init__(self, seed: int) -> None:
        self.negative_seconds = 0.0
        self._listing_seconds = 0.0
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._rules: list[Rule] = []
        self._matches: list[int] = []
        self._hits: list[dict[str, Any]] = []
        self._listings: dict[str, tuple[float, set[str]]] = {}

    def replace(self, rules: Sequence[Rule]) -> None:
        """Put these rules in force in place of all others; hits are kept."""
        with self._lock:
            self._rules = list(rules)
            self._matches = [0] * len(self._rules)

    def lag(self, negative_seconds: float, listing_seconds: float) -> None:
        """For how long a denial of a name, and a listing, are believed."""
        with self._lock:
            self.negative_seconds, self._listing_seconds = negative_seconds, listing_seconds
            self._listings.clear()

    def hits(self) -> list[dict[str, Any]]:
        """What was harmed so far, in order."""
        with self._lock:
            return list(self._hits)

    def before(self, op: str, paths: tuple[str, ...], pid: int) -> None:
        for rule in self._struck(op, paths, pid, lambda rule: not (rule.short or rule.damage)):
            if rule.delay is not None:
                with self._lock:
                    seconds = self._random.uniform(*rule.delay)
                time.sleep(seconds)
            if rule.kill is not None:
                with contextlib.suppress(ProcessLookupError):
                    if rule.kill == "group":
                        os.killpg(os.getpgid(pid), signal.SIGKILL)
                    else:
                        os.kill(pid, signal.SIGKILL)
                raise OSError(errno.EIO, "the process was killed before")
            if rule.error is not None:
                raise OSError(getattr(errno, rule.error), rule.error)

    def room(self, path: str, size: int) -> int:
        # A write of one byte cannot be short without being none at all.
        return max(1, size // 2) if self._struck("write", (path,), 0, lambda rule: rule.short) else size

    def after_close(self, path: str, place: str) -> None:
        for rule in self._struck("close", (path,), 0, lambda rule: rule.damage is not None):
            with Path(place).open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                if rule.damage == "truncate":
                    file.truncate(size // 2)
                elif size:
                    file.seek(size // 2)
                    (byte,) = file.read(1)
                    file.seek(size // 2)
                    file.write(bytes([byte ^ 1]))

    def listing(self, path: str, names: list[str]) -> list[str]:
        with self._lock:
            if self._listing_seconds <= 0:
                return names
            now = time.monotonic()
            since, seen = self._listings.get(path, (-self._listing_seconds, set()))
            if now - since >= self._listing_seconds:
                seen = set(names)
                self._listings[path] = (now, seen)
            return sorted(seen)

    def changed(self, path: str, exists: bool) -> None:
        directory, name = os.path.split(path)
        with self._lock:
            if (held := self._listings.get(directory or ".")) is not None:
                (held[1].add if exists else held[1].discard)(name)

    def _struck(self, op: str, paths: tuple[str, ...], pid: int, wanted: Any) -> list[Rule]:
        """The rules of one kind that this operation meets now, each counted and noted."""
        found = []
        with self._lock:
            for index, rule in enumerate(self._rules):
                is_met = (op in rule.ops or "*" in rule.ops or rule.damage is not None) and wanted(rule)
                if not is_met or not any(fnmatch.fnmatchcase(path, rule.path) for path in paths):
                    continue
                if self._random.random() >= rule.chance:
                    continue
                self._matches[index] += 1
                number = self._matches[index] - rule.skip
                if number > 0 and (rule.count is None or number <= rule.count):
                    found.append(rule)
                    self._hits.append({"rule": index, "op": op, "path": paths[-1], "pid": pid})
        return found


class FaultFS:
    """A mount, seen from the test. Use it as a context manager, or close it.

    Args:
        backing: the directory that it shows; made where it is missing.
        at: where to mount it; made where it is missing.
        seed: of the generator behind chances and delays.
        has_locks: whether flock and fcntl locks work.

    Raises:
        OSError: it could not be mounted; `why_not` says beforehand whether it can be.
    """

    def __init__(self, backing: Path, at: Path, seed: int = 0, has_locks: bool = True) -> None:
        self.backing, self.at = backing, at
        for path in (backing, at):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faultfs", str(backing), str(at), str(seed), str(int(has_locks))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A signal for the test's process group, such as Ctrl-C, must not come between a pod and its volume.
            start_new_session=True,
        )
        try:
            self._answer()
        except OSError:
            self.close()
            raise

    def __enter__(self) -> FaultFS:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def inject(self, *rules: Rule) -> None:
        """Put these rules in force, in place of those before; none at all heals the volume."""
        self._ask({"rules": [asdict(rule) for rule in rules]})

    def lag(self, negative_seconds: float = 0, listing_seconds: float = 0) -> None:
        """Let this host see late what others do: a name that it asked for too early, a directory that it listed."""
        self._ask({"lag": [negative_seconds, listing_seconds]})

    def hits(self) -> list[dict[str, Any]]:
        """Each time that a rule struck: its index when it was injected, operation, path and pid."""
        return list(self._ask({"hits": True})["hits"])

    def close(self) -> None:
        """Unmount, also when the process that served the mount is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        while fuse.unmount(self.at):
            pass

    def kill(self) -> None:
        """Let the host's connection to its file server die: operations fail with ENOTCONN until `close`."""
        self._process.kill()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or b'{"errno": 5, "what": "it died"}')
        if "errno" in answer:
            raise OSError(answer["errno"], answer["what"], str(self.at))
        return answer


def why_not() -> str | None:
    """Why no such file system can be mounted here; None if one can."""
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as problem:
        return f"/dev/fuse cannot be opened: {problem.strerror}"
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return None if int(held.split()[1], 16) >> 21 & 1 else "a mount needs CAP_SYS_ADMIN"


def clean_up(top: Path) -> None:
    """Unmount what a killed run left mounted below a directory."""
    for at in fuse.mounts_below(top):
        fuse.unmount(at)


def main(backing: str, at: str, seed: str, has_locks: str) -> None:
    """Serve one mount until stdin ends."""
    os.umask(0)
    # Each object that the kernel knows is an open descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    faults = Faults(int(seed))
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        files = PassThrough(Path(backing), device, faults, has_locks == "1")
        fuse.mount(device, Path(at), backing)
    except OSError as problem:
        print(json.dumps({"errno": problem.errno, "what": str(problem)}), flush=True)
        return
    for _ in range(_THREADS):
        threading.Thread(target=files.connection.serve, daemon=True).start()
    print(json.dumps({"mounted": at}), flush=True)
    try:
        for line in sys.stdin:
            request, answer = json.loads(line), {}
            if "rules" in request:
                faults.replace([Rule(**rule) for rule in request["rules"]])
            if "lag" in request:
                faults.lag(*request["lag"])
            if "hits" in request:
                answer["hits"] = faults.hits()
            print(json.dumps(answer), flush=True)
    finally:
        fuse.unmount(Path(at))
        # Threads that hold operations up are not waited for; closing the device fails those operations.
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
