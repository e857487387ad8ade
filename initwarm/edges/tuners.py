"""FlashInfer's own AutoTuner, watched: what it measures, what it looks up, and which tactics it must not touch.

FlashInfer's functions ask `AutoTuner.get()`, so installing a subclass as its instance is all that is needed. On a GPU
the stock measurement stays as it is; on the CPU, where there are no CUDA events, calls are timed by the host's clock.

Source:
    FlashInfer 0.6.18.post1, 0.7.2.post1 and 0.7.4: autotuner/autotuner.py, AutoTuner.choose_one, search_cache and
    _profile_single_kernel, whose all-reduce over the tuning group an override must not leave out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from initwarm.edges.installation import autotuner

#: A measurement on the host ends after so many runs, or after the first that fills this time.
HOST_RUNS = 5
HOST_SECONDS = 0.01


@dataclass(frozen=True)
class Tactic:
    """One variant of one implementation of an op.

    Args:
        op: custom op, by name.
        runner: class of the implementation.
        tactic: the variant, as JSON.
    """

    op: str
    runner: str
    tactic: Any

    @property
    def name(self) -> str:
        """For people, among those of one op."""
        return f"{self.runner} {self.tactic}"


@dataclass(frozen=True)
class LookUp:
    """One search of the tuner's caches.

    Args:
        is_hit: whether a winner was found.
        winner: it, or the default where there is none.
        key: FlashInfer's key of the winner's runner, or of the first where there is none.
    """

    is_hit: bool
    winner: Tactic
    key: Any

    @property
    def file_key(self) -> str:
        """The key as it stands in a file."""
        return str(self.key.file_key)


@dataclass
class Observed:
    """What happened since it was last taken.

    Args:
        measured: tactics that were run to be timed, in order.
        failed: those that raised, with what.
        look_ups: in order.
    """

    measured: list[Tactic] = field(default_factory=list)
    failed: list[tuple[Tactic, Exception]] = field(default_factory=list)
    look_ups: list[LookUp] = field(default_factory=list)

    @property
    def last_look_ups(self) -> dict[str, LookUp]:
        """By op, what FlashInfer ended with."""
        return {found.winner.op: found for found in self.look_ups}


class ExcludedError(RuntimeError):
    """This tactic must not run: it killed a worker, or gave wrong numbers."""


class WatchedTuner(autotuner.AutoTuner):  # type: ignore[misc]
    """The stock tuner, which also tells what it does.

    Args:
        excluded: tactics that must not run; in a group the same on all ranks.
        before: called before each measurement, so that the parent knows what was running if this process dies.
    """

    def __init__(self, excluded: Collection[Tactic], before: Callable[[Tactic], None]) -> None:
        super().__init__()
        self.excluded = {_hashable(one) for one in excluded}
        self.before = before
        self.seen = Observed()
        self._op = ""

    def take(self) -> Observed:
        """What happened since the last time."""
        seen, self.seen = self.seen, Observed()
        return seen

    def exclude(self, tactic: Tactic) -> None:
        """Never run this tactic again."""
        self.excluded.add(_hashable(tactic))

    def forget(self, found: LookUp) -> None:
        """Drop a winner, wherever it came from."""
        for key in [key for key in self.profiling_cache if key.file_key == found.file_key]:
            del self.profiling_cache[key]
        self._file_configs.pop(found.file_key, None)

    def choose_one(self, custom_op: str, *args: Any, **kwargs: Any) -> Any:
        """Choose as FlashInfer does; a runner may choose for an op of its own meanwhile."""
        outer, self._op = self._op, custom_op
        try:
            return super().choose_one(custom_op, *args, **kwargs)
        finally:
            self._op = outer

    def search_cache(
        self, custom_op: str, runners: list[Any], shapes: Any, config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Look up as FlashInfer does, and remember what was found."""
        found = super().search_cache(custom_op, runners, shapes, config, *args, **kwargs)
        is_hit, runner_id, tactic, _profile = found
        runner = runners[runner_id]
        inputs = args[0] if args else kwargs.get("inputs")
        extras = runner.get_cache_key_extras(inputs) if inputs is not None else ()
        key = self._get_cache_key(custom_op, runner, shapes, config, extras)
        winner = Tactic(custom_op, type(runner).__name__, autotuner._tactic_to_json(tactic))  # noqa: SLF001
        self.seen.look_ups.append(LookUp(bool(is_hit), winner, key))
        return found

    def _profile_single_kernel(self, runner: Any, inputs: list[Any], tactic: Any, *args: Any, **kwargs: Any) -> float:
        one = Tactic(self._op, type(runner).__name__, autotuner._tactic_to_json(tactic))  # noqa: SLF001
        if _hashable(one) in self.excluded:
            self._average(float("inf"))
            raise ExcludedError(f"{one.name} is excluded")
        self.seen.measured.append(one)
        self.before(one)
        try:
            return self._measure(runner, inputs, tactic, *args, **kwargs)
        except Exception as problem:
            self.seen.failed.append((one, problem))
            if self._is_device_lost():
                # FlashInfer before 0.7.4 would try the next tactics, each of which fails; the last one tried, and not
                # this one, would then be blamed. SystemExit passes FlashInfer's handlers and leaves no error file, so
                # that the parent sees a lost worker.
                raise SystemExit(f"{one.op} {one.name} left the GPU unusable: {problem}") from problem
            raise

    def _measure(self, runner: Any, inputs: list[Any], tactic: Any, *args: Any, **kwargs: Any) -> float:
        return float(super()._profile_single_kernel(runner, inputs, tactic, *args, **kwargs))

    def _is_device_lost(self) -> bool:
        """Whether every later CUDA call of this process fails: an error that survives being reported once."""
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
        try:
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001  torch raises several kinds
            return True
        return False

    def _average(self, milliseconds: float) -> float:
        """Take part in the group's average of this tactic, so that no rank waits for this one."""
        group = getattr(autotuner, "get_autotune_process_group", lambda: None)()
        if group is None:
            return milliseconds
        is_nccl = str(torch.distributed.get_backend(group)).lower() == "nccl"
        value = torch.tensor([milliseconds], dtype=torch.float64, device="cuda" if is_nccl else "cpu")
        torch.distributed.all_reduce(value, group=group)
        return float(value.item()) / float(torch.distributed.get_world_size(group))


