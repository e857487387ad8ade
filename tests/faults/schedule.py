"""What goes wrong in a run, when and where: a pure function of a seed.

schedule(seed)              one run: the group, its plan, its volume, and its faults
seeds(seed, count)          the seeds of the runs of a suite; the kinds of fault take turns
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

#: Faults of a file system are injected by a FUSE mount, those of `PRELOADED` by a library, `cut` in namespaces.
MOUNTED = (
    "full", "read_only", "io_error", "denied", "short_write", "torn_rename", "truncated", "flipped", "slow",
    "stale_listing",
)  # fmt: skip
PRELOADED = ("lost_handle", "kept_files")
NETWORKED = ("cut",)
PLAIN = (
    "none", "kill", "terminate", "stop", "duplicate_rank", "late_pod", "missing_pod", "old_leader", "wrong_version",
)  # fmt: skip
KINDS = (*PLAIN, *MOUNTED, *PRELOADED, *NETWORKED)
#: Faults of one process that leave the rest of the group alone, and may come together with one of the volume.
_OF_A_PROCESS = ("kill", "terminate", "stop")
_NEEDS_PEERS = ("old_leader", "duplicate_rank", "late_pod", "missing_pod", "wrong_version", "cut")
#: Errors of the kinds that are one error of the file system.
ERRORS = {"full": "ENOSPC", "read_only": "EROFS", "io_error": "EIO", "denied": "EACCES"}

#: Calls of `faults.op`; each tactic of each bucket takes `seconds` to measure.
PLANS: dict[str, tuple[dict[str, Any], ...]] = {
    "quick": tuple({"name": f"q{n}", "tactics": 2, "seconds": 0.03, "buckets": [1, 2]} for n in range(2)),
    "medium": tuple({"name": f"m{n}", "tactics": 2, "seconds": 0.05, "buckets": [1, 2, 4]} for n in range(3)),
    "long": tuple({"name": f"l{n}", "tactics": 2, "seconds": 0.15, "buckets": [1, 2, 4]} for n in range(3)),
    "ranked": ({"name": "r0", "tactics": 2, "seconds": 0.05, "buckets": [1, 2], "rank_in_key": True},),
    "failing": ({"name": "f0", "tactics": 3, "seconds": 0.05, "buckets": [1, 2], "raises": "most"},),
}
#: Steps of a round with and without a bundle, and what is said between them.
_COLD_MOMENTS = ("started", "joined", "tune", "published", "adopt", "prove", "barrier", "passed")
_WARM_MOMENTS = ("started", "joined", "adopt", "prove", "barrier", "passed")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        kind: one of `KINDS`.
        target: node rank of the pod that it befalls.
        moment: the event of the run after which it happens; `start` is the start of the group.
        delay: seconds from that event.
        seconds: how long it lasts, where it ends; for a late pod, how late.
        root: which directory it befalls: the `cache` volume, or the `engine` root.
        path: pattern of paths below it.
        skip: so many operations that match pass unharmed.
        count: so many are harmed; None is for ever.
        variant: of the kind.
        successor: who comes after a pod that has ended: `same` is its container once more, `new` another pod of its
            rank, None is nobody.
        successor_delay: seconds from the end of the pod to its successor's start.
    """

    kind: str
    target: int = 0
    moment: str = "start"
    delay: float = 0.0
    seconds: float = 0.0
    root: str = "cache"
    path: str = "*"
    skip: int = 0
    count: int | None = None
    variant: str = ""
    successor: str | None = None
    successor_delay: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """One run.

    Args:
        seed: from which all of it follows.
        num_nodes: pods.
        nproc: ranks of each.
        has_own_volumes: each pod has a cache volume of its own, instead of one for all.
        is_found_by_volume: pods are told no address, so that only the volume says where the leader is.
        strategy: who measures.
        plan: one of `PLANS`.
        deadline_seconds: of every pod.
        on_tuning_failure: `continue` or `fail`.
        has_bundle: an earlier life of the same group has left its bundle and its record on the volume.
        is_run_again: afterwards the group is started once more, without any fault.
        faults: none, one or two.
    """

    seed: int
    num_nodes: int
    nproc: int
    has_own_volumes: bool
    is_found_by_volume: bool
    strategy: str
    plan: str
    deadline_seconds: float
    on_tuning_failure: str
    has_bundle: bool
    is_run_again: bool
    faults: tuple[Fault, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.num_nodes * self.nproc


def seeds(seed: int, count: int) -> list[int]:
    """The seeds of so many runs; neighbours have different kinds, so that every kind comes as often as any other."""
    found = []
    for number in range(count):
        drawn = int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:5], "big")
        found.append(drawn - drawn % len(KINDS) + number % len(KINDS))
    return found


