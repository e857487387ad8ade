"""JSON as this product reads and writes it: bounded in size and depth, canonical where a digest is taken of it.

Whatever lies on a volume may have been cut short, edited or planted. Reading it ends in a value or in a `DataError`,
never in a traceback and never in a deeper recursion than the callers, and FlashInfer after them, can follow.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from initwarm.errors import DataError

#: FlashInfer rebuilds tactics recursively, so depth is bounded far below Python's own limit.
MAX_DEPTH = 64
#: Of manifests, bundle.json, records and reasons, in bytes.
RECORD_BYTES = 1 << 20

_CONTAINERS = frozenset((dict, list))
_ONE_KIND_OF_BRACKET = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"\\'))
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


class NewerSchemaError(DataError):
    """A newer version of the tool wrote this: it is not bad, and not for this version to judge."""


def canonical(value: Any) -> bytes:
    """The one spelling of a value that digests are taken of.

    Source:
        FlashInfer 0.7.4, autotune_cache._canonical_json.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha256_hex(data: bytes) -> str:
    """The SHA-256 of bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: object) -> bool:
    """Whether this is a SHA-256 in hexadecimal, and so a safe name on disk as well."""
    return isinstance(text, str) and _HEX_DIGEST.fullmatch(text) is not None


def parse_json(data: bytes, what: str, limit: int = RECORD_BYTES) -> Any:
    """Read one JSON document.

    Args:
        data: the document, UTF-8.
        what: its name in messages.
        limit: its greatest size in bytes.

    Raises:
        DataError: it is too large, nested deeper than 64, or not JSON.
    """
    if len(data) > limit:
        raise DataError(f"{what} is larger than {limit} bytes")
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise DataError(f"{what} is nested deeper than {MAX_DEPTH}") from None
    except ValueError as problem:
        raise DataError(f"{what} is not JSON: {problem}") from problem
    if _is_deeper(value, data, MAX_DEPTH):
        raise DataError(f"{what} is nested deeper than {MAX_DEPTH}")
    return value


def parse_object(data: bytes, what: str, limit: int = RECORD_BYTES) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        DataError: as `parse_json`, or it is another kind of value.
    """
    value = parse_json(data, what, limit)
    if not isinstance(value, dict):
        raise DataError(f"{what} is not a JSON object")
    return value


def parse_record(data: bytes, what: str, schema: int, limit: int = RECORD_BYTES) -> dict[str, Any]:
    """Read one JSON object that states its schema version, and return it without that field.

    Raises:
        NewerSchemaError: it was written by a newer version of the tool.
        DataError: as `parse_object`, or it states no version that this one knows.
    """
    record = parse_object(data, what, limit)
    found = record.pop("schema", None)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise DataError(f"{what} states no schema version")
    if found > schema:
        raise NewerSchemaError(f"{what} has schema {found}, and this version reads up to {schema}")
    return record


def text_map(value: Any, what: str) -> dict[str, str]:
    """Check that a value maps names to text.

    Raises:
        DataError: it does not.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{what} is not a JSON object")
    for name, text in value.items():
        if not isinstance(text, str):
            raise DataError(f"{what} has the field {name!r} that is not text")
    return dict(value)


def printable(text: str) -> str:
    """The text with everything escaped that would move a terminal's cursor or cannot be encoded."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _is_deeper(value: Any, data: bytes, depth: int) -> bool:
    """Whether a value, or the document that it was read from, is nested deeper than this."""
    brackets = data.translate(_ONE_KIND_OF_BRACKET, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in brackets or b"\\" in brackets:
        # A string holds brackets or escapes, so that the text alone does not tell.
        return _is_value_deeper(value, depth)
    for _ in range(depth):
        # Takes away exactly the innermost level. A walk over a file of 100,000 entries would take several times longer.
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _is_value_deeper(value: Any, depth: int) -> bool:
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(depth):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in _CONTAINERS
        ]
    return bool(level)
