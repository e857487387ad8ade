from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from initwarm import plantext
from initwarm.errors import CONFIGURATION, PlanError
from initwarm.plan import Plan
from initwarm.planfile import MAX_PLAN_BYTES, parse_plan
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

Path = tuple[str | int, ...]

CPU = document(HOST_MATMUL)
CUDA = document(BMM_FP8, MM_BF16, ACME_OP, device="cuda", parallel={"tp": 2, "pp": 2})
BMM: Path = ("calls", 0)
MM: Path = ("calls", 1)
ACME: Path = ("calls", 2)
HUGE = 10**30


def refusal(read: Callable[[], Plan]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        read()
    error = caught.value
    assert error.exit_code == CONFIGURATION == 78
    assert error.effect == "No plan was loaded."
    assert SOURCE in error.fact
    assert error.fix
    assert "\n" not in str(error)
    return error


def refused(value: Any) -> PlanError:
    return refusal(lambda: parse(value))


def refused_text(text: str) -> PlanError:
    return refusal(lambda: parse_plan(text, SOURCE))


def as_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value))


@pytest.mark.parametrize(
    ("path", "new", "place", "what", "fix"),
    [
        (("version",), REMOVED, "The document", "lacks version", "Add version"),
        (("version",), 2, "version", "is 2", "reads version 1"),
        (("version",), 0, "version", "is 0", "reads version 1"),
        (("version",), True, "version", "is true", "reads version 1"),
        (("version",), 1.0, "version", "is 1.0", "reads version 1"),
        (("version",), "1", "version", 'is "1"', "reads version 1"),
        (("version",), None, "version", "is null", "reads version 1"),
        (("device",), REMOVED, "The document", "lacks device", "Add device"),
        (("device",), "gpu", "device", 'is "gpu"', "Use cuda or cpu."),
        (("device",), ["cuda"], "device", "is a list of 1", "Use cuda or cpu."),
        (("device",), {"cuda": 0}, "device", "is a mapping", "Use cuda or cpu."),
        (("calls",), REMOVED, "The document", "lacks calls", "Add calls"),
        (("cals",), [], "The document", 'has the unknown key "cals"', "Did you mean calls?"),
        (("x\x1b[2J",), [], "The document", r'has the unknown key "x\u001b[2J"', "Known: version, device"),
    ],
)
def test_the_head_is_checked(path: Path, new: Any, place: str, what: str, fix: str) -> None:
    error = refused(changed(CUDA, path, new))

    assert error.fact == f"{place} in the plan {SOURCE} {what}."
    assert fix in error.fix


@pytest.mark.parametrize("value", [None, 1, "text", [], [CUDA], True])
def test_a_document_that_is_no_mapping_is_refused(value: Any) -> None:
    assert refused(value).fact.startswith(f"The document in the plan {SOURCE} is ")


@pytest.mark.parametrize(
    ("path", "new", "place", "what", "fix"),
    [
        ((), 2, "parallel", "is 2, not a mapping", "Give tp, pp, dp, ep"),
        ((), None, "parallel", "is null, not a mapping", "Give tp, pp, dp, ep"),
        (("sp",), 2, "parallel", 'has the unknown key "sp"', "Did you mean"),
        (("tp",), 0, "parallel.tp", "is 0", "whole number from 1"),
        (("pp",), -1, "parallel.pp", "is -1", "whole number from 1"),
        (("dp",), True, "parallel.dp", "is true", "whole number from 1"),
        (("tp",), 2.0, "parallel.tp", "is 2.0", "whole number from 1"),
        (("tp",), "2", "parallel.tp", 'is "2"', "whole number from 1"),
        (("tp",), HUGE, "parallel.tp", f"is {HUGE}", "whole number from 1 to 100000"),
        (("tp",), 60_000, "parallel", "has 120000 ranks", "At most 100000"),
        (("ep",), 3, "parallel.ep", "is 3 and a pipeline stage has 2 ranks (tp x dp)", "correct one of them"),
        (("ep",), 4, "parallel.ep", "is 4 and a pipeline stage has 2 ranks (tp x dp)", "correct one of them"),
    ],
)
def test_parallel_sizes_are_checked(path: Path, new: Any, place: str, what: str, fix: str) -> None:
    error = refused(changed(CUDA, ("parallel", *path), new))

    assert error.fact == f"{place} in the plan {SOURCE} {what}."
    assert fix in error.fix


