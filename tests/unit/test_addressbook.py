import dataclasses
import json
from typing import Any

import jsonschema
import pytest

from initwarm.addressbook import (
    LIVING_REFRESHES,
    STALE_SECONDS,
    AddressRecord,
    Sightings,
    as_json,
    encode_record,
    parse_record_of,
    rival_of,
)
from tests.support.bundles import schema

RECORD = AddressRecord("web", "a" * 32, 1, "web-0", "uid-1", ("10.0.0.5", "fd00::5"), 29710, 7)


def record(**changes: Any) -> AddressRecord:
    return dataclasses.replace(RECORD, **changes)


OTHER = record(nonce="b" * 32, pod="web-9", pod_uid="uid-2", addresses=("10.0.0.9",))


def seen(*sightings: tuple[AddressRecord, float]) -> Sightings:
    found = Sightings()
    for one, moment in sightings:
        found.see(one, moment)
    return found


def test_a_record_is_read_as_it_was_written_and_keeps_to_its_schema() -> None:
    jsonschema.validate(as_json(RECORD), schema("address"))

    assert parse_record_of(encode_record(RECORD), "web") == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"group": "other"},
        {"schema": 2},
        {"port": 0},
        {"port": "29710"},
        {"nonce": "../../etc"},
        {"addresses": None},
        {"more": 1},
    ],
)
def test_what_is_not_a_record_of_this_group_is_no_address(change: dict[str, Any]) -> None:
    data = json.dumps({**as_json(RECORD), **change}).encode()

    assert parse_record_of(data, "web") is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_garbage_is_no_address(data: bytes) -> None:
    assert parse_record_of(data, "web") is None


def test_a_record_that_stands_still_is_ignored_and_one_that_is_kept_up_comes_first() -> None:
    still, kept = record(term=9), record(nonce="c" * 32, term=2)
    newer = record(nonce="d" * 32, term=3, count=1)
    sightings = seen((still, 0), (kept, 0), (kept := dataclasses.replace(kept, count=8), 10), (newer, 12))

    assert sightings.candidates([still, newer, kept], now=14) == [kept, still, newer]
    assert sightings.candidates([still, newer, kept], now=STALE_SECONDS) == [kept, newer]


def test_r94_a_leader_that_is_kept_up_beside_this_one_is_a_conflict() -> None:
    sightings = Sightings()
    for count in range(LIVING_REFRESHES):
        sightings.see(dataclasses.replace(OTHER, count=count), count)
    assert rival_of(RECORD, [OTHER], sightings, was_away=False) is None

    sightings.see(dataclasses.replace(OTHER, count=99), 99)

    assert rival_of(RECORD, [OTHER], sightings, was_away=False) == (OTHER, False)


@pytest.mark.parametrize(
    ("other", "was_away", "gives_way"),
    [
        (record(nonce="b" * 32, term=2), False, True),
        (record(nonce="b" * 32, term=2, pod_uid="uid-2"), True, True),
        (record(nonce="b" * 32, term=2, pod_uid="uid-2"), False, False),
        (record(nonce="b" * 32, term=0), True, False),
    ],
)
def test_the_older_of_two_processes_of_one_pod_or_one_that_was_away_gives_way(
    other: AddressRecord, was_away: bool, gives_way: bool
) -> None:
    found = rival_of(RECORD, [other], seen((other, 0)), was_away)

    assert found == ((other, True) if gives_way else None)
    # The successor itself sees nothing that it had to give way to.
    assert not gives_way or rival_of(other, [RECORD], seen((RECORD, 0)), was_away=False) is None


def test_without_a_pod_s_uid_two_processes_are_not_taken_for_one_pod_s() -> None:
    own, other = record(pod_uid=None), record(nonce="b" * 32, term=2, pod_uid=None)

    assert rival_of(own, [other], seen((other, 0)), was_away=False) is None
