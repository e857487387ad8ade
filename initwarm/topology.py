"""Where this pod is in its group: `environ -> Topology`, and the table that says why.

Every source of `detectors` is asked. The first that matches is believed, explicit settings before all; they may also
fill in what a source leaves open. A source that matches and disagrees is a conflict, and so is a value that makes no
sense: what is wrong is named, and nothing is guessed. Nothing but the mapping that is given is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from initwarm.detectors import DETECTORS, EXPLICIT, POD_NAME, SINGLE
from initwarm.environment import NO_PLACE, Explicit, PodEnvironment, as_ip, listed, parse_group, service_links
from initwarm.errors import TopologyError
from initwarm.explicit import TopologyFlags, read_explicit, without_links
from initwarm.places import Detector, Explanation, Reading, Row, Topology
from initwarm.topologyview import explanation_as_json, render_explanation, render_topology

__all__ = [
    "Explanation",
    "Row",
    "Topology",
    "TopologyFlags",
    "explain",
    "explanation_as_json",
    "rank_offsets",
    "render_explanation",
    "render_topology",
    "resolve",
    "world_size",
]

POD_IP = "INITWARM_POD_IP"


def resolve(environ: Mapping[str, str], flags: TopologyFlags | None = None) -> Topology:
    """This pod's place in its group.

    Raises:
        TopologyError: it cannot be known, or two sources contradict each other.
    """
    explanation = explain(environ, flags)
    if explanation.error is not None:
        raise explanation.error
    assert explanation.topology is not None
    return explanation.topology


def explain(environ: Mapping[str, str], flags: TopologyFlags | None = None) -> Explanation:
    """How `resolve` comes to its answer; never raises."""
    links = service_links(environ)
    told = {name: value for name, value in environ.items() if name not in links}
    explicit, problem = read_explicit(
        told, without_links(environ, links, flags or TopologyFlags()), [detector.name for detector in DETECTORS]
    )
    findings = [_ask(detector, told, explicit) for detector in DETECTORS]
    topology = None
    if problem is None:
        topology, problem = _decide(findings, told, explicit)
    else:
        findings[0].judge("refused", problem.fact)
    return Explanation(tuple(finding.row() for finding in findings), links, topology, problem)


def rank_offsets(counts: Sequence[int]) -> tuple[int, ...]:
    """The first rank of each pod, from the number of ranks that each pod has, in order of node rank."""
    return tuple(accumulate(counts, initial=0))[:-1]


def world_size(counts: Sequence[int]) -> int:
    """All ranks of a group, from the number that each pod has. Pods may differ, so they are summed."""
    return sum(counts)


@dataclass
class _Finding:
    """One detector's answer, and what became of it."""

    detector: Detector
    saw: Mapping[str, str]
    reading: Reading | None = None
    error: TopologyError | None = None
    verdict: str = ""
    why: str = ""

    @property
    def name(self) -> str:
        return self.detector.name

    @property
    def has_matched(self) -> bool:
        return self.reading is not None or self.error is not None

    def judge(self, verdict: str, why: str) -> None:
        self.verdict, self.why = verdict, why

    def row(self) -> Row:
        return Row(self.name, self.detector.tier, self.saw, self.verdict, self.why)


def _ask(detector: Detector, environ: Mapping[str, str], explicit: Explicit) -> _Finding:
    env = PodEnvironment(environ, explicit)
    finding = _Finding(detector, env.saw)
    try:
        finding.reading = detector.read(env)
    except TopologyError as problem:
        finding.error = problem
        finding.judge("refused", problem.fact)
        return finding
    if finding.reading is None or detector.name == SINGLE:
        finding.judge("absent", f"looks for {detector.looks_for}")
    else:
        finding.judge("matched", f"says {_place(finding.reading)}")
    return finding


def _decide(
    findings: list[_Finding], environ: Mapping[str, str], explicit: Explicit
) -> tuple[Topology | None, TopologyError | None]:
    try:
        asked = _asked(findings, explicit.source)
        for finding in asked:
            if finding.error is not None:
                raise finding.error
        _check_conflicts(asked)
        topology = _merge(asked, environ, explicit)
        _check_pod_ip(topology, environ)
    except TopologyError as problem:
        return None, problem
    return topology, None