@pytest.mark.parametrize(
    ("path", "new", "place", "what", "fix"),
    [
        (("calls",), {}, "calls", "is a mapping, not a list", "an empty one is nothing to tune"),
        (("calls",), None, "calls", "is null, not a list", "an empty one is nothing to tune"),
        (("calls",), [None] * 10_001, "calls", "has 10001 calls", "At most 10000"),
        (BMM, None, "calls[0]", "is null, not a mapping", "Give call, args"),
        ((*BMM, "arg"), {}, "calls[0]", 'has the unknown key "arg"', "Did you mean args?"),
        ((*BMM, "call"), REMOVED, "calls[0]", "lacks call", "Add call"),
        ((*BMM, "args"), REMOVED, "calls[0]", "lacks args", "Add args"),
        ((*BMM, "buckets"), REMOVED, "calls[0]", "lacks buckets", "Add buckets"),
        (
            (*BMM, "call"),
            "flashinfer.bmm_fp9",
            "calls[0].call",
            'is the unknown call "flashinfer.bmm_fp9"',
            "Did you mean flashinfer.bmm_fp8? Known: acme.op, ",
        ),
        ((*BMM, "call"), "z", "calls[0].call", 'is the unknown call "z"', "Correct it. Known: acme.op, "),
        ((*BMM, "call"), 5, "calls[0].call", "is the unknown call 5", "Known: "),
        ((*BMM, "call"), ["flashinfer.bmm_fp8"], "calls[0].call", "is the unknown call a list of 1", "Known: "),
        (
            (*BMM, "call"),
            "initwarm.host_softmax",
            "calls[0].call",
            "is initwarm.host_softmax, which runs on cpu, and device is cuda",
            "Make a plan of its own with device: cpu.",
        ),
        ((*BMM, "collectives"), "yes", "calls[0].collectives", 'is "yes"', "Use true or false."),
        ((*BMM, "collectives"), 1, "calls[0].collectives", "is 1", "Use true or false."),
        ((*BMM, "rank_free"), True, "calls[0].rank_free", "is given, and initwarm knows it of this call", "Leave it"),
        ((*ACME, "rank_free"), None, "calls[2].rank_free", "is null", "Use true or false."),
    ],
)
def test_calls_are_checked(path: Path, new: Any, place: str, what: str, fix: str) -> None:
    error = refused(changed(CUDA, path, new))

    assert error.fact == f"{place} in the plan {SOURCE} {what}."
    assert fix in error.fix


