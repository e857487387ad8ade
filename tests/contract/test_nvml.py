"""The survey of GPUs against a real shared library that is loaded in the place of NVML, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from initwarm.edges.gpus import GpuSurvey

SURVEY = """
import dataclasses, json, os
from initwarm.edges.gpus import visible_gpus
print(json.dumps(dataclasses.astuple(visible_gpus(os.environ))))
"""
TORCH_COUNTS = """
import json, os, sys
import torch
from initwarm.edges.gpus import visible_gpus
counts = []
for value in json.loads(sys.argv[1]):
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    counts.append([value, torch.cuda._device_count_nvml(), visible_gpus(os.environ).count])
print(json.dumps(counts))
"""
TWO_H200 = "GPU-aaaa0000:9:0:0;GPU-aabb1111:9:0:0"


def survey(directory: Path, **environ: str) -> GpuSurvey:
    output = run_python(SURVEY, LD_LIBRARY_PATH=str(directory), **environ)
    count, capabilities, problem = json.loads(output)
    return GpuSurvey(count, tuple((major, minor) for major, minor in capabilities), problem)


def run_python(code: str, *arguments: str, **environ: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env={**os.environ, **environ}, check=True, capture_output=True, text=True)
    return done.stdout


def test_all_gpus_are_visible_when_nothing_hides_them(nvml_directory: Path) -> None:
    assert survey(nvml_directory, NVML_DEVICES=TWO_H200) == GpuSurvey(2, ((9, 0), (9, 0)), None)


def test_capabilities_come_in_the_order_of_cuda_visible_devices(nvml_directory: Path) -> None:
    mixed = "GPU-aaaa:8:9:-;GPU-bbbb:10:0:-"

    found = survey(nvml_directory, NVML_DEVICES=mixed, CUDA_VISIBLE_DEVICES="GPU-bbbb,GPU-aaaa")

    assert found == GpuSurvey(2, ((10, 0), (8, 9)), None)


def test_an_index_among_gpus_of_several_kinds_leaves_the_capability_open(nvml_directory: Path) -> None:
    mixed = "GPU-aaaa:8:9:-;GPU-bbbb:10:0:-"

    by_speed = survey(nvml_directory, NVML_DEVICES=mixed, CUDA_VISIBLE_DEVICES="0")
    by_bus = survey(nvml_directory, NVML_DEVICES=mixed, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID")

    assert (by_speed.count, by_speed.capabilities) == (1, ())
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(by_speed.problem)
    assert by_bus == GpuSurvey(1, ((8, 9),), None)


def test_hidden_gpus_are_none_and_the_variable_is_named(nvml_directory: Path) -> None:
    found = survey(nvml_directory, NVML_DEVICES=TWO_H200, CUDA_VISIBLE_DEVICES="")

    assert (found.count, found.capabilities) == (0, ())
    assert "CUDA_VISIBLE_DEVICES='' hides all of the 2 GPUs" in str(found.problem)


def test_r101_a_machine_without_nvml_has_no_gpu_and_the_message_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")

    found = survey(tmp_path)

    assert found.count == 0
    assert "NVIDIA_VISIBLE_DEVICES" in str(found.problem)
    assert "CDI" in str(found.problem)


def test_a_library_without_a_driver_is_no_gpu(nvml_directory: Path) -> None:
    found = survey(nvml_directory, NVML_DEVICES=TWO_H200, NVML_FAILS="nvmlInit_v2=9")

    assert found.count == 0
    assert "No NVIDIA driver is loaded" in str(found.problem)


@pytest.mark.parametrize(
    "function",
    [
        "nvmlInit_v2",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMigMode",
    ],
)
def test_r103_what_nvml_denies_is_unknown_and_not_defaulted(nvml_directory: Path, function: str) -> None:
    found = survey(nvml_directory, NVML_DEVICES=TWO_H200, NVML_FAILS=f"{function}=4")

    assert (found.count, found.capabilities) == (None, ())
    assert f"{function} answered 'Insufficient Permissions' (code 4)" in str(found.problem)


def test_a_named_mig_device_is_one_gpu_of_its_parents_kind(nvml_directory: Path) -> None:
    environ = {"NVML_DEVICES": TWO_H200, "CUDA_VISIBLE_DEVICES": "MIG-GPU-aabb1111,MIG-GPU-aaaa0000"}

    assert survey(nvml_directory, **environ) == GpuSurvey(1, ((9, 0),), None)


def test_an_unknown_mig_device_is_no_gpu(nvml_directory: Path) -> None:
    found = survey(nvml_directory, NVML_DEVICES=TWO_H200, CUDA_VISIBLE_DEVICES="MIG-nowhere")

    assert found.count == 0
    assert "there is no such MIG device" in str(found.problem)


def test_a_partitioned_gpu_counts_by_its_partitions_never_as_itself(nvml_directory: Path) -> None:
    with_partition = survey(nvml_directory, NVML_DEVICES="GPU-aaaa:9:0:1.2")
    without = survey(nvml_directory, NVML_DEVICES="GPU-aaaa:9:0:1.0")
    beside_others = survey(nvml_directory, NVML_DEVICES="GPU-aaaa:9:0:0;GPU-bbbb:9:0:1.2")

    assert with_partition == GpuSurvey(1, ((9, 0),), None)
    assert (without.count, beside_others.count) == (0, None)
    assert "CUDA_VISIBLE_DEVICES" in str(beside_others.problem)


def test_the_count_is_the_one_that_torch_finds(nvml_directory: Path) -> None:
    pytest.importorskip("torch", reason="needs torch to compare with")
    values = ["", "-1", "0", "1,0", "0,7,1", "0,0", "0,-1,1", "0,,1", " 1 ", "+1", "1gpu2,2ampere", "NoDevFiles"]
    values += ["GPU-aaaa", "GPU-aa", "GPU-aabb,GPU-aaaa", "GPU-aaaa,GPU-x,GPU-aabb", "GPU-aaaa,GPU-aaaa0", "GPU-aaaa,1"]
    values += ["GPU-aaaa,GPU-x,GPU-x", "9,9", "0,9,9", "gpu-aaaa"]

    output = run_python(TORCH_COUNTS, json.dumps(values), LD_LIBRARY_PATH=str(nvml_directory), NVML_DEVICES=TWO_H200)

    for value, torch_count, our_count in json.loads(output):
        assert our_count == torch_count, value
