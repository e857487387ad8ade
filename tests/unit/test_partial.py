import json
from typing import Any

import pytest

from initwarm.entries import encode_v1, parse_v1, select_v1
from initwarm.errors import DataError
from initwarm.partial import encode_partial, merge_partials, parse_partial
from tests.support.bundles import IDENTITY, METADATA, OTHER_PLAN, PLAN, key, v1_file

V1 = encode_v1(v1_file())


@pytest.mark.parametrize("secret", [None, b"k" * 32])
def test_what_is_finished_is_read_as_it_was_written(secret: bytes | None) -> None:
    assert parse_partial(encode_partial(PLAN, IDENTITY.digest, V1, secret), PLAN, IDENTITY, secret) == parse_v1(V1)


@pytest.mark.parametrize(
    "change",
    [{"plan": OTHER_PLAN}, {"identity": "f" * 64}, {"v1": None}, {"v1": "{"}, {"schema": 0}, {"schema": 9}],
)
def test_a_partial_of_something_else_is_refused(change: dict[str, Any]) -> None:
    record = {**json.loads(encode_partial(PLAN, IDENTITY.digest, V1, None)), **change}

    with pytest.raises(DataError):
        parse_partial(json.dumps(record).encode(), PLAN, IDENTITY, None)


def test_a_partial_from_another_environment_is_refused_whatever_it_claims() -> None:
    foreign = encode_v1(v1_file(metadata={**METADATA, "gpu": "NVIDIA B200"}))

    with pytest.raises(DataError, match="another environment"):
        parse_partial(encode_partial(PLAN, IDENTITY.digest, foreign, None), PLAN, IDENTITY, None)


@pytest.mark.parametrize("written_with", [None, b"other" * 8])
def test_with_a_key_only_what_its_holders_wrote_is_believed(written_with: bytes | None) -> None:
    data = encode_partial(PLAN, IDENTITY.digest, V1, written_with)

    with pytest.raises(DataError, match="authenticated"):
        parse_partial(data, PLAN, IDENTITY, b"k" * 32)


def test_the_mac_covers_the_winners() -> None:
    record = json.loads(encode_partial(PLAN, IDENTITY.digest, V1, b"k" * 32))
    record["v1"] = encode_v1(v1_file({key(): 3})).decode()

    with pytest.raises(DataError, match="authenticated"):
        parse_partial(json.dumps(record).encode(), PLAN, IDENTITY, b"k" * 32)


def test_partials_of_several_ranks_are_merged_and_none_is_nothing() -> None:
    whole = v1_file()
    halves = [select_v1(whole, list(whole.entries)[:2]), select_v1(whole, list(whole.entries)[2:])]

    assert merge_partials(halves) == V1
    assert merge_partials([]) is None
    assert merge_partials([select_v1(whole, [])]) is None