@pytest.mark.parametrize(
    ("path", "new", "place", "what", "fix"),
    [
        ((), [], "", "is a list of 0, not a mapping", "Give A, B, A_scale, B_scale, dtype, backend"),
        (("A",), REMOVED, "", "lacks A", "Add A"),
        (("dtype",), REMOVED, "", "lacks dtype", "Add dtype"),
        (("C",), 1, "", 'has the unknown key "C"', "Known: A, B, A_scale"),
        (("A",), 5, ".A", "is 5, not a mapping", "Give dtype, shape, layout"),
        (("A", "dtpe"), 5, ".A", 'has the unknown key "dtpe"', "Did you mean dtype?"),
        (("A", "dtype"), REMOVED, ".A", "lacks dtype", "Add dtype"),
        (("A", "shape"), REMOVED, ".A", "lacks shape", "Add shape"),
        (("A", "dtype"), "bfloat16", ".A.dtype", 'is "bfloat16"', "Use float8_e4m3fn."),
        (("A", "dtype"), "float8_e5m2", ".A.dtype", 'is "float8_e5m2"', "Use float8_e4m3fn."),
        (("A", "dtype"), None, ".A.dtype", "is null", "Use float8_e4m3fn."),
        (("dtype",), "float32", ".dtype", 'is "float32"', "Use bfloat16 or float16."),
        (("backend",), "cutile", ".backend", 'is "cutile"', "Use cublas or cudnn"),
        (("backend",), None, ".backend", "is null", "Use cublas or cudnn"),
        (("A", "layout"), "column_major", ".A.layout", 'is "column_major"', "Use row_major."),
        (("B", "layout"), REMOVED, ".B.layout", 'is "row_major"', "Use column_major."),
        (("B", "layout"), 1, ".B.layout", "is 1", "Use column_major."),
        (("A", "shape"), "M", ".A.shape", 'is "M"', "Give a list of at most 8 sizes, with M for tokens"),
        (("A", "shape"), ["M"] * 9, ".A.shape", "is a list of 9", "at most 8 sizes"),
        (("A", "shape"), ["M", 8192], ".A.shape", "has 2 dimensions", "Give [B, M, K]."),
        (("A_scale", "shape"), [1, 1], ".A_scale.shape", "has 2 dimensions", "Give [] or [1]."),
        (("A_scale", "shape"), [2], ".A_scale.shape[0]", "is 2", "Only 1 is possible."),
        (("A_scale", "shape"), ["M"], ".A_scale.shape[0]", "is M, and this is not the token dimension", "Give a num"),
        (("A", "shape", 2), 0, ".A.shape[2]", "is 0", "whole number from 1 to 2147483647"),
        (("A", "shape", 2), -8192, ".A.shape[2]", "is -8192", "whole number from 1"),
        (("A", "shape", 0), True, ".A.shape[0]", "is true", "whole number from 1"),
        (("A", "shape", 2), 8192.0, ".A.shape[2]", "is 8192.0", "whole number from 1"),
        (("A", "shape", 2), 1 << 31, ".A.shape[2]", "is 2147483648", "whole number from 1 to 2147483647"),
        (("A", "shape", 2), HUGE, ".A.shape[2]", f"is {HUGE}", "whole number from 1 to 2147483647"),
        (("A", "shape", 2), "K", ".A.shape[2]", 'is "K"', "whole number from 1"),
        (("A", "shape", 2), "m", ".A.shape[2]", 'is "m"', "whole number from 1"),
        (("A", "shape", 2), None, ".A.shape[2]", "is null", "whole number from 1"),
        (("A", "shape", 2), [1], ".A.shape[2]", "is a list of 1", "whole number from 1"),
        (("A", "shape", 1), 16, ".A.shape[1]", "is 16, and this is the token dimension", "Write M; buckets say"),
        (("A", "shape", 0), "M", ".A.shape[0]", "is M, and this is not the token dimension", "Give a number."),
        (("B", "shape", 2), "M", ".B.shape[2]", "is M, and this is not the token dimension", "Give a number."),
        (("B", "shape", 1), 4096, ".B.shape[1]", "is 4096 and calls[0].args.A.shape[2] is 8192", "Make them equal."),
        (("B", "shape", 0), 2, ".B.shape[0]", "is 2 and calls[0].args.A.shape[0] is 1", "Make them equal."),
        (("B", "shape", 2), (1 << 31) - 1, "", "needs 16.0 TiB at M=8192", "At most 1 TiB"),
    ],
)
def test_arguments_are_checked(path: Path, new: Any, place: str, what: str, fix: str) -> None:
    error = refused(changed(CUDA, (*BMM, "args", *path), new))

    assert error.fact == f"calls[0].args{place} in the plan {SOURCE} {what}."
    assert fix in error.fix


def test_tensors_that_must_have_one_dtype_have_one() -> None:
    error = refused(changed(CPU, ("calls", 0, "args", "b", "dtype"), "bfloat16"))

    assert error.fact == f"calls[0].args.b.dtype in the plan {SOURCE} is bfloat16 and a has float32."


@pytest.mark.parametrize(
    ("path", "new", "place", "what", "fix"),
    [
        ((), [], "", "is a list of 0, not a mapping", "Name each argument."),
        (("not a name",), 1, "", 'has the key "not a name"', "names that an argument in Python can have"),
        (("a" * 101,), 1, "", f'has the key "{"a" * 76}...', "names that an argument in Python can have"),
        (("x", "dtype"), "complex64", ".x.dtype", 'is "complex64"', "Use float32 or "),
        (("x", "layout"), "column_major", ".x.layout", "is column_major with 1 dimensions", "Leave it away."),
        (("alpha",), [1], ".alpha", "is a list of 1", "Give a text, a number, true, false or null, or a tensor."),
        (("alpha",), (1 << 53) + 1, ".alpha", "is 9007199254740993", "Give a number from -9007199254740992"),
        (("alpha",), -1e300, ".alpha", "is -1e+300", "Give a number from -9007199254740992"),
    ],
)
def test_arguments_of_an_added_call_are_bounded(path: Path, new: Any, place: str, what: str, fix: str) -> None:
    error = refused(changed(CUDA, (*ACME, "args", *path), new))

    assert error.fact == f"calls[2].args{place} in the plan {SOURCE} {what}."
    assert fix in error.fix


