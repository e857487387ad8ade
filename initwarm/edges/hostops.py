"""Operations on the CPU with genuinely different tactics, tuned by FlashInfer's real AutoTuner.

They are what the built-in `host` plan tunes: a whole run on a machine without a GPU, with real measurements and real
cache entries. Their token dimension uses FlashInfer's hybrid buckets, like its GEMMs do.
"""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.autotuner import AutoTuner, DynamicTensorSpec, OptimizationProfile, TunableRunner, TuningConfig
from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets, map_to_hybrid_bucket_uncapped

MATMUL_OP = "initwarm::host_matmul"
SOFTMAX_OP = "initwarm::host_softmax"

_BY_TOKENS = TuningConfig(
    dynamic_tensor_specs=(
        DynamicTensorSpec((0,), (0,), get_hybrid_num_tokens_buckets, map_to_hybrid_bucket_uncapped),
    ),
)


class HostMatmulRunner(TunableRunner):
    """Whole-matrix ways to multiply; the default is the first."""

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: OptimizationProfile) -> list[int]:
        return [0, 1, 2]

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return (inputs[0].dtype,)

    def forward(self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        a, b = inputs
        if tactic == 1:
            return torch.matmul(b.t(), a.t()).t().contiguous()
        if tactic == 2:
            return torch.einsum("mk,kn->mn", a, b)
        return torch.matmul(a, b)


class HostBlockedMatmulRunner(TunableRunner):
    """Multiplies by blocks of (columns of a, columns of b), the tactic."""

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: OptimizationProfile) -> list[tuple[int, int]]:
        depth, width = inputs[1].shape
        return [(k, n) for k in (64, 256) for n in (64, 256) if k <= depth and n <= width]

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return (inputs[0].dtype,)

    def forward(self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        a, b = inputs
        depth, width = b.shape
        block_k, block_n = (depth, width) if tactic == -1 else tactic
        out = torch.zeros(a.shape[0], width, dtype=torch.float32)
        for n in range(0, width, block_n):
            for k in range(0, depth, block_k):
                out[:, n : n + block_n] += a[:, k : k + block_k] @ b[k : k + block_k, n : n + block_n]
        return out.to(a.dtype)


class HostSoftmaxRunner(TunableRunner):
    """Ways to normalise each row: torch's own, by hand, or in chunks of rows."""

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: OptimizationProfile) -> list[str]:
        return ["fused", "by_hand", "chunked"]

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return (inputs[0].dtype,)

    def forward(self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        (x,) = inputs
        if tactic == "by_hand":
            exponential = torch.exp(x - x.amax(dim=-1, keepdim=True))
            return exponential / exponential.sum(dim=-1, keepdim=True)
        if tactic == "chunked":
            return torch.cat([torch.softmax(rows, dim=-1) for rows in x.split(8)])
        return torch.softmax(x, dim=-1)


def host_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices on the CPU with the tactic that the tuner knows for this number of rows.

    Shapes:
        a: (num_tokens, depth), float32 or bfloat16, on the CPU.
        b: (depth, width), of the same type.

    Returns:
        (num_tokens, width), of the same type.
    """
    return _choose_and_run(MATMUL_OP, [HostMatmulRunner(), HostBlockedMatmulRunner()], [a, b])


def host_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension on the CPU.

    Shapes:
        x: (num_tokens, width), float32, on the CPU.

    Returns:
        (num_tokens, width), float32.
    """
    return _choose_and_run(SOFTMAX_OP, [HostSoftmaxRunner()], [x])


def _choose_and_run(custom_op: str, runners: list[TunableRunner], inputs: list[torch.Tensor]) -> torch.Tensor:
    runner, tactic = AutoTuner.get().choose_one(custom_op, runners, _BY_TOKENS, inputs)
    result: torch.Tensor = runner(inputs, tactic=tactic)
    return result
