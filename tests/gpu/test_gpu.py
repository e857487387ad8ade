"""`initwarm run` on a real GPU, and a bare FlashInfer that reads what it left. One GPU suffices, of Hopper or newer.

Small shapes, since it is the path that is tested and not the speed. FlashInfer compiles each kernel library once, in
its usual workspace, which takes most of the time of a first run.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from initwarm.edges.gpus import arch_list, visible_gpus
from initwarm.entries import parse_v1

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
DEPTH, WIDTH, MAX_TOKENS = 512, 256, 32
NUM_BUCKETS = 6


def fp8(backend: str) -> dict[str, Any]:
    return {
        "call": "flashinfer.bmm_fp8",
        "buckets": {"max": MAX_TOKENS},
        "args": {
            "A": {"dtype": "float8_e4m3fn", "shape": [1, "M", DEPTH]},
            "B": {"dtype": "float8_e4m3fn", "shape": [1, DEPTH, WIDTH], "layout": "column_major"},
            "A_scale": {"dtype": "float32", "shape": [1]},
            "B_scale": {"dtype": "float32", "shape": [1]},
            "dtype": "bfloat16",
            "backend": backend,
        },
    }


def bf16(backend: str) -> dict[str, Any]:
    return {
        "call": "flashinfer.mm_bf16",
        "buckets": {"max": MAX_TOKENS},
        "args": {
            "a": {"dtype": "bfloat16", "shape": ["M", DEPTH]},
            "b": {"dtype": "bfloat16", "shape": [DEPTH, WIDTH], "layout": "column_major"},
            "backend": backend,
        },
    }


#: What compute capability 9.0 can run.
CALLS = {
    "bmm_fp8-cublas": fp8("cublas"),
    "bmm_fp8-cudnn": fp8("cudnn"),
    "mm_bf16-cublaslt": bf16("cublaslt"),
    "mm_bf16-cudnn": bf16("cudnn"),
}

# A server's two ways to a file: it makes its warm-up pass in tuning mode, and it serves. The first must measure
# nothing, the second must find a winner. The tuner is FlashInfer's own; only its questions are counted.
SERVE = f"""
import json, sys
import flashinfer, torch
from flashinfer.autotuner import AutoTuner, autotune
path, call, backend = sys.argv[1:]
measured, found = [], []
profile, search = AutoTuner._profile_single_kernel, AutoTuner.search_cache
def counted(self, *args, **kwargs):
    measured.append(1)
    return profile(self, *args, **kwargs)
def watched(self, *args, **kwargs):
    answer = search(self, *args, **kwargs)
    found.append(bool(answer[0]))
    return answer
AutoTuner._profile_single_kernel, AutoTuner.search_cache = counted, watched
loaded = AutoTuner.get().load_configs(path)
def request(num_tokens):
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    if call.endswith("mm_bf16"):
        return flashinfer.mm_bf16(make(num_tokens, {DEPTH}), make({WIDTH}, {DEPTH}).t(), backend=backend)
    a, b = make(1, num_tokens, {DEPTH}), make(1, {WIDTH}, {DEPTH})
    a, b = (one.to(torch.float8_e4m3fn) for one in (a, b))
    scale = torch.ones(1, device="cuda")
    return flashinfer.bmm_fp8(a, b.transpose(-1, -2), scale, scale, torch.bfloat16, backend=backend)
for bucket in (1, 2, 4, 8, 16, {MAX_TOKENS}):
    with autotune(True, tuning_buckets=(bucket,), round_up=True):
        request(bucket)
for num_tokens in (1, 3, 7, 16, 31, {MAX_TOKENS}):
    assert torch.isfinite(request(num_tokens).float()).all()
