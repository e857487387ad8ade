"""Plans on disk: the built-in one by name, or a file."""

from __future__ import annotations

from pathlib import Path

from initwarm.errors import PlanError
from initwarm.hostplan import host_plan
from initwarm.plan import Plan
from initwarm.planfile import MAX_PLAN_BYTES, parse_plan

BUILT_IN = "host"
ENTRY_POINTS = "initwarm.calls"


def added_calls() -> frozenset[str]:
    """Names of the calls that other installed packages add; their code is not imported here."""
    # Here and not above: it costs more than all the rest of `initwarm plan host`, which needs none of it.
    from importlib import metadata

    return frozenset(point.name for point in metadata.entry_points(group=ENTRY_POINTS))


def load_plan(name: str) -> Plan:
    """The built-in plan of this name, or the one in this file.

    Raises:
        PlanError: there is no such file, it cannot be read, or it is no valid plan.
    """
    if name == BUILT_IN:
        return host_plan()
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_PLAN_BYTES + 1)
    except OSError as problem:
        raise PlanError(
            f"The plan {name!r} cannot be read: {problem.strerror}.",
            "No plan was loaded.",
            f"Give the path of a plan file, or `{BUILT_IN}` for the built-in one.",
        ) from problem
    return parse_plan(data.decode(errors="replace"), name, extra_calls=added_calls())
