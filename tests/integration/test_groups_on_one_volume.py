"""Groups that share one volume and one plan: one tunes, all end warm with its bundle, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from initwarm.bundle import BUNDLE, parse_bundle, record_files
from tests.support.groups import Group
from tests.support.plans import plan_file
from tests.support.pods import Pod, PodServer, free_port

#: Of the plan below: one call at 1, 2 and 4 tokens.
UNITS = 3
Started = list[tuple[Group, list[Pod]]]


def groups_of(server: PodServer, tmp_path: Path, count: int, num_nodes: int, seconds: float = 0.1) -> list[Group]:
    """Groups with engine roots of their own and one volume, whose plan takes so long per tactic."""
    shared = [*plan_file(tmp_path, {"seconds": seconds}), "--cache-root", str(volume_of(tmp_path))]
    groups = []
    for number in range(count):
        directory = tmp_path / f"group-{number}"
        directory.mkdir()
        groups.append(Group(server, directory, num_nodes, 1, [*shared, "--group", directory.name]))
    return groups


def volume_of(tmp_path: Path) -> Path:
    return tmp_path / "volume"


def assert_whole(volume: Path) -> int:
    """Every bundle that others can see is all there; returns how many there are."""
    places = [place for place in volume.glob("v1/*/bundles/*/*") if not place.name.startswith(".")]
    for place in places:
        files = {path.name: path.read_bytes() for path in place.iterdir()}
        bundle = parse_bundle(files.pop(BUNDLE))
        assert record_files(files) == bundle.files
        assert place.name.partition("-")[2] == bundle.digest
    return len(places)


def watch_until_the_end(volume: Path, pods: Sequence[Pod]) -> list[int]:
    """Look at the volume again and again until every pod has ended; returns how many bundles each look showed."""
    pause = threading.Event()
    counts = []
    while not all(pod.ended.is_set() for pod in pods):
        counts.append(assert_whole(volume))
        pause.wait(0.05)
    return counts


def assert_tuned_once(volume: Path, started: Started) -> Group:
    """All are warm with one bundle, for which one group measured each unit once; returns that group."""
    counts = watch_until_the_end(volume, [pod for _, pods in started for pod in pods])
    tuned = [sum(pod.message["tuned"] for pod in pods) for _, pods in started]
    assert sorted(tuned) == [*[0] * (len(started) - 1), UNITS]
    bundles = {group.assert_warm(pods, tuned=count > 0) for (group, pods), count in zip(started, tuned, strict=True)}
    assert len(bundles) == assert_whole(volume) == 1
    assert counts == sorted(counts)
    return started[tuned.index(UNITS)][0]


def wait_for_tuner(started: Started) -> int:
    """Wait until a group tunes; returns which."""
    pause = threading.Event()
    while True:
        for number, (_, pods) in enumerate(started):
            if any(event["message"] == "tune" for event in pods[0].events("initwarm.step.announced")):
                return number
            assert not pods[0].ended.is_set(), pods[0].log
        pause.wait(0.02)


def test_r58_four_cold_groups_on_one_volume_tune_once(pod_server: PodServer, tmp_path: Path) -> None:
    groups = groups_of(pod_server, tmp_path, 4, 2)

    started = [(group, group.start()) for group in groups]

    tuner = assert_tuned_once(volume_of(tmp_path), started)
    for group, pods in started:
        assert group is tuner or "entries adopted" in pods[0].message["reason"]


def test_sixteen_groups_that_start_at_once_tune_once(pod_server: PodServer, tmp_path: Path) -> None:
    groups = groups_of(pod_server, tmp_path, 16, 1)

    started = [(group, group.start()) for group in groups]

    assert_tuned_once(volume_of(tmp_path), started)


def test_a_group_whose_turn_comes_after_another_has_published_tunes_nothing(
    pod_server: PodServer, tmp_path: Path
) -> None:
    """It looked at the volume before and waits for a pod of its own, so that it never saw the lease of the other."""
    late, early = groups_of(pod_server, tmp_path, 2, 2)
    port = free_port()
    leader = late.start_pod(0, port)
    leader.wait_for("initwarm.group.joined")
    pods = early.run()
    bundle = early.assert_warm(pods, tuned=True)

    # A pod that saw the bundle would say so in its hello.
    follower = late.start_pod(1, port, "--cache-root", str(tmp_path / "other"))
    for pod in (leader, follower):
        pod.wait()

    assert late.assert_warm([leader, follower], tuned=False) == bundle


def test_r58_a_group_whose_container_is_killed_while_it_tunes_is_followed_by_another(
    pod_server: PodServer, tmp_path: Path
) -> None:
    groups = groups_of(pod_server, tmp_path, 4, 1, seconds=0.4)
    started = [(group, group.start()) for group in groups]
    group, (killed,) = started.pop(wait_for_tuner(started))
    others = [pods[0] for _, pods in started]
    for pod in others:
        pod.wait_for("initwarm.lease.waiting")

    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()

    assert assert_whole(volume_of(tmp_path)) == 0
    assert_tuned_once(volume_of(tmp_path), started)
    assert group.files(0) == {}
    again = [group.restart_pod(0, free_port())]
    again[0].wait()
    assert group.assert_warm(again, tuned=False) == others[0].message["bundle"]
