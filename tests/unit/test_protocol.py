import dataclasses
import itertools
import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from initwarm.errors import ConfigurationError
from initwarm.protocol import (
    Adopt,
    Answer,
    Conflict,
    Hello,
    Holding,
    Step,
    Tune,
    encode,
    encode_hello,
    first_error,
    parse_answer,
    parse_hello,
    parse_step,
    verdict,
)


def hello(node_rank: int = 0, **changes: object) -> Hello:
    base = Hello(
        node_rank=node_rank,
        uid=f"uid-{node_rank}",
        pod=f"pod-{node_rank}",
        epoch="e",
        tool_version="1",
        plan="p" * 64,
        settings={"strategy": "auto", "check_outputs": False},
        source="flags",
        identity=({"gpu": "H200", "flashinfer_version": "0.7.4"},),
        features={"has_store": True},
        devices=("cpu",),
        seconds_left=500.0,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_nobody_holds_a_bundle_so_every_rank_starts_cold() -> None:
    assert verdict([hello(0), hello(1)]) == Tune()


def test_r1_what_one_rank_holds_all_ranks_adopt() -> None:
    held = Holding("d" * 64, 3, 3, True)

    assert verdict([hello(0), hello(1), hello(2, holding=held)]) == Adopt("d" * 64, 3, holder=2)


def test_the_newest_generation_wins_and_ties_go_by_digest() -> None:
    holdings = [None, Holding("a" * 64, 2, 3, True), Holding("c" * 64, 2, 3, True), Holding("z" * 64, 1, 3, True)]

    verdicts = {
        verdict([hello(node, holding=held) for node, held in enumerate(order)]).digest  # type: ignore[union-attr]
        for order in itertools.permutations(holdings)
    }

    assert verdicts == {"c" * 64}


@pytest.mark.parametrize(("world_size", "is_adopted"), [(2, True), (3, False)])
def test_a_bundle_whose_keys_hold_ranks_serves_its_own_world_only(world_size: int, is_adopted: bool) -> None:
    held = Holding("d" * 64, 1, world_size, rank_free=False)

    assert isinstance(verdict([hello(0), hello(1, holding=held)]), Adopt) == is_adopted


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tool_version": "2"}, ["initwarm", "'1'", "'2'"]),
        ({"plan": "q" * 64}, ["plan", "pppppppppppp", "qqqqqqqqqqqq"]),
        ({"settings": {"strategy": "leader", "check_outputs": False}}, ["strategy", "'auto'", "'leader'"]),
        ({"identity": ({"gpu": "H100", "flashinfer_version": "0.7.4"},)}, ["gpu", "'H200'", "'H100'"]),
        ({"identity": ({"gpu": "H200"},)}, ["flashinfer_version", "'0.7.4'", "None"]),
    ],
)
def test_a_conflict_names_both_pods_and_both_values(change: dict[str, object], named: list[str]) -> None:
    decision = verdict([hello(0), hello(1), hello(2, **change)])

    assert isinstance(decision, Conflict)
    for text in [*named, "node rank 0 (pod pod-0)", "node rank 2 (pod pod-2)"]:
        assert text in decision.fact
    assert decision.fix


def test_ranks_of_one_pod_must_have_one_environment_too() -> None:
    decision = verdict([hello(0, identity=({"gpu": "H200"}, {"gpu": "H200 MIG 1g"}))])

    assert isinstance(decision, Conflict)
    assert "H200 MIG 1g" in decision.fact


def test_a_conflict_beats_a_held_bundle() -> None:
    assert isinstance(verdict([hello(0, holding=Holding("a" * 64, 1, 3, True)), hello(1, plan="x")]), Conflict)


