from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from initwarm.edges.gpus import arch_list

CAPABILITIES = [
    [(9, 0)],
    [(8, 9)],
    [(10, 0)],
    [(10, 3)],
    [(11, 0)],
    [(12, 0)],
    [(12, 1)],
    [(9, 0), (9, 0)],
    [(10, 0), (9, 0)],
    [(7, 5), (8, 0), (9, 0), (12, 0)],
]
# One import of FlashInfer for all sets: the workspace is computed anew by the function that the import itself uses.
WORKSPACES = """
import json, os, sys
first, *rest = json.loads(sys.argv[1])
os.environ["FLASHINFER_CUDA_ARCH_LIST"] = first[1]
import torch
from flashinfer.jit import cpp_ext, env
from flashinfer.compilation_context import CompilationContext
results = [["imported", str(env.FLASHINFER_WORKSPACE_DIR), str(env._get_workspace_dir_name())]]
for capabilities, arch_list in [first, *rest]:
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch_list
    ours = str(env._get_workspace_dir_name())
    del os.environ["FLASHINFER_CUDA_ARCH_LIST"]
    torch.cuda.device_count = lambda: len(capabilities)
    torch.cuda.get_device_capability = lambda device: tuple(capabilities[device])
    results.append([arch_list, str(env._get_workspace_dir_name()), ours])
cpp_ext.get_cuda_version = lambda: cpp_ext.Version("12.7")
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda device: (12, 1)
CompilationContext()
os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "12.1"
try:
    CompilationContext()
    refused = ""
except RuntimeError as error:
    refused = str(error)
print(json.dumps([results, refused]))
"""


def test_the_arch_list_leads_flashinfer_to_the_workspace_that_it_would_choose_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer.version", reason="needs FlashInfer to compare with")
    cases = [(capabilities, arch_list(capabilities, (13, 0))) for capabilities in CAPABILITIES]
    environ = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}

    command = [sys.executable, "-c", WORKSPACES, json.dumps(cases)]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    results, refused = json.loads(done.stdout.splitlines()[-1])

    for given, theirs, ours in results:
        assert ours == theirs, given
    assert {Path(ours).name for _, _, ours in results} >= {"90a", "89", "100a", "90a_100a"}
    # Why there is no list for 12.x unless the toolkit is known: FlashInfer would not be imported at all.
    assert "requires CUDA" in refused
