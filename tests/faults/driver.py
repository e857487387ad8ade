"""Runs one schedule with real pods in a directory, and writes down what happened for the checker.

Every fault is a script: a generator that yields conditions and acts when they hold. One loop looks at all of them, so
that nothing waits by a clock where it can wait for an event.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.schedule import ERRORS, KINDS, MOUNTED, NETWORKED, PLANS, PRELOADED, Fault, Schedule
from tests.support import faultfs, netns
from tests.support.faultfs import GROWING, MODIFYING, FaultFS, Rule
from tests.support.netns import Network
from tests.support.plans import plan_file
from tests.support.pods import Pod, PodServer, living_processes
from tests.support.volume_faults import VolumeFaults, compile_library

POLL_SECONDS = 0.02
#: A pod may take so long beyond its deadline before the driver ends it; the checker is stricter.
PATIENCE_SECONDS = 12.0
#: The kernel collects what a killed process leaves in this time.
REAP_SECONDS = 10.0
#: The collectives' own patience: longer than a pause that has to be survived, shorter than the deadline after a cut.
COLLECTIVE_SECONDS = 10
#: The deadline of a life without faults that follows.
AGAIN_SECONDS = 60.0
_STEPS = ("tune", "adopt", "prove", "barrier")
_EVENTS = {
    "started": '"initwarm.coordinator.started"',
    "joined": '"initwarm.group.joined"',
    "published": '"initwarm.bundle.published"',
    "passed": '"initwarm.barrier.passed"',
    **{step: f'"initwarm.step.announced", "message": "{step}"' for step in _STEPS},
}
#: What every pod says itself; the rest only the leader says.
_OWN_EVENTS = ("started", "joined")

Condition = Callable[[], bool]
Script = Generator[Condition, None, None]


def why_not() -> dict[str, str]:
    """The kinds of fault that this machine cannot show, each with the reason."""
    missing: dict[str, str] = {}
    if (reason := faultfs.why_not()) is not None:
        missing.update(dict.fromkeys(MOUNTED, reason))
    if (reason := netns.why_not()) is not None:
        missing.update(dict.fromkeys(NETWORKED, reason))
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        missing.update(dict.fromkeys(PRELOADED, "there is no C compiler for the library that is preloaded"))
    return missing


def available() -> frozenset[str]:
    """The kinds of fault that this machine can show."""
    return frozenset(KINDS) - why_not().keys()


@dataclass
class Life:
    """One pod process of a run.

    Args:
        pod: the process.
        node: its node rank.
        role: `member`; `rival` for a second pod of one rank; `old` for a leader of an earlier time.
    """

    pod: Pod
    node: int
    role: str
    pod_uid: str
    started: float
    ended: float | None = None
    is_killed: bool = False
    terminated: float | None = None
    #: When a pause of this process ended; it can end only after that.
    woken: float | None = None
    #: Processes of it that ran when it had ended.
    survivors: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.pod.ended.is_set()


class Theatre:
    """What runs share: the process that pods are forked from, and volumes of earlier lives. Use as context manager.

    Args:
        directory: for all of it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.library: Path | None = None
        with contextlib.ExitStack() as stack:
            # FlashInfer's own lines would be most of each log.
            stack.callback(_restore, "FLASHINFER_LOGGING_LEVEL", os.environ.get("FLASHINFER_LOGGING_LEVEL"))
            os.environ["FLASHINFER_LOGGING_LEVEL"] = "warning"
            if not why_not().keys() & {*PRELOADED}:
                self.library = compile_library(directory)
                before = os.environ.get("LD_PRELOAD")
                os.environ["LD_PRELOAD"] = str(self.library)
                stack.callback(_restore, "LD_PRELOAD", before)
            self.server = PodServer(directory / "workspace")
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._port = 20000 + os.getpid() * 61 % 8000
        self._volumes: dict[tuple[str, int, int], Path] = {}

    def __enter__(self) -> Theatre:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.server.close()

    def port(self) -> int:
        """A port that no other run uses, and that the kernel gives to nobody who asks for any."""
        with self._lock:
            while True:
                self._port += 1
                with socket.socket() as probe, contextlib.suppress(OSError):
                    probe.bind(("0.0.0.0", self._port))
                    return self._port

    def volume(self, plan: str, num_nodes: int, nproc: int) -> Path:
        """A volume as a group of this shape leaves it after a run without faults; to be copied."""
        with self._making:
            key = (plan, num_nodes, nproc)
            if key not in self._volumes:
                directory = self.directory / f"past-{plan}-{num_nodes}-{nproc}"
                directory.mkdir()
                past = Schedule(0, num_nodes, nproc, False, False, "auto", plan, 60.0, "fail", False, False, ())
                with Run(past, directory, self) as run:
                    record = run.play()
                assert all(pod["status"] == 0 for pod in record["pods"]), record
                self._volumes[key] = directory / "cache"
            return self._volumes[key]


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name)
    else:
        os.environ[name] = value


