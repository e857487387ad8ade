"""A volume that fails as network file systems do: a library to be preloaded, told by the environment, and its log."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("volume_faults.c")


@dataclass(frozen=True)
class VolumeFaults:
    """The library, and the log of one test."""

    library: Path
    log: Path

    def environment(self, root: Path, faults: Sequence[str] = (), late: Path | None = None) -> dict[str, str]:
        """For a process that meets these faults below the root.

        Args:
            root: what is outside it is left alone.
            faults: `function:pattern:errno:count` each; see the source.
            late: until this file exists, a name that was looked up before it existed stays unknown.
        """
        return {
            "LD_PRELOAD": str(self.library),
            "VOLUME_ROOT": str(root),
            "VOLUME_FAULTS": ",".join(faults),
            "VOLUME_LOG": str(self.log),
            **({} if late is None else {"VOLUME_LATE": str(late)}),
        }

    def lines(self, what: str) -> list[str]:
        """What was logged under this word: `fault`, `absent` or `asked`."""
        logged = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(f"{what} ") for line in logged if line.startswith(f"{what} ")]


def compile_library(directory: Path) -> Path:
    """The library, built in a directory; skips where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the library that is preloaded")
    library = directory / "volume_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", library, _SOURCE, "-ldl"], check=True)
    return library
