"""What the runs under faults have found once, each with the least that shows it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from initwarm.edges.inbox import Inbox
from initwarm.errors import TopologyError, VolumeError
from initwarm.protocol import Answer, as_error, encode
from tests.support import faultfs
from tests.support.faultfs import FaultFS, Rule
from tests.support.groups import Group
from tests.support.plans import plan_file
from tests.support.pods import Pod, PodServer, free_port

needs_fuse = pytest.mark.skipif(faultfs.why_not() is not None, reason=f"needs FUSE: {faultfs.why_not()}")


def step_of(pod: Pod, kind: str) -> None:
    """Wait until the leader has announced a step of this kind."""
    pod.wait_for_text(f'"initwarm.step.announced", "message": "{kind}"')


def slow_pod(pod_server: PodServer, tmp_path: Path, *flags: str) -> Pod:
    """A pod that looks at a volume whose every operation takes a second, which is a minute for all of them."""
    arguments = ["run", "--cache-root", str(tmp_path / "mount"), "--engine-root", str(tmp_path / "engine"), *flags]
    pod = pod_server.start(tmp_path, "pod", arguments)
    pod.wait_for("initwarm.topology.resolved")
    return pod


@needs_fuse
def test_a_deadline_ends_a_pod_whose_volume_is_slow(pod_server: PodServer, tmp_path: Path) -> None:
    with FaultFS(tmp_path / "backing", tmp_path / "mount") as mount:
        mount.inject(Rule(delay=(1, 1)))
        pod = slow_pod(pod_server, tmp_path, "--deadline", "3")

        assert pod.wait(15) == 75

    assert "The deadline of 3 s passed" in pod.message["reason"]
    assert pod.processes() == []


@needs_fuse
def test_sigterm_ends_a_pod_whose_volume_is_slow(pod_server: PodServer, tmp_path: Path) -> None:
    with FaultFS(tmp_path / "backing", tmp_path / "mount") as mount:
        mount.inject(Rule(delay=(1, 1)))
        pod = slow_pod(pod_server, tmp_path)

        pod.signal(signal.SIGTERM)

        assert pod.wait(10) == 143
    assert pod.message["outcome"] == "stopped"


def test_an_engine_root_that_cannot_be_emptied_ends_the_round_alike_for_all(
    pod_server: PodServer, tmp_path: Path
) -> None:
    (tmp_path / "engine-1").write_text("a file")
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "30"])

    pods = group.run()

    for pod in pods:
        assert (pod.status, pod.message["outcome"]) == (0, "cold"), pod.log
        assert "engine-1" in pod.message["reason"]


def test_a_pod_that_comes_when_the_others_start_cold_hears_of_it(pod_server: PodServer, tmp_path: Path) -> None:
    (tmp_path / "engine-1").write_text("a file")
    group = Group(pod_server, tmp_path, 3, 1, ["--deadline", "40"])
    port = free_port()
    first = [group.start_pod(node, port) for node in (0, 1)]
    first[1].wait()

    late = group.start_pod(2, port)

    for pod in (*first, late):
        assert (pod.wait(), pod.message["outcome"]) == (0, "cold"), pod.log
        assert "engine-1" in pod.message["reason"]


@needs_fuse
@pytest.mark.parametrize("name", ["rank0.json", "manifest.json"])
def test_a_damaged_engine_file_is_seen_and_not_held_against_the_bundle(
    pod_server: PodServer, tmp_path: Path, name: str
) -> None:
    group = Group(pod_server, tmp_path)
    bundle = group.assert_warm(group.run(), tuned=True)
    with FaultFS(group.engine_root(0), tmp_path / "mount") as mount:
        mount.inject(Rule(path=f"*/{name}", damage="truncate"))

        (pod,) = group.run("--engine-root", str(mount.at))

        assert (pod.status, pod.message["outcome"]) == (0, "cold"), pod.log
        assert f"{name} reads back as other bytes than were written" in pod.message["reason"]
    assert group.files(0) == {}
    assert group.assert_warm(group.run(), tuned=False) == bundle


def test_a_follower_whose_leader_is_silent_until_its_time_is_up_does_not_start_cold_alone(
    pod_server: PodServer, tmp_path: Path
) -> None:
    flags = [*plan_file(tmp_path, {"seconds": 0.3}), "--strategy", "split", "--deadline", "12"]
    leader, follower = Group(pod_server, tmp_path, 2, 1, flags).start()
    step_of(leader, "tune")

    os.killpg(leader.pid, signal.SIGSTOP)
    follower.wait()
    os.killpg(leader.pid, signal.SIGCONT)
    leader.wait()

    assert (follower.status, follower.message["outcome"]) == (75, "failed")
    assert f"pod {leader.name}" in follower.message["reason"]


@pytest.mark.slow
def test_a_pod_that_waits_for_a_silent_leader_does_not_say_that_it_stood_still_itself(
    pod_server: PodServer, tmp_path: Path
) -> None:
    flags = [*plan_file(tmp_path, {"seconds": 0.1}), "--deadline", "70"]
    leader, follower = Group(pod_server, tmp_path, 2, 1, flags).start()
    step_of(leader, "tune")

    os.killpg(leader.pid, signal.SIGSTOP)
    follower.wait_for("initwarm.round.restarted")
    os.killpg(leader.pid, signal.SIGCONT)
    for pod in (leader, follower):
        pod.wait()

    assert "The leader answered nothing" in follower.events("initwarm.round.restarted")[0]["message"]
    assert not follower.events("initwarm.process.paused")


def test_a_second_leader_is_named_though_the_others_are_busy(pod_server: PodServer, tmp_path: Path) -> None:
    """Their answers come too late to be waited for, and being late is not what was wrong."""
    long = plan_file(tmp_path, {"seconds": 0.4, "tactics": 4, "buckets": [1, 2, 4, 8, 16, 32, 64, 128]})
    group = Group(pod_server, tmp_path, 2, 1, [*long, "--strategy", "independent", "--deadline", "60"])
    port = free_port()
    pods = [group.start_pod(node, port) for node in range(2)]
    step_of(pods[0], "tune")
    group.lives += 1
    rival = group.start_pod(0, port)

    assert [pod.wait() for pod in (*pods, rival)] == [78, 78, 78]

    for pod in pods:
        assert "Two living pods claim node rank 0" in pod.message["reason"]


class Letters:
    """A channel with the mail of a round."""

    def __init__(self, *letters: dict[str, Any]) -> None:
        self.letters = [json.dumps(letter) for letter in letters]

    def length(self, log: str) -> int:
        return len(self.letters)

    def read_many(self, keys: list[str]) -> list[str | None]:
        return [self.letters[int(key.rpartition("/")[2]) - 1] for key in keys]


class Places:
    def __init__(self) -> None:
        self.places = {1: {"uid": "one", "pod": "pod-1"}}


def test_a_letter_that_ends_the_round_does_not_lose_those_behind_it() -> None:
    answer = {"kind": "answer", "node": 1, "uid": "one", "number": 0, "answer": encode(Answer(1))}
    channel: Any = Letters({"kind": "conflict", "text": "two leaders"}, answer)
    peers: Any = Places()
    inbox = Inbox(channel, peers, lambda *_, **__: None)

    with pytest.raises(TopologyError, match="two leaders"):
        inbox.collect()
    inbox.collect()

    assert inbox.answers == {0: {1: Answer(1)}}


def test_a_pod_that_reports_its_failure_has_not_said_goodbye_yet() -> None:
    """The leader stays until it has heard how the round ended."""
    lost = as_error(VolumeError("The volume is gone.", "Nothing is read."), "pod-1")
    gone = {"kind": "gone", "node": 1, "uid": "one", "pod": "pod-1"}
    channel: Any = Letters({**gone, "error": lost}, {**gone, "error": None})
    peers: Any = Places()
    inbox = Inbox(channel, peers, lambda *_, **__: None)

    with pytest.raises(VolumeError, match="The volume is gone"):
        inbox.collect()
    assert inbox.farewells == set()

    inbox.collect()
    assert inbox.farewells == {1}