def schedule(seed: int, available: Collection[str] = KINDS) -> Schedule:
    """The run of a seed.

    Args:
        seed: its remainder by the number of kinds says the kind of its first fault.
        available: kinds that this machine can show; another of these takes the place of one that it cannot.
    """
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    if kind not in available:
        kind = draw.choice(sorted(available))
    num_nodes = draw.choice((2, 2, 3)) if kind in _NEEDS_PEERS else draw.choice((1, 2, 2, 3))
    nproc = draw.choice((1, 1, 2))
    has_own_volumes = num_nodes > 1 and draw.random() < 0.3 and kind not in ("stale_listing", "old_leader")
    has_bundle = draw.random() < _bundle_share(kind)
    plan = draw.choice(("quick", "medium", "medium", "long", "ranked", "failing"))
    fault = _fault(kind, draw, num_nodes, has_bundle)
    if kind in ("duplicate_rank", "old_leader"):
        plan, has_bundle = "long", False  # the rival must come while the others work
    if fault is not None and fault.variant == "too_late":
        has_bundle = False  # the others would go on with the record of their earlier life
    faults: tuple[Fault, ...] = () if fault is None else (fault,)
    if kind in MOUNTED and kind != "torn_rename" and draw.random() < 0.15:
        faults = (*faults, _of_a_process(draw.choice(_OF_A_PROCESS), draw, num_nodes, has_bundle))
    return Schedule(
        seed=seed,
        num_nodes=num_nodes,
        nproc=nproc,
        has_own_volumes=has_own_volumes,
        is_found_by_volume=_is_found_by_volume(faults, draw)
        and num_nodes > 1
        and not has_own_volumes
        and not has_bundle,
        strategy=_strategy(draw, num_nodes * nproc, plan),
        plan=plan,
        deadline_seconds=_deadline(faults, has_bundle),
        on_tuning_failure=draw.choice(("continue", "continue", "continue", "fail")),
        has_bundle=has_bundle,
        is_run_again=draw.random() < 0.25,
        faults=faults,
    )


def _bundle_share(kind: str) -> float:
    return {"lost_handle": 1.0, "truncated": 0.6, "flipped": 0.6, "read_only": 0.5, "full": 0.5}.get(kind, 0.25)


def _is_found_by_volume(faults: Sequence[Fault], draw: random.Random) -> bool:
    """Only where the address record itself is not what fails."""
    share = 0.3 if draw.random() < 0.3 else 0.0
    kinds = {fault.kind for fault in faults}
    if any(fault.kind == "old_leader" and fault.variant != "dead" for fault in faults):
        return True
    return share > 0 and not kinds & {*MOUNTED, "cut"}


def _strategy(draw: random.Random, world_size: int, plan: str) -> str:
    if world_size == 1 or plan == "ranked":
        return "auto"
    return draw.choice(("auto", "auto", "leader", "split", "lockstep", "independent"))


def _fault(kind: str, draw: random.Random, num_nodes: int, has_bundle: bool) -> Fault | None:
    if kind == "none":
        return None
    if kind in _OF_A_PROCESS:
        return _of_a_process(kind, draw, num_nodes, has_bundle)
    if kind in MOUNTED:
        return _of_a_volume(kind, draw, num_nodes, has_bundle)
    if kind in PRELOADED:
        count = draw.choice((1, 2, 0)) if kind == "lost_handle" else 0
        return Fault(kind, draw.randrange(num_nodes), count=count)
    if kind == "cut":
        return _cut(draw, num_nodes, has_bundle)
    if kind == "duplicate_rank":
        return Fault(kind, draw.randrange(num_nodes), "joined", draw.uniform(0, 0.5))
    if kind == "late_pod":
        is_too_late = draw.random() < 0.3
        seconds = draw.uniform(7, 8) if is_too_late else draw.uniform(0.5, 5)
        return Fault(kind, draw.randrange(num_nodes), seconds=seconds, variant="too_late" if is_too_late else "")
    if kind == "old_leader":
        return Fault(kind, 0, seconds=draw.uniform(1, 4), variant=draw.choice(("dead", "alive", "frozen")))
    if kind == "wrong_version":
        return Fault(kind, draw.randrange(num_nodes), variant=draw.choice(("TEST_TOOL_VERSION", "TEST_CUDA_VERSION")))
    return Fault(kind, draw.randrange(num_nodes))


