"""Reads a plan document: YAML or JSON, bounded, and validated with the place of whatever is wrong."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from initwarm.buckets import hybrid_buckets
from initwarm.errors import PlanError
from initwarm.plan import DTYPE_BYTES, VERSION, Call, Parallel, Plan, Scalar, TensorSpec
from initwarm.signatures import CALLS, COLUMN_MAJOR, REQUIRED_SCALARS, ROW_MAJOR, TOKENS, CallSignature, TensorRule

MAX_PLAN_BYTES = 4 << 20
MAX_CALLS = 10_000
MAX_BUCKETS = 4096
MAX_DEPTH = 32
MAX_TOKENS = 1 << 24
MAX_SIZE = 1 << 40
MAX_DIMENSIONS = 8
MAX_PARALLEL = 100_000


def parse_plan(text: str, source: str, extra_calls: frozenset[str] = frozenset()) -> Plan:
    """Read a plan.

    Args:
        text: JSON or YAML.
        source: where it comes from, for messages.
        extra_calls: names of calls that installed packages add; their code checks their arguments.

    Raises:
        PlanError: it is not a valid plan.
    """
    return _Reader(source, extra_calls).plan(_document(text, source))


def _document(text: str, source: str) -> Any:
    if len(text.encode(errors="replace")) > MAX_PLAN_BYTES:
        raise PlanError(f"The plan {source} is larger than {MAX_PLAN_BYTES} bytes.", *_NO_PLAN)
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except _DuplicateError as problem:
        raise PlanError(f"The plan {source} has the key {problem} twice.", *_NO_PLAN) from problem
    except RecursionError as problem:
        raise PlanError(f"The plan {source} is nested deeper than {MAX_DEPTH} levels.", *_NO_PLAN) from problem
    except ValueError:
        document = _yaml(text, source)
    if _is_too_deep(document):
        raise PlanError(f"The plan {source} is nested deeper than {MAX_DEPTH} levels.", *_NO_PLAN)
    return document


_NO_PLAN = ("No plan was loaded.", "docs/plans.md shows the format; `initwarm plan FILE` checks it.")


class _DuplicateError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _DuplicateError(repr(key))
        values[key] = value
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of a plan")


def _yaml(text: str, source: str) -> Any:
    """YAML, without aliases: a few of them can stand for a document of any size."""
    try:
        import yaml
    except ImportError as problem:
        raise PlanError(
            f"The plan {source} is not JSON, and pyyaml, which would read YAML, is not installed here.",
            "No plan was loaded.",
            "Write the plan as JSON (`initwarm plan FILE --format json` converts it), or install pyyaml.",
        ) from problem

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not allowed in a plan")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key in keys:
                if keys.count(key) > 1:
                    raise yaml.YAMLError(f"the key {key!r} stands there twice")
            return dict(super().construct_mapping(node, deep=deep))

    try:
        return yaml.load(text, Loader)  # noqa: S506  a SafeLoader with less in it
    except RecursionError as problem:
        raise PlanError(f"The plan {source} is nested deeper than {MAX_DEPTH} levels.", *_NO_PLAN) from problem
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as problem:
        words = " ".join(str(problem).split())[:300]
        raise PlanError(f"The plan {source} is neither JSON nor YAML: {words}.", *_NO_PLAN) from problem


def _is_too_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
    return bool(level)


class _Reader:
    """Turns a document into a plan, or says where it is wrong."""

    def __init__(self, source: str, extra_calls: frozenset[str]) -> None:
        self.source = source
        self.extra_calls = extra_calls

    def refuse(self, where: str, what: str, fix: str) -> NoReturn:
        raise PlanError(f"{where} in the plan {self.source} {what}.", "No plan was loaded.", fix)

    def mapping(self, value: Any, where: str, known: Sequence[str], required: Sequence[str] = ()) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse(where, f"is {_show(value)}, not a mapping", f"Give {', '.join(known)}.")
        for key in value:
            if key not in known:
                self.refuse(
                    where, f"has the unknown key {_show(key)}", f"{_nearest(key, known)} Known: {', '.join(known)}."
                )
        for key in required:
            if key not in value:
                self.refuse(where, f"lacks {key}", f"Add {key}.")
        return value

    def integer(self, value: Any, where: str, least: int, greatest: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= greatest:
            self.refuse(where, f"is {_show(value)}", f"Give a whole number from {least} to {greatest}.")
        return value

    def plan(self, document: Any) -> Plan:
        known = ("version", "device", "parallel", "calls")
        fields = self.mapping(document, "The document", known, ("version", "device", "calls"))
        if fields["version"] != VERSION or isinstance(fields["version"], bool):
            self.refuse("version", f"is {_show(fields['version'])}", f"This initwarm reads version {VERSION}.")
        if fields["device"] not in ("cpu", "cuda"):
            self.refuse("device", f"is {_show(fields['device'])}", "Use cuda or cpu.")
        calls = fields["calls"]
        if not isinstance(calls, list) or len(calls) > MAX_CALLS:
            self.refuse(
                "calls", f"is not a list of at most {MAX_CALLS} calls", "Give a list; empty is nothing to tune."
            )
        parallel = self.parallel(fields["parallel"]) if fields.get("parallel") is not None else None
        device = fields["device"]
        return Plan(
            device, parallel, tuple(self.call(one, f"calls[{i}]", device, parallel) for i, one in enumerate(calls))
        )

    def parallel(self, value: Any) -> Parallel:
        fields = self.mapping(value, "parallel", ("tp", "pp", "dp", "ep"))
        sizes = {name: self.integer(size, f"parallel.{name}", 1, MAX_PARALLEL) for name, size in fields.items()}
        return Parallel(**sizes)

    def call(self, value: Any, where: str, device: str, parallel: Parallel | None) -> Call:
        known = ("call", "args", "buckets", "stages", "ranks", "collectives", "rank_free")
        fields = self.mapping(value, where, known, ("call", "args", "buckets"))
        name = fields["call"]
        names = sorted({*CALLS, *self.extra_calls})
        if not isinstance(name, str) or name not in names:
            self.refuse(
                f"{where}.call",
                f"is the unknown call {_show(name)}",
                f"{_nearest(name, names)} Known: {', '.join(names)}.",
            )
        signature = CALLS.get(name)
        if signature is not None and signature.device != device:
            self.refuse(
                f"{where}.call",
                f"is {name}, which runs on {signature.device}, and the device is {device}",
                "Make two plans.",
            )
        tensors, scalars = self.arguments(fields["args"], f"{where}.args", signature, name)
        for flag in ("collectives", "rank_free"):
            if not isinstance(fields.get(flag, False), bool):
                self.refuse(f"{where}.{flag}", f"is {_show(fields[flag])}", "Use true or false.")
        if signature is not None and "rank_free" in fields:
            self.refuse(f"{where}.rank_free", "is known for this call", "Leave it away.")
        stages = self.chosen(fields.get("stages"), f"{where}.stages", parallel.pp if parallel else 1)
        return Call(
            call=name,
            tensors=tensors,
            scalars=scalars,
            buckets=self.buckets(fields["buckets"], f"{where}.buckets"),
            stages=stages,
            ranks=self.chosen(fields.get("ranks"), f"{where}.ranks", MAX_PARALLEL),
            collectives=fields.get("collectives", False),
            rank_free=fields.get("rank_free", False) if signature is None else signature.is_rank_free,
        )

    def chosen(self, value: Any, where: str, count: int) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            self.refuse(where, f"is {_show(value)}, not a list of numbers", "Leave it away for all.")
        return tuple(sorted({self.integer(one, f"{where}[{i}]", 0, count - 1) for i, one in enumerate(value)}))

    def buckets(self, value: Any, where: str) -> tuple[int, ...]:
        if isinstance(value, dict):
            fields = self.mapping(value, where, ("max",), ("max",))
            return hybrid_buckets(self.integer(fields["max"], f"{where}.max", 1, MAX_TOKENS))
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_BUCKETS:
            self.refuse(where, f"is {_show(value)}", f"Give {{max: N}}, or a list of 1 to {MAX_BUCKETS} token counts.")
        buckets = [self.integer(one, f"{where}[{i}]", 1, MAX_TOKENS) for i, one in enumerate(value)]
        if buckets != sorted(set(buckets)):
            self.refuse(where, "is not ascending, or has a bucket twice", "Sort it and name each once.")
        return tuple(buckets)

    def arguments(
        self, value: Any, where: str, signature: CallSignature | None, call: str
    ) -> tuple[dict[str, TensorSpec], dict[str, Scalar]]:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self.refuse(where, f"is {_show(value)}, not a mapping", "Name each argument.")
        if signature is not None:
            known = (*signature.tensors, *signature.scalars)
            self.mapping(value, where, known, (*signature.tensors, *REQUIRED_SCALARS.get(call, ())))
        tensors: dict[str, TensorSpec] = {}
        scalars: dict[str, Scalar] = {}
        for name, one in value.items():
            place = f"{where}.{name}"
            is_tensor = name in signature.tensors if signature is not None else isinstance(one, dict)
            if is_tensor:
                tensors[name] = self.tensor(one, place, signature.tensors[name] if signature is not None else None)
            else:
                scalars[name] = self.scalar(one, place, name, signature)
        if signature is not None:
            self.shapes(tensors, where, signature)
        return tensors, scalars

    def tensor(self, value: Any, where: str, rule: TensorRule | None) -> TensorSpec:
        fields = self.mapping(value, where, ("dtype", "shape", "layout"), ("dtype", "shape"))
        allowed = rule.dtypes if rule is not None else tuple(DTYPE_BYTES)
        if fields["dtype"] not in allowed:
            self.refuse(f"{where}.dtype", f"is {_show(fields['dtype'])}", f"Use one of {', '.join(allowed)}.")
        shape = fields["shape"]
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            self.refuse(
                f"{where}.shape", f"is {_show(shape)}, not a list of sizes", f"Give sizes, with {TOKENS} for tokens."
            )
        sizes = tuple(
            TOKENS if size == TOKENS else self.integer(size, f"{where}.shape[{i}]", 1, MAX_SIZE)
            for i, size in enumerate(shape)
        )
        layouts = (ROW_MAJOR, COLUMN_MAJOR)
        layout = fields.get("layout", ROW_MAJOR)
        if layout not in layouts or (rule is not None and layout != rule.layout):
            wanted = rule.layout if rule is not None else " or ".join(layouts)
            self.refuse(f"{where}.layout", f"is {_show(layout)}", f"This argument must be {wanted}.")
        return TensorSpec(fields["dtype"], sizes, layout)  # type: ignore[arg-type]

    def scalar(self, value: Any, where: str, name: str, signature: CallSignature | None) -> Scalar:
        if not isinstance(value, str | int | float | bool | None):
            self.refuse(where, f"is {_show(value)}, not a plain value", "Give a text, a number, true or false.")
        if isinstance(value, int) and abs(value) > MAX_SIZE:
            self.refuse(where, f"is {_show(value)}", f"Give a number of at most {MAX_SIZE}.")
        if isinstance(value, float) and not abs(value) < float("inf"):
            self.refuse(where, f"is {_show(value)}", "Give a finite number.")
        rule = signature.scalars[name] if signature is not None else None
        if rule is not None and rule.choices and value not in rule.choices:
            self.refuse(where, f"is {_show(value)}", f"Use one of {', '.join(rule.choices)}.")
        return value

    def shapes(self, tensors: Mapping[str, TensorSpec], where: str, signature: CallSignature) -> None:
        """Each letter of the signature has one size in the whole call."""
        sizes: dict[str, tuple[Any, str]] = {TOKENS: (TOKENS, "the token dimension")}
        for name, tensor in tensors.items():
            patterns = signature.tensors[name].shapes
            pattern = next((one for one in patterns if len(one) == len(tensor.shape)), None)
            if pattern is None:
                shown = " or ".join("[" + ", ".join(one) + "]" for one in patterns)
                self.refuse(f"{where}.{name}.shape", f"has {len(tensor.shape)} dimensions", f"Give {shown}.")
            for i, (letter, size) in enumerate(zip(pattern, tensor.shape, strict=True)):
                place = f"{where}.{name}.shape[{i}]"
                wanted, origin = (
                    (int(letter), "this argument") if letter.isdigit() else sizes.setdefault(letter, (size, place))
                )
                if letter != TOKENS and size == TOKENS:
                    self.refuse(place, f"is {TOKENS}, and only {_tokens_of(signature)} is", "Give a number.")
                if size != wanted:
                    self.refuse(place, f"is {_show(size)} and {origin} has {_show(wanted)}", "Make them equal.")


def _tokens_of(signature: CallSignature) -> str:
    return ", ".join(
        f"{name}[{pattern.index(TOKENS)}]"
        for name, rule in signature.tensors.items()
        for pattern in rule.shapes
        if TOKENS in pattern
    )


def _show(value: Any) -> str:
    text = (
        json.dumps(value, default=str) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    )
    return text if len(text) <= 80 else text[:77] + "..."


def _nearest(name: Any, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(str(name), known, 1, 0.5)
    return f"Did you mean {found[0]}?" if found else "Correct it."
