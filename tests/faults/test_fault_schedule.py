"""What goes wrong follows from the seed alone, and every kind of fault has its turn."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.schedule import KINDS, MOUNTED, PRELOADED, Schedule, schedule, seeds
from tests.faults.test_faults import RUNS, SEED


@pytest.fixture(scope="module")
def many() -> list[Schedule]:
    return [schedule(seed) for seed in seeds(7, 2000)]


def test_the_same_seed_gives_the_same_run() -> None:
    assert [schedule(seed) for seed in seeds(3, 50)] == [schedule(seed) for seed in seeds(3, 50)]
    assert seeds(3, 50) != seeds(4, 50)
    assert len(set(seeds(3, 1000))) == 1000


def test_every_kind_has_its_turn_in_the_runs_of_the_test_command() -> None:
    drawn = Counter(one.faults[0].kind if one.faults else "none" for one in map(schedule, seeds(SEED, RUNS)))
    assert drawn.keys() == set(KINDS)
    assert min(drawn.values()) >= RUNS // len(KINDS)


def test_a_kind_that_cannot_be_shown_gives_its_turn_to_others() -> None:
    possible = set(KINDS) - {*MOUNTED, *PRELOADED}
    for seed in seeds(5, 100):
        assert {fault.kind for fault in schedule(seed, possible).faults} <= possible


def test_groups_have_every_shape_that_is_wanted(many: list[Schedule]) -> None:
    assert {one.num_nodes for one in many} == {1, 2, 3}
    assert {one.nproc for one in many} == {1, 2}
    for flag in ("has_own_volumes", "is_found_by_volume", "has_bundle", "is_run_again"):
        assert {getattr(one, flag) for one in many} == {True, False}, flag
    assert {len(one.faults) for one in many} == {0, 1, 2}
    assert {one.strategy for one in many} == {"auto", "leader", "split", "lockstep", "independent"}


def test_a_fault_befalls_a_pod_of_the_group(many: list[Schedule]) -> None:
    for one in many:
        for fault in one.faults:
            assert 0 <= fault.target < one.num_nodes


def test_a_group_that_must_succeed_has_time_for_it(many: list[Schedule]) -> None:
    for one in many:
        if any(fault.successor is not None for fault in one.faults):
            assert one.deadline_seconds >= 40
