"""What holds for all tests: the caller's environment stays outside, and a GPU is used only where there is one."""

from __future__ import annotations

import os

import pytest

from initwarm.edges.gpus import visible_gpus

_LEAKING_PREFIXES = (
    "INITWARM_", "FLASHINFER_", "LWS_", "PET_", "GROVE_", "JOB_COMPLETION_", "JOBSET_", "VC_", "VK_", "RAY_",
    "KUBERAY_", "GLOO_", "NCCL_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "KUBERNETES_",
)  # fmt: skip
_LEAKING_NAMES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "NNODES",
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "POD_NAME", "POD_INDEX",
)  # fmt: skip
_GPU_SURVEY = visible_gpus(os.environ)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No rank, size or setting of the shell that runs the tests reaches them, nor the processes that they start."""
    keeps_gpus = request.node.get_closest_marker("gpu") is not None
    for name in list(os.environ):
        is_kept = keeps_gpus and name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
        if not is_kept and (name in _LEAKING_NAMES or name.startswith(_LEAKING_PREFIXES)):
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where no GPU is visible."""
    if _GPU_SURVEY.count:
        return
    skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU: {_GPU_SURVEY.problem or 'none is visible'}")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