def _of_a_process(kind: str, draw: random.Random, num_nodes: int, has_bundle: bool) -> Fault:
    target = draw.randrange(num_nodes)
    moment, delay = draw.choice(_WARM_MOMENTS if has_bundle else _COLD_MOMENTS), draw.uniform(0, 0.4)
    if kind == "stop":
        is_long = draw.random() < 0.25
        return Fault(
            kind, target, moment, delay, draw.uniform(16, 18) if is_long else draw.uniform(0.5, 6),
            variant="long" if is_long else "",
        )  # fmt: skip
    successor = draw.choice(("same", "same", "new", None))
    variant = draw.choice(("container", "container", "agent")) if kind == "kill" else ""
    return Fault(
        kind, target, moment, delay, variant=variant, successor=successor, successor_delay=draw.uniform(0.1, 1.0)
    )


def _of_a_volume(kind: str, draw: random.Random, num_nodes: int, has_bundle: bool) -> Fault:
    target = draw.choice((0, draw.randrange(num_nodes)))
    root = "engine" if kind not in ("read_only", "stale_listing", "slow") and draw.random() < 0.2 else "cache"
    path = "*"
    if root == "cache" and kind in ("io_error", "denied", "short_write"):
        path = draw.choice(("*", "v1/*", "v1/*/bundles/*", "v1/rounds*", "v1/leases*"))
    if kind in ERRORS:
        is_for_ever = kind in ("full", "read_only") or (root == "cache" and draw.random() < 0.5)
        skip = draw.choice((0, 0, draw.randrange(1, 40)))
        return Fault(kind, target, root=root, path=path, skip=skip, count=None if is_for_ever else draw.randrange(1, 4))
    if kind == "short_write":
        return Fault(kind, target, root=root, path=path, skip=draw.randrange(4), count=draw.choice((1, 3, None)))
    if kind == "torn_rename":
        below = ("*/bundles/*", "v1/rounds/*", "v1/addresses/*", "v1/leases/*", "*")
        path = "flashinfer-*" if root == "engine" else draw.choice(below)
        successor = draw.choice(("same", "same", "new", None))
        return Fault(
            kind, target, root=root, path=path, skip=draw.choice((0, 0, 1)), count=1, variant="container",
            successor=successor, successor_delay=draw.uniform(0.1, 1.0),
        )  # fmt: skip
    if kind in ("truncated", "flipped"):
        # At rest: what an earlier life has left. Otherwise as it is written.
        variant = "at_rest" if has_bundle and root == "cache" else "written"
        path = draw.choice(("*/flashinfer-v1.json", "*/flashinfer-store.json", "*/bundle.json", "v1/rounds/*"))
        return Fault(
            kind, target, root=root, path="*" if root == "engine" else path, skip=draw.choice((0, 0, 1)), count=1,
            variant=variant,
        )  # fmt: skip
    if kind == "slow":
        return Fault(
            kind, target, seconds=draw.choice((0.2, 0.5, 2.0)), variant=draw.choice(("writes", "writes", "all"))
        )
    return Fault(kind, target, seconds=draw.choice((2.0, 5.0, 60.0)), variant=draw.choice(("names", "listings")))


def _cut(draw: random.Random, num_nodes: int, has_bundle: bool) -> Fault:
    """Between the target and the pod before it, which is the leader where there are two."""
    target = draw.randrange(1, num_nodes)
    moment = draw.choice(("start", *(_WARM_MOMENTS if has_bundle else _COLD_MOMENTS)))
    heals = draw.random() < 0.5
    seconds = draw.uniform(0.5, 4) if heals else 0.0
    return Fault("cut", target, moment, draw.uniform(0, 0.4), seconds, variant="heals" if heals else "")


def _deadline(faults: Sequence[Fault], has_bundle: bool) -> float:
    """Long enough for what has to succeed, short where a run can only end by it."""
    return max((_needed(fault, has_bundle) for fault in faults), default=30.0)


def _needed(fault: Fault, has_bundle: bool) -> float:
    if fault.kind == "missing_pod":
        return 40.0 if has_bundle else 10.0
    if fault.variant == "too_late":
        return 10.0
    if fault.kind in ("kill", "terminate", "torn_rename"):
        return 40.0 if fault.successor else 16.0
    if fault.variant == "frozen":
        return 90.0  # its follower gives a silent leader up after 30 s, and then looks for another
    if fault.kind == "stop":
        return 15.0 if fault.variant == "long" else 40.0
    if fault.kind == "cut":
        return 40.0 if fault.variant == "heals" else 24.0
    return 30.0 if fault.kind == "slow" else 40.0
