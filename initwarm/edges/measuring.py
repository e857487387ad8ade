"""The leader's course from nothing to a proven bundle: who measures, whose turn it is, and what is published."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from initwarm import __version__, strategy
from initwarm.bundle import STORE_FILE, V1_FILE, Bundle, record_files
from initwarm.edges.leases import TuningLease
from initwarm.edges.volume_reader import VolumeReader
from initwarm.entries import Difference, V1File, encode_v1, merge_v1, parse_v1
from initwarm.errors import DataError, TuningBudgetSpent, TuningError, TuningTimeout, VolumeError
from initwarm.lease import LeaseSettings
from initwarm.protocol import Answer, first_error, from_error
from initwarm.store import encode_store, merge_store, parse_store

if TYPE_CHECKING:
    from initwarm.edges.leader import Leader

#: How many workers one tactic after another may kill before tuning is given up.
MAX_RESTARTS = 3


class Measuring:
    """Tuning as the leader sees it.

    Args:
        leader: of the round.
    """

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.coordinator = leader.coordinator
        self.pod = leader.pod
        self.spec = leader.spec
        self.say = leader.say
        self.number = 0
        self.began = time.monotonic()

    def measure_until_proven(self) -> bool:
        """Tune, publish, spread and prove; under `auto` a bundle that misses is tuned once more by a safer strategy.

        Returns:
            Whether another group's bundle was adopted instead.

        Raises:
            TuningError: nothing that could be proven came out of it.
            TuningBudgetSpent: the time for tuning is over.
        """
        if self.spec.obstacle is not None:
            # Said before the work and not after it: what is tuned could not be kept.
            raise self.spec.obstacle
        facts = self._facts()
        asked = self.spec.settings.strategy
        strategy.choose(asked, facts)  # refused before anybody waits
        with self._turn():
            # Whoever had its turn before may have published since this group looked, also where nobody has it now.
            if self._adopt_from_volume():
                return True
            return self._measure_until_proven(asked, facts)

    def _measure_until_proven(self, asked: str, facts: strategy.Facts) -> bool:
        tried: tuple[str, ...] = ()
        while True:
            choice = strategy.choose(asked, facts, tried)
            self.leader.strategy = choice.strategy
            self.say("initwarm.strategy.chosen", message=choice.strategy, ruled_out=list(choice.ruled_out) or None)
            answers = self._tune(choice.strategy)
            # Another group that shares the volume may have been faster; then its bundle is everybody's.
            if self._adopt_from_volume():
                return True
            if self.leader.spread(self._publish(choice.strategy, facts, answers), holder=0):
                self.pod.finished.partials.clear()
                return False
            tried = (*tried, choice.strategy)
            if asked != "auto" or not strategy.is_any_left(facts, tried):
                assert self.leader.problem is not None
                raise self.leader.problem
            self.leader.notes.append(f"the result of {choice.strategy} did not stand the replay")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lease of this plan and environment, or go on without it where another group has published."""
        lease = TuningLease(
            VolumeReader(self.pod.volume.root),
            self.pod.identity.digest,
            self.spec.plan.digest,
            holder=f"{self.spec.uid}/{self.leader.member.epoch}",
            group=self.spec.topology.group,
            pod=self.spec.pod_uid,
        )
        try:
            self._wait_for_turn(lease)
            yield
        finally:
            self.coordinator.waiting_text = None
            lease.release()

    def _wait_for_turn(self, lease: TuningLease) -> None:
        """Wait until the lease is this group's, cannot be had on this volume, or is not needed any more."""
        self.coordinator.begin_phase(
            self.coordinator.steps.tune_seconds(),
            TuningTimeout("Another group tunes this plan, and had not ended when the time was up."),
        )
        retry = LeaseSettings().retry_period
        is_first = True
        while True:
            try:
                if lease.try_acquire():
                    self.coordinator.waiting_text = None
                    return
            except VolumeError as problem:
                self.say("initwarm.lease.failed", message=f"tuning without a lease: {problem}")
                return
            if is_first:
                self.say("initwarm.lease.waiting", message=lease.describe())
            is_first = False
            self.coordinator.waiting_text = lease.describe
            self.leader.member.note(f"waiting for its turn: {lease.describe()}")
            self._pause(retry)
            if self._is_published():
                return

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.coordinator.pump()
            time.sleep(0.05)

    def _is_published(self) -> bool:
        self.pod.look_up(self.leader.world_size)
        return self.pod.held is not None

    def _adopt_from_volume(self) -> bool:
        """Take the bundle that another group has published meanwhile, if there is one that stands the proof."""
        if not self._is_published():
            return False
        assert self.pod.held is not None
        digest = self.pod.held.digest
        self.say("initwarm.verdict.reached", message=f"adopt bundle {digest[:12]} of another group")
        return self.leader.spread(digest, holder=0)

    def _facts(self) -> strategy.Facts:
        features = self.leader.hellos[0].features
        plan, world_size = self.spec.plan, self.leader.world_size
        return strategy.Facts(
            world_size=world_size,
            is_uniform=plan.is_uniform(world_size),
            has_collectives=plan.has_collectives,
            is_rank_free=plan.rank_free,
            num_units=max(len(plan.units_of(ranks[0])) for ranks in plan.stages(world_size)),
            has_process_group=bool(features["has_process_group"]),
            flashinfer_version=str(features["flashinfer_version"]),
        )

    def _tune(self, chosen: str) -> list[Answer]:
        """Have the tuning ranks measure, without the tactics that killed a worker."""
        stages = self.spec.plan.stages(self.leader.world_size)
        tuners = [ranks[0] for ranks in stages] if chosen == strategy.LEADER else list(range(self.leader.world_size))
        excluded: list[Mapping[str, Any]] = []
        self.number += 1
        base = self._base()
        for attempt in range(MAX_RESTARTS + 1):
            answers = self.leader.ask(
                "tune",
                waiting_for=tuple(sorted({self.leader.node_of(rank) for rank in tuners})),
                strategy=chosen,
                tuners=tuners,
                stages=[list(ranks) for ranks in stages],
                excluded=excluded,
                attempt=attempt,
                round=self.number,
                base=None if base is None else self.leader.member.channel.send_blob(encode_v1(base)),
                budget_seconds=self._budget_left(),
            )
            lost = [answer.data["lost"] for answer in answers if "lost" in answer.data]
            if not lost:
                self._raise_first(answers)
                return answers
            # What the other ranks report then is the lost one's doing: in lockstep their averages broke.
            excluded += [one["tactic"] for one in lost if one["tactic"] not in excluded]
            text = f"tactic {lost[0]['tactic']} killed the worker of rank {lost[0]['rank']} ({lost[0]['what']})"
            self.leader.notes.append(f"{text} and is excluded on all ranks")
            self.say("initwarm.tactic.excluded", message=text, tactic=lost[0]["tactic"])
            if chosen == strategy.SPLIT:
                base = self._with_finished(base, answers)
        raise TuningError(
            f"{MAX_RESTARTS + 1} workers were lost while tuning; the last: {self.leader.notes[-1]}.",
            "Nothing was published.",
        )

    def _raise_first(self, answers: Sequence[Answer]) -> None:
        error = first_error(answers)
        if error is not None:
            raise from_error(error)

    def _base(self) -> V1File | None:
        """What earlier runs have finished, unless a bundle made of it did not stand the proof."""
        if self.number > 1:
            return None
        data = self.pod.finished.partials.read()
        if data is None:
            return None
        file = parse_v1(data)
        self.say("initwarm.partial.found", message=f"{len(file.entries)} entries were finished by an earlier run")
        return file

    def _with_finished(self, base: V1File | None, answers: Sequence[Answer]) -> V1File | None:
        """Add what all ranks have finished, so that only a lost one's unit is measured again."""
        digests = [digest for answer in answers for digest in answer.data.get("finished", ())]
        digests += [one["v1"] for answer in answers for one in answer.data.get("ranks", {}).values()]
        files = [] if base is None else [base]
        for digest in digests:
            with contextlib.suppress(DataError):
                files = [merge_v1([*files, parse_v1(self._blob(digest))])[0]]
        return files[0] if files else None

    def _budget_left(self) -> float | None:
        budget = self.spec.settings.tuning_budget_seconds
        return None if budget is None else max(0.0, budget - (time.monotonic() - self.began))

    def _publish(self, chosen: str, facts: strategy.Facts, answers: Sequence[Answer]) -> str:
        """Merge the ranks' results into one bundle on the volume; returns its digest."""
        results = {int(rank): one for answer in answers for rank, one in answer.data.get("ranks", {}).items()}
        self._check_results(results)
        ranks = sorted(results)
        v1 = [self._blob(results[rank]["v1"]) for rank in ranks]
        merged, differences = merge_v1([parse_v1(data) for data in v1])
        self._check_complete(chosen, results, merged)
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
            world_size=self.leader.world_size,
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
        return stored.digest

    def _blob(self, digest: str) -> bytes:
        data = self.coordinator.wait_for(lambda: self.leader.member.channel.receive_blob(digest), what=())
        assert isinstance(data, bytes)
        return data

    def _check_results(self, results: Mapping[int, Mapping[str, Any]]) -> None:
        """A unit without a winner would be a fallback in the server, silently: that is not warm."""
        for rank, result in sorted(results.items()):
            for tactic in result["rejected"]:
                self.leader.notes.append(f"tactic {tactic} gave other numbers than the default and was not used")
            for degraded in result["degraded"]:
                self.say("initwarm.tuning.degraded", message=degraded, rank=rank)
            if result["failed"]:
                raise TuningError(
                    f"Rank {rank}: no tactic could be measured for {', '.join(result['failed'][:3])}.",
                    "Nothing was published, since the server would fall back in silence.",
                    "Look at the worker's lines above; too little memory is the usual cause.",
                ).at(rank, self.leader.pod_name(rank))

    def _check_complete(self, chosen: str, results: Mapping[int, Mapping[str, Any]], merged: V1File) -> None:
        """Keep what is finished for the next run, and end this one, where the budget did not suffice."""
        left = total = 0
        for ranks in self.spec.plan.stages(self.leader.world_size):
            units = len(self.spec.plan.units_of(ranks[0]))
            done = [set(results[rank]["done"]) for rank in ranks if rank in results]
            finished = set[int]().union(*done) if chosen in strategy.SHARED else set.intersection(*done)
            total += units
            left += units - len(finished)
        if left == 0:
            return
        self.pod.finished.partials.write(self.spec.topology.group, encode_v1(merged))
        raise TuningBudgetSpent(
            f"The tuning budget of {self.spec.settings.tuning_budget_seconds:g} s is spent: {total - left} of {total} "
            f"units are tuned and {left} are left.",
            "All ranks start cold; what is tuned is kept.",
            "The next run continues there; a greater --tuning-budget and --deadline finish sooner.",
        )

    def _say_differences(self, chosen: str, differences: tuple[Difference, ...]) -> None:
        if differences:
            text = f"{len(differences)} entries differed between ranks after {chosen}; rank 0's were taken"
            self.leader.notes.append(text)
            self.say("initwarm.tactics.differed", message=text, keys=[difference.key for difference in differences])
