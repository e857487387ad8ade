from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from initwarm.errors import DataError
from initwarm.jsontext import NewerSchemaError
from initwarm.lease import (
    STRANGER,
    Decision,
    Holder,
    LeaseRecord,
    LeaseSettings,
    Observation,
    Step,
    decide,
    describe,
    encode_lease,
    follow,
    is_in_time,
    observe,
    parse_lease,
)
from tests.support.bundles import schema

SETTINGS = LeaseSettings()
RECORD = LeaseRecord("pod-a", "decode-0", 3, False)
NOW = 1000.0


def seen(term: int | None = 3, still: float = 0.0, **changes: Any) -> Observation:
    values = {"holder": "pod-a", "group": "decode-0", "count": 7, "released": False, **changes}
    return Observation(term, since=NOW - still, **values)


def decision(observed: Observation, holder: Holder | None = None) -> tuple[Step, int | None]:
    found = decide(observed, NOW, SETTINGS, holder or Holder("pod-b"))
    assert found.why
    return found.step, found.term


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        pytest.param(seen(None, holder=None, count=None), (Step.ACQUIRE, 1), id="nobody has held it"),
        pytest.param(seen(3, 0), (Step.WAIT, None), id="it has just moved"),
        pytest.param(seen(3, 14.9), (Step.WAIT, None), id="it stands still, not long enough"),
        pytest.param(seen(3, 15), (Step.ACQUIRE, 4), id="it has stood still for the duration"),
        pytest.param(seen(3, 0, released=True), (Step.ACQUIRE, 4), id="it was released"),
        pytest.param(seen(3, 14.9, holder=None, count=None), (Step.WAIT, None), id="its maker has not said who it is"),
        pytest.param(seen(3, 15, holder=None, count=None), (Step.ACQUIRE, 4), id="its maker died before it said so"),
        pytest.param(seen(3, 0, holder=STRANGER, count="ab"), (Step.WAIT, None), id="a stranger moves"),
        pytest.param(seen(3, 15, holder=STRANGER, count="ab"), (Step.ACQUIRE, 4), id="a stranger stands still"),
        pytest.param(seen(3, 0, holder="pod-b"), (Step.WAIT, None), id="an earlier life of this pod may still live"),
    ],
)
def test_who_holds_nothing_waits_or_takes_the_next_term(
    observed: Observation, expected: tuple[Step, int | None]
) -> None:
    assert decision(observed) == expected


@pytest.mark.parametrize(
    ("observed", "renewed_ago", "expected"),
    [
        pytest.param(seen(3), 2, Step.RENEW, id="in time"),
        pytest.param(seen(3), 9.9, Step.RENEW, id="just in time"),
        pytest.param(seen(3), 10, Step.LOST, id="too late"),
        pytest.param(seen(3, 100), 2, Step.RENEW, id="its own look says nothing about its renewals"),
        pytest.param(seen(4, holder="pod-b"), 2, Step.LOST, id="another took the next term"),
        pytest.param(seen(4, holder=None, count=None), 2, Step.LOST, id="another has just made the next term"),
        pytest.param(seen(3, holder="pod-b"), 2, Step.LOST, id="the volume gave one term to two"),
        pytest.param(seen(3, holder=STRANGER, count="ab"), 2, Step.LOST, id="somebody wrote over the record"),
        pytest.param(seen(3, holder=None, count=None), 2, Step.RENEW, id="the record is gone or not written yet"),
        pytest.param(seen(2), 2, Step.RENEW, id="a stale look does not show the term"),
        pytest.param(seen(None, holder=None, count=None), 2, Step.RENEW, id="an empty look"),
    ],
)
def test_who_holds_a_term_renews_it_or_has_lost_it(observed: Observation, renewed_ago: float, expected: Step) -> None:
    assert decision(observed, Holder("pod-a", None, 3, NOW - renewed_ago)) == (expected, 3)


@pytest.mark.parametrize(
    ("pod", "expected"), [("uid-1", (Step.ACQUIRE, 4)), ("uid-2", (Step.WAIT, None)), (None, (Step.WAIT, None))]
)
def test_a_process_does_not_wait_for_an_earlier_one_of_its_own_pod(
    pod: str | None, expected: tuple[Step, int | None]
) -> None:
    """It ended with its container; another pod has another uid."""
    observed = seen(3, 0, holder="uid-1:first/epoch")

    assert decision(observed, Holder(f"{pod}:second/epoch", pod)) == expected


