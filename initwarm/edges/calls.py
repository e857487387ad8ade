"""Recipes: a unit of a plan becomes a call of FlashInfer on made-up tensors.

Random data and never zeros, since kernels may be faster on zeros; one seed per call, so that every rank and every
replay sees the same numbers. Only the tensors that the plan declares are allocated.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from initwarm.edges.plans import ENTRY_POINTS
from initwarm.errors import PlanError, UnavailableError
from initwarm.plan import TensorSpec, Unit
from initwarm.signatures import CALLS, COLUMN_MAJOR

Recipe = Callable[[Unit, torch.device], Callable[[], Any]]

#: Where a call's function lives when that is not where its name says.
_FUNCTIONS = {
    "initwarm.host_matmul": "initwarm.edges.hostops.host_matmul",
    "initwarm.host_softmax": "initwarm.edges.hostops.host_softmax",
}


def prepare(unit: Unit, device: torch.device) -> Callable[[], Any]:
    """Allocate a unit's tensors and return the call, ready to be made.

    Raises:
        UnavailableError: this FlashInfer has no such function, or the device lacks the memory.
        PlanError: no installed package brings this call.
    """
    if unit.call.call in CALLS:
        return _from_signature(unit, device)
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name == unit.call.call:
            recipe: Recipe = point.load()
            return recipe(unit, device)
    raise PlanError(
        f"No installed package brings the call {unit.call.call}.",
        "Nothing was tuned.",
        f"Install the package that has it as an entry point of {ENTRY_POINTS} in this image.",
    )


def _from_signature(unit: Unit, device: torch.device) -> Callable[[], Any]:
    function = _function(_FUNCTIONS.get(unit.call.call, unit.call.call))
    signature = CALLS[unit.call.call]
    arguments: dict[str, Any] = {
        name: make_tensor(tensor, unit.bucket, device, seed=unit.index * 31 + position)
        for position, (name, tensor) in enumerate(unit.call.tensors.items())
    }
    for name, value in unit.call.scalars.items():
        arguments[name] = getattr(torch, str(value)) if signature.scalars[name].is_dtype else value
    return lambda: function(**arguments)


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(".")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise UnavailableError(
            f"This FlashInfer has no {name}: {problem}.", "Nothing was tuned.", "Use a FlashInfer that has it, or change the plan."
        ) from problem
    return function


def make_tensor(spec: TensorSpec, num_tokens: int, device: torch.device, seed: int) -> torch.Tensor:
    """A tensor of this specification, filled with numbers of the size that activations and weights have.

    Shapes:
        returned: `spec.sizes(num_tokens)`, of `spec.dtype`, on the device, in the layout of the specification.
    """
    sizes = list(spec.sizes(num_tokens))
    if spec.layout == COLUMN_MAJOR:
        sizes[-1], sizes[-2] = sizes[-2], sizes[-1]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    if dtype.is_floating_point:
        # Of unit variance after a product over the last dimension; a scale has no dimension and stays near one.
        scale = 1 / math.sqrt(sizes[-1]) if sizes and sizes[-1] > 1 else 1.0
        half = torch.float16 if dtype.itemsize == 1 else dtype
        tensor = (torch.rand(sizes, generator=generator, device=device, dtype=half) + 0.5) * scale
        tensor = tensor.to(dtype)
    else:
        tensor = torch.randint(0, 100, sizes, generator=generator, device=device, dtype=dtype)
    return tensor.transpose(-1, -2) if spec.layout == COLUMN_MAJOR else tensor
