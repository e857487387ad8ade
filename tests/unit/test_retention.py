from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from initwarm.errors import ConfigurationError, UsageError
from initwarm.retention import (
    BundleFacts,
    Item,
    Kind,
    Listing,
    Outcome,
    Report,
    Retention,
    Round,
    decide,
    render_report,
    report_as_json,
)
from initwarm.settings import GcSettings, read_gc_settings

DAY, HOUR = 86_400.0, 3600.0
NOW = 1_000 * DAY
RETENTION = Retention(keep_identities=1, older_than=30 * DAY, now=NOW)
PLANS = ("plan-0", "plan-1")


def item(kind: Kind, path: str, age: float, **changes: Any) -> Item:
    values: dict[str, Any] = {"size": 10, "written": NOW - age, "touched": NOW - age, **changes}
    return Item(path, kind, **values)


def bundle(identity: str, generation: int, age: float, plan: str = PLANS[0], **changes: Any) -> Item:
    facts = {"serves": None, "is_whole": True, **{k: changes.pop(k) for k in ("serves", "is_whole") if k in changes}}
    digest = f"digest-{identity}-{plan}-{generation}"
    return item(
        Kind.BUNDLE,
        f"v1/{identity}/bundles/{plan}/{generation:02}-{digest}",
        age,
        identity=identity,
        plan=plan,
        bundle=BundleFacts(generation, digest, **facts),
        **changes,
    )


def identity(name: str, age: float, *parts: Item, **changes: Any) -> Item:
    written = max([NOW - age, *(part.written for part in parts if part.kind is Kind.BUNDLE)])
    touched = max([NOW - age, *(part.touched for part in parts)])
    return item(
        Kind.IDENTITY,
        f"v1/{name}",
        0,
        identity=name,
        parts=parts,
        **{"written": written, "touched": touched, **changes},
    )


def partials(name: str, age: float, plan: str = PLANS[0]) -> Item:
    top = f"v1/partials/{name}"
    one = item(Kind.PARTIALS, f"{top}/{plan}", age, identity=name, plan=plan)
    return item(Kind.PARTIALS, top, age, identity=name, parts=(one,))


def round_of(name: str, generation: int = 1, age: float = 0.0, plan: str = PLANS[0]) -> Round:
    return Round(f"group-{name}", name, f"digest-{name}-{plan}-{generation}", NOW - age)


NEW = identity("new", 0, bundle("new", 1, 0))


def reasons(*items: Item, retention: Retention = RETENTION, **listed: Any) -> dict[str, str]:
    """What goes, and why."""
    verdicts = decide(Listing(items, **listed), retention)
    assert all(verdict.why for verdict in verdicts)
    return {verdict.item.path: verdict.why for verdict in verdicts if verdict.is_removed}


def kept(path: str, *items: Item, retention: Retention = RETENTION, **listed: Any) -> str:
    """Why this stays."""
    (verdict,) = [one for one in decide(Listing(items, **listed), retention) if one.item.path == path]
    assert not verdict.is_removed, verdict.why
    return verdict.why


OLD = identity("old", 41 * DAY, bundle("old", 1, 41 * DAY))


def test_an_identity_that_nobody_used_for_long_goes_whole() -> None:
    assert reasons(OLD, NEW) == {"v1/old": "not among the 1 used last, not used for 41 days"}


@pytest.mark.parametrize(
    ("more", "listed", "why"),
    [
        pytest.param([NEW], {"rounds": (round_of("old"),)}, "in use by group group-old", id="a round names it"),
        pytest.param([], {}, "among the 1 used last", id="it is among the newest"),
        pytest.param([NEW], {"unread_rounds": ("v1/rounds/g.json",)}, "v1/rounds/g.json is of a newer", id="unread"),
        pytest.param(
            [NEW, item(Kind.LEASE, "v1/leases/x", 9, identity="old")],
            {},
            "a group tunes for it: v1/leases/x changed 9 s ago",
            id="a group holds its lease",
        ),
        pytest.param([NEW, partials("old", 9)], {}, "a group tunes for it: v1/partials/old", id="partials are written"),
        pytest.param(
            [
                NEW,
                item(
                    Kind.LEASE, "v1/leases/x", 0, identity="old", touched=math.inf, is_unreadable=True, obstacle="EIO"
                ),
            ],
            {},
            "a group tunes for it",
            id="its lease cannot be read",
        ),
    ],
)
def test_an_old_identity_stays_where(more: list[Item], listed: dict[str, Any], why: str) -> None:
    assert kept("v1/old", OLD, *more, **listed).startswith(why)


