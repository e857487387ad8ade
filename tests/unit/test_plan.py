from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from initwarm import planfile
from initwarm.errors import CONFIGURATION, PlanError
from initwarm.hostplan import host_plan
from initwarm.plan import DTYPE_BYTES, Parallel, Plan, TensorSpec, Unit, check_world
from initwarm.planfile import parse_plan
from initwarm.planview import bucket_warnings, plan_as_json, render_plan
from initwarm.signatures import CALLS, COLUMN_MAJOR, TOKENS, TensorRule
from tests.support.bundles import schema
from tests.support.plans import (
    ACME_OP,
    BMM_FP8,
    EXTRA_CALLS,
    HOST_MATMUL,
    MM_BF16,
    REMOVED,
    SOURCE,
    changed,
    document,
    parse,
)

CUDA = document(BMM_FP8, MM_BF16, device="cuda", parallel={"tp": 2, "pp": 2, "dp": 2})


def in_reverse(value: Any) -> Any:
    """The same document with the keys of every mapping in another order."""
    if isinstance(value, dict):
        return {key: in_reverse(value[key]) for key in reversed(value)}
    return [in_reverse(one) for one in value] if isinstance(value, list) else value


def selected(**selectors: Any) -> Plan:
    """Two calls, of which the second has selectors, for tp 2, pp 2 and dp 2."""
    return parse(document(HOST_MATMUL, {**HOST_MATMUL, **selectors}, parallel={"tp": 2, "pp": 2, "dp": 2}))


def callers(plan: Plan, index: int = 1, world_size: int = 8) -> list[int]:
    """The ranks that make a call."""
    return [rank for rank in range(world_size) if any(unit.index == index for unit in plan.units_of(rank))]


# Digest


def test_the_digest_of_the_host_plan_is_that_of_all_releases() -> None:
    # Another digest makes every cache of this plan cold.
    assert host_plan().digest == "0bdc84975c15eceb076b46d7dce41ac5cb03da93f32f486aee3df469dd7e06e1"


def test_key_order_does_not_change_the_digest() -> None:
    assert parse(in_reverse(CUDA)).digest == parse(CUDA).digest


def test_yaml_or_json_does_not_change_the_digest() -> None:
    assert parse_plan(str(yaml.safe_dump(CUDA)), SOURCE).digest == parse(CUDA).digest


def test_the_source_does_not_change_the_digest() -> None:
    assert parse_plan(json.dumps(CUDA), "elsewhere.yaml").digest == parse(CUDA).digest


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("calls", 1, "buckets"), {"max": 32}),
        (("calls", 1, "args", "a", "layout"), "row_major"),
        (("calls", 1, "collectives"), False),
        (("parallel",), {"tp": 2, "pp": 2, "dp": 2, "ep": 1}),
        (("defaults",), {"buckets": [1]}),
    ],
)
def test_spelling_out_what_holds_anyway_does_not_change_the_digest(path: tuple[str | int, ...], new: Any) -> None:
    value = changed(CUDA, ("calls", 1, "buckets"), [1, 2, 4, 8, 16, 32])

    assert parse(changed(value, path, new)).digest == parse(value).digest


def test_buckets_from_the_defaults_do_not_change_the_digest() -> None:
    lacking = changed(CUDA, ("calls", 0, "buckets"), REMOVED)

    assert parse({**lacking, "defaults": {"buckets": {"max": 8192}}}).digest == parse(CUDA).digest


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("parallel", "tp"), 4),
        (("parallel",), REMOVED),
        (("calls", 1), REMOVED),
        (("calls",), [MM_BF16, BMM_FP8]),
        (("calls", 0, "buckets"), {"max": 4096}),
        (("calls", 1, "buckets"), [16]),
        (("calls", 1, "args", "a", "shape"), ["M", 512]),
        (("calls", 0, "args", "A_scale", "shape"), []),
        (("calls", 0, "args", "dtype"), "float16"),
        (("calls", 0, "args", "backend"), "auto"),
        (("calls", 1, "args", "out_dtype"), "bfloat16"),
        (("calls", 1, "stages"), [0]),
        (("calls", 1, "stages"), [0, 1]),
        (("calls", 1, "ranks"), [0]),
        (("calls", 1, "collectives"), True),
    ],
)
def test_whatever_may_change_keys_or_who_makes_them_changes_the_digest(path: tuple[str | int, ...], new: Any) -> None:
    value = changed(CUDA, path, new)
    if path == ("calls", 1, "args", "a", "shape"):
        value = changed(changed(value, path, ["M", 256]), ("calls", 1, "args", "b", "shape"), [256, 256])

    assert parse(value).digest != parse(CUDA).digest


