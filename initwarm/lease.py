"""Which of the groups that share a volume tunes: a lease in client-go's vocabulary, without anybody's wall clock.

Whoever makes the directory of term N holds that term, and shows that it lives by counting up a record inside it. The
others look now and then and compare only what they see with what they saw, on their own monotonic clock: a term whose
counter has stood still for the lease duration is dead, and somebody takes the next one. The holder gives up earlier, a
renew deadline after its last renewal, so that clocks need no common zero, only the same pace.

    {"schema": 1, "holder": ..., "group": ..., "count": n, "released": false}                        lease.json

A lease saves work and never guards correctness: two groups that both tune publish two generations, and both are good.

Source:
    client-go, tools/leaderelection/leaderelection.go (LeaderElectionConfig and its defaults).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from initwarm.errors import DataError
from initwarm.jsontext import canonical, parse_record, printable, sha256_hex

SCHEMA = 1
RECORD = "lease.json"
#: Of one record; a holder's and a group's name are at most a few hundred bytes each.
LEASE_BYTES = 1 << 14
#: Holds a term whose record this version cannot read, because it is damaged or of a newer version.
STRANGER = "somebody whose record this version cannot read"

_FIELDS = frozenset(("holder", "group", "count", "released"))


@dataclass(frozen=True)
class LeaseSettings:
    """How long is long enough, in seconds.

    Args:
        lease_duration: a term that stood still for so long is taken over.
        renew_deadline: a holder whose last renewal began so long ago holds nothing any more.
        retry_period: between two looks at the volume, and between two renewals.

    Raises:
        ValueError: a holder would not have given up when others take over, or could not renew in time.
    """

    lease_duration: float = 15.0
    renew_deadline: float = 10.0
    retry_period: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_period < self.renew_deadline < self.lease_duration:
            raise ValueError(f"not retry period < renew deadline < lease duration: {self}")


@dataclass(frozen=True)
class LeaseRecord:
    """What the holder of a term says.

    Args:
        holder: the process; nobody else runs under this name at the same time.
        group: what it tunes for.
        count: grows with every renewal.
        released: the holder is done, and nobody needs to wait.
    """

    holder: str
    group: str
    count: int
    released: bool


@dataclass(frozen=True)
class Observation:
    """What a look at the volume showed.

    Args:
        term: the highest there is, or None.
        holder: who holds it, or None where its maker has not said so yet.
        group: what the holder tunes for, or None.
        count: the renewal counter; the digest of a record that cannot be read; None where there is no record.
        released: its holder is done.
        since: since when term and counter have stood still, in seconds on the observer's own monotonic clock. Never
            earlier than the change itself: the end of the look that first showed it.
    """

    term: int | None
    holder: str | None
    group: str | None
    count: int | str | None
    released: bool
    since: float


@dataclass(frozen=True)
class Holder:
    """Who decides, and what it holds.

    Args:
        name: as in its records.
        pod: that it runs in, as its name begins; None where that is not known.
        term: that it holds, or None.
        renewed: when its last successful renewal began, in seconds on its own monotonic clock. No observer can have
            seen that renewal earlier.
    """

    name: str
    pod: str | None = None
    term: int | None = None
    renewed: float = 0.0

    def succeeds(self, other: str | None) -> bool:
        """Whether another holder was an earlier process of this one's pod, which ended with its container."""
        return self.pod is not None and other is not None and other.startswith(f"{self.pod}:")


class Step(Enum):
    """What to do now."""

    WAIT = "wait"
    ACQUIRE = "acquire"
    RENEW = "renew"
    LOST = "lost"


@dataclass(frozen=True)
class Decision:
    """A step, the term that it is about (None to wait), and why."""

    step: Step
    term: int | None
    why: str


