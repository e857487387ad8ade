"""A step of the round on this pod: orders of the leader become work of the pod's ranks, and their results an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from initwarm.bundle import BUNDLE, encode_bundle, parse_bundle
from initwarm.edges.barrier import DATA_PORTS, GroupSpec
from initwarm.edges.inbox import RoundOver
from initwarm.edges.jobs import STOPPED, JobEnd
from initwarm.edges.member import GroupEnded
from initwarm.edges.pod import error_of
from initwarm.edges.tuning import TuneResult
from initwarm.edges.worker import Tickets
from initwarm.errors import (
    BarrierError,
    InitwarmError,
    LostLeaderError,
    LostRankError,
    Stopped,
    SupersededError,
    TopologyError,
    TuningTimeout,
)
from initwarm.protocol import Answer, Step, as_error

if TYPE_CHECKING:
    from initwarm.edges.coordinator import Coordinator

#: What is left of the time for the proof and the barrier when tuning must have ended.
PROOF_SHARE = 0.2
PROOF_SECONDS = 60.0
#: The agent kills everything at the deadline; the group is told before.
MARGIN_SECONDS = 2.0


class Steps:
    """Carries out steps.

    Args:
        coordinator: whose pod, membership and clock they use.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.spec = coordinator.spec
        self.member = coordinator.member
        self.pod = coordinator.pod
        self._served: set[tuple[str, str]] = set()

    def carry_out(self, step: Step) -> Answer:
        """This pod's share of a step; an error becomes the answer, so that the leader hears it."""
        node_rank = self.spec.topology.node_rank
        self.member.note(step.kind)
        try:
            data = getattr(self, f"_do_{step.kind}")(step)
        except (Stopped, GroupEnded, RoundOver, LostLeaderError, TopologyError, SupersededError):
            raise  # of the group and not of this step: nobody's answer is waited for
        except InitwarmError as problem:
            return Answer(node_rank, error=as_error(problem, self.spec.pod))
        return Answer(node_rank, data)

    def _do_tune(self, step: Step) -> dict[str, Any]:
        data = step.data
        self.pod.place(data["offsets"][self.spec.topology.node_rank])
        self.coordinator.begin_phase(self.tune_seconds(), TuningTimeout("Tuning did not end before the deadline."))
        base = None if data["base"] is None else self._blob(data["base"], 0)
        ends = self.pod.tune(
            data, base, lambda rank: self._lockstep_group(data, rank), lambda rank: self._tickets(data, rank)
        )
        failed = sorted(
            ((end.moment, rank) for rank, end in ends.items() if end.error not in (None, STOPPED)),
            key=lambda one: one[0],
        )
        if failed:
            lost = self._lost_to_a_tactic(ends, failed[0][1], is_lockstep=data["strategy"] == "lockstep")
            return {"lost": lost, "finished": self._finished(ends, data)}
        results = {rank: end.result for rank, end in ends.items() if isinstance(end.result, TuneResult)}
        answers = {str(rank): self._tuned(result) for rank, result in results.items()}
        return {"ranks": answers}

    def _finished(self, ends: Mapping[int, JobEnd], data: Mapping[str, Any]) -> list[str]:
        """The digests of what this pod's ranks have finished, for whoever goes on with the units of a lost one."""
        files = [
            end.result.v1 if isinstance(end.result, TuneResult) else self.pod.finished.of(rank, data["round"])
            for rank, end in ends.items()
        ]
        return [self.member.channel.send_blob(file) for file in files if file is not None]

    def _lost_to_a_tactic(self, ends: Mapping[int, JobEnd], earliest: int, is_lockstep: bool) -> dict[str, Any]:
        """The answer of a pod that lost a worker to a tactic; raises for whatever else was first or stood still."""
        end = ends[earliest]
        if end.is_lost and end.last_note is not None and end.last_note[1].tactic is not None:
            return {"rank": earliest, "tactic": vars(end.last_note[1].tactic), "what": end.error}
        still = [rank for rank, end in ends.items() if end.error == STOPPED]
        if is_lockstep and still:
            note = ends[still[0]].last_note
            doing = note[1].text if note is not None else "before its first unit"
            raise LostRankError(
                f"Rank {still[0]} stood still ({doing}) while the others waited for its timing.",
                "The round ended.",
                "Look at that GPU and its process; --strategy leader and independent do not wait while they measure.",
            ).at(still[0], self.spec.pod)
        raise error_of(end, earliest, self.spec.pod)

    def tune_seconds(self) -> float:
        """How long tuning may take, so that proof and barrier still fit before the deadline."""
        rest = self.coordinator.deadline - time.monotonic() - MARGIN_SECONDS
        return rest - min(PROOF_SECONDS, rest * PROOF_SHARE)

    def _tuned(self, result: TuneResult) -> dict[str, Any]:
        """What the leader needs of one rank's result; the bytes go under their digest."""
        return {
            "v1": self.member.channel.send_blob(result.v1),
            "store": None if result.store is None else self.member.channel.send_blob(result.store),
            "done": list(result.done),
            "tuned": result.tuned,
            "failed": list(result.failed),
            "degraded": list(result.degraded),
            "rejected": [vars(tactic) for tactic in result.rejected],
        }

    def _lockstep_group(self, data: Mapping[str, Any], rank: int) -> GroupSpec | None:
        if data["strategy"] != "lockstep":
            return None
        stage = next(ranks for ranks in data["stages"] if rank in ranks)
        return self._group(f"tune/{data['round']}/{data['attempt']}/{stage[0]}", "gloo", stage.index(rank), len(stage))

    def _tickets(self, data: Mapping[str, Any], rank: int) -> Tickets | None:
        if data["strategy"] != "split":
            return None
        stage = next(ranks for ranks in data["stages"] if rank in ranks)
        key = f"{self.member.epoch}/tickets/{data['round']}/{data['attempt']}/{stage[0]}"
        return Tickets(self.member.host, self.member.port, key)

    def _group(self, name: str, backend: str, rank: int, size: int) -> GroupSpec:
        return GroupSpec(
            host=self.member.host,
            port=self.member.port,
            prefix=f"{self.member.epoch}/group/{name}",
            backend=backend,
            rank=rank,
            size=size,
            timeout_seconds=self.spec.settings.collective_timeout_seconds,
        )

    def _do_adopt(self, step: Step) -> dict[str, Any]:
        """Have the bundle's bytes, from the volume or from the pod that holds them, and fill the engine root."""
        data = step.data
        self.pod.place(data["offsets"][self.spec.topology.node_rank])
        self.coordinator.begin_phase(
            self.tune_seconds(), TuningTimeout("The bundle did not arrive before the deadline.")
        )
        if self.pod.find(data["digest"]) is None:
            self._fetch(data["digest"], data["holder"])
        self.pod.fill()
        return {}

    def _fetch(self, digest: str, holder: int) -> None:
        self.coordinator.say("initwarm.bundle.fetching", message=f"bundle {digest[:12]} comes from node rank {holder}")
        self.member.channel.write(f"want/{digest}", "1")
        listing = json.loads(
            self.coordinator.wait_for(lambda: self.member.channel.read(f"files/{digest}"), what=(holder,))
        )
        blobs = {name: self._blob(sha, holder) for name, sha in listing.items()}
        record = parse_bundle(blobs.pop(BUNDLE))
        self.pod.keep(record, blobs)

    def _blob(self, digest: str, sender: int) -> bytes:
        data = self.coordinator.wait_for(lambda: self.member.channel.receive_blob(digest), what=(sender,))
        assert isinstance(data, bytes)
        return data

    def serve(self) -> None:
        """Send the bundle that this pod holds to those who asked for it."""
        held = self.pod.held
        if held is None or (self.member.epoch, held.digest) in self._served:
            return
        if self.member.channel.read(f"want/{held.digest}") is None:
            return
        files = {BUNDLE: encode_bundle(held.bundle), **held.files}
        listing = {name: self.member.channel.send_blob(data) for name, data in files.items()}
        self.member.channel.write(f"files/{held.digest}", json.dumps(listing))
        self._served.add((self.member.epoch, held.digest))

    def _do_discard(self, step: Step) -> dict[str, Any]:
        self.pod.discard(step.data["digest"], step.data["reason"])
        return {}

    def _do_prove(self, _step: Step) -> dict[str, Any]:
        self.coordinator.begin_phase(
            self.coordinator.deadline - time.monotonic() - MARGIN_SECONDS,
            TuningTimeout("The replay did not end before the deadline."),
        )
        return {"problems": self.pod.prove()}

    def _do_barrier(self, step: Step) -> dict[str, Any]:
        # The collective has a timeout of its own; the bound beyond it is for a worker that does not keep it.
        bound = 2 * self.spec.settings.collective_timeout_seconds
        data = step.data
        problem = BarrierError(
            f"Ranks {list(self.pod.ranks)} did not leave the barrier over {data['backend']} within {bound:g} s.",
            "The barrier was not passed.",
            DATA_PORTS,
        )
        self.coordinator.begin_phase(bound, problem.at(None, self.spec.pod))
        self.pod.meet(lambda rank: self._group(f"barrier/{step.number}", data["backend"], rank, data["size"]))
        return {}
