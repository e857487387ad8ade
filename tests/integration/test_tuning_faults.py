"""What goes wrong while kernels are tuned and proven: each ends all-warm or all-cold, and says why."""

import dataclasses
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.groups import Group
from tests.support.plans import plan_file
from tests.support.pods import Pod, PodServer, free_port


def tactics_of(group: Group, node: int = 0) -> dict[str, Any]:
    """The tactic of each key in the file of the pod's first rank."""
    file = min((group.engine_root(node) / "flashinfer-v1").iterdir())
    return {key: entry[1] for key, entry in json.loads(file.read_text()).items() if not key.startswith("_")}


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_r8_r9_lockstep_gives_all_ranks_one_tactic_though_each_prefers_another(
    pod_server: PodServer, tmp_path: Path, num_nodes: int
) -> None:
    flags = plan_file(tmp_path, {"costs": "rank", "tactics": 5})
    group = Group(pod_server, tmp_path, num_nodes, 2, [*flags, "--strategy", "lockstep"])

    group.assert_warm(group.run(), tuned=True)

    # Two ranks whose tables are shifted by one: the mean is smallest where neither has its dearest tactic.
    assert set(tactics_of(group).values()) <= {0, 3, 4}
    group.assert_warm(group.run(), tuned=False)


def test_r8_independent_ranks_report_that_they_differ_and_end_with_rank_0_s_tactics(
    pod_server: PodServer, tmp_path: Path
) -> None:
    flags = plan_file(tmp_path, {"costs": "rank"})
    group = Group(pod_server, tmp_path, 2, 2, [*flags, "--strategy", "independent"])

    pods = group.run()

    group.assert_warm(pods, tuned=True)
    assert set(tactics_of(group).values()) == {0}
    for pod in pods:
        assert "3 entries differed between ranks after independent; rank 0's were taken" in pod.message["reason"]


def test_r6_tuning_far_beyond_the_collective_timeout_passes(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"seconds": 7.5, "tactics": 4, "buckets": [1, 2]})
    group = Group(pod_server, tmp_path, 2, 1, [*flags, "--strategy", "leader", "--collective-timeout", "10"])

    leader, follower = group.start()

    # 2 buckets x 4 tactics x 7.5 s = 60 s, with a process-group timeout of 10 s.
    assert [leader.wait(150), follower.wait(150)] == [0, 0]
    group.assert_warm([leader, follower], tuned=True)
    assert leader.message["seconds"] > 60
    waits = [event["message"] for event in follower.events("initwarm.wait.continued")]
    assert any("node rank 0 (pod pod-0-life-1): rank 0: unit 1/2" in wait for wait in waits), waits
    assert any("unit 2/2" in wait for wait in waits), waits


@pytest.mark.parametrize(("num_nodes", "nproc"), [(1, 4), (2, 1)])
def test_r7_a_rank_that_stands_still_in_lockstep_is_named(
    pod_server: PodServer, tmp_path: Path, num_nodes: int, nproc: int
) -> None:
    flags = plan_file(tmp_path, {"seconds": 0.5, "tactics": 8})
    flags += ["--strategy", "lockstep", "--collective-timeout", "4", "--deadline", "60"]
    group = Group(pod_server, tmp_path, num_nodes, nproc, flags)
    pods = group.start()
    pods[-1].wait_for("initwarm.group.joined")
    worker = _youngest_when_there_are(pods[-1], 4 + nproc)

    os.kill(worker, signal.SIGSTOP)

    for pod in pods:
        assert pod.wait(30) == 75, pod.log
        reason = pod.message["reason"]
        assert "stood still" in reason or "nothing came from node rank 1" in reason
    group.assert_nothing_visible(pods)


def test_r7_a_rank_that_pauses_for_less_than_the_timeout_is_waited_for(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"seconds": 0.3, "tactics": 4, "buckets": [1, 2]})
    group = Group(pod_server, tmp_path, 1, 2, [*flags, "--strategy", "lockstep", "--collective-timeout", "20"])
    (pod,) = group.start()
    pod.wait_for("initwarm.step.announced")
    worker = _youngest_when_there_are(pod, 5)

    os.kill(worker, signal.SIGSTOP)
    threading.Event().wait(2)
    os.kill(worker, signal.SIGCONT)

    pod.wait()
    group.assert_warm([pod], tuned=True)