@pytest.mark.parametrize(
    ("path", "new", "place", "what", "fix"),
    [
        ((), 16, "", "is 16", "Give {max: N}, or a list of 1 to 4096 token counts."),
        ((), [], "", "is a list of 0", "Give {max: N}, or a list of 1 to 4096 token counts."),
        ((), list(range(1, 4098)), "", "is a list of 4097", "a list of 1 to 4096"),
        ((), [0], "[0]", "is 0", "whole number from 1 to 16777216"),
        ((), [1, -1], "[1]", "is -1", "whole number from 1"),
        ((), [True], "[0]", "is true", "whole number from 1"),
        ((), [1.0], "[0]", "is 1.0", "whole number from 1"),
        ((), ["M"], "[0]", 'is "M"', "whole number from 1"),
        ((), [(1 << 24) + 1], "[0]", "is 16777217", "whole number from 1 to 16777216"),
        ((), [1, 4, 2], "[2]", "is 2 after 4", "Sort the buckets and name each once."),
        ((), [1, 2, 2], "[2]", "is 2 after 2", "Sort the buckets and name each once."),
        ((), {}, "", "lacks max", "Add max"),
        ((), {"max": 1, "min": 1}, "", 'has the unknown key "min"', "Known: max"),
        ((), {"max": 0}, ".max", "is 0", "whole number from 1"),
        ((), {"max": True}, ".max", "is true", "whole number from 1"),
        ((), {"max": 8192.0}, ".max", "is 8192.0", "whole number from 1"),
        ((), {"max": HUGE}, ".max", f"is {HUGE}", "whole number from 1 to 16777216"),
    ],
)
@pytest.mark.parametrize("home", ["calls[0]", "defaults"])
def test_buckets_are_checked_in_a_call_and_in_the_defaults(
    home: str, path: Path, new: Any, place: str, what: str, fix: str
) -> None:
    value = {**CPU, "defaults": {"buckets": [1]}}
    start: Path = ("defaults", "buckets") if home == "defaults" else ("calls", 0, "buckets")

    error = refused(changed(value, (*start, *path), new))

    assert error.fact == f"{home}.buckets{place} in the plan {SOURCE} {what}."
    assert fix in error.fix


@pytest.mark.parametrize(
    ("defaults", "what"), [({}, "lacks buckets"), ([], "is a list of 0, not a mapping"), ({"calls": []}, "unknown key")]
)
def test_defaults_are_buckets_only(defaults: Any, what: str) -> None:
    assert what in refused({**CPU, "defaults": defaults}).fact


def test_the_defaults_serve_calls_that_give_no_buckets() -> None:
    other = changed(HOST_MATMUL, ("buckets",), REMOVED)

    plan = parse(document(HOST_MATMUL, other, defaults={"buckets": {"max": 4}}))

    assert [call.buckets for call in plan.calls] == [(1, 2), (1, 2, 4)]


def test_more_units_than_anyone_tunes_are_refused() -> None:
    lacking = changed(HOST_MATMUL, ("buckets",), REMOVED)

    error = refused(document(*[lacking] * 245, defaults={"buckets": list(range(1, 4097))}))

    assert "has 1003520 pairs of a call and a bucket" in error.fact


@pytest.mark.parametrize(
    ("name", "new", "place", "what", "fix"),
    [
        ("stages", [2], "[0]", "is 2", "whole number from 0 to 1"),
        ("stages", [0, -1], "[1]", "is -1", "whole number from 0 to 1"),
        ("stages", [], "", "is a list of 0", "leave it away for all of them"),
        ("stages", 0, "", "is 0", "Give a list of stages"),
        ("stages", [True], "[0]", "is true", "whole number from 0 to 1"),
        ("ranks", [4], "[0]", "is 4", "whole number from 0 to 3"),
        ("ranks", "all", "", 'is "all"', "Give a list of ranks"),
        ("ranks", None, "", "is null", "Give a list of ranks"),
        ("ranks", ["0"], "[0]", 'is "0"', "whole number from 0 to 3"),
    ],
)
def test_selectors_are_checked(name: str, new: Any, place: str, what: str, fix: str) -> None:
    error = refused(changed(CUDA, (*MM, name), new))

    assert error.fact == f"calls[1].{name}{place} in the plan {SOURCE} {what}."
    assert fix in error.fix


