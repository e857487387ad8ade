"""What only the leader does: it gathers the hellos, decides the steps, and announces one end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from initwarm import __version__, hints, report
from initwarm.edges.inbox import RoundOver
from initwarm.edges.measuring import Measuring
from initwarm.errors import (
    BarrierError,
    ConfigurationError,
    LostRankError,
    TuningError,
)
from initwarm.plan import check_world
from initwarm.protocol import Adopt, Answer, Conflict, Hello, Step, as_error, first_error, from_error, verdict
from initwarm.rounds import ALONE_SECONDS, RECORD_SECONDS, RoundRecord
from initwarm.topology import rank_offsets

if TYPE_CHECKING:
    from initwarm.edges.coordinator import Coordinator

#: A rolling update shows two plans or versions for a while; a conflict is fatal only when it stands still.
CONFLICT_SECONDS = 5.0
#: How long the other pods have to answer once one has failed; in lockstep they fail with it.
FAILED_SECONDS = 8.0
#: A pod whose heart has stood still for so long when another fails may be what the other waited for.
PULSE_SECONDS = 5.0


class Leader:
    """One round, from the side that decides.

    Args:
        coordinator: whose pod, membership and clock it uses.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.member = coordinator.member
        self.pod = coordinator.pod
        self.spec = coordinator.spec
        self.say = coordinator.say
        #: Who takes part; all pods, or those who are left where the others have gone on.
        self.nodes: list[int] = list(range(self.spec.topology.num_nodes))
        self.hellos: dict[int, Hello] = {}
        #: The record on the volume, as last seen; and if it could be this group's, of the round that the others are in.
        self.latest_record: RoundRecord | None = None
        self.record: RoundRecord | None = None
        self.record_looked_for_at = 0.0
        self.number = 0
        self.offsets: tuple[int, ...] = ()
        self.world_size = 0
        self.strategy: str | None = None
        self.notes: list[str] = []
        self.problem: TuningError | None = None

    def lead(self) -> dict[str, Any]:
        """Take the group to one end and announce it.

        Raises:
            RoundOver: a pod was replaced meanwhile.
        """
        decision = self._agree()
        present = [self.hellos[node] for node in self.nodes]
        # The pod that started first has the least time left; its end must not come as a surprise to the others.
        self.coordinator.deadline = min(
            self.coordinator.deadline, time.monotonic() + min(hello.seconds_left for hello in present)
        )
        self.member.call_the_roll({hello.node_rank: hello for hello in present})
        if len(self.nodes) < self.spec.topology.num_nodes:
            assert self.record is not None
            end = self._rejoin(self.record)
        else:
            end = self._full_round(decision)
        self.member.announce_end(end)
        return end

    def _full_round(self, decision: Any) -> dict[str, Any]:
        counts = [self.hellos[node].nproc for node in self.nodes]
        self.offsets = rank_offsets(counts)
        self.world_size = sum(counts)
        check_world(self.spec.plan, self.world_size)
        is_adopted = False
        if isinstance(decision, Adopt):
            self.say(
                "initwarm.verdict.reached",
                message=f"adopt bundle {decision.digest[:12]} of node rank {decision.holder}",
            )
            is_adopted = self.spread(decision.digest, decision.holder)
            if not is_adopted:
                self.notes.append(f"the bundle {decision.digest[:12]} did not stand the replay")
        if not is_adopted:
            is_adopted = Measuring(self).measure_until_proven()
        self._meet()
        written = self._record(counts)
        self.coordinator.record_round(written)
        end = self._warm_end("adopted" if is_adopted else f"tuned by {self.strategy}")
        return {**end, "record": written.as_json()}

    def _rejoin(self, record: RoundRecord) -> dict[str, Any]:
        """Bring the pods that are left to where those are that have gone on; without them there is no barrier."""
        self.offsets = rank_offsets(record.nproc)
        self.world_size = record.world_size
        if not self.spread(record.bundle, self.nodes[0]):
            self.coordinator.forget_round()
            raise RoundOver("the bundle of the recorded round did not stand the replay")
        return self._warm_end(f"adopted: joined round {record.epoch[:8]}")

    def _agree(self) -> Any:
        """The verdict on all hellos, once it is no conflict, or stands still."""
        self._gather_hellos()
        decision = verdict([self.hellos[node] for node in self.nodes])
        since = time.monotonic()
        while isinstance(decision, Conflict):
            if time.monotonic() - since > CONFLICT_SECONDS:
                raise ConfigurationError(decision.fact, "Nothing was tuned.", decision.fix)
            self.coordinator.pump()
            time.sleep(0.1)
            before = dict(self.hellos)
            self._gather_hellos()
            if self.hellos != before:
                since = time.monotonic()
                decision = verdict([self.hellos[node] for node in self.nodes])
        return decision

    def _gather_hellos(self) -> None:
        """Wait for every pod; or, with a record of the round that the others are in, for those who come at all."""
        seconds = self.coordinator.join_seconds()
        began, reminder = time.monotonic(), hints.Reminder()
        everyone = range(self.spec.topology.num_nodes)

        def look() -> bool | None:
            self.member.inbox.collect()
            self.hellos = dict(self.member.inbox.hellos)
            missing = [node for node in everyone if node not in self.hellos]
            self.coordinator.phase_error = BarrierError(
                f"Of {len(everyone)} pods, node ranks {missing} said no hello within {seconds:.0f} s.",
                "No collective was entered.",
                "Look at those pods: are they scheduled, do they run initwarm, do they find the leader?",
            )
            self.coordinator.waiting_for = tuple(missing)
            if not missing:
                self.nodes = list(everyone)
                return True
            self._remind(reminder, time.monotonic() - began, missing)
            if time.monotonic() - self.member.inbox.last_arrival > ALONE_SECONDS:
                self._look_for_record()
                self.nodes = sorted(self.hellos)
                return (self.record is not None and self._is_of(self.record)) or None
            return None

        self.coordinator.begin_phase(seconds, BarrierError("No hello arrived."))
        self.coordinator.wait_for(look, what=tuple(everyone))

    def _look_for_record(self) -> None:
        """Read the record now and then: an older leader may have left it since this one came."""
        now = time.monotonic()
        if now - self.record_looked_for_at < RECORD_SECONDS:
            return
        self.record_looked_for_at = now
        latest = self.pod.recorded_round(self.spec.topology.group)
        if latest != self.latest_record:
            self.latest_record, self.record = latest, self.coordinator.matching_record()

    def _is_of(self, record: RoundRecord) -> bool:
        """Whether all who are there could be of the recorded round."""
        return all(
            self.coordinator.differs_from(record, self.hellos[node]) is None for node in self.nodes
        ) and not isinstance(verdict([self.hellos[node] for node in self.nodes]), Conflict)

    def _remind(self, reminder: hints.Reminder, waited: float, missing: list[int]) -> None:
        """Name the usual causes where nobody at all has come for a minute."""
        if len(self.member.peers.places) > 1 or not reminder.is_due(waited):
            return
        text = f"still waiting for {len(missing)} pods, for {waited:.0f} s"
        if reminder.is_first(waited):
            text = hints.why_nobody_came(len(missing))
        self.say("initwarm.group.absent", message=text)

    def step(self, kind: str, waiting_for: tuple[int, ...] | None = None, **data: Any) -> list[Answer]:
        """Have all pods carry out a step; the first error ends the round."""
        answers = self.ask(kind, waiting_for, **data)
        raise_first(answers)
        return answers

    def ask(self, kind: str, waiting_for: tuple[int, ...] | None = None, **data: Any) -> list[Answer]:
        """Announce a step, do this pod's share, and collect all answers, in the order in which they came."""
        step = Step(self.number, kind, {"offsets": list(self.offsets), **data})
        self.number += 1
        self.say("initwarm.step.announced", message=kind, step=step.number)
        self.member.announce(step)
        self.member.answer(step.number, self.coordinator.steps.carry_out(step))
        failed_at: list[float] = []

        def look() -> list[Answer] | None:
            self.member.inbox.collect()
            answers = self.member.inbox.answers.get(step.number, {})
            missing = [node for node in self.nodes if node not in answers]
            self.coordinator.waiting_for = tuple(missing)
            if not missing:
                return list(answers.values())
            if any(answer.error is not None for answer in answers.values()):
                failed_at.append(time.monotonic())
                if failed_at[-1] - failed_at[0] > FAILED_SECONDS and not self.member.inbox.is_any_silent(missing):
                    # Who cannot leave a barrier is not the reason why another failed there.
                    mute = [] if kind == "barrier" else [self._mute(node, kind) for node in missing]
                    return [*answers.values(), *mute]
            return None

        found: list[Answer] = self.coordinator.wait_for(look, what=waiting_for or tuple(self.nodes))
        self._await_successor(found)
        return found

    def _await_successor(self, answers: Sequence[Answer]) -> None:
        """Where pods only report that they lost somebody, see who fell silent: another may take its place."""
        error = first_error(answers)
        if error is None or error["kind"] != "BarrierError":
            return
        end = time.monotonic() + PULSE_SECONDS
        while time.monotonic() < end or self.member.inbox.is_any_silent(self.nodes):
            # Ends by a newcomer (RoundOver), or by a pod that stays silent.
            self.coordinator.pump()
            time.sleep(0.1)

    def _mute(self, node: int, kind: str) -> Answer:
        """What is assumed of a pod that lives and says nothing while another has failed."""
        lost = LostRankError(
            f"Another pod failed in the step {kind!r}, and nothing came from {self.member.peers.describe(node)}.",
            "The round ended.",
            "Look at that pod first: the others may have waited for it.",
        )
        return Answer(node, error=as_error(lost, self.hellos[node].pod))

    def spread(self, digest: str, holder: int) -> bool:
        """Bring the bundle to every pod and prove it on every rank; sets it aside where the proof fails."""
        self.step("adopt", digest=digest, holder=holder)
        answers = self.step("prove")
        problems = [problem for answer in answers for problem in answer.data["problems"]]
        if not problems:
            return True
        first = min(problems, key=lambda problem: problem["rank"])
        self.problem = TuningError(
            f"Rank {first['rank']}: the replay of bundle {digest[:12]} {first['what']}.",
            "The bundle was set aside." if first["kind"] != "built" else "It is not warm.",
            "See `initwarm inspect` for what it holds.",
        )
        self.problem.at(first["rank"], self.pod_name(first["rank"]))
        self.say("initwarm.replay.failed", message=str(self.problem), problems=len(problems))
        self.step("discard", digest=digest, reason=self.problem.fact)
        return False

    def node_of(self, rank: int) -> int:
        """The pod that has a rank."""
        return max(node for node in self.nodes if self.offsets[node] <= rank)

    def pod_name(self, rank: int) -> str:
        """The name of the pod that has a rank."""
        return self.hellos[self.node_of(rank)].pod

    def _meet(self) -> None:
        devices = [(node, device) for node in self.nodes for device in self.hellos[node].devices]
        is_own = self.spec.plan.device == "cuda" and len({device for _, device in devices}) == len(devices)
        backend = "nccl" if is_own else "gloo"
        self.step("barrier", backend=backend, size=self.world_size)
        self.say("initwarm.barrier.passed", message=f"all {self.world_size} ranks met over {backend}", backend=backend)

    def _record(self, counts: Sequence[int]) -> RoundRecord:
        assert self.pod.held is not None
        return RoundRecord(
            group=self.spec.topology.group,
            nproc=tuple(counts),
            plan=self.spec.plan.digest,
            identity=self.pod.identity.digest,
            bundle=self.pod.held.digest,
            epoch=self.member.epoch,
            tool_version=__version__,
        )

    def _warm_end(self, how: str) -> dict[str, Any]:
        assert self.pod.held is not None
        entries = self.pod.held.bundle.entries
        ranks = sum(self.hellos[node].nproc for node in self.nodes)
        where = f"all {self.world_size}" if ranks == self.world_size else f"{ranks} of {self.world_size}"
        reason = f"{entries} entries {how}, replayed on {where} ranks" if entries else "nothing to tune"
        return {
            "outcome": report.WARM,
            "exit_code": 0,
            "reason": "; ".join([reason, *self.notes]),
            "first_failure": None,
            "strategy": self.strategy,
            "bundle": self.pod.held.digest,
            "world_size": self.world_size,
        }


def raise_first(answers: Sequence[Answer]) -> None:
    """Raise the error that all pods shall report, if one has failed."""
    error: Mapping[str, Any] | None = first_error(answers)
    if error is not None:
        raise from_error(error)
