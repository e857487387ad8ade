"""The control channel: a `TCPStore` held by node 0's coordinator, before and beside any collective.

Nothing here blocks its caller: a request is carried out in a thread of the channel, because a leader that stands still
answers nothing, and the caller has to hear SIGTERM and the end of its time meanwhile. A value is read only after
`check` has said that it is there, since a blocking `get` holds up every other request of the same client. Every key
starts with the epoch, a nonce that the leader process mints for each round, so that nobody can read the answers of
another incarnation.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from initwarm.edges import bounded, network
from initwarm.errors import BarrierError, ConfigurationError, LostLeaderError

#: A leader that is alive answers at once; a longer wait is better spent on looking again.
CONNECT_SECONDS = 5.0
HEARTBEAT_SECONDS = 2.0
#: A counter that stands still for longer than two beats is that of a pod that is stopped or gone.
RIVAL_SECONDS = 2.25 * HEARTBEAT_SECONDS
DEAD_SECONDS = 30.0
CHUNK_BYTES = 1 << 20
#: How many values one request asks for.
BATCH = 256
GREETING = "initwarm/epoch"
SLICE_SECONDS = 0.1

StoreErrors = (DistNetworkError, DistStoreError, RuntimeError)

T = TypeVar("T")


def host_store(port: int) -> TCPStore:
    """Open the store of a group on this pod. From then on this process takes names from its hosts file alone.

    Args:
        port: to listen on, on all addresses of the pod; 0 for any free one.

    Raises:
        ConfigurationError: somebody else listens on the port.
    """
    network.forget_name_servers()
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


def open_client(address: str, port: int) -> TCPStore:
    """One more client of a group's store; whoever shares a client waits for the other's requests.

    Raises:
        LostLeaderError: the leader does not answer.
    """
    end = time.monotonic() + CONNECT_SECONDS

    def look() -> None:
        if time.monotonic() > end:
            raise _silent(CONNECT_SECONDS)

    def connect() -> TCPStore:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))

    try:
        with network.without_name_servers():
            # Its timeout is that of the connection alone, which the kernel of a process that stands still accepts.
            return bounded.carry_out(connect, look)
    except StoreErrors as problem:
        raise _lost(problem) from problem


class Channel:
    """One thread's view of the group's store. Give each thread one of its own.

    Args:
        store: a client of its own.
        epoch: prefix of every key.
        idle: called now and then while an answer is outstanding; what it raises ends the wait, and the channel.
    """

    def __init__(self, store: TCPStore, epoch: str, idle: Callable[[], None] = lambda: None) -> None:
        self.store = store
        self.epoch = epoch
        self.idle = idle
        self._is_stuck = False
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="channel", daemon=True).start()

    def close(self) -> None:
        """End the thread, once what it does is done."""
        self._requests.put(None)

    def read(self, key: str) -> str | None:
        """The value of a key, or None if nobody has set it."""
        data = self._call(lambda: self._read(self._name(key)))
        return None if data is None else data.decode()

    def read_many(self, keys: Sequence[str]) -> list[str | None]:
        """The values of several keys, in a few requests where all of them are set."""
        return self._call(lambda: self._read_many([self._name(key) for key in keys]))

    def write(self, key: str, value: str) -> None:
        """Set a key."""
        self._call(lambda: self.store.set(self._name(key), value))

    def claim(self, key: str, value: str, expected: str = "") -> str:
        """Set a key if it is unset or has the expected value; returns the value that it has then."""
        return str(self._call(lambda: self.store.compare_set(self._name(key), expected, value)).decode())

    def append(self, log: str, value: str) -> int:
        """Add a value to a log, which keeps the order of arrival; returns its number, from 1."""

        def add() -> int:
            number = int(self.store.add(self._name(log), 1))
            self.store.set(self._name(f"{log}/{number}"), value)
            return number

        return self._call(add)

    def length(self, log: str) -> int:
        """How many values a log has; one that a writer has not finished counts."""
        return self._call(lambda: int(self.store.add(self._name(log), 0)))

    def send_blob(self, data: bytes) -> str:
        """Put bytes under their own sha256, in pieces, and return it."""
        digest = hashlib.sha256(data).hexdigest()
        pieces = range(0, len(data), CHUNK_BYTES)
        for number, start in enumerate(pieces):
            piece = data[start : start + CHUNK_BYTES]
            self._call(lambda number=number, piece=piece: self.store.set(self._name(f"blob/{digest}/{number}"), piece))  # type: ignore[misc]
        self.write(f"blob/{digest}", str(len(pieces)))
        return digest

    def receive_blob(self, digest: str) -> bytes | None:
        """The bytes of this sha256, or None if nobody has sent them yet."""
        count = self.read(f"blob/{digest}")
        if count is None:
            return None
        names = [self._name(f"blob/{digest}/{number}") for number in range(int(count))]
        pieces = [self._call(lambda name=name: self._read(name)) for name in names]  # type: ignore[misc]
        data = b"".join(piece or b"" for piece in pieces)
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def _name(self, key: str) -> str:
        return f"{self.epoch}/{key}"

    def _read(self, name: str) -> bytes | None:
        return bytes(self.store.get(name)) if self.store.check([name]) else None

    def _read_many(self, names: Sequence[str]) -> list[str | None]:
        found: list[str | None] = []
        for start in range(0, len(names), BATCH):
            batch = list(names[start : start + BATCH])
            if self.store.check(batch):
                found += [bytes(data).decode() for data in self.store.multi_get(batch)]
            else:
                one_by_one = [self._read(name) for name in batch]
                found += [None if data is None else data.decode() for data in one_by_one]
        return found

    def _call(self, request: Callable[[], T]) -> T:
        if self._is_stuck:
            raise _silent(DEAD_SECONDS)
        done = threading.Event()
        results: list[T] = []
        problems: list[Exception] = []

        def carry_out() -> None:
            try:
                results.append(request())
            except Exception as problem:  # noqa: BLE001  raised again in the caller's thread
                problems.append(problem)
            done.set()

        self._requests.put(carry_out)
        since = time.monotonic()
        try:
            while not done.wait(SLICE_SECONDS):
                if time.monotonic() - since > DEAD_SECONDS:
                    raise _silent(DEAD_SECONDS)
                self.idle()
        except BaseException:
            self._is_stuck = True
            raise
        if problems and isinstance(problems[0], StoreErrors):
            raise _lost(problems[0]) from problems[0]
        if problems:
            raise problems[0]
        return results[0]

    def _serve(self) -> None:
        while True:
            request = self._requests.get()
            if request is None:
                return
            request()


def _lost(problem: BaseException) -> LostLeaderError:
    return LostLeaderError(
        f"The leader's control channel broke: {str(problem).splitlines()[0] if str(problem) else problem!r}.",
        "The group cannot go on.",
        "Look at the leader pod (node rank 0): it ended or cannot be reached.",
    )


def _silent(seconds: float) -> LostLeaderError:
    return LostLeaderError(
        f"The leader answered nothing for {seconds:.0f} s.",
        "The group cannot go on.",
        "Look at the leader pod (node rank 0): it is stopped, or its network is cut.",
    )


class Heartbeat:
    """Keeps this pod's counter moving, from a thread and a client of its own, and carries what it is doing."""

    def __init__(self, channel: Channel, key: str, pod: str) -> None:
        self._channel = channel
        self._key = key
        self._pod = pod
        self._note = "starting"
        self._since = time.monotonic()
        self._count = 0
        self._stop = threading.Event()
        # The first beat before anybody can look for it: a place without a heart would look dead.
        self._beat()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def note(self, text: str) -> None:
        """Say what this pod does now; waiting pods print it."""
        self._note, self._since = text, time.monotonic()

    def stop(self) -> None:
        """Stop beating."""
        self._stop.set()

    def _beat(self) -> None:
        self._count += 1
        seconds = round(time.monotonic() - self._since)
        beat = {"count": self._count, "pod": self._pod, "note": self._note, "seconds": seconds}
        self._channel.write(self._key, json.dumps(beat))

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self._beat()
            except BarrierError:
                break  # the main thread meets the same fault and reports it
        self._channel.close()


class Watch:
    """Judges whether other pods live, by whether their counters move on this pod's own monotonic clock.

    Args:
        clock: seconds; never compared with another host's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}
        self._last: dict[str, dict[str, Any]] = {}

    def look(self, channel: Channel, keys: Sequence[str]) -> list[float]:
        """For how many seconds each of these counters has stood still."""
        return [self.hear(key, text) for key, text in zip(keys, channel.read_many(keys), strict=True)]

    def hear(self, key: str, text: str | None) -> float:
        """Take in what a counter says now; for how many seconds it has stood still."""
        beat = json.loads(text) if text else {"count": 0}
        now = self._clock()
        count, since = self._seen.get(key, (-1, now))
        if beat["count"] != count:
            since = now
            self._seen[key] = (beat["count"], now)
        self._last[key] = beat
        return now - since

    def describe(self, key: str) -> str:
        """What the pod last said it was doing; empty if nothing was heard of it."""
        beat = self._last.get(key, {})
        if not beat.get("note"):
            return ""
        return f"(pod {beat.get('pod')}): {beat['note']}, {beat.get('seconds', 0)} s"
