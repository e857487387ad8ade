"""Bad input to `run`: one clear message, the right exit code, no traceback, nothing lost and nothing left visible."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.groups import Group
from tests.support.pods import ROOT, Pod, PodServer


def refused(pod: Pod, code: int, *texts: str) -> None:
    assert pod.wait() == code, pod.log
    for text in texts:
        assert text in pod.message["reason"], pod.message["reason"]
    assert pod.message["outcome"] == "failed"
    assert "Traceback" not in pod.log
    assert pod.processes() == []


def softmax(dtype: str = "float32", size: int = 4, bucket: int = 1) -> str:
    call = {"call": "initwarm.host_softmax", "buckets": [bucket], "args": {"x": {"dtype": dtype, "shape": ["M", size]}}}
    return json.dumps({"version": 1, "device": "cpu", "calls": [call]})


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        pytest.param("", ["The document"], id="empty"),
        pytest.param("{", ["is neither YAML", "nor JSON"], id="cut"),
        pytest.param(
            softmax().replace("softmax", "softmix"), ["calls[0].call", "softmix", "softmax"], id="unknown call"
        ),
        pytest.param(softmax(dtype="float64"), ["dtype", "float64", "float32"], id="wrong dtype"),
        pytest.param(softmax(size=-4), ["shape[1]", "-4"], id="negative shape"),
        pytest.param(softmax(bucket=0), ["buckets", "0"], id="bucket 0"),
        pytest.param("[" * 5000, ["deep"], id="deep"),
    ],
)
def test_an_invalid_plan_is_refused_with_its_place(
    pod_server: PodServer, tmp_path: Path, content: str, texts: list[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(content)

    (pod,) = Group(pod_server, tmp_path).run("--plan", str(plan))

    refused(pod, 78, *texts)


@pytest.mark.parametrize("flags", [["--plan", "/nowhere.yaml"], ["--deadline", "soon"], ["--node-rank", "7"]])
def test_a_refused_run_leaves_nothing_of_the_last_life(pod_server: PodServer, tmp_path: Path, flags: list[str]) -> None:
    group = Group(pod_server, tmp_path)
    group.assert_warm(group.run(), tuned=True)

    (pod,) = group.run(*flags)

    refused(pod, 78)
    assert group.files(0) == {}


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        ({"INITWARM_DEADLINE": "soon"}, ["INITWARM_DEADLINE is 'soon'", "number of seconds"]),
        ({"INITWARM_DEADLINE": "nan"}, ["INITWARM_DEADLINE is 'nan'"]),
        ({"INITWARM_STRATEGY": "fast"}, ["INITWARM_STRATEGY is 'fast'", "auto, leader"]),
        ({"INITWARM_CHECK_OUTPUTS": "maybe"}, ["INITWARM_CHECK_OUTPUTS is 'maybe'"]),
        ({"INITWARM_DISABLE": "maybe"}, ["INITWARM_DISABLE is 'maybe'"]),
        ({"INITWARM_NNODES": "None"}, ["None"]),
        ({"INITWARM_CACHE_KEY_FILE": "/nowhere"}, ["/nowhere cannot be read"]),
        ({"INITWARM_INTERFACE": "eth99"}, ["eth99"]),
    ],
)
def test_an_invalid_setting_reaches_the_termination_message(
    pod_server: PodServer, tmp_path: Path, environ: dict[str, str], texts: list[str]
) -> None:
    pod = pod_server.start(tmp_path, "pod", ["run", "--cache-root", str(tmp_path / "cache")], environ)

    refused(pod, 78, *texts)


def test_a_plan_that_is_not_there_is_refused(pod_server: PodServer, tmp_path: Path) -> None:
    (pod,) = Group(pod_server, tmp_path).run("--plan", str(tmp_path / "nowhere.yaml"))

    refused(pod, 78, "nowhere.yaml' cannot be read: No such file or directory", "No plan was loaded.")


def test_r101_a_gpu_plan_without_a_gpu_never_runs_on_the_cpu(pod_server: PodServer, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "device": "cuda", "calls": []}')

    (pod,) = Group(pod_server, tmp_path).run("--plan", str(plan), "--on-tuning-failure", "fail")

    refused(pod, 69, "this container sees none", "a CPU is never used instead", "nvidia.com/gpu")


def test_r101_by_default_a_gpu_plan_without_a_gpu_is_a_loud_cold_start(pod_server: PodServer, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "device": "cuda", "calls": []}')

    (pod,) = Group(pod_server, tmp_path).run("--plan", str(plan))

    assert (pod.status, pod.message["outcome"]) == (0, "cold")
    assert "this container sees none" in pod.message["reason"]


def test_r96_a_plan_for_more_ranks_than_the_group_has_is_refused(pod_server: PodServer, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "device": "cpu", "parallel": {"tp": 2}, "calls": []}')

    (pod,) = Group(pod_server, tmp_path).run("--plan", str(plan))

    refused(pod, 78, "2 ranks", "Nothing was tuned")


def test_a_cache_root_that_is_a_file_is_refused(pod_server: PodServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("precious")

    (pod,) = Group(pod_server, tmp_path).run("--on-tuning-failure", "fail")

    refused(pod, 74, str(tmp_path / "cache"))
    assert (tmp_path / "cache").read_text() == "precious"


def test_a_volume_that_cannot_be_written_is_said_before_the_work(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path)
    group.cache_root(0).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "none", str(group.cache_root(0))], check=True)
    try:
        (pod,) = group.run("--on-tuning-failure", "fail")
    finally:
        subprocess.run(["umount", str(group.cache_root(0))], check=True)

    refused(pod, 74, "read-only")
    assert not any(event["message"] == "tune" for event in pod.events("initwarm.step.announced"))


def test_a_read_only_volume_is_still_adopted_from(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 2)
    first = group.assert_warm(group.run(), tuned=True)
    root = str(group.cache_root(0))
    subprocess.run(["mount", "--bind", root, root], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", root], check=True)
    try:
        second = group.assert_warm(group.run(), tuned=False)
    finally:
        subprocess.run(["umount", root], check=True)

    assert first == second


def test_a_full_volume_is_a_cold_start_that_says_so(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path)
    group.cache_root(0).mkdir()
    # Room for the marks of a cache, and none for a bundle.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "none", str(group.cache_root(0))], check=True)
    try:
        (pod,) = group.run()
    finally:
        subprocess.run(["umount", str(group.cache_root(0))], check=True)

    assert (pod.status, pod.message["outcome"]) == (0, "cold")
    assert "full" in pod.message["reason"] or "No space" in pod.message["reason"], pod.message
    group.assert_nothing_visible([pod])


def test_r13_a_cache_of_another_environment_is_a_miss_that_names_the_field(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path)
    group.assert_warm(group.run(), tuned=True)
    (identity,) = (path for path in (group.cache_root(0) / "v1").iterdir() if len(path.name) == 64)
    from initwarm.edges.volume import CacheVolume
    from initwarm.identity import Identity
    from tests.support.bundles import bundle_files, bundle_of, v1_file

    metadata = json.loads((identity / "manifest.json").read_text())["metadata"]
    other = {**metadata, "cudnn_version": "91900"}
    files = bundle_files(v1_file(metadata=other), has_store=False)
    before = sorted(path.name for path in identity.rglob("*"))
    for path in identity.parent.iterdir():
        if len(path.name) == 64:
            path.rename(path.with_name("set-apart"))
    CacheVolume(group.cache_root(0)).publish(Identity(other), bundle_of(files, identity=Identity(other).digest), files)

    (pod,) = group.run()

    group.assert_warm([pod], tuned=True)
    missed = pod.events("initwarm.cache.missed")[0]["message"]
    assert "cudnn_version" in missed
    assert "91900" in missed
    assert metadata["cudnn_version"] in missed
    assert sorted(path.name for path in (identity.parent / "set-apart").rglob("*")) == before


def test_r14_another_version_of_the_tool_stays_warm(pod_server: PodServer, tmp_path: Path) -> None:
    import dataclasses

    from initwarm.bundle import encode_bundle, parse_bundle

    group = Group(pod_server, tmp_path)
    first = group.assert_warm(group.run(), tuned=True)
    (file,) = group.cache_root(0).glob("v1/*/bundles/*/*/bundle.json")
    file.write_bytes(encode_bundle(dataclasses.replace(parse_bundle(file.read_bytes()), tool_version="99.0")))

    assert group.assert_warm(group.run(), tuned=False) == first


def test_an_unauthenticated_bundle_is_set_aside_where_a_key_is_used(pod_server: PodServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a secret of enough bytes")
    group = Group(pod_server, tmp_path)
    group.assert_warm(group.run(), tuned=True)

    (pod,) = group.run("--cache-key-file", str(key))

    group.assert_warm([pod], tuned=True)
    assert pod.events("initwarm.cache.quarantined")
    group.assert_warm(group.run("--cache-key-file", str(key)), tuned=False)


def test_r5_the_engine_root_s_own_names_are_emptied_and_others_are_left(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 2)
    stale = group.engine_root(0) / "flashinfer-v1" / "autotune_config.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    foreign = group.engine_root(0) / "model.bin"
    foreign.write_text("weights")

    pods = group.run()

    assert pods[0].message["outcome"] == "warm"
    assert {path.name for path in stale.parent.iterdir()} == {"rank0.json", "rank1.json"}
    assert foreign.read_text() == "weights"


def test_the_off_switch_empties_the_engine_root_and_starts_nothing(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path)
    group.assert_warm(group.run(), tuned=True)

    (pod,) = group.run(environ={"INITWARM_DISABLE": "1"})

    assert (pod.status, pod.message["outcome"]) == (0, "cold")
    assert group.files(0) == {}
    assert not pod.events("initwarm.coordinator.started")


def test_the_command_takes_the_agent_s_place_with_its_own_environment(pod_server: PodServer, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    script = (
        "import ctypes, json, os; flag = ctypes.c_int(); ctypes.CDLL(None).prctl(37, ctypes.byref(flag), 0, 0, 0); "
        "ignored = [line.split()[1] for line in open('/proc/self/status') if line.startswith('SigIgn')]; "
        f"json.dump([os.getpid(), dict(os.environ), flag.value, ignored], open({str(seen)!r}, 'w')); exit(7)"
    )
    group = Group(pod_server, tmp_path)
    port_arguments = ["--nproc-per-node", "1", "--cache-root", str(tmp_path / "cache"), "--engine-root"]

    pod = pod_server.start(
        tmp_path,
        "pod",
        ["run", *port_arguments, str(group.engine_root(0))],
        {"OWN": "kept"},
        command=[sys.executable, "-c", script],
    )

    assert pod.wait() == 7, pod.log
    pid, environ, is_subreaper, (ignored,) = json.loads(seen.read_text())
    assert pid == pod.pid
    assert environ["OWN"] == "kept"
    assert is_subreaper == 0
    # The new Python ignores SIGPIPE (13) and SIGXFSZ (25) by itself; the rest is what this process was started with.
    own = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "SigIgn" in line)
    assert int(ignored, 16) == int(own, 16) | 1 << 12 | 1 << 24
    assert "FLASHINFER_CUDA_ARCH_LIST" not in environ
    assert pod.message["outcome"] == "warm"


def test_a_failed_run_does_not_start_the_command(pod_server: PodServer, tmp_path: Path) -> None:
    pod = pod_server.start(
        tmp_path,
        "pod",
        ["run", "--plan", "nowhere", "--cache-root", str(tmp_path / "cache")],
        command=["touch", str(tmp_path / "started")],
    )

    refused(pod, 78, "nowhere")
    assert not (tmp_path / "started").exists()


def test_a_command_that_is_not_there_is_said(pod_server: PodServer, tmp_path: Path) -> None:
    pod = pod_server.start(
        tmp_path,
        "pod",
        ["run", "--cache-root", str(tmp_path / "cache"), "--engine-root", str(tmp_path / "engine")],
        {"INITWARM_DISABLE": "1"},
        command=["no-such-program"],
    )

    assert pod.wait() == 78
    assert pod.events("initwarm.command.failed")


@pytest.mark.parametrize("method", ["spawn"])
def test_workers_that_are_spawned_do_the_same(pod_server: PodServer, tmp_path: Path, method: str) -> None:
    group = Group(pod_server, tmp_path, 1, 2, ["--start-method", method])

    first = group.assert_warm(group.run(), tuned=True)

    group.arguments = []
    assert group.assert_warm(group.run(), tuned=False) == first


def test_verify_here_says_whether_this_environment_hits(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 2)
    group.assert_warm(group.run(), tuned=True)
    command = [sys.executable, "-m", "initwarm", "verify", "--here", "--engine-root", str(group.engine_root(0))]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}

    good = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, "No findings.\n"), good.stderr

    file = group.engine_root(0) / "flashinfer-v1" / "rank1.json"
    file.write_text(file.read_text().replace('"gpu": "unknown"', '"gpu": "NVIDIA B200"'))
    bad = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert bad.returncode == 65
    assert "NVIDIA B200" in bad.stdout
    assert "other bytes than rank0.json" in bad.stdout
