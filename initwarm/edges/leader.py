"""What only the leader does: it gathers the hellos, decides the steps, and merges what was tuned into one bundle."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from initwarm import __version__, report, strategy
from initwarm.bundle import STORE_FILE, V1_FILE, Bundle, record_files
from initwarm.edges.member import as_error, from_error
from initwarm.entries import Difference, encode_v1, merge_v1, parse_v1
from initwarm.errors import BarrierError, ConfigurationError, LostRankError, TuningError, VolumeError
from initwarm.plan import check_world
from initwarm.protocol import Adopt, Answer, Conflict, Hello, Step, first_error, verdict
from initwarm.store import encode_store, merge_store, parse_store
from initwarm.topology import rank_offsets

if TYPE_CHECKING:
    from initwarm.edges.coordinator import Coordinator

#: A rolling update shows two plans or versions for a while; a conflict is fatal only when it stands still.
CONFLICT_SECONDS = 5.0
#: How long the other pods have to answer once one has failed; in lockstep they fail with it.
FAILED_SECONDS = 8.0
#: How many workers one tactic after another may kill before tuning is given up.
MAX_RESTARTS = 3


class Leader:
    """One round, from the side that decides."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.member = coordinator.member
        self.pod = coordinator.pod
        self.spec = coordinator.spec
        self.say = coordinator.say
        self.nodes = range(self.spec.topology.num_nodes)
        self.number = 0
        self.round = 0
        self.strategy: str | None = None
        self.offsets: tuple[int, ...] = ()
        self.world_size = 0
        self.notes: list[str] = []

    def lead(self) -> dict[str, Any]:
        """Take the group to one end and announce it."""
        hellos, decision = self._agree()
        # The pod that started first has the least time left; its end must not come as a surprise to the others.
        self.coordinator.deadline = min(
            self.coordinator.deadline, time.monotonic() + min(hello.seconds_left for hello in hellos)
        )
        counts = [hello.nproc for hello in hellos]
        self.offsets = rank_offsets(counts)
        self.world_size = sum(counts)
        check_world(self.spec.plan, self.world_size)
        if isinstance(decision, Adopt):
            self.say(
                "initwarm.verdict.reached",
                message=f"adopt bundle {decision.digest[:12]} of node rank {decision.holder}",
            )
            is_proven = self._spread(decision.digest, decision.generation, decision.holder)
            if not is_proven:
                self.notes.append(f"the bundle {decision.digest[:12]} did not stand the replay and was tuned anew")
                decision = None
        if not isinstance(decision, Adopt):
            self._tune_until_proven(hellos)
        self._meet(hellos)
        self._record()
        end = self._warm_end(isinstance(decision, Adopt))
        self.member.announce_end(end)
        return end

    def _agree(self) -> tuple[list[Hello], Any]:
        """All hellos, and the verdict on them once it is no conflict, or stands still."""
        hellos = self._gather_hellos()
        decision = verdict(hellos)
        since = time.monotonic()
        while isinstance(decision, Conflict):
            if time.monotonic() - since > CONFLICT_SECONDS:
                raise ConfigurationError(decision.fact, "Nothing was tuned.", decision.fix)
            self.coordinator.pump()
            time.sleep(0.1)
            newer = self._gather_hellos()
            if newer != hellos:
                hellos, since = newer, time.monotonic()
                decision = verdict(hellos)
        return hellos, decision

    def _gather_hellos(self) -> list[Hello]:
        seconds = self.coordinator.join_seconds()
        hellos: dict[int, Hello] = {}

        def look() -> bool | None:
            for node in self.nodes:
                hello = self.member.hello_of(node)
                if hello is not None:
                    hellos[node] = hello
            missing = [node for node in self.nodes if node not in hellos]
            self.coordinator.phase_error = BarrierError(
                f"Of {len(self.nodes)} pods, node ranks {missing} said no hello within {seconds:.0f} s.",
                "No collective was entered.",
                "Look at those pods: are they scheduled, do they run initwarm, do they find the leader?",
            )
            self.coordinator.waiting_for = tuple(missing)
            return None if missing else True

        self.coordinator.begin_phase(seconds, BarrierError("No hello arrived."))
        self.coordinator.wait_for(look, what=tuple(self.nodes))
        return [hellos[node] for node in self.nodes]

    def _step(self, kind: str, waiting_for: tuple[int, ...] | None = None, **data: Any) -> list[Answer]:
        """Have all pods carry out a step; the first error ends the round."""
        answers = self._ask(kind, waiting_for, **data)
        _raise_first(answers)
        return answers

    def _ask(self, kind: str, waiting_for: tuple[int, ...] | None = None, **data: Any) -> list[Answer]:
        """Announce a step, do this pod's share, and collect all answers."""
        step = Step(self.number, kind, {"offsets": list(self.offsets), **data})
        self.number += 1
        self.say("initwarm.step.announced", message=kind, step=step.number)
        self.member.announce(step)
        answers = {self.nodes[0]: self.coordinator.steps.carry_out(step)}

        def look() -> bool | None:
            for node in self.nodes:
                if node not in answers:
                    answer = self.member.answer_of(step.number, node)
                    if answer is not None:
                        answers[node] = answer
            missing = [node for node in self.nodes if node not in answers]
            self.coordinator.waiting_for = tuple(missing)
            if missing and any(answer.error is not None for answer in answers.values()):
                failed_at.append(time.monotonic())
                if failed_at[-1] - failed_at[0] > FAILED_SECONDS:
                    answers.update({node: self._silent(node, kind) for node in missing})
            return None if len(answers) < len(self.nodes) else True

        failed_at: list[float] = []
        self.coordinator.wait_for(look, what=waiting_for or tuple(self.nodes))
        return [answers[node] for node in self.nodes]

    def _silent(self, node: int, kind: str) -> Answer:
        """What is assumed of a pod that says nothing while another has failed."""
        lost = LostRankError(
            f"Another pod failed in the step {kind!r}, and nothing came from {self.member.watch.describe(node)}.",
            "The round ended.",
            "Look at that pod first: the others may have waited for it.",
        )
        hello = self.member.hello_of(node)
        return Answer(node, error=as_error(lost, hello.pod if hello is not None else f"node rank {node}"))

    def _spread(self, digest: str, generation: int, holder: int) -> bool:
        """Bring the bundle to every pod and prove it on every rank; sets it aside where the proof fails."""
        self._step("adopt", digest=digest, generation=generation, holder=holder)
        answers = self._step("prove")
        problems = [problem for answer in answers for problem in answer.data["problems"]]
        if not problems:
            return True
        first = min(problems, key=lambda problem: problem["rank"])
        self.problem = TuningError(
            f"Rank {first['rank']}: the replay of bundle {digest[:12]} {first['what']}.",
            "The bundle was set aside." if first["kind"] != "built" else "It is not warm.",
            "See `initwarm inspect` for what it holds.",
        ).at(first["rank"], self._pod_name(first["rank"]))
        self.say("initwarm.replay.failed", message=str(self.problem), problems=len(problems))
        self._step("discard", digest=digest, reason=self.problem.fact)
        return False

    def _pod_name(self, rank: int) -> str:
        node = max(node for node in self.nodes if self.offsets[node] <= rank)
        hello = self.member.hello_of(node)
        return hello.pod if hello is not None else self.spec.pod

    def _facts(self, hellos: list[Hello]) -> strategy.Facts:
        features = hellos[0].features
        plan = self.spec.plan
        return strategy.Facts(
            world_size=self.world_size,
            is_uniform=plan.is_uniform(self.world_size),
            has_collectives=plan.has_collectives,
            is_rank_free=plan.rank_free,
            has_process_group=bool(features["has_process_group"]),
            flashinfer_version=str(features["flashinfer_version"]),
        )

    def _tune_until_proven(self, hellos: list[Hello]) -> None:
        """Tune, publish, spread and prove; under `auto` a bundle that misses is tuned once more by a safer strategy."""
        facts = self._facts(hellos)
        asked = self.spec.settings.strategy
        tried: tuple[str, ...] = ()
        while True:
            choice = strategy.choose(asked, facts, tried)
            self.strategy = choice.strategy
            self.say(
                "initwarm.strategy.chosen",
                message=choice.strategy,
                ruled_out=list(choice.ruled_out) or None,
            )
            digest, generation = self._tune(choice.strategy, facts)
            if self._spread(digest, generation, holder=0):
                return
            tried = (*tried, choice.strategy)
            if asked != "auto" or not strategy.is_any_left(facts, tried):
                raise self.problem
            self.notes.append(f"the result of {choice.strategy} did not stand the replay")

    def _tune(self, chosen: str, facts: strategy.Facts) -> tuple[str, int]:
        """Have the tuning ranks measure, without the tactics that killed a worker, and publish the merged result."""
        if self.spec.obstacle is not None:
            # Said before the work and not after it: what is tuned could not be kept.
            raise self.spec.obstacle
        stages = self.spec.plan.stages(self.world_size)
        tuners = [ranks[0] for ranks in stages] if chosen == strategy.LEADER else list(range(self.world_size))
        excluded: list[Mapping[str, Any]] = []
        self.round += 1
        for attempt in range(MAX_RESTARTS + 1):
            answers = self._ask(
                "tune",
                waiting_for=tuple(self._nodes_of(tuners)),
                strategy=chosen,
                tuners=tuners,
                stages=[list(ranks) for ranks in stages],
                excluded=excluded,
                attempt=attempt,
                round=self.round,
            )
            lost = [answer.data["lost"] for answer in answers if "lost" in answer.data]
            if not lost:
                _raise_first(answers)
                return self._publish(chosen, facts, answers)
            # What the other ranks report then is the lost one's doing: in lockstep their averages broke.
            for one in lost:
                if one["tactic"] not in excluded:
                    excluded.append(one["tactic"])
            text = f"tactic {lost[0]['tactic']} killed the worker of rank {lost[0]['rank']} ({lost[0]['what']})"
            self.notes.append(f"{text} and is excluded on all ranks")
            self.say("initwarm.tactic.excluded", message=text, tactic=lost[0]["tactic"])
        raise TuningError(
            f"{MAX_RESTARTS + 1} workers were lost while tuning; the last: {self.notes[-1]}.", "Nothing was published."
        )

    def _nodes_of(self, ranks: list[int]) -> list[int]:
        return sorted({max(node for node in self.nodes if self.offsets[node] <= rank) for rank in ranks})

    def _publish(self, chosen: str, facts: strategy.Facts, answers: list[Answer]) -> tuple[str, int]:
        results = {int(rank): one for answer in answers for rank, one in answer.data.get("ranks", {}).items()}
        self._check_results(results)
        ranks = sorted(results)
        v1 = [self._blob(results[rank]["v1"]) for rank in ranks]
        merged, differences = merge_v1([parse_v1(data) for data in v1])
        self._say_differences(chosen, differences)
        files = {V1_FILE: v1[0] if len(set(v1)) == 1 else encode_v1(merged)}
        if results[ranks[0]]["store"] is not None:
            packs = [self._blob(results[rank]["store"]) for rank in ranks]
            is_one = len(set(packs)) == 1
            files[STORE_FILE] = packs[0] if is_one else encode_store(merge_store([*map(parse_store, packs)], merged))
        record = Bundle(
            plan=self.spec.plan.digest,
            identity=self.pod.identity.digest,
            files=record_files(files),
            world_size=self.world_size,
            rank_free=facts.is_rank_free and facts.is_uniform,
            strategy=chosen,
            entries=len(merged.entries),
            tool_version=__version__,
            flashinfer_version=facts.flashinfer_version,
        )
        stored = self.pod.publish(record, files)
        self.say(
            "initwarm.bundle.published",
            message=f"{len(merged.entries)} entries, generation {stored.generation}",
            bundle=stored.digest,
        )
        return stored.digest, stored.generation

    def _blob(self, digest: str) -> bytes:
        data = self.coordinator.wait_for(lambda: self.member.channel.receive_blob(digest), what=())
        assert isinstance(data, bytes)
        return data

    def _check_results(self, results: Mapping[int, Mapping[str, Any]]) -> None:
        """A unit without a winner would be a fallback in the server, silently: that is not warm."""
        for rank, result in sorted(results.items()):
            for tactic in result["rejected"]:
                self.notes.append(f"tactic {tactic} gave other numbers than the default and was not used")
            for degraded in result["degraded"]:
                self.say("initwarm.tuning.degraded", message=degraded, rank=rank)
            if result["failed"]:
                raise TuningError(
                    f"Rank {rank}: no tactic could be measured for {', '.join(result['failed'][:3])}.",
                    "Nothing was published, since the server would fall back in silence.",
                    "Look at the worker's lines above; too little memory is the usual cause.",
                ).at(rank, self._pod_name(rank))

    def _say_differences(self, chosen: str, differences: tuple[Difference, ...]) -> None:
        if differences:
            text = f"{len(differences)} entries differed between ranks after {chosen}; rank 0's were taken"
            self.notes.append(text)
            self.say("initwarm.tactics.differed", message=text, keys=[difference.key for difference in differences])

    def _meet(self, hellos: list[Hello]) -> None:
        devices = [(hello.node_rank, device) for hello in hellos for device in hello.devices]
        is_own = self.spec.plan.device == "cuda" and len({device for _, device in devices}) == len(devices)
        backend = "nccl" if is_own else "gloo"
        self._step("barrier", backend=backend, size=self.world_size)
        self.say("initwarm.barrier.passed", message=f"all {self.world_size} ranks met over {backend}", backend=backend)

    def _record(self) -> None:
        """Leave word on the volume which bundle this group has; after the barrier and before anybody exits."""
        held = self.pod.held
        assert held is not None
        record = {
            "schema": 1,
            "group": self.spec.topology.group,
            "world_size": self.world_size,
            "plan": self.spec.plan.digest,
            "identity": self.pod.identity.digest,
            "bundle": held.digest,
            "generation": held.generation,
            "epoch": self.member.epoch,
            "tool_version": __version__,
        }
        try:
            self.pod.volume.write_json(f"rounds/{self.spec.topology.group}.json", record)
        except VolumeError as problem:
            self.say("initwarm.round.not_recorded", message=str(problem))

    def _warm_end(self, is_adopted: bool) -> dict[str, Any]:
        assert self.pod.held is not None
        how = "adopted" if is_adopted else f"tuned by {self.strategy}"
        entries = self.pod.held.bundle.entries
        reason = f"{entries} entries {how}, replayed on all {self.world_size} ranks" if entries else "nothing to tune"
        return {
            "outcome": report.WARM,
            "exit_code": 0,
            "reason": "; ".join([reason, *self.notes]),
            "first_failure": None,
            "strategy": self.strategy,
            "bundle": self.pod.held.digest,
            "world_size": self.world_size,
        }


def _raise_first(answers: list[Answer]) -> None:
    error = first_error(answers)
    if error is not None:
        raise from_error(error)
