"""Process groups: the short rendezvous at the end, and the one that tuning in lockstep averages over.

A group is opened only when every rank is known to be there and ready, stays open for seconds, and is destroyed whatever
happens, so that no GPU memory and no communicator outlives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from initwarm.edges import network
from initwarm.errors import BarrierError, ConfigurationError

#: What to do where the control channel works and a collective does not.
DATA_PORTS = (
    "The pods reach the leader, so look at what lies between them: a NetworkPolicy or firewall must allow all ports "
    "inside the group (collectives use ports of their own), and --interface must name the network that they share."
)


@dataclass(frozen=True)
class GroupSpec:
    """Where a process group meets.

    Args:
        host: of the group's store.
        port: of the group's store.
        prefix: of its keys; holds the epoch and the attempt, so that nobody meets an older group.
        backend: `nccl` or `gloo`.
        rank: this process's rank in the group.
        size: number of processes.
        timeout_seconds: for forming the group and for each collective.
    """

    host: str
    port: int
    prefix: str
    backend: str
    rank: int
    size: int
    timeout_seconds: float


@contextlib.contextmanager
def open_group(spec: GroupSpec, device: torch.device) -> Iterator[distributed.ProcessGroup]:
    """The default process group of this process, for as long as the context lasts.

    Raises:
        BarrierError: not all ranks came, or one was lost, within the timeout.
    """
    timeout = timedelta(seconds=spec.timeout_seconds)
    try:
        with network.without_name_servers():
            store = distributed.TCPStore(spec.host, spec.port, is_master=False, timeout=timeout)
        distributed.init_process_group(
            spec.backend,
            store=distributed.PrefixStore(spec.prefix, store),
            rank=spec.rank,
            world_size=spec.size,
            timeout=timeout,
            device_id=device if spec.backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as problem:
        raise _missed(spec, problem) from problem
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def meet(spec: GroupSpec, device: torch.device, digest: str) -> None:
    """Pass the barrier together with all ranks, and only if all of them loaded the same bytes.

    Args:
        spec: the group of all ranks.
        device: this rank's device.
        digest: sha256 hex of what this rank loaded.

    Raises:
        BarrierError: a rank did not come.
        ConfigurationError: a rank loaded other bytes.
    """
    ours = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8).to(
        device if spec.backend == "nccl" else "cpu"
    )
    with open_group(spec, device) as group:
        theirs = [torch.empty_like(ours) for _ in range(spec.size)]
        try:
            distributed.all_gather(theirs, ours, group=group)
            digests = [bytes(one.cpu().tolist()).hex() for one in theirs]
        except RuntimeError as problem:
            raise _missed(spec, problem) from problem
    different = [rank for rank, one in enumerate(digests) if one != digests[0]]
    if different:
        raise ConfigurationError(
            f"Ranks {different} loaded other bytes than rank 0 ({digests[different[0]][:12]} and {digests[0][:12]}).",
            "The barrier was not passed.",
            "Something else writes to the engine root; give initwarm a directory of its own.",
        )


def _missed(spec: GroupSpec, problem: BaseException) -> BarrierError:
    first = str(problem).splitlines()[0][:300] if str(problem) else repr(problem)
    return BarrierError(
        f"Rank {spec.rank} of {spec.size} could not meet the others over {spec.backend} within "
        f"{spec.timeout_seconds:g} s: {first}.",
        "The barrier was not passed.",
        DATA_PORTS,
    )
