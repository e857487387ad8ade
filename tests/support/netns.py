"""Pods with a network, a table of mounts and name look-ups of their own, joined by a switch, as in a cluster.

A namespace is held by a process that ends when its stdin does, so a test that dies leaves no interface and no name
behind. All networks use the same addresses: nothing of one can be reached from another, or from this machine.

    with Network() as network:
        one, other = network.add_pod(directory), network.add_pod(directory)
        server.start(..., placement=one.placement())
        network.cut(one, other)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_FIRST_POD = 10
#: Nobody has it, so that what is sent there is lost without a word.
_NOBODY = "02:00:00:00:de:ad"
DEVICE = "eth0"


def why_not() -> str | None:
    """Why no such network can be made here; None if one can."""
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    for name, bit in (("CAP_NET_ADMIN", _CAP_NET_ADMIN), ("CAP_SYS_ADMIN", _CAP_SYS_ADMIN)):
        if not int(held.split()[1], 16) >> bit & 1:
            return f"namespaces need {name}"
    return None


class Namespace:
    """A network and a table of mounts, for as long as this object is open."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--propagation", "slave", "sh", "-c", "echo; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"\n":
            raise OSError("unshare made no namespace")
        self.pid = self._holder.pid
        self.ip("link set lo up")

    def paths(self) -> list[str]:
        """What a process enters by setns(2), in this order."""
        return [f"/proc/{self.pid}/ns/{kind}" for kind in ("net", "mnt")]

    def command(self, *words: str) -> list[str]:
        """A command that runs in here."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", *words]

    def run(self, *words: str, stdin: str | None = None) -> str:
        """Run a program in here and return what it printed."""
        done = subprocess.run(self.command(*words), input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout

    def ip(self, *lines: str) -> None:
        """Carry out commands of ip(8), given without their first word."""
        self.run("ip", "-batch", "-", stdin="\n".join(lines) + "\n")

    def close(self) -> None:
        """Let the namespaces go; processes in them keep them until they end."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(10)
        self._holder.stdout.close()


@dataclass
class PodNamespace:
    """Where one pod runs.

    Args:
        number: from 0, in the order in which pods were added.
        space: its namespaces.
        ipv4: its address, if the network has IPv4.
        ipv6: its address, if the network has IPv6.
        hosts: the file that the pod sees as /etc/hosts; it may be rewritten in place.
        resolv: the file that it sees as /etc/resolv.conf.
    """

    number: int
    space: Namespace
    ipv4: str | None
    ipv6: str | None
    hosts: Path
    resolv: Path

    @property
    def addresses(self) -> list[str]:
        return [address for address in (self.ipv4, self.ipv6) if address]

    @property
    def address(self) -> str:
        """The one that others use."""
        return self.addresses[0]

    def placement(
        self, uid: int | None = None, gid: int | None = None, umask: int | None = None, has_home: bool = True
    ) -> dict[str, Any]:
        """What `PodServer.start` takes as its `placement`, so that the pod runs in here."""
        return placement(uid, gid, umask, has_home, self.space.paths())


def placement(
    uid: int | None = None,
    gid: int | None = None,
    umask: int | None = None,
    has_home: bool = True,
    namespaces: Sequence[str] = (),
) -> dict[str, Any]:
    """How a pod runs that is not this process's twin: its user, group, umask, HOME and namespaces."""
    return {"uid": uid, "gid": gid, "umask": umask, "has_home": has_home, "namespaces": list(namespaces)}


