"""What flags and `INITWARM_*` variables say about this pod's place, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from initwarm.environment import (
    MAX_NODES,
    NO_PLACE,
    Explicit,
    listed,
    parse_group,
    parse_host,
    parse_nproc,
    parse_number,
    shown,
)
from initwarm.errors import TopologyError


@dataclass(frozen=True)
class TopologyFlags:
    """What was given as a flag, or as its `INITWARM_*` variable, as text; None where it was not."""

    source: str | None = None
    nnodes: str | None = None
    node_rank: str | None = None
    nproc_per_node: str | None = None
    leader_address: str | None = None
    port: str | None = None
    group: str | None = None


@dataclass
class _Given:
    """Explicit settings while they are read."""

    flags: TopologyFlags
    environ: Mapping[str, str]
    texts: dict[str, str] = field(default_factory=dict)

    def take(self, attribute: str, flag: str, parse: Callable[[str, str], Any]) -> Any:
        """The parsed value of one setting; a flag beats the variable, and an empty string is unset."""
        variable = "INITWARM_" + flag.upper().replace("-", "_")
        text = getattr(self.flags, attribute) or self.environ.get(variable) or None
        if text is None:
            return None
        name = variable if self.environ.get(variable) == text else "--" + flag
        self.texts[name] = text
        return parse(name, text)


def read_explicit(
    environ: Mapping[str, str], flags: TopologyFlags, sources: Sequence[str]
) -> tuple[Explicit, TopologyError | None]:
    """Check what was told; with an error, only the texts up to the wrong one are kept, for the decision table.

    Args:
        environ: without Service links.
        flags: a flag beats its variable.
        sources: the names that may be forced.
    """
    given = _Given(flags, environ)
    try:
        source = given.take("source", "topology", lambda name, text: _parse_source(name, text, sources))
        num_nodes = given.take("nnodes", "nnodes", lambda name, text: parse_number(name, text, 1, MAX_NODES))
        node_rank = given.take("node_rank", "node-rank", lambda name, text: parse_number(name, text, 0, MAX_NODES - 1))
        nproc = given.take("nproc_per_node", "nproc-per-node", lambda name, text: (parse_nproc(name, text),))
        host, host_port = given.take("leader_address", "leader-address", parse_host) or (None, None)
        port = given.take("port", "port", lambda name, text: parse_number(name, text, 1, 65535))
        group = given.take("group", "group", parse_group)
        _check_explicit(num_nodes, node_rank, port, host_port, given.texts)
    except TopologyError as problem:
        return Explicit(given=given.texts), problem
    return Explicit(
        source=source,
        num_nodes=num_nodes,
        node_rank=node_rank,
        nproc_per_node=nproc[0] if nproc else None,
        has_nproc=nproc is not None,
        leader_address=host,
        leader_port=port or host_port,
        group=group,
        given=given.texts,
    ), None


def _parse_source(name: str, text: str, sources: Sequence[str]) -> str:
    if text not in sources:
        raise TopologyError(
            f"{name} is {shown(text)}, which is no topology source.", NO_PLACE, f"Use one of {', '.join(sources)}."
        )
    return text


def _check_explicit(
    num_nodes: int | None, node_rank: int | None, port: int | None, host_port: int | None, given: Mapping[str, str]
) -> None:
    said = listed(given)
    if num_nodes is not None and node_rank is not None and node_rank >= num_nodes:
        raise TopologyError(
            f"Node rank {node_rank} is no place among {num_nodes} pods ({said}).",
            NO_PLACE,
            f"Node ranks run from 0 to {num_nodes - 1}.",
        )
    if port is not None and host_port is not None and port != host_port:
        raise TopologyError(
            f"The leader's address has port {host_port}, and the port is set to {port} ({said}).",
            "The leader cannot be reached, so nothing was started.",
            "Give the port once.",
        )


def without_links(environ: Mapping[str, str], links: Sequence[str], flags: TopologyFlags) -> TopologyFlags:
    """The flags, less a port that is the text of a Service link: whoever copied INITWARM_PORT could not know."""
    is_link = flags.port is not None and "INITWARM_PORT" in links and environ["INITWARM_PORT"] == flags.port
    return TopologyFlags(**{**vars(flags), "port": None}) if is_link else flags