def test_the_digest_of_an_added_call_depends_on_all_that_it_says() -> None:
    value = document(ACME_OP)
    others = [
        changed(value, ("calls", 0, "rank_free"), True),
        changed(value, ("calls", 0, "args", "alpha"), 0.25),
        changed(value, ("calls", 0, "args", "alpha"), "0.5"),
        changed(value, ("calls", 0, "args", "beta"), None),
        changed(value, ("calls", 0, "args", "x", "dtype"), "int64"),
        {**value, "device": "cuda"},
    ]

    assert len({parse(one).digest for one in [value, *others]}) == len(others) + 1


@pytest.mark.parametrize(
    "value", [CUDA, document(ACME_OP, {**ACME_OP, "rank_free": True}), document(), host_plan().to_json()]
)
def test_the_normalised_document_is_a_plan_of_the_same_digest(value: Any) -> None:
    plan = parse(value)

    normalised = plan_as_json(plan)

    jsonschema.validate(normalised, schema("plan"), cls=jsonschema.Draft202012Validator)
    assert parse(normalised) == plan
    assert parse(normalised).digest == plan.digest


def test_the_schema_is_a_schema_and_knows_every_call() -> None:
    plan_schema = schema("plan")
    jsonschema.Draft202012Validator.check_schema(plan_schema)

    rules = {rule["if"]["properties"]["call"]["const"]: rule["then"] for rule in plan_schema["$defs"]["call"]["allOf"]}
    assert rules.keys() == CALLS.keys()
    for name, signature in CALLS.items():
        arguments = rules[name]["properties"]["args"]
        assert arguments["properties"].keys() == set(signature.arguments)
        assert set(arguments["required"]) == set(signature.required)
        assert arguments["additionalProperties"] is False
        for argument, scalar in signature.scalars.items():
            assert arguments["properties"][argument] == {"enum": list(scalar.choices)}
        for argument, tensor in signature.tensors.items():
            assert_follows(arguments["properties"][argument], tensor)
    assert set(plan_schema["$defs"]["tensor"]["properties"]["dtype"]["enum"]) == DTYPE_BYTES.keys()


def size_of(letter: str) -> dict[str, Any]:
    """The schema of a dimension."""
    if letter == TOKENS:
        return {"const": TOKENS}
    return {"const": int(letter)} if letter.isdigit() else {"$ref": "#/$defs/size"}


def assert_follows(tensor: Any, rule: TensorRule) -> None:
    """The schema of a tensor says what the rule says."""
    shape = tensor["properties"]["shape"]
    shapes = shape.get("anyOf", [shape])
    assert tensor["properties"]["dtype"] == {"enum": list(rule.dtypes)}
    assert tensor["properties"]["layout"] == {"const": rule.layout}
    assert ("layout" in tensor["required"]) is (rule.layout == COLUMN_MAJOR)
    assert [one.get("prefixItems", []) for one in shapes] == [[*map(size_of, letters)] for letters in rule.shapes]
    assert [one["minItems"] for one in shapes] == [one["maxItems"] for one in shapes] == [*map(len, rule.shapes)]


