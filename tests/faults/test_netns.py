"""Pods in namespaces of their own reach each other as told, and ask the name server that is theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.netns import Namespace, Network, PodNamespace, open_for_other_users, placement, why_not
from tests.support.pods import ROOT, PodServer

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"needs namespaces: {why_not()}")
#: Prints a line when somebody has connected.
LISTEN = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7777), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(flush=True)
while True:
    connection = listener.accept()[0]
    connection.sendall(connection.recv(100))
"""
TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7777), timeout=float(sys.argv[2])) as connection:
    connection.sendall(b"hello")
    print(connection.recv(100).decode())
"""
#: Prints the addresses of each name that comes as a line, in one process, as a pod that tries again does.
RESOLVE = """
import json, socket, sys
for line in sys.stdin:
    try:
        found = socket.getaddrinfo(line.strip(), 1, type=socket.SOCK_STREAM)
        print(json.dumps(sorted({entry[4][0] for entry in found})), flush=True)
    except socket.gaierror as problem:
        print(json.dumps(problem.errno), flush=True)
"""
Stack = tuple[bool, bool]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


class Resolver:
    """A process in a pod that looks names up."""

    def __init__(self, pod: PodNamespace) -> None:
        self._process = subprocess.Popen(
            pod.space.command(sys.executable, "-c", RESOLVE), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def find(self, name: str) -> list[str] | int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        found: list[str] | int = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def resolver(network: Network, tmp_path: Path) -> Iterator[Resolver]:
    network.start_names()
    resolver = Resolver(network.add_pod(tmp_path))
    yield resolver
    resolver.close()


@pytest.fixture
def listening() -> Iterator[Callable[[PodNamespace, str], None]]:
    """Start a server in a pod."""
    started: list[subprocess.Popen[bytes]] = []

    def listen(pod: PodNamespace, address: str) -> None:
        words = pod.space.command(sys.executable, "-c", LISTEN, address)
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        stdout = started[-1].stdout
        assert stdout is not None
        assert stdout.readline() == b"\n"

    yield listen
    for process in started:
        process.kill()
        process.communicate()


def talk(pod: PodNamespace, address: str, seconds: float = 30) -> str:
    try:
        return pod.space.run(sys.executable, "-c", TALK, address, str(seconds)).strip()
    except OSError as problem:
        return str(problem).strip().rpartition("\n")[2]


@pytest.mark.parametrize(("stack", "count"), [((True, True), 2), ((True, False), 1), ((False, True), 1)])
def test_pods_reach_each_other_at_every_address(
    tmp_path: Path, listening: Callable[[PodNamespace, str], None], stack: Stack, count: int
) -> None:
    with Network(*stack) as network:
        one, other = network.add_pod(tmp_path), network.add_pod(tmp_path)
        assert len(one.addresses) == count
        for address in one.addresses:
            listening(one, address)
            assert talk(other, address) == "hello"


def test_a_pod_without_ipv4_has_none_but_for_itself(tmp_path: Path) -> None:
    with Network(ipv4=False) as network:
        pod = network.add_pod(tmp_path)
        shown = pod.space.run("ip", "-4", "-o", "address")
        assert [line.split()[1] for line in shown.splitlines()] == ["lo"]
        assert "fd77::a/64" in pod.space.run("ip", "-6", "-o", "address")


def test_two_networks_have_the_same_addresses_and_do_not_meet(
    network: Network, tmp_path: Path, listening: Callable[[PodNamespace, str], None]
) -> None:
    with Network() as second:
        here, there = network.add_pod(tmp_path), second.add_pod(tmp_path)
        asking = second.add_pod(tmp_path)
        assert here.addresses == there.addresses
        listening(here, here.address)
        assert "refused" in talk(asking, there.address)
        assert talk(network.add_pod(tmp_path), here.address) == "hello"


def test_a_cut_link_loses_everything_between_two_pods_and_nothing_else(
    network: Network, tmp_path: Path, listening: Callable[[PodNamespace, str], None]
) -> None:
    one, other, third = (network.add_pod(tmp_path) for _ in range(3))
    for address in one.addresses:
        listening(one, address)
        assert talk(other, address) == "hello"

    network.cut(one, other)
    for address in one.addresses:
        assert "timed out" in talk(other, address, 0.5)
        assert talk(third, address) == "hello"

    network.heal(one, other)
    for address in one.addresses:
        assert talk(other, address) == "hello"


def test_a_pod_that_is_unplugged_reaches_nobody_until_it_is_back(
    network: Network, tmp_path: Path, listening: Callable[[PodNamespace, str], None]
) -> None:
    one, other = network.add_pod(tmp_path), network.add_pod(tmp_path)
    listening(one, one.address)
    network.unplug(one)
    assert "timed out" in talk(other, one.address, 0.5)

    network.plug(one)

    assert talk(other, one.address) == "hello"


def test_names_are_answered_from_a_table_that_changes(network: Network, resolver: Resolver) -> None:
    assert network.names is not None
    network.names.tell({"leader.group": ["10.77.0.99", "fd77::99"], "old": ["10.77.0.98"]})
    assert resolver.find("leader.group") == ["10.77.0.99", "fd77::99"]
    assert resolver.find("LEADER.group.") == ["10.77.0.99", "fd77::99"]
    assert resolver.find("old") == ["10.77.0.98"]

    network.names.tell({"leader.group": ["10.77.0.97"]})

    assert resolver.find("leader.group") == ["10.77.0.97"]
    assert isinstance(resolver.find("old"), int)
    assert {question["client"] for question in network.names.asked()} == {"10.77.0.10"}


def test_a_name_that_was_denied_stays_unknown_for_a_time(network: Network, resolver: Resolver) -> None:
    assert network.names is not None
    network.names.tell({}, negative_seconds=3600)
    assert isinstance(resolver.find("late"), int)
    network.names.tell({"late": ["10.77.0.99"], "fresh": ["10.77.0.99"]})

    assert isinstance(resolver.find("late"), int)
    assert resolver.find("fresh") == ["10.77.0.99"]

    network.names.tell({}, negative_seconds=0.3)
    assert isinstance(resolver.find("brief"), int)
    network.names.tell({"brief": ["10.77.0.99"]})
    pause = threading.Event()
    for _ in range(100):
        if resolver.find("brief") == ["10.77.0.99"]:
            break
        pause.wait(0.05)
    assert resolver.find("brief") == ["10.77.0.99"]


def test_a_name_server_can_fail_and_say_nothing_and_be_late(network: Network, resolver: Resolver) -> None:
    assert network.names is not None
    network.names.tell({"name": ["10.77.0.99"]}, mode="failure")
    assert isinstance(resolver.find("name"), int)
    network.names.tell(mode="silent")
    assert isinstance(resolver.find("name"), int)
    assert network.names.asked()[-1]["answer"] is None
    network.names.tell(mode="answer", delay_seconds=0.2)
    assert resolver.find("name") == ["10.77.0.99"]


def test_a_pod_has_hosts_and_a_resolver_of_its_own(network: Network, tmp_path: Path) -> None:
    pod = network.add_pod(tmp_path, "own-name")
    before = Path("/etc/hosts").read_bytes(), Path("/etc/resolv.conf").read_bytes()

    assert "10.77.0.10 own-name" in pod.space.run("cat", "/etc/hosts")
    assert "nameserver 10.77.0.1" in pod.space.run("cat", "/etc/resolv.conf")
    pod.hosts.write_text("10.77.0.55 changed\n")

    resolver = Resolver(pod)
    assert resolver.find("changed") == ["10.77.0.55"]
    resolver.close()
    assert (Path("/etc/hosts").read_bytes(), Path("/etc/resolv.conf").read_bytes()) == before


def test_nothing_is_left_when_the_test_is_killed(tmp_path: Path) -> None:
    script = f"""
