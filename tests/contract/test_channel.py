"""The control channel's store on a real network, with a name server that is watched."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from initwarm.edges.channel import open_client
from initwarm.errors import LostLeaderError
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x46"])
def test_r79_who_accepts_a_connection_and_is_no_leader_is_given_up(greeting: bytes) -> None:
    """A process that stands still, a web server, and a proxy that wants TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while greeting:
                    with server.accept()[0] as connection:
                        connection.sendall(greeting)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(LostLeaderError):
            open_client("127.0.0.1", server.getsockname()[1])