@pytest.mark.parametrize("strategy", ["leader", "independent", "lockstep"])
def test_r18_a_tactic_that_kills_a_worker_is_excluded_on_all_ranks(
    pod_server: PodServer, tmp_path: Path, strategy: str
) -> None:
    flags = plan_file(tmp_path, {"name": "first"}, {"name": "second", "abort": 0, "abort_rank": 0})
    group = Group(pod_server, tmp_path, 2, 1, [*flags, "--strategy", strategy, "--collective-timeout", "5"])

    pods = group.run()

    group.assert_warm(pods, tuned=True)
    tactics = tactics_of(group)
    assert {tactic for key, tactic in tactics.items() if "first" in key} == {0}
    assert {tactic for key, tactic in tactics.items() if "second" in key} == {1}
    for pod in pods:
        assert "killed the worker of rank 0" in pod.message["reason"]
        assert "is excluded on all ranks" in pod.message["reason"]


def test_r18_the_restarts_are_bounded(pod_server: PodServer, tmp_path: Path) -> None:
    source = [{"name": f"op{number}", "abort": 0, "tactics": 1} for number in range(6)]
    group = Group(pod_server, tmp_path, 1, 1, [*plan_file(tmp_path, *source), "--on-tuning-failure", "fail"])

    (pod,) = group.run()

    assert pod.status == 69
    group.assert_nothing_visible([pod])


def test_r19_a_tactic_that_runs_is_enough_and_the_failed_ones_are_reported(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 1, 1, plan_file(tmp_path, {"raises": "most", "tactics": 21}))

    (pod,) = group.run()

    group.assert_warm([pod], tuned=True)
    assert "20 tactics failed" in pod.events("initwarm.tuning.degraded")[0]["message"]
    assert set(tactics_of(group).values()) == {20}


@pytest.mark.parametrize("fault", [{"raises": "all"}, {"out_of_memory": 4}])
def test_r16_r26_an_op_that_fell_back_on_one_rank_is_warm_on_none(
    pod_server: PodServer, tmp_path: Path, fault: dict[str, Any]
) -> None:
    group = Group(pod_server, tmp_path, 2, 1, plan_file(tmp_path, {"name": "good"}, {"name": "bad", **fault}))

    pods = group.run()

    for pod in pods:
        assert (pod.status, pod.message["outcome"]) == (0, "cold")
        assert "no tactic could be measured for calls[1] faults.op M=" in pod.message["reason"]
    # Of the rank that drew the unit, and the same on all pods.
    assert pods[0].message["first_failure"] == pods[1].message["first_failure"]
    assert f"Rank {pods[0].message['first_failure']['rank']}: no tactic" in pods[1].message["reason"]
    group.assert_nothing_visible(pods)


def test_r24_a_winner_with_wrong_numbers_is_not_published(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"wrong": 2})
    group = Group(pod_server, tmp_path, 1, 2, [*flags, "--check-outputs"])

    (pod,) = group.run()

    group.assert_warm([pod], tuned=True)
    assert set(tactics_of(group).values()) == {0}
    assert "gave other numbers than the default" in pod.message["reason"]


def test_r24_without_the_check_the_fastest_is_taken(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 1, plan_file(tmp_path, {"wrong": 2}))

    group.assert_warm(group.run(), tuned=True)

    assert set(tactics_of(group).values()) == {2}


def test_r25_a_kernel_that_the_replay_builds_is_built_for_the_server(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 1, plan_file(tmp_path, {"name": tmp_path.name, "builds": True}))
    group.assert_warm(group.run(), tuned=True)
    (kernel,) = pod_server.workspace.rglob(f"{tmp_path.name}-0.so")
    # As on another machine that shares the cache volume and not FlashInfer's JIT directory.
    kernel.unlink()

    (pod,) = group.run()

    group.assert_warm([pod], tuned=False)
    assert pod.events("initwarm.replay.built")
    assert kernel.exists()
    (again,) = group.run()
    assert not again.events("initwarm.replay.built")


