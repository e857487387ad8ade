"""The calls that a plan may make: their arguments, types and shapes, one small entry each.

A letter in a shape stands for a size that must agree wherever it occurs in a call; `M` is the token dimension, the one
that buckets replace. Two shapes for one argument are alternatives: a scale without a dimension and a scale of one
element give different cache keys, so both can be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOKENS = "M"
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
    """What an argument that is no tensor may be.

    Args:
        choices: allowed values; empty for a number or text of any value.
        is_dtype: the value is the name of a torch dtype.
    """

    choices: tuple[str, ...] = ()
    is_dtype: bool = False


@dataclass(frozen=True)
class CallSignature:
    """One call.

    Args:
        device: `cpu` or `cuda`.
        tensors: required, by name.
        scalars: optional, by name.
        is_rank_free: no rank is part of its cache keys, in any FlashInfer version.
    """

    device: str
    tensors: Mapping[str, TensorRule]
    scalars: Mapping[str, ScalarRule] = field(default_factory=dict)
    is_rank_free: bool = True


_FP8 = ("float8_e4m3fn", "float8_e5m2")
_HALF = ("bfloat16", "float16")

#: Source: FlashInfer 0.7.4, gemm/gemm_base.py (bmm_fp8, mm_bf16), and `initwarm.edges.hostops`.
CALLS: Mapping[str, CallSignature] = {
    "initwarm.host_matmul": CallSignature(
        "cpu",
        {
            "a": TensorRule(("float32", "bfloat16"), ("MK",)),
            "b": TensorRule(("float32", "bfloat16"), ("KN",)),
        },
    ),
    "initwarm.host_softmax": CallSignature("cpu", {"x": TensorRule(("float32",), ("MN",))}),
    "flashinfer.bmm_fp8": CallSignature(
        "cuda",
        {
            "A": TensorRule(_FP8, ("BMK",)),
            "B": TensorRule(_FP8, ("BKN",), COLUMN_MAJOR),
            "A_scale": TensorRule(("float32",), ("", "1")),
            "B_scale": TensorRule(("float32",), ("", "1")),
        },
        {
            "dtype": ScalarRule(_HALF, is_dtype=True),
            "backend": ScalarRule(("cudnn", "cublas", "cutlass", "cute-dsl", "auto")),
        },
    ),
    "flashinfer.mm_bf16": CallSignature(
        "cuda",
        {
            "a": TensorRule(("bfloat16",), ("MK",)),
            "b": TensorRule(("bfloat16",), ("KN",), COLUMN_MAJOR),
        },
        {
            "out_dtype": ScalarRule((*_HALF, "float32"), is_dtype=True),
            "backend": ScalarRule(("cudnn", "cutlass", "tgv", "cublaslt", "tinygemm", "cutile", "cute-dsl", "auto")),
        },
    ),
}
#: Scalars that a call cannot do without.
REQUIRED_SCALARS: Mapping[str, tuple[str, ...]] = {"flashinfer.bmm_fp8": ("dtype",)}
