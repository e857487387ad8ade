"""Where a leader can be reached, as it writes on the cache volume, and whether such a record is still kept up. Pure.

One record per leader process, `v1/addresses/<group>/<nonce>.json`, written again every few seconds with a greater
count. No clock is in it: whoever reads it judges by the count, on a clock of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from initwarm.errors import DataError
from initwarm.jsontext import NewerSchemaError, canonical, parse_record

SCHEMA = 1
#: Where the records lie, below the layout's directory.
ADDRESSES = "addresses"
#: How often a leader writes its record, in seconds.
REFRESH_SECONDS = 2.0
#: A record that has stood still for so long is not followed; a slow volume shows several refreshes at once.
STALE_SECONDS = 15.0
#: So many refreshes seen by another leader prove that this one lives, and is not about to end.
LIVING_REFRESHES = 2
MAX_ADDRESSES = 16

_NONCE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class AddressRecord:
    """One leader process.

    Args:
        group: that it leads.
        nonce: names the process, and the file.
        term: greater than that of every leader that it found a record of.
        pod: its pod, for people.
        pod_uid: of its pod, if known: of two processes of one pod the newer is the one that lives.
        addresses: IPv4 and IPv6 literals, in the order in which to try them.
        port: of the control channel.
        count: grows with every refresh.
    """

    group: str
    nonce: str
    term: int
    pod: str
    pod_uid: str | None
    addresses: tuple[str, ...]
    port: int
    count: int


def encode_record(record: AddressRecord) -> bytes:
    """The record as canonical JSON."""
    return canonical(as_json(record))


def as_json(record: AddressRecord) -> dict[str, Any]:
    """The record as JSON, with the version of its schema."""
    return {"schema": SCHEMA, **asdict(record), "addresses": list(record.addresses)}


def parse_record_of(data: bytes, group: str) -> AddressRecord | None:
    """A record of this group's leader; None for anything else, since only the handshake proves a leader."""
    try:
        value = parse_record(data, "address record", SCHEMA)
        if value.keys() != {field.name for field in fields(AddressRecord)} or value["group"] != group:
            return None
        addresses = tuple(str(one) for one in value["addresses"][:MAX_ADDRESSES])
        record = AddressRecord(**{**value, "addresses": addresses})
    except (DataError, NewerSchemaError, TypeError, KeyError):
        return None
    is_number = all(isinstance(one, int) for one in (record.term, record.port, record.count))
    return record if is_number and 0 < record.port < 65536 and is_nonce(record.nonce) else None


def is_nonce(text: object) -> bool:
    """Whether a text can name a leader process."""
    return isinstance(text, str) and _NONCE.fullmatch(text) is not None


class Sightings:
    """What one observer has seen of the records, by its own monotonic clock in seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float, int]] = {}

    def see(self, record: AddressRecord, now: float) -> None:
        """Take in what a record says now."""
        count, since, refreshes = self._seen.get(record.nonce, (record.count, now, 0))
        if record.count != count:
            since, refreshes = now, refreshes + 1
        self._seen[record.nonce] = (record.count, since, refreshes)

    def still_seconds(self, record: AddressRecord, now: float) -> float:
        """For how long the record has stood still, as far as it was watched."""
        return now - self._seen[record.nonce][1]

    def refreshes(self, record: AddressRecord) -> int:
        """How often the record was seen to change."""
        return self._seen[record.nonce][2]

    def candidates(self, records: Iterable[AddressRecord], now: float) -> list[AddressRecord]:
        """The records worth a try: those kept up first, of these the greatest term first; none that stands still."""
        kept = [record for record in records if self.still_seconds(record, now) < STALE_SECONDS]
        return sorted(kept, key=lambda record: (self.refreshes(record) == 0, -record.term, record.nonce))


def rival_of(
    own: AddressRecord, others: Iterable[AddressRecord], seen: Sightings, was_away: bool
) -> tuple[AddressRecord, bool] | None:
    """Another leader of the group because of which this one has to end, and whether that one simply succeeds it.

    Args:
        own: of this process.
        others: of the group's other leader processes.
        seen: what this process has seen of them.
        was_away: this process stood still for so long that the group may have given it up.

    A later process of the same pod, or one that came while this one was away, is the successor. Two that both live are
    two pods with one rank, which neither can settle.
    """
    for other in sorted(others, key=lambda record: -record.term):
        is_later = (other.term, other.nonce) > (own.term, own.nonce)
        is_same_pod = own.pod_uid is not None and other.pod_uid == own.pod_uid
        if is_later and (is_same_pod or was_away):
            return other, True
        if not is_same_pod and seen.refreshes(other) >= LIVING_REFRESHES:
            return other, False
    return None
