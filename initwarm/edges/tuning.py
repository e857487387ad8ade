"""Tuning in this process, with FlashInfer's real AutoTuner: what the environment is, what it offers, and the measuring.

One call is made per unit, under the bucket override that a server's warm-up uses, so that exactly one bucket is
measured; serving looks it up without an override. Finished units are saved on the way, by FlashInfer itself, so that a
process that dies loses little.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tqdm

from initwarm.errors import InitwarmError, TuningError, UnavailableError

try:
    import flashinfer
    from flashinfer import autotuner
    from flashinfer.jit import core
except Exception as problem:  # FlashInfer 0.6.14 to 0.7.0 raise AssertionError on a CPU build of torch
    raise UnavailableError(
        f"FlashInfer cannot be imported here: {type(problem).__name__}: {problem}.",
        "Nothing was tuned.",
        "Run in the serving image. If the error names cuda-bindings, install cuda-python of the same major version.",
    ) from problem

from initwarm.edges.calls import prepare
from initwarm.edges.tuners import Tactic, WatchedTuner, install
from initwarm.plan import Unit
from initwarm.store import encode_store, pack_store

__all__ = ["Features", "Progress", "Tactic", "TuneResult", "collect_metadata", "features", "quiet", "tune"]

#: Progress is saved at most this often, since each save writes all entries.
SAVE_SECONDS = 2.0
#: How many winners of one unit may be refused before it counts as failed.
MAX_REJECTED = 16


@dataclass(frozen=True)
class Features:
    """What this FlashInfer offers, found by looking and not by its version where that is possible."""

    flashinfer_version: str
    has_store: bool
    has_process_group: bool
    rank_free_moe: bool


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
        tuned: entries that were measured.
        measured: tactics that were run for that.
        failed: units without a winner.
        degraded: ops of which some tactics failed, with counts.
        rejected: winners whose output disagreed with the default tactic's.
    """

    v1: bytes
    store: bytes | None
    tuned: int
    measured: int
    failed: tuple[str, ...]
    degraded: tuple[str, ...]
    rejected: tuple[Tactic, ...]


