"""The text of a plan as plain values: JSON, or YAML that is read as strictly as JSON.

In YAML, numbers, true, false and null are those of JSON and everything else is text, so that `no`, `010` and `1:30`
stay what they look like. Aliases, tags and further documents are refused: a few aliases can stand for a document of any
size. Nothing of what is read is run.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from initwarm.errors import PlanError
from initwarm.jsontext import printable

MAX_PLAN_BYTES = 4 << 20
MAX_DEPTH = 32
#: Of YAML, whose reader may be pure Python; the largest plan of the largest number of calls has half as many.
MAX_NODES = 1_000_000
_MAX_DIGITS = 40

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}

_EFFECT = "No plan was loaded."
_FIX = "docs/plans.md shows the format; `initwarm plan FILE` checks a file."


class _RefusedError(Exception):
    """What is wrong with the text, as the rest of a sentence that begins with its name."""

    def __init__(self, what: str, fix: str = _FIX) -> None:
        super().__init__(what)
        self.fix = fix


def read_document(text: str, source: str) -> Any:
    """Read a document of mappings, lists, text, finite numbers, true, false and null.

    Args:
        text: JSON or YAML.
        source: where it comes from, for messages.

    Raises:
        PlanError: it is neither, too large, nested too deeply, or has a key twice.
    """
    try:
        return _values(text.removeprefix("\ufeff"))
    except _RefusedError as problem:
        raise PlanError(f"The plan {printable(source)} {problem}.", _EFFECT, problem.fix) from problem


def _values(text: str) -> Any:
    if len(text) > MAX_PLAN_BYTES or len(text.encode(errors="replace")) > MAX_PLAN_BYTES:
        raise _RefusedError(f"is larger than {MAX_PLAN_BYTES} bytes")
    try:
        document = json.loads(
            text, object_pairs_hook=_mapping, parse_int=_integer, parse_float=_float, parse_constant=_not_finite
        )
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as problem:
        return _yaml(text, f"{problem.msg} in line {problem.lineno}")
    if _is_too_deep(document):
        raise _too_deep()
    return document


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _twice(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return values


def _twice(key: str, line: str = "") -> _RefusedError:
    return _RefusedError(f"has the key {json.dumps(key[:80])} twice in one mapping{line}", "Remove one of them.")


def _too_deep() -> _RefusedError:
    return _RefusedError(f"is nested deeper than {MAX_DEPTH} levels")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _RefusedError(f"has a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def _not_finite(text: str) -> NoReturn:
    raise _RefusedError(f"has the number {text[:80]}", "Use finite numbers only.")


def _is_too_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
            if isinstance(child, dict | list)
        ]
    return bool(level)


def _yaml(text: str, not_json: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise _RefusedError(
            f"is not JSON ({not_json}), and pyyaml, which would read YAML, is not installed here",
            "Write the plan as JSON (`initwarm plan FILE --format json` converts it), or install pyyaml.",
        ) from None
    loader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    values = _YamlValues()
    try:
        for event in yaml.parse(text, Loader=loader):
            values.take(event)
    except yaml.MarkedYAMLError as problem:
        line = f" in line {problem.problem_mark.line + 1}" if problem.problem_mark is not None else ""
        raise _not_a_document(f"{problem.problem}{line}", not_json) from problem
    except (yaml.YAMLError, ValueError) as problem:
        raise _not_a_document(str(problem), not_json) from problem
    return values.document


def _not_a_document(not_yaml: str, not_json: str) -> _RefusedError:
    words = printable(" ".join(not_yaml.split()))[:200]
    return _RefusedError(f"is neither YAML ({words}) nor JSON ({not_json})")


class _YamlValues:
    """Builds values from the events of a YAML parser, which do not nest."""

    def __init__(self) -> None:
        self.document: Any = None
        self._open: list[dict[str, Any] | list[Any]] = []
        #: The key that waits for its value, one for each open collection.
        self._keys: list[str | None] = []
        self._documents = 0
        self._nodes = 0

    def take(self, event: Any) -> None:
        """Add what an event says."""
        kind = type(event).__name__
        line = f" in line {event.start_mark.line + 1}" if event.start_mark is not None else ""
        if kind == "DocumentStartEvent":
            self._documents += 1
            if self._documents > 1:
                raise _RefusedError(f"has a second document{line}", "Give one document for the whole group.")
        elif kind == "AliasEvent":
            raise _RefusedError(f"has an alias{line}", "Write the value out; `defaults` has what all calls share.")
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self._open.pop()
            self._keys.pop()
        elif kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
            self._node(event, kind, line)

    def _node(self, event: Any, kind: str, line: str) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _RefusedError(f"has more than {MAX_NODES} values")
        if event.tag is not None:
            raise _RefusedError(f"has the tag {printable(str(event.tag))[:80]}{line}", "Remove it.")
        if self._expects_key():
            if kind != "ScalarEvent":
                raise _RefusedError(f"has a key that is no text{line}")
            self._begin_value(event.value, line)
            return
        value: Any = _scalar(event) if kind == "ScalarEvent" else {} if kind == "MappingStartEvent" else []
        self._add(value)
        if kind != "ScalarEvent":
            self._open.append(value)
            self._keys.append(None)
            if len(self._open) > MAX_DEPTH:
                raise _too_deep()

    def _expects_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1], dict) and self._keys[-1] is None

    def _begin_value(self, key: str, line: str) -> None:
        if key in self._open[-1]:
            raise _twice(key, line)
        self._keys[-1] = key

    def _add(self, value: Any) -> None:
        if not self._open:
            self.document = value
            return
        parent = self._open[-1]
        if isinstance(parent, list):
            parent.append(value)
            return
        key = self._keys[-1]
        assert key is not None
        parent[key] = value
        self._keys[-1] = None


def _scalar(event: Any) -> Any:
    text: str = event.value
    is_plain = event.implicit[0]
    if not is_plain:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _NUMBER.fullmatch(text):
        return _float(text)
    if _NOT_FINITE.fullmatch(text):
        _not_finite(text)
    return text
