"""A group that loses a pod, contradicts itself or is stopped ends in one state, with one cause and no orphan."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.groups import Group
from tests.support.pods import ROOT, PodServer, free_port, living_processes


def test_a_missing_pod_is_named_before_any_collective(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 3, 1, ["--deadline", "8"])

    pods = group.start(nodes=[0, 2])

    assert [pod.wait() for pod in pods] == [75, 75]
    for pod in pods:
        assert pod.message["outcome"] == "failed"
        assert "node ranks [1] said no hello" in pod.message["reason"]
        assert not any(event["message"] == "barrier" for event in pod.events("initwarm.step.announced"))
    group.assert_nothing_visible(pods)


def test_a_missing_pod_is_a_cold_start_where_that_is_asked_for(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "6", "--on-barrier-failure", "continue"])

    (pod,) = group.start(nodes=[0])

    assert pod.wait() == 0
    assert pod.message["outcome"] == "cold"
    group.assert_nothing_visible([pod])


def test_a_follower_without_a_leader_says_where_it_looked(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "6"])

    (pod,) = group.start(nodes=[1])

    assert pod.wait() == 75
    assert re.search(
        r"No leader \(node rank 0\) of group test answered within 3 s: .*127\.0\.0\.1 port \d+, by 127\.0\.0\.1: "
        r"Connection refused",
        pod.message["reason"],
    )
    assert "NetworkPolicy" in pod.message["reason"]


def test_a_follower_that_knows_no_name_looks_on_the_volume_alone(pod_server: PodServer, tmp_path: Path) -> None:
    arguments = ["run", "--cache-root", str(tmp_path / "cache"), "--nnodes", "2", "--node-rank", "1", "--deadline", "6"]

    pod = pod_server.start(tmp_path, "pod", arguments)

    assert pod.wait() == 75
    assert "no leader has written an address to the cache volume" in pod.message["reason"]


def test_r93_two_living_pods_with_one_rank_end_the_group(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 3, 1)
    port = free_port()
    first = [group.start_pod(0, port), group.start_pod(1, port)]
    first[1].wait_for("initwarm.group.joined")
    group.lives += 1
    rival = group.start_pod(1, port)

    assert [pod.wait() for pod in (*first, rival)] == [78, 78, 78]

    for pod in (*first, rival):
        reason = pod.message["reason"]
        assert "Two living pods claim node rank 1" in reason
        assert "pod-1-life-0" in reason
        assert "pod-1-life-1" in reason
    group.assert_nothing_visible([*first, rival])


def test_r94_two_leaders_of_one_group_end_it(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1)
    port = free_port()
    first = group.start_pod(0, port)
    first.wait_for("initwarm.group.joined")
    group.lives += 1
    rival = group.start_pod(0, port)

    assert [first.wait(), rival.wait()] == [78, 78]

    assert "Two living pods claim node rank 0" in first.message["reason"]
    assert "is taken on this pod" in rival.message["reason"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--strategy", "lockstep"], "strategy"),
        (["--on-tuning-failure", "fail"], "on_tuning_failure"),
        (["--check-outputs"], "check_outputs"),
    ],
)
def test_pods_with_different_settings_end_with_the_setting_and_both_values(
    pod_server: PodServer, tmp_path: Path, flags: list[str], named: str
) -> None:
    group = Group(pod_server, tmp_path, 2, 1)
    port = free_port()

    pods = [group.start_pod(0, port), group.start_pod(1, port, *flags)]

    assert [pod.wait() for pod in pods] == [78, 78]
    assert pods[0].message["reason"] == pods[1].message["reason"]
    assert f"The pods disagree on {named}" in pods[0].message["reason"]


def test_pods_with_different_plans_end_as_a_conflict(pod_server: PodServer, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1, "device": "cpu", "calls": []}')
    group = Group(pod_server, tmp_path, 2, 1)
    port = free_port()

    pods = [group.start_pod(0, port), group.start_pod(1, port, "--plan", str(plan))]

    assert [pod.wait() for pod in pods] == [78, 78]
    assert "The pods disagree on plan" in pods[1].message["reason"]


@pytest.mark.parametrize(
    ("environ", "named", "value"),
    [
        ({"TEST_CUDA_VERSION": "12.8"}, "cuda_version", "'12.8'"),
        ({"TEST_TOOL_VERSION": "99.0"}, "initwarm", "'99.0'"),
    ],
)
def test_pods_of_different_images_end_with_what_differs_and_both_values(
    pod_server: PodServer, tmp_path: Path, environ: dict[str, str], named: str, value: str
) -> None:
    group = Group(pod_server, tmp_path, 2, 1)
    port = free_port()

    pods = [group.start_pod(0, port), group.start_pod(1, port, environ=environ)]

    assert [pod.wait() for pod in pods] == [78, 78]
    reasons = {pod.message["reason"] for pod in pods}
    assert len(reasons) == 1
    assert f"The pods disagree on {named}: node rank 0 (pod pod-0-life-0) has" in reasons.pop()
    assert value in pods[1].message["reason"]
    group.assert_nothing_visible(pods)


def test_a_pod_that_cannot_take_part_ends_the_round_alike_for_all(pod_server: PodServer, tmp_path: Path) -> None:
    (tmp_path / "cache-1").write_text("a file")
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "40"], has_own_roots=True)

    pods = group.run()

    for pod in pods:
        assert (pod.status, pod.message["outcome"]) == (0, "cold"), pod.log
        assert "cache-1" in pod.message["reason"]
        assert pod.message["first_failure"]["pod"] == "pod-1-life-1"
        assert pod.message["seconds"] < 20
    for node in range(2):
        assert group.files(node) == {}


def test_a_leader_that_cannot_take_part_tells_pods_that_come_later(pod_server: PodServer, tmp_path: Path) -> None:
    (tmp_path / "cache-0").write_text("a file")
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "60"], has_own_roots=True)
    port = free_port()
    leader = group.start_pod(0, port)
    leader.wait_for("initwarm.coordinator.started")
    threading.Event().wait(1)

    follower = group.start_pod(1, port)

    for pod in (leader, follower):
        assert (pod.wait(), pod.message["outcome"]) == (0, "cold"), pod.log
        assert "cache-0" in pod.message["reason"]


def test_ranks_are_not_named_before_they_are_known(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 2, ["--deadline", "40"])
    port = free_port()

    pods = [group.start_pod(0, port), group.start_pod(1, port, "--check-outputs")]

    assert [pod.wait() for pod in pods] == [78, 78]
    assert [pod.message["ranks"] for pod in pods] == [[], []]


def test_a_leader_of_another_group_is_refused(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "24"])
    port = free_port()
    leader = group.start_pod(0, port)
    leader.wait_for("initwarm.group.joined")

    stranger = group.start_pod(1, port, "--group", "other")

    assert stranger.wait() == 78
    assert "leads group 'test' and this pod is of group 'other'" in stranger.message["reason"]
    assert leader.wait() == 75


def test_the_leader_s_death_ends_the_follower(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 3, 1, ["--deadline", "14"])
    leader, follower = group.start(nodes=[0, 1])
    follower.wait_for("initwarm.group.joined")

    leader.signal(signal.SIGKILL)

    assert follower.wait(20) == 75
    assert follower.message["outcome"] == "failed"
    assert "The round was lost: The leader's control channel broke" in follower.message["reason"]
    assert f"(leader: pod {leader.name})" in follower.message["reason"]
    leader.wait()
    group.assert_nothing_visible([follower])


def test_a_stopped_follower_is_named_by_the_others(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 3, 1, ["--deadline", "16"])
    leader, follower = group.start(nodes=[0, 1])
    follower.wait_for("initwarm.group.joined")
    leader.wait_for("initwarm.group.joined")

    follower.signal(signal.SIGTERM)

    assert follower.wait(5) == 143
    assert follower.message["outcome"] == "stopped"
    assert leader.wait(20) == 75
    assert "Node rank 1 (pod pod-1-life-1) was stopped" in leader.message["reason"]
    group.assert_nothing_visible([leader, follower])


def test_a_stopped_leader_tells_its_followers(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 3, 1, ["--deadline", "14"])
    leader, follower = group.start(nodes=[0, 1])
    follower.wait_for("initwarm.group.joined")

    leader.signal(signal.SIGTERM)

    assert leader.wait(5) == 143
    assert follower.wait(20) == 75
    assert "the leader (pod pod-0-life-1) was stopped" in follower.message["reason"]


@pytest.mark.parametrize("moment", [0.0, 0.3, 1.0, 2.5])
def test_sigterm_during_the_imports_ends_everything_in_five_seconds(tmp_path: Path, moment: float) -> None:
    process = subprocess.Popen(
        [
            sys.executable, "-m", "initwarm", "run", "--cache-root", str(tmp_path / "cache"), "--engine-root",
            str(tmp_path / "engine"), "--termination-message", str(tmp_path / "message"), "--log-format", "json",
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stderr is not None
    assert b"initwarm.topology.resolved" in process.stderr.readline()
    # The imports have begun; each moment meets them at another place.
    threading.Event().wait(moment)

    process.send_signal(signal.SIGTERM)

    _, errors = process.communicate(timeout=5)
    assert process.returncode == 143, errors.decode()
    assert b'"outcome":"stopped"' in (tmp_path / "message").read_bytes()
    assert not [path for path in (tmp_path / "engine").rglob("*") if path.is_file()]
    assert living_processes(process.pid) == []


def test_a_killed_agent_leaves_no_process_behind(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "60"])
    (pod,) = group.start(nodes=[0])
    pod.wait_for("initwarm.group.joined")
    assert len(pod.processes()) >= 3

    pod.signal(signal.SIGKILL)

    pod.wait()
    pause = threading.Event()
    for _ in range(500):
        if not pod.processes():
            break
        pause.wait(0.02)
    assert pod.processes() == []
