"""The control channel's store on a real network, with a name server that is watched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.netns import ROOT, Network, why_not

HOST = """
import os, sys
sys.path.insert(0, sys.argv[1])
from initwarm.edges.channel import host_store
store = host_store(0)
print(store.port, flush=True)
sys.stdin.read()
os._exit(0)
"""
CLIENT = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from initwarm.edges.channel import Channel, open_client
clients = [open_client(address, int(sys.argv[2])) for address in sys.argv[3:]]
Channel(clients[0], "epoch").write("key", "value")
print(Channel(clients[-1], "epoch").read("key"), socket.gethostbyname("leader.example"), flush=True)
os._exit(0)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network() as made:
        yield made


def test_no_name_server_is_asked_who_is_at_the_ends_of_a_connection(network: Network, tmp_path: Path) -> None:
    names = network.start_names()
    names.tell({"leader.example": ["10.77.0.10"]})
    one, other = network.add_pod(tmp_path), network.add_pod(tmp_path)
    command = one.space.command(sys.executable, "-c", HOST, str(ROOT))
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    port = host.stdout.readline().strip()

    said = other.space.run(sys.executable, "-c", CLIENT, str(ROOT), port, *one.addresses)
    host.communicate()

    # Names that the client itself asks for are still looked up there.
    assert said == "value 10.77.0.10\n"
    assert {question["name"] for question in names.asked()} == {"leader.example"}
