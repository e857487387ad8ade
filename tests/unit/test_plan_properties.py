from __future__ import annotations

import json
from typing import Any

import jsonschema
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from initwarm.errors import PlanError
from initwarm.plan import DTYPE_BYTES, Plan
from initwarm.planfile import parse_plan
from initwarm.planview import render_plan
from initwarm.signatures import CALLS, COLUMN_MAJOR, TOKENS, CallSignature, TensorRule
from tests.support.bundles import schema
from tests.support.plans import BMM_FP8, EXTRA_CALLS, HOST_MATMUL, MM_BF16, REMOVED, SOURCE, changed, document

SCHEMA = jsonschema.Draft202012Validator(schema("plan"))
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# What YAML and JSON can both write as it is.
words = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"], exclude_characters="\u0085\ufeff"), max_size=12
)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)
numbers = st.integers(-(1 << 53), 1 << 53) | st.floats(-1e9, 1e9)
scalars = st.none() | st.booleans() | numbers | words
sizes = st.integers(1, 1024)
buckets = st.integers(1, 16384).map(lambda greatest: {"max": greatest}) | st.sets(
    st.integers(1, 16384), min_size=1, max_size=8
).map(sorted)

FIELDS = (
    "version", "device", "parallel", "defaults", "calls", "call", "args", "buckets", "stages", "ranks", "collectives",
    "rank_free", "tp", "pp", "dp", "ep", "max", "dtype", "shape", "layout", "a", "b", "x", "A", "B", "M", "backend",
)  # fmt: skip
VALUES = (*CALLS, "cpu", "cuda", "M", "row_major", COLUMN_MAJOR, *DTYPE_BYTES, "auto", 0, 1, 2, 8, -1, 1 << 31, 1 << 60)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(VALUES)
json_values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=12,
)


def read(text: str) -> Plan | None:
    """The plan, or None where the text is refused; anything else that is raised fails the test."""
    try:
        return parse_plan(text, SOURCE, EXTRA_CALLS)
    except PlanError as problem:
        error = problem
    assert str(error).isprintable()
    assert SOURCE in error.fact
    assert error.effect
    assert error.fix
    return None


@st.composite
def tensors(draw: st.DrawFn, rule: TensorRule, chosen: dict[str, int], dtype: str | None) -> dict[str, Any]:
    """A tensor of a known call, with the sizes that the letters have in it."""
    letters = draw(st.sampled_from(rule.shapes))
    shape: list[int | str] = []
    for letter in letters:
        if letter == TOKENS:
            shape.append(TOKENS)
        else:
            shape.append(int(letter) if letter.isdigit() else chosen.setdefault(letter, draw(sizes)))
    tensor: dict[str, Any] = {"dtype": dtype or draw(st.sampled_from(rule.dtypes)), "shape": shape}
    if rule.layout == COLUMN_MAJOR or draw(st.booleans()):
        tensor["layout"] = rule.layout
    return tensor


@st.composite
def known_arguments(draw: st.DrawFn, signature: CallSignature) -> dict[str, Any]:
    chosen: dict[str, int] = {}
    shared = [signature.tensors[name].dtypes for name in signature.same_dtype]
    dtype = draw(st.sampled_from(shared[0])) if shared else None
    arguments: dict[str, Any] = {
        name: draw(tensors(rule, chosen, dtype if name in signature.same_dtype else None))
        for name, rule in signature.tensors.items()
    }
    for name, scalar in signature.scalars.items():
        if scalar.is_required or draw(st.booleans()):
            arguments[name] = draw(st.sampled_from(scalar.choices))
    return arguments


