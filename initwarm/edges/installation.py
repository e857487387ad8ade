"""The installed FlashInfer: imported with a sentence where that fails, asked what it is and offers, and kept quiet.

Every module that imports FlashInfer at its top imports this one first.

Source:
    FlashInfer 0.6.18.post1, 0.7.2.post1 and 0.7.4: autotuner/autotuner.py (_collect_metadata), jit/core.py (logger).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import tqdm

from initwarm.errors import UnavailableError


@contextlib.contextmanager
def _answers_without_a_driver() -> Iterator[None]:
    """A CPU build of torch raises AssertionError where FlashInfer 0.6.14 to 0.7.0 expect a driver's RuntimeError."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError("torch was built without CUDA")

    stock = torch.cuda.get_device_properties
    if torch.version.cuda is None:
        torch.cuda.get_device_properties = refuse
    try:
        yield
    finally:
        torch.cuda.get_device_properties = stock


def import_flashinfer() -> Any:
    """FlashInfer's package.

    Raises:
        UnavailableError: it cannot be imported, for whatever reason.
    """
    try:
        with _answers_without_a_driver(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of FlashInfer's own dependencies, on stderr
            package = importlib.import_module("flashinfer")
            importlib.import_module("flashinfer.autotuner")
    except Exception as problem:
        raise UnavailableError(
            f"FlashInfer cannot be imported here: {type(problem).__name__}: {problem}.",
            "Nothing was tuned.",
            "Run in the serving image. If the error names cuda or cuda-bindings, install cuda-python of the major "
            "version that torch was built for.",
        ) from problem
    return package


flashinfer = import_flashinfer()
autotuner = flashinfer.autotuner


@dataclass(frozen=True)
class Features:
    """What this FlashInfer offers, found by looking and not by its version where that is possible.

    Args:
        flashinfer_version: as it states it.
        has_store: the v2 store.
        has_process_group: timings can be averaged over a group.
        rank_free_moe: no rank is part of the cache keys of its fused MoE.
    """

    flashinfer_version: str
    has_store: bool
    has_process_group: bool
    rank_free_moe: bool


def features() -> Features:
    """What the installed FlashInfer offers."""
    version = str(flashinfer.__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return Features(
        flashinfer_version=version,
        has_store=hasattr(flashinfer, "autotune_v2") and hasattr(flashinfer, "autotune_v2_reload"),
        has_process_group=hasattr(autotuner, "set_autotune_process_group"),
        # Building the CUTLASS module to look would need a compiler. Source: FlashInfer pull request 6082.
        rank_free_moe=numbers >= (0, 7, 2),
    )


def collect_metadata(device: torch.device) -> dict[str, str]:
    """FlashInfer's own environment metadata, as it will see it on this device."""
    with on_device(device):
        return {str(key): str(value) for key, value in autotuner._collect_metadata().items()}  # noqa: SLF001


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """FlashInfer measures on the current device, and names it in the metadata."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for what was launched, so that an error of a kernel is raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quiet() -> None:
    """Keep FlashInfer's progress bars and log lines off stderr, which carries events; its log file goes on."""
    # The logger of flashinfer.jit.core is no child of any other: it is made by hand.
    for logger in (importlib.import_module("flashinfer.jit.core").logger, logging.getLogger("flashinfer")):
        logger.handlers = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    if not isinstance(tqdm.tqdm.__init__, functools.partialmethod):
        tqdm.tqdm.__init__ = functools.partialmethod(tqdm.tqdm.__init__, disable=True)  # type: ignore[assignment]
