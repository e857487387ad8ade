"""How a pod's place and the decision table are shown to a person and to a machine."""

from __future__ import annotations

from typing import Any

from initwarm.environment import shown
from initwarm.places import Explanation, Topology


def render_topology(topology: Topology) -> str:
    """One fact a line, for a person."""
    ranks = "counted at run time" if topology.nproc_per_node is None else str(topology.nproc_per_node)
    lines = [
        f"source          {topology.source}",
        f"group           {topology.group}",
        f"node rank       {topology.node_rank} of {topology.num_nodes}",
        f"ranks per pod   {ranks}",
    ]
    if topology.device_index is not None:
        lines.append(f"device          {topology.device_index}")
    if topology.num_nodes > 1:
        port = "" if topology.leader_port is None else f", port {topology.leader_port}"
        lines.append(f"leader          {topology.leader_address or 'not stated'}{port}")
    return "\n".join(lines)


def render_explanation(explanation: Explanation) -> str:
    """The decision table for a person, and below it the place or the error."""
    width = max(len(row.detector) for row in explanation.rows)
    lines = []
    for row in explanation.rows:
        lines.append(f"{row.detector:{width}}  {row.verdict:9}  {row.why}")
        lines += [f"{'':{width}}             {name}={shown(value)}" for name, value in row.saw.items()]
    if explanation.ignored:
        lines += ["", f"ignored, made from a Service's name: {', '.join(explanation.ignored)}"]
    if explanation.topology is not None:
        lines += ["", render_topology(explanation.topology)]
    if explanation.error is not None:
        lines += ["", f"error: {explanation.error}"]
    return "\n".join(lines)


def explanation_as_json(explanation: Explanation) -> dict[str, Any]:
    """The decision table for a machine."""
    topology, error = explanation.topology, explanation.error
    return {
        "detectors": [
            {
                "detector": row.detector,
                "tier": row.tier,
                "saw": dict(row.saw),
                "verdict": row.verdict,
                "why": row.why,
            }
            for row in explanation.rows
        ],
        "ignored_service_links": list(explanation.ignored),
        "topology": None if topology is None else dict(vars(topology)),
        "error": None if error is None else {"fact": error.fact, "effect": error.effect, "fix": error.fix},
    }
