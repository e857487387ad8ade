"""Pods of a group that are killed, stopped, frozen and started again: the round begins anew, or all end alike."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import faultfs
from tests.support.faultfs import FaultFS, Rule
from tests.support.groups import Group
from tests.support.plans import plan_file
from tests.support.pods import Pod, PodServer, free_port


def kill_group(pod: Pod) -> None:
    """End all processes of a pod at once, as the kernel does to a container."""
    os.killpg(pod.pid, signal.SIGKILL)
    pod.wait()


def step_of(pod: Pod, kind: str) -> None:
    """Wait until the leader has announced a step of this kind."""
    pod.wait_for_text(f'"initwarm.step.announced", "message": "{kind}"')


@pytest.mark.parametrize("step", ["tune", "prove", "barrier"])
def test_r81_a_pod_that_is_killed_and_started_again_joins_the_next_round(
    pod_server: PodServer, tmp_path: Path, step: str
) -> None:
    flags = plan_file(tmp_path, {"seconds": 0.05})
    group = Group(pod_server, tmp_path, 4, 1, flags, has_uids=True)
    port = free_port()
    pods = [group.start_pod(node, port) for node in range(4)]
    step_of(pods[0], step)

    kill_group(pods[2])
    pods[2] = group.restart_pod(2, port)
    for pod in pods:
        pod.wait()

    group.assert_warm(pods, tuned=True)
    for pod in (pods[0], pods[1], pods[3]):
        epochs = [event["epoch"] for event in pod.events("initwarm.group.joined")]
        assert len(set(epochs)) == len(epochs) == 2
        assert pod.message["epoch"] == epochs[1]
    assert "node rank 2 was restarted" in pods[0].events("initwarm.round.restarted")[0]["message"]


@pytest.mark.parametrize("step", ["tune", "prove", "barrier"])
def test_r81_a_leader_that_is_killed_and_started_again_leads_the_next_round(
    pod_server: PodServer, tmp_path: Path, step: str
) -> None:
    flags = plan_file(tmp_path, {"seconds": 0.05})
    group = Group(pod_server, tmp_path, 3, 1, flags, has_uids=True)
    port = free_port()
    pods = [group.start_pod(node, port) for node in range(3)]
    step_of(pods[0], step)

    kill_group(pods[0])
    pods[0] = group.restart_pod(0, port)
    for pod in pods:
        pod.wait()

    messages = [pod.message for pod in pods]
    assert [(pod.status, message["outcome"]) for pod, message in zip(pods, messages, strict=True)] == [(0, "warm")] * 3
    assert len({(message["bundle"], message["epoch"]) for message in messages}) == 1
    for pod in pods[1:]:
        assert len(pod.events("initwarm.group.joined")) == 2


def test_a_newer_process_of_a_pod_takes_the_place_of_the_older_one(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 3, 1, plan_file(tmp_path, {"seconds": 0.05}), has_uids=True)
    port = free_port()
    pods = [group.start_pod(0, port), group.start_pod(1, port, "--engine-root", str(tmp_path / "older"))]
    pods.append(group.start_pod(2, port))
    step_of(pods[0], "tune")

    older, pods[1] = pods[1], group.restart_pod(1, port)
    for pod in (older, *pods):
        pod.wait()

    group.assert_warm(pods, tuned=True)
    assert (older.status, older.message["outcome"]) == (75, "failed"), older.message
    assert "Another process took node rank 1 in place of this one" in older.message["reason"]


def test_a_newer_leader_takes_the_place_of_the_older_one(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, plan_file(tmp_path, {"seconds": 0.3}), has_uids=True)
    # Their engine roots differ as on two nodes: what the older one empties is its own.
    older = group.start_pod(0, free_port(), "--engine-root", str(tmp_path / "older"))
    follower = group.start_pod(1, 0)
    step_of(older, "tune")

    newer = group.restart_pod(0, free_port())
    for pod in (older, newer, follower):
        pod.wait()

    group.assert_warm([newer, follower], tuned=True)
    assert (older.status, older.message["outcome"]) == (75, "failed")
    assert f"Pod {newer.name} leads group test now" in older.message["reason"]


def test_a_follower_that_pauses_for_less_than_the_lease_is_waited_for(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, plan_file(tmp_path, {"seconds": 0.1}))
    leader, follower = group.start()
    step_of(leader, "tune")

    os.killpg(follower.pid, signal.SIGSTOP)
    leader.wait_for("initwarm.wait.continued")
    os.killpg(follower.pid, signal.SIGCONT)
    for pod in (leader, follower):
        pod.wait()

    group.assert_warm([leader, follower], tuned=True)
    assert not leader.events("initwarm.round.restarted")


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_pod_that_pauses_for_longer_than_the_lease_is_named_and_all_end_alike(
    pod_server: PodServer, tmp_path: Path, frozen: int
) -> None:
    flags = [*plan_file(tmp_path, {"seconds": 0.1}), "--deadline", "80"]
    group = Group(pod_server, tmp_path, 3, 1, flags)
    pods = group.start()
    step_of(pods[0], "tune")

    os.killpg(pods[frozen].pid, signal.SIGSTOP)
    others = [pod for pod in pods if pod is not pods[frozen]]
    if frozen == 0:
        # Its followers look for another leader, in vain; it ends with the same outcome when it wakes.
        others[0].wait_for("initwarm.round.restarted")
    else:
        for pod in others:
            pod.wait()
    os.killpg(pods[frozen].pid, signal.SIGCONT)
    for pod in pods:
        pod.wait()

    outcomes = {(pod.status, pod.message["outcome"]) for pod in pods}
    assert len(outcomes) == 1, [pod.message for pod in pods]
    if outcomes == {(75, "failed")}:
        group.assert_nothing_visible(pods)
        for pod in others:
            assert f"(pod {pods[frozen].name})" in pod.message["reason"]
    else:
        group.assert_warm(pods, tuned=True)


def test_a_pod_of_a_finished_round_that_is_started_alone_comes_back_without_the_others(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 3, 1, has_uids=True)
    bundle = group.assert_warm(group.run(), tuned=True)

    for node in (1, 0):
        pod = group.restart_pod(node, free_port())

        assert (pod.wait(), pod.message["outcome"]) == (0, "warm"), pod.log
        assert pod.message["bundle"] == bundle
        assert (pod.message["tuned"], pod.message["missed"], pod.message["world_size"]) == (0, 0, 3)
        assert pod.message["ranks"] == [node]
        assert "joined round" in pod.message["reason"]
        assert pod.message["seconds"] < 30


def test_r75_a_pod_that_comes_when_the_others_have_finished_verifies_and_goes_on(
    pod_server: PodServer, tmp_path: Path
) -> None:
    """The leader has ended and gone; its word is on the volume."""
    group = Group(pod_server, tmp_path, 2, 1)
    bundle = group.assert_warm(group.run(), tuned=True)
    shutil.rmtree(group.engine_root(1))

    late = group.restart_pod(1, free_port())

    assert (late.wait(), late.message["outcome"], late.message["bundle"]) == (0, "warm", bundle)
    assert group.files(1)


def test_a_leader_that_came_before_the_record_of_the_old_one_goes_on_with_it(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 2, 1, leader_address=None)
    bundle = group.assert_warm(group.run(), tuned=True)
    record = group.cache_root(0) / "v1" / "rounds" / "test.json"
    aside = record.rename(tmp_path / "record")
    newer = group.restart_pod(0, free_port())
    newer.wait_for("initwarm.group.joined")

    aside.rename(record)

    assert (newer.wait(), newer.message["outcome"], newer.message["bundle"]) == (0, "warm", bundle), newer.log
    assert "joined round" in newer.message["reason"]


def test_a_group_that_is_started_again_whole_meets_and_does_not_join_its_old_round(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 3, 1)
    first = group.run()
    group.assert_warm(first, tuned=True)

    second = group.run()

    group.assert_warm(second, tuned=False)
    assert first[0].message["epoch"] != second[0].message["epoch"]
    for pod in second:
        assert "joined round" not in pod.message["reason"]
    assert second[0].events("initwarm.barrier.passed")


def test_a_record_of_another_plan_is_no_round_of_this_group(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "30"])
    group.assert_warm(group.run(), tuned=True)

    pod = group.start_pod(1, free_port(), *plan_file(tmp_path, {"buckets": [1, 2]}))

    assert pod.wait() == 75
    said = pod.events("initwarm.round.not_matched")
    assert "plan" in said[0]["message"]
    assert group.files(1) == {}


def test_a_pod_without_a_volume_of_the_others_finds_no_record_and_says_so(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "24"], has_own_roots=True)
    group.assert_warm(group.run(), tuned=True)
    group.forget(1)

    pod = group.start_pod(1, free_port())

    assert pod.wait() == 75
    assert "No leader (node rank 0) of group test answered" in pod.message["reason"]


def test_a_volume_that_was_set_back_serves_a_whole_group_from_what_it_has(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 2, 1)
    old_plan, new_plan = (plan_file(tmp_path, {"buckets": [one]}, name=f"plan-{one}.json") for one in (1, 2))
    group.assert_warm(group.run(*old_plan), tuned=True)
    snapshot = tmp_path / "snapshot"
    shutil.copytree(group.cache_root(0), snapshot)
    group.assert_warm(group.run(*new_plan), tuned=True)

    shutil.rmtree(group.cache_root(0))
    snapshot.rename(group.cache_root(0))

    group.assert_warm(group.run(*old_plan), tuned=False)
    group.assert_warm(group.run(*new_plan), tuned=True)


# A round is committed in this order: all ranks met, the record is on the volume, the leader says go.

#: The operation before which the leader is killed, so that the one named first is the last that happened.
BETWEEN_BARRIER_AND_RECORD = Rule(["rename"], "v1/rounds/*", kill="group", count=1)
BETWEEN_RECORD_AND_GO = Rule(["fsyncdir"], "v1/rounds", kill="group", count=1)
needs_fuse = pytest.mark.skipif(faultfs.why_not() is not None, reason=f"needs FUSE: {faultfs.why_not()}")


@needs_fuse
@pytest.mark.parametrize("rule", [BETWEEN_BARRIER_AND_RECORD, BETWEEN_RECORD_AND_GO], ids=["barrier", "record"])
def test_a_leader_killed_while_it_commits_the_round_leads_the_next_one(
    pod_server: PodServer, tmp_path: Path, rule: Rule
) -> None:
    group = Group(pod_server, tmp_path, 3, 1, has_uids=True)
    port = free_port()
    with FaultFS(group.cache_root(0), tmp_path / "mount") as mount:
        mount.inject(rule)
        leader = group.start_pod(0, port, "--cache-root", str(mount.at))
        followers = [group.start_pod(node, port) for node in (1, 2)]

        assert leader.wait() == -signal.SIGKILL

    assert leader.events("initwarm.barrier.passed")
    assert bool(list(group.cache_root(0).glob("v1/rounds/test.json"))) == (rule is BETWEEN_RECORD_AND_GO)
    pods = [group.restart_pod(0, port), *followers]
    for pod in pods:
        pod.wait()
    messages = [pod.message for pod in pods]
    assert [(pod.status, message["outcome"]) for pod, message in zip(pods, messages, strict=True)] == [(0, "warm")] * 3
    assert len({message["bundle"] for message in messages}) == 1
    assert sum(message["tuned"] for message in messages[:1]) == 0
    assert [message["ranks"] for message in messages] == [[0], [1], [2]]


@needs_fuse
def test_followers_whose_leader_died_after_the_record_go_on_with_it(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 3, 1)
    port = free_port()
    with FaultFS(group.cache_root(0), tmp_path / "mount") as mount:
        mount.inject(BETWEEN_RECORD_AND_GO)
        leader = group.start_pod(0, port, "--cache-root", str(mount.at))
        followers = [group.start_pod(node, port) for node in (1, 2)]

        assert leader.wait() == -signal.SIGKILL

    for pod in followers:
        assert (pod.wait(), pod.message["outcome"]) == (0, "warm"), pod.log
        assert "joined round" in pod.message["reason"]
    assert group.files(1).keys() - {"flashinfer-v1/rank1.json"} == group.files(2).keys() - {"flashinfer-v1/rank2.json"}


@needs_fuse
def test_followers_whose_leader_died_before_the_record_show_nothing(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 3, 1, ["--deadline", "30"])
    port = free_port()
    with FaultFS(group.cache_root(0), tmp_path / "mount") as mount:
        mount.inject(BETWEEN_BARRIER_AND_RECORD)
        leader = group.start_pod(0, port, "--cache-root", str(mount.at))
        followers = [group.start_pod(node, port) for node in (1, 2)]

        assert leader.wait() == -signal.SIGKILL

    for pod in followers:
        assert (pod.wait(), pod.message["outcome"]) == (75, "failed"), pod.log
        assert f"(leader: pod {leader.name})" in pod.message["reason"]
    assert group.files(1) == group.files(2) == {}


def test_r80_each_restart_of_a_worker_is_another_round(pod_server: PodServer, tmp_path: Path) -> None:
    """Counts of a worker's restarts name nothing; keys of a round that was left are still in the store, and unread."""
    group = Group(pod_server, tmp_path, 2, 1, plan_file(tmp_path, {"seconds": 0.2}), has_uids=True)
    port = free_port()
    leader, follower = (group.start_pod(node, port) for node in (0, 1))
    for restart in range(2):
        follower.wait_for("initwarm.group.joined")
        leader.wait_for_text('"message": "tune", "step": 0' if restart == 0 else "initwarm.round.restarted")
        kill_group(follower)
        follower = group.restart_pod(1, port)
    for pod in (leader, follower):
        pod.wait()

    group.assert_warm([leader, follower], tuned=True)
    epochs = [event["epoch"] for event in leader.events("initwarm.group.joined")]
    assert len(set(epochs)) == len(epochs) >= 2
    assert [event["epoch"] for event in follower.events("initwarm.group.joined")][-1] == epochs[-1]