@pytest.mark.parametrize(
    ("path", "within", "beyond"),
    [
        (("calls", 0, "args", "x", "shape"), [1] * planfile.MAX_DIMENSIONS, [1] * (planfile.MAX_DIMENSIONS + 1)),
        (("calls", 0, "args", "x", "shape", 0), planfile.MAX_SIZE, planfile.MAX_SIZE + 1),
        (("calls", 0, "args", "alpha"), planfile.MAX_NUMBER, planfile.MAX_NUMBER + 1),
        (("calls", 0, "args", "alpha"), -planfile.MAX_NUMBER, -planfile.MAX_NUMBER - 1),
        (("calls", 0, "buckets", 0), planfile.MAX_TOKENS, planfile.MAX_TOKENS + 1),
        (("calls", 0, "buckets"), {"max": planfile.MAX_TOKENS}, {"max": planfile.MAX_TOKENS + 1}),
        (("calls", 0, "ranks"), [planfile.MAX_RANKS - 1], [planfile.MAX_RANKS]),
        (("parallel",), {"tp": planfile.MAX_RANKS}, {"tp": planfile.MAX_RANKS + 1}),
        (("calls", 0, "args"), {"x" * planfile.MAX_NAME: 1}, {"x" * (planfile.MAX_NAME + 1): 1}),
    ],
)
def test_the_schema_and_the_reader_have_the_same_limits(path: tuple[str | int, ...], within: Any, beyond: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema("plan"))
    value = document(ACME_OP)

    assert validator.is_valid(changed(value, path, within))
    assert parse(changed(value, path, within))
    assert not validator.is_valid(changed(value, path, beyond))
    with pytest.raises(PlanError):
        parse(changed(value, path, beyond))


def test_the_example_of_the_documentation_is_a_plan_without_a_warning() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)

    plan = parse_plan(example, "docs/plans.md")

    assert len(plan.units_of(0)) == 21
    assert "warning" not in render_plan(plan)


def test_the_documentation_names_every_call_and_what_it_may_be_given() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "plans.md").read_text().splitlines()

    for name, signature in CALLS.items():
        (row,) = (row for row in rows if row.startswith(f"| `{name}` | {signature.device} |"))
        choices = {choice for rule in signature.scalars.values() for choice in rule.choices}
        dtypes = {dtype for rule in signature.tensors.values() for dtype in rule.dtypes}
        assert all(f"`{argument}`" in row for argument in signature.arguments)
        assert all(value in row for value in choices | dtypes)


# Ranks, stages and units


def test_ranks_are_numbered_tensor_first_then_pipeline_then_data() -> None:
    sizes = Parallel(tp=2, pp=2, dp=2, ep=4)

    assert sizes.world_size == 8
    assert [sizes.stage_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_the_ranks_of_each_stage() -> None:
    assert selected().stages(8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert parse(document(HOST_MATMUL)).stages(3) == ((0, 1, 2),)


def test_units_are_in_plan_order_with_buckets_ascending() -> None:
    units = parse(document({**HOST_MATMUL, "buckets": {"max": 4}}, HOST_MATMUL)).units_of(0)

    assert [(unit.index, unit.bucket) for unit in units] == [(0, 1), (0, 2), (0, 4), (1, 1), (1, 2)]
    assert units[2].name == "calls[0] initwarm.host_matmul M=4"


@pytest.mark.parametrize(
    ("selectors", "ranks"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"stages": [0]}, [0, 1, 4, 5]),
        ({"stages": [1]}, [2, 3, 6, 7]),
        ({"stages": [0, 1]}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"ranks": [3, 0]}, [0, 3]),
        ({"stages": [1], "ranks": [0, 2]}, [2]),
        ({"stages": [1], "ranks": [0]}, []),
    ],
)
def test_selectors_choose_who_makes_a_call(selectors: dict[str, Any], ranks: list[int]) -> None:
    plan = selected(**selectors)

    assert callers(plan) == ranks
    assert callers(plan, index=0) == list(range(8))