def test_a_younger_identity_stays_and_its_age_is_that_of_its_bundles_and_rounds() -> None:
    found = identity("old", 50 * DAY, bundle("old", 1, 29 * DAY))

    assert kept("v1/old", found, NEW) == "unchanged for 29 days only"
    assert reasons(replace(found, written=NOW - 31 * DAY), NEW).keys() == {"v1/old"}


def test_the_newest_are_those_that_rounds_named_last() -> None:
    used, other = identity("used", 60 * DAY), identity("other", 50 * DAY)

    gone = reasons(used, other, rounds=(round_of("used", age=2 * DAY),))

    assert gone.keys() == {"v1/other"}


def test_a_foreign_name_in_an_identity_keeps_it_and_takes_nobody_elses_place() -> None:
    odd = identity("odd", 40 * DAY, obstacle="holds notes.txt, which initwarm does not write")

    assert kept("v1/odd", odd, NEW).startswith("holds notes.txt")
    assert kept("v1/old", odd, OLD) == "among the 1 used last"


def test_grace_is_kept_whatever_is_asked_for() -> None:
    strict = Retention(0, 0.0, NOW)
    fresh = identity("fresh", 59 * 60, bundle("fresh", 1, 59 * 60))
    items = [
        fresh,
        *(
            item(kind, f"v1/{kind.value}", 59 * 60)
            for kind in Kind
            if kind.value not in ("trash", "identity", "bundle")
        ),
    ]

    assert reasons(*items, retention=strict) == {}
    assert len(reasons(*items, retention=replace(strict, now=NOW + 60))) == len(items)


@pytest.mark.parametrize("time", [0.0, NOW + DAY])
def test_what_has_no_time_or_one_in_the_future_stays(time: float) -> None:
    items = [item(kind, f"v1/{kind.value}", 0, touched=time, written=time) for kind in Kind if kind is not Kind.TRASH]

    assert reasons(*items, retention=Retention(0, 0.0, NOW)) == {}


def generations(*ages: float, **changes: Any) -> Item:
    found = [bundle("new", number, age, **changes) for number, age in enumerate(ages, 1)]
    return identity("new", ages[0], *found)


def test_generations_that_were_replaced_go_and_the_newest_of_each_plan_stays() -> None:
    other = bundle("new", 1, 80 * DAY, PLANS[1])
    found = generations(60 * DAY, 50 * DAY, 40 * DAY)
    found = replace(found, parts=(*found.parts, other))

    gone = reasons(found)

    assert sorted(gone) == [found.parts[0].path, found.parts[1].path]
    assert set(gone.values()) == {
        "replaced by generation 2, and no group uses it",
        "replaced by generation 3, and no group uses it",
    }


@pytest.mark.parametrize(
    ("found", "rounds", "why"),
    [
        pytest.param(generations(60 * DAY, 50 * DAY), (round_of("new"),), "in use by group", id="named"),
        pytest.param(generations(29 * DAY, 9 * DAY), (), "unchanged for 29 days only", id="younger"),
        pytest.param(generations(60 * DAY, 70 * DAY), (), "the newest of its plan", id="the newer is older"),
        pytest.param(
            identity("new", 0, bundle("new", 1, 60 * DAY, serves=4), bundle("new", 2, 50 * DAY, serves=8)),
            (),
            "the newest of its plan",
            id="the newer serves others",
        ),
        pytest.param(
            identity("new", 0, bundle("new", 1, 60 * DAY), bundle("new", 2, 50 * DAY, is_whole=False)),
            (),
            "the newest of its plan",
            id="the newer is damaged",
        ),
        pytest.param(
            identity("new", 0, bundle("new", 1, 60 * DAY, is_whole=False), bundle("new", 2, 50 * DAY)),
            (),
            "cannot be judged",
            id="not of this version",
        ),
    ],
)
def test_an_older_generation_stays_where(found: Item, rounds: tuple[Round, ...], why: str) -> None:
    assert kept(found.parts[0].path, found, rounds=rounds).startswith(why)


