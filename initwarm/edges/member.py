"""This pod's membership of its group: finding the leader, saying hello, hearing steps, noticing who is gone."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from initwarm.edges.channel import (
    DEAD_SECONDS,
    GREETING,
    HEARTBEAT_SECONDS,
    Channel,
    Heartbeat,
    Watch,
    connect,
    host_store,
)
from initwarm.edges.entry import RunSpec
from initwarm.edges.pod import Say
from initwarm.errors import BarrierError, ConfigurationError, InitwarmError, TopologyError, error_named
from initwarm.protocol import Answer, Hello, Step, encode, encode_hello, parse_answer, parse_hello, parse_step

DEFAULT_PORT = 29710
#: Two claims to one place are told apart by whether the older process's counter still moves.
RIVAL_SECONDS = 2 * HEARTBEAT_SECONDS


class GroupEnded(Exception):
    """The leader announced the end of the round, with its data."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.data = data


class Member:
    """One pod's view of the group.

    Args:
        spec: of the run.
        say: prints an event.
    """

    def __init__(self, spec: RunSpec, say: Say) -> None:
        self.spec = spec
        self.say = say
        self.topology = spec.topology
        self.is_leader = spec.topology.node_rank == 0
        self.port = spec.topology.leader_port or (DEFAULT_PORT if spec.topology.num_nodes > 1 else 0)
        self.host = "127.0.0.1" if self.is_leader else str(spec.topology.leader_address)
        self.watch = Watch()
        self.epoch = ""
        self._channel: Channel | None = None
        self._heartbeat: Heartbeat | None = None

    @property
    def channel(self) -> Channel:
        """The main thread's client of the store."""
        assert self._channel is not None
        return self._channel

    @property
    def is_joined(self) -> bool:
        """Whether this pod has its place; one that was refused must not speak for it."""
        return self._heartbeat is not None

    def note(self, text: str) -> None:
        """Say what this pod does; the others print it while they wait."""
        if self._heartbeat is not None:
            self._heartbeat.note(text)

    def open(self) -> None:
        """Hold the group's store (leader)."""
        try:
            store = host_store(self.port)
        except ConfigurationError as problem:
            self._tell_rival()
            raise problem.at(None, self.spec.pod) from problem
        self.port = store.port
        self.epoch = uuid.uuid4().hex
        store.set(GREETING, json.dumps({"epoch": self.epoch, "group": self.topology.group}))
        self._enter(store)

    def _tell_rival(self) -> None:
        """Two pods believe to be the leader of one group: neither may go on."""
        store = connect("localhost", self.port)
        if store is None or not store.check([GREETING]):
            return
        greeting = json.loads(store.get(GREETING))
        if greeting["group"] == self.topology.group:
            text = str(self._rivals(f"another pod and pod {self.spec.pod}"))
            Channel(store, greeting["epoch"]).write("conflict", text)

    def look_for_leader(self) -> bool:
        """Try once to reach the leader; only its greeting proves that it is there (follower)."""
        store = connect(self.host, self.port)
        if store is None:
            return False
        if not store.check([GREETING]):
            return False
        greeting = json.loads(store.get(GREETING))
        if greeting["group"] != self.topology.group:
            raise TopologyError(
                f"The leader at {self.host}:{self.port} leads group {greeting['group']!r} and this pod is of group "
                f"{self.topology.group!r}.",
                "This pod joined no group.",
                "Correct --leader-address, or give both pods one --group.",
            )
        self.epoch = greeting["epoch"]
        self._enter(store)
        return True

    def _enter(self, store: Any) -> None:
        self._channel = Channel(store, self.epoch)
        self._claim()
        beating = connect(self.host, self.port)
        if beating is None:
            raise BarrierError("The leader's control channel broke while this pod joined.", "The group cannot go on.")
        self._heartbeat = Heartbeat(Channel(beating, self.epoch), self.topology.node_rank, self.spec.pod)

    def _claim(self) -> None:
        """Take this pod's place; a living process that has it already means that two pods have one rank."""
        key = f"place/{self.topology.node_rank}"
        claim = json.dumps({"uid": self.spec.uid, "pod": self.spec.pod, "source": self.topology.source})
        holder = self.channel.claim(key, claim)
        if holder == claim:
            return
        watch, end = Watch(), time.monotonic() + RIVAL_SECONDS
        watch.look(self.channel, self.topology.node_rank)
        while time.monotonic() < end:
            time.sleep(0.1)
            if watch.look(self.channel, self.topology.node_rank) == 0:
                rival = json.loads(holder)
                problem = self._rivals(
                    f"pod {rival['pod']} (by {rival['source']}) and pod {self.spec.pod} (by {self.topology.source})"
                )
                self.channel.write("conflict", str(problem))
                raise problem
        if self.channel.claim(key, claim, expected=holder) != claim:
            raise BarrierError(
                f"Another process took node rank {self.topology.node_rank} at the same time.", "This one gave way."
            )

    def _rivals(self, pods: str) -> TopologyError:
        return TopologyError(
            f"Two living pods claim node rank {self.topology.node_rank} of group {self.topology.group}: {pods}.",
            "The group did not start.",
            "Give each pod its own rank; `initwarm topology --explain` says where each got it.",
        )

    def say_hello(self, hello: Hello) -> None:
        """State what this pod is and has."""
        self.channel.write(f"hello/{hello.node_rank}/{hello.uid}", encode_hello(hello))

    def hello_of(self, node_rank: int) -> Hello | None:
        """The hello of whoever holds this place now."""
        place = self.channel.read(f"place/{node_rank}")
        if place is None:
            return None
        text = self.channel.read(f"hello/{node_rank}/{json.loads(place)['uid']}")
        return None if text is None else parse_hello(text)

    def announce(self, step: Step) -> None:
        """Order all pods to carry out a step (leader)."""
        self.channel.write(f"step/{step.number}", encode(step))

    def step(self, number: int) -> Step | None:
        """The step of this number, once it is announced."""
        text = self.channel.read(f"step/{number}")
        return None if text is None else parse_step(text)

    def answer(self, number: int, answer: Answer) -> None:
        """Tell the leader how a step went here."""
        self.channel.write(f"answer/{number}/{answer.node_rank}", encode(answer))

    def answer_of(self, number: int, node_rank: int) -> Answer | None:
        """A pod's answer, once it is there."""
        text = self.channel.read(f"answer/{number}/{node_rank}")
        return None if text is None else parse_answer(text)

    def announce_end(self, data: Mapping[str, Any]) -> None:
        """Tell all pods how the round ended; they hear it in whatever step they are (leader)."""
        self.channel.write("end", json.dumps(data))

    def leave(self, problem: InitwarmError | None) -> None:
        """Say goodbye: done with the round, or gone for a reason."""
        error = None if problem is None else as_error(problem, self.spec.pod)
        self.channel.write(f"gone/{self.topology.node_rank}", json.dumps({"pod": self.spec.pod, "error": error}))

    def has_left(self, node_rank: int) -> bool:
        """Whether this pod has said goodbye."""
        return self.channel.read(f"gone/{node_rank}") is not None

    def is_present(self, node_rank: int) -> bool:
        """Whether a pod has taken this place."""
        return self.channel.read(f"place/{node_rank}") is not None

    def check_group(self) -> None:
        """Raise if the round has ended, or cannot go on because somebody is gone.

        Raises:
            GroupEnded: the leader said so.
            BarrierError: a pod left or its counter stood still for the lease.
        """
        end = self.channel.read("end")
        if end is not None:
            raise GroupEnded(json.loads(end))
        if not self.is_leader:
            self._check_alive(0)
            return
        conflict = self.channel.read("conflict")
        if conflict is not None:
            raise TopologyError(conflict)
        for node_rank in range(1, self.topology.num_nodes):
            gone = self.channel.read(f"gone/{node_rank}")
            if gone is not None:
                raise _gone(node_rank, json.loads(gone))
            if self.channel.read(f"place/{node_rank}") is not None:
                self._check_alive(node_rank)

    def _check_alive(self, node_rank: int) -> None:
        still = self.watch.look(self.channel, node_rank)
        if still > DEAD_SECONDS:
            raise BarrierError(
                f"Nothing was heard for {still:.0f} s from {self.watch.describe(node_rank)}.",
                "The group cannot go on.",
                "Look at that pod: it was stopped, evicted, or its network is cut.",
            )

    def close(self) -> None:
        """Stop the heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.stop()


def as_error(problem: InitwarmError, pod: str) -> dict[str, Any]:
    """An error as JSON for the other pods."""
    return {"kind": type(problem).__name__, "what": str(problem), "rank": problem.rank, "pod": problem.pod or pod}


def from_error(error: Mapping[str, Any]) -> InitwarmError:
    """The error that another pod reported."""
    return error_named(error["kind"], error["what"]).at(error["rank"], error["pod"])


def _gone(node_rank: int, gone: Mapping[str, Any]) -> InitwarmError:
    error = gone["error"]
    if error is None or error["kind"] == "Stopped":
        return BarrierError(
            f"Node rank {node_rank} (pod {gone['pod']}) was stopped.", "The group cannot go on without it."
        ).at(None, gone["pod"])
    return from_error(error)