def _asked(findings: list[_Finding], forced: str | None) -> list[_Finding]:
    """The sources whose word counts, in order of precedence; the others get their verdict here."""
    if forced is not None:
        return _asked_alone(findings, forced)
    matched = {finding.name: finding for finding in findings if finding.has_matched and finding.name != SINGLE}
    asked = []
    for finding in matched.values():
        owner = next((name for name in finding.detector.part_of if name in matched), None)
        if owner is None:
            asked.append(finding)
        else:
            finding.judge("set aside", f"{owner} builds on it and numbers its pods itself")
    if not any(finding.name != EXPLICIT or _states_place(finding) for finding in asked):
        asked += [finding for finding in findings if finding.name == SINGLE]
    return asked


def _asked_alone(findings: list[_Finding], forced: str) -> list[_Finding]:
    for finding in findings:
        if finding.name not in (EXPLICIT, forced):
            finding.judge("not asked", f"the source is set to {forced}")
    chosen = next(finding for finding in findings if finding.name == forced)
    if not chosen.has_matched:
        problem = TopologyError(
            f"The topology source is set to {forced}, and this pod has nothing of it.",
            NO_PLACE,
            f"It needs {chosen.detector.looks_for}. Set it, or unset --topology and INITWARM_TOPOLOGY.",
        )
        chosen.judge("refused", problem.fact)
        raise problem
    return [finding for finding in findings if finding.name in (EXPLICIT, forced) and finding.has_matched]


def _states_place(finding: _Finding) -> bool:
    reading = finding.reading
    return reading is not None and (reading.node_rank, reading.num_nodes, reading.leader_address) != (None, None, None)


def _check_conflicts(asked: list[_Finding]) -> None:
    for one, other in combinations(asked, 2):
        assert one.reading is not None
        assert other.reading is not None
        if other.detector.agrees(other.reading, one.reading):
            continue
        one.judge("conflicts", f"says {_place(one.reading)}")
        other.judge("conflicts", f"says {_place(other.reading)}")
        believable = ", ".join(finding.name for finding in (one, other))
        raise TopologyError(
            f"{one.name} says {_place(one.reading)} ({listed(one.saw)}), but {other.name} says "
            f"{_place(other.reading)} ({listed(other.saw)}).",
            NO_PLACE,
            f"Correct the wrong one, or set --topology or INITWARM_TOPOLOGY to the one to believe ({believable}).",
        )


def _merge(asked: list[_Finding], environ: Mapping[str, str], explicit: Explicit) -> Topology:
    """One place from the source that is believed and the explicit settings around it."""
    base = next((finding for finding in asked if finding.name != EXPLICIT), None)
    reading = Reading() if base is None or base.reading is None else base.reading
    process = reading.process
    states_rank = explicit.node_rank is not None and process is None
    believed = asked[0] if base is None or (states_rank and base.name != SINGLE) else base
    num_nodes = explicit.num_nodes or reading.num_nodes
    if process is None:
        node_rank, size = _rank_and_size(asked, believed, reading, explicit)
        device_index, nproc = None, explicit.nproc_per_node if explicit.has_nproc else reading.nproc_per_node
    else:
        node_rank, size, device_index, nproc = process.rank, process.world_size, process.local_rank, 1
    group = explicit.group or _group(asked, num_nodes, environ)
    _judge_asked(asked, believed)
    return Topology(
        source=believed.name,
        node_rank=node_rank,
        num_nodes=size,
        nproc_per_node=nproc,
        device_index=device_index,
        leader_address=explicit.leader_address or reading.leader_address,
        leader_port=explicit.leader_port,
        group=group,
    )


