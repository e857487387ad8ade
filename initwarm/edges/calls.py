"""Recipes: a unit of a plan becomes a call of FlashInfer on made-up tensors.

Normally distributed numbers: kernels may be faster on zeros, and where all numbers are near one mean, a kernel that
reads the wrong ones gives nearly the right sums. The seed is the call's and the argument's, so that every rank and
every replay has the same numbers. Only the tensors that the plan declares are allocated.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from initwarm.edges.plans import ENTRY_POINTS
from initwarm.errors import PlanError, TuningError, UnavailableError
from initwarm.plan import TensorSpec, Unit
from initwarm.signatures import CALLS, COLUMN_MAJOR

Recipe = Callable[[Unit, torch.device], Callable[[], Any]]

#: Where a call's function lives when that is not where its name says.
_FUNCTIONS = {
    "initwarm.host_matmul": "initwarm.edges.hostops.host_matmul",
    "initwarm.host_softmax": "initwarm.edges.hostops.host_softmax",
}


#: Numbers that are made at once where torch cannot make them in the tensor's own type.
_CHUNK = 1 << 22


def prepare(unit: Unit, device: torch.device) -> Callable[[], Any]:
    """Allocate a unit's tensors and return the call, ready to be made.

    Raises:
        UnavailableError: this FlashInfer has no such function.
        TuningError: the device lacks the memory.
        PlanError: no installed package brings this call, or it refuses the arguments.
    """
    recipe = _from_signature if unit.call.call in CALLS else _recipe(unit.call.call)
    try:
        return recipe(unit, device)
    except (torch.cuda.OutOfMemoryError, MemoryError) as problem:
        raise TuningError(
            f"{unit.name} needs {unit.num_bytes / 2**30:.2f} GiB for its inputs, and {device} has no room: {problem}.",
            "Nothing was tuned.",
            "Use smaller buckets, or free the device.",
        ) from problem


def _recipe(name: str) -> Recipe:
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name == name:
            try:
                recipe: Recipe = point.load()
            except Exception as problem:
                raise UnavailableError(
                    f"The call {name} cannot be imported from {point.value}: {type(problem).__name__}: {problem}.",
                    "Nothing was tuned.",
                    "Correct the package that brings it.",
                ) from problem
            return recipe
    raise PlanError(
        f"No installed package brings the call {name}.",
        "Nothing was tuned.",
        f"Install the package that has it as an entry point of {ENTRY_POINTS} in this image.",
    )


def _from_signature(unit: Unit, device: torch.device) -> Callable[[], Any]:
    name = unit.call.call
    function = _function(_FUNCTIONS.get(name, name))
    signature = CALLS[name]
    arguments: dict[str, Any] = {
        argument: make_tensor(tensor, unit.bucket, device, seed=unit.index * 31 + position)
        for position, (argument, tensor) in enumerate(unit.call.tensors.items())
    }
    for argument, value in unit.call.scalars.items():
        arguments[argument] = getattr(torch, str(value)) if signature.scalars[argument].is_dtype else value
    return lambda: function(**arguments)


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(".")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise UnavailableError(
            f"This FlashInfer has no {name}: {problem}.",
            "Nothing was tuned.",
            "Use a FlashInfer that has it, or change the plan.",
        ) from problem
    return function


def make_tensor(spec: TensorSpec, num_tokens: int, device: torch.device, seed: int) -> torch.Tensor:
    """A tensor of this specification: a scale near one if it has one element, otherwise random.

    Args:
        spec: its type, shape and layout.
        num_tokens: what `M` stands for.
        device: where it lives.
        seed: of the numbers.

    Shapes:
        returned: `spec.sizes(num_tokens)`, of `spec.dtype`, on the device, in the layout of the specification.
    """
    sizes = list(spec.sizes(num_tokens))
    if spec.layout == COLUMN_MAJOR:
        sizes[-1], sizes[-2] = sizes[-2], sizes[-1]
    tensor = torch.empty(sizes, dtype=getattr(torch, spec.dtype), device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    if not tensor.is_floating_point():
        tensor.random_(1, 100, generator=generator)
    elif tensor.numel() == 1:
        tensor.fill_(0.5 + torch.rand((), generator=generator, device=device).item())
    elif tensor.dtype.itemsize > 1:
        tensor.normal_(generator=generator)
    else:
        for chunk in tensor.view(-1).split(_CHUNK):
            chunk.copy_(torch.randn(chunk.shape, generator=generator, device=device, dtype=torch.float16))
    return tensor.transpose(-1, -2) if spec.layout == COLUMN_MAJOR else tensor