torch.cuda.synchronize()
print(json.dumps([loaded, len(measured), found]))
"""


@dataclass(frozen=True)
class Run:
    """A finished `initwarm run`: what it reported, its events, and which files its processes had open meanwhile."""

    report: dict[str, Any]
    events: list[dict[str, Any]]
    open_in_fork_server: set[str]
    open_elsewhere: set[str]

    def printed(self) -> str:
        lines = [one["message"] for one in self.events if one["event"] == "initwarm.process.printed"]
        return "\n".join(lines)


def run(directory: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Run:
    log, report = directory / "log", directory / "report"
    command = [
        sys.executable, "-m", "initwarm", "run", "--cache-root", str(directory / "cache"), "--engine-root",
        str(directory / "engine"), "--report", str(report), "--termination-message", str(directory / "message"),
        "--log-format", "json", "--deadline", "390", "--group", "gpu", *flags,
    ]  # fmt: skip
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stream, env={**os.environ, **(environ or {})})
        in_fork_server, elsewhere = watch(process)
    assert process.returncode == 0, log.read_text()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return Run(json.loads(report.read_text()), events, in_fork_server, elsewhere)


def watch(agent: "subprocess.Popen[bytes]") -> tuple[set[str], set[str]]:
    """Follow a run to its end; returns the device files that its fork server had open, and those of all its others."""
    pause = threading.Event()
    in_fork_server: set[str] = set()
    elsewhere: set[str] = set()
    while agent.poll() is None:
        parents = dict(processes())
        servers = [pid for pid, parent in parents.items() if parent == agent.pid and is_fork_server(pid)]
        for pid in servers:
            in_fork_server |= device_files(pid)
            for child, parent in parents.items():
                if parent == pid:
                    elsewhere |= device_files(child)
        pause.wait(0.1)
    return in_fork_server, elsewhere


def processes() -> Iterator[tuple[int, int]]:
    """Process ids with their parents'."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def is_fork_server(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def device_files(pid: int) -> set[str]:
    """The NVIDIA device files that a process has open; CUDA opens several for each context."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("/dev/nvidia"):
                    found.add(target)
    return found


def plan_file(directory: Path, *calls: dict[str, Any]) -> list[str]:
    path = directory / "plan.json"
    path.write_text(json.dumps({"version": 1, "device": "cuda", "calls": calls}))
    return ["--plan", str(path)]


def python(source: str, *arguments: str, without: tuple[str, ...] = (), **environ: str) -> str:
    """What a process of its own prints last."""
    kept = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT,
        env={**kept, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", CALLS)
def test_r2_r126_a_cold_start_tunes_the_next_measures_nothing_and_flashinfer_hits(name: str, tmp_path: Path) -> None:
    call = CALLS[name]
    flags = plan_file(tmp_path, call)

    cold = run(tmp_path, *flags).report
    warm = run(tmp_path, *flags).report

    assert (cold["outcome"], cold["tuned"], cold["missed"]) == ("warm", NUM_BUCKETS, 0), cold
    assert (warm["outcome"], warm["tuned"], warm["missed"]) == ("warm", 0, 0), warm
    assert warm["bundle"] == cold["bundle"]
    assert warm["replayed"] >= NUM_BUCKETS
    (file,) = (tmp_path / "engine" / "flashinfer-v1").iterdir()
    v1 = parse_v1(file.read_bytes())
    assert len(v1.entries) == NUM_BUCKETS
    assert v1.metadata["gpu"] not in ("", "unknown")
    loaded, measured, found = json.loads(python(SERVE, str(file), call["call"], call["args"]["backend"]))
    assert loaded is True
    assert measured == 0
    assert len(found) >= 2 * NUM_BUCKETS
    assert all(found)


def test_r24_the_winners_compute_what_the_default_tactic_does(tmp_path: Path) -> None:
    flags = plan_file(tmp_path, CALLS["bmm_fp8-cublas"], CALLS["mm_bf16-cublaslt"])

    report = run(tmp_path, *flags, "--check-outputs").report

    assert (report["outcome"], report["tuned"]) == ("warm", 2 * NUM_BUCKETS), report


def test_the_host_plan_is_warm_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    flags = ["--plan", "host", "--nproc-per-node", "2"]

    cold = run(tmp_path, *flags).report
    warm = run(tmp_path, *flags).report

    assert (cold["outcome"], cold["tuned"] > 0) == ("warm", True), cold
    assert (warm["outcome"], warm["tuned"], warm["bundle"]) == ("warm", 0, cold["bundle"]), warm


def test_the_barrier_of_a_gpu_plan_is_nccl_s(tmp_path: Path) -> None:
    flags = plan_file(tmp_path, CALLS["mm_bf16-cublaslt"])

    nccl = run(tmp_path, *flags, environ={"NCCL_DEBUG": "INFO"})
    gloo = run(tmp_path, "--plan", "host", "--nproc-per-node", "1", environ={"NCCL_DEBUG": "INFO"})

    assert nccl.report["world_size"] == 1
    assert [event["backend"] for event in nccl.events if event["event"] == "initwarm.barrier.passed"] == ["nccl"]
    assert "NCCL INFO" in nccl.printed()
    assert "NCCL INFO" not in gloo.printed()


def test_the_fork_server_holds_no_gpu_while_its_workers_do(tmp_path: Path) -> None:
    done = run(tmp_path, *plan_file(tmp_path, CALLS["mm_bf16-cublaslt"]))

    (started,) = (event for event in done.events if event["event"] == "initwarm.coordinator.started")
    assert started["inherited"] == ["torch", "flashinfer"]
    assert done.open_in_fork_server == set()
    # Otherwise the line above would hold because nothing was seen at all.
    assert done.open_elsewhere


def test_the_arch_list_that_is_set_leads_to_the_workspace_of_this_machine() -> None:
    source = "from flashinfer.jit import env; print(env.FLASHINFER_WORKSPACE_DIR)"
    listed = arch_list(visible_gpus(os.environ).capabilities, (13, 0))
    assert listed is not None

    bare = python(source, without=("FLASHINFER_CUDA_ARCH_LIST",))
    told = python(source, FLASHINFER_CUDA_ARCH_LIST=listed)

    assert told == bare


def test_a_plan_for_a_gpu_that_is_hidden_ends_and_never_uses_the_cpu(tmp_path: Path) -> None:
    log = subprocess.run(
        [
            sys.executable, "-m", "initwarm", "run", "--cache-root", str(tmp_path / "cache"), "--on-tuning-failure",
            "fail", *plan_file(tmp_path, CALLS["bmm_fp8-cublas"]),
        ],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip

    assert log.returncode == 69, log.stderr
    assert "CUDA_VISIBLE_DEVICES='' hides all of the" in log.stderr