class NameServer:
    """The DNS server of a network; names and what becomes of questions can be changed while it runs."""

    def __init__(self, space: Namespace, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        words = [sys.executable, "-m", "tests.support.nameserver", *addresses]
        self._process = subprocess.Popen(
            space.command(*words),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._answer()

    def tell(
        self,
        table: Mapping[str, Sequence[str]] | None = None,
        *,
        mode: str | None = None,
        negative_seconds: float | None = None,
        delay_seconds: float | None = None,
    ) -> None:
        """Change what is answered; what is None stays.

        Args:
            table: addresses by name, in place of the table before.
            mode: `answer`; `failure`, as a server whose own source is away; `silent`, no answer at all.
            negative_seconds: how long a denial is repeated though the name exists by then.
            delay_seconds: how long each answer takes.
        """
        told = {
            "table": None if table is None else {name: list(addresses) for name, addresses in table.items()},
            "mode": mode,
            "negative_seconds": negative_seconds,
            "delay_seconds": delay_seconds,
        }
        self._ask({field: value for field, value in told.items() if value is not None})

    def asked(self) -> list[dict[str, Any]]:
        """Every question so far: client, name, kind (1 for A, 28 for AAAA), and the answer, None if there was none."""
        return list(self._ask({})["asked"])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError("the name server died")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Network:
    """A switch and the pods on it. Use it as a context manager, or close it.

    Args:
        ipv4: whether pods have IPv4 addresses.
        ipv6: whether they have IPv6 addresses; both make a dual stack.
    """

    def __init__(self, ipv4: bool = True, ipv6: bool = True) -> None:
        self._ipv4, self._ipv6 = ipv4, ipv6
        self._switch = Namespace()
        self.pods: list[PodNamespace] = []
        self.names: NameServer | None = None
        self._own = [*(["10.77.0.1"] if ipv4 else []), *(["fd77::1"] if ipv6 else [])]
        try:
            self._switch.ip(
                "link add switch type bridge mcast_snooping 0",
                "link set switch up",
                *_address_commands("switch", self._own),
            )
        except OSError:
            self._switch.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start_names(self) -> NameServer:
        """Start the network's DNS server; pods that are added afterwards, and before, ask it."""
        self.names = NameServer(self._switch, self._own)
        return self.names

    def add_pod(self, directory: Path, name: str | None = None) -> PodNamespace:
        """Connect another pod.

        Args:
            directory: for its /etc/hosts and /etc/resolv.conf.
            name: of its host in /etc/hosts; None leaves only localhost there.
        """
        number = len(self.pods)
        space = Namespace()
        stem = f"host-{number}"
        pod = PodNamespace(
            number,
            space,
            f"10.77.0.{_FIRST_POD + number}" if self._ipv4 else None,
            f"fd77::{_FIRST_POD + number:x}" if self._ipv6 else None,
            directory / f"{stem}.hosts",
            directory / f"{stem}.resolv.conf",
        )
        self.pods.append(pod)
        own = "".join(f"{address} {name}\n" for address in pod.addresses) if name else ""
        pod.hosts.write_text(f"127.0.0.1 localhost\n::1 localhost\n{own}")
        servers = "".join(f"nameserver {address}\n" for address in self._own)
        pod.resolv.write_text(f"{servers}options timeout:1 attempts:2\n")
        far = f"pod{number}"
        space.ip(
            f"link add {DEVICE} type veth peer name {far} netns {self._switch.pid}",
            f"link set {DEVICE} up",
            *_address_commands(DEVICE, pod.addresses),
        )
        self._switch.ip(f"link set {far} master switch up")
        for file, place in ((pod.hosts, "/etc/hosts"), (pod.resolv, "/etc/resolv.conf")):
            space.run("mount", "--bind", str(file), os.path.realpath(place))
        return pod

    def cut(self, one: PodNamespace, other: PodNamespace) -> None:
        """Lose all that two pods send each other, in silence, as a broken link or a policy does."""
        for here, there in ((one, other), (other, one)):
            here.space.ip(
                *(f"neigh replace {address} lladdr {_NOBODY} dev {DEVICE} nud permanent" for address in there.addresses)
            )

    def heal(self, one: PodNamespace, other: PodNamespace) -> None:
        """Undo `cut`."""
        for here, there in ((one, other), (other, one)):
            here.space.ip(*(f"neigh del {address} dev {DEVICE}" for address in there.addresses))

    def unplug(self, pod: PodNamespace) -> None:
        """Take a pod off the network; it keeps its interface and addresses."""
        self._switch.ip(f"link set pod{pod.number} nomaster")

    def plug(self, pod: PodNamespace) -> None:
        """Undo `unplug`."""
        self._switch.ip(f"link set pod{pod.number} master switch")

    def close(self) -> None:
        """Take everything down."""
        if self.names is not None:
            self.names.close()
        for space in (*(pod.space for pod in self.pods), self._switch):
            space.close()


def _address_commands(device: str, addresses: Sequence[str]) -> list[str]:
    # Without nodad an IPv6 address cannot be bound to for a second or two.
    return [
        f"address add {address}/64 dev {device} nodad" if ":" in address else f"address add {address}/24 dev {device}"
        for address in addresses
    ]


def open_for_other_users(space: Namespace, path: Path) -> None:
    """Let other users through to a path in here, whatever the modes of the directories above it.

    The modes on this machine stay: each closed directory is covered by a copy of its top level that is open.
    """
    for above in reversed(Path(os.path.realpath(path)).parents):
        if above.stat().st_mode & 0o005 == 0o005:
            continue
        script = [
            'set -e; cover=$(mktemp -d); mount -t tmpfs -o mode=755 cover "$cover"; cd "$1"',
            'for name in .[!.]* *; do if [ -d "$name" ] && [ ! -L "$name" ]; then mkdir "$cover/$name"',
            'mount --rbind "$name" "$cover/$name"; elif [ -L "$name" ]; then cp -P "$name" "$cover/$name"; fi; done',
            'mount --move "$cover" "$1"; rmdir "$cover"',
        ]
        space.run("sh", "-c", "\n".join(script), "sh", str(above))
