"""The coordinator process: takes this pod through the round, as the leader or as a follower.

The leader announces one step at a time, carries out its own share like every other pod, collects the answers and
decides what follows. Whatever happens, all pods hear one end with one first cause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from initwarm import __version__
from initwarm.edges import jobs, network, processes
from initwarm.edges.ending import Ending
from initwarm.edges.inbox import RoundOver
from initwarm.edges.leader import Leader
from initwarm.edges.member import GroupEnded, Member
from initwarm.edges.pod import Pod
from initwarm.edges.search import Search
from initwarm.edges.steps import MARGIN_SECONDS, Steps
from initwarm.errors import BarrierError, InitwarmError, LostLeaderError, Stopped, VolumeError
from initwarm.identity import Identity
from initwarm.protocol import Hello, Holding
from initwarm.report import Outcome
from initwarm.rounds import RoundRecord

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from initwarm.edges.entry import RunSpec

POLL_SECONDS = 0.03
#: So that all followers together ask the leader a few thousand times a second at most.
NODE_POLL_SECONDS = 0.00025
GROUP_CHECK_SECONDS = 0.5
WAIT_NOTICE_SECONDS = 10.0
PROGRESS_SECONDS = 0.2
#: Before its deadline a follower hears no more: later than the leader's own time is up, which says what was waited for.
ANNOUNCE_SECONDS = 1.0
#: The part of the deadline that a pod may be missing for.
JOIN_SHARE = 0.5
#: How long a leader waits to hear its own name's address; without it, its first own address serves.
NAME_SECONDS = 1.0
#: How many pods a line names that says who is waited for.
NAMED_PODS = 4
#: A gap between two looks of the main loop that is no slow volume: this process was stopped.
PAUSE_SECONDS = 10.0


def main(spec: RunSpec, conn: Connection, inherited: tuple[str, ...]) -> None:
    """Run this pod's round and send its outcome to the agent."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    jobs.quiet_elastic()
    if spec.start_method == "forkserver":
        processes.use_running_fork_server()

    def say(name: str, **fields: Any) -> None:
        conn.send((name, fields))

    say("initwarm.coordinator.started", message="torch and FlashInfer are imported", inherited=list(inherited))

    def show(done: int, total: int, note: str) -> None:
        conn.send(("progress", {"done": done, "total": total, "note": note}))

    Coordinator(spec, say, show, conn.send, lambda: bool(stopping)).run()