class HostTuner(WatchedTuner):
    """Times calls on the CPU. A runner may bring `host_time(inputs, tactic)`, seconds, which is taken instead."""

    def _measure(self, runner: Any, inputs: list[Any], tactic: Any, *_args: Any, **kwargs: Any) -> float:
        kwargs.pop("input_tensor_batches", None)
        problem: Exception | None = None
        try:
            seconds = _host_seconds(runner, inputs, tactic, kwargs)
        except Exception as error:  # noqa: BLE001  the others wait in the average, whatever went wrong here
            problem, seconds = error, float("inf")
        average = self._average(seconds * 1e3)
        if problem is not None:
            raise problem
        return average

    def _is_device_lost(self) -> bool:
        return False


def _host_seconds(runner: Any, inputs: list[Any], tactic: Any, kwargs: dict[str, Any]) -> float:
    host_time = getattr(runner, "host_time", None)
    if host_time is not None:
        return float(host_time(inputs, tactic))
    runner(inputs, tactic=tactic, **kwargs)
    best, spent = float("inf"), 0.0
    for _ in range(HOST_RUNS):
        started = time.perf_counter()
        runner(inputs, tactic=tactic, **kwargs)
        seconds = time.perf_counter() - started
        best, spent = min(best, seconds), spent + seconds
        if spent > HOST_SECONDS:
            break
    return best


def install(
    device: torch.device, excluded: Collection[Tactic] = (), before: Callable[[Tactic], None] = lambda _: None
) -> WatchedTuner:
    """Make a fresh tuner the one that FlashInfer's functions ask.

    Args:
        device: of the calls.
        excluded: tactics that must not run.
        before: called before each measurement.
    """
    kind = HostTuner if device.type == "cpu" else WatchedTuner
    tuner = kind(excluded, before)
    autotuner.AutoTuner._instance = tuner  # noqa: SLF001
    if device.type == "cpu" and not torch.cuda.is_available():
        # FlashInfer asks before each measurement; without a driver the question itself raises.
        torch.cuda.is_current_stream_capturing = lambda: False
    return tuner


def _hashable(tactic: Tactic) -> tuple[str, str, str]:
    return (tactic.op, tactic.runner, repr(tactic.tactic))