# Clocks.


@pytest.fixture(scope="module")
def shifting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodServer]:
    """A pod server on whose pods the time of day can be set back."""
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler for the library that is preloaded")
    directory = tmp_path_factory.mktemp("clock")
    library = directory / "clock_shift.so"
    source = Path(__file__).parents[1] / "support" / "clock_shift.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-o", library, source, "-ldl"], check=True)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(library))
        server = PodServer(directory / "workspace")
    yield server
    server.close()


@pytest.mark.parametrize("node", [0, 1])
def test_a_clock_that_is_set_back_a_day_on_one_host_changes_nothing(
    shifting_server: PodServer, tmp_path: Path, node: int
) -> None:
    """Leases, address records and heartbeats are judged by what moves on the observer's monotonic clock."""
    shift = tmp_path / "set-back"
    group = Group(shifting_server, tmp_path, 2, 1, [*plan_file(tmp_path, {"seconds": 0.3}), "--strategy", "split"])
    port = free_port()
    pods = [
        group.start_pod(one, port, environ={"CLOCK_SHIFT_FILE": str(shift)} if one == node else {}) for one in range(2)
    ]
    step_of(pods[0], "tune")

    shift.touch()
    for pod in pods:
        pod.wait()

    group.assert_warm(pods, tuned=True)
    times = [event["time"] for event in pods[node].events()]
    assert times[-1] < times[0]
    assert not pods[0].events("initwarm.round.restarted")
    for pod in pods:
        assert 0 <= pod.message["seconds"] < 100