class Run:
    """One schedule on its way. Use as context manager: mounts and networks end with it.

    Args:
        schedule: what is to happen.
        directory: empty, for volumes, engine roots, logs and messages.
        theatre: what pods are forked from.
    """

    def __init__(self, schedule: Schedule, directory: Path, theatre: Theatre) -> None:
        self.schedule = schedule
        self.directory = directory
        self.theatre = theatre
        self.lives: list[Life] = []
        self.restarts = 0
        self.generation = 1
        self.struck: dict[int, float] = {}
        self.notes: dict[int, dict[str, Any]] = {}
        self.mounts: dict[tuple[str, int], FaultFS] = {}
        self.network: Network | None = None
        self.damaged: list[str] = []
        self.before: dict[str, str] = {}
        #: The longest gap between two looks of the driver, which is that of an overloaded machine.
        self.starved_seconds = 0.0
        self._stack = contextlib.ExitStack()
        self._port = 0
        self._began = time.monotonic()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for life in self.lives:
            if not life.is_over or living_processes(life.pod.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(life.pod.pid, signal.SIGKILL)
                life.pod.ended.wait(REAP_SECONDS)
        self._stack.close()

    # Where things lie.

    def backing(self, root: str, node: int) -> Path:
        """The directory that holds a pod's `cache` volume or `engine` root, whatever it is seen through."""
        is_own = root == "engine" or self.schedule.has_own_volumes
        return self.directory / (f"{root}-{node}" if is_own else root)

    def seen(self, root: str, node: int) -> Path:
        """Where the pod sees it."""
        mount = self.mounts.get((root, node))
        return self.backing(root, node) if mount is None else mount.at

    # The course of a run.

    def play(self) -> dict[str, Any]:
        """Run the schedule to its end and return the record of it."""
        schedule = self.schedule
        self._prepare_volumes()
        for fault in schedule.faults:
            self._mount(fault)
            if fault.kind == "cut" and self.network is None:
                self._build_network()
        self._port = 0 if schedule.is_found_by_volume or schedule.num_nodes == 1 else self.theatre.port()
        scripts = [self._script(number, fault) for number, fault in enumerate(schedule.faults)]
        absent = {fault.target for fault in schedule.faults if fault.kind in ("late_pod", "missing_pod", "old_leader")}
        self._began = time.monotonic()
        for node in range(schedule.num_nodes):
            if node not in absent:
                self._start(node)
        self._loop(scripts)
        return self._record(list(schedule.faults))

    def play_again(self) -> dict[str, Any]:
        """Start the whole group once more, with every fault healed, and return the record of that life alone."""
        for mount in self.mounts.values():
            mount.inject()
            mount.lag()
        if self.network is not None:
            for number, fault in enumerate(self.schedule.faults):
                if fault.kind == "cut" and number in self.struck and not fault.variant:
                    self.network.heal(*self._ends_of(fault))
        self.lives, self.struck, self.notes = [], {}, {}
        self.before = {}
        # A lease that a killed life has left stands still for 15 s before it is free.
        self.schedule = replace(self.schedule, deadline_seconds=max(AGAIN_SECONDS, self.schedule.deadline_seconds))
        self.generation += 1
        if self._port:
            self._port = self.theatre.port()
        for node in range(self.schedule.num_nodes):
            self._start(node)
        self._loop([])
        return self._record([])

    def _loop(self, scripts: list[Script]) -> None:
        waiting: list[tuple[Script, Condition]] = [(script, lambda: True) for script in scripts]
        pause = threading.Event()
        before = time.monotonic()
        while True:
            still: list[tuple[Script, Condition]] = []
            for script, condition in waiting:
                if condition():
                    with contextlib.suppress(StopIteration):
                        still.append((script, next(script)))
                else:
                    still.append((script, condition))
            waiting = still
            now = time.monotonic()
            self.starved_seconds, before = max(self.starved_seconds, now - before), now
            for life in self.lives:
                if life.is_over and life.ended is None:
                    life.ended = now
                    if not life.is_killed and (life.pod.status or 0) >= 0:
                        life.survivors = living_processes(life.pod.pid)
                if not life.is_over and now > self._limit(life):
                    os.killpg(life.pod.pid, signal.SIGKILL)
            if not waiting and all(life.ended is not None for life in self.lives):
                break
            pause.wait(POLL_SECONDS)
        self._reap()

    def _limit(self, life: Life) -> float:
        return max(life.started + self.schedule.deadline_seconds, life.woken or 0) + PATIENCE_SECONDS

    def _reap(self) -> None:
        """Give what killed pods have left the time in which it must go."""
        pause = threading.Event()
        end = time.monotonic() + REAP_SECONDS
        for life in self.lives:
            if life.is_killed or (life.pod.status or 0) < 0:
                while (left := living_processes(life.pod.pid)) and time.monotonic() < end:
                    pause.wait(POLL_SECONDS)
                life.survivors = left

    # Pods.

    def _start(self, node: int, role: str = "member", uid: str | None = None, **environ: str) -> Life:
        schedule, seed = self.schedule, self.schedule.seed
        if uid is None:
            uid = f"uid-{seed}-{node}-{self.generation}"
        self.restarts += 1
        name = f"pod-{node}-{self.restarts}"
        arguments = [
            "run", "--cache-root", str(self.seen("cache", node)), "--engine-root", str(self._engine_of(node, role)),
            "--nnodes", str(schedule.num_nodes), "--node-rank", str(node), "--nproc-per-node", str(schedule.nproc),
            "--group", "g" if schedule.has_bundle or seed == 0 else f"g{seed}", "--strategy", schedule.strategy,
            "--deadline", str(schedule.deadline_seconds), "--on-tuning-failure", schedule.on_tuning_failure,
            "--collective-timeout", str(COLLECTIVE_SECONDS), *self._plan(),
        ]  # fmt: skip
        if self._port:
            arguments += ["--leader-address", self._leader_address(), "--port", str(self._port)]
        for number, fault in enumerate(schedule.faults):
            if fault.target == node and role == "member" and self.generation == 1:
                environ.update(self._environ(number, fault))
        placement = None if self.network is None else self.network.pods[node].placement()
        pod = self.theatre.server.start(
            self.directory, name, arguments, {"INITWARM_POD_UID": uid, **environ}, placement=placement
        )
        life = Life(pod, node, role, uid, time.monotonic())
        self.lives.append(life)
        return life

    def _engine_of(self, node: int, role: str) -> Path:
        """Of a second pod of a rank it is another: every pod has an emptyDir of its own."""
        return self.seen("engine", node) if role == "member" else self.directory / f"engine-{node}-{role}"

    def _leader_address(self) -> str:
        return "127.0.0.1" if self.network is None else self.network.pods[0].address

    def _plan(self) -> list[str]:
        path = self.directory / "plan.json"
        if path.exists():
            return ["--plan", str(path)]
        return plan_file(self.directory, *PLANS[self.schedule.plan])

    def _environ(self, number: int, fault: Fault) -> dict[str, str]:
        """What a fault needs in the environment of its target."""
        if fault.kind == "wrong_version":
            self._strike(number)
            return {fault.variant: "99.0"}
        if fault.kind not in PRELOADED:
            return {}
        assert self.theatre.library is not None
        faults = VolumeFaults(self.theatre.library, self.directory / "preloaded.log")
        told = "open:*/bundle.json:116:" if fault.kind == "lost_handle" else "remove:*:16:"
        environ = faults.environment(self.seen("cache", fault.target), [f"{told}{fault.count}"])
        del environ["LD_PRELOAD"]  # every process of the server has it
        return environ

    def current(self, node: int) -> Life:
        """The last process that was started as this node."""
        return [life for life in self.lives if life.node == node and life.role == "member"][-1]

    # Volumes and networks.

    def _prepare_volumes(self) -> None:
        schedule = self.schedule
        nodes = range(schedule.num_nodes)
        for root in {self.backing("cache", node) for node in nodes}:
            if schedule.has_bundle:
                past = self.theatre.volume(schedule.plan, schedule.num_nodes, schedule.nproc)
                shutil.copytree(past, root)
            else:
                root.mkdir()
            self.before.update(_digests(root))
        for number, fault in enumerate(schedule.faults):
            if fault.variant == "at_rest":
                self._damage_at_rest(number, fault)

    def _damage_at_rest(self, number: int, fault: Fault) -> None:
        root = self.backing("cache", fault.target)
        pattern = fault.path.removeprefix("*/")
        paths = sorted(path for path in root.rglob(Path(pattern).name) if path.is_file())
        if fault.path.startswith("v1/rounds"):
            paths = sorted((root / "v1" / "rounds").glob("*.json"))
        for path in paths[:1]:
            data = bytearray(path.read_bytes())
            if fault.kind == "truncated":
                del data[len(data) // 2 :]
            else:
                data[len(data) // 2] ^= 1
            path.write_bytes(data)
            self.damaged.append(str(path))
            self.before.pop(str(path), None)
            self._strike(number)

    def _mount(self, fault: Fault) -> None:
        """Put a failing file system between the target and its directory."""
        if fault.kind not in MOUNTED or fault.variant == "at_rest":
            return
        backing = self.backing(fault.root, fault.target)
        mount = FaultFS(backing, self.directory / f"mount-{fault.root}-{fault.target}", self.schedule.seed)
        self._stack.callback(mount.close)
        self.mounts[fault.root, fault.target] = mount
        rule = _rule(fault)
        if rule is not None:
            mount.inject(rule)
        elif fault.variant == "names":
            mount.lag(negative_seconds=fault.seconds)
        else:
            mount.lag(listing_seconds=fault.seconds)

    def _build_network(self) -> None:
        network = Network(ipv6=False)
        self._stack.callback(network.close)
        for node in range(self.schedule.num_nodes):
            network.add_pod(self.directory, f"node-{node}")
        self.network = network

    def _ends_of(self, fault: Fault) -> tuple[netns.PodNamespace, netns.PodNamespace]:
        assert self.network is not None
        return self.network.pods[fault.target - 1], self.network.pods[fault.target]

    # The scripts.

    def _script(self, number: int, fault: Fault) -> Script:
        scripts: Mapping[str, Callable[[int, Fault], Script]] = {
            "kill": self._kill,
            "terminate": self._terminate,
            "stop": self._stop,
            "torn_rename": self._replace_torn,
            "cut": self._cut,
            "duplicate_rank": self._duplicate,
            "late_pod": self._come_late,
            "missing_pod": self._stay_away,
            "old_leader": self._be_old,
        }
        return scripts.get(fault.kind, self._watch)(number, fault)

    def _strike(self, number: int) -> None:
        self.struck.setdefault(number, time.monotonic() - self._began)

    def _watch(self, number: int, fault: Fault) -> Script:
        """A fault that is there from the start; the record says whether it struck."""
        if fault.kind in ("slow", "stale_listing"):
            self._strike(number)
        yield lambda: True

    def _moment(self, fault: Fault) -> Generator[Condition, None, bool]:
        """Until the moment of a fault has come; False if it never does."""
        teller = fault.target if fault.moment in _OWN_EVENTS else 0
        if fault.moment != "start":
            text, life = _EVENTS[fault.moment], self.current(teller)
            yield lambda: life.is_over or text in life.pod.log
            if text not in life.pod.log:
                return False
        yield self._after(fault.delay)
        return True

    def _after(self, seconds: float) -> Condition:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() >= end

    def _kill(self, number: int, fault: Fault) -> Script:
        if not (yield from self._moment(fault)) or self.current(fault.target).is_over:
            return
        life = self.current(fault.target)
        life.is_killed = True
        self._strike(number)
        (os.kill if fault.variant == "agent" else os.killpg)(life.pod.pid, signal.SIGKILL)
        yield lambda: life.is_over
        yield from self._succeed(fault, life)

    def _terminate(self, number: int, fault: Fault) -> Script:
        if not (yield from self._moment(fault)) or self.current(fault.target).is_over:
            return
        life = self.current(fault.target)
        life.terminated = time.monotonic()
        self._strike(number)
        life.pod.signal(signal.SIGTERM)
        yield lambda: life.is_over
        if life.pod.status != 0:
            yield from self._succeed(fault, life)

    def _succeed(self, fault: Fault, life: Life) -> Script:
        if fault.successor is not None:
            yield self._after(fault.successor_delay)
            uid = life.pod_uid if fault.successor == "same" else f"{life.pod_uid}-new"
            self._start(fault.target, uid=uid)

    def _stop(self, number: int, fault: Fault) -> Script:
        if not (yield from self._moment(fault)) or self.current(fault.target).is_over:
            return
        life = self.current(fault.target)
        self._strike(number)
        life.woken = time.monotonic() + fault.seconds
        os.killpg(life.pod.pid, signal.SIGSTOP)
        yield self._after(fault.seconds)
        life.woken = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(life.pod.pid, signal.SIGCONT)

    def _replace_torn(self, number: int, fault: Fault) -> Script:
        life = self.current(fault.target)
        yield lambda: life.is_over
        if life.pod.status == -signal.SIGKILL:
            life.is_killed = True
            self._strike(number)
            yield from self._succeed(fault, life)

    def _cut(self, number: int, fault: Fault) -> Script:
        assert self.network is not None
        if not (yield from self._moment(fault)) or self.current(fault.target).is_over:
            return
        self._strike(number)
        self.network.cut(*self._ends_of(fault))
        if fault.variant == "heals":
            yield self._after(fault.seconds)
            self.network.heal(*self._ends_of(fault))

    def _duplicate(self, number: int, fault: Fault) -> Script:
        if not (yield from self._moment(fault)):
            return
        self._strike(number)
        self._start(fault.target, "rival", f"uid-rival-{self.schedule.seed}")

    def _come_late(self, number: int, fault: Fault) -> Script:
        yield self._after(fault.seconds)
        self._strike(number)
        self._start(fault.target)

    def _stay_away(self, number: int, fault: Fault) -> Script:
        self._strike(number)
        yield lambda: True

    def _be_old(self, number: int, fault: Fault) -> Script:
        """A leader of an earlier time of the same pod: dead with its record left, still there, or frozen."""
        self._strike(number)
        old = self._start(0, "old", f"uid-{self.schedule.seed}-0-1")
        yield lambda: old.is_over or _EVENTS["joined"] in old.pod.log
        yield self._after(min(fault.seconds, 1.0))
        if fault.variant == "dead":
            old.is_killed = True
            os.killpg(old.pod.pid, signal.SIGKILL)
            yield lambda: old.is_over
        elif fault.variant == "frozen":
            old.woken = time.monotonic() + self.schedule.deadline_seconds
            os.killpg(old.pod.pid, signal.SIGSTOP)
        new = self._start(0)
        if fault.variant == "frozen":
            yield lambda: new.is_over
            old.woken = time.monotonic()
            os.killpg(old.pod.pid, signal.SIGCONT)

    # What is written down.

    def _record(self, faults: list[Fault]) -> dict[str, Any]:
        schedule = self.schedule
        self._collect_hits(faults)
        return {
            "schedule": asdict(schedule),
            "faults": [
                {**asdict(fault), "struck": self.struck.get(number), "notes": self.notes.get(number, {})}
                for number, fault in enumerate(faults)
            ],
            "seconds": time.monotonic() - self._began,
            "starved_seconds": self.starved_seconds,
            "nodes": [
                {
                    "node": node,
                    "engine_root": str(self.backing("engine", node)),
                    "cache_root": str(self.backing("cache", node)),
                    "seen_cache_root": str(self.seen("cache", node)),
                }
                for node in range(schedule.num_nodes)
            ],
            "other_engine_roots": [
                str(self._engine_of(life.node, life.role)) for life in self.lives if life.role != "member"
            ],
            "pods": [self._life_record(life) for life in self.lives],
            "before": self.before,
            "damaged": self.damaged,
        }

    def _collect_hits(self, faults: list[Fault]) -> None:
        for number, fault in enumerate(faults):
            mount = self.mounts.get((fault.root, fault.target))
            if mount is not None and fault.kind in MOUNTED and fault.variant != "at_rest":
                hits = mount.hits()
                if hits:
                    self._strike(number)
                self.notes[number] = {"hits": len(hits), "paths": sorted({hit["path"] for hit in hits})[:20]}
                if fault.kind in ("truncated", "flipped"):
                    self.damaged += [name for hit in hits for name in _final_names(mount.backing / hit["path"])]
            if fault.kind in PRELOADED:
                log = self.directory / "preloaded.log"
                lines = log.read_text().splitlines() if log.exists() else []
                hits = [line for line in lines if line.startswith("fault ")]  # type: ignore[misc]
                if hits:
                    self._strike(number)
                self.notes[number] = {"hits": len(hits)}

    def _life_record(self, life: Life) -> dict[str, Any]:
        message = self.directory / f"{life.pod.name}.message"
        assert life.ended is not None
        return {
            "name": life.pod.name,
            "node": life.node,
            "role": life.role,
            "pod_uid": life.pod_uid,
            "status": life.pod.status,
            "message": message.read_text(errors="replace") if message.exists() else None,
            "log": str(self.directory / f"{life.pod.name}.log"),
            "started": life.started - self._began,
            "ended": life.ended - self._began,
            "is_killed": life.is_killed,
            "terminated": None if life.terminated is None else life.terminated - self._began,
            "woken": None if life.woken is None else life.woken - self._began,
            "survivors": life.survivors,
        }


def _final_names(path: Path) -> list[str]:
    """Under which names a file can lie that was damaged when its writer closed it: it is staged first."""
    staged = next((part for part in path.parts if part.startswith(".staging-")), None)
    if staged is None:
        return [str(path)]
    if path.name == staged:  # a record that is renamed alone
        return [str(path), *map(str, path.parent.glob("*.json"))]
    generation = staged.removeprefix(".staging-")
    return [str(path), *(str(place / path.name) for place in path.parents[1].glob(f"{generation}-*"))]


def _rule(fault: Fault) -> Rule | None:
    """What a mount does for a fault; None where it lags instead."""
    if fault.kind in ERRORS:
        ops = {"full": GROWING, "read_only": MODIFYING, "denied": MODIFYING}.get(fault.kind, ("*",))
        return Rule(ops, fault.path, error=ERRORS[fault.kind], skip=fault.skip, count=fault.count)
    if fault.kind == "short_write":
        return Rule(("write",), fault.path, short=True, skip=fault.skip, count=fault.count)
    if fault.kind == "torn_rename":
        return Rule(("rename",), fault.path, kill="group", skip=fault.skip, count=1)
    if fault.kind in ("truncated", "flipped"):
        damage = "truncate" if fault.kind == "truncated" else "flip"
        return Rule(path=fault.path, damage=damage, skip=fault.skip, count=fault.count)
    if fault.kind == "slow":
        ops = (*MODIFYING, "fsync", "fsyncdir") if fault.variant == "writes" else ("*",)
        return Rule(ops, delay=(0.1, fault.seconds))
    return None


def _digests(root: Path) -> dict[str, str]:
    """SHA-256 of each file of each bundle below a cache root, by path."""
    paths = (path for path in root.glob("v1/*/bundles/*/*/*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@contextlib.contextmanager
def run_directory(keep: Path | None = None) -> Iterator[Path]:
    """A directory for one run; it is removed at the end, or moved aside by whoever wants to keep it."""
    directory = Path(tempfile.mkdtemp(prefix="initwarm-faults-", dir=keep))
    try:
        yield directory
    finally:
        faultfs.clean_up(directory)
        shutil.rmtree(directory, ignore_errors=True)


def perform(schedule: Schedule, directory: Path, theatre: Theatre) -> Iterator[dict[str, Any]]:
    """Run a schedule: the record of its faulty life, and of the life after it where there is one.

    A record is to be judged before the next is asked for, since it speaks of files that the next life replaces.
    """
    with Run(schedule, directory, theatre) as run:
        record = run.play()
        (directory / "record.json").write_text(json.dumps(record, indent=1))
        yield record
        if schedule.is_run_again:
            record = run.play_again()
            (directory / "record-again.json").write_text(json.dumps(record, indent=1))
            yield record