@pytest.mark.parametrize(
    ("selectors", "is_uniform"),
    [
        ({}, True),
        ({"stages": [1]}, True),
        ({"ranks": [0, 1, 4, 5]}, True),
        ({"ranks": [2, 3, 6, 7], "stages": [1]}, True),
        ({"ranks": [0, 1, 4, 5], "stages": [1]}, True),
        ({"ranks": [0]}, False),
        ({"ranks": [0, 1]}, False),
        ({"ranks": [2], "stages": [1]}, False),
        ({"ranks": list(range(8))}, True),
    ],
)
def test_r3_a_plan_whose_shapes_depend_on_the_rank_is_not_uniform(selectors: dict[str, Any], is_uniform: bool) -> None:
    plan = selected(**selectors)

    assert plan.is_uniform(8) is is_uniform
    made = [{tuple(unit.name for unit in plan.units_of(rank)) for rank in ranks} for ranks in plan.stages(8)]
    assert is_uniform is all(len(units) == 1 for units in made)


def test_r3_an_uneven_split_of_experts_is_not_uniform_without_parallel_sizes_either() -> None:
    uneven = document({**HOST_MATMUL, "ranks": [0]}, {**HOST_MATMUL, "ranks": [1]})

    assert not parse(uneven).is_uniform(2)
    assert parse(document(HOST_MATMUL)).is_uniform(2)


def test_r96_one_pod_of_a_leader_worker_set_and_tensor_parallel_2_do_not_fit() -> None:
    plan = parse(document(BMM_FP8, device="cuda", parallel={"tp": 2}))

    with pytest.raises(PlanError) as caught:
        check_world(plan, 1)

    assert caught.value.exit_code == CONFIGURATION == 78
    assert caught.value.fact == "The plan is for 2 ranks (tp 2 x pp 1 x dp 1) and the group has 1."
    assert "as many GPUs as the server's parallel sizes need" in caught.value.fix


@pytest.mark.parametrize("world_size", [4, 7, 9, 16])
def test_a_plan_for_another_number_of_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(PlanError, match=f"for 8 ranks .* has {world_size}"):
        check_world(selected(), world_size)


def test_a_plan_fits_its_number_of_ranks() -> None:
    check_world(selected(ranks=[7]), 8)
    check_world(parse(document(HOST_MATMUL)), 5)


def test_a_rank_that_the_group_does_not_have_is_refused() -> None:
    plan = parse(document(HOST_MATMUL, {**HOST_MATMUL, "ranks": [0, 4]}))

    check_world(plan, 5)
    with pytest.raises(PlanError, match=r"calls\[1\]\.ranks names rank 4 and the group has 4"):
        check_world(plan, 4)


def test_collectives_and_rank_free_are_of_the_whole_plan() -> None:
    plain = parse(document(HOST_MATMUL))
    with_both = parse(document(HOST_MATMUL, {**ACME_OP, "collectives": True}))

    assert (plain.has_collectives, plain.rank_free) == (False, True)
    assert (with_both.has_collectives, with_both.rank_free) == (True, False)


def test_r22_an_empty_plan_has_no_units_fits_every_group_and_is_shown_as_such() -> None:
    plan = parse(document(device="cuda"))

    check_world(plan, 16)
    assert all(plan.units_of(rank) == () for rank in range(16))
    assert plan.is_uniform(16)
    assert plan.rank_free
    assert "nothing to tune" in render_plan(plan)


# Memory


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1), ("int64", 8)])
def test_memory_of_a_tensor(dtype: str, size: int) -> None:
    assert TensorSpec(dtype, (3, "M", 5)).num_bytes(7) == 3 * 7 * 5 * size
    assert TensorSpec(dtype, ()).num_bytes(7) == size


def test_r17_a_unit_needs_its_declared_tensors_and_no_more() -> None:
    unit = parse(document(BMM_FP8, device="cuda")).units_of(0)[-1]

    assert unit.num_bytes == 8192 * 8192 + 8192 * 2560 + 4 + 4


def test_r17_the_estimate_of_the_largest_unit_is_shown() -> None:
    plan = parse(document({**BMM_FP8, "buckets": [1]}, {**MM_BF16, "buckets": [1 << 20]}, device="cuda"))

    assert "memory 1 GiB of inputs at most, in calls[1] flashinfer.mm_bf16 M=1048576" in render_plan(plan)