def test_r11_a_cached_tactic_that_its_kernel_refuses_is_tuned_anew(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, plan_file(tmp_path, {}))
    first = group.assert_warm(group.run(), tuned=True)
    forge(group, lambda entries: {key: [entry[0], 77, *entry[2:]] for key, entry in entries.items()})

    pods = group.run()

    second = group.assert_warm(pods, tuned=True)
    assert second == first
    for pod in pods:
        assert "tuned by" in pod.message["reason"]
        assert "did not stand the replay" in pod.message["reason"]
    assert list(group.cache_root(0).glob("v1/quarantine/*/reason.json"))
    group.assert_warm(group.run(), tuned=False)


def test_r2_an_older_bundle_serves_where_the_newest_does_not_stand_the_replay(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 2, 1, plan_file(tmp_path, {}))
    first = group.assert_warm(group.run(), tuned=True)
    forge(group, lambda entries: {key: [entry[0], 77, *entry[2:]] for key, entry in entries.items()}, keeps_old=True)

    pods = group.run()

    assert group.assert_warm(pods, tuned=False) == first
    assert "did not stand the replay" in pods[0].message["reason"]
    assert group.assert_warm(group.run(), tuned=False) == first


def test_r126_a_bundle_that_is_the_same_on_all_ranks_and_misses_is_set_aside(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 2, 1, plan_file(tmp_path, {}))
    first = group.assert_warm(group.run(), tuned=True)
    forge(group, lambda entries: {key.replace("faults::op", "faults::other"): entry for key, entry in entries.items()})

    pods = group.run()

    assert group.assert_warm(pods, tuned=True) == first
    failed = pods[0].events("initwarm.replay.failed")[0]["message"]
    assert "missed ('faults::op'" in failed
    group.assert_warm(group.run(), tuned=False)


def test_r126_keys_that_hold_ranks_become_a_union_that_every_rank_hits(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 2, plan_file(tmp_path, {"rank_in_key": True}))

    pods = group.run()

    assert pods[0].message["strategy"] in ("lockstep", "independent")
    group.assert_warm(pods, tuned=True)
    assert len(tactics_of(group)) == 4 * 3
    group.assert_warm(group.run(), tuned=False)


def test_r3_a_leader_for_keys_that_may_hold_ranks_is_refused(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"rank_in_key": True}, {"name": "own", "ranks": [1]})
    group = Group(pod_server, tmp_path, 1, 2, [*flags, "--strategy", "leader"])

    (pod,) = group.run()

    assert pod.status == 78
    assert "The strategy 'leader' is not sound here" in pod.message["reason"]
    group.assert_nothing_visible([pod])


def test_r3_ranks_with_calls_of_their_own_all_find_theirs(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"name": "all"}, {"name": "uneven", "ranks": [1]})
    group = Group(pod_server, tmp_path, 2, 1, flags)

    pods = group.run()

    assert pods[0].message["strategy"] == "independent"
    group.assert_warm(pods, tuned=True)
    assert {"uneven" in key for key in tactics_of(group, 0)} == {True, False}


def test_a_worker_s_traceback_reaches_the_message_of_its_pod(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"error": "the very cause", "error_rank": 1})
    group = Group(pod_server, tmp_path, 2, 1, [*flags, "--strategy", "independent", "--on-tuning-failure", "fail"])

    pods = group.run()

    assert [pod.status for pod in pods] == [69, 69]
    for pod in pods:
        failure = pod.message["first_failure"]
        assert failure["rank"] == 1
        assert failure["pod"] == "pod-1-life-1"
        assert "LookupError" in failure["what"]
        assert "the very cause" in failure["what"]
    group.assert_nothing_visible(pods)