def test_every_situation_has_one_decision_and_its_term_fits() -> None:
    terms, holders = (None, 1, 2, 3), (None, "pod-a", "pod-b", STRANGER)
    stills, heldterms, renewals = (0.0, 14.9, 15.0, 1e9), (None, 2), (0.0, 9.9, 10.0, 1e9)
    for term, holder, still, released, held, ago in itertools.product(
        terms, holders, stills, (True, False), heldterms, renewals
    ):
        observed = seen(term, still, holder=holder, released=released)
        found = decide(observed, NOW, SETTINGS, Holder("pod-a", None, held, NOW - ago))
        if held is None:
            assert found.step in (Step.WAIT, Step.ACQUIRE)
            assert found.term == (None if found.step is Step.WAIT else 1 + (term or 0))
            assert (found.step is Step.WAIT) == (term is not None and not released and still < 15)
        else:
            assert found.step in (Step.RENEW, Step.LOST)
            assert found.term == held
            assert found.step is Step.LOST or (ago < 10 and (term or 0) <= held)


@pytest.mark.parametrize("durations", [(10, 10, 2), (9, 10, 2), (15, 2, 2), (15, 10, 0), (15, 10, -1)])
def test_durations_under_which_two_could_hold_the_lease_are_refused(durations: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="retry period < renew deadline < lease duration"):
        LeaseSettings(*durations)


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({}, False),
        ({"released": True}, False),
        ({"count": 8}, True),
        ({"count": "ab"}, True),
        ({"count": None}, True),
        ({"term": 4}, True),
    ],
)
def test_only_another_term_or_count_is_a_movement(changes: dict[str, Any], moves: bool) -> None:
    fresh = seen(**{"term": 3, "still": 0.0, **changes})

    followed = follow(seen(3, 9), fresh)

    assert followed.since == (NOW if moves else NOW - 9)
    assert (followed.term, followed.count, followed.released) == (fresh.term, fresh.count, fresh.released)
    assert follow(None, fresh) == fresh


def test_a_record_is_read_as_it_was_written_and_follows_its_schema() -> None:
    data = encode_lease(RECORD)

    assert parse_lease(data) == RECORD
    assert observe(5, data, NOW) == Observation(5, "pod-a", "decode-0", 3, False, NOW)
    jsonschema.Draft202012Validator.check_schema(schema("lease"))
    jsonschema.validate(json.loads(data), schema("lease"))


@pytest.mark.parametrize(
    "changes",
    [
        {"holder": ""}, {"holder": 1}, {"group": ""}, {"group": None}, {"count": -1}, {"count": 1.5}, {"count": True},
        {"released": 0}, {"more": 1}, {"schema": 0}, {"schema": None},
    ],
)  # fmt: skip
def test_what_the_schema_refuses_the_parser_refuses(changes: dict[str, Any]) -> None:
    value = {**json.loads(encode_lease(RECORD)), **changes}

    assert list(jsonschema.Draft202012Validator(schema("lease")).iter_errors(value))
    with pytest.raises(DataError):
        parse_lease(json.dumps(value).encode())


@pytest.mark.parametrize("name", ["holder", "group", "count", "released", "schema"])
def test_a_record_has_all_its_fields(name: str) -> None:
    value = json.loads(encode_lease(RECORD))
    del value[name]

    with pytest.raises(DataError):
        parse_lease(json.dumps(value).encode())


def test_a_newer_record_is_a_living_holder_whose_every_change_is_a_renewal() -> None:
    newer = b'{"schema": 2, "who": "pod-z", "n": 1}'
    with pytest.raises(NewerSchemaError):
        parse_lease(newer)

    first = observe(3, newer, NOW - 20)
    same = follow(first, observe(3, newer, NOW))
    moved = follow(first, observe(3, newer.replace(b"1", b"2"), NOW))

    assert first.holder == STRANGER
    assert decision(same) == (Step.ACQUIRE, 4)
    assert decision(moved) == (Step.WAIT, None)


