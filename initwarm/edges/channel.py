"""The control channel: a `TCPStore` held by node 0's coordinator, before and beside any collective.

Nothing here blocks: a value is read only after `check` has said that it is there, because a blocking `get` holds up
every other request of the same client, heartbeats too. Every key starts with the epoch, a nonce that the leader process
mints, so that nobody can read the answers of another incarnation.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from initwarm.edges import network
from initwarm.errors import BarrierError, ConfigurationError

#: A leader that is alive answers at once; a longer wait is better spent on looking again.
CONNECT_SECONDS = 5.0
HEARTBEAT_SECONDS = 2.0
DEAD_SECONDS = 30.0
CHUNK_BYTES = 1 << 20
GREETING = "initwarm/epoch"

StoreErrors = (DistNetworkError, DistStoreError, RuntimeError)


def host_store(port: int) -> TCPStore:
    """Open the store of a group on this pod.

    Args:
        port: to listen on, on all addresses of the pod; 0 for any free one.

    Raises:
        ConfigurationError: somebody else listens on the port.
    """
    try:
        return TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_SECONDS)
        )
    except StoreErrors as problem:
        raise ConfigurationError(
            f"Port {port} for the control channel is taken on this pod.",
            "No group was formed.",
            "Another leader with the same address runs here (two pods with node rank 0?), or give another --port.",
        ) from problem


def connect(host: str, port: int) -> TCPStore | None:
    """One client of the group's store, or None if nobody answers now. The name is resolved anew at each call."""
    for _family, address in network.resolve(host, port):
        try:
            # A store that is constructed for a port where nobody listens would print and retry on its own.
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            continue
        try:
            return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
        except StoreErrors:
            continue
    return None


class Channel:
    """One thread's view of the group's store. Give each thread one of its own.

    Args:
        store: a client of its own.
        epoch: prefix of every key.
    """

    def __init__(self, store: TCPStore, epoch: str) -> None:
        self.store = store
        self.epoch = epoch

    def read(self, key: str) -> str | None:
        """The value of a key, or None if nobody has set it."""
        data = self._read_bytes(self._name(key))
        return None if data is None else data.decode()

    def write(self, key: str, value: str) -> None:
        """Set a key."""
        try:
            self.store.set(self._name(key), value)
        except StoreErrors as problem:
            raise _lost(problem) from problem

    def claim(self, key: str, value: str, expected: str = "") -> str:
        """Set a key if it is unset or has the expected value; returns the value that it has then."""
        try:
            return str(self.store.compare_set(self._name(key), expected, value).decode())
        except StoreErrors as problem:
            raise _lost(problem) from problem

    def send_blob(self, data: bytes) -> str:
        """Put bytes under their own sha256, in pieces, and return it."""
        digest = hashlib.sha256(data).hexdigest()
        pieces = range(0, len(data), CHUNK_BYTES)
        try:
            for number, start in enumerate(pieces):
                self.store.set(self._name(f"blob/{digest}/{number}"), data[start : start + CHUNK_BYTES])
            self.store.set(self._name(f"blob/{digest}"), str(len(pieces)))
        except StoreErrors as problem:
            raise _lost(problem) from problem
        return digest

    def receive_blob(self, digest: str) -> bytes | None:
        """The bytes of this sha256, or None if nobody has sent them yet."""
        count = self.read(f"blob/{digest}")
        if count is None:
            return None
        pieces = [self._read_bytes(self._name(f"blob/{digest}/{number}")) for number in range(int(count))]
        data = b"".join(piece or b"" for piece in pieces)
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def _name(self, key: str) -> str:
        return f"{self.epoch}/{key}"

    def _read_bytes(self, name: str) -> bytes | None:
        try:
            if not self.store.check([name]):
                return None
            return bytes(self.store.get(name))
        except StoreErrors as problem:
            raise _lost(problem) from problem


def _lost(problem: BaseException) -> BarrierError:
    return BarrierError(
        f"The leader's control channel broke: {str(problem).splitlines()[0] if str(problem) else problem!r}.",
        "The group cannot go on.",
        "Look at the leader pod (node rank 0): it ended or cannot be reached.",
    )


class Heartbeat:
    """Keeps this pod's counter moving, from a thread and a client of its own, and carries what it is doing."""

    def __init__(self, channel: Channel, node_rank: int, pod: str) -> None:
        self._channel = channel
        self._key = f"heartbeat/{node_rank}"
        self._pod = pod
        self._note = "starting"
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def note(self, text: str) -> None:
        """Say what this pod does now; waiting pods print it."""
        self._note, self._since = text, time.monotonic()

    def stop(self) -> None:
        """Stop beating."""
        self._stop.set()

    def _run(self) -> None:
        count = 0
        while True:
            count += 1
            seconds = round(time.monotonic() - self._since)
            try:
                self._channel.write(
                    self._key, json.dumps({"count": count, "pod": self._pod, "note": self._note, "seconds": seconds})
                )
            except BarrierError:
                return  # the main thread meets the same fault and reports it
            if self._stop.wait(HEARTBEAT_SECONDS):
                return


class Watch:
    """Judges whether other pods live, by whether their counters move on this pod's own monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[int, tuple[int, float]] = {}
        self._last: dict[int, dict[str, Any]] = {}

    def look(self, channel: Channel, node_rank: int) -> float:
        """For how many seconds this pod's counter has stood still."""
        text = channel.read(f"heartbeat/{node_rank}")
        beat = json.loads(text) if text else {"count": 0}
        now = self._clock()
        count, since = self._seen.get(node_rank, (-1, now))
        if beat["count"] != count:
            since = now
            self._seen[node_rank] = (beat["count"], now)
        self._last[node_rank] = beat
        return now - since

    def describe(self, node_rank: int) -> str:
        """What the pod last said it was doing."""
        beat = self._last.get(node_rank, {})
        if not beat.get("note"):
            return f"node rank {node_rank}, of which nothing was heard"
        return f"node rank {node_rank} (pod {beat.get('pod')}): {beat['note']}, {beat.get('seconds', 0)} s"
