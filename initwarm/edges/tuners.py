"""FlashInfer's own AutoTuner, watched: what it measures, what it looks up, and which tactics it must not touch.

FlashInfer's functions ask `AutoTuner.get()`, so installing a subclass as its instance is all that is needed. On a GPU
the stock measurement stays as it is; on the CPU, where there are no CUDA events, calls are timed by the host's clock.

Source:
    FlashInfer 0.6.18.post1, 0.7.2.post1 and 0.7.4: autotuner/autotuner.py, AutoTuner.choose_one, search_cache and
    _profile_single_kernel, whose all-reduce over the tuning group an override must not leave out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from flashinfer import autotuner
from flashinfer.autotuner import AutoTuner, TunableRunner, _tactic_to_json

#: A measurement on the host ends after so many runs, or after the first that fills this time.
HOST_RUNS = 5
HOST_SECONDS = 0.01


@dataclass(frozen=True)
class Tactic:
    """One variant of one implementation of an op, as JSON values."""

    op: str
    runner: str
    tactic: Any


@dataclass
class LookUp:
    """What `choose_one` last found for an op: the winner, or the key that nothing was stored under."""

    is_hit: bool
    winner: Tactic
    key: str


@dataclass
class Observed:
    """What happened since the last unit began."""

    measured: int = 0
    failed: list[tuple[Tactic, str]] = field(default_factory=list)
    look_ups: list[LookUp] = field(default_factory=list)


class ExcludedError(RuntimeError):
    """This tactic must not run: it killed a worker, or gave wrong numbers."""


class WatchedTuner(AutoTuner):  # type: ignore[misc]
    """The stock tuner, which also tells what it does."""

    def __init__(self, excluded: Collection[Tactic], before: Callable[[Tactic], None]) -> None:
        super().__init__()
        self.excluded = {_hashable(one) for one in excluded}
        self.before = before
        self.seen = Observed()
        self._op = ""

    def exclude(self, tactic: Tactic) -> None:
        """Never run this tactic again."""
        self.excluded.add(_hashable(tactic))

    def search_cache(self, custom_op: str, runners: list[TunableRunner], *args: Any, **kwargs: Any) -> Any:
        """Look up as FlashInfer does, and remember what was found."""
        self._op = custom_op
        found = super().search_cache(custom_op, runners, *args, **kwargs)
        is_hit, runner_id, tactic, _profile = found
        runner = runners[runner_id]
        key = "" if is_hit else self._key(custom_op, runners[0], *args, **kwargs)
        winner = Tactic(custom_op, type(runner).__name__, _tactic_to_json(tactic))
        self.seen.look_ups.append(LookUp(bool(is_hit), winner, key))
        return found

    def _key(
        self, custom_op: str, runner: TunableRunner, shapes: Any, config: Any, inputs: Any = None, **_rest: Any
    ) -> str:
        extras = runner.get_cache_key_extras(inputs) if inputs is not None else ()
        return str(self._get_cache_key(custom_op, runner, shapes, config, extras).file_key)

    def _profile_single_kernel(
        self, runner: TunableRunner, inputs: list[torch.Tensor], tactic: Any, *args: Any, **kwargs: Any
    ) -> float:
        one = Tactic(self._op, type(runner).__name__, _tactic_to_json(tactic))
        try:
            if _hashable(one) in self.excluded:
                self._average(float("inf"))
                raise ExcludedError(f"{one} is excluded")
            self.seen.measured += 1
            self.before(one)
            return self._measure(runner, inputs, tactic, *args, **kwargs)
        except Exception as problem:
            self.seen.failed.append((one, f"{type(problem).__name__}: {problem}"))
            raise

    def _measure(
        self, runner: TunableRunner, inputs: list[torch.Tensor], tactic: Any, *args: Any, **kwargs: Any
    ) -> float:
        return float(super()._profile_single_kernel(runner, inputs, tactic, *args, **kwargs))

    def _average(self, milliseconds: float) -> float:
        """Take part in the group's average of this tactic, so that no rank waits for this one."""
        group = getattr(autotuner, "get_autotune_process_group", lambda: None)()
        if group is None:
            return milliseconds
        value = torch.tensor([milliseconds], dtype=torch.float64)
        torch.distributed.all_reduce(value, group=group)
        return float(value.item()) / torch.distributed.get_world_size(group)


class HostTuner(WatchedTuner):
    """Times calls on the CPU. A runner may bring `host_time(inputs, tactic)`, seconds, which is taken instead."""

    def _measure(
        self, runner: TunableRunner, inputs: list[torch.Tensor], tactic: Any, *_args: Any, **kwargs: Any
    ) -> float:
        kwargs.pop("input_tensor_batches", None)
        problem: Exception | None = None
        try:
            seconds = self._seconds(runner, inputs, tactic, kwargs)
        except Exception as error:  # noqa: BLE001  the others wait in the average, whatever went wrong here
            problem, seconds = error, float("inf")
        average = self._average(seconds * 1e3)
        if problem is not None:
            raise problem
        return average

    def _seconds(self, runner: TunableRunner, inputs: list[torch.Tensor], tactic: Any, kwargs: Any) -> float:
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


def install(device: torch.device, excluded: Collection[Tactic], before: Callable[[Tactic], None]) -> WatchedTuner:
    """Make a fresh tuner the one that FlashInfer's functions ask.

    Args:
        device: of the calls.
        excluded: tactics that must not run.
        before: called before each measurement, so that the parent knows what was running if this process dies.
    """
    kind = HostTuner if device.type == "cpu" else WatchedTuner
    tuner = kind(excluded, before)
    AutoTuner._instance = tuner  # noqa: SLF001
    if device.type == "cpu" and not torch.cuda.is_available():
        # FlashInfer asks before each measurement; without a driver the question itself raises.
        torch.cuda.is_current_stream_capturing = lambda: False
    return tuner


def _hashable(tactic: Tactic) -> tuple[str, str, str]:
    return (tactic.op, tactic.runner, repr(tactic.tactic))
