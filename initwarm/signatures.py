"""The calls that a plan may make: their arguments, types and shapes, one small entry each.

A letter in a shape stands for a size that must agree wherever it occurs in a call; `M` is the token dimension, the one
that buckets replace, and a digit stands for itself. Two shapes for one argument are alternatives: a scale without a
dimension and a scale of one element give different cache keys, so both can be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TOKENS: Final = "M"
ROW_MAJOR = "row_major"
COLUMN_MAJOR = "column_major"


@dataclass(frozen=True)
class TensorRule:
    """What a tensor argument must be.

    Args:
        dtypes: allowed torch dtypes, by name.
        shapes: allowed shapes, as letters.
        layout: of the last two dimensions.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    layout: str = ROW_MAJOR


@dataclass(frozen=True)
class ScalarRule:
    """What an argument that is no tensor must be.

    Args:
        choices: allowed values.
        is_dtype: the value is the name of a torch dtype.
        is_required: the call has no default for it.
    """

    choices: tuple[str, ...]
    is_dtype: bool = False
    is_required: bool = False


@dataclass(frozen=True)
class CallSignature:
    """One call.

    Args:
        device: `cpu` or `cuda`.
        tensors: by name, all required.
        scalars: by name. One that is left away keeps the default of the FlashInfer at hand.
        same_dtype: tensors that must have one dtype.
        is_rank_free: no rank is part of its cache keys, in any FlashInfer version.
    """

    device: str
    tensors: Mapping[str, TensorRule]
    scalars: Mapping[str, ScalarRule] = field(default_factory=dict)
    same_dtype: tuple[str, ...] = ()
    is_rank_free: bool = True

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of all arguments."""
        return (*self.tensors, *self.scalars)

    @property
    def required(self) -> tuple[str, ...]:
        """The names of those that a plan must give."""
        return (*self.tensors, *(name for name, rule in self.scalars.items() if rule.is_required))


_E4M3 = ("float8_e4m3fn",)
_FLOAT32 = ("float32",)
_BFLOAT16 = ("bfloat16",)
_HALF = ("bfloat16", "float16")
_HOST = ("float32", "bfloat16")

#: Source: FlashInfer 0.7.4, gemm/gemm_base.py: signatures, checks and docstrings of bmm_fp8 and mm_bf16. Not here:
#: e5m2, which the CUTLASS backend refuses, and the backend `cutile`, which does not go through FlashInfer's AutoTuner.
CALLS: Mapping[str, CallSignature] = {
    "initwarm.host_matmul": CallSignature(
        "cpu",
        {"a": TensorRule(_HOST, ("MK",)), "b": TensorRule(_HOST, ("KN",))},
        same_dtype=("a", "b"),
    ),
    "initwarm.host_softmax": CallSignature("cpu", {"x": TensorRule(_FLOAT32, ("MN",))}),
    "flashinfer.bmm_fp8": CallSignature(
        "cuda",
        {
            "A": TensorRule(_E4M3, ("BMK",)),
            "B": TensorRule(_E4M3, ("BKN",), COLUMN_MAJOR),
            "A_scale": TensorRule(_FLOAT32, ("", "1")),
            "B_scale": TensorRule(_FLOAT32, ("", "1")),
        },
        {
            "dtype": ScalarRule(_HALF, is_dtype=True, is_required=True),
            "backend": ScalarRule(("cublas", "cudnn", "cutlass", "cute-dsl", "auto")),
        },
    ),
    "flashinfer.mm_bf16": CallSignature(
        "cuda",
        {"a": TensorRule(_BFLOAT16, ("MK",)), "b": TensorRule(_BFLOAT16, ("KN",), COLUMN_MAJOR)},
        {
            "out_dtype": ScalarRule((*_HALF, "float32"), is_dtype=True),
            "backend": ScalarRule(("cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cute-dsl", "auto")),
        },
    ),
}