def test_tuning_that_does_not_end_before_the_deadline_is_a_cold_start(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"seconds": 30})
    group = Group(pod_server, tmp_path, 2, 1, [*flags, "--strategy", "leader", "--deadline", "10"])

    pods = group.run()

    for pod in pods:
        assert (pod.status, pod.message["outcome"]) == (0, "cold"), pod.log
        assert "Tuning did not end before the deadline" in pod.message["reason"]
        assert pod.message["seconds"] < 12
    group.assert_nothing_visible(pods)


@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_sigterm_while_a_rank_tunes_ends_its_pod_in_five_seconds(
    pod_server: PodServer, tmp_path: Path, victim: str
) -> None:
    flags = plan_file(tmp_path, {"seconds": 30})
    group = Group(pod_server, tmp_path, 2, 1, [*flags, "--strategy", "leader", "--deadline", "20"])
    leader, follower = group.start()
    for pod in (leader, follower):
        pod.wait_for("initwarm.group.joined")
    leader.wait_for("initwarm.step.announced")
    chosen, other = (leader, follower) if victim == "leader" else (follower, leader)

    chosen.signal(signal.SIGTERM)

    assert chosen.wait(5) == 143
    assert chosen.message["outcome"] == "stopped"
    # Nobody takes its place, which is waited for as long as the deadline allows.
    assert other.wait(25) == 75
    assert f"(pod {chosen.name}) was stopped" in other.message["reason"]
    group.assert_nothing_visible([leader, follower])


def test_a_killed_worker_does_not_take_the_pod_with_it(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"seconds": 3, "buckets": [1]})
    group = Group(pod_server, tmp_path, 1, 2, [*flags, "--strategy", "independent"])
    (pod,) = group.start()
    pod.wait_for("initwarm.step.announced")
    worker = _youngest_when_there_are(pod, 5)

    os.kill(worker, signal.SIGKILL)

    assert pod.wait() == 0
    assert pod.message["outcome"] in ("warm", "cold")
    assert pod.processes() == []


def _youngest_when_there_are(pod: Pod, count: int) -> int:
    pause = threading.Event()
    for _ in range(1000):
        processes = pod.processes()
        if len(processes) >= count:
            return max(processes)
        pause.wait(0.01)
    raise AssertionError(f"{pod.processes()}\n{pod.log}")


def test_r21_a_run_warns_of_what_its_server_will_miss(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 1, plan_file(tmp_path, {"buckets": [1, 2, 4, 6]}))

    (pod,) = group.run()

    warning = pod.events("initwarm.plan.uncovered")[0]["message"]
    assert "miss at 5..6 tokens" in warning
    assert "{max: 8}" in warning


def test_a_killed_coordinator_ends_its_pod_at_once(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"seconds": 20})
    group = Group(pod_server, tmp_path, 1, 1, [*flags, "--on-tuning-failure", "fail"])
    (pod,) = group.start()
    pod.wait_for("initwarm.step.announced")
    _youngest_when_there_are(pod, 5)

    os.kill(_coordinator(pod), signal.SIGKILL)

    assert pod.wait(10) == 69
    assert "SIGKILL (out of memory?)" in pod.message["reason"]
    group.assert_nothing_visible([pod])


def _coordinator(pod: Pod) -> int:
    """The fork server is the agent's only child with children; the oldest of these is the coordinator."""
    parents = {process: _parent(process) for process in pod.processes()}
    (server,) = {parent for process, parent in parents.items() if parents.get(parent) == pod.pid}
    return min(process for process, parent in parents.items() if parent == server)


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("fault", [{"error": "the very cause", "error_rank": 1}, {"abort": 0, "abort_rank": 1}])
def test_a_rank_that_was_only_stopped_is_not_taken_for_the_cause(
    pod_server: PodServer, tmp_path: Path, fault: dict[str, Any]
) -> None:
    slow = {"name": "slow", "tactics": 20, "seconds": 0.3, "buckets": [1], "ranks": [0]}
    bad = {"name": "bad", "tactics": 2, "buckets": [1], "ranks": [1], **fault}
    group = Group(pod_server, tmp_path, 1, 2, [*plan_file(tmp_path, bad, slow), "--strategy", "independent"])

    (pod,) = group.run()

    if "abort" in fault:
        group.assert_warm([pod], tuned=True)
        assert [event["tactic"]["op"] for event in pod.events("initwarm.tactic.excluded")] == ["faults::bad"]
    else:
        assert pod.message["outcome"] == "cold"
        assert pod.message["first_failure"]["rank"] == 1
        assert "the very cause" in pod.message["first_failure"]["what"]
        assert not pod.events("initwarm.tactic.excluded")


