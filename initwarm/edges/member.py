"""This pod's membership of its group in one round: its place, what it tells the leader, and what it hears.

Everything for the leader goes into one log, so that it reads news only and in the order of arrival; everything from the
leader goes into another. A round has an epoch of its own. Whoever leaves it comes back as another member of a later
one, under a new name, and never into the same round.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from initwarm.edges import rendezvous
from initwarm.edges.channel import (
    DEAD_SECONDS,
    GREETING,
    RIVAL_SECONDS,
    Channel,
    Heartbeat,
    Watch,
    host_store,
    open_client,
)
from initwarm.edges.entry import RunSpec
from initwarm.edges.inbox import Inbox, RoundOver
from initwarm.edges.peers import Peers, beat_key
from initwarm.edges.pod import Say
from initwarm.edges.rendezvous import DEFAULT_PORT, AddressBook, Beacon, Found
from initwarm.errors import (
    BarrierError,
    ConfigurationError,
    InitwarmError,
    LostLeaderError,
    SupersededError,
    TopologyError,
)
from initwarm.protocol import Answer, Hello, Step, as_error, encode, encode_hello, parse_step

#: A rival for one place lives if its counter moves so often.
RIVAL_BEATS = 2


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
        idle: called now and then while the leader is slow to answer; may raise.
    """

    def __init__(self, spec: RunSpec, say: Say, idle: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self.say = say
        self.idle = idle
        self.topology = spec.topology
        self.is_leader = spec.topology.node_rank == 0
        self.is_alone = spec.topology.num_nodes == 1
        self.port = spec.topology.leader_port or (0 if self.is_alone else DEFAULT_PORT)
        self.host = "127.0.0.1"
        #: Names this process as a leader.
        self.nonce = uuid.uuid4().hex
        self.epoch = ""
        self.leader_pod = ""
        self._lives = 0
        self._store: Any = None
        self._beacon: Beacon | None = None
        self._channel: Channel | None = None
        self._heartbeat: Heartbeat | None = None
        self._has_beacon_problem = False
        #: Of the round that this pod is or was last in.
        self.peers: Peers
        self.inbox: Inbox
        self._has_roster = False
        self._is_in_roster = False
        self._orders: list[dict[str, Any]] = []
        self._orders_heard = 0

    @property
    def channel(self) -> Channel:
        """The main thread's client of the store."""
        assert self._channel is not None
        return self._channel

    @property
    def is_joined(self) -> bool:
        """Whether this pod has its place; one that was refused must not speak for it."""
        return self._heartbeat is not None

    @property
    def uid(self) -> str:
        """Names this process in this round."""
        return f"{self.spec.uid}.{self._lives}"

    def note(self, text: str) -> None:
        """Say what this pod does; the others print it while they wait."""
        if self._heartbeat is not None:
            self._heartbeat.note(text)

    # The leader opens rounds, followers enter them.

    def open(self) -> None:
        """Hold the group's store (leader), and let it be found."""
        try:
            self._store = host_store(self.port)
        except ConfigurationError as problem:
            if not self._is_strangers_port():
                raise problem.at(None, self.spec.pod) from problem
            # The default port of a host that several pods share: ours is announced on the volume.
            self._store = host_store(0)
            self.say(
                "initwarm.port.taken",
                message=f"port {self.port} is another group's; this one listens on {self._store.port}, which the cache "
                "volume tells the others",
            )
        self.port = self._store.port
        if not self.is_alone and self.spec.obstacle is None:
            record = rendezvous.own_record(self.spec, self.nonce, self.port)
            self._beacon = Beacon(AddressBook(self.spec.settings.cache_root, self.topology.group), record, self.say)

    def _is_strangers_port(self) -> bool:
        """Whether another group has the port, which nobody demanded; a rival leader of this group is told."""
        with contextlib.suppress(LostLeaderError):
            store = open_client("localhost", self.port)
            greeting = rendezvous.greeting_of(store)
            if greeting is not None and greeting["group"] == self.topology.group and not self._is_own(greeting):
                text = str(self._rivals(f"another pod and pod {self.spec.pod}"))
                Channel(store, greeting["epoch"]).append("mail", json.dumps({"kind": "conflict", "text": text}))
                return False
        return self.topology.leader_port is None

    def _is_own(self, greeting: Mapping[str, Any]) -> bool:
        """Whether an earlier process of this pod greets, which gives way to what the volume says of this one."""
        return self.spec.pod_uid is not None and greeting.get("pod_uid") == self.spec.pod_uid

    def open_round(self) -> None:
        """Begin a round of an epoch that nobody has ever joined (leader)."""
        self.epoch = uuid.uuid4().hex
        self._greet(has_ended=False)
        self._enter(self._store)

    def _greet(self, has_ended: bool) -> None:
        greeting = {
            "epoch": self.epoch,
            "group": self.topology.group,
            "leader": self.nonce,
            "pod": self.spec.pod,
            "pod_uid": self.spec.pod_uid,
            "has_ended": has_ended,
            "uid": self.uid,
        }
        self._store.set(GREETING, json.dumps(greeting))

    def enter(self, found: Found) -> None:
        """Take this pod's place in the round of the leader that was found (follower)."""
        self.host, self.port = found.host, found.port
        self.epoch = found.greeting["epoch"]
        self.leader_pod = found.greeting["pod"]
        self._enter(found.store)
        self.peers.places[0] = {"uid": found.greeting["uid"], "pod": self.leader_pod}

    def _enter(self, store: Any) -> None:
        self._channel = Channel(store, self.epoch, self.idle)
        self.peers = Peers(self._channel)
        self.inbox = Inbox(self._channel, self.peers, self.say)
        self._has_roster = self._is_in_roster = False
        self._orders, self._orders_heard = [], 0
        # The heart first: a place whose counter nobody has ever seen would be taken for a dead one's.
        beating = Channel(open_client(self.host, self.port), self.epoch)
        heartbeat = Heartbeat(beating, beat_key(self.uid), self.spec.pod)
        try:
            self._claim()
        except BaseException:
            heartbeat.stop()
            raise
        self._heartbeat = heartbeat

    def leave_round(self) -> None:
        """Be no member any more, ready for the next round under a new name."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._channel is not None:
            self._channel.close()
        self._heartbeat = self._channel = None
        self._lives += 1

    def _claim(self) -> None:
        """Take this pod's place; another living process that has it means that two pods have one rank."""
        key = f"place/{self.topology.node_rank}"
        place = {
            "uid": self.uid,
            "process": self.spec.uid,
            "pod": self.spec.pod,
            "pod_uid": self.spec.pod_uid,
            "source": self.topology.source,
        }
        claim = json.dumps(place)
        holder = self.channel.claim(key, claim)
        while holder != claim:
            rival = json.loads(holder)
            if not self._succeeds(rival):
                problem = self._rivals(
                    f"pod {rival['pod']} (by {rival['source']}) and pod {self.spec.pod} (by {self.topology.source})"
                )
                self._post("conflict", text=str(problem))
                raise problem
            holder = self.channel.claim(key, claim, expected=holder)
        self._post("place", place=place)

    def _succeeds(self, rival: Mapping[str, Any]) -> bool:
        """Whether this process comes after that one: its earlier self, or one that has ended or stands still."""
        is_same_pod = rival["pod_uid"] is not None and rival["pod_uid"] == self.spec.pod_uid
        if rival["process"] == self.spec.uid or is_same_pod:
            return True
        key, beats, watch = beat_key(rival["uid"]), -1, Watch()
        while beats < RIVAL_BEATS:
            if self.channel.read(f"gone/{rival['uid']}") is not None:
                return True
            (still,) = watch.look(self.channel, [key])
            beats += still == 0
            if still > RIVAL_SECONDS:
                return True
            self.idle()
            time.sleep(0.1)
        return False

    def _rivals(self, pods: str) -> TopologyError:
        return TopologyError(
            f"Two living pods claim node rank {self.topology.node_rank} of group {self.topology.group}: {pods}.",
            "The group did not start.",
            "Give each pod its own rank; `initwarm topology --explain` says where each got it.",
        )

    # What pods tell the leader.

    def _post(self, kind: str, **data: Any) -> None:
        letter = {"kind": kind, "node": self.topology.node_rank, "uid": self.uid, **data}
        self.channel.append("mail", json.dumps(letter))

    def say_hello(self, hello: Hello) -> None:
        """State what this pod is and has."""
        self._post("hello", hello=encode_hello(hello))

    def answer(self, number: int, answer: Answer) -> None:
        """Tell the leader how a step went here."""
        self._post("answer", number=number, answer=encode(answer))

    def leave(self, problem: InitwarmError | None) -> None:
        """Say goodbye: done with the round, or gone for a reason."""
        error = None if problem is None else as_error(problem, self.spec.pod)
        # Where whoever takes this place looks, too.
        self.channel.write(f"gone/{self.uid}", "1")
        self._post("gone", pod=self.spec.pod, error=error)

    def lost_pod(self) -> InitwarmError | None:
        """Why a pod that has left or fallen silent is what everybody waits for, if one has (leader)."""
        silent = self.inbox.silent(self.peers.places)
        return self.inbox.first_stopped() or next((self._silence(*one) for one in silent.items()), None)

    # What the leader announces.

    def call_the_roll(self, nodes: Mapping[int, Hello]) -> None:
        """Fix who takes part: from now on a newcomer ends the round (leader)."""
        self.channel.write("roster", json.dumps({str(node): self.peers.places[node]["uid"] for node in nodes}))
        self.inbox.is_closed = True

    def announce(self, step: Step) -> None:
        """Order all pods to carry out a step (leader)."""
        self.channel.append("orders", json.dumps({"kind": "step", "step": encode(step)}))

    def announce_end(self, data: Mapping[str, Any]) -> None:
        """Tell all pods how the round ended; they hear it in whatever step they are (leader)."""
        self._greet(has_ended=data["outcome"] == "warm")
        self.channel.append("orders", json.dumps({"kind": "end", "end": data}))

    def announce_over(self, why: str) -> None:
        """Tell all pods that this round ends without a result (leader)."""
        self._greet(has_ended=True)
        places = {str(node): place["process"] for node, place in self.peers.places.items()}
        self.channel.append("orders", json.dumps({"kind": "over", "why": why, "places": places}))

    def next_step(self) -> Step | None:
        """The next step for this pod, once it is announced.

        Raises:
            GroupEnded, RoundOver, BarrierError: as `check_group`.
        """
        self._hear_orders()
        return parse_step(self._orders.pop(0)["step"]) if self._orders else None

    def _hear_orders(self) -> None:
        length = self.channel.length("orders")
        while self._orders_heard < length:
            text = self.channel.read(f"orders/{self._orders_heard + 1}")
            if text is None:
                return
            self._orders_heard += 1
            self._obey(json.loads(text))

    def _obey(self, order: dict[str, Any]) -> None:
        if order["kind"] == "step":
            if not self._has_roster:
                roster = json.loads(self.channel.read("roster") or "{}")
                self._has_roster = True
                self._is_in_roster = roster.get(str(self.topology.node_rank)) == self.uid
            if self._is_in_roster:
                self._orders.append(order)
        elif order["kind"] == "end":
            # A warm end is that of those who took part; whoever came later has none of its files.
            if order["end"]["outcome"] == "warm" and not self._is_in_roster:
                raise RoundOver("the round that this pod found had just ended")
            raise GroupEnded(order["end"])
        else:
            holder = order["places"].get(str(self.topology.node_rank))
            if holder is not None and holder != self.spec.uid:
                raise SupersededError(
                    f"Another process took node rank {self.topology.node_rank} in place of this one.",
                    "This process gave way.",
                    "Nothing needs to be done if this pod was replaced or restarted.",
                )
            raise RoundOver(order["why"])

    def check_group(self) -> None:
        """Raise if the round has ended, or cannot go on because somebody is gone.

        Raises:
            GroupEnded: the leader said so.
            RoundOver: another round begins.
            LostLeaderError: the leader is gone or silent (follower).
            BarrierError: a pod left and nobody came in its place, or its counter stood still for too long (leader).
        """
        if not self.is_leader:
            self._hear_orders()
            self._check_alive(self.peers.stand_still([0], DEAD_SECONDS))
            return
        if self._beacon is not None and self._beacon.problem is not None and not self._has_beacon_problem:
            self._has_beacon_problem = True  # raised once: what follows from it has to be said to the others
            raise self._beacon.problem
        self.inbox.collect()
        self.inbox.check_stopped()
        self._check_alive(self.inbox.silent([node for node in self.peers.places if node > 0], DEAD_SECONDS))

    def _check_alive(self, dead: Mapping[int, float]) -> None:
        for node, still in dead.items():
            raise self._silence(node, still)

    def _silence(self, node: int, still: float) -> BarrierError:
        kind = BarrierError if self.is_leader else LostLeaderError
        problem = kind(
            f"Nothing was heard for {still:.0f} s from {self.peers.describe(node)}.",
            "The group cannot go on.",
            "Look at that pod: it was stopped, evicted, or its network is cut.",
        )
        problem.at(None, self.peers.places[node]["pod"])
        return problem

    def close(self) -> None:
        """Stop the heartbeat, and be found no longer."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._beacon is not None:
            self._beacon.stop()
