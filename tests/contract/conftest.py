from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def nvml_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for LD_LIBRARY_PATH with a libnvidia-ml.so.1 that answers as the environment tells it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the stand-in of NVML")
    directory = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stand_in.c")
    target = directory / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", target, source], check=True)
    return directory
