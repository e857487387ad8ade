"""`initwarm run` with real processes: agents, fork servers, coordinators, workers, FlashInfer's AutoTuner, gloo."""

import itertools
import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from tests.support.groups import Group
from tests.support.pods import PodServer

WORLDS = {"world-1": (1, 1), "world-2": (1, 2), "world-4": (1, 4), "two-pods-of-two": (2, 2)}
STRATEGIES = ("leader", "independent", "lockstep")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", WORLDS)
def test_r2_a_cold_start_tunes_and_the_next_one_measures_nothing(
    pod_server: PodServer, tmp_path: Path, world: str, strategy: str
) -> None:
    num_nodes, nproc = WORLDS[world]
    group = Group(pod_server, tmp_path, num_nodes, nproc, ["--strategy", strategy])

    first = group.assert_warm(group.run(), tuned=True)
    second = group.assert_warm(group.run(), tuned=False)

    assert first == second


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("holder", [0, 1])
def test_r1_a_bundle_that_only_one_pod_holds_is_adopted_by_all(
    pod_server: PodServer, tmp_path: Path, strategy: str, holder: int
) -> None:
    group = Group(pod_server, tmp_path, 2, 2, ["--strategy", strategy], has_own_roots=True)
    first = group.assert_warm(group.run(), tuned=True)
    group.forget(1 - holder)

    second = group.assert_warm(group.run(), tuned=False)

    assert first == second
    third = group.assert_warm(group.run(), tuned=False)
    assert third == first


@pytest.mark.parametrize("damage", ["truncated", "foreign", "edited", "emptied"])
def test_r1_a_bundle_that_is_bad_on_one_pod_is_replaced_by_the_good_one(
    pod_server: PodServer, tmp_path: Path, damage: str
) -> None:
    group = Group(pod_server, tmp_path, 2, 1, has_own_roots=True)
    first = group.assert_warm(group.run(), tuned=True)
    (file,) = group.cache_root(0).glob("v1/*/bundles/*/*/flashinfer-v1.json")
    content = file.read_bytes()
    damaged = {
        "truncated": content[: len(content) // 2],
        "foreign": content.replace(b'"gpu": "unknown"', b'"gpu": "NVIDIA H200"'),
        "edited": content.replace(b"HostMatmulRunner", b"HostMatmulRunnex"),
        "emptied": b"",
    }[damage]
    assert damaged != content
    file.write_bytes(damaged)

    pods = group.run()

    assert group.assert_warm(pods, tuned=False) == first
    assert pods[0].events("initwarm.cache.quarantined")
    assert list(group.cache_root(0).glob("v1/quarantine/*/reason.json"))


def test_one_import_serves_the_whole_pod(pod_server: PodServer, tmp_path: Path) -> None:
    (pod,) = Group(pod_server, tmp_path, 1, 4).run()

    assert pod.events("initwarm.barrier.passed")[0]["backend"] == "gloo"
    (started,) = pod.events("initwarm.coordinator.started")
    assert started["inherited"] == ["torch", "flashinfer"]
    assert not pod.events("initwarm.worker.spawned")


def test_every_line_on_stderr_is_an_event(pod_server: PodServer, tmp_path: Path) -> None:
    (pod,) = Group(pod_server, tmp_path, 1, 2).run()

    events = [json.loads(line)["event"] for line in pod.log.splitlines()]
    assert events[-1] == "initwarm.run.finished"
    assert all(event.startswith("initwarm.") for event in events)
    last = pod.events("initwarm.run.finished")[0]
    assert {key: last[key] for key in ("outcome", "bundle", "tuned", "epoch")} == {
        key: pod.message[key] for key in ("outcome", "bundle", "tuned", "epoch")
    }


def test_r90_pods_may_have_different_counts_of_ranks(pod_server: PodServer, tmp_path: Path) -> None:
    from tests.support.pods import free_port

    group = Group(pod_server, tmp_path, 3)
    port = free_port()
    counts = (1, 2, 2)

    pods = [group.start_pod(node, port, "--nproc-per-node", str(count)) for node, count in enumerate(counts)]

    for pod in pods:
        assert pod.wait() == 0, pod.log
    assert [pod.message["ranks"] for pod in pods] == [[0], [1, 2], [3, 4]]
    assert {pod.message["world_size"] for pod in pods} == {5}


def test_r10_five_starts_give_one_bundle(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 2)

    bundles = {group.assert_warm(group.run(), tuned=life == 0) for life in range(5)}

    assert len(bundles) == 1


def test_the_round_is_recorded_for_who_comes_later(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1)
    bundle = group.assert_warm(group.run(), tuned=True)

    record = json.loads((group.cache_root(0) / "v1" / "rounds" / "test.json").read_text())

    schema = json.loads(files("initwarm").joinpath("schemas/round.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(record)
    assert (record["bundle"], record["world_size"], record["group"]) == (bundle, 2, "test")


def test_a_report_keeps_to_its_schema(pod_server: PodServer, tmp_path: Path) -> None:
    (pod,) = Group(pod_server, tmp_path).run("--report", str(tmp_path / "report.json"))

    report = json.loads((tmp_path / "report.json").read_text())

    schema = json.loads(files("initwarm").joinpath("schemas/outcome.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(report)
    jsonschema.Draft202012Validator(schema).validate(pod.message)
    assert (report["schema"], report["exit_code"], report["outcome"]) == (1, 0, "warm")


def test_the_default_engine_root_is_one_per_pod(pod_server: PodServer, tmp_path: Path) -> None:
    arguments = ["run", "--cache-root", str(tmp_path / "cache"), "--group", "g", "--nproc-per-node", "2"]

    assert pod_server.start(tmp_path, "pod", arguments).wait() == 0

    found = {path.name for path in (tmp_path / "cache" / "engine" / "g" / "0" / "flashinfer-v1").iterdir()}
    assert found == {"rank0.json", "rank1.json"}


def test_worlds_and_strategies_are_all_combined() -> None:
    assert len(list(itertools.product(WORLDS, STRATEGIES))) == 12
