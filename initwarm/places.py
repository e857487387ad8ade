"""A pod's place in its group, what one source says about it, and the table of what all sources said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from initwarm.environment import NO_PLACE, PodEnvironment
from initwarm.errors import TopologyError

#: Ends the advice of sources whose pods may as well be replicas that know nothing of each other.
INDEPENDENT = "where each pod serves on its own, set INITWARM_TOPOLOGY=single"


@dataclass(frozen=True)
class Topology:
    """This pod's place; for a launcher's child, this process's place, as if it were a pod of one rank.

    Args:
        source: the detector that gave the rank.
        node_rank: 0 to num_nodes - 1; 0 is the leader.
        num_nodes: pods of the group.
        nproc_per_node: ranks of this pod; None to count its devices at run time. Other pods may have another number.
        device_index: a launcher's child: the one device that this process has.
        leader_address: host name or IP address of node rank 0; None where no source states it.
        leader_port: of the control channel; None for the default.
        group: name of the group, the same on all its pods; at most 128 letters, digits, `.`, `_` and `-`.
    """

    source: str
    node_rank: int
    num_nodes: int
    nproc_per_node: int | None
    device_index: int | None
    leader_address: str | None
    leader_port: int | None
    group: str


@dataclass(frozen=True)
class Process:
    """A launcher's child: one rank among processes instead of a pod among pods."""

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Reading:
    """What one source says about this pod; None where it does not tell.

    Args:
        node_rank: this pod's place among the pods of its group.
        num_nodes: how many these are.
        nproc_per_node: ranks of this pod.
        leader_address: host of node rank 0.
        group: a name that all pods of the group compute alike, and no pod of another group.
        process: set where a launcher started this process for one device.
        uncounted: RANK and WORLD_SIZE where nothing says whether they count pods or processes.
        lacks: raised where rank or size are still unknown in the end.
    """

    node_rank: int | None = None
    num_nodes: int | None = None
    nproc_per_node: int | None = None
    leader_address: str | None = None
    group: str | None = None
    process: Process | None = None
    uncounted: tuple[int, int | None] | None = None
    lacks: TopologyError | None = None


def is_same_place(one: Reading, other: Reading) -> bool:
    """Whether two readings can both be true; what one of them leaves open is no difference."""
    if _has_pod_without_process(one, other) or _has_pod_without_process(other, one):
        return False
    pairs = (
        (one.node_rank, other.node_rank),
        (one.num_nodes, other.num_nodes),
        (one.nproc_per_node, other.nproc_per_node),
    )
    return all(left == right or left is None or right is None for left, right in pairs)


def _has_pod_without_process(launcher: Reading, pods: Reading) -> bool:
    """Whether a launcher started fewer processes than there are pods."""
    if launcher.process is None or pods.num_nodes is None:
        return False
    return pods.num_nodes > launcher.process.world_size


def lacks(fact: str, fix: str) -> TopologyError:
    """What to say where a source turns out not to tell enough."""
    return TopologyError(fact, NO_PLACE, fix)


@dataclass(frozen=True)
class Detector:
    """One source.

    Args:
        name: as `--topology` takes it.
        tier: `explicit`, `launcher`, `framework`, `generic` or `none`; precedence is the order of the table.
        looks_for: what makes a pod its own, in words.
        read: None if the pod is none of its own; raises TopologyError if it is and a value makes no sense.
        part_of: frameworks that build on this source and number their pods themselves, so that what it would say of
            their pods is not about the group.
        agrees: whether its reading and one of higher precedence can both be true.
    """

    name: str
    tier: str
    looks_for: str
    read: Callable[[PodEnvironment], Reading | None]
    part_of: tuple[str, ...] = ()
    agrees: Callable[[Reading, Reading], bool] = is_same_place


@dataclass(frozen=True)
class Row:
    """One source in the decision table.

    Args:
        saw: what it read and found set, by variable or flag. No other value of the environment is ever shown.
        verdict: `believed`, `agrees`, `completes`, `conflicts`, `refused`, `set aside`, `absent`, `not asked`, or
            `matched` where an error elsewhere left nothing to decide.
        why: the reason, in words.
    """

    detector: str
    tier: str
    saw: Mapping[str, str]
    verdict: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """The decision table, and what came of it: a topology or an error, never both.

    Args:
        ignored: variables that look like settings and that Kubernetes made from a Service's name.
    """

    rows: tuple[Row, ...]
    ignored: tuple[str, ...]
    topology: Topology | None
    error: TopologyError | None