def test_partials_go_when_their_bundle_is_there_or_they_are_old() -> None:
    done = identity("new", 0, bundle("new", 1, 2 * DAY))
    other = replace(
        partials("new", 1 * DAY), parts=(*partials("new", 3 * DAY).parts, *partials("new", 0, PLANS[1]).parts)
    )

    assert reasons(done, other) == {"v1/partials/new/plan-0": "what it was for has been published"}
    assert reasons(done, partials("new", 3 * DAY)).keys() == {"v1/partials/new"}
    assert reasons(done, partials("new", 1 * DAY)) == {}
    assert reasons(done, partials("new", 3 * DAY, PLANS[1])) == {}
    assert reasons(done, partials("new", 31 * DAY, PLANS[1])).keys() == {"v1/partials/new"}


def test_a_directory_of_records_goes_with_the_last_and_else_only_what_stands_still() -> None:
    still = item(Kind.ADDRESSES, "v1/addresses/g/a.json", 2 * DAY)
    moves = item(Kind.ADDRESSES, "v1/addresses/g/b.json", 1)

    assert reasons(item(Kind.ADDRESSES, "v1/addresses/g", 2 * DAY, parts=(still,))).keys() == {"v1/addresses/g"}
    assert reasons(item(Kind.ADDRESSES, "v1/addresses/g", 1, parts=(still, moves))).keys() == {still.path}


def test_small_things_say_why_they_go() -> None:
    found = [
        item(kind, f"v1/{kind.value}", 2 * DAY) for kind in (Kind.LEASE, Kind.STAGING, Kind.TRASH, Kind.QUARANTINE)
    ]

    assert reasons(*found, retention=replace(RETENTION, older_than=DAY)) == {
        "v1/lease": "not renewed for 2 days, 11520 times the lease duration",
        "v1/quarantine": "set aside 2 days ago",
        "v1/staging": "left unfinished 2 days ago",
        "v1/trash": "left by a gc that did not end",
    }


# Properties.

ages = st.one_of(st.floats(0, 2 * HOUR), st.floats(0, 90 * DAY))
names = st.sampled_from(["a", "b", "c", "d"])


@st.composite
def identities(draw: st.DrawFn, name: str) -> Item:
    places = draw(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(PLANS)), unique=True, max_size=5))
    serves, whole = st.sampled_from([None, 4, 8]), st.booleans()
    parts = [
        bundle(name, generation, draw(ages), plan, serves=draw(serves), is_whole=draw(whole))
        for generation, plan in places
    ]
    if draw(st.booleans()):
        parts.append(item(Kind.STAGING, f"v1/{name}/.staging-1", draw(ages)))
    obstacle = draw(st.sampled_from([None, None, None, "a stranger"]))
    return identity(name, draw(ages), *parts, obstacle=obstacle)


@st.composite
def listings(draw: st.DrawFn) -> Listing:
    items = [draw(identities(name)) for name in draw(st.lists(names, unique=True))]
    items += [partials(name, draw(ages), draw(st.sampled_from(PLANS))) for name in draw(st.lists(names, unique=True))]
    items += [
        item(Kind.LEASE, f"v1/leases/{name}", draw(ages), identity=name) for name in draw(st.lists(names, unique=True))
    ]
    for kind in (Kind.STAGING, Kind.QUARANTINE):
        items += [item(kind, f"v1/{kind.value}-{n}", age) for n, age in enumerate(draw(st.lists(ages, max_size=2)))]
    rounds = st.builds(round_of, names, st.integers(1, 5), ages, st.sampled_from(PLANS))
    return Listing(tuple(items), tuple(draw(st.lists(rounds, max_size=3))))


retentions = st.builds(Retention, st.integers(0, 4), st.floats(0, 90 * DAY), st.just(NOW))


def removed(listing: Listing, retention: Retention) -> list[Item]:
    return [verdict.item for verdict in decide(listing, retention) if verdict.is_removed]


def covered(items: list[Item]) -> Iterator[str]:
    for one in items:
        yield one.path
        yield from covered(list(one.parts))


def without(items: tuple[Item, ...], gone: set[str]) -> tuple[Item, ...]:
    return tuple(replace(one, parts=without(one.parts, gone)) for one in items if one.path not in gone)


@given(listings(), retentions)
def test_what_a_round_names_is_never_removed(listing: Listing, retention: Retention) -> None:
    for one in removed(listing, retention):
        if one.kind is Kind.IDENTITY:
            assert one.identity not in {record.identity for record in listing.rounds}
        if one.bundle is not None:
            assert one.bundle.digest not in {record.bundle for record in listing.rounds}


