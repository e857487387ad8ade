"""The plan: the dummy pass as data, one document for the whole group.

    version: 1
    device: cuda
    parallel: {tp: 2, pp: 1, dp: 1, ep: 1}          # optional
    calls:
      - call: flashinfer.bmm_fp8
        args:
          A: {dtype: float8_e4m3fn, shape: [1, M, 8192]}
          B: {dtype: float8_e4m3fn, shape: [1, 8192, 2560], layout: column_major}
          A_scale: {dtype: float32, shape: [1]}
          B_scale: {dtype: float32, shape: [1]}
          dtype: bfloat16
        buckets: {max: 8192}                         # FlashInfer's grid up to 8192, or a list

`defaults: {buckets: ...}` serves calls that give none. `stages` and `ranks` restrict a call to pipeline stages or to
ranks; `collectives: true` marks one that no rank can make alone. A document is read whole or refused with the place of
what is wrong; an empty list of calls is nothing to tune.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from initwarm.errors import PlanError
from initwarm.jsontext import canonical, sha256_hex
from initwarm.signatures import CALLS, TOKENS

VERSION = 1
#: Sizes of element types that a plan may name, in bytes.
DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}

Dimension = int | Literal["M"]
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is made up for a call.

    Args:
        dtype: name of a torch dtype.
        shape: sizes, with `M` for the number of tokens.
        layout: `row_major`, or `column_major` for the last two dimensions swapped in memory.
    """

    dtype: str
    shape: tuple[Dimension, ...]
    layout: str = "row_major"

    def sizes(self, num_tokens: int) -> tuple[int, ...]:
        """The shape for this many tokens."""
        return tuple(num_tokens if size == TOKENS else int(size) for size in self.shape)

    def num_bytes(self, num_tokens: int) -> int:
        """Memory of the tensor, in bytes."""
        count = 1
        for size in self.sizes(num_tokens):
            count *= size
        return count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Call:
    """One call, at several numbers of tokens.

    Args:
        call: name in `initwarm.signatures`, or one that an installed package adds.
        tensors: by argument name.
        scalars: the other arguments.
        buckets: ascending, in tokens.
        stages: pipeline stages that make the call; None for all.
        ranks: ranks that make the call; None for all.
        collectives: the call contains a collective.
        rank_free: no rank is part of its cache keys; a call that another package adds has to say so.
    """

    call: str
    tensors: Mapping[str, TensorSpec]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    stages: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    collectives: bool = False
    rank_free: bool = False


@dataclass(frozen=True)
class Parallel:
    """How the model is divided; ranks are numbered tensor first, then pipeline, then data, as vLLM does."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the group; expert parallelism reuses them."""
        return self.tp * self.pp * self.dp

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.tp % self.pp


@dataclass(frozen=True)
class Unit:
    """One call of a plan at one bucket: the smallest thing that is tuned.

    Args:
        index: of the call in the plan.
        call: itself.
        bucket: in tokens.
    """

    index: int
    call: Call
    bucket: int

    @property
    def name(self) -> str:
        """For people."""
        return f"calls[{self.index}] {self.call.call} {TOKENS}={self.bucket}"

    @property
    def num_bytes(self) -> int:
        """Memory of the unit's input tensors, in bytes."""
        return sum(tensor.num_bytes(self.bucket) for tensor in self.call.tensors.values())


@dataclass(frozen=True)
class Plan:
    """A valid plan.

    Args:
        device: `cpu` or `cuda`.
        parallel: how the model is divided, or None where no call depends on it.
        calls: in order.
    """

    device: str
    parallel: Parallel | None
    calls: tuple[Call, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON; YAML or JSON, key order and the spelling of buckets do not matter."""
        return sha256_hex(canonical(self.to_json()))

    @property
    def has_collectives(self) -> bool:
        """Whether some call contains a collective."""
        return any(call.collectives for call in self.calls)

    @property
    def rank_free(self) -> bool:
        """Whether no rank is part of any cache key, so that one rank's winners are hits on every other."""
        return all(call.rank_free for call in self.calls)

    def units_of(self, rank: int) -> tuple[Unit, ...]:
        """What this rank's server will ask for, in plan order, buckets ascending."""
        stage = self.parallel.stage_of(rank) if self.parallel is not None else 0
        return tuple(
            Unit(index, call, bucket)
            for index, call in enumerate(self.calls)
            if (call.stages is None or stage in call.stages) and (call.ranks is None or rank in call.ranks)
            for bucket in call.buckets
        )

    def stages(self, world_size: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline stage, ascending; the first of each is its leader."""
        if self.parallel is None:
            return (tuple(range(world_size)),)
        return tuple(
            tuple(rank for rank in range(world_size) if self.parallel.stage_of(rank) == stage)
            for stage in range(self.parallel.pp)
        )

    def is_uniform(self, world_size: int) -> bool:
        """Whether the ranks of each stage make the same calls."""
        stages = self.stages(world_size)
        return all(
            len(chosen.intersection(stages[stage])) in (0, len(stages[stage]))
            for call in self.calls
            if call.ranks is not None
            for chosen in [frozenset(call.ranks)]
            for stage in (range(len(stages)) if call.stages is None else call.stages)
        )

    def to_json(self) -> dict[str, Any]:
        """The normalised document."""
        document: dict[str, Any] = {"version": VERSION, "device": self.device}
        if self.parallel is not None:
            document["parallel"] = dict(vars(self.parallel))
        document["calls"] = [_call_as_json(call) for call in self.calls]
        return document


def _call_as_json(call: Call) -> dict[str, Any]:
    tensors = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "layout": tensor.layout}
        for name, tensor in call.tensors.items()
    }
    document: dict[str, Any] = {
        "call": call.call,
        "args": {**tensors, **call.scalars},
        "buckets": list(call.buckets),
        "collectives": call.collectives,
    }
    if call.call not in CALLS:
        document["rank_free"] = call.rank_free
    for name in ("stages", "ranks"):
        chosen = getattr(call, name)
        if chosen is not None:
            document[name] = list(chosen)
    return document


def check_world(plan: Plan, world_size: int) -> None:
    """Refuse a plan that was made for another number of ranks.

    Raises:
        PlanError: the plan's parallel sizes, or its ranks, do not fit the group.
    """
    if plan.parallel is not None and plan.parallel.world_size != world_size:
        sizes = plan.parallel
        raise PlanError(
            f"The plan is for {sizes.world_size} ranks (tp {sizes.tp} x pp {sizes.pp} x dp {sizes.dp}) and the group "
            f"has {world_size}.",
            "Nothing was tuned.",
            "Give the group as many GPUs as the server's parallel sizes need, or correct the plan.",
        )
    for index, call in enumerate(plan.calls):
        for rank in call.ranks or ():
            if rank >= world_size:
                raise PlanError(
                    f"calls[{index}].ranks names rank {rank} and the group has {world_size}.",
                    "Nothing was tuned.",
                    "Ranks run from 0.",
                )
