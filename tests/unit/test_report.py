import json
from importlib.resources import files

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from initwarm.report import MESSAGE_BYTES, Failure, Outcome, event_as_json, event_as_text, termination_message
from initwarm.settings import STRATEGIES

FIELDS = [
    "outcome", "reason", "first_failure", "ranks", "world_size", "strategy", "tuned", "replayed", "missed", "bundle",
    "identity", "epoch", "seconds",
]  # fmt: skip


def test_the_message_has_the_contract_s_fields_outcome_first() -> None:
    outcome = Outcome("warm", "because", ranks=(2, 3), world_size=4, seconds=1.23456)

    message = json.loads(termination_message(outcome))

    assert list(message) == FIELDS
    assert message["ranks"] == [2, 3]
    assert message["seconds"] == 1.23
    assert message["first_failure"] is None


def test_the_message_keeps_to_its_schema() -> None:
    schema = json.loads(files("initwarm").joinpath("schemas/outcome.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)

    for outcome in (
        Outcome("warm", "", ranks=(0,), world_size=1, strategy="leader", bundle="a" * 64, identity="b" * 64, epoch="c"),
        Outcome("failed", "r", exit_code=75, first_failure=Failure(None, "pod", "what")),
    ):
        validator.validate(json.loads(termination_message(outcome)))
    assert not validator.is_valid({"outcome": "warm"})


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if one != "auto"])
def test_the_schema_has_every_strategy_that_can_be_chosen(strategy: str) -> None:
    schema = json.loads(files("initwarm").joinpath("schemas/outcome.schema.json").read_text())

    jsonschema.validate(json.loads(termination_message(Outcome("warm", "", strategy=strategy))), schema)


def test_the_end_of_a_long_traceback_is_kept() -> None:
    outcome = Outcome("failed", "short", first_failure=Failure(3, "pod", "frame\n" * 4000 + "ValueError: the cause"))

    encoded = termination_message(outcome)
    message = json.loads(encoded)

    assert MESSAGE_BYTES - 20 <= len(encoded) <= MESSAGE_BYTES
    assert message["first_failure"]["what"].endswith("ValueError: the cause")
    assert message["reason"] == "short"


@given(
    what=st.text(max_size=3000),
    reason=st.text(max_size=3000),
    pod=st.text(max_size=400),
    ranks=st.integers(0, 2000),
)
def test_the_message_is_always_valid_and_small(what: str, reason: str, pod: str, ranks: int) -> None:
    outcome = Outcome(
        "failed",
        reason,
        first_failure=Failure(1, pod, what),
        ranks=tuple(range(ranks)),
        world_size=ranks,
        bundle="a" * 64,
        identity="b" * 64,
        epoch="c" * 32,
    )

    encoded = termination_message(outcome)

    assert len(encoded) <= MESSAGE_BYTES
    assert b"\n" not in encoded
    assert json.loads(encoded)["outcome"] == "failed"


def test_an_event_is_one_line_in_both_formats() -> None:
    fields = {"message": "two\nlines", "digest": "0" * 64, "nothing": None}

    as_json = event_as_json("initwarm.a.b", fields, "2026-01-02T03:04:05.678Z")
    as_text = event_as_text(
        "initwarm.a.b", {"message": "text", "digest": "0" * 64, "nothing": None}, "2026-01-02T03:04:05Z"
    )

    assert json.loads(as_json)["message"] == "two\nlines"
    assert "\n" not in as_json
    assert as_text == "03:04:05 a.b: text [digest=000000000000]"


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x"])
def test_an_event_with_an_odd_value_is_still_printed(value: object) -> None:
    assert json.loads(event_as_json("initwarm.a.b", {"value": value}, "t"))["event"] == "initwarm.a.b"
