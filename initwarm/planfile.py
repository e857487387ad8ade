"""Reads a plan document and says where it is wrong.

A document is read whole or refused with the place, the value and the fix. `schemas/plan.schema.json` describes the same
format; what a schema cannot say (sizes that must agree, ascending buckets, a device, memory) is only here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from initwarm.buckets import hybrid_buckets
from initwarm.errors import PlanError
from initwarm.jsontext import printable
from initwarm.plan import DTYPE_BYTES, VERSION, Call, Dimension, Parallel, Plan, Scalar, TensorSpec, Unit
from initwarm.plantext import MAX_PLAN_BYTES, read_document
from initwarm.signatures import CALLS, COLUMN_MAJOR, ROW_MAJOR, TOKENS, CallSignature, ScalarRule, TensorRule

__all__ = ["MAX_PLAN_BYTES", "parse_plan"]

MAX_CALLS = 10_000
MAX_BUCKETS = 4096
MAX_UNITS = 1_000_000
MAX_TOKENS = 1 << 24
MAX_DIMENSIONS = 8
#: Of one dimension: kernels count in 32 bits.
MAX_SIZE = (1 << 31) - 1
#: Of one unit's inputs: more than any device has.
MAX_UNIT_BYTES = 1 << 40
MAX_RANKS = 100_000
#: Integers up to here are the same in every reader of JSON.
MAX_NUMBER = 1 << 53
MAX_NAME = 100

_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EFFECT = "No plan was loaded."


def parse_plan(text: str, source: str, extra_calls: frozenset[str] = frozenset()) -> Plan:
    """Read a plan.

    Args:
        text: JSON or YAML.
        source: where it comes from, for messages.
        extra_calls: names of calls that installed packages add; their code checks their arguments.

    Raises:
        PlanError: it is not a valid plan.
    """
    return _Reader(printable(source), extra_calls).plan(read_document(text, source))


class _Reader:
    """Turns a document into a plan, or says where it is wrong."""

    def __init__(self, source: str, extra_calls: frozenset[str]) -> None:
        self.source = source
        self.names = sorted({*CALLS, *extra_calls})
        self.device = ""
        self.parallel: Parallel | None = None
        self.default_buckets: tuple[int, ...] | None = None

    def refuse(self, where: str, what: str, fix: str) -> NoReturn:
        raise PlanError(f"{where} in the plan {self.source} {what}.", _EFFECT, fix)

    def plan(self, document: Any) -> Plan:
        known = ("version", "device", "parallel", "defaults", "calls")
        fields = self.mapping(document, "The document", known, ("version", "device", "calls"))
        version = fields["version"]
        if not _is_integer(version) or version != VERSION:
            self.refuse("version", f"is {_show(version)}", f"This initwarm reads version {VERSION}.")
        self.device = self.choice(fields["device"], "device", ("cuda", "cpu"))
        if "parallel" in fields:
            self.parallel = self.sizes(fields["parallel"])
        if "defaults" in fields:
            defaults = self.mapping(fields["defaults"], "defaults", ("buckets",), ("buckets",))
            self.default_buckets = self.buckets(defaults["buckets"], "defaults.buckets")
        return Plan(self.device, self.parallel, self.calls(fields["calls"]))

    def sizes(self, value: Any) -> Parallel:
        fields = self.mapping(value, "parallel", ("tp", "pp", "dp", "ep"))
        parallel = Parallel(
            **{name: self.integer(size, f"parallel.{name}", 1, MAX_RANKS) for name, size in fields.items()}
        )
        if parallel.world_size > MAX_RANKS:
            self.refuse("parallel", f"has {parallel.world_size} ranks", f"At most {MAX_RANKS} are supported.")
        if parallel.tp * parallel.dp % parallel.ep:
            self.refuse(
                "parallel.ep",
                f"is {parallel.ep} and a pipeline stage has {parallel.tp * parallel.dp} ranks (tp x dp)",
                "Expert parallelism divides the ranks of a stage; correct one of them.",
            )
        return parallel

    def calls(self, value: Any) -> tuple[Call, ...]:
        if not isinstance(value, list):
            self.refuse("calls", f"is {_show(value)}, not a list", "Give a list; an empty one is nothing to tune.")
        if len(value) > MAX_CALLS:
            self.refuse("calls", f"has {len(value)} calls", f"At most {MAX_CALLS} are supported.")
        calls = tuple(self.call(one, f"calls[{i}]") for i, one in enumerate(value))
        units = sum(len(call.buckets) for call in calls)
        if units > MAX_UNITS:
            self.refuse("calls", f"has {units} pairs of a call and a bucket", f"At most {MAX_UNITS} are supported.")
        return calls

    def call(self, value: Any, where: str) -> Call:
        known = ("call", "args", "buckets", "stages", "ranks", "collectives", "rank_free")
        has_defaults = self.default_buckets is not None
        fields = self.mapping(value, where, known, ("call", "args") if has_defaults else ("call", "args", "buckets"))
        name = self.name(fields["call"], f"{where}.call")
        tensors, scalars = self.arguments(fields["args"], f"{where}.args", CALLS.get(name))
        call = Call(
            call=name,
            tensors=tensors,
            scalars=scalars,
            buckets=self.buckets_of(fields, where),
            stages=self.stages(fields, where),
            ranks=self.ranks(fields, where),
            collectives=self.flag(fields, where, "collectives"),
            rank_free=self.rank_free(fields, where, CALLS.get(name)),
        )
        self.memory(call, where)
        return call

    def name(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in self.names:
            self.refuse(
                where,
                f"is the unknown call {_show(value)}",
                f"{_nearest(value, self.names)} Known: {', '.join(self.names)}.",
            )
        signature = CALLS.get(value)
        if signature is not None and signature.device != self.device:
            self.refuse(
                where,
                f"is {value}, which runs on {signature.device}, and device is {self.device}",
                f"Make a plan of its own with device: {signature.device}.",
            )
        return value

    def buckets_of(self, fields: Mapping[str, Any], where: str) -> tuple[int, ...]:
        if "buckets" in fields or self.default_buckets is None:
            return self.buckets(fields["buckets"], f"{where}.buckets")
        return self.default_buckets

    def buckets(self, value: Any, where: str) -> tuple[int, ...]:
        if isinstance(value, dict):
            fields = self.mapping(value, where, ("max",), ("max",))
            return hybrid_buckets(self.integer(fields["max"], f"{where}.max", 1, MAX_TOKENS))
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_BUCKETS:
            self.refuse(where, f"is {_show(value)}", f"Give {{max: N}}, or a list of 1 to {MAX_BUCKETS} token counts.")
        buckets = tuple(self.integer(one, f"{where}[{i}]", 1, MAX_TOKENS) for i, one in enumerate(value))
        for i, (lower, upper) in enumerate(pairwise(buckets), start=1):
            if upper <= lower:
                self.refuse(f"{where}[{i}]", f"is {upper} after {lower}", "Sort the buckets and name each once.")
        return buckets

    def stages(self, fields: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
        if "stages" in fields and self.parallel is None:
            self.refuse(f"{where}.stages", "needs parallel.pp, which is not given", "Add parallel to the plan.")
        return self.chosen(fields, f"{where}.stages", "stages", self.parallel.pp if self.parallel else 1)

    def ranks(self, fields: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
        return self.chosen(fields, f"{where}.ranks", "ranks", self.parallel.world_size if self.parallel else MAX_RANKS)

    def chosen(self, fields: Mapping[str, Any], where: str, name: str, count: int) -> tuple[int, ...] | None:
        if name not in fields:
            return None
        value = fields[name]
        if not isinstance(value, list) or not value:
            self.refuse(where, f"is {_show(value)}", f"Give a list of {name}, or leave it away for all of them.")
        return tuple(sorted({self.integer(one, f"{where}[{i}]", 0, count - 1) for i, one in enumerate(value)}))

    def rank_free(self, fields: Mapping[str, Any], where: str, signature: CallSignature | None) -> bool:
        if signature is None:
            return self.flag(fields, where, "rank_free")
        if "rank_free" in fields:
            self.refuse(f"{where}.rank_free", "is given, and initwarm knows it of this call", "Leave it away.")
        return signature.is_rank_free

    def flag(self, fields: Mapping[str, Any], where: str, name: str) -> bool:
        value = fields.get(name, False)
        if not isinstance(value, bool):
            self.refuse(f"{where}.{name}", f"is {_show(value)}", "Use true or false.")
        return value

    def memory(self, call: Call, where: str) -> None:
        needed = Unit(0, call, call.buckets[-1]).num_bytes
        if needed > MAX_UNIT_BYTES:
            self.refuse(
                f"{where}.args",
                f"needs {needed / 2**40:.1f} TiB at {TOKENS}={call.buckets[-1]}",
                f"At most {MAX_UNIT_BYTES >> 40} TiB are supported; use smaller sizes or buckets.",
            )

    def arguments(
        self, value: Any, where: str, signature: CallSignature | None
    ) -> tuple[dict[str, TensorSpec], dict[str, Scalar]]:
        if signature is None:
            return self.unchecked(value, where)
        fields = self.mapping(value, where, signature.arguments, signature.required)
        tensors = {name: self.tensor(fields[name], f"{where}.{name}", rule) for name, rule in signature.tensors.items()}
        scalars = {
            name: self.scalar(fields[name], f"{where}.{name}", rule)
            for name, rule in signature.scalars.items()
            if name in fields
        }
        self.dtypes(tensors, where, signature)
        self.shapes(tensors, where, signature)
        return tensors, scalars

    def unchecked(self, value: Any, where: str) -> tuple[dict[str, TensorSpec], dict[str, Scalar]]:
        """Arguments of a call that another package brings: a mapping is a tensor, anything else is not."""
        if not isinstance(value, dict):
            self.refuse(where, f"is {_show(value)}, not a mapping", "Name each argument.")
        tensors: dict[str, TensorSpec] = {}
        scalars: dict[str, Scalar] = {}
        for name, one in value.items():
            if len(name) > MAX_NAME or not _ARGUMENT.fullmatch(name):
                self.refuse(where, f"has the key {_show(name)}", "Use names that an argument in Python can have.")
            if isinstance(one, dict):
                tensors[name] = self.tensor(one, f"{where}.{name}", None)
            else:
                scalars[name] = self.plain(one, f"{where}.{name}")
        return tensors, scalars

    def tensor(self, value: Any, where: str, rule: TensorRule | None) -> TensorSpec:
        fields = self.mapping(value, where, ("dtype", "shape", "layout"), ("dtype", "shape"))
        dtype = self.choice(fields["dtype"], f"{where}.dtype", rule.dtypes if rule else tuple(DTYPE_BYTES))
        shape = fields["shape"]
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            self.refuse(
                f"{where}.shape",
                f"is {_show(shape)}",
                f"Give a list of at most {MAX_DIMENSIONS} sizes, with {TOKENS} for tokens.",
            )
        sizes = tuple(self.size(size, f"{where}.shape[{i}]") for i, size in enumerate(shape))
        layouts = (rule.layout,) if rule else (ROW_MAJOR, COLUMN_MAJOR)
        layout = self.choice(fields.get("layout", ROW_MAJOR), f"{where}.layout", layouts)
        if layout == COLUMN_MAJOR and len(sizes) < 2:
            self.refuse(f"{where}.layout", f"is {layout} with {len(sizes)} dimensions", "Leave it away.")
        return TensorSpec(dtype, sizes, layout)

    def size(self, value: Any, where: str) -> Dimension:
        return TOKENS if value == TOKENS else self.integer(value, where, 1, MAX_SIZE)

    def scalar(self, value: Any, where: str, rule: ScalarRule) -> Scalar:
        return self.choice(value, where, rule.choices)

    def plain(self, value: Any, where: str) -> Scalar:
        if not isinstance(value, str | int | float | bool | None):
            self.refuse(where, f"is {_show(value)}", "Give a text, a number, true, false or null, or a tensor.")
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            self.refuse(where, f"is {_show(value)}", f"Give a number from -{MAX_NUMBER} to {MAX_NUMBER}.")
        return value

    def dtypes(self, tensors: Mapping[str, TensorSpec], where: str, signature: CallSignature) -> None:
        for first, other in pairwise(signature.same_dtype):
            if tensors[first].dtype != tensors[other].dtype:
                self.refuse(
                    f"{where}.{other}.dtype",
                    f"is {tensors[other].dtype} and {first} has {tensors[first].dtype}",
                    "Make them equal.",
                )

    def shapes(self, tensors: Mapping[str, TensorSpec], where: str, signature: CallSignature) -> None:
        """Each letter of the signature has one size in the whole call."""
        sizes: dict[str, tuple[Dimension, str]] = {}
        for name, tensor in tensors.items():
            place = f"{where}.{name}.shape"
            patterns = signature.tensors[name].shapes
            pattern = next((one for one in patterns if len(one) == len(tensor.shape)), None)
            if pattern is None:
                shown = " or ".join("[" + ", ".join(one) + "]" for one in patterns)
                self.refuse(place, f"has {len(tensor.shape)} dimensions", f"Give {shown}.")
            for i, (letter, size) in enumerate(zip(pattern, tensor.shape, strict=True)):
                self.dimension(letter, size, f"{place}[{i}]", sizes)

    def dimension(self, letter: str, size: Dimension, where: str, sizes: dict[str, tuple[Dimension, str]]) -> None:
        if letter == TOKENS and size != TOKENS:
            self.refuse(
                where, f"is {size}, and this is the token dimension", f"Write {TOKENS}; buckets say how many tokens."
            )
        if letter != TOKENS and size == TOKENS:
            self.refuse(where, f"is {TOKENS}, and this is not the token dimension", "Give a number.")
        if letter.isdigit() and size != int(letter):
            self.refuse(where, f"is {size}", f"Only {letter} is possible.")
        first, origin = sizes.setdefault(letter, (size, where))
        if size != first:
            self.refuse(where, f"is {size} and {origin} is {first}", "Make them equal.")

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
        if not _is_integer(value) or not least <= value <= greatest:
            self.refuse(where, f"is {_show(value)}", f"Give a whole number from {least} to {greatest}.")
        return int(value)

    def choice(self, value: Any, where: str, choices: Sequence[str]) -> str:
        if not isinstance(value, str) or value not in choices:
            self.refuse(where, f"is {_show(value)}", f"Use {' or '.join(choices)}.")
        return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    """A value in a message: short, on one line, in the spelling of JSON."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "a mapping"
    text = json.dumps(value[:81] if isinstance(value, str) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _nearest(name: Any, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(name[:MAX_NAME], known, 1, 0.5) if isinstance(name, str) else []
    return f"Did you mean {found[0]}?" if found else "Correct it."
