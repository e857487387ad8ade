"""How the pods of a group find their leader: by its record on the cache volume, and by its name.

The volume comes first, because a name that is asked for a second too early stays unknown for as long as some DNS cache
keeps the denial. An address, an open port or an old record proves nothing: only a leader that greets with this group's
name is found. All of it happens in threads, since a look-up, a connection and a volume can each take many seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from initwarm.addressbook import (
    ADDRESSES,
    REFRESH_SECONDS,
    AddressRecord,
    Sightings,
    encode_record,
    is_nonce,
    parse_record_of,
    rival_of,
)
from initwarm.edges import network
from initwarm.edges.channel import CONNECT_SECONDS, DEAD_SECONDS, GREETING, Channel, open_client
from initwarm.edges.files import RefusedError
from initwarm.edges.volume_reader import LAYOUT, VolumeReader
from initwarm.environment import as_ip
from initwarm.errors import InitwarmError, LostLeaderError, SupersededError, TopologyError
from initwarm.jsontext import RECORD_BYTES

if TYPE_CHECKING:
    from initwarm.edges.entry import RunSpec

DEFAULT_PORT = 29710
#: A name is not asked for before the pod is so old: its leader's may not be published yet.
NAME_GRACE_SECONDS = 5.0
REACH_SECONDS = 1.0
#: Another group's leader at this group's address is a wrong address if it stays, and an old pod if it goes.
STRANGER_SECONDS = 5.0
_PAUSE_SECONDS = 0.3


@dataclass(frozen=True)
class Found:
    """A leader that greeted: where it answers, and what it said."""

    host: str
    port: int
    store: Any
    greeting: Mapping[str, Any]


class AddressBook:
    """The address records of one group on the cache volume.

    Args:
        root: of the cache.
        group: whose leaders are looked for.
    """

    def __init__(self, root: str, group: str) -> None:
        self._reader = VolumeReader(Path(root))
        self._group = group
        self._parts = (LAYOUT, ADDRESSES, group)

    def read(self) -> list[AddressRecord]:
        """All records that can be read; none where the volume cannot."""
        found = []
        with contextlib.suppress(InitwarmError):
            for name in self._reader.names(self._parts):
                stem, _, ending = name.rpartition(".")
                if ending == "json" and is_nonce(stem):
                    record = self._read(name)
                    if record is not None and record.nonce == stem:
                        found.append(record)
        return found

    def _read(self, name: str) -> AddressRecord | None:
        with contextlib.suppress(InitwarmError, RefusedError, OSError):
            return parse_record_of(self._reader.read((*self._parts, name), RECORD_BYTES), self._group)
        return None

    def write(self, record: AddressRecord) -> None:
        """Put a record in place of its older self.

        Raises:
            OSError, RefusedError: it could not be written.
        """
        with self._reader.open(self._parts, make=True) as directory:
            directory.replace(f"{record.nonce}.json", encode_record(record))

    def remove(self, nonce: str) -> None:
        """Take a record away, as far as that goes."""
        with contextlib.suppress(OSError, RefusedError), self._reader.open(self._parts) as directory:
            directory.discard(f"{nonce}.json")


class Beacon:
    """Keeps a leader's record on the volume, and watches for another leader of the group.

    Args:
        book: of the group.
        record: of this process; its term and count are set here.
        say: prints an event.
    """

    def __init__(self, book: AddressBook, record: AddressRecord, say: Callable[..., None]) -> None:
        self._book = book
        self._record = record
        self._say = say
        self._seen = Sightings()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beacon", daemon=True)
        #: Why this process cannot lead the group, once that is so.
        self.problem: InitwarmError | None = None
        self._thread.start()

    def stop(self) -> None:
        """Take the record away; a volume that hangs is not waited for."""
        self._stop.set()
        self._thread.join(REACH_SECONDS)

    def _run(self) -> None:
        others = self._others(time.monotonic())
        self._record = replace(self._record, term=1 + max((other.term for other in others), default=0))
        can_write, last = True, time.monotonic()
        while not self._stop.is_set() and self.problem is None:
            now = time.monotonic()
            rival = rival_of(self._record, self._others(now), self._seen, was_away=now - last > DEAD_SECONDS)
            last = now
            if rival is not None:
                self.problem = self._problem_with(*rival)
                break
            self._record = replace(self._record, count=self._record.count + 1)
            try:
                self._book.write(self._record)
                can_write = True
            except (OSError, RefusedError) as problem:
                if can_write:
                    self._say(
                        "initwarm.address.not_written", message=f"the leader is found by its name only: {problem}"
                    )
                can_write = False
            self._stop.wait(REFRESH_SECONDS)
        self._book.remove(self._record.nonce)

    def _others(self, now: float) -> list[AddressRecord]:
        others = [record for record in self._book.read() if record.nonce != self._record.nonce]
        for other in others:
            self._seen.see(other, now)
        return others

    def _problem_with(self, other: AddressRecord, is_successor: bool) -> InitwarmError:
        if is_successor:
            return SupersededError(
                f"Pod {other.pod} leads group {self._record.group} now, in place of this process.",
                "This process gave way.",
                "Nothing needs to be done if this pod was replaced or restarted.",
            ).at(None, self._record.pod)
        return TopologyError(
            f"Two living pods claim node rank 0 of group {self._record.group}: pod {self._record.pod} at "
            f"{', '.join(self._record.addresses)} and pod {other.pod} at {', '.join(other.addresses)}.",
            "The group did not start.",
            "Give each pod its own rank; `initwarm topology --explain` says where each got it.",
        ).at(None, self._record.pod)


class Finder:
    """Looks for the leader until it is found or the finder is stopped.

    Args:
        spec: of the run.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._host = spec.topology.leader_address
        self._port = spec.topology.leader_port or DEFAULT_PORT
        self._group = spec.topology.group
        self._name = f"the name {self._host}"
        self._book = AddressBook(spec.settings.cache_root, self._group)
        self._born = spec.deadline - spec.settings.deadline_seconds
        self._began = time.monotonic()
        self._seen = Sightings()
        #: What came of each place in the last pass over all of them, and in the one under way.
        self._tried: dict[str, str] = {}
        self._trying: dict[str, str] = {}
        self._stranger_since: float | None = None
        self._stop = threading.Event()
        #: The leader, once it has greeted.
        self.found: Found | None = None
        #: Why no leader will be found, if that is certain.
        self.problem: InitwarmError | None = None
        threading.Thread(target=self._run, name="finder", daemon=True).start()

    def stop(self) -> None:
        """Look no longer; what is under way is not waited for."""
        self._stop.set()

    def explain(self) -> str:
        """What was tried, and what came of it, as one text."""
        tried = [f"{where}: {what}" for where, what in self._tried.items()]
        if not tried:
            return "no leader has written an address to the cache volume"
        return "; ".join(tried)

    @property
    def is_name_unknown(self) -> bool:
        """Whether the leader's name does not resolve."""
        return self._name in self._tried

    def _run(self) -> None:
        while not self._stop.is_set() and self.problem is None:
            self._trying = {}
            for where, address, port, nonce in self._candidates():
                found = self._try(where, address, port, nonce)
                if found is not None:
                    self.found = found
                    return
                if self._stop.is_set():
                    return
            self._tried = self._trying
            self._stop.wait(_PAUSE_SECONDS * random.uniform(0.7, 1.3))  # noqa: S311

    def _candidates(self) -> Iterator[tuple[str, str, int, str | None]]:
        """Where to try, best first: a text for people, address, port, and whose record it is."""
        now = time.monotonic()
        records = self._book.read()
        for record in records:
            self._seen.see(record, now)
        for record in self._seen.candidates(records, now):
            for address in record.addresses:
                yield f"{address} port {record.port}, from the cache volume", address, record.port, record.nonce
        if self._host is None or (as_ip(self._host) is None and now - self._born < NAME_GRACE_SECONDS):
            return
        addresses = network.resolve_any(self._host, self._port)
        if not addresses:
            self._trying[self._name] = (
                f"unknown for {now - self._began:.0f} s (a DNS cache may keep a denial for 30 s after that)"
            )
            return
        for _family, address in addresses:
            yield f"{address} port {self._port}, by {self._host}", address, self._port, None

    def _try(self, where: str, address: str, port: int, nonce: str | None) -> Found | None:
        try:
            # A store that is constructed for a port where nobody listens would print and retry on its own.
            socket.create_connection((address, port), timeout=REACH_SECONDS).close()
        except OSError as problem:
            self._trying[where] = "no answer" if isinstance(problem, TimeoutError) else problem.strerror or str(problem)
            return None
        try:
            store = open_client(address, port)
            greeting = greeting_of(store)
        except LostLeaderError:
            self._trying[where] = "something answers on this port, but not as a leader of initwarm"
            return None
        if greeting is None or (nonce is not None and greeting["leader"] != nonce):
            self._trying[where] = "another process answers there"
            return None
        if greeting["group"] != self._group:
            self._trying[where] = f"the leader of group {greeting['group']!r} answers there"
            self._judge_stranger(where, greeting["group"])
            return None
        if greeting["has_ended"]:
            self._trying[where] = f"the leader there (pod {greeting['pod']}) has ended its round"
            return None
        return Found(address, port, store, greeting)

    def _judge_stranger(self, where: str, group: str) -> None:
        now = time.monotonic()
        self._stranger_since = now if self._stranger_since is None else self._stranger_since
        if now - self._stranger_since > STRANGER_SECONDS:
            self.problem = TopologyError(
                f"The leader at {where} leads group {group!r} and this pod is of group {self._group!r}.",
                "This pod joined no group.",
                "Correct --leader-address or --port, or give both pods one --group.",
            )


def greeting_of(store: Any) -> dict[str, Any] | None:
    """What the holder of a store says of itself; None if it says nothing.

    Raises:
        LostLeaderError: it answers no request.
    """
    end = time.monotonic() + CONNECT_SECONDS

    def idle() -> None:
        if time.monotonic() > end:
            raise LostLeaderError(f"No greeting came within {CONNECT_SECONDS:g} s.")

    scope, _, key = GREETING.partition("/")
    channel = Channel(store, scope, idle)
    try:
        text = channel.read(key)
    finally:
        channel.close()
    with contextlib.suppress(ValueError, TypeError):
        greeting = json.loads(text or "")
        if {"epoch", "group", "leader", "pod", "has_ended"} <= greeting.keys():
            return dict(greeting)
    return None


def own_record(spec: RunSpec, nonce: str, port: int) -> AddressRecord:
    """The record of this process, as a leader that listens on this port."""
    return AddressRecord(
        group=spec.topology.group,
        nonce=nonce,
        term=1,
        pod=spec.pod,
        pod_uid=spec.pod_uid,
        addresses=tuple(network.own_addresses(os.environ, spec.settings.interface)),
        port=port,
        count=0,
    )
