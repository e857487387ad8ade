"""Whether a tuned winner computes what the default tactic does: a fast kernel that gives other numbers is not taken."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from initwarm.edges.installation import autotuner, synchronize

#: Greatest difference, as a share of the greatest value, that another order of summation may make.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_COARSE = 0.15


def disagreeing_ops(call: Callable[[], Any], ops: Collection[str], device: torch.device) -> tuple[str, ...]:
    """The ops whose winner, alone or in the call's other work, changes the output of the call.

    Each is compared with all ops at their defaults, so that one wrong winner does not condemn the others. A winner that
    raises has no output and disagrees.

    Args:
        call: the unit's call; the tuner that FlashInfer asks holds the winners.
        ops: that were tuned in it.
        device: of the call.
    """
    default = _output(call, set(ops), device)
    wrong = []
    for op in ops:
        try:
            tuned = _output(call, set(ops) - {op}, device)
        except Exception:  # noqa: BLE001  a kernel may refuse in any way
            wrong.append(op)
        else:
            if not agree(tuned, default):
                wrong.append(op)
    return tuple(wrong)


def _output(call: Callable[[], Any], at_default: set[str], device: torch.device) -> Any:
    with autotuner.autotune(False, skip_ops=at_default):
        output = call()
    synchronize(device)
    return output


def agree(one: Any, other: Any) -> bool:
    """Whether two outputs are the same up to what their element type can hold; tensors, or sequences of them."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _tensors_agree(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(agree(*pair) for pair in zip(one, other, strict=True))
    return True


def _tensors_agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    if one.numel() == 0:
        return True
    ours, theirs = one.double(), other.double()
    is_finite = ours.isfinite()
    # Where one is NaN or infinite the other must be the same.
    if not torch.equal(ours[~is_finite].nan_to_num(7.0), theirs[~is_finite].nan_to_num(7.0)):
        return False
    if not torch.equal(is_finite, theirs.isfinite()):
        return False
    difference = torch.where(is_finite, ours - theirs, 0).abs().max()
    largest = torch.where(is_finite, theirs, 0).abs().max()
    return bool(difference <= _TOLERANCES.get(one.dtype, _COARSE) * largest)
