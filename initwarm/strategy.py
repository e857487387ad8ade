"""Who measures: which strategies are sound for a plan and an environment, and which one `auto` takes.

A strategy that is asked for and unsound is refused with the reason, before any GPU work. New strategies are one more
entry of `_CONDITIONS` and of the order in `_AUTO`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from initwarm.errors import ConfigurationError

LEADER = "leader"
LOCKSTEP = "lockstep"
SPLIT = "split"
#: Strategies in which one measurement serves all ranks of a stage.
SHARED = (LEADER, SPLIT)
INDEPENDENT = "independent"


@dataclass(frozen=True)
class Facts:
    """What decides whether a strategy is sound.

    Args:
        world_size: ranks of the group.
        is_uniform: all ranks make the same calls, apart from those that belong to a pipeline stage.
        has_collectives: some call contains a collective, so that a rank cannot make it alone.
        is_rank_free: no cache key of the plan contains a rank.
        num_units: calls of the plan times their buckets, of the stage that has most.
        has_process_group: FlashInfer can average timings over a process group (0.6.16 and newer).
        flashinfer_version: for the messages.
    """

    world_size: int
    is_uniform: bool
    has_collectives: bool
    is_rank_free: bool
    num_units: int
    has_process_group: bool
    flashinfer_version: str


@dataclass(frozen=True)
class Choice:
    """The strategy of a run, and why the better ones were ruled out."""

    strategy: str
    ruled_out: tuple[str, ...] = ()


def _leader_problem(facts: Facts) -> str | None:
    return None if facts.world_size == 1 else _sharing_problem(facts)


def _split_problem(facts: Facts) -> str | None:
    if facts.world_size == 1:
        return "there is one rank"
    return _sharing_problem(facts)


def _sharing_problem(facts: Facts) -> str | None:
    """Why what one rank measures cannot serve the others."""
    if facts.has_collectives:
        return "the plan has calls that contain collectives, which no rank can make alone"
    if not facts.is_rank_free:
        return "cache keys of this plan may contain ranks, so the others would miss"
    if not facts.is_uniform:
        return "the plan's shapes depend on the rank, so the others would miss"
    return None


def _lockstep_problem(facts: Facts) -> str | None:
    if not facts.has_process_group:
        return f"FlashInfer {facts.flashinfer_version} has no set_autotune_process_group (0.6.16 and newer have)"
    if not facts.is_uniform:
        return "the ranks make different calls, so their timings cannot be averaged"
    return None


def _independent_problem(facts: Facts) -> str | None:
    if facts.has_collectives and facts.world_size > 1:
        return "the plan has calls that contain collectives, which no rank can make alone"
    return None


def _is_too_small_to_split(facts: Facts) -> str | None:
    if facts.num_units < facts.world_size:
        return f"the plan has {facts.num_units} units for {facts.world_size} ranks"
    return None


_CONDITIONS: Mapping[str, Callable[[Facts], str | None]] = {
    LEADER: _leader_problem,
    SPLIT: _split_problem,
    LOCKSTEP: _lockstep_problem,
    INDEPENDENT: _independent_problem,
}
_AUTO = (SPLIT, LEADER, LOCKSTEP, INDEPENDENT)
#: What is sound, and still not worth it where nobody asked for it.
_NOT_WORTH: Mapping[str, Callable[[Facts], str | None]] = {SPLIT: _is_too_small_to_split}


def choose(asked: str, facts: Facts, tried: Sequence[str] = ()) -> Choice:
    """The strategy to use.

    Args:
        asked: one of the strategies, or `auto`.
        facts: of the group.
        tried: those whose result did not stand the proof in this run.

    Raises:
        ConfigurationError: the one that was asked for is unsound here, or none is sound.
    """
    if asked != "auto":
        problem = _CONDITIONS[asked](facts)
        if problem is not None:
            raise ConfigurationError(
                f"The strategy {asked!r} is not sound here: {problem}.",
                "Nothing was tuned.",
                "Use --strategy auto, which says what it chose and why.",
            )
        return Choice(asked)
    ruled_out: list[str] = []
    for strategy in _AUTO:
        problem = _ruled_out(strategy, facts, tried)
        if problem is None:
            return Choice(strategy, tuple(ruled_out))
        ruled_out.append(f"{strategy}: {problem}")
    raise ConfigurationError(
        f"No strategy is sound for this plan: {'; '.join(ruled_out)}.",
        "Nothing was tuned.",
        "Split the plan, or use a FlashInfer of 0.6.16 or newer.",
    )


def is_any_left(facts: Facts, tried: Sequence[str]) -> bool:
    """Whether `auto` has another sound strategy to try."""
    return any(_ruled_out(strategy, facts, tried) is None for strategy in _AUTO)


def _ruled_out(strategy: str, facts: Facts, tried: Sequence[str]) -> str | None:
    is_shared_and_failed = strategy in SHARED and any(one in SHARED for one in tried)
    if strategy in tried or is_shared_and_failed:
        return "its result did not stand the replay"
    problem = _CONDITIONS[strategy](facts)
    return _NOT_WORTH[strategy](facts) if problem is None and strategy in _NOT_WORTH else problem
