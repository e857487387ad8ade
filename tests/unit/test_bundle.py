from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from initwarm.bundle import Place, authenticate, encode_bundle, is_authentic, parse_bundle, parse_place
from initwarm.errors import DataError
from initwarm.jsontext import MAX_DEPTH, NewerSchemaError, parse_json, printable
from tests.support.bundles import IDENTITY, PLAN, bundle_files, bundle_of, schema

BUNDLE = bundle_of(bundle_files())


def test_bundle_is_read_back_and_follows_its_schema() -> None:
    data = encode_bundle(BUNDLE)

    jsonschema.validate(json.loads(data), schema("bundle"))
    assert parse_bundle(data) == BUNDLE


def test_r14_the_tool_version_is_not_in_the_digest() -> None:
    assert replace(BUNDLE, tool_version="99").digest == BUNDLE.digest


@pytest.mark.parametrize(
    "change", [{"world_size": 8}, {"plan": "c" * 64}, {"rank_free": False}, {"strategy": "lockstep"}, {"entries": 9}]
)
def test_everything_else_is_in_the_digest(change: dict[str, Any]) -> None:
    assert replace(BUNDLE, **change).digest != BUNDLE.digest


def test_only_rank_free_bundles_serve_another_world_size() -> None:
    assert BUNDLE.serves(16)
    assert replace(BUNDLE, rank_free=False).serves(4)
    assert not replace(BUNDLE, rank_free=False).serves(8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"plan": "../../etc"}, "plan"),
        ({"identity": IDENTITY.digest.upper()}, "identity"),
        ({"files": {}}, "does not name flashinfer-v1.json"),
        ({"files": {"flashinfer-v1.json": {"sha256": "x", "size": 1}}}, "sha256 and size"),
        ({"files": {"flashinfer-v1.json": {"sha256": PLAN, "size": -1}}}, "size"),
        ({"files": {"flashinfer-v1.json": {"sha256": PLAN, "size": 1 << 40}}}, "more than"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": True}, "world_size"),
        ({"world_size": 1.5}, "world_size"),
        ({"entries": "4"}, "entries"),
        ({"rank_free": 1}, "rank_free"),
        ({"strategy": None}, "strategy"),
        ({"extra": 1}, "in excess: 'extra'"),
        ({"schema": 0}, "schema version"),
        ({"schema": "1"}, "schema version"),
    ],
)
def test_a_record_that_lies_is_bad_data(change: dict[str, Any], match: str) -> None:
    record = {**json.loads(encode_bundle(BUNDLE)), **change}

    with pytest.raises(DataError, match=match):
        parse_bundle(json.dumps(record).encode())


def test_a_file_outside_the_bundle_cannot_be_named() -> None:
    record = json.loads(encode_bundle(BUNDLE))
    record["files"]["../../x"] = {"sha256": PLAN, "size": 1}

    with pytest.raises(DataError, match=r"'\.\./\.\./x'"):
        parse_bundle(json.dumps(record).encode())


def test_a_newer_schema_is_not_bad() -> None:
    with pytest.raises(NewerSchemaError):
        parse_bundle(b'{"schema": 2, "shape": "unheard of"}')


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        (f"7-{PLAN}", 7),
        (f"0-{PLAN}", 0),
        (f"07-{PLAN}", None),
        (f"-1-{PLAN}", None),
        (f".staging-7-{PLAN}", None),
        (f"7-{PLAN}.bak", None),
        (f"{'9' * 40}-{PLAN}", None),
        (f"\u0667-{PLAN}", None),
    ],
)
def test_only_exact_names_are_bundles(name: str, generation: int | None) -> None:
    place = parse_place(IDENTITY.digest, PLAN, name)

    assert place == (None if generation is None else Place(IDENTITY.digest, PLAN, generation, PLAN))


def test_authentication_needs_the_key_and_the_content() -> None:
    mac = authenticate(b"record", b"key")

    assert is_authentic(b"record", mac, b"key")
    assert not is_authentic(b"record", mac, b"other key")
    assert not is_authentic(b"Record", mac, b"key")
    assert not is_authentic(b"record", None, b"key")
    assert not is_authentic(b"record", b"\xff\xfe", b"key")


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_depth_is_bounded_without_a_recursion_error(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    core = b"1"

    assert parse_json(opening * MAX_DEPTH + core + closing * MAX_DEPTH, "it") is not None
    for depth in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(DataError, match=r"deeper than 64|not JSON"):
            parse_json(opening * depth + core + closing * depth, "it")


@pytest.mark.parametrize("text", [b'"[["', b'"]"', b'"\\""', b'"}{"', b'"\\\\"', b'"x"'])
def test_brackets_in_strings_do_not_count_as_depth(text: bytes) -> None:
    assert parse_json(b"[" * MAX_DEPTH + text + b"]" * MAX_DEPTH, "it") is not None
    with pytest.raises(DataError, match="deeper than 64"):
        parse_json((b"[" + text + b",") * MAX_DEPTH + b"[1]" + (b"," + text + b"]") * MAX_DEPTH, "it")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"nul", b"\x00" * 64, b'{"a": 1} {}', b'"\xed\xa0\x80"'])
def test_what_is_not_json_is_bad_data(data: bytes) -> None:
    with pytest.raises(DataError, match="it is not JSON"):
        parse_json(data, "it")


def test_size_is_bounded() -> None:
    with pytest.raises(DataError, match="larger than 10 bytes"):
        parse_json(b" " * 11, "it", 10)


def test_a_terminal_is_not_moved_by_what_was_read() -> None:
    assert printable("a\x1b[2J\ud800\n") == "a\\x1b[2J\\ud800\\n"