def test_r26_the_estimate_is_the_same_on_every_rank_and_grows_with_the_bucket() -> None:
    plan = selected()
    needed = [[unit.num_bytes for unit in plan.units_of(rank)] for rank in range(8)]

    assert all(one == needed[0] for one in needed)
    assert needed[0] == [(bucket * 8 + 8 * 4) * 4 for bucket in (1, 2)] * 2


# What a person is shown


def test_r21_a_maximum_off_the_grid_misses_and_both_fixes_are_named() -> None:
    plan = parse(document(changed(BMM_FP8, ("buckets", "max"), 10000), MM_BF16, device="cuda"))

    (warning,) = bucket_warnings(plan.calls[0].buckets)

    assert "miss at 8193..10000 tokens" in warning
    assert "{max: 16384}" in warning
    assert "max_num_batched_tokens at 8192" in warning
    assert f"warning: calls[0]: {warning}" in render_plan(plan)


@pytest.mark.parametrize("buckets", [(1,), (1, 2), (1, 2, 4, 8, 16)])
def test_a_complete_grid_has_no_warning(buckets: tuple[int, ...]) -> None:
    assert bucket_warnings(buckets) == ()


@pytest.mark.parametrize(
    ("buckets", "what"),
    [
        ((16,), "miss at 1..8 tokens"),
        ((1, 2, 16), "miss at 3..8 tokens"),
        ((1, 3, 4), "miss at 2..2 tokens"),
        ((1, 2, 3, 4), "never found: 3; remove them"),
        ((3,), "miss at 1..3 tokens"),
    ],
)
def test_holes_and_buckets_in_vain_are_warned_of(buckets: tuple[int, ...], what: str) -> None:
    assert any(what in warning for warning in bucket_warnings(buckets))


def test_calls_of_the_same_buckets_share_a_warning() -> None:
    plan = parse(document(*[{**HOST_MATMUL, "buckets": [1, 3]}] * 3))

    assert [line for line in render_plan(plan).splitlines() if line.startswith("warning: ")] == [
        f"warning: calls[0] and 2 more: {warning}" for warning in bucket_warnings((1, 3))
    ]


def test_the_view_shows_digest_sizes_selectors_and_memory() -> None:
    plan = parse(
        document(
            BMM_FP8,
            {**MM_BF16, "stages": [1], "ranks": [2, 3]},
            {**ACME_OP, "collectives": True},
            device="cuda",
            parallel={"tp": 2, "pp": 2},
        )
    )

    lines = render_plan(plan).splitlines()

    assert lines[:3] == [
        f"plan {plan.digest}",
        "device cuda, 3 calls, 24 units",
        "ranks 4: tp 2 x pp 2 x dp 1, ep 1",
    ]
    assert lines[3] == "memory 84 MiB of inputs at most, in calls[0] flashinfer.bmm_fp8 M=8192"
    assert f"  B: float8_e4m3fn [1, 8192, 2560] {COLUMN_MAJOR}" in lines
    assert "  dtype: bfloat16" in lines
    assert "calls[1] flashinfer.mm_bf16, only stages 1, only ranks 2, 3" in lines
    assert "calls[2] acme.op, with collectives" in lines


def test_texts_of_an_added_call_cannot_move_the_cursor_of_a_terminal() -> None:
    plan = parse_plan(
        json.dumps(changed(document(ACME_OP), ("calls", 0, "args", "alpha"), "\x1b[2J\n")), SOURCE, EXTRA_CALLS
    )

    assert "\x1b" not in render_plan(plan)


def test_the_built_in_plan_makes_the_same_calls_on_every_rank_and_misses_nothing() -> None:
    plan = host_plan()

    assert plan.device == "cpu"
    assert plan.is_uniform(4)
    assert plan.rank_free
    assert len(plan.units_of(3)) == 15
    assert "warning" not in render_plan(plan)
    assert max(unit.num_bytes for unit in plan.units_of(0)) < 1 << 20
    assert replace(plan).digest == plan.digest
    assert isinstance(plan.units_of(0)[0], Unit)