def _rank_and_size(asked: list[_Finding], believed: _Finding, reading: Reading, explicit: Explicit) -> tuple[int, int]:
    num_nodes = explicit.num_nodes or reading.num_nodes
    node_rank = reading.node_rank if explicit.node_rank is None else explicit.node_rank
    if node_rank is None and num_nodes == 1:
        node_rank = 0
    if num_nodes is None or node_rank is None:
        problem = reading.lacks or _incomplete(explicit)
        believed.judge("refused", problem.fact)
        raise problem
    if node_rank >= num_nodes:
        believed.judge("refused", f"node rank {node_rank} is no place among {num_nodes} pods")
        evidence = "; ".join(f"{finding.name}: {listed(finding.saw)}" for finding in asked if finding.saw)
        raise TopologyError(
            f"Node rank {node_rank} is no place among {num_nodes} pods ({evidence}).",
            NO_PLACE,
            f"Correct the rank or the number of pods; node ranks run from 0 to {num_nodes - 1}.",
        )
    return node_rank, num_nodes


def _incomplete(explicit: Explicit) -> TopologyError:
    missing = "how many pods its group has" if explicit.num_nodes is None else "which of its group's pods this is"
    return TopologyError(
        f"{listed(explicit.given)} is set, and no source says {missing}.",
        NO_PLACE,
        "Set both INITWARM_NNODES and INITWARM_NODE_RANK, or declare the workload's labels in the pod spec.",
    )


def _group(asked: list[_Finding], num_nodes: int | None, environ: Mapping[str, str]) -> str:
    """A name that all pods of the group compute alike: the workload's, a lone pod's own, or the leader's."""
    readings = [finding.reading for finding in asked if finding.reading is not None and finding.name != EXPLICIT]
    stated = next((reading.group for reading in readings if reading.group), None)
    if stated is not None:
        return parse_group("The name of the group (from the workload)", stated)
    pod = environ.get(POD_NAME)
    if num_nodes == 1 and pod:
        return parse_group(POD_NAME, pod)
    leader = readings[0].leader_address if readings else None
    if leader is None or leader == "localhost" or as_ip(leader) is not None:
        return "default"
    return parse_group("The name of the group (from the leader's host)", leader.split(".")[0])


def _judge_asked(asked: list[_Finding], believed: _Finding) -> None:
    for finding in asked:
        assert finding.reading is not None
        if finding is believed:
            finding.judge("believed", f"says {_place(finding.reading)}")
        elif finding.name == EXPLICIT:
            finding.judge("completes", f"completes what {believed.name} says, and agrees with it")
        else:
            finding.judge("agrees", f"says {_place(finding.reading)}")


def _check_pod_ip(topology: Topology, environ: Mapping[str, str]) -> None:
    """Where both addresses are known, the leader's must be this pod's if and only if this pod is the leader."""
    leader, own = as_ip(topology.leader_address or ""), as_ip(environ.get(POD_IP) or "")
    is_child = topology.device_index is not None
    if leader is None or own is None or leader.version != own.version or leader.is_loopback or is_child:
        return
    if topology.num_nodes > 1 and (leader == own) != (topology.node_rank == 0):
        raise TopologyError(
            f"This pod is node rank {topology.node_rank} by {topology.source}, its {POD_IP} is {own}, and the leader's "
            f"address is {leader}.",
            "Either the rank or the address is another pod's, so nothing was started.",
            "Set the leader's address to that of the pod with node rank 0.",
        )


def _place(reading: Reading) -> str:
    rank, size = reading.node_rank, reading.num_nodes
    parts = []
    if reading.process is not None:
        parts.append(f"rank {reading.process.rank} of {reading.process.world_size} processes")
    if reading.uncounted is not None:
        parts.append(f"RANK {reading.uncounted[0]} and WORLD_SIZE {reading.uncounted[1]}, of pods or of processes")
    if rank is not None:
        parts.append(f"node rank {rank}" if size is None else f"node rank {rank} of {size}")
    elif size is not None:
        parts.append(f"{size} pods")
    if reading.nproc_per_node is not None:
        parts.append(f"{reading.nproc_per_node} ranks per pod")
    return ", ".join(parts) or "nothing of rank or size"
