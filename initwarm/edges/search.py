"""A follower's search for its group: a living leader, or the record of a round that the others have gone on from."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from initwarm import hints, report
from initwarm.edges.rendezvous import Finder
from initwarm.edges.steps import MARGIN_SECONDS
from initwarm.errors import BarrierError, LostLeaderError, TuningTimeout
from initwarm.rounds import ALONE_SECONDS, RECORD_SECONDS, RoundRecord
from initwarm.topology import rank_offsets

if TYPE_CHECKING:
    from initwarm.edges.coordinator import Coordinator

POLL_SECONDS = 0.05


class Search:
    """One search.

    Args:
        coordinator: whose pod, membership and clock it uses.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.member = coordinator.member
        self.pod = coordinator.pod
        self.spec = coordinator.spec
        self.say = coordinator.say
        self.began = time.monotonic()
        self.record_looked_for_at = self.began
        self.refused: set[str] = set()
        self.reminder = hints.Reminder()

    def find_group(self) -> dict[str, Any] | None:
        """Look until this pod has its place in a round; or, on its own, stands where the others of a round do.

        Returns:
            None in a round, or the end of this pod's run.

        Raises:
            BarrierError: neither was found within the share of the deadline that a pod may be missing for.
        """
        seconds = self.coordinator.join_seconds()
        finder = Finder(self.spec)
        self.coordinator.begin_phase(seconds, BarrierError("No leader was found."))
        self.coordinator.waiting_text = lambda: f"the leader (node rank 0); {finder.explain()}"
        try:
            while True:
                if finder.found is not None:
                    if self._has_entered(finder):
                        return None
                    finder = Finder(self.spec)
                if finder.problem is not None:
                    raise finder.problem
                end = self._join_recorded_round()
                if end is not None:
                    return end
                self._remind(finder)
                self.coordinator.phase_error = self._nobody(seconds, finder.explain())
                self.coordinator.pump()
                time.sleep(POLL_SECONDS)
        finally:
            finder.stop()
            self.coordinator.waiting_text = None

    def _has_entered(self, finder: Finder) -> bool:
        """Take this pod's place in the found leader's round, unless it is gone by now."""
        assert finder.found is not None
        try:
            self.member.enter(finder.found)
        except LostLeaderError:
            self.member.leave_round()
            return False
        return True

    def _nobody(self, seconds: float, tried: str) -> BarrierError:
        before = self.coordinator.before
        where = f"group {self.spec.topology.group}"
        paused = self.coordinator.paused_seconds
        facts = [f"No leader (node rank 0) of {where} answered within {seconds:.0f} s: {tried}."]
        if before is not None:
            # What happened first says more than what followed from it.
            pod = self.member.leader_pod
            facts = [f"The round was lost: {before.rstrip('.')} (leader: pod {pod}).", *facts]
        if paused:
            facts = [f"This pod stood still for {paused:.0f} s.", *facts]
        return BarrierError(
            " ".join(facts),
            "This pod joined no group.",
            "Check that the leader pod runs, that its name resolves (publishNotReadyAddresses) and that the port "
            "is reachable (NetworkPolicy).",
        )

    def _remind(self, finder: Finder) -> None:
        waited = time.monotonic() - self.began
        if not self.reminder.is_due(waited):
            return
        text = f"still no leader after {waited:.0f} s: {finder.explain()}"
        if self.reminder.is_first(waited):
            text = f"{hints.why_no_leader(finder.is_name_unknown)} Tried: {finder.explain()}."
        self.say("initwarm.leader.absent", message=text)

    def _join_recorded_round(self) -> dict[str, Any] | None:
        """Stand where the others of a recorded round do; None while there is no such record."""
        now = time.monotonic()
        if now - self.began < ALONE_SECONDS or now - self.record_looked_for_at < RECORD_SECONDS:
            return None
        self.record_looked_for_at = now
        record = self.pod.recorded_round(self.spec.topology.group)
        if record is None or record.bundle in self.refused or self.spec.failure is not None:
            return None
        self.coordinator.prepare()
        if self.coordinator.matching_record() is None or not self._stands(record):
            self.refused.add(record.bundle)
            return None
        return self._end(record)

    def _stands(self, record: RoundRecord) -> bool:
        """Fill this pod's engine root from the record's bundle and prove it."""
        self.pod.place(rank_offsets(record.nproc)[self.spec.topology.node_rank])
        outer, error = self.coordinator.phase_end, self.coordinator.phase_error
        self.coordinator.begin_phase(
            self.coordinator.deadline - time.monotonic() - MARGIN_SECONDS,
            TuningTimeout("The replay did not end before the deadline."),
        )
        self.pod.fill()
        problems = self.pod.prove()
        self.pod.leave()
        self.coordinator.phase_end, self.coordinator.phase_error = outer, error
        if problems:
            self.say(
                "initwarm.replay.failed",
                message=f"the recorded round's bundle {record.bundle[:12]} {problems[0]['what']}; it is not used",
            )
            self.pod.begin_round()
        return not problems

    def _end(self, record: RoundRecord) -> dict[str, Any]:
        assert self.pod.held is not None
        entries = self.pod.held.bundle.entries
        return {
            "outcome": report.WARM,
            "exit_code": 0,
            "reason": f"{entries} entries adopted: joined round {record.epoch[:8]} of {record.world_size} ranks, whose "
            "other pods have gone on",
            "first_failure": None,
            "strategy": None,
            "bundle": record.bundle,
            "world_size": record.world_size,
        }
