"""Tuning in this process, with FlashInfer's real AutoTuner.

One call is made per unit, under the bucket override that a server's warm-up uses, so that exactly one bucket is
measured; serving looks it up without an override. Finished units are saved on the way, by FlashInfer itself, so that a
process that dies loses little.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from initwarm.edges.calls import prepare
from initwarm.edges.installation import Features, autotuner, collect_metadata, features, on_device, quiet, synchronize
from initwarm.edges.outputs import disagreeing_ops
from initwarm.edges.tuners import LookUp, Observed, Tactic, install
from initwarm.edges.winners import publish_winners
from initwarm.entries import encode_v1, parse_v1, select_v1
from initwarm.errors import DataError, InitwarmError, TuningError
from initwarm.plan import Unit
from initwarm.schedule import seconds_left

__all__ = ["Features", "Progress", "Tactic", "TuneResult", "collect_metadata", "features", "quiet", "tune"]

#: Each save writes all entries: one that takes more CPU time than this waits until it is a small share of the time.
CHEAP_SAVE_SECONDS = 0.02
SAVE_SHARE = 0.05
#: How many winners of one unit may be refused before it counts as failed.
MAX_REJECTED = 16
#: An op is reported as degraded from this share of failed measurements on; a few unsupported tactics are common.
DEGRADED_SHARE = 0.5

_OUT_OF_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)


@dataclass(frozen=True)
class Progress:
    """Where the work is.

    Args:
        text: for people.
        done: units finished.
        total: units.
        tactic: what is being measured at this moment, or None.
    """

    text: str
    done: int
    total: int
    tactic: Tactic | None = None


@dataclass(frozen=True)
class TuneResult:
    """What a rank measured.

    Args:
        v1: the file that FlashInfer's save_configs wrote.
        store: the packed v2 store with the same winners, or None where this version has none.
        done: indices of the units that were finished, in order.
        tuned: entries that were measured, those of an earlier attempt not counted.
        measured: tactics that were run for that.
        failed: units for which an op has no winner, each with the reason.
        degraded: ops for which many measurements failed, or some for lack of memory, with counts.
        rejected: winners whose output disagreed with the default tactic's.
    """

    v1: bytes
    store: bytes | None
    done: tuple[int, ...]
    tuned: int
    measured: int
    failed: tuple[str, ...]
    degraded: tuple[str, ...]
    rejected: tuple[Tactic, ...]


def tune(
    units: Sequence[Unit],
    device: torch.device,
    *,
    order: Iterable[int] | None = None,
    until: float | None = None,
    excluded: Collection[Tactic],
    group: Any,
    resume: Path | None,
    save_to: Path,
    check_outputs: bool,
    report: Callable[[Progress], None],
) -> TuneResult:
    """Measure units on one device.

    Args:
        units: that this rank may have to measure; with a group, the same number on all its ranks.
        order: indices of those that it does measure, asked for one at a time; None for all of them in order. With a
            group, the same on all its ranks.
        until: moment on this machine's monotonic clock after which no unit is begun, or None.
        device: where the tensors live.
        excluded: tactics that must not run.
        group: process group that timings are averaged over, or None.
        resume: file of an earlier attempt, whose entries are not measured again, or None; with a group, the same bytes
            on all its ranks, since a unit that only some of them measure would hang the others. Without one, a file
            that cannot be used is passed over.
        save_to: gets what is finished, while the work goes on; what it holds is lost unless `resume` has it too.
        check_outputs: refuse winners that disagree with the default tactic.
        report: hears where the work is, also before each measurement.

    Raises:
        TuningError: a call failed by itself, its inputs do not fit on the device, or the group's file cannot be used.
        UnavailableError: this FlashInfer lacks a function.
        SystemExit: a kernel left the GPU unusable; `report` has heard which.
    """
    quiet()
    with on_device(device), _averaged_over(group):
        session = _Session(units, device, excluded, group, save_to, check_outputs, report)
        return session.run(range(len(units)) if order is None else order, until, resume)


class _Session:
    def __init__(
        self,
        units: Sequence[Unit],
        device: torch.device,
        excluded: Collection[Tactic],
        group: Any,
        save_to: Path,
        check_outputs: bool,
        report: Callable[[Progress], None],
    ) -> None:
        self.units = units
        self.device = device
        self.group = group
        self.save_to = save_to
        self.check_outputs = check_outputs
        self.report = report
        self.done: list[int] = []
        self.current = 0
        self.began = self.saved_at = time.monotonic()
        self.is_resumed = False
        self.save_cost = 0.0
        self.tuner = install(device, excluded, self._say)
        self.key_fields: dict[str, Any] = {}
        self.tuned: set[str] = set()
        self.measured = 0
        self.failed: list[str] = []
        self.rejected: list[Tactic] = []
        self.attempts: dict[str, set[str]] = {}
        self.failures: dict[str, dict[str, Exception]] = {}

    def run(self, order: Iterable[int], until: float | None, resume: Path | None) -> TuneResult:
        if resume is not None:
            self._resume(resume)
        if not self.is_resumed:
            self.save_to.unlink(missing_ok=True)  # FlashInfer replaces no file that it cannot use
        collect_metadata(self.device)  # FlashInfer keeps what is slow to find out; the first save would seem dear
        indices = iter(order)
        while not self._is_time_up(until):
            index = next(indices, None)
            if index is None:
                break
            self.current = index
            self._say(None)
            self._tune_unit(self.units[index])
            self.done.append(index)
            self._save()
        return self._result()

    def _is_time_up(self, until: float | None) -> bool:
        if until is None:
            return False
        is_up = time.monotonic() >= until
        if self.group is not None:
            # A rank that begins a unit which another does not would wait for its timings.
            flag = torch.tensor([int(is_up)])
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.group)
            is_up = bool(flag.item())
        return is_up

    def _resume(self, path: Path) -> None:
        """Load what an earlier attempt finished."""
        try:
            parse_v1(path.read_bytes())
            self.is_resumed = self.tuner.load_configs(str(path))
        except (OSError, DataError):
            self.is_resumed = False
        if not self.is_resumed and self.group is not None:
            raise TuningError("What an earlier run has finished cannot be loaded here.", "Nothing was tuned.")

    def _say(self, tactic: Tactic | None) -> None:
        text = f"unit {len(self.done) + 1}/{len(self.units)}, {self.units[self.current].name}"
        if tactic is not None:
            text += f", {tactic.name}"
        left = seconds_left(self.units, self.done, time.monotonic() - self.began)
        if left is not None:
            text += f", about {left:.0f} s left"
        self.report(Progress(text, len(self.done), len(self.units), tactic))

    def _tune_unit(self, unit: Unit) -> None:
        call = prepare(unit, self.device)
        for _ in range(MAX_REJECTED):
            seen, problems = self._measure(unit, call)
            wrong = self._wrong_winners(unit, call, seen, bool(problems)) if self.check_outputs else []
            if problems:
                self.failed.append(f"{unit.name} ({'; '.join(problems)})")
            if problems or not wrong:
                return
            for found in wrong:
                self.rejected.append(found.winner)
                self.tuner.exclude(found.winner)
                self.tuner.forget(found)
                self.tuned.discard(found.file_key)
        self.failed.append(f"{unit.name} ({MAX_REJECTED} winners in a row disagree with the default tactic)")

    def _measure(self, unit: Unit, call: Callable[[], Any]) -> tuple[Observed, list[str]]:
        """Tune one unit; returns what happened, and why ops of it have no winner."""
        problems = []
        self.tuner.take()
        try:
            with autotuner.autotune(True, tuning_buckets=(unit.bucket,), round_up=True):
                call()
            synchronize(self.device)
        except InitwarmError:
            raise
        except _OUT_OF_MEMORY as problem:
            problems.append(f"out of memory: {problem}")
        except Exception as problem:
            raise TuningError(
                f"{unit.name} failed: {_named(problem)}.",
                "Nothing was published.",
                "Correct the plan's call, or leave it out.",
            ) from problem
        seen = self.tuner.take()
        self._count(seen)
        problems += [_reason(op, seen) for op, found in seen.last_look_ups.items() if not found.is_hit]
        return seen, problems

    def _count(self, seen: Observed) -> None:
        self.measured += len(seen.measured)
        for one in seen.measured:
            self.attempts.setdefault(one.op, set()).add(one.name)
        for one, problem in seen.failed:
            self.failures.setdefault(one.op, {})[one.name] = problem
        missed = {found.winner.op for found in seen.look_ups if not found.is_hit}
        for op, found in seen.last_look_ups.items():
            if found.is_hit:
                self.key_fields[found.file_key] = getattr(found.key, "key_fields", None)
                if op in missed:
                    self.tuned.add(found.file_key)

    def _wrong_winners(self, unit: Unit, call: Callable[[], Any], seen: Observed, has_failed: bool) -> list[LookUp]:
        """The winners that disagree with the default tactic, here or on another rank of the group."""
        winners = seen.last_look_ups
        wrong = () if has_failed else disagreeing_ops(call, tuple(winners), unit.bucket, self.device)
        if self.group is not None:
            # A rank that measures again while the others go on would leave them waiting in the average.
            flags = torch.tensor([int(has_failed), *(int(op in wrong) for op in winners)])
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=self.group)
            is_any_failed, *is_wrong = flags.tolist()
            wrong = () if is_any_failed else tuple(op for op, flag in zip(winners, is_wrong, strict=True) if flag)
        return [winners[op] for op in wrong]

    def _save(self) -> None:
        """Save what is finished, unless that costs too much by now."""
        elapsed = time.monotonic() - self.saved_at
        if self.save_cost <= max(CHEAP_SAVE_SECONDS, SAVE_SHARE * elapsed):
            started = time.thread_time()
            self.tuner.save_configs(str(self.save_to))
            self.save_cost = time.thread_time() - started
            self.saved_at = time.monotonic()

    def _result(self) -> TuneResult:
        with tempfile.TemporaryDirectory(dir=self.save_to.parent) as directory:
            path = Path(directory) / "v1.json"
            self.tuner.save_configs(str(path))
            v1 = path.read_bytes()
            if self.is_resumed:
                # Entries that this rank was not asked for are those of the rank that was.
                v1 = encode_v1(select_v1(parse_v1(v1), self.key_fields.keys()))
            store = publish_winners(v1, self.key_fields, Path(directory) / "store") if features().has_store else None
        return TuneResult(
            v1=v1,
            store=store,
            done=tuple(self.done),
            tuned=len(self.tuned),
            measured=self.measured,
            failed=tuple(self.failed),
            degraded=tuple(self._degraded()),
            rejected=tuple(self.rejected),
        )

    def _degraded(self) -> Iterator[str]:
        for op, failures in self.failures.items():
            attempts = len(self.attempts[op])
            has_no_room = any(isinstance(problem, _OUT_OF_MEMORY) for problem in failures.values())
            if has_no_room or len(failures) >= DEGRADED_SHARE * attempts:
                name, problem = list(failures.items())[-1]
                yield f"{op}: {len(failures)} tactics failed of {attempts}, the last {name}: {_named(problem)}"


def _reason(op: str, seen: Observed) -> str:
    """Why an op has no winner: FlashInfer falls back to the default tactic in silence, and stores nothing."""
    attempts = sum(one.op == op for one in seen.measured)
    failed = {one.name: problem for one, problem in seen.failed if one.op == op}
    for name, problem in failed.items():
        if isinstance(problem, _OUT_OF_MEMORY):
            return f"{op}: out of memory in {name}"
    if failed:
        name, problem = list(failed.items())[-1]
        return f"{op}: {len(failed)} tactics failed of {attempts}, the last {name}: {_named(problem)}"
    if attempts == 0:
        return f"{op}: no tactic could be measured, because all are excluded or the inputs do not fit in memory"
    return f"{op}: no tactic won, because another rank failed with each"


def _named(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"


@contextlib.contextmanager
def _averaged_over(group: Any) -> Iterator[None]:
    if group is None:
        yield
        return
    autotuner.set_autotune_process_group(group)
    try:
        yield
    finally:
        autotuner.set_autotune_process_group(None)
