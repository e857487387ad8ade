"""The proof: load what a server would load, make the plan's calls, and see that nothing is missing.

Runs in a process that has tuned nothing, without a process group and without a bucket override, as a server does. Each
winner is executed, since a cached choice can be one that its kernel refuses, and its kernel may still have to be built.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from initwarm.buckets import replay_points
from initwarm.edges.calls import prepare
from initwarm.edges.installation import collect_metadata, features, flashinfer, on_device, quiet, synchronize
from initwarm.edges.tuners import LookUp, WatchedTuner, install
from initwarm.edges.tuning import Progress
from initwarm.entries import parse_v1
from initwarm.errors import DataError, InitwarmError
from initwarm.identity import differences
from initwarm.plan import Unit

#: What every use of the JIT directory touches, whether something is built or not.
_NOT_BUILT = (".lock", ".log", ".ninja", ".ninja_log", ".ninja_deps", ".ninja_lock")


@dataclass(frozen=True)
class ReplayResult:
    """What a rank found in the engine root.

    Args:
        hits: look-ups that found a winner.
        missed: keys that were looked up and not found, each once; or why nothing could be loaded.
        profiled: tactics that were measured.
        built: files that appeared or changed in FlashInfer's JIT directory.
        failed: keys whose winner raised, and calls that raised, with what.
    """

    hits: int
    missed: tuple[str, ...]
    profiled: int
    built: tuple[str, ...]
    failed: tuple[str, ...]


def replay(
    units: Sequence[Unit],
    device: torch.device,
    v1_path: Path,
    store_root: Path | None,
    report: Callable[[Progress], None],
) -> ReplayResult:
    """Replay units from the v1 file, then, in a tuner that has forgotten it, from the v2 store.

    Args:
        units: of this rank.
        device: where the tensors live.
        v1_path: this rank's file.
        store_root: the store, or None where there is none.
        report: hears where the work is.

    Raises:
        UnavailableError: this FlashInfer lacks a function.
        TuningError: the inputs of a call do not fit on the device.
    """
    quiet()
    before = _built_files()
    replayer = _Replayer(units, device, report)
    with on_device(device):
        replayer.from_file(v1_path)
        if store_root is not None and features().has_store:
            replayer.from_store(store_root)
    built = sorted(name for name, state in _built_files().items() if before.get(name) != state)
    return replayer.result(tuple(built))


class _Replayer:
    def __init__(self, units: Sequence[Unit], device: torch.device, report: Callable[[Progress], None]) -> None:
        self.points = _points(units)
        self.device = device
        self.report = report
        self.hits = 0
        self.profiled = 0
        self.missed: dict[str, None] = {}
        self.failed: dict[str, None] = {}

    def from_file(self, path: Path) -> None:
        tuner = install(self.device)
        refusal = self._refusal(tuner, path)
        if refusal is None:
            self._run(tuner, path.name)
        else:
            self.missed[f"every key: {refusal}"] = None

    def _refusal(self, tuner: WatchedTuner, path: Path) -> str | None:
        """Why FlashInfer does not take a file, or None once it has taken it."""
        try:
            saved = parse_v1(path.read_bytes(), path.name).metadata
            if tuner.load_configs(str(path)):
                return None
        except OSError as problem:
            return f"{path} cannot be read: {problem.strerror}"
        except DataError as problem:
            return problem.fact
        fields = "; ".join(str(one) for one in differences(saved, collect_metadata(self.device)))
        return f"FlashInfer refuses {path.name}: {fields}"

    def from_store(self, root: Path) -> None:
        tuner = install(self.device)
        with flashinfer.autotune_v2(mode="replay", cache_root=str(root)):
            self._run(tuner, root.name)

    def _run(self, tuner: WatchedTuner, source: str) -> None:
        count = len(self.points)
        for number, unit in enumerate(self.points):
            self.report(Progress(f"replay {number + 1}/{count} of {source}, {unit.name}", number, count))
            problem = self._problem(unit)
            seen = tuner.take()
            self.profiled += len(seen.measured)
            self.hits += sum(found.is_hit for found in seen.look_ups)
            self.missed.update(dict.fromkeys(found.file_key for found in seen.look_ups if not found.is_hit))
            if problem is not None:
                self.failed[_failure(unit, seen.look_ups, problem)] = None

    def _problem(self, unit: Unit) -> Exception | None:
        """Make a call; returns what it raised: a winner may be one that its kernel refuses, in any way."""
        call = prepare(unit, self.device)
        try:
            call()
            synchronize(self.device)
        except InitwarmError:
            raise
        except Exception as problem:  # noqa: BLE001
            return problem
        return None

    def result(self, built: tuple[str, ...]) -> ReplayResult:
        return ReplayResult(self.hits, tuple(self.missed), self.profiled, built, tuple(self.failed))


def _failure(unit: Unit, look_ups: Sequence[LookUp], problem: Exception) -> str:
    """Names the last winner that was looked up before the call raised: it is the one that ran."""
    what = f"{type(problem).__name__}: {problem}"
    if not look_ups:
        return f"{unit.name}: {what}"
    found = look_ups[-1]
    return f"{found.file_key} with {found.winner.name}: {what}"


def _points(units: Sequence[Unit]) -> list[Unit]:
    """Each call at its buckets and between them."""
    by_call: dict[int, list[Unit]] = {}
    for unit in units:
        by_call.setdefault(unit.index, []).append(unit)
    return [
        Unit(index, of_call[0].call, point)
        for index, of_call in by_call.items()
        for point in replay_points([unit.bucket for unit in of_call])
    ]


def _built_files() -> dict[str, tuple[int, int]]:
    """Files of the JIT directory, with what changes when they are written."""
    from flashinfer.jit import env

    root = Path(env.FLASHINFER_JIT_DIR)
    files: dict[str, tuple[int, int]] = {}
    # What this user may not read was built by another, and is passed over.
    for above, _, names in os.walk(root):
        for name in names:
            path = Path(above, name)
            try:
                state = path.stat()
            except OSError:  # a temporary file of a build that another rank of this pod is making
                continue
            if stat.S_ISREG(state.st_mode) and not name.endswith(_NOT_BUILT):
                files[str(path.relative_to(root))] = (state.st_mtime_ns, state.st_size)
    return files
