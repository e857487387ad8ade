"""What a group agreed on in a round that ended warm, for a pod that starts when the others have gone on. Pure.

A pod cannot know its incarnation, so a record is believed by content: where group, sizes, plan and environment are this
pod's own, the named bundle's bytes are what every rank has. A round that finds a bundle adopts it and never tunes
again, which is what makes this sound.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from initwarm.errors import DataError
from initwarm.jsontext import is_digest

SCHEMA = 1
#: The others of the group are looked for so long, without a new arrival, before the record of their round is believed.
ALONE_SECONDS = 10.0
#: Between two looks for it.
RECORD_SECONDS = 2.0


@dataclass(frozen=True)
class RoundRecord:
    """The result of a round.

    Args:
        group: its name.
        nproc: ranks of each pod, in order of node rank.
        plan: digest of the plan.
        identity: digest of the environment.
        bundle: digest of what all ranks have.
        epoch: of the round, for people.
        tool_version: of initwarm, for people.
    """

    group: str
    nproc: tuple[int, ...]
    plan: str
    identity: str
    bundle: str
    epoch: str
    tool_version: str

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return sum(self.nproc)

    def as_json(self) -> dict[str, Any]:
        """The record as JSON, with the version of its schema."""
        return {"schema": SCHEMA, **asdict(self), "nproc": list(self.nproc), "world_size": self.world_size}

    def mismatch(self, group: str, num_nodes: int, node_rank: int, nproc: int, plan: str, identity: str) -> str | None:
        """In what this record differs from a pod that could be of its round; None if in nothing."""
        compared: tuple[tuple[str, Any, Any], ...] = (
            ("group", self.group, group),
            ("number of pods", len(self.nproc), num_nodes),
            ("plan", self.plan, plan),
            ("environment", self.identity, identity),
        )
        for what, theirs, ours in compared:
            if theirs != ours:
                return f"its {what} is {str(theirs)[:16]} and this pod's {str(ours)[:16]}"
        if self.nproc[node_rank] != nproc:
            return f"node rank {node_rank} had {self.nproc[node_rank]} ranks and has {nproc}"
        return None


def parse_round(value: Any) -> RoundRecord | None:
    """A record as it was read; None where it is none, or one of another schema."""
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        return None
    expected = {field.name for field in fields(RoundRecord)}
    if not expected <= value.keys():
        return None
    try:
        record = RoundRecord(**{**{name: value[name] for name in expected}, "nproc": _counts(value["nproc"])})
    except DataError:
        return None
    is_named = all(is_digest(one) for one in (record.plan, record.identity, record.bundle))
    return record if is_named and isinstance(record.group, str) else None


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(one) is int and one >= 0 for one in value):
        raise DataError("the numbers of ranks are not whole numbers")
    return tuple(value)
