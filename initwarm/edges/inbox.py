"""What the pods of a round have told their leader."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from initwarm.edges.channel import DEAD_SECONDS, RIVAL_SECONDS, Channel
from initwarm.edges.peers import Peers
from initwarm.errors import BarrierError, InitwarmError, TopologyError
from initwarm.protocol import Answer, Hello, from_error, parse_answer, parse_hello

#: How long the group waits for whoever takes the place of a pod that was stopped.
SUCCESSOR_SECONDS = DEAD_SECONDS


class RoundOver(Exception):
    """This round ends without a result; another begins."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Inbox:
    """The leader's side of one round's mail.

    Args:
        channel: of the round.
        peers: whose places are filled here.
        say: prints an event.
    """

    def __init__(self, channel: Channel, peers: Peers, say: Callable[..., None]) -> None:
        self._channel = channel
        self._peers = peers
        self._say = say
        self.hellos: dict[int, Hello] = {}
        #: By the number of the step, then by node rank, in the order in which they came.
        self.answers: dict[int, dict[int, Answer]] = {}
        #: Who has said goodbye.
        self.farewells: set[int] = set()
        #: Of a place or hello, on this pod's monotonic clock.
        self.last_arrival = time.monotonic()
        #: Whether it is fixed who takes part: a newcomer ends the round then.
        self.is_closed = False
        self._stopped: dict[int, tuple[float, InitwarmError]] = {}
        self._pending: list[int] = []
        #: Letters that have come and are not taken in yet, which what one of them raises must not lose.
        self._letters: list[str] = []
        self._heard = 0

    def collect(self) -> None:
        """Take in what has arrived.

        Raises:
            TopologyError: two living pods claim one place.
            InitwarmError: a pod could not go on.
            RoundOver: a pod was replaced after the round had begun.
        """
        length = self._channel.length("mail")
        numbers = [*self._pending, *range(self._heard + 1, length + 1)]
        self._heard, self._pending = length, []
        texts = self._channel.read_many([f"mail/{number}" for number in numbers])
        for number, text in zip(numbers, texts, strict=True):
            if text is None:
                self._pending.append(number)  # its writer has numbered it and not written it yet
            else:
                self._letters.append(text)
        while self._letters:
            self._take(json.loads(self._letters.pop(0)))

    def _take(self, letter: Mapping[str, Any]) -> None:
        node, kind = letter.get("node"), letter["kind"]
        if kind == "conflict":
            raise TopologyError(letter["text"])
        assert isinstance(node, int)
        if kind == "place":
            self._seat(node, letter["place"])
            return
        place = self._peers.places.get(node)
        if place is None or place["uid"] != letter["uid"]:
            return  # of a process that has been replaced
        if kind == "hello":
            self.hellos[node] = parse_hello(letter["hello"])
            self.last_arrival = time.monotonic()
        elif kind == "answer":
            self.answers.setdefault(letter["number"], {})[node] = parse_answer(letter["answer"])
        elif kind == "gone":
            self._part(node, letter)

    def _seat(self, node: int, place: dict[str, Any]) -> None:
        before = self._peers.places.get(node)
        self._peers.places[node] = place
        self.hellos.pop(node, None)
        self.farewells.discard(node)
        self._stopped.pop(node, None)
        self.last_arrival = time.monotonic()
        if before is not None and before["uid"] != place["uid"]:
            self._say(
                "initwarm.pod.replaced", message=f"pod {place['pod']} takes node rank {node}", before=before["pod"]
            )
            if self.is_closed:
                raise RoundOver(f"node rank {node} was restarted (pod {place['pod']})")

    def _part(self, node: int, letter: Mapping[str, Any]) -> None:
        error = letter["error"]
        if error is not None and error["kind"] != "Stopped":
            raise from_error(error)  # no goodbye yet: it stays until it has heard how this ends
        self.farewells.add(node)
        if error is None:
            return
        stopped = BarrierError(
            f"Node rank {node} (pod {letter['pod']}) was stopped, and no other has taken its place.",
            "The group cannot go on without it.",
        ).at(None, letter["pod"])
        self._stopped[node] = (time.monotonic(), stopped)
        self._say(
            "initwarm.pod.left", message=f"node rank {node} (pod {letter['pod']}) was stopped; waiting for another"
        )

    def check_stopped(self) -> None:
        """Wait no longer for the successor of a pod that was stopped than another may take to come.

        Raises:
            BarrierError: nobody came.
        """
        now = time.monotonic()
        for since, problem in self._stopped.values():
            if now - since > SUCCESSOR_SECONDS:
                raise problem

    def first_stopped(self) -> InitwarmError | None:
        """Why a pod that was stopped is what everybody waits for, if one was."""
        return next((problem for _since, problem in self._stopped.values()), None)

    def is_any_silent(self, nodes: Iterable[int]) -> bool:
        """Whether one of these pods has stopped, or its counter stands still."""
        return any(node in self._stopped for node in nodes) or bool(self.silent(nodes))

    def silent(self, nodes: Iterable[int], seconds: float = RIVAL_SECONDS) -> dict[int, float]:
        """Those of these pods that have not said goodbye and whose counter stands still, with for how many seconds."""
        return self._peers.stand_still([node for node in nodes if node not in self.farewells], seconds)
