"""Addresses and interfaces of the real network, and of a network namespace without IPv4 where one can be made."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest

from initwarm.edges import network
from initwarm.errors import BarrierError, ConfigurationError

LOOPBACK = next(name for _, name in socket.if_nameindex() if network.interface_of("127.0.0.1") == name)
IPV6_ONLY_POD = """
set -e
ip link add eth0 type veth peer name far0
ip address add fd00::5/64 dev eth0 nodad
ip link set eth0 up; ip link set far0 up; ip link set lo up
ip address del 127.0.0.1/8 dev lo
exec "$@"
"""
IN_POD = """
import json
from initwarm.edges import network
address = network.address_towards("fd00::7", 1)
print(json.dumps([address, network.interface_of(address), network.collective_environment({}, "fd00::7")]))
try:
    network.address_towards("192.0.2.1", 1)
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
GLOO = """
import datetime, sys, torch.distributed as dist
rank = int(sys.argv[1])
store = dist.TCPStore("fd00::5", 29511, 2, rank == 0, timeout=datetime.timedelta(seconds=20))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20))
dist.barrier()
dist.destroy_process_group()
"""
GLOO_PAIR = '"$0" -c "$1" 0 & first=$!; "$0" -c "$1" 1; wait $first'


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def in_ipv6_only_pod(*command: str, **environ: str) -> str:
    """Run a command in a network namespace whose only addresses are IPv6 ones."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and ip for a network namespace")
    setup = subprocess.run(["unshare", "-n", "bash", "-c", IPV6_ONLY_POD, "-", "true"], capture_output=True)
    if setup.returncode != 0:
        pytest.skip(f"needs a network namespace with IPv6: {setup.stderr.decode()!r}")
    done = subprocess.run(
        ["unshare", "-n", "bash", "-c", IPV6_ONLY_POD, "-", *command],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_address_towards_an_ipv4_host_is_ipv4() -> None:
    assert network.address_towards("127.0.0.1", 1) == "127.0.0.1"


@pytest.mark.skipif(not has_ipv6_loopback(), reason="needs IPv6")
def test_the_address_towards_an_ipv6_host_is_ipv6() -> None:
    assert network.address_towards("::1", 1) == "::1"
    assert network.interface_of("::1") == LOOPBACK


def test_an_address_of_the_loopback_network_is_on_the_loopback() -> None:
    assert network.interface_of("127.0.1.1") == LOOPBACK
    assert network.interface_of("::ffff:127.0.0.1") == LOOPBACK


def test_an_address_of_another_host_is_on_no_interface() -> None:
    assert network.interface_of("192.0.2.1") is None
    assert network.interface_of("2001:db8::1") is None


def test_an_unknown_name_has_no_address_and_is_no_traceback() -> None:
    assert network.resolve("initwarm-leader.invalid", 1) == []
    assert network.resolve("a" * 70 + ".invalid", 1) == []
    with pytest.raises(BarrierError, match=r"'initwarm-leader\.invalid'.*does not resolve"):
        network.address_towards("initwarm-leader.invalid", 1)


def test_each_address_of_a_name_is_given_once() -> None:
    found = network.resolve("localhost", 1)

    assert (socket.AF_INET, "127.0.0.1") in found
    assert len(set(found)) == len(found)


def test_gloo_and_nccl_follow_the_route_to_the_leader() -> None:
    wanted = network.collective_environment({}, "127.0.0.1")

    assert wanted["GLOO_SOCKET_IFNAME"] == LOOPBACK
    assert wanted["NCCL_SOCKET_IFNAME"].lstrip("=") == LOOPBACK


@pytest.mark.parametrize("kept", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_what_the_user_set_is_left_alone(kept: str) -> None:
    wanted = network.collective_environment({kept: LOOPBACK}, "127.0.0.1")

    assert kept not in wanted
    assert len(wanted) == 1


def test_a_name_that_both_variables_give_needs_no_leader() -> None:
    environ = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": "=" + LOOPBACK}

    assert network.collective_environment(environ, "initwarm-leader.invalid") == {}


@pytest.mark.parametrize("named", [{"INITWARM_INTERFACE": LOOPBACK}, {}], ids=["environment", "argument"])
def test_a_named_interface_beats_the_route(named: Mapping[str, str]) -> None:
    argument = None if named else LOOPBACK

    wanted = network.collective_environment(named, "initwarm-leader.invalid", argument)

    assert wanted["GLOO_SOCKET_IFNAME"] == LOOPBACK


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"INITWARM_INTERFACE": "eth77"}, "eth77"),
        ({"GLOO_SOCKET_IFNAME": "eth77"}, "GLOO_SOCKET_IFNAME is 'eth77'"),
        ({"GLOO_SOCKET_IFNAME": f"{LOOPBACK},eth77"}, "eth77"),
        ({"NCCL_SOCKET_IFNAME": "eth77"}, "NCCL_SOCKET_IFNAME is 'eth77'"),
        ({"NCCL_SOCKET_IFNAME": "=eth77"}, "NCCL_SOCKET_IFNAME is '=eth77'"),
        ({"NCCL_SOCKET_IFNAME": "^" + ",".join(name for _, name in socket.if_nameindex())}, "NCCL_SOCKET_IFNAME"),
    ],
    ids=str,
)
def test_an_interface_that_does_not_exist_is_refused_with_those_that_do(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        network.collective_environment(environ, "127.0.0.1")

    assert says in str(caught.value)
    assert f"Use one of {LOOPBACK}" in str(caught.value)


@pytest.mark.parametrize("value", ["^docker", "l", "lo,eth77"])
def test_nccl_patterns_that_match_something_are_accepted(value: str) -> None:
    assert "NCCL_SOCKET_IFNAME" not in network.collective_environment({"NCCL_SOCKET_IFNAME": value}, "127.0.0.1")


def test_r82_nccl_syntax_given_to_gloo_is_refused_and_explained() -> None:
    with pytest.raises(ConfigurationError, match="syntax of NCCL_SOCKET_IFNAME"):
        network.collective_environment({"GLOO_SOCKET_IFNAME": "^lo"}, "127.0.0.1")


def test_an_ipv6_only_pod_finds_its_address_and_interface() -> None:
    lines = in_ipv6_only_pod(sys.executable, "-c", IN_POD).splitlines()

    assert json.loads(lines[0]) == ["fd00::5", "eth0", {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}]
    assert json.loads(lines[1])[0] == "BarrierError"
    assert "192.0.2.1: Network is unreachable" in lines[1]


def test_gloo_meets_in_an_ipv6_only_pod_when_told_the_interface() -> None:
    pytest.importorskip("torch.version", reason="needs torch for gloo")

    in_ipv6_only_pod("bash", "-c", GLOO_PAIR, sys.executable, GLOO, GLOO_SOCKET_IFNAME="eth0")
