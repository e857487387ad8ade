"""This pod's share of a round: its volume, its engine root and its workers.

Each method carries out one kind of step for all local ranks and returns what the leader needs to know. While workers
run it calls `pump`, which keeps the group in sight and raises when the run must end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from initwarm import bundle as bundles
from initwarm import schedule, strategy
from initwarm.edges import worker
from initwarm.edges.barrier import GroupSpec
from initwarm.edges.engine_root import EngineRoot
from initwarm.edges.entry import RunSpec
from initwarm.edges.jobs import Job, JobEnd
from initwarm.edges.progress import Progress
from initwarm.edges.tuning import Tactic, TuneResult
from initwarm.edges.volume import CacheVolume, StoredBundle
from initwarm.errors import InitwarmError, LostRankError, VolumeError, error_named
from initwarm.identity import Identity
from initwarm.rounds import RoundRecord, parse_round

Say = Callable[..., None]
Pump = Callable[[], None]

#: How long one look at the workers may take before the group is looked at again.
WAIT_SECONDS = 0.05
#: What one rank's failure does to its peers is over by then; a rank that still runs stands still.
LINGER_SECONDS = 2.0
#: How often a worker's missed keys are named; the rest is counted.
NAMED_KEYS = 3


class Pod:
    """The local half of a run.

    Args:
        spec: of the run.
        say: prints an event.
        pump: called while waiting.
    """

    def __init__(self, spec: RunSpec, say: Say, pump: Pump) -> None:
        self.spec = spec
        self.say = say
        self.pump = pump
        self.start_method = spec.start_method
        self.volume = CacheVolume(Path(spec.settings.cache_root), spec.key)
        self.engine_root = EngineRoot(Path(spec.engine_root))
        self.finished = Progress(spec, say, lambda: self.identity)
        self.first_rank = 0
        self.is_placed = False
        self.held: StoredBundle | None = None
        self.tuned = 0
        self.replayed = 0
        self.missed = 0
        self.note: Callable[[str], None] = lambda _text: None
        self.environment: Mapping[str, str] = {}
        #: What one of the workers last said, as (units done, units, text).
        self.progress: tuple[int, int, str] | None = None
        self._jobs: list[Job] = []
        self._provers: list[Job] = []
        self._probe: worker.ProbeResult | None = None

    @property
    def probed(self) -> worker.ProbeResult:
        """What `probe` found."""
        assert self._probe is not None
        return self._probe

    @property
    def is_probed(self) -> bool:
        """Whether it is known what this pod has."""
        return self._probe is not None

    @property
    def identity(self) -> Identity:
        """The environment of this pod's ranks."""
        return Identity(dict(self.probed.identity[0]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """This pod's ranks in the group; none before they are known."""
        if not self.is_placed or self._probe is None:
            return ()
        return tuple(range(self.first_rank, self.first_rank + len(self._probe.identity)))

    def begin_round(self) -> None:
        """Let go of whatever an earlier round began; what its ranks have finished stays."""
        self.close()
        self._jobs, self._provers = [], []
        self.engine_root.empty()
        self.held, self.progress = None, None
        self.is_placed = False
        self.replayed = self.missed = 0

    def place(self, first_rank: int) -> None:
        """Say which ranks are this pod's; known when all pods have said how many they have."""
        self.first_rank, self.is_placed = first_rank, True

    def probe(self) -> None:
        """Find out what this pod has; in a spawned process where a forked one cannot use the GPU."""
        topology = self.spec.topology
        nproc = topology.nproc_per_node
        spec = worker.ProbeSpec(self.spec.plan.device, nproc, topology.device_index)
        end = self._run_one(worker.probe, spec)
        if end.error is not None and end.kind is None and self._may_spawn():
            self.start_method = "spawn"
            self.say(
                "initwarm.worker.spawned",
                message="a forked process cannot use the GPU; each worker imports torch for itself",
                problem=end.error.splitlines()[-1],
            )
            end = self._run_one(worker.probe, spec)
        if end.error is not None:
            raise error_named(end.kind or "UnavailableError", end.error)
        self._probe = end.result

    def _may_spawn(self) -> bool:
        return self.start_method == "forkserver" and self.spec.settings.start_method == "auto"

    def look_up(self, world_size_hint: int) -> None:
        """Look for a bundle of this plan and environment on this pod's volume."""
        self.held, quarantined = self.volume.load(self.identity, self.spec.plan.digest, world_size_hint)
        for one in quarantined:
            self.say("initwarm.cache.quarantined", message=one.reason, path=str(one.path))
        if self.held is None:
            self._say_nearby()

    def _say_nearby(self) -> None:
        """A cache that exists for a slightly different environment is the commonest surprise."""
        for other in self.volume.nearby(self.identity)[:1]:
            fields = "; ".join(str(difference) for difference in other.differences)
            self.say(
                "initwarm.cache.missed",
                message=f"the volume has bundles of another environment: {fields}. Tune in the serving image.",
                identity=other.identity,
            )

    def tune(
        self,
        data: Mapping[str, Any],
        base: bytes | None,
        group_of: Callable[[int], GroupSpec | None],
        tickets_of: Callable[[int], worker.Tickets | None],
    ) -> dict[int, JobEnd]:
        """Run the tuning of those local ranks that tune; returns how each ended.

        Args:
            data: of the step.
            base: a v1 file of units that are finished already, the same on all ranks, or None.
            group_of: the group with which a rank averages its timings.
            tickets_of: where a rank draws its units.
        """
        self.leave()
        tuners = [rank for rank in self.ranks if rank in data["tuners"]]
        budget = data["budget_seconds"]
        until = None if budget is None else time.monotonic() + budget
        specs = [
            worker.TuneSpec(
                rank=rank,
                device_index=self._device_index(rank),
                plan=self.spec.plan,
                excluded=tuple(Tactic(**one) for one in data["excluded"]),
                group=group_of(rank),
                order=self._order(rank, data["strategy"], has_budget=budget is not None),
                tickets=tickets_of(rank),
                until=until,
                resume=self.finished.resume(rank, data, base),
                save_to=str(self.finished.path(rank, data["round"])),
                check_outputs=self.spec.settings.check_outputs,
            )
            for rank in tuners
        ]
        jobs = [self._job(spec.rank, worker.tune, spec) for spec in specs]
        try:
            self._wait(
                jobs,
                stop_all_on_failure=data["strategy"] != strategy.SPLIT,
                meanwhile=lambda: self.finished.keep(tuners, data["round"]),
            )
        except BaseException:
            self.finished.keep(tuners, data["round"], is_last=True)
            raise
        ends = {rank: job.end for rank, job in zip(tuners, jobs, strict=True)}
        for end in ends.values():
            if end is not None and isinstance(end.result, TuneResult):
                self.tuned += end.result.tuned
        return {rank: end for rank, end in ends.items() if end is not None}

    def _order(self, rank: int, chosen: str, has_budget: bool) -> tuple[int, ...]:
        units = self.spec.plan.units_of(rank)
        if has_budget:
            return tuple(schedule.by_gain(units))
        return tuple(schedule.by_cost(units) if chosen == strategy.SPLIT else range(len(units)))

    def recorded_round(self, group: str) -> RoundRecord | None:
        """What this group's last warm round agreed on, as far as this pod's volume says."""
        try:
            return parse_round(self.volume.read_json(f"rounds/{group}.json"))
        except VolumeError as problem:
            self.say("initwarm.round.not_read", message=str(problem))
            return None

    def record_round(self, record: RoundRecord) -> None:
        """Leave word of the round that this pod was in."""
        self.volume.write_json(f"rounds/{record.group}.json", record.as_json())

    def forget_round(self, group: str) -> None:
        """Take the word of a round away, which later pods would believe."""
        self.volume.remove_record(f"rounds/{group}.json")

    def publish(self, record: bundles.Bundle, files: Mapping[str, bytes]) -> StoredBundle:
        """Make a bundle visible on this pod's volume."""
        self.held = self.volume.publish(self.identity, record, files)
        return self.held

    def find(self, digest: str) -> StoredBundle | None:
        """The bundle, if this pod has it or sees it on its volume."""
        if self.held is None or self.held.digest != digest:
            self.held = self.volume.find(self.identity.digest, self.spec.plan.digest, digest)
        return self.held

    def keep(self, record: bundles.Bundle, files: Mapping[str, bytes]) -> None:
        """Take a bundle that came over the channel; a volume that cannot be written only loses the next start."""
        try:
            self.publish(record, files)
        except VolumeError as problem:
            self.say("initwarm.cache.not_kept", message=str(problem))
            self.held = StoredBundle(bundle=record, files=files, generation=0, digest=record.digest)

    def fill(self) -> None:
        """Put the bundle where the server reads."""
        assert self.held is not None
        self.engine_root.fill(self.held.files, self.ranks)

    def discard(self, digest: str, reason: str) -> None:
        """Set a bundle aside that did not stand the proof."""
        self.leave()
        self.engine_root.empty()
        if self.held is not None and self.held.digest == digest:
            try:
                self.volume.set_aside(self.held, reason)
            except VolumeError as problem:
                self.say("initwarm.cache.not_set_aside", message=str(problem))
            self.held = None

    def prove(self) -> list[dict[str, Any]]:
        """Replay on every local rank, in fresh processes; returns what went wrong, empty if nothing did.

        A kernel that had to be built is not a failure of the first replay, since tactics of other ranks may not have
        been built on this pod before; the second replay must build nothing.
        """
        problems = self._replay()
        if problems and all(problem["kind"] == "built" for problem in problems):
            self.say("initwarm.replay.built", message="kernels were built during the replay; replaying once more")
            problems = self._replay()
        return problems

    def _replay(self) -> list[dict[str, Any]]:
        self.leave()
        has_store = self.engine_root.store_path.is_dir()
        self._provers = [
            self._job(
                rank,
                worker.prove,
                worker.ProveSpec(
                    rank=rank,
                    device_index=self._device_index(rank),
                    plan=self.spec.plan,
                    v1_path=str(self.engine_root.v1_path(rank)),
                    store_path=str(self.engine_root.store_path) if has_store else None,
                ),
            )
            for rank in self.ranks
        ]
        self._wait(self._provers, until_spoken=True)
        self.replayed = sum(job.result.hits for job in self._provers if job.result is not None)
        self.missed = sum(len(job.result.missed) for job in self._provers if job.result is not None)
        return [problem for job in self._provers for problem in _proof_problems(job, job.local_rank + self.first_rank)]

    def meet(self, group_of: Callable[[int], GroupSpec]) -> None:
        """Send every proven rank into the barrier."""
        for job in self._provers:
            if job.end is not None:
                raise LostRankError(
                    f"Rank {job.local_rank + self.first_rank} was lost after its replay: {job.end.error}.",
                    "The barrier was not passed.",
                    "Look at the pod's memory limit and its GPU.",
                ).at(job.local_rank + self.first_rank, self.spec.pod)
        for job in self._provers:
            job.order(worker.Order(group_of(job.local_rank + self.first_rank)))
        self._wait(self._provers)
        self._raise_first(self._provers)
        self._provers = []

    def leave(self) -> None:
        """Let proven ranks go without a barrier."""
        for job in self._provers:
            if not job.is_over():
                job.order(worker.Order(None))
        self._wait(self._provers)
        self._provers = []

    def close(self) -> None:
        """End all workers."""
        for job in self._jobs:
            job.stop()
        for job in self._jobs:
            job.join(5.0)

    def _device_index(self, rank: int) -> int:
        return (self.spec.topology.device_index or 0) + rank - self.first_rank

    def _run_one(self, entrypoint: Callable[..., None], spec: Any) -> JobEnd:
        job = self._start(0, entrypoint, spec, {})
        self._wait([job])
        assert job.end is not None
        return job.end

    def _job(self, rank: int, entrypoint: Callable[..., None], spec: Any) -> Job:
        local_rank = rank - self.first_rank
        return self._start(
            local_rank, entrypoint, spec, {**self.environment, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        )

    def _start(
        self, local_rank: int, entrypoint: Callable[..., None], spec: Any, environment: Mapping[str, str]
    ) -> Job:
        job = Job(local_rank, entrypoint, spec, environment, self.start_method, self.spec.scratch, self._hear)
        self._jobs = [one for one in self._jobs if not one.is_over()] + [job]
        return job

    def _hear(self, local_rank: int, note: tuple[str, Any]) -> None:
        _kind, progress = note
        text = f"rank {self.first_rank + local_rank}: {progress.text}"
        self.progress = (progress.done, progress.total, text)
        self.note(text)

    def _wait(
        self,
        jobs: Iterable[Job],
        until_spoken: bool = False,
        stop_all_on_failure: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        everyone = list(jobs)
        waiting = everyone
        while waiting:
            self.pump()
            meanwhile()
            waiting[0].wait(WAIT_SECONDS)
            failed = [job.end.moment for job in everyone if job.end is not None and job.end.error]
            if stop_all_on_failure and failed and time.monotonic() - min(failed) > LINGER_SECONDS:
                for job in waiting:
                    job.stop()
            waiting = [job for job in waiting if not (job.has_spoken() if until_spoken else job.is_over())]

    def _raise_first(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.end is not None and job.end.error is not None:
                raise error_of(job.end, job.local_rank + self.first_rank, self.spec.pod)


def error_of(end: JobEnd, rank: int, pod: str) -> InitwarmError:
    """The error that a worker's end stands for, naming its rank; what no class names is a failure of tuning."""
    return error_named(end.kind or "TuningError", f"Rank {rank}: {end.error}").at(rank, pod)


def _proof_problems(job: Job, rank: int) -> list[dict[str, Any]]:
    """What is wrong with one rank's replay, most telling first."""
    if job.result is None:
        error = job.end.error if job.end is not None else "no result"
        return [{"rank": rank, "kind": "lost", "what": str(error)}]
    result = asdict(job.result)
    problems = []
    for kind in ("failed", "missed", "built"):
        found = result[kind]
        if found:
            named = "; ".join(str(one) for one in found[:NAMED_KEYS])
            rest = f" and {len(found) - NAMED_KEYS} more" if len(found) > NAMED_KEYS else ""
            problems.append({"rank": rank, "kind": kind, "what": f"{kind} {named}{rest}"})
    if result["profiled"]:
        problems.append({"rank": rank, "kind": "profiled", "what": f"measured {result['profiled']} kernels again"})
    return problems
