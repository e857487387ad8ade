"""Operations on the CPU with genuinely different tactics, tuned by FlashInfer's real AutoTuner.

They are what the built-in `host` plan tunes: a whole run on a machine without a GPU, with real measurements and real
cache entries. Their token dimension uses FlashInfer's hybrid buckets, like its GEMMs do.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override  # comes with torch

from initwarm.edges.installation import autotuner, flashinfer

MATMUL_OP = "initwarm::host_matmul"
SOFTMAX_OP = "initwarm::host_softmax"

_BY_TOKENS = autotuner.TuningConfig(
    dynamic_tensor_specs=(
        autotuner.DynamicTensorSpec(
            input_idx=(0,),
            dim_idx=(0,),
            gen_tuning_buckets=flashinfer.fused_moe.utils.get_hybrid_num_tokens_buckets,
            map_to_tuning_buckets=flashinfer.fused_moe.utils.map_to_hybrid_bucket_uncapped,
        ),
    ),
)


class _HostRunner(autotuner.TunableRunner):  # type: ignore[misc]
    """Keeps entries of different element types apart; shapes are in the key already."""

    @override
    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return (inputs[0].dtype,)


class HostMatmulRunner(_HostRunner):
    """Multiplies the whole matrices: directly (0), transposed (1), or row by row of a (2)."""

    @override
    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[int]:
        return [0, 1, 2]

    @override
    def forward(self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        a, b = inputs
        if tactic == 1:
            return torch.matmul(b.t(), a.t()).t().contiguous()
        if tactic == 2:
            return torch.stack([row @ b for row in a])
        if tactic in (0, -1):
            return torch.matmul(a, b)
        raise ValueError(f"HostMatmulRunner has no tactic {tactic}")


class HostBlockedMatmulRunner(_HostRunner):
    """Multiplies block by block and adds up in float32; a tactic is (rows of b, columns of b) of one block."""

    @override
    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[tuple[int, int]]:
        depth, width = inputs[1].shape
        return [(rows, columns) for rows in (64, 256) for columns in (64, 256) if rows <= depth and columns <= width]

    @override
    def forward(self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        a, b = inputs
        depth, width = b.shape
        rows, columns = (depth, width) if tactic == -1 else tactic
        out = torch.zeros(a.shape[0], width, dtype=torch.float32)
        for j in range(0, width, columns):
            for k in range(0, depth, rows):
                out[:, j : j + columns] += a[:, k : k + rows] @ b[k : k + rows, j : j + columns]
        return out.to(a.dtype)


class HostSoftmaxRunner(_HostRunner):
    """Normalises each row: torch's own (0), from exponentials (1), or by so many rows at a time ((rows,))."""

    @override
    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[Any]:
        return [0, 1, (8,), (64,)]

    @override
    def forward(self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        (x,) = inputs
        if tactic in (0, -1):
            return torch.softmax(x, dim=-1)
        if tactic == 1:
            exponential = torch.exp(x - x.amax(dim=-1, keepdim=True))
            return exponential / exponential.sum(dim=-1, keepdim=True)
        (rows,) = tactic
        return torch.cat([torch.softmax(part, dim=-1) for part in x.split(rows)])


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


def _choose_and_run(custom_op: str, runners: list[Any], inputs: list[torch.Tensor]) -> torch.Tensor:
    runner, tactic = autotuner.AutoTuner.get().choose_one(custom_op, runners, _BY_TOKENS, inputs)
    result: torch.Tensor = runner(inputs, tactic=tactic)
    return result
