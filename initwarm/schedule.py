"""In which order units are tuned, and how long the rest will take. Pure.

The cost of a unit is estimated from its tensors: every tactic reads them all and multiplies the weights with each
token. Only ratios matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from initwarm.plan import Unit
from initwarm.signatures import TOKENS


def estimated_cost(unit: Unit) -> float:
    """How long measuring a unit takes, in units of no meaning of their own."""
    return unit.num_bytes + unit.bucket * _weight_bytes(unit)


def _weight_bytes(unit: Unit) -> int:
    """Bytes of the tensors whose size does not depend on the number of tokens."""
    return sum(tensor.num_bytes(1) for tensor in unit.call.tensors.values() if TOKENS not in tensor.shape)


def by_cost(units: Sequence[Unit]) -> list[int]:
    """Indices of units, dearest first, so that ranks that share the work end at about the same time."""
    return sorted(range(len(units)), key=lambda index: (-estimated_cost(units[index]), index))


def by_gain(units: Sequence[Unit]) -> list[int]:
    """Indices of units in the order of what a server gains from them for the time that they take.

    Small numbers of tokens first, since decoding asks for them with every token and they are cheap to measure; of one
    number, the calls with the largest weights first.
    """
    return sorted(range(len(units)), key=lambda index: (units[index].bucket, -_weight_bytes(units[index]), index))


def seconds_left(units: Sequence[Unit], done: Sequence[int], elapsed_seconds: float) -> float | None:
    """How long the units that are not done will take, by the cost of those that are; None before the first."""
    costs = [estimated_cost(unit) for unit in units]
    spent = sum(costs[index] for index in done)
    if spent == 0:
        return None
    return elapsed_seconds * (sum(costs) - spent) / spent