@given(st.binary(max_size=64) | st.recursive(st.none() | st.integers(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_whatever_lies_there_is_somebody_and_never_a_traceback(data: bytes) -> None:
    observed = observe(3, data, NOW)

    assert observed.holder == STRANGER
    assert not observed.released
    assert decision(observed) == (Step.WAIT, None)


def test_the_line_for_people_names_the_holder_and_cannot_move_a_cursor() -> None:
    assert describe(seen(3, 4.4), NOW) == "term 3, held by pod-a of group decode-0, unmoving for 4 s"
    assert describe(seen(3, released=True), NOW) == "term 3, released by pod-a of group decode-0"
    assert describe(seen(3, 4, holder=None, group=None), NOW) == (
        "term 3, held by somebody who has not said who, unmoving for 4 s"
    )
    assert describe(seen(None), NOW) == "nobody holds the lease"
    assert describe(seen(3, holder="a\x1b[2J\n"), NOW).isprintable()


# A volume, and processes that may stand still between any two of their operations. One second is four ticks, so that
# clocks with any offset are exact.


@dataclass
class Volume:
    terms: dict[int, bytes | None] = field(default_factory=dict)
    time: float = 0.0


@dataclass
class Process:
    """What the edge does with the decisions, with a stop between any two operations on the volume or a clock."""

    name: str
    volume: Volume
    offset: float
    holder: Holder = field(init=False)
    observed: Observation | None = None
    taken_from: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holder = Holder(self.name)
        self.steps = self.life()
        self.is_idle = True

    def clock(self) -> float:
        return self.volume.time + self.offset

    def holds(self) -> bool:
        return is_in_time(self.holder, self.clock(), SETTINGS)

    def go(self) -> None:
        next(self.steps)

    def round(self) -> None:
        """To the end of what it is at, without a stop."""
        self.go()
        while not self.is_idle:
            self.go()

    def life(self) -> Iterator[None]:
        count = 0
        while True:
            self.is_idle = False
            before = self.clock()
            yield
            term = max(self.volume.terms, default=None)
            yield
            data = self.volume.terms.get(term) if term is not None else None
            yield
            self.observed = follow(self.observed, observe(term, data, self.clock()))
            what: Decision = decide(self.observed, before, SETTINGS, self.holder)
            yield
            if what.step is Step.LOST:
                self.holder = Holder(self.name)
            elif what.term is not None:
                started = self.clock()
                yield
                if what.step is Step.ACQUIRE:
                    if what.term in self.volume.terms:
                        yield from self.idle()
                        continue
                    self.volume.terms[what.term] = None
                    yield
                    if max(self.volume.terms) > what.term:
                        self.volume.terms.pop(what.term, None)  # the other may have removed it as an old one
                        yield from self.idle()
                        continue
                    count = 0
                elif what.term not in self.volume.terms:
                    self.holder = Holder(self.name)
                    yield from self.idle()
                    continue
                else:
                    count += 1
                self.volume.terms[what.term] = encode_lease(LeaseRecord(self.name, "g", count, False))
                yield
                if what.step is Step.ACQUIRE or self.holds():
                    self.holder = Holder(self.name, None, what.term, started)
                else:
                    self.holder = Holder(self.name)
                for old in [old for old in self.volume.terms if old < what.term - 1]:
                    self.volume.terms.pop(old, None)
                    yield
            yield from self.idle()

    def idle(self) -> Iterator[None]:
        self.is_idle = True
        yield


ticks = st.sampled_from((0.0, 0.0, 0.25, 2.0, 5.0, 9.75, 10.0, 14.75, 15.0, 15.25, 60.0))
offsets = st.integers(-(1 << 30), 1 << 30).map(float)
populations = st.lists(offsets, min_size=2, max_size=4)
schedules = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), ticks), max_size=80)


def disturbed(population: list[float], schedule: list[tuple[int, int, float]]) -> list[Process]:
    """Processes after a schedule of (who, how many operations, how many seconds pass then)."""
    volume = Volume()
    processes = [Process(f"pod-{number}", volume, offset) for number, offset in enumerate(population)]
    highest = 0
    for who, operations, seconds in schedule:
        process = processes[who % len(processes)]
        for _ in range(operations):
            process.go()
            holders = [one.name for one in processes if one.holds()]
            assert len(holders) <= 1, f"{holders} hold the lease at {volume.time}"
        volume.time += seconds
        assert max(volume.terms, default=0) >= highest, "a term does not come back"
        highest = max(volume.terms, default=0)
    return processes


@settings(max_examples=400, deadline=None)
@given(populations, schedules)
def test_never_do_two_hold_the_lease_whatever_stands_still_and_for_how_long(
    population: list[float], schedule: list[tuple[int, int, float]]
) -> None:
    disturbed(population, schedule)


@settings(max_examples=200, deadline=None)
@given(populations, schedules, st.integers(0, 12), st.data())
def test_a_holder_that_renews_keeps_it_and_one_that_stops_is_followed_in_time(
    population: list[float], schedule: list[tuple[int, int, float]], last_operations: int, data: st.DataObject
) -> None:
    processes = disturbed(population, schedule)
    volume = processes[0].volume
    bound = SETTINGS.lease_duration + 2 * SETTINGS.retry_period

    def everybody(without: Process | None = None) -> list[Process]:
        """One look of each, in an order that is drawn; then a retry period passes. Returns who holds it."""
        for process in data.draw(st.permutations([one for one in processes if one is not without])):
            process.round()
        volume.time += SETTINGS.retry_period
        return [process for process in processes if process is not without and process.holds()]

    for process in processes:
        while not process.is_idle:
            process.go()
    calm = volume.time
    while not (holders := everybody()):
        assert volume.time - calm <= bound
    [holder] = holders
    for _ in range(10):
        assert everybody() == [holder]

    for _ in range(last_operations):
        holder.go()
    stopped = volume.time
    while not everybody(without=holder):
        assert volume.time - stopped <= bound
