"""A small DNS server for pods in namespaces of their own: UDP, A and AAAA, told over stdin what to answer.

In front of its table is a cache of denials, as clusters have one: a name that was asked for a second too early stays
unknown for a while after it exists. Run as `python -m tests.support.nameserver ADDRESS...`; it ends when stdin does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import selectors
import socket
import struct
import sys
import threading
import time
from typing import Any

PORT = 53
_A, _AAAA, _IN = 1, 28, 1
_NO_ERROR, _SERVER_FAILURE, _NO_SUCH_NAME = 0, 2, 3
_ANSWER, _RECURSION = 0x8000, 0x0100
_TTL_SECONDS = 5


class Names:
    """What is answered. Names are lower case and without the closing dot; durations are in seconds."""

    def __init__(self) -> None:
        self.table: dict[str, list[str]] = {}
        self.negative_seconds = 0.0
        self.delay_seconds = 0.0
        self.mode = "answer"
        self.asked: list[dict[str, Any]] = []
        self._denied_until: dict[str, float] = {}

    def reply(self, query: bytes, client: str) -> bytes | None:
        """The answer to a query; None for none at all."""
        identifier, flags, count = struct.unpack_from(">3H", query)
        labels, offset = [], 12
        while count == 1 and (size := query[offset]):
            labels.append(query[offset + 1 : offset + 1 + size].decode("ascii", "replace"))
            offset += 1 + size
        name = ".".join(labels).lower()
        kind, _ = struct.unpack_from(">2H", query, offset + 1)
        code, addresses = self._look_up(name, kind)
        said = {_NO_ERROR: addresses, _NO_SUCH_NAME: "no such name", _SERVER_FAILURE: "failure"}[code]
        is_silent = self.mode == "silent"
        self.asked.append({"client": client, "name": name, "kind": kind, "answer": None if is_silent else said})
        if is_silent:
            return None
        head = struct.pack(">6H", identifier, _ANSWER | 0x0480 | flags & _RECURSION | code, 1, len(addresses), 0, 0)
        records = [
            struct.pack(">3HIH", 0xC00C, kind, _IN, _TTL_SECONDS, len(packed)) + packed
            for packed in (ipaddress.ip_address(address).packed for address in addresses)
        ]
        return head + query[12 : offset + 5] + b"".join(records)

    def _look_up(self, name: str, kind: int) -> tuple[int, list[str]]:
        if self.mode == "failure":
            return _SERVER_FAILURE, []
        now = time.monotonic()
        if name not in self.table or self._denied_until.get(name, 0) > now:
            # A denial that is given from the cache does not get older by being given.
            if self._denied_until.get(name, 0) <= now:
                self._denied_until[name] = now + self.negative_seconds
            return _NO_SUCH_NAME, []
        wanted = {_A: 4, _AAAA: 6}.get(kind)
        return _NO_ERROR, [one for one in self.table[name] if ipaddress.ip_address(one).version == wanted]


def serve(addresses: list[str]) -> None:
    """Answer until stdin ends; each line on it is a JSON object with fields of `Names` to set."""
    names = Names()
    selector = selectors.DefaultSelector()
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_DGRAM)
        listener.bind((address, PORT))
        selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin.buffer.raw, selectors.EVENT_READ)  # type: ignore[union-attr]
    print(json.dumps({"listening": addresses}), flush=True)
    pending = b""
    while True:
        for key, _ in selector.select():
            if isinstance(key.fileobj, socket.socket):
                _answer(names, key.fileobj)
                continue
            chunk = key.fileobj.read(1 << 16)  # type: ignore[union-attr]
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                for field, value in json.loads(line).items():
                    setattr(names, field, value)
                print(json.dumps({"asked": names.asked}), flush=True)


def _answer(names: Names, listener: socket.socket) -> None:
    query, client = listener.recvfrom(4096)
    with contextlib.suppress(struct.error, IndexError):
        reply = names.reply(query, client[0])
        if reply is not None and names.delay_seconds:
            later = threading.Timer(names.delay_seconds, listener.sendto, (reply, client))
            later.daemon = True
            later.start()
        elif reply is not None:
            listener.sendto(reply, client)


if __name__ == "__main__":
    serve(sys.argv[1:])
