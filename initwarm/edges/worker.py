"""What runs in a worker process: three jobs, each in a process of its own.

`probe` finds out what this pod has, `tune` measures, and `prove` replays what lies in the engine root, in a process
that has tuned nothing, and then waits to be sent into the barrier. A worker says notes and one result through its
connection; an error leaves as an exception, which elastic's error file carries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from initwarm.edges import barrier, replay, tuning
from initwarm.edges.channel import open_client
from initwarm.edges.entry import settle
from initwarm.errors import LostLeaderError, UnavailableError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from initwarm.edges.barrier import GroupSpec
    from initwarm.plan import Plan


@dataclass(frozen=True)
class ProbeSpec:
    """What to find out: for which kind of device, how many ranks (None: one per GPU), and which one if only one."""

    device: str
    nproc: int | None
    device_index: int | None


@dataclass(frozen=True)
class ProbeResult:
    """What this pod has, one entry per local rank."""

    identity: tuple[Mapping[str, str], ...]
    devices: tuple[str, ...]
    features: Mapping[str, Any]


@dataclass(frozen=True)
class Tickets:
    """A counter on the leader's store from which ranks draw the numbers of units; nobody draws one twice."""

    host: str
    port: int
    key: str


@dataclass(frozen=True)
class TuneSpec:
    """What one rank measures.

    Args:
        rank: in the serving group.
        device_index: of the GPU, ignored on the CPU.
        plan: of the group.
        excluded: tactics that no rank may run, since one killed a worker.
        group: of the ranks whose timings are averaged, or None.
        order: indices of the rank's units, in the order in which to measure them.
        tickets: where ranks that share the units take their numbers in this order, or None.
        until: moment on this machine's monotonic clock after which no unit is begun, or None.
        resume: file of units that are finished already, or None.
        save_to: file that keeps the finished units, also for the next attempt.
        check_outputs: compare each winner with the default tactic.
    """

    rank: int
    device_index: int
    plan: Plan
    excluded: tuple[tuning.Tactic, ...]
    group: GroupSpec | None
    order: tuple[int, ...]
    tickets: Tickets | None
    until: float | None
    resume: str | None
    save_to: str
    check_outputs: bool


@dataclass(frozen=True)
class ProveSpec:
    """What one rank replays: its own file and the store, as the server will find them."""

    rank: int
    device_index: int
    plan: Plan
    v1_path: str
    store_path: str | None


@dataclass(frozen=True)
class Order:
    """What a proven rank is told: to meet in this group, or, with None, to leave."""

    group: GroupSpec | None


def device_of(plan_device: str, index: int) -> torch.device:
    """The one device of a rank."""
    if plan_device == "cuda":
        return torch.device("cuda", index)
    # The ranks of a pod share its cores: with a pool of threads each, they would wait for one another.
    torch.set_num_threads(1)
    return torch.device("cpu")


def probe(conn: Connection, spec: ProbeSpec) -> None:
    """Find out the ranks of this pod, their devices, and the environment that FlashInfer sees on each."""
    settle()
    count = _rank_count(spec)
    first = spec.device_index or 0
    devices = [device_of(spec.device, first + local_rank) for local_rank in range(count)]
    if spec.device == "cuda":
        for device in devices:
            torch.zeros(1, device=device)  # a context can be made in a process like this one
        identity = tuple(tuning.collect_metadata(device) for device in devices)
        names = tuple(str(torch.cuda.get_device_properties(device).uuid) for device in devices)
    else:
        # One CPU is every rank's, and reading the environment takes a third of a second.
        identity = (tuning.collect_metadata(devices[0]),) * count if devices else ()
        names = ("cpu",) * count
    features = tuning.features()
    conn.send(("result", ProbeResult(identity, names, dict(vars(features)))))


def _rank_count(spec: ProbeSpec) -> int:
    if spec.device != "cuda":
        return 1 if spec.nproc is None else spec.nproc
    visible = torch.cuda.device_count()
    wanted = visible if spec.nproc is None else spec.nproc
    if spec.device_index is not None:
        wanted = 1
    if visible == 0:
        raise UnavailableError(
            "The plan needs a GPU and torch sees none.",
            "Nothing was tuned; a CPU is never used instead.",
            "Check the driver, and NVIDIA_VISIBLE_DEVICES or the resource claim of the init container.",
        )
    if wanted + (spec.device_index or 0) > visible:
        raise UnavailableError(
            f"This pod shall contribute {wanted} ranks from device {spec.device_index or 0} on, and torch sees "
            f"{visible} GPUs.",
            "Nothing was tuned.",
            "Make --nproc-per-node equal to the GPUs of the container.",
        )
    return wanted


def tune(conn: Connection, spec: TuneSpec) -> None:
    """Measure this rank's units and send back the files."""
    settle()
    device = device_of(spec.plan.device, spec.device_index)
    with nullcontext() if spec.group is None else barrier.open_group(spec.group, device) as group:
        result = tuning.tune(
            spec.plan.units_of(spec.rank),
            device,
            order=spec.order if spec.tickets is None else _drawn(spec.tickets, spec.order),
            until=spec.until,
            excluded=spec.excluded,
            group=group,
            resume=None if spec.resume is None else Path(spec.resume),
            save_to=Path(spec.save_to),
            check_outputs=spec.check_outputs,
            report=lambda progress: conn.send(("progress", progress)),
        )
    conn.send(("result", result))


def _drawn(tickets: Tickets, order: tuple[int, ...]) -> Iterator[int]:
    """This rank's share of the units, one at a time, until there are no more."""
    store = open_client(tickets.host, tickets.port)
    while True:
        try:
            number = int(store.add(tickets.key, 1)) - 1
        except RuntimeError as problem:
            raise LostLeaderError(f"The leader's counter of units is gone: {problem}.", "Tuning ended.") from problem
        if number >= len(order):
            return
        yield order[number]


def prove(conn: Connection, spec: ProveSpec) -> None:
    """Replay, say how it went, and meet the others if told to."""
    settle()
    device = device_of(spec.plan.device, spec.device_index)
    v1_path = Path(spec.v1_path)
    digest = hashlib.sha256(v1_path.read_bytes()).hexdigest()
    result = replay.replay(
        spec.plan.units_of(spec.rank),
        device,
        v1_path,
        None if spec.store_path is None else Path(spec.store_path),
        lambda progress: conn.send(("progress", progress)),
    )
    conn.send(("result", result))
    order: Order = conn.recv()
    if order.group is not None:
        barrier.meet(order.group, device, digest)
