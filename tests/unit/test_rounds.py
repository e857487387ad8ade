import dataclasses
from typing import Any

import jsonschema
import pytest

from initwarm.rounds import RoundRecord, parse_round
from tests.support.bundles import schema

RECORD = RoundRecord("web", (2, 2, 1), "a" * 64, "b" * 64, "c" * 64, "e" * 32, "0.1")
SELF: dict[str, Any] = {
    "group": "web",
    "num_nodes": 3,
    "node_rank": 2,
    "nproc": 1,
    "plan": "a" * 64,
    "identity": "b" * 64,
}


def test_a_record_is_read_as_it_was_written_and_keeps_to_its_schema() -> None:
    jsonschema.validate(RECORD.as_json(), schema("round"))

    assert parse_round(RECORD.as_json()) == RECORD
    assert RECORD.world_size == 5


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"nproc": []},
        {"nproc": [2, True]},
        {"nproc": "2"},
        {"bundle": "../x"},
        {"plan": None},
        {"group": 1},
    ],
)
def test_what_is_no_record_of_this_schema_is_none(change: dict[str, Any]) -> None:
    assert parse_round({**RECORD.as_json(), **change}) is None


@pytest.mark.parametrize("value", [None, [], "x", {}, {"schema": 1}])
def test_garbage_is_no_record(value: Any) -> None:
    assert parse_round(value) is None


def test_a_pod_that_was_of_the_round_matches_its_record() -> None:
    assert RECORD.mismatch(**SELF) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"group": "other"}, "group is web and this pod's other"),
        ({"num_nodes": 4}, "number of pods is 3 and this pod's 4"),
        ({"plan": "f" * 64}, "plan is aaaa"),
        ({"identity": "f" * 64}, "environment is bbbb"),
        ({"node_rank": 0}, "node rank 0 had 2 ranks and has 1"),
        ({"nproc": 2}, "node rank 2 had 1 ranks and has 2"),
    ],
)
def test_a_record_of_something_else_says_what_differs(change: dict[str, Any], named: str) -> None:
    assert named in str(RECORD.mismatch(**{**SELF, **change}))


def test_a_smaller_round_does_not_match_a_pod_beyond_its_size() -> None:
    record = dataclasses.replace(RECORD, nproc=(2,))

    assert "number of pods" in str(record.mismatch(**SELF))