any_tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(DTYPE_BYTES)),
        "shape": st.lists(st.just(TOKENS) | st.integers(1, 8), min_size=2, max_size=5),
    },
    optional={"layout": st.sampled_from(["row_major", COLUMN_MAJOR])},
).filter(lambda tensor: tensor["shape"].count(TOKENS) < 3)
any_arguments = st.dictionaries(names, any_tensors | scalars, max_size=4)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Valid documents."""
    device = draw(st.sampled_from(["cpu", "cuda"]))
    value: dict[str, Any] = {"version": 1, "device": device}
    count = {"stages": 0, "ranks": 100}
    if draw(st.booleans()):
        tp, pp, dp = draw(st.tuples(*[st.integers(1, 4)] * 3))
        value["parallel"] = {"tp": tp, "pp": pp, "dp": dp, "ep": draw(st.sampled_from([1, tp, tp * dp]))}
        count = {"stages": pp, "ranks": tp * pp * dp}
    if draw(st.booleans()):
        value["defaults"] = {"buckets": draw(buckets)}
    offered = [*(name for name, signature in CALLS.items() if signature.device == device), *EXTRA_CALLS]
    value["calls"] = [
        draw(calls(name, count, "defaults" in value)) for name in draw(st.lists(st.sampled_from(offered), max_size=3))
    ]
    return value


@st.composite
def calls(draw: st.DrawFn, name: str, count: dict[str, int], has_defaults: bool) -> dict[str, Any]:
    signature = CALLS.get(name)
    arguments = known_arguments(signature) if signature is not None else any_arguments
    call: dict[str, Any] = {"call": name, "args": draw(arguments)}
    if not has_defaults or draw(st.booleans()):
        call["buckets"] = draw(buckets)
    for selector, number in count.items():
        if number and draw(st.booleans()):
            call[selector] = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=4))
    flags = ["collectives"] if signature is not None else ["collectives", "rank_free"]
    for flag in flags:
        if draw(st.booleans()):
            call[flag] = draw(st.booleans())
    return call


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of everything in a document, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, child in items for found in ((*path, key), *places(child, (*path, key)))]


VALID = (
    document(HOST_MATMUL, {**HOST_MATMUL, "stages": [1], "ranks": [0, 3]}, parallel={"tp": 2, "pp": 2}),
    document(
        BMM_FP8, MM_BF16, {"call": "acme.op", "args": {"x": {"dtype": "int32", "shape": ["M", 2]}, "y": 1}},
        device="cuda", defaults={"buckets": {"max": 16}},
    ),
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A valid document in which one thing was replaced, removed or added."""
    value: Any = draw(st.sampled_from(VALID))
    path = draw(st.sampled_from(places(value)))
    if draw(st.booleans()):
        return changed(value, path, draw(json_values | st.just(REMOVED)))
    parents = [(), *(place for place in places(value) if isinstance(at(value, place), dict))]
    return changed(value, (*draw(st.sampled_from(parents)), draw(st.sampled_from(FIELDS))), draw(json_values))


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@few
@given(json_values)
def test_any_value_is_a_plan_or_a_plan_error(value: Any) -> None:
    plan = read(json.dumps(value))

    assert plan is None or SCHEMA.is_valid(value)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text("{}[]:,-&*!|>'\"#%@`?<~\\\n\t 019Mtruenlv."))
def test_any_text_is_refused_with_a_plan_error(text: str) -> None:
    assert read(text) is None


@few
@given(st.sampled_from(VALID), st.data())
def test_a_valid_text_with_a_scratch_is_a_plan_or_a_plan_error(value: Any, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([json.dumps(value), str(yaml.safe_dump(value))]))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))

    read(text[:start] + data.draw(st.text(max_size=3)) + text[end:])


@few
@given(documents())
def test_valid_documents_are_read_back_with_the_same_digest_and_follow_the_schema(value: dict[str, Any]) -> None:
    plan = read(json.dumps(value))

    assert plan is not None
    assert SCHEMA.is_valid(value)
    normalised = plan.to_json()
    assert SCHEMA.is_valid(normalised)
    again = read(json.dumps(normalised))
    assert again == plan
    assert again.digest == plan.digest
    assert render_plan(plan)


@few
@given(documents())
def test_yaml_and_json_of_one_document_are_one_plan(value: dict[str, Any]) -> None:
    plan = read(json.dumps(value))

    assert plan is not None
    assert read("# YAML\n" + json.dumps(value, ensure_ascii=False)) == plan


@settings(max_examples=120, deadline=None)
@given(mutated())
def test_what_the_schema_refuses_is_refused(value: Any) -> None:
    plan = read(json.dumps(value))

    assert plan is None or SCHEMA.is_valid(value)


@few
@given(documents(), st.integers(0, 63))
def test_units_are_those_of_the_calls_that_the_rank_makes(value: dict[str, Any], rank: int) -> None:
    plan = read(json.dumps(value))

    assert plan is not None
    units = plan.units_of(rank)
    assert [(unit.index, unit.bucket) for unit in units] == sorted({(unit.index, unit.bucket) for unit in units})
    for index, call in enumerate(plan.calls):
        made = [unit.bucket for unit in units if unit.index == index]
        assert made in ([], list(call.buckets))
