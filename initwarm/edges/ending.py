"""How this pod's run ends: what it tells the group, what it reports, and what it waits for before it goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from initwarm import policy, report
from initwarm.edges.inbox import RoundOver
from initwarm.edges.member import GroupEnded
from initwarm.errors import InitwarmError, Stopped, SupersededError
from initwarm.report import Failure, Outcome
from initwarm.rounds import parse_round

if TYPE_CHECKING:
    from initwarm.edges.coordinator import Coordinator

POLL_SECONDS = 0.03
GOODBYE_SECONDS = 10.0
FAREWELL_SECONDS = 1.0
LAST_SECONDS = 0.5


class Ending:
    """The end of a run.

    Args:
        coordinator: whose pod, membership and clock it uses.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.spec = coordinator.spec
        self.member = coordinator.member
        self.pod = coordinator.pod

    def of(self, problem: InitwarmError) -> dict[str, Any]:
        """The end that this pod announces (leader), or reports when it lost the group (follower)."""
        settings = self.spec.settings
        # That all start cold is the leader's to say: a follower that has not heard it must not start cold alone.
        on_tuning_failure = settings.on_tuning_failure if self.member.is_leader else "fail"
        outcome, exit_code = policy.judge(problem, on_tuning_failure, settings.on_barrier_failure)
        is_stopped = isinstance(problem, Stopped)
        failure = (
            None if is_stopped else {"rank": problem.rank, "pod": problem.pod or self.spec.pod, "what": str(problem)}
        )
        end = {
            "outcome": outcome,
            "exit_code": exit_code,
            "reason": str(problem).splitlines()[0],
            "first_failure": failure,
            "strategy": None,
            "bundle": None,
        }
        self._tell(problem, end)
        return end

    def _tell(self, problem: InitwarmError, end: dict[str, Any]) -> None:
        """Let the others know, as far as the channel still works."""
        if not self.member.is_joined:
            return
        is_replaced = isinstance(problem, Stopped | SupersededError)
        with contextlib.suppress(InitwarmError):
            if self.member.is_leader and is_replaced:
                # Another may lead them: they look for it, and say why if nobody comes.
                self.member.announce_over(f"the leader (pod {self.spec.pod}) was stopped: {problem.fact}")
            elif self.member.is_leader:
                self.member.announce_end(end)
            else:
                self.member.leave(problem)
                if not is_replaced:
                    # The leader's end is everybody's: the same first cause on all pods.
                    end.update(self._hear_end() or {})

    def _hear_end(self) -> Mapping[str, Any] | None:
        """The leader's word, for as long as it lives: its volume may be slow."""
        while time.monotonic() < self.coordinator.deadline - LAST_SECONDS and not self.coordinator.is_stopping():
            try:
                self.member.check_group()
            except GroupEnded as ended:
                return ended.data
            except RoundOver:
                return None
            time.sleep(POLL_SECONDS)
        return None

    def close(self, end: Mapping[str, Any]) -> None:
        """End the workers, leave word, and keep the store open until every pod has heard the end."""
        with contextlib.suppress(InitwarmError):
            if self.member.is_joined and not self.member.is_leader:
                self.member.leave(None)
        self.pod.close()
        if not self.member.is_leader and end.get("record") is not None:
            # On a volume of its own, where the leader's word is not.
            record = parse_round(end["record"])
            if record is not None and self.pod.recorded_round(record.group) != record:
                self.coordinator.record_round(record)
        with contextlib.suppress(InitwarmError):
            if self.member.is_joined and self.member.is_leader:
                self._wait_for_goodbyes(end)
        self.member.close()

    def _wait_for_goodbyes(self, end: Mapping[str, Any]) -> None:
        """Pods that have not joined yet are waited for too, where they could not know that all start cold."""
        patience = FAREWELL_SECONDS if end["outcome"] == report.STOPPED else GOODBYE_SECONDS
        limit = time.monotonic() + patience
        others = range(1, self.spec.topology.num_nodes)
        is_cold_early = end["outcome"] == report.COLD and not self.member.inbox.is_closed
        while time.monotonic() < self.spec.deadline - LAST_SECONDS:
            with contextlib.suppress(InitwarmError, RoundOver):
                self.member.inbox.collect()
            waiting = [one for one in others if one not in self.member.inbox.farewells]
            absent = [one for one in waiting if one not in self.member.peers.places]
            is_late = (
                (self.coordinator.has_begun and not is_cold_early)
                or end["outcome"] == report.STOPPED
                or time.monotonic() > self.coordinator.join_end
            )
            if not waiting or (time.monotonic() > limit and (is_late or not absent)) or (is_late and waiting == absent):
                return
            time.sleep(POLL_SECONDS)

    def outcome(self, end: Mapping[str, Any]) -> Outcome:
        """What this pod reports of an end."""
        is_warm = end["outcome"] == report.WARM
        failure = end["first_failure"]
        return Outcome(
            outcome=end["outcome"],
            reason=end["reason"],
            exit_code=end["exit_code"],
            first_failure=None if failure is None else Failure(**failure),
            ranks=self.pod.ranks,
            world_size=end.get("world_size"),
            strategy=end["strategy"],
            tuned=self.pod.tuned,
            replayed=self.pod.replayed,
            missed=self.pod.missed,
            bundle=end["bundle"] if is_warm else None,
            identity=self.pod.identity.digest if self.pod.is_probed and self.pod.probed.identity else None,
            epoch=self.member.epoch or None,
        )
