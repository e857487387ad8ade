"""Pods find each other: by the volume, by name, through what networks and name servers do to them."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.groups import Group
from tests.support.netns import Network, open_for_other_users, why_not
from tests.support.plans import plan_file
from tests.support.pods import Pod, PodServer, free_port

NAME = "leader.group.team.svc.cluster.local"
NOBODY = "10.77.0.99"
PORT = 29555

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=f"needs namespaces: {why_not()}")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(ipv6=False) as made:
        yield made


def group_on(network: Network, server: PodServer, directory: Path, num_nodes: int = 2, **more: object) -> Group:
    """A group whose pods each have a network of their own; by default the leader's name is all that they are told."""
    pods = [network.add_pod(directory, f"pod-{node}") for node in range(num_nodes)]
    settings: dict[str, object] = {"leader_address": NAME, "arguments": ["--deadline", "120"], **more}
    placements = {node: pod.placement() for node, pod in enumerate(pods)}
    return Group(server, directory, num_nodes, 1, placements=placements, **settings)  # type: ignore[arg-type]


def start(group: Group, *more: str) -> list[Pod]:
    """Start all pods of a group on the port that they know."""
    group.lives += 1
    return [group.start_pod(node, PORT, *more) for node in range(group.num_nodes)]


def finish(pods: list[Pod]) -> list[Pod]:
    for pod in pods:
        pod.wait(150)
    return pods


# Address families and literals.


@needs_namespaces
@pytest.mark.parametrize("is_named", [True, False])
def test_pods_that_have_ipv6_only_meet(pod_server: PodServer, tmp_path: Path, is_named: bool) -> None:
    with Network(ipv4=False) as network:
        names = network.start_names()
        names.tell({NAME: ["fd77::a"]})
        address = NAME if is_named else "[fd77::a]"
        group = group_on(network, pod_server, tmp_path, leader_address=address, has_own_roots=True)

        group.assert_warm(finish(start(group)), tuned=True)


@needs_namespaces
def test_pods_of_a_dual_stack_meet_though_one_family_leads_nowhere(pod_server: PodServer, tmp_path: Path) -> None:
    with Network() as network:
        network.start_names().tell({NAME: ["fd77::99", "10.77.0.10"]})
        group = group_on(network, pod_server, tmp_path, has_own_roots=True)

        group.assert_warm(finish(start(group)), tuned=True)


@needs_namespaces
@pytest.mark.parametrize("literal", ["127.0.0.1", "[::1]", "::1"])
def test_r76_an_address_is_never_looked_up(
    pod_server: PodServer, tmp_path: Path, network: Network, literal: str
) -> None:
    names = network.start_names()
    names.tell(mode="failure")
    pod = network.add_pod(tmp_path)
    placements = dict.fromkeys(range(2), pod.placement())
    group = Group(pod_server, tmp_path, 2, 1, leader_address=literal, placements=placements, has_own_roots=True)

    group.assert_warm(finish(start(group)), tuned=True)

    assert names.asked() == []


# Names that are late, wrong, incomplete or never there.