def features() -> Features:
    """What the installed FlashInfer offers."""
    version = str(flashinfer.__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return Features(
        flashinfer_version=version,
        has_store=hasattr(flashinfer, "autotune_v2") and hasattr(flashinfer, "autotune_v2_reload"),
        has_process_group=hasattr(autotuner, "set_autotune_process_group"),
        # Building the CUTLASS module to look would need a compiler. Source: FlashInfer pull request 6082.
        rank_free_moe=numbers >= (0, 7, 2),
    )


def collect_metadata(device: torch.device) -> dict[str, str]:
    """FlashInfer's own environment metadata, as it will see it on this device."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return {str(key): str(value) for key, value in autotuner._collect_metadata().items()}  # noqa: SLF001


def quiet() -> None:
    """Keep FlashInfer's progress bars and notes off stderr, which carries events."""
    # It makes this logger by itself, so that `logging.getLogger` gives another one of the same name.
    core.logger.setLevel(logging.ERROR)

    tqdm.tqdm.__init__ = functools.partialmethod(tqdm.tqdm.__init__, disable=True)  # type: ignore[assignment]


def tune(
    units: Sequence[Unit],
    device: torch.device,
    *,
    excluded: Collection[Tactic],
    group: Any,
    resume: Path | None,
    save_to: Path,
    check_outputs: bool,
    report: Callable[[Progress], None],
) -> TuneResult:
    """Measure units on one device.

    Args:
        units: in order; with a group, the same number on all its ranks.
        device: where the tensors live.
        excluded: tactics that must not run.
        group: process group that timings are averaged over, or None.
        resume: file of an earlier attempt, whose entries are not measured again, or None.
        save_to: gets what is finished, while the work goes on.
        check_outputs: refuse winners that disagree with the default tactic.
        report: hears where the work is.

    Raises:
        TuningError: a call failed by itself.
        UnavailableError: this FlashInfer lacks a function.
    """
    quiet()
    return _Session(units, device, excluded, group, save_to, check_outputs, report).run(resume)


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
        self.done = 0
        self.started = time.monotonic()
        self.saved = time.monotonic()
        self.tuner: WatchedTuner = install(device, excluded, self._before)
        self.measured = 0
        self.failed: list[str] = []
        self.problems: dict[str, dict[Tactic, str]] = {}
        self.rejected: list[Tactic] = []

    def run(self, resume: Path | None) -> TuneResult:
        if resume is not None:
            self.tuner.load_configs(str(resume))
        with _averaged_over(self.group):
            for unit in self.units:
                self._say(None)
                self._tune_unit(unit)
                self.done += 1
                self._save(resume)
        return self._result()

    def _before(self, tactic: Tactic) -> None:
        self._say(tactic)

    def _say(self, tactic: Tactic | None) -> None:
        unit = self.units[min(self.done, len(self.units) - 1)].name if self.units else ""
        text = f"unit {min(self.done + 1, len(self.units))}/{len(self.units)}, {unit}"
        if tactic is not None:
            text += f", {tactic.runner} {tactic.tactic}"
        self.report(Progress(text, self.done, len(self.units), tactic))

    def _tune_unit(self, unit: Unit) -> None:
        call = self._made(unit)
        for _ in range(MAX_REJECTED):
            keys = set(self.tuner.profiling_cache)
            seen = self._measure(unit, call)
            missing = [found.winner.op for found in _last_by_op(seen.look_ups) if not found.is_hit]
            if missing:
                self.failed.append(f"{unit.name} ({', '.join(missing)})")
                return
            if not self.check_outputs or not self._is_wrong(unit, call, seen.look_ups):
                return
            self._reject(_last_by_op(seen.look_ups), keys)
        self.failed.append(f"{unit.name} (every tactic disagrees with the default)")

    def _made(self, unit: Unit) -> Callable[[], Any]:
        try:
            return prepare(unit, self.device)
        except InitwarmError:
            raise
        except (torch.cuda.OutOfMemoryError, MemoryError) as problem:
            raise TuningError(
                f"{unit.name} needs {unit.num_bytes / 2**30:.2f} GiB for its inputs, and {self.device} has no room: {problem}.",
                "Nothing was tuned.",
                "Use smaller buckets, or free the GPU.",
            ) from problem

    def _measure(self, unit: Unit, call: Callable[[], Any]) -> Any:
        seen = self.tuner.seen = type(self.tuner.seen)()
        try:
            with autotuner.autotune(True, tuning_buckets=(unit.bucket,), round_up=True):
                call()
            self._synchronize()
        except InitwarmError:
            raise
        except Exception as problem:
            raise TuningError(
                f"{unit.name} failed: {type(problem).__name__}: {problem}.",
                "Nothing was published.",
                "Correct the plan's call, or leave it out.",
            ) from problem
        self.measured += seen.measured
        for tactic, text in seen.failed:
            self.problems.setdefault(tactic.op, {})[tactic] = text
        return seen

    def _is_wrong(self, unit: Unit, call: Callable[[], Any], look_ups: Sequence[Any]) -> bool:
        """Whether the winners' output disagrees with the default tactic's, on any rank of the group."""
        ops = {found.winner.op for found in look_ups}
        if not ops:
            return False
        tuned = call()
        with autotuner.autotune(False, skip_ops=ops):
            default = call()
        self._synchronize()
        flag = torch.tensor([0 if agree(tuned, default) else 1])
        if self.group is not None:
            # One rank that measures again while the others go on would leave them waiting in the average.
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def _reject(self, winners: Sequence[Any], keys_before: set[Any]) -> None:
        for found in winners:
            self.rejected.append(found.winner)
            self.tuner.exclude(found.winner)
        for key in set(self.tuner.profiling_cache) - keys_before:
            del self.tuner.profiling_cache[key]
        self.tuner._file_configs.clear()  # noqa: SLF001

    def _save(self, resume: Path | None) -> None:
        """Keep what is finished. In a group ranks must resume alike, so nothing is kept there."""
        if self.group is None and (resume is not None or time.monotonic() - self.saved > SAVE_SECONDS):
            self.tuner.save_configs(str(self.save_to))
            self.saved = time.monotonic()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _result(self) -> TuneResult:
        with tempfile.TemporaryDirectory(dir=self.save_to.parent) as directory:
            v1 = Path(directory) / "v1.json"
            self.tuner.save_configs(str(v1))
            data = v1.read_bytes()
            store = self._store(Path(directory) / "store") if features().has_store else None
        return TuneResult(
            v1=data,
            store=store,
            tuned=sum(self.tuner.stats.tuned_op_successful_configs.values()),
            measured=self.measured,
            failed=tuple(self.failed),
            degraded=tuple(
                f"{op}: {len(tactics)} tactics failed, such as {next(iter(tactics))}: {next(iter(tactics.values()))}"
                for op, tactics in self.problems.items()
            ),
            rejected=tuple(self.rejected),
        )

    def _store(self, root: Path) -> bytes:
        """The same winners in FlashInfer's v2 store, written by FlashInfer, packed into one file."""
        from flashinfer.autotune_cache import ManagedAutotuneCache

        store = ManagedAutotuneCache(collect_metadata(self.device), root)
        store._ensure_dirs()  # noqa: SLF001
        tuner = self.tuner
        policies = getattr(tuner, "_profiling_cache_policies", {})
        for file_key, (runner, tactic) in tuner._file_configs.items():  # noqa: SLF001
            policy = getattr(tuner, "_file_config_policies", {}).get(file_key)
            _publish(store, file_key, runner, tactic, None, policy)
        for key, (tactic, _profile) in tuner.profiling_cache.items():
            policy = policies.get((None, key), policies.get(key))
            _publish(store, key.file_key, key.runner_class_name, tactic, key.key_fields, policy)
        files = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        return encode_store(pack_store(files))


def _publish(store: Any, file_key: str, runner: str, tactic: Any, key_fields: Any, policy: Any) -> None:
    more = {} if policy is None else {"profiling_policy": policy}
    store.publish(file_key, runner, autotuner._tactic_to_json(tactic), key_fields=key_fields, **more)  # noqa: SLF001


def _last_by_op(look_ups: Sequence[Any]) -> list[Any]:
    return list({found.winner.op: found for found in look_ups}.values())


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


def agree(one: Any, other: Any) -> bool:
    """Whether two outputs are the same up to what their element type can hold; tensors, or sequences of them."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        ours, theirs = one.float(), other.float()
        if ours.shape != theirs.shape or not torch.equal(ours.isnan(), theirs.isnan()):
            return False
        tolerance = 1e-3 if one.dtype == torch.float32 else 5e-2
        difference = (ours - theirs).nan_to_num().abs().max() if ours.numel() else torch.zeros(())
        largest = theirs.nan_to_num().abs().max() if theirs.numel() else torch.zeros(())
        return bool(difference <= tolerance * largest)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(agree(*pair) for pair in zip(one, other, strict=True))
    return True
