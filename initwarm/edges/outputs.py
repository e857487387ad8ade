"""Whether a tuned winner computes what the default tactic does: a fast kernel that gives other numbers is not taken."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from initwarm.edges.installation import autotuner, synchronize

#: Greatest difference, as a share of the greatest value, that another order of summation may make.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_COARSE = 0.15


def disagreeing_ops(
    call: Callable[[], Any], ops: Collection[str], bucket: int, device: torch.device
) -> tuple[str, ...]:
    """The ops whose winner changes the output of the call.

    Each is compared alone with all ops at their defaults, so that one wrong winner does not condemn the others. A
    winner that raises has no output and disagrees.

    Args:
        call: the unit's call; the tuner that FlashInfer asks holds the winners.
        ops: that were tuned in it.
        bucket: that they were tuned at; one off the grid is found under it alone.
        device: of the call.
    """

    def output(at_default: set[str]) -> Any:
        with autotuner.autotune(False, tuning_buckets=(bucket,), round_up=True, skip_ops=at_default):
            value = call()
        synchronize(device)
        return value

    default = output(set(ops))

    def is_wrong(op: str) -> bool:
        try:
            return not agree(output(set(ops) - {op}), default)
        except Exception:  # noqa: BLE001  a kernel may refuse in any way
            return True

    return tuple(op for op in ops if is_wrong(op))


def agree(one: Any, other: Any) -> bool:
    """Whether two outputs are the same up to what their element type can hold; tensors, or sequences of them."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _tensors_agree(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(agree(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other)


def _tensors_agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    if one.numel() == 0:
        return True
    tolerance = _TOLERANCES.get(one.dtype, _COARSE)
    if one.dtype.itemsize < 4:
        one, other = one.float(), other.float()
    is_finite = one.isfinite()
    if not torch.equal(one[~is_finite].nan_to_num(7.0), other[~is_finite].nan_to_num(7.0)):
        return False
    difference = torch.where(is_finite, one - other, 0).abs().max()
    largest = torch.where(is_finite, other, 0).abs().max()
    # Where only the other is infinite the difference is too.
    return bool(difference.isfinite() and difference <= tolerance * largest)