@given(listings(), retentions)
def test_what_changed_within_the_grace_period_is_never_removed(listing: Listing, retention: Retention) -> None:
    assert all(NOW - one.touched >= retention.grace for one in removed(listing, retention))


@given(listings(), retentions)
def test_the_newest_bundle_that_a_group_could_take_stays_as_long_as_its_identity(
    listing: Listing, retention: Retention
) -> None:
    gone = set(covered(removed(listing, retention)))
    for one in listing.items:
        if one.kind is Kind.IDENTITY and one.path not in gone:
            for plan in PLANS:
                whole = [part for part in one.parts if part.plan == plan and part.bundle and part.bundle.is_whole]
                for size in (4, 8):
                    usable = [part for part in whole if part.bundle and part.bundle.serves in (None, size)]
                    newest = max(usable, key=lambda part: part.bundle.generation if part.bundle else 0, default=None)
                    assert newest is None or newest.path not in gone


@given(listings(), retentions, st.floats(0, 90 * DAY), st.integers(0, 4))
def test_who_keeps_more_removes_no_more(listing: Listing, retention: Retention, longer: float, more: int) -> None:
    less = set(covered(removed(listing, retention)))

    for other in (
        replace(retention, older_than=retention.older_than + longer),
        replace(retention, keep_identities=retention.keep_identities + more),
    ):
        assert set(covered(removed(listing, other))) <= less


@given(listings(), retentions)
def test_a_second_gc_removes_nothing_more(listing: Listing, retention: Retention) -> None:
    gone = {one.path for one in removed(listing, retention)}

    assert removed(replace(listing, items=without(listing.items, gone)), retention) == []


# What is said.


def test_the_report_says_what_why_and_how_many_bytes() -> None:
    outcomes = (
        Outcome("v1/a", Kind.IDENTITY, 5, "removed", "old"),
        Outcome("v1/b\x1b", Kind.LEASE, 7, "kept", "renewed"),
        Outcome("v1/c", Kind.STAGING, 9, "failed", "EBUSY"),
    )

    assert render_report(Report("/cache", False, False, outcomes)).splitlines() == [
        "kept lease v1/b\\x1b (7 bytes): renewed",
        "removed identity v1/a (5 bytes): old",
        "FAILED staging v1/c (9 bytes): EBUSY",
        "/cache: removed 1 (5 bytes), kept 1, failed 1",
    ]
    dry = render_report(Report("/cache", True, True, outcomes[:1])).splitlines()
    assert dry[0] == "would remove identity v1/a (5 bytes): old"
    assert dry[1:] == [
        "The volume cannot be written, so ages are by this host's clock.",
        "/cache: would remove 1 (5 bytes), kept 0",
    ]
    value = report_as_json(Report("/cache", True, False, outcomes))
    assert json.loads(json.dumps(value))["outcomes"][0] == {
        "path": "v1/a", "kind": "identity", "size": 5, "what": "removed", "why": "old"
    }  # fmt: skip
    assert (value["dry_run"], value["clock"], value["removed_bytes"]) == (True, "volume", 5)


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 7 * DAY), ("36h", 36 * HOUR), ("90m", 5400), ("45s", 45), ("600", 600), ("0", 0)]
)
def test_ages_are_given_in_days_hours_minutes_or_seconds(text: str, seconds: float) -> None:
    assert read_gc_settings({"older_than": text}, {}) == GcSettings(3, seconds, False)


def test_flags_beat_variables_which_beat_defaults() -> None:
    environ = {"INITWARM_KEEP_IDENTITIES": "5", "INITWARM_OLDER_THAN": "1h", "INITWARM_DRY_RUN": "1"}

    assert read_gc_settings({}, {}) == GcSettings(3, 30 * DAY, False)
    assert read_gc_settings({"keep_identities": "0"}, environ) == GcSettings(0, HOUR, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [("older_than", bad) for bad in ("soon", "-1d", "1.5d", "7 days", "٣d")]
    + [("keep_identities", bad) for bad in ("-1", "all", "1e3", "٣")],
)
def test_bad_values_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is .* Nothing was removed"):
        read_gc_settings({name: text}, {})
    with pytest.raises(ConfigurationError, match=f"INITWARM_{name.upper()} is"):
        read_gc_settings({}, {f"INITWARM_{name.upper()}": text})
