from __future__ import annotations

import json

import jsonschema
import pytest

from initwarm.errors import DataError
from initwarm.identity import Identity, differences, encode_manifest, parse_manifest
from initwarm.jsontext import NewerSchemaError
from tests.support.bundles import IDENTITY, METADATA, schema


def test_digest_does_not_depend_on_the_order_of_fields() -> None:
    assert Identity(dict(reversed(METADATA.items()))).digest == IDENTITY.digest


@pytest.mark.parametrize("field", METADATA)
def test_r13_every_field_changes_the_digest_and_is_named(field: str) -> None:
    other = {**METADATA, field: "another"}

    found = differences(other, METADATA)

    assert Identity(other).digest != IDENTITY.digest
    assert [(one.field, one.saved, one.current, one.kind) for one in found] == [
        (field, "another", METADATA[field], "hard")
    ]


@pytest.mark.parametrize("saved", ["unknown", "None", None])
def test_a_value_that_nobody_could_determine_differs_softly(saved: str | None) -> None:
    assert [one.kind for one in differences({**METADATA, "gpu": saved}, METADATA)] == ["soft"]


def test_a_missing_field_differs_softly() -> None:
    assert [(one.field, one.kind) for one in differences({}, {"gpu": "x"})] == [("gpu", "soft")]


def test_wildcards_and_untracked_fields_do_not_differ() -> None:
    assert differences({**METADATA, "gpu": "*", "driver": "600"}, METADATA) == ()


def test_manifest_is_read_back_and_follows_its_schema() -> None:
    data = encode_manifest(IDENTITY)

    jsonschema.validate(json.loads(data), schema("manifest"))
    assert parse_manifest(data).digest == IDENTITY.digest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schema": 1}',
        b'{"schema": true, "metadata": {}}',
        b'{"schema": 1, "metadata": {"gpu": 1}}',
    ],
)
def test_what_is_no_manifest_is_bad_data(data: bytes) -> None:
    with pytest.raises(DataError):
        parse_manifest(data)


def test_a_newer_manifest_is_not_bad() -> None:
    with pytest.raises(NewerSchemaError, match="schema 2"):
        parse_manifest(b'{"schema": 2, "metadata": 7}')
