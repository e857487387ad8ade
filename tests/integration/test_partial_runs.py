"""Tuning that is shared, cut short or killed: what was measured is kept, and never shown as if it were all."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.groups import Group
from tests.support.plans import plan_file
from tests.support.pods import Pod, PodServer, free_port

#: Three ops of three buckets: nine units, of 0.4 s each.
OPS: list[dict[str, Any]] = [
    {"name": f"p{one}", "tactics": 2, "seconds": 0.2, "buckets": [1, 2, 4]} for one in range(3)
]
UNITS = 9


def entries(data: bytes) -> dict[str, Any]:
    """The winners of a v1 file by key, without what is said of the environment."""
    return {key: value for key, value in json.loads(data).items() if not key.startswith("_")}


def entries_of(group: Group, node: int = 0) -> dict[str, Any]:
    (file, *_) = sorted((group.engine_root(node) / "flashinfer-v1").iterdir())
    return entries(file.read_bytes())


def partials(group: Group) -> list[Path]:
    return sorted(path for path in group.cache_root(0).glob("v1/partials/*/*/*.json") if path.name[0] != ".")


def kept_by(group: Group) -> set[str]:
    """The keys that unfinished runs have left for the next."""
    return set().union(*(entries(json.loads(path.read_bytes())["v1"].encode()) for path in partials(group)))


def bundles(group: Group) -> list[Path]:
    return sorted(group.cache_root(0).glob("v1/*/bundles/*/*"))


def is_cold_with_partial(group: Group, pods: list[Pod]) -> int:
    """Check that a run ended by its budget, the same on all pods, with nothing to be seen; returns the units left."""
    reasons = {pod.message["reason"] for pod in pods}
    assert [(pod.status, pod.message["outcome"]) for pod in pods] == [(0, "cold")] * len(pods), pods[0].log
    assert len(reasons) == 1
    told = re.search(r"(\d+) of (\d+) units are tuned and (\d+) are left", reasons.pop())
    assert told is not None
    done, total, left = map(int, told.groups())
    assert (done + left, total) == (UNITS, UNITS)
    group.assert_nothing_visible(pods)
    assert bundles(group) == []
    return left


@pytest.mark.parametrize(("num_nodes", "strategy"), [(1, "leader"), (2, "split"), (2, "lockstep")])
def test_r20_a_budget_ends_tuning_and_the_next_run_goes_on_from_there(
    pod_server: PodServer, tmp_path: Path, num_nodes: int, strategy: str
) -> None:
    flags = [*plan_file(tmp_path, *OPS), "--strategy", strategy]
    group = Group(pod_server, tmp_path, num_nodes, 1, flags)

    left = is_cold_with_partial(group, group.run("--tuning-budget", "1"))

    assert 0 < left < UNITS
    finished = kept_by(group)
    assert len(finished) == UNITS - left
    # What a server gains most from comes first: the smallest numbers of tokens.
    sizes = sorted(int(re.findall(r"\(\((\d+),", key)[0]) for key in finished)
    assert sizes == sorted([1, 1, 1, 2, 2, 2, 4, 4, 4])[: len(sizes)]

    pods = group.run()

    group.assert_warm(pods, tuned=True)
    assert f"{UNITS - left} entries were finished by an earlier run" in pods[0].log
    measured = sum(pod.message["tuned"] for pod in pods) if strategy != "lockstep" else pods[0].message["tuned"]
    assert measured == left
    assert len(entries_of(group)) == UNITS
    assert partials(group) == []


def test_a_plan_is_finished_by_as_many_short_runs_as_it_takes(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 1, [*plan_file(tmp_path, *OPS), "--tuning-budget", "1"])
    left = UNITS
    while True:
        (pod,) = group.run()
        if pod.message["outcome"] == "warm":
            break
        before, left = left, is_cold_with_partial(group, [pod])
        assert left < before

    assert left < UNITS
    group.assert_warm([pod], tuned=True)
    assert len(entries_of(group)) == UNITS


def test_a_budget_that_suffices_is_never_spoken_of(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 1, [*plan_file(tmp_path, *OPS), "--tuning-budget", "60"])

    pods = group.run()

    group.assert_warm(pods, tuned=True)
    assert pods[0].message["tuned"] == UNITS
    assert partials(group) == []


def test_r20_what_a_killed_group_has_finished_is_not_measured_again(pod_server: PodServer, tmp_path: Path) -> None:
    slow = {"name": "slow", "tactics": 4, "seconds": 0.3, "buckets": [1 << power for power in range(16)]}
    group = Group(pod_server, tmp_path, 2, 1, [*plan_file(tmp_path, slow), "--strategy", "split"])
    pods = group.start()
    pause = threading.Event()
    while not partials(group):
        assert not any(pod.ended.is_set() for pod in pods), pods[0].log
        pause.wait(0.05)

    for pod in pods:
        os.killpg(pod.pid, signal.SIGKILL)
    for pod in pods:
        pod.wait()
    kept = kept_by(group)
    assert bundles(group) == []

    pods = group.run()

    group.assert_warm(pods, tuned=True)
    assert kept
    assert sum(pod.message["tuned"] for pod in pods) == 16 - len(kept)
    assert kept <= set(entries_of(group))


def test_what_the_ranks_have_shared_is_what_the_leader_would_have_measured(
    pod_server: PodServer, tmp_path: Path
) -> None:
    plan = plan_file(tmp_path, *({**one, "seconds": 0.02, "tactics": 4} for one in OPS))
    found = []
    for strategy, num_nodes in (("leader", 1), ("split", 2)):
        directory = tmp_path / strategy
        directory.mkdir()
        group = Group(pod_server, directory, num_nodes, 2, [*plan, "--strategy", strategy])
        pods = group.run()
        group.assert_warm(pods, tuned=True)
        assert pods[0].message["strategy"] == strategy
        found.append(entries_of(group))
        if strategy == "split":
            # Nothing was measured twice, and every pod did its part.
            assert sum(pod.message["tuned"] for pod in pods) == UNITS
            assert all(pod.message["tuned"] > 0 for pod in pods)

    assert found[0] == found[1]
    assert len(found[0]) == UNITS


def test_the_unit_of_a_rank_that_died_is_measured_by_another(pod_server: PodServer, tmp_path: Path) -> None:
    deadly = {"name": "deadly", "tactics": 3, "seconds": 0.05, "buckets": [1, 2, 4], "abort": 2, "abort_rank": 1}
    group = Group(pod_server, tmp_path, 2, 1, [*plan_file(tmp_path, deadly), "--strategy", "split"])

    pods = group.run()

    group.assert_warm(pods, tuned=True)
    assert len(entries_of(group)) == 3
    assert "killed the worker of rank 1" in pods[0].message["reason"]


def test_sharing_is_refused_where_keys_may_hold_the_rank(pod_server: PodServer, tmp_path: Path) -> None:
    flags = [*plan_file(tmp_path, {"rank_in_key": True}), "--strategy", "split"]
    group = Group(pod_server, tmp_path, 2, 1, flags)
    port = free_port()

    pods = [group.start_pod(node, port) for node in range(2)]

    for pod in pods:
        assert pod.wait() == 78, pod.log
        assert "rank_free" in pod.message["reason"] or "rank" in pod.message["reason"]
        assert "split" in pod.message["reason"]
    group.assert_nothing_visible(pods)