import json, threading
from pathlib import Path
from tests.support.netns import Network
network = Network()
network.start_names()
network.add_pod(Path({str(tmp_path)!r}))
print(json.dumps([network.pods[0].space.pid, network._switch.pid, network.names._process.pid]), flush=True)
threading.Event().wait()
"""
    test = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert test.stdout is not None
    pids = json.loads(test.stdout.readline())
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)

    test.kill()
    test.communicate()

    pause = threading.Event()
    for _ in range(500):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            break
        pause.wait(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_directory_that_is_closed_to_others_is_opened_in_one_pod_only(network: Network, tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").write_text("content")
    (tmp_path / "closed").chmod(0o700)
    space = network.add_pod(tmp_path).space
    words = ["setpriv", "--reuid", "12345", "--clear-groups", "cat", str(inner / "file")]

    with pytest.raises(OSError, match="Permission denied"):
        space.run(*words)
    open_for_other_users(space, inner)

    assert space.run(*words) == "content"
    assert (tmp_path / "closed").stat().st_mode & 0o777 == 0o700


def test_a_pod_runs_where_and_as_whom_it_is_told(pod_server: PodServer, network: Network, tmp_path: Path) -> None:
    space = network.add_pod(tmp_path)
    script = "id -u; id -g; id -G; umask; echo home=$HOME; cat /etc/hosts; ip -o -4 address show eth0"
    command = ["sh", "-c", script]
    arguments = ["run", "--engine-root", str(tmp_path / "engine")]
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o777)
    if os.access(sys.executable, os.X_OK):
        open_for_other_users(space.space, Path(sys.executable))

    pod = pod_server.start(
        tmp_path,
        "pod",
        arguments,
        {"INITWARM_DISABLE": "1"},
        command,
        space.placement(uid=12345, gid=54321, umask=0o077, has_home=False),
    )

    assert pod.wait() == 0, pod.log
    printed = [line for line in pod.log.splitlines() if not line.startswith("{")]
    assert printed[:5] == ["12345", "54321", "54321", "0077", "home="], pod.log
    assert "10.77.0.10/24" in printed[-1]


def test_a_pod_without_a_placement_runs_as_this_process_does(pod_server: PodServer, tmp_path: Path) -> None:
    arguments = ["run", "--engine-root", str(tmp_path / "engine")]
    command = ["sh", "-c", "id -u; echo home=$HOME; readlink /proc/self/ns/net"]

    pod = pod_server.start(tmp_path, "pod", arguments, {"INITWARM_DISABLE": "1"}, command, placement())

    assert pod.wait() == 0, pod.log
    printed = [line for line in pod.log.splitlines() if not line.startswith("{")]
    assert printed == [str(os.getuid()), f"home={os.environ['HOME']}", str(Path("/proc/self/ns/net").readlink())]


def test_a_namespace_that_is_closed_is_gone(tmp_path: Path) -> None:
    space = Namespace()
    path = Path(space.paths()[0])
    assert path.exists()
    space.close()
    assert not path.exists()
