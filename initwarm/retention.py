"""What `gc` removes from a cache volume and what stays, decided from a listing of it. Pure.

A reader leaves no trace on a volume: access times are off or wrong, and nothing locks. So what goes must be out of use
by what can be seen: no round names it, nobody tunes its environment now, and it has not changed for long. All times are
of the volume's own clock in seconds, as are its times of change; clocks of hosts are not compared with it.

A lease is dead for other groups when it stands still on their monotonic clocks. A command that looks once cannot watch
it, so here a lease or an address record is dead when it has not changed for the grace period, 240 times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from initwarm.jsontext import printable
from initwarm.lease import LeaseSettings

#: What changed so recently stays, whatever it is: far longer than a run, a renewal or a publication takes.
GRACE_SECONDS = 3600.0


class Kind(Enum):
    """What an item is."""

    IDENTITY = "identity"
    BUNDLE = "bundle"
    PARTIALS = "partials"
    LEASE = "lease"
    ADDRESSES = "addresses"
    QUARANTINE = "quarantine"
    STAGING = "staging"
    #: Taken away by a gc that did not live to erase it.
    TRASH = "trash"


@dataclass(frozen=True)
class BundleFacts:
    """What decides whether a bundle replaces another one.

    Args:
        generation: of its plan in its environment.
        digest: its own.
        serves: the only world size that it serves, or None where it serves all.
        is_whole: its record can be read, and each file that the record names has the size that it gives.
    """

    generation: int
    digest: str
    serves: int | None
    is_whole: bool


@dataclass(frozen=True)
class Item:
    """Something on the volume that can be removed as a whole.

    Args:
        path: below the root.
        kind: what it is.
        size: bytes of the files in it.
        written: the newest time of change of a finished file in it; 0 where there is none.
        touched: the newest time of change of anything in it, directories included; 0 where the volume keeps none.
        identity: the environment that it belongs to, or None.
        plan: that it belongs to, or None.
        obstacle: why it is not for this version to remove, or None.
        is_unreadable: the obstacle is an error of the volume.
        bundle: of a bundle.
        parts: what in it can be removed alone.
    """

    path: str
    kind: Kind
    size: int
    written: float
    touched: float
    identity: str | None = None
    plan: str | None = None
    obstacle: str | None = None
    is_unreadable: bool = False
    bundle: BundleFacts | None = None
    parts: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Round:
    """A round record: whose, what it names as in use, and when it was written."""

    group: str
    identity: str
    bundle: str
    written: float


@dataclass(frozen=True)
class Listing:
    """What is on a volume.

    Args:
        items: whatever could be removed.
        rounds: the records that pods would believe.
        unread_rounds: paths of records that a newer version wrote, which may name anything.
    """

    items: tuple[Item, ...]
    rounds: tuple[Round, ...] = ()
    unread_rounds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Retention:
    """What is to be kept.

    Args:
        keep_identities: so many environments, those used last.
        older_than: whatever changed in so many seconds.
        now: by the volume's clock.
        grace: whatever changed in so many seconds, even if `older_than` is less.
    """

    keep_identities: int
    older_than: float
    now: float
    grace: float = GRACE_SECONDS


@dataclass(frozen=True)
class Verdict:
    """Whether an item goes, and why."""

    item: Item
    is_removed: bool
    why: str


def decide(listing: Listing, retention: Retention) -> tuple[Verdict, ...]:
    """Decide about everything on a volume.

    Returns:
        A verdict for each item, in order of paths. Parts of what is removed are not listed; parts of what stays are.
    """
    judge = _Judge(listing, retention)
    return tuple(verdict for item in sorted(listing.items, key=_path) for verdict in judge.verdicts(item))


def claim_on(item: Item, listing: Listing, retention: Retention) -> str | None:
    """Who uses an identity or bundle as far as rounds, leases and partials tell; None if nobody."""
    if listing.unread_rounds:
        return f"{listing.unread_rounds[0]} is of a newer version and may name it"
    is_named = [one for one in listing.rounds if item.identity == one.identity and _digest(item) in (None, one.bundle)]
    if is_named:
        return f"in use by {_listed(sorted({one.group for one in is_named}))}"
    for other in listing.items:
        if other.kind in (Kind.LEASE, Kind.PARTIALS) and other.identity == item.identity:
            age = retention.now - other.touched
            if age < retention.grace:
                return f"a group tunes for it: {other.path} changed {_age(age)} ago"
    return None


@dataclass(frozen=True)
class Outcome:
    """What became of an item, or would become of it.

    Args:
        path: below the root.
        kind: what it is.
        size: bytes of the files in it.
        what: `removed`, `kept`, or `failed` where the volume did not let it be read or removed.
        why: in words.
    """

    path: str
    kind: Kind
    size: int
    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """What a gc did, or would do.

    Args:
        root: of the cache.
        is_dry_run: nothing was changed.
        is_host_clock: the volume cannot be written, so that its clock was not asked and this host's was used.
        outcomes: in order of paths.
    """

    root: str
    is_dry_run: bool
    is_host_clock: bool
    outcomes: tuple[Outcome, ...]

    def of(self, what: str) -> list[Outcome]:
        """The outcomes of one sort."""
        return [one for one in self.outcomes if one.what == what]


def report_as_json(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "schema": 1,
        "root": report.root,
        "dry_run": report.is_dry_run,
        "clock": "host" if report.is_host_clock else "volume",
        "removed_bytes": sum(one.size for one in report.of("removed")),
        "outcomes": [{**vars(one), "kind": one.kind.value} for one in report.outcomes],
    }


def render_report(report: Report) -> str:
    """The report for a person: what, how many bytes, and why, one a line; then the sums."""
    verbs = {"removed": "would remove" if report.is_dry_run else "removed", "kept": "kept", "failed": "FAILED"}
    lines = [
        f"{verbs[what]} {one.kind.value} {one.path} ({one.size} bytes): {one.why}"
        for what in ("kept", "removed", "failed")
        for one in report.of(what)
    ]
    removed, failed = report.of("removed"), report.of("failed")
    sums = (
        f"{verbs['removed']} {len(removed)} ({sum(one.size for one in removed)} bytes), kept {len(report.of('kept'))}"
    )
    if failed:
        sums += f", failed {len(failed)}"
    if report.is_host_clock:
        lines.append("The volume cannot be written, so ages are by this host's clock.")
    return "\n".join(printable(line) for line in [*lines, f"{report.root}: {sums}"])


class _Judge:
    def __init__(self, listing: Listing, retention: Retention) -> None:
        self._listing = listing
        self._retention = retention
        identities = [item for item in listing.items if item.kind is Kind.IDENTITY]
        used_last = sorted(
            (item for item in identities if item.obstacle is None), key=lambda item: (-self._used(item), item.path)
        )
        self._newest = {item.path for item in used_last[: retention.keep_identities]}
        self._bundles = [part for item in identities for part in item.parts if part.bundle and part.bundle.is_whole]

    def verdicts(self, item: Item) -> Iterator[Verdict]:
        verdict = self._judged(item)
        yield verdict
        if not verdict.is_removed:
            for part in sorted(item.parts, key=_path):
                yield from self.verdicts(part)

    def _judged(self, item: Item) -> Verdict:
        kept = item.obstacle or self._is_too_young(item) or self._is_kept(item)
        return Verdict(item, False, kept) if kept else Verdict(item, True, self._reason(item))

    def _is_kept(self, item: Item) -> str | None:
        """Why an item stays that is old enough for its grace; None for what nobody misses then."""
        rules = {
            Kind.IDENTITY: self._keeps_identity,
            Kind.BUNDLE: self._keeps_bundle,
            Kind.PARTIALS: self._keeps_partials,
            Kind.ADDRESSES: self._keeps_container,
            Kind.QUARANTINE: self._keeps_quarantined,
        }
        return rules[item.kind](item) if item.kind in rules else None

    def _is_too_young(self, item: Item) -> str | None:
        if item.kind is Kind.TRASH:
            return None
        if item.touched <= 0:
            return "the volume does not say when it changed"
        age = self._retention.now - item.touched
        return f"changed {_age(age)} ago" if age < self._retention.grace else None

    def _keeps_identity(self, item: Item) -> str | None:
        claim = claim_on(item, self._listing, self._retention)
        if claim is not None:
            return claim
        if item.path in self._newest:
            return f"among the {self._retention.keep_identities} used last"
        return self._is_recent(self._used(item) or item.touched)

    def _keeps_bundle(self, item: Item) -> str | None:
        if item.bundle is None or not item.bundle.is_whole:
            return "cannot be judged, since it is not whole or not of this version"
        claim = claim_on(item, self._listing, self._retention)
        if claim is None and self._successor(item) is None:
            return "the newest of its plan"
        return claim or self._is_recent(item.touched)

    def _keeps_partials(self, item: Item) -> str | None:
        if item.plan is None:
            return self._keeps_container(item)
        return None if self._is_finished(item) else self._is_recent(item.touched)

    def _keeps_container(self, item: Item) -> str | None:
        """A directory of items goes with the last of them."""
        is_needed = any(not verdict.is_removed for part in item.parts for verdict in self.verdicts(part))
        return "holds what stays" if is_needed else None

    def _keeps_quarantined(self, item: Item) -> str | None:
        return self._is_recent(item.touched)

    def _is_recent(self, changed: float) -> str | None:
        age = self._retention.now - changed
        return f"unchanged for {_age(age)} only" if age < self._retention.older_than else None

    def _used(self, item: Item) -> float:
        """When an identity was last published to, or adopted by a group that left word of it."""
        return max([item.written, *(one.written for one in self._listing.rounds if one.identity == item.identity)])

    def _successor(self, item: Item) -> Item | None:
        """A newer bundle that every group takes that could take this one, also by the time when it was written."""
        assert item.bundle is not None
        for other in self._bundles:
            assert other.bundle is not None
            is_newer = other.bundle.generation > item.bundle.generation and other.written >= item.written
            is_alike = (other.identity, other.plan) == (item.identity, item.plan)
            if is_newer and is_alike and other.bundle.serves in (None, item.bundle.serves):
                return other
        return None

    def _is_finished(self, item: Item) -> bool:
        """Whether what partials were for has been published since."""
        alike = [one for one in self._bundles if (one.identity, one.plan) == (item.identity, item.plan)]
        return any(one.written >= item.touched for one in alike)

    def _reason(self, item: Item) -> str:
        age = _age(self._retention.now - item.touched)
        if item.kind is Kind.IDENTITY:
            used = _age(self._retention.now - (self._used(item) or item.touched))
            return f"not among the {self._retention.keep_identities} used last, not used for {used}"
        if item.kind is Kind.BUNDLE:
            successor = self._successor(item)
            assert successor is not None
            assert successor.bundle is not None
            return f"replaced by generation {successor.bundle.generation}, and no group uses it"
        if item.kind is Kind.PARTIALS and self._is_finished(item):
            return "what it was for has been published"
        if item.kind is Kind.LEASE:
            times = (self._retention.now - item.touched) / LeaseSettings().lease_duration
            return f"not renewed for {age}, {times:.0f} times the lease duration"
        return _REASONS.get(item.kind, "unchanged for {age}").format(age=age)


_REASONS: Mapping[Kind, str] = {
    Kind.ADDRESSES: "no leader has renewed it for {age}",
    Kind.QUARANTINE: "set aside {age} ago",
    Kind.STAGING: "left unfinished {age} ago",
    Kind.TRASH: "left by a gc that did not end",
}


def _path(item: Item) -> str:
    return item.path


def _digest(item: Item) -> str | None:
    return None if item.bundle is None else item.bundle.digest


def _listed(groups: list[str], most: int = 3) -> str:
    more = f" and {len(groups) - most} more" if len(groups) > most else ""
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(groups[:most])}{more}"


def _age(seconds: float) -> str:
    """A duration in the greatest unit of which there are two."""
    for unit, length in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