@needs_namespaces
def test_r72_pods_meet_on_the_volume_where_no_name_is_ever_published(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    """A look-up that is too early would keep the name unknown for long: whoever finds the leader asks nobody."""
    names = network.start_names()
    names.tell(negative_seconds=45)
    group = group_on(network, pod_server, tmp_path, 3)

    group.assert_warm(finish(start(group)), tuned=True)

    followers = {"10.77.0.11", "10.77.0.12"}
    assert not [question for question in names.asked() if question["client"] in followers]


@needs_namespaces
def test_r70_a_name_that_appears_late_is_found_when_the_cached_denial_ends(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    names = network.start_names()
    names.tell(negative_seconds=45)
    group = group_on(network, pod_server, tmp_path, has_own_roots=True)
    pods = start(group)

    follower = pods[1]
    follower.wait_for_text(f"the name {NAME}: unknown for")
    names.tell({NAME: ["10.77.0.10"]})

    group.assert_warm(finish(pods), tuned=True)
    assert "a DNS cache may keep a denial for 30 s after that" in follower.log
    asked = [question for question in names.asked() if question["client"] == "10.77.0.11" and question["kind"] == 1]
    assert asked[0]["answer"] == "no such name"
    assert asked[-1]["answer"] == ["10.77.0.10"]


@needs_namespaces
def test_r74_an_address_that_was_wrong_at_first_is_looked_up_again(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    names = network.start_names()
    names.tell({NAME: [NOBODY]})
    group = group_on(network, pod_server, tmp_path, has_own_roots=True)
    pods = start(group)

    pods[1].wait_for_text(f"{NOBODY} port {PORT}, by {NAME}: ")
    names.tell({NAME: ["10.77.0.10"]})

    group.assert_warm(finish(pods), tuned=True)


@needs_namespaces
def test_r77_a_short_name_is_tried_with_the_domain_of_the_cluster(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    network.start_names().tell({NAME: ["10.77.0.10"]})
    group = group_on(network, pod_server, tmp_path, leader_address="leader.group.team", has_own_roots=True)

    group.assert_warm(finish(start(group)), tuned=True)


@needs_namespaces
def test_r69_a_name_server_that_fails_for_a_while_changes_nothing(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    names = network.start_names()
    names.tell({NAME: ["10.77.0.10"]}, mode="failure")
    group = group_on(network, pod_server, tmp_path, has_own_roots=True)
    pods = start(group)

    pods[1].wait_for_text(f"the name {NAME}: unknown for")
    names.tell(mode="answer")

    group.assert_warm(finish(pods), tuned=True)
    assert pods[1].status == 0


# Leaders that are not the one.


@needs_namespaces
def test_a_frozen_old_leader_behind_the_same_name_is_left_for_the_one_that_answers(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    names = network.start_names()
    names.tell({NAME: ["10.77.0.12"]})
    group = group_on(network, pod_server, tmp_path, 2, has_own_roots=True)
    elsewhere = network.add_pod(tmp_path, "old")
    group.placements = {**group.placements, 2: elsewhere.placement()}
    old = pod_server.start(
        tmp_path,
        "old",
        ["run", "--cache-root", str(tmp_path / "old-cache"), "--engine-root", str(tmp_path / "old-engine"), "--nnodes",
         "2", "--node-rank", "0", "--nproc-per-node", "1", "--group", "test", "--leader-address", NAME, "--port",
         str(PORT), "--deadline", "120"],
        placement=elsewhere.placement(),
    )  # fmt: skip
    old.wait_for("initwarm.group.joined")
    os.killpg(old.pid, signal.SIGSTOP)

    pods = start(group)
    pods[1].wait_for_text(f"10.77.0.12 port {PORT}, by {NAME}: something answers on this port")
    names.tell({NAME: ["10.77.0.10"]})

    group.assert_warm(finish(pods), tuned=True)
    os.killpg(old.pid, signal.SIGKILL)


def test_r79_something_else_on_the_leader_s_port_is_named_as_such(pod_server: PodServer, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    group = Group(pod_server, tmp_path, 2, 1, ["--deadline", "30"])

    pod = group.start_pod(1, server.server_address[1])

    assert pod.wait() == 75
    server.shutdown()
    server.server_close()
    assert "something answers on this port, but not as a leader of initwarm" in pod.message["reason"]


@needs_namespaces
def test_r85_two_groups_of_one_host_share_the_default_port(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    host = network.add_pod(tmp_path, "host").placement()
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    placements = {0: host, 1: host}
    plan = plan_file(tmp_path, {"seconds": 0.2})
    one = Group(pod_server, tmp_path / "one", 2, 1, plan, placements=placements, leader_address="127.0.0.1")
    other = Group(pod_server, tmp_path / "other", 2, 1, plan, placements=placements, leader_address="127.0.0.1")

    first = [one.start_pod(0, 0, "--group", "one")]
    first[0].wait_for("initwarm.group.joined")
    second = [other.start_pod(node, 0, "--group", "other") for node in range(2)]
    second[0].wait_for("initwarm.port.taken")
    first.append(one.start_pod(1, 0, "--group", "one"))

    one.assert_warm(finish(first), tuned=True)
    other.assert_warm(finish(second), tuned=True)
    assert "another group's" in second[0].events("initwarm.port.taken")[0]["message"]


def test_r85_a_port_that_was_asked_for_and_is_taken_is_named(pod_server: PodServer, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "other").mkdir()
    holder = Group(pod_server, tmp_path, 2, 1, ["--deadline", "60"]).start_pod(0, port)
    holder.wait_for("initwarm.group.joined")

    late = Group(pod_server, tmp_path / "other", 2, 1).start_pod(0, port, "--group", "other")

    assert late.wait() == 78
    assert f"Port {port} for the control channel is taken on this pod" in late.message["reason"]
    assert not holder.ended.is_set()


# Networks that let some things through.


@needs_namespaces
def test_r84_data_ports_that_are_closed_between_two_pods_are_named(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    """Both reach the leader, so that the control channel works; the collective does not."""
    group = group_on(
        network, pod_server, tmp_path, 3, arguments=["--deadline", "60", "--collective-timeout", "8"]
    )  # fmt: skip
    network.start_names().tell({NAME: ["10.77.0.10"]})
    network.cut(network.pods[1], network.pods[2])

    pods = finish(start(group))

    for pod in pods:
        assert (pod.status, pod.message["outcome"]) == (75, "failed"), pod.log
        assert "did not leave the barrier over gloo" in pod.message["reason"]
        assert "NetworkPolicy or firewall must allow all ports" in pod.message["reason"]
    assert len({pod.message["reason"] for pod in pods}) == 1
    group.assert_nothing_visible(pods)


@needs_namespaces
def test_a_cut_that_heals_in_time_costs_nothing_but_time(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    names = network.start_names()
    names.tell({NAME: ["10.77.0.10"]})
    group = group_on(network, pod_server, tmp_path)
    pods = start(group, *plan_file(tmp_path, {"seconds": 0.2}))
    pods[0].wait_for_text('"initwarm.step.announced", "message": "tune"')

    network.cut(network.pods[0], network.pods[1])
    pods[0].wait_for("initwarm.wait.continued")
    network.heal(network.pods[0], network.pods[1])

    group.assert_warm(finish(pods), tuned=True)


# Users.


@needs_namespaces
def test_pods_of_random_users_with_a_closed_umask_and_no_home_share_a_volume(
    pod_server: PodServer, tmp_path: Path, network: Network
) -> None:
    """As OpenShift runs them: any uid, gid 0."""
    hosts = [network.add_pod(tmp_path, f"pod-{node}") for node in range(2)]
    for host in hosts:
        for path in (Path(sys.executable), tmp_path, pod_server.workspace):
            open_for_other_users(host.space, path)
    for directory in (tmp_path, tmp_path / "cache", tmp_path / "engine-0", tmp_path / "engine-1"):
        directory.mkdir(exist_ok=True)
        directory.chmod(0o777)
    group = Group(
        pod_server, tmp_path, 2, 1, ["--deadline", "60"], environ={"HOME": ""}, leader_address=hosts[0].address
    )

    def start_as(*uids: int) -> list[Pod]:
        group.placements = {
            node: host.placement(uid=uid, gid=0, umask=0o077, has_home=False)
            for node, (host, uid) in enumerate(zip(hosts, uids, strict=True))
        }
        return finish(start(group))

    first = group.assert_warm(start_as(1000650000, 1000660000), tuned=True)
    for node in range(2):
        assert group.files(node)
        # An emptyDir ends with its pod.
        shutil.rmtree(group.engine_root(node))
        group.engine_root(node).mkdir()
        group.engine_root(node).chmod(0o777)
    assert group.assert_warm(start_as(1000670000, 1000680000), tuned=False) == first


# Nobody comes.


@pytest.mark.slow
def test_r88_after_a_minute_without_any_contact_the_known_deadlocks_are_listed_once(
    pod_server: PodServer, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    flags = ["--deadline", "250"]
    leader = Group(pod_server, tmp_path, 4, 1, flags).start_pod(0, free_port())
    follower = Group(pod_server, tmp_path / "other", 4, 1, flags).start_pod(2, free_port())

    said = [leader.wait_for("initwarm.group.absent"), follower.wait_for("initwarm.leader.absent")]

    assert "3 pods have not contacted the leader yet" in said[0]["message"]
    assert "No leader was found yet" in said[1]["message"]
    for event in said:
        for field in (
            "podManagementPolicy: Parallel",
            "publishNotReadyAddresses: true",
            "NetworkPolicy",
            "LeaderReady",
        ):
            assert field in event["message"]
    for pod in (leader, follower):
        pod.signal(signal.SIGTERM)
        assert pod.wait() == 143
        assert pod.log.count("The usual causes: ") == 1