HOLDINGS = (
    None,
    Holding("a" * 64, 1, 4, True),
    Holding("b" * 64, 2, 4, True),
    Holding("c" * 64, 2, 4, True),
    Holding("d" * 64, 3, 4, False),
    Holding("e" * 64, 9, 3, False),
)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_verdict_on_every_mixture_of_holdings_of_up_to_four_ranks(size: int) -> None:
    """Against a rule that is written here anew: the best of those that serve, by generation and then digest."""
    for held in itertools.product(HOLDINGS, repeat=size):
        hellos = [hello(node, holding=one) for node, one in enumerate(held)]
        serving = [one for one in held if one is not None and (one.rank_free or one.world_size == size)]

        decision = verdict(hellos)

        if not serving:
            assert decision == Tune()
            continue
        best = sorted(serving, key=lambda one: (one.generation, one.digest))[-1]
        assert decision == Adopt(best.digest, best.generation, held.index(best))
        for order in itertools.permutations(range(size)):
            moved = verdict([hello(place, holding=held[node]) for place, node in enumerate(order)])
            assert isinstance(moved, Adopt)
            assert moved.digest == best.digest


CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("initwarm", {"tool_version": "9"}),
    ("plan", {"plan": "q" * 64}),
    ("strategy", {"settings": {"strategy": "split", "check_outputs": False}}),
    ("gpu", {"identity": ({"gpu": "B200", "flashinfer_version": "0.7.4"},)}),
    ("flashinfer_version", {"identity": ({"gpu": "H200"},)}),
)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_verdict_on_every_mixture_of_deviations_of_up_to_four_ranks(size: int) -> None:
    """Nobody deviates alike unless all do: then there is no conflict; and a conflict names two pods and both values."""
    for picked in itertools.product([("nothing", {}), *CHANGES], repeat=size):
        hellos = [hello(node, **fields) for node, (_name, fields) in enumerate(picked)]

        decision = verdict(hellos)

        if all(change == picked[0] for change in picked):
            assert decision == Tune()
            continue
        assert isinstance(decision, Conflict)
        named = [node for node in range(size) if f"node rank {node} (pod pod-{node})" in decision.fact]
        assert len(named) == 2
        assert picked[named[0]] != picked[named[1]]
        what = decision.fact.split("disagree on ")[1].split(":")[0]
        assert what in {picked[node][0] for node in named}


def test_a_hello_survives_the_channel() -> None:
    original = hello(3, holding=Holding("a" * 64, 7, 3, True))

    assert parse_hello(encode_hello(original)) == original
    assert original.nproc == 1


@pytest.mark.parametrize("holding", [None, Holding("a" * 64, 7, 3, True)])
def test_a_hello_keeps_to_its_schema(holding: Holding | None) -> None:
    schema = json.loads(files("initwarm").joinpath("schemas/hello.schema.json").read_text())

    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(json.loads(encode_hello(hello(plan="b" * 64, holding=holding))))
    assert not validator.is_valid({"schema": 1})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "identity": 3}', "[" * 5000]
)
def test_a_hello_of_another_version_is_a_clear_conflict(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Use one version"):
        parse_hello(text)


def test_an_unknown_field_of_a_newer_hello_is_passed_over() -> None:
    text = encode_hello(hello()).replace('"schema"', '"added_later": 1, "schema"')

    assert parse_hello(text) == hello()


def test_steps_and_answers_survive_the_channel() -> None:
    step, answer = Step(4, "adopt", {"digest": "x"}), Answer(2, {"problems": []}, None)

    assert parse_step(encode(step)) == step
    assert parse_answer(encode(answer)) == answer


def test_everybody_reports_the_earliest_error_but_a_lost_rank_first() -> None:
    answers = [
        Answer(0),
        Answer(3, error={"rank": None, "kind": "BarrierError", "what": "lost"}),
        Answer(2, error={"rank": 5, "kind": "TuningError", "what": "early"}),
        Answer(1, error={"rank": 3, "kind": "TuningError", "what": "late"}),
    ]

    assert first_error(answers) == {"rank": 5, "kind": "TuningError", "what": "early"}
    lost = {"rank": 7, "kind": "LostRankError", "what": "stands still"}
    assert first_error([*answers, Answer(4, error=lost)]) == lost
    assert first_error([Answer(0)]) is None