def test_stages_need_the_parallel_sizes() -> None:
    error = refused(changed(CPU, ("calls", 0, "stages"), [0]))

    assert error.fact == f"calls[0].stages in the plan {SOURCE} needs parallel.pp, which is not given."
    assert error.fix == "Add parallel to the plan."


def test_selectors_are_sorted_and_named_once() -> None:
    plan = parse(changed(CUDA, (*MM, "ranks"), [3, 1, 3]))

    assert plan.calls[1].ranks == (1, 3)


def test_a_call_that_nobody_installed_is_unknown() -> None:
    error = refusal(lambda: parse_plan(json.dumps(document(ACME_OP)), SOURCE))

    assert 'is the unknown call "acme.op"' in error.fact
    assert "acme.op" in str(parse(document(ACME_OP)).calls)


def test_only_an_added_call_has_to_say_that_its_keys_hold_no_rank() -> None:
    plan = parse(document(BMM_FP8, MM_BF16, ACME_OP, {**ACME_OP, "rank_free": True}, device="cuda"))

    assert [call.rank_free for call in plan.calls] == [True, True, False, True]
    assert not plan.rank_free


def test_values_in_messages_are_short_and_printable() -> None:
    error = refusal(lambda: parse_plan(json.dumps(changed(CPU, ("device",), "\x1b[31m" * 10_000)), SOURCE))

    assert len(error.fact) < 200
    assert error.fact.isprintable()


def test_the_name_of_the_file_in_messages_is_printable() -> None:
    for text in ("{}", "{", "- [", "a: *a"):
        with pytest.raises(PlanError) as caught:
            parse_plan(text, "plan\x1b[2J\n.yaml")
        assert str(caught.value).isprintable()


def test_r22_no_calls_is_nothing_to_tune_and_valid() -> None:
    for text in (json.dumps(document()), "version: 1\ndevice: cuda\ncalls: []\n"):
        plan = parse_plan(text, SOURCE)
        assert plan.calls == ()
        assert plan.units_of(0) == ()


# The text of a plan


def test_json_and_yaml_are_read_alike() -> None:
    texts = [json.dumps(CUDA), json.dumps(CUDA, indent=2), as_yaml(CUDA), "# a plan\n" + json.dumps(CUDA)]
    texts.append("\ufeff" + json.dumps(CUDA))

    plans = [parse_plan(text, SOURCE, EXTRA_CALLS) for text in texts]

    assert plans == [parse(CUDA)] * len(texts)


@pytest.mark.parametrize("has_libyaml", [True, False])
def test_yaml_is_read_with_and_without_libyaml(monkeypatch: pytest.MonkeyPatch, has_libyaml: bool) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", has_libyaml and yaml.__with_libyaml__)

    assert parse_plan(as_yaml(CPU), SOURCE) == parse(CPU)


def without_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError):
        __import__("yaml")


def test_json_needs_no_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    without_yaml(monkeypatch)

    assert parse_plan(json.dumps(CPU), SOURCE) == parse(CPU)
    assert parse_plan("\ufeff" + json.dumps(CPU), SOURCE) == parse(CPU)