def test_a_child_that_prints_without_end_does_not_keep_the_agent_from_sigterm(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 1, 2, [*plan_file(tmp_path, {"prints": True}), "--strategy", "independent"])
    (pod,) = group.start()
    pod.wait_for("initwarm.process.printed")

    pod.signal(signal.SIGTERM)

    assert pod.wait(8) == 143
    group.assert_nothing_visible([pod])


def test_a_rank_lost_between_its_replay_and_the_barrier_is_named(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"pause": 4, "pause_rank": 1, "buckets": [1]})
    group = Group(pod_server, tmp_path, 2, 1, [*flags, "--strategy", "leader", "--deadline", "60"])
    leader, follower = group.start()
    leader.wait_for_text('"message": "prove"')
    worker = _youngest_when_there_are(leader, 5)
    threading.Event().wait(1.5)

    os.kill(worker, signal.SIGKILL)

    assert [leader.wait(40), follower.wait(40)] == [75, 75]
    for pod in (leader, follower):
        assert "Rank 0 was lost after its replay" in pod.message["reason"]
    group.assert_nothing_visible([leader, follower])


def test_a_replay_that_hangs_ends_alike_on_all_pods(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"pause": 100, "pause_rank": 1, "deaf": True, "buckets": [1]})
    group = Group(pod_server, tmp_path, 2, 1, [*flags, "--strategy", "leader", "--deadline", "16"])

    pods = group.run()

    assert [(pod.status, pod.message["outcome"]) for pod in pods] == [(0, "cold"), (0, "cold")], pods[0].log
    assert len({pod.message["reason"] for pod in pods}) == 1
    group.assert_nothing_visible(pods)


def test_the_pod_that_started_first_sets_the_group_s_deadline(pod_server: PodServer, tmp_path: Path) -> None:
    flags = plan_file(tmp_path, {"seconds": 30})
    group = Group(pod_server, tmp_path, 2, 1, [*flags, "--strategy", "leader", "--deadline", "20"])
    port = free_port()
    follower = group.start_pod(1, port)
    threading.Event().wait(7)

    leader = group.start_pod(0, port)

    for pod in (leader, follower):
        assert (pod.wait(30), pod.message["outcome"]) == (0, "cold"), pod.log
        assert "Tuning did not end before the deadline" in pod.message["reason"]


def test_r22_nothing_to_tune_is_warm(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1, plan_file(tmp_path))

    pods = group.run()

    for pod in pods:
        assert (pod.status, pod.message["outcome"]) == (0, "warm"), pod.log
        assert (pod.message["tuned"], pod.message["missed"]) == (0, 0)
        assert pod.message["reason"].startswith("nothing to tune")


def forge(group: Group, change: Any, keeps_old: bool = False) -> None:
    """Put other entries in place of the published bundle, with digests that fit: only the replay can find it out."""
    from initwarm.bundle import V1_FILE, parse_bundle, record_files
    from initwarm.edges.volume import CacheVolume
    from initwarm.entries import V1File, encode_v1, parse_v1
    from initwarm.identity import Identity

    (directory,) = group.cache_root(0).glob("v1/*/bundles/*/*")
    bundle = parse_bundle((directory / "bundle.json").read_bytes())
    v1 = parse_v1((directory / V1_FILE).read_bytes())
    forged = V1File(v1.metadata, change(v1.entries), v1.records)
    files = {V1_FILE: encode_v1(forged)}
    record = dataclasses.replace(bundle, files=record_files(files), entries=len(forged.entries))
    CacheVolume(group.cache_root(0)).publish(Identity(v1.metadata), record, files)
    if not keeps_old:
        shutil.rmtree(directory)
