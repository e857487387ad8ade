"""An op with faults that a plan switches on, tuned by FlashInfer's real AutoTuner like any other.

It is found through the entry point group `initwarm.calls`, as a package of a user would be. Scalars of the call:

    name          op name, so that one plan can have several
    tactics       how many there are (default 4); tactic i takes i + 1 ms by its cost table
    costs         "rank": the table is rotated by the rank, so that every rank prefers another tactic
    seconds       real time that measuring one tactic takes
    abort         tactic that aborts the process, on `abort_rank` (default: every rank)
    raises        "all", or "most": all tactics but the last raise
    out_of_memory token count from which on every tactic raises MemoryError
    wrong         tactic that is the fastest and gives wrong numbers
    builds        the winner's kernel is built into FlashInfer's JIT directory when it first runs
    rank_in_key   the rank is part of the cache key
    prints        the op prints without end
    pause         seconds that the op waits on `pause_rank`; with `deaf`, it ignores SIGTERM meanwhile
    error         text of an exception that the op itself raises, on `error_rank`
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flashinfer.autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig
from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets, map_to_hybrid_bucket_uncapped

CONFIG = TuningConfig(
    dynamic_tensor_specs=(DynamicTensorSpec((0,), (0,), get_hybrid_num_tokens_buckets, map_to_hybrid_bucket_uncapped),)
)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class FaultyRunner(TunableRunner):  # type: ignore[misc]
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.count = int(options.get("tactics", 4))

    def get_valid_tactics(self, inputs: Any, profile: Any) -> list[int]:
        return list(range(self.count))

    def get_cache_key_extras(self, inputs: Any) -> tuple[Any, ...]:
        return (rank(),) if self.options.get("rank_in_key") else ()

    def __hash__(self) -> int:
        return hash(type(self).__name__)

    def host_time(self, inputs: Any, tactic: int) -> float:
        self.forward(inputs, tactic)
        deadline = time.monotonic() + float(self.options.get("seconds", 0))
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(left)
        if tactic == self.options.get("wrong"):
            return 1e-6
        shift = rank() if self.options.get("costs") == "rank" else 0
        return 1e-3 * ((tactic + shift) % self.count + 1)

    def forward(self, inputs: Any, tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        (x,) = inputs
        options = self.options
        if tactic not in range(-1, self.count):
            raise ValueError(f"no tactic {tactic}")
        if tactic == options.get("abort") and options.get("abort_rank", rank()) == rank():
            os.abort()
        if x.shape[0] >= options.get("out_of_memory", 1 << 30) and tactic >= 0:
            raise MemoryError("no room for this tactic")
        last = {"all": self.count, "most": self.count - 1}.get(str(options.get("raises")), 0)
        if 0 <= tactic < last:
            raise RuntimeError("unsupported tactic")
        if options.get("builds"):
            build(f"{options.get('name', 'op')}-{tactic}")
        return x * (3 if tactic == options.get("wrong") else 2)


def build(name: str) -> None:
    from flashinfer.jit import env

    path = Path(env.FLASHINFER_JIT_DIR) / "faults" / f"{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("built")


def recipe(unit: Any, device: torch.device) -> Callable[[], Any]:
    options = dict(unit.call.scalars)
    runner = FaultyRunner(options)
    x = torch.full((unit.bucket, 4), 1.5, device=device)
    op = f"faults::{options.get('name', 'op')}"

    def call() -> Any:
        if options.get("error") and options.get("error_rank", rank()) == rank():
            raise LookupError(options["error"])
        while options.get("prints"):
            os.write(1, b"x\n" * 30_000)
        if options.get("pause") and options.get("pause_rank") == rank():
            if options.get("deaf"):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(options["pause"])
        chosen, tactic = AutoTuner.get().choose_one(op, [runner], CONFIG, [x])
        return chosen([x], tactic=tactic)

    return call
