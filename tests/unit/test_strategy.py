import dataclasses
import itertools

import pytest

from initwarm.errors import ConfigurationError
from initwarm.strategy import INDEPENDENT, LEADER, LOCKSTEP, SPLIT, Facts, choose, is_any_left

SOUND = Facts(
    world_size=4,
    is_uniform=True,
    has_collectives=False,
    is_rank_free=True,
    num_units=23,
    has_process_group=True,
    flashinfer_version="0.7.4",
)


def with_facts(**changes: object) -> Facts:
    return dataclasses.replace(SOUND, **changes)  # type: ignore[arg-type]


def test_auto_shares_the_work_where_keys_hold_no_rank() -> None:
    assert choose("auto", SOUND).strategy == SPLIT
    assert choose("auto", SOUND).ruled_out == ()


def test_auto_leaves_a_plan_of_fewer_units_than_ranks_to_the_leader_and_says_so() -> None:
    choice = choose("auto", with_facts(num_units=3))

    assert choice.strategy == LEADER
    assert choice.ruled_out == ("split: the plan has 3 units for 4 ranks",)
    assert choose(SPLIT, with_facts(num_units=3)).strategy == SPLIT


def test_one_rank_is_its_own_leader_whatever_the_plan_contains() -> None:
    facts = with_facts(world_size=1, has_collectives=True, is_rank_free=False, is_uniform=False)

    assert choose("auto", facts).strategy == LEADER


@pytest.mark.parametrize(
    ("facts", "strategy", "reason"),
    [
        (with_facts(is_rank_free=False), LOCKSTEP, "may contain ranks"),
        (with_facts(has_collectives=True), LOCKSTEP, "contain collectives"),
        (with_facts(is_uniform=False), INDEPENDENT, "depend on the rank"),
        (with_facts(is_rank_free=False, has_process_group=False), INDEPENDENT, "set_autotune_process_group"),
    ],
)
def test_r3_auto_says_why_the_better_strategy_is_ruled_out(facts: Facts, strategy: str, reason: str) -> None:
    choice = choose("auto", facts)

    assert choice.strategy == strategy
    assert reason in " ".join(choice.ruled_out)


@pytest.mark.parametrize("asked", [LEADER, SPLIT])
@pytest.mark.parametrize(
    "facts", [with_facts(is_uniform=False), with_facts(is_rank_free=False), with_facts(has_collectives=True)]
)
def test_r3_an_unsound_leader_or_split_that_was_asked_for_is_refused(facts: Facts, asked: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{asked}' is not sound here") as caught:
        choose(asked, facts)

    assert caught.value.exit_code == 78


def test_r23_lockstep_is_not_offered_by_a_flashinfer_without_process_groups() -> None:
    facts = with_facts(has_process_group=False, flashinfer_version="0.6.13")

    with pytest.raises(ConfigurationError, match=r"0\.6\.13 has no set_autotune_process_group"):
        choose(LOCKSTEP, facts)
    assert choose("auto", facts).strategy == SPLIT


def test_collectives_without_process_groups_leave_no_strategy() -> None:
    facts = with_facts(has_collectives=True, has_process_group=False)

    with pytest.raises(ConfigurationError, match="No strategy is sound"):
        choose("auto", facts)


def test_a_strategy_whose_result_failed_the_proof_is_not_taken_again() -> None:
    assert choose("auto", SOUND, tried=(SPLIT,)).strategy == LOCKSTEP
    assert choose("auto", SOUND, tried=(LEADER, LOCKSTEP)).strategy == INDEPENDENT
    assert not is_any_left(SOUND, (SPLIT, LOCKSTEP, INDEPENDENT))


def test_auto_never_takes_what_asking_for_would_refuse() -> None:
    for is_uniform, has_collectives, is_rank_free, has_group in itertools.product([False, True], repeat=4):
        for world_size, num_units in itertools.product((1, 2), (0, 1, 5)):
            facts = Facts(world_size, is_uniform, has_collectives, is_rank_free, num_units, has_group, "0")
            try:
                choice = choose("auto", facts)
            except ConfigurationError:
                continue
            assert choose(choice.strategy, facts).strategy == choice.strategy