class Coordinator:
    """One pod's part of one round."""

    def __init__(
        self,
        spec: RunSpec,
        say: Callable[..., None],
        show: Callable[[int, int, str], None],
        tell: Callable[[Outcome], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self.spec = spec
        self.say = say
        self.show = show
        self.tell = tell
        self.is_stopping = is_stopping
        self.member = Member(spec, say, self._idle)
        self.pod = Pod(spec, say, self.pump)
        self.pod.note = self.member.note
        #: Of the group, once its pods have said how long each has left.
        self.deadline = spec.deadline
        self.join_end = spec.deadline
        self.has_begun = False
        #: What this pod states in its round.
        self.hello: Hello
        #: Why the round before this one ended without a result.
        self.before: str | None = None
        self.paused_seconds = 0.0
        #: That the leader's name stands for, as far as this leader knows.
        self.named_address: str | None = None
        self.phase_end = spec.deadline
        self.phase_error: InitwarmError = BarrierError("The deadline passed.")
        self.waiting_for: tuple[int, ...] = ()
        self.waiting_text: Callable[[], str] | None = None
        self.waiting_since = time.monotonic()
        self.steps = Steps(self)
        self.ending = Ending(self)
        self._last_check = 0.0
        self._last_pump = time.monotonic()
        self._last_notice = time.monotonic()
        self._last_progress = time.monotonic()
        self._shown: tuple[int, int, str] | None = None

    def run(self) -> None:
        """Take the pod through the round and tell its outcome; never raises."""
        try:
            end = self._rounds()
        except GroupEnded as ended:
            end = dict(ended.data)
        except InitwarmError as problem:
            end = self.ending.of(problem)
        except Exception as problem:  # noqa: BLE001  a bug must reach the termination message
            trace = traceback.format_exc()
            self.say("initwarm.bug", message=trace)
            end = self.ending.of(InitwarmError(f"initwarm failed: {type(problem).__name__}: {problem}\n{trace}"))
        # Before the goodbyes: the agent must know it even if the deadline passes in between.
        self.tell(self.ending.outcome(end))
        self.ending.close(end)

    def _rounds(self) -> dict[str, Any]:
        """Take part in rounds until one has a result."""
        while True:
            try:
                return self._round()
            except RoundOver as over:
                why = over.why
            except LostLeaderError as lost:
                if self.member.is_leader:
                    raise
                why = str(lost)
            self._start_over(why)

    def _start_over(self, why: str) -> None:
        """Leave this round; the next one has another epoch, and begins with nothing visible."""
        self.say("initwarm.round.restarted", message=why, epoch=self.member.epoch)
        self.before = why
        self.phase_end = self.deadline = self.spec.deadline
        with contextlib.suppress(InitwarmError):
            if self.member.is_leader:
                self.member.announce_over(why)
        self.member.leave_round()
        self.pod.begin_round()

    def _round(self) -> dict[str, Any]:
        # Joined first, so that what keeps this pod from taking part ends the round for all.
        self.join_end = time.monotonic() + self.join_seconds()
        if self.member.is_leader:
            if self.before is None:
                self.named_address = self._look_up_own_name()
                self.member.open()
            self.member.open_round()
        else:
            end = Search(self).find_group()
            if end is not None:
                return end
        if self.spec.failure is not None:
            raise self.spec.failure
        self.prepare()
        self.say("initwarm.group.joined", message=f"joined epoch {self.member.epoch}", epoch=self.member.epoch)
        self.member.say_hello(self.hello)
        self.has_begun = True
        if self.member.is_leader:
            return Leader(self).lead()
        return self._follow()

    def prepare(self) -> None:
        """Find out what this pod has, and say it in one hello."""
        if not self.pod.is_probed:
            self.pod.probe()
        self.pod.environment = self._collective_environment()
        self.hello = self._hello()

    def _collective_environment(self) -> Mapping[str, str]:
        """Over which interface the workers meet: towards the leader, since gloo would ask for the host's name."""
        interface = self.spec.settings.interface
        if self.member.is_alone:
            address = "127.0.0.1"
        elif not self.member.is_leader:
            address = self.member.host
        else:
            address = self.named_address or network.own_addresses(os.environ, interface)[0]
        return network.collective_environment(os.environ, address, interface)

    def _look_up_own_name(self) -> str | None:
        """What others see this leader as, if its name is known yet; asked before names are taken from files alone."""
        named = self.spec.topology.leader_address
        found = (
            [] if named is None or self.member.is_alone else network.resolve_soon(named, self.member.port, NAME_SECONDS)
        )
        return found[0][1] if found else None

    def matching_record(self) -> RoundRecord | None:
        """The record of a round that the others may have gone on from, if this prepared pod could be of it."""
        record = None if self.member.is_alone else self.pod.recorded_round(self.spec.topology.group)
        if record is None:
            return None
        differs = self.differs_from(record, self.hello)
        if differs is None and self.pod.find(record.bundle) is None:
            differs = f"its bundle {record.bundle[:12]} is not on the volume"
        if differs is not None:
            self.say("initwarm.round.not_matched", message=f"the round record is not this group's: {differs}")
            return None
        return record

    def differs_from(self, record: RoundRecord, hello: Hello) -> str | None:
        """Why the pod that said this hello cannot be of the recorded round; None if it can."""
        identity = Identity(dict(hello.identity[0])).digest if hello.identity else ""
        topology = self.spec.topology
        return record.mismatch(topology.group, topology.num_nodes, hello.node_rank, hello.nproc, hello.plan, identity)

    def record_round(self, record: RoundRecord) -> None:
        """Leave word on the volume which bundle this group has; after the barrier and before anybody exits."""
        if self.member.is_alone or self.spec.obstacle is not None:
            return
        try:
            self.pod.record_round(record)
        except VolumeError as problem:
            self.say("initwarm.round.not_recorded", message=str(problem))

    def forget_round(self) -> None:
        """Believe the record no longer: its bundle did not stand the proof."""
        with contextlib.suppress(VolumeError):
            self.pod.forget_round(self.spec.topology.group)

    def _idle(self) -> None:
        """While a leader is slow to answer: a signal and the end of the time are noticed all the same."""
        self._notice_pause(time.monotonic())  # it is the leader that stands still, and not this pod
        if self.is_stopping():
            raise Stopped("SIGTERM arrived before the run had ended.", "No engine file is visible.")
        if time.monotonic() >= self.phase_end:
            if self.member.is_joined and not self.member.is_leader:
                raise LostLeaderError(
                    f"The leader (node rank 0, pod {self.member.leader_pod}) did not answer before the time was up.",
                    "The group cannot go on.",
                )
            raise self.phase_error

    def join_seconds(self) -> float:
        """How long a pod may be missing."""
        return self.spec.settings.deadline_seconds * JOIN_SHARE

    def _hello(self) -> Hello:
        self.pod.look_up(self.spec.topology.num_nodes * len(self.pod.probed.identity))
        held = self.pod.held
        return Hello(
            node_rank=self.spec.topology.node_rank,
            uid=self.spec.uid,
            pod=self.spec.pod,
            epoch=self.member.epoch,
            tool_version=__version__,
            plan=self.spec.plan.digest,
            settings=self.spec.settings.shared(),
            source=self.spec.topology.source,
            identity=self.pod.probed.identity,
            features=self.pod.probed.features,
            devices=self.pod.probed.devices,
            seconds_left=self.deadline - time.monotonic(),
            holding=None
            if held is None
            else Holding(held.digest, held.generation, held.bundle.world_size, held.bundle.rank_free),
        )

    def _follow(self) -> dict[str, Any]:
        """Carry out the leader's steps until it announces the end."""
        while True:
            self.begin_phase(
                self.deadline - time.monotonic(),
                BarrierError("The deadline passed and the leader had not announced the end.", "Nothing is warm."),
                margin=ANNOUNCE_SECONDS,
            )
            step = self.wait_for(self.member.next_step, what=(0,), pause=self._poll_seconds())
            self.member.answer(step.number, self.steps.carry_out(step))

    def _poll_seconds(self) -> float:
        """How often the leader is asked for news: less often where many ask."""
        return max(POLL_SECONDS, self.spec.topology.num_nodes * NODE_POLL_SECONDS)

    def begin_phase(self, seconds: float, error: InitwarmError, margin: float = MARGIN_SECONDS) -> None:
        """Bound what follows, within the deadline less a margin; the error is raised when the bound ends."""
        self.phase_end = min(time.monotonic() + seconds, self.deadline - margin)
        self.phase_error = error

    def wait_for(self, look: Callable[[], Any], what: tuple[int, ...], pause: float = POLL_SECONDS) -> Any:
        """Look until there is something, keeping the group in sight; says what it waits for every 10 s."""
        self.waiting_for, self.waiting_since = what, time.monotonic()
        try:
            while True:
                found = look()
                if found is not None:
                    return found
                self.pump()
                time.sleep(pause)
        finally:
            self.waiting_for = ()

    def pump(self) -> None:
        """Notice SIGTERM, the end of the phase, who is gone, and who wants bytes."""
        now = time.monotonic()
        self._notice_pause(now)
        if self.is_stopping():
            raise Stopped("SIGTERM arrived before the run had ended.", "No engine file is visible.")
        if self.member.is_joined and now - self._last_check > GROUP_CHECK_SECONDS:
            self._last_check = now
            self.member.check_group()
            self.steps.serve()
        if now >= self.phase_end:
            raise self._end_of_phase()
        if self.pod.progress != self._shown and now - self._last_progress > PROGRESS_SECONDS:
            self._last_progress, self._shown = now, self.pod.progress
            if self.pod.progress is not None:
                self.show(*self.pod.progress)
        if now - self._last_notice > WAIT_NOTICE_SECONDS:
            self._last_notice = now
            self._notice(now)

    def _notice_pause(self, now: float) -> None:
        gap, self._last_pump = now - self._last_pump, now
        if gap > PAUSE_SECONDS:
            self.paused_seconds = gap
            self.say("initwarm.process.paused", message=f"this pod stood still for {gap:.0f} s")

    def _end_of_phase(self) -> InitwarmError:
        """What to say of a wait that took too long: a pod that has fallen silent explains it best."""
        lost = self.member.lost_pod() if self.member.is_joined and self.member.is_leader else None
        return self.phase_error if lost is None else lost

    def _notice(self, now: float) -> None:
        """Every 10 s: whom this pod waits for, or how far it is itself."""
        if not self.waiting_for and self.pod.progress is not None:
            done, total, text = self.pod.progress
            self.say("initwarm.work.continued", message=text, done=done, total=total)
            return
        names = [self.member.peers.describe(one) for one in self.waiting_for if one != self.spec.topology.node_rank]
        if self.waiting_text is not None:
            names = [self.waiting_text()]
        if len(names) > NAMED_PODS:
            names = [*names[:NAMED_PODS], f"{len(names) - NAMED_PODS} more"]
        if names:
            seconds = round(now - self.waiting_since)
            self.say("initwarm.wait.continued", message=f"waiting for {'; '.join(names)}", waited_seconds=seconds)