def decide(observed: Observation, now: float, settings: LeaseSettings, holder: Holder) -> Decision:
    """Decide what a process does about the lease.

    Args:
        observed: the newest observation.
        now: seconds on the same clock, taken before that look began: what it showed was still so then.
        settings: the durations.
        holder: who decides.
    """
    if holder.term is not None:
        return _of_holder(observed, now, settings, holder, holder.term)
    if observed.term is None:
        return Decision(Step.ACQUIRE, 1, "nobody has held it")
    if observed.released:
        return Decision(Step.ACQUIRE, observed.term + 1, f"{describe(observed, now)} is over")
    if holder.succeeds(observed.holder):
        return Decision(
            Step.ACQUIRE, observed.term + 1, f"{describe(observed, now)} was an earlier process of this pod"
        )
    if now - observed.since >= settings.lease_duration:
        return Decision(Step.ACQUIRE, observed.term + 1, f"{describe(observed, now)} has stood still for too long")
    return Decision(Step.WAIT, None, describe(observed, now))


def is_in_time(holder: Holder, now: float, settings: LeaseSettings) -> bool:
    """Whether a holder still holds its term: nobody else can have seen it stand still for the lease duration."""
    return holder.term is not None and now - holder.renewed < settings.renew_deadline


def follow(previous: Observation | None, fresh: Observation) -> Observation:
    """The fresh observation, standing still since the earlier one where neither term nor counter has moved."""
    if previous is not None and (previous.term, previous.count) == (fresh.term, fresh.count):
        return replace(fresh, since=previous.since)
    return fresh


def observe(term: int | None, data: bytes | None, seen: float) -> Observation:
    """What a look showed.

    A record that is damaged, or of a newer schema, is that of a living holder of another group, whose renewals show in
    its bytes. It stays where it is.

    Args:
        term: the highest on the volume, or None.
        data: its record, or None where there is none.
        seen: when the look ended, in seconds on the observer's monotonic clock.
    """
    if term is None or data is None:
        return Observation(term, None, None, None, False, seen)
    try:
        record = parse_lease(data)
    except DataError:
        return Observation(term, STRANGER, None, sha256_hex(data), False, seen)
    return Observation(term, record.holder, record.group, record.count, record.released, seen)


def describe(observed: Observation, now: float) -> str:
    """The observation for a person, on one line."""
    if observed.term is None:
        return "nobody holds the lease"
    who = observed.holder or "somebody who has not said who"
    group = f" of group {observed.group}" if observed.group else ""
    if observed.released:
        return printable(f"term {observed.term}, released by {who}{group}")
    still = max(0.0, now - observed.since)
    return printable(f"term {observed.term}, held by {who}{group}, unmoving for {still:.0f} s")


def encode_lease(record: LeaseRecord) -> bytes:
    """lease.json, canonical."""
    return canonical({"schema": SCHEMA, **vars(record)})


def parse_lease(data: bytes) -> LeaseRecord:
    """Read a lease.json.

    Raises:
        NewerSchemaError: a newer version wrote it.
        DataError: it is not one.
    """
    record = parse_record(data, RECORD, SCHEMA, LEASE_BYTES)
    if record.keys() != _FIELDS:
        wrong = ", ".join(sorted(repr(name) for name in record.keys() ^ _FIELDS))
        raise DataError(f"{RECORD} lacks or has in excess: {wrong}")
    for name in ("holder", "group"):
        if not isinstance(record[name], str) or not record[name]:
            raise DataError(f"{RECORD} has a {name} that is not text: {record[name]!r}")
    if isinstance(record["count"], bool) or not isinstance(record["count"], int) or record["count"] < 0:
        raise DataError(f"{RECORD} has a count that is not a whole number from 0: {record['count']!r}")
    if not isinstance(record["released"], bool):
        raise DataError(f"{RECORD} has a released that is neither true nor false: {record['released']!r}")
    return LeaseRecord(**record)


def _of_holder(observed: Observation, now: float, settings: LeaseSettings, holder: Holder, term: int) -> Decision:
    if observed.term is not None and observed.term > term:
        return Decision(Step.LOST, term, f"{describe(observed, now)}, came after term {term}")
    # No volume should give one term to two; where one does, the one that wrote last keeps it.
    if observed.term == term and observed.holder not in (None, holder.name):
        return Decision(Step.LOST, term, f"{describe(observed, now)} as well")
    if not is_in_time(holder, now, settings):
        return Decision(Step.LOST, term, f"the last renewal began {now - holder.renewed:.0f} s ago")
    # A look that shows less than this term is a stale one: the write that follows finds out whether the term is gone.
    return Decision(Step.RENEW, term, f"term {term} is held")