def test_yaml_without_pyyaml_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    text = as_yaml(CPU)
    without_yaml(monkeypatch)

    error = refused_text(text)

    assert "is not JSON (" in error.fact
    assert "pyyaml, which would read YAML, is not installed here" in error.fact
    assert "Write the plan as JSON" in error.fix


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"version": 1, "version": 1}', 'has the key "version" twice'),
        ('{"version": 1, "calls": [{"args": {}, "args": {}}]}', 'has the key "args" twice'),
        ("version: 1\ndevice: cpu\nversion: 1\n", 'has the key "version" twice in one mapping in line 3'),
        ("calls: [{args: {}, 'args': {}}]", 'has the key "args" twice'),
        ('{"version": NaN}', "has the number NaN"),
        ('{"version": -Infinity}', "has the number -Infinity"),
        ('{"version": 1e999}', "has the number 1e999"),
        ("version: .nan", "has the number .nan"),
        ("version: -.INF", "has the number -.INF"),
        ("version: 1e999", "has the number 1e999"),
        ('{"version": ' + "9" * 41 + "}", "has a number of 41 digits"),
        ("version: " + "9" * 5000, "has a number of 5000 digits"),
        ("a: &a 1\nb: *a\n", "has an alias in line 2"),
        ("a: &a {x: 1}\nb:\n  <<: *a\n", "has an alias in line 3"),
        ("version: !!python/object/apply:os.system [false]", "has the tag tag:yaml.org,2002:python/object"),
        ("version: !!int 1", "has the tag tag:yaml.org,2002:int in line 1"),
        ("version: 1\n---\nversion: 1\n", "has a second document in line 2"),
        ("? [a, b]\n: 1\n", "has a key that is no text in line 1"),
        ("version: 1\n\tdevice: cpu\n", "is neither YAML ("),
        ("{", "is neither YAML ("),
        ("version: 1\x00", "is neither YAML ("),
    ],
)
def test_text_that_is_no_document_is_refused(text: str, what: str) -> None:
    error = refused_text(text)

    assert error.fact.startswith(f"The plan {SOURCE} ")
    assert what in error.fact


def test_aliases_that_stand_for_a_huge_document_are_refused_at_once() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 100))

    error = refused_text(bomb)

    assert "has an alias in line 2" in error.fact
    assert "`defaults` has what all calls share" in error.fix


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n", "null"])
def test_an_empty_document_is_refused(text: str) -> None:
    assert refused_text(text).fact == f"The document in the plan {SOURCE} is null, not a mapping."


@pytest.mark.parametrize("text", ["no", "yes", "on", "010", "0x10", "1_000", "1:30", "2026-12-01", "+1", "1.", ".5"])
def test_in_yaml_only_what_is_a_number_or_word_in_json_is_one(text: str) -> None:
    plan = parse_plan(as_yaml(document(ACME_OP)).replace("0.5", text), SOURCE, EXTRA_CALLS)

    assert plan.calls[0].scalars["alpha"] == text


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("-1.5e3", -1500.0), ("true", True), ("null", None), ("~", None), ("", None), ("'1'", "1")],
)
def test_scalars_of_yaml_that_json_has_too(text: str, value: Any) -> None:
    plan = parse_plan(as_yaml(document(ACME_OP)).replace("0.5", text), SOURCE, EXTRA_CALLS)

    read = plan.calls[0].scalars["alpha"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("depth", [33, 500, 200_000])
def test_deep_json_is_refused(depth: int) -> None:
    assert refused_text("[" * depth + "]" * depth).fact == f"The plan {SOURCE} is nested deeper than 32 levels."


@pytest.mark.parametrize("depth", [33, 500])
def test_deep_yaml_is_refused(depth: int) -> None:
    text = "# not JSON\n" + "[" * depth + "]" * depth

    assert refused_text(text).fact == f"The plan {SOURCE} is nested deeper than 32 levels."


def test_yaml_that_is_too_deep_for_its_reader_is_refused() -> None:
    # libyaml has a limit of its own; where pyyaml has no libyaml, ours is the first that is met.
    assert "nest" in refused_text("# not JSON\n" + "[" * 200_000).fact


def test_a_document_of_the_greatest_depth_is_read() -> None:
    assert "is a list of 1, not a mapping" in refused_text("[" * 32 + "]" * 32).fact


def test_a_huge_document_is_refused_before_it_is_read() -> None:
    error = refused_text(json.dumps(CPU) + " " * MAX_PLAN_BYTES)

    assert error.fact == f"The plan {SOURCE} is larger than {MAX_PLAN_BYTES} bytes."


def test_the_size_is_counted_in_bytes() -> None:
    text = json.dumps(document({**ACME_OP, "args": {"a": "ä" * (MAX_PLAN_BYTES // 2)}}), ensure_ascii=False)

    assert len(text) < MAX_PLAN_BYTES
    assert "is larger than" in refused_text(text).fact


def test_more_values_of_yaml_than_a_plan_can_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plantext, "MAX_NODES", 10)

    assert "has more than 10 values" in refused_text(as_yaml(CPU)).fact
