"""Reading a pod's environment: which variables have a value, and which values are numbers, hosts and names.

An empty string is unset, since a label that a pod does not have arrives as one. Labels and annotations are read from
variables that the pod spec declares through the downward API; their names follow from the keys: `INITWARM_LABEL_` or
`INITWARM_ANNOTATION_` and the key in upper case, with `_` for everything that is neither a letter nor a digit. Nothing
else is looked at: not the host's name, not a file, not the API server.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from initwarm.errors import TopologyError

#: Pods in one cluster. Source: Kubernetes, "Considerations for large clusters".
MAX_NODES = 150_000
#: Processes in one job, for launchers that number them; far above anything real, far below what range() would choke on.
MAX_RANKS = 1_000_000
#: Devices of one pod.
MAX_NPROC = 1024
NO_PLACE = "This pod's place in its group is unknown, so nothing was started."

_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_GROUP = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_IP = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_BRACKETED = re.compile(r"\[(?P<host>[^\]]*)\](?::(?P<port>.*))?", re.DOTALL)
_VARIABLE = re.compile(r"[A-Z0-9_]+")
_LINK_SUFFIX = re.compile(r"SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_LINK_NAME = re.compile(r"[A-Z0-9_]+_PORT(_[0-9]+_(TCP|UDP|SCTP))?")
_LINK_VALUE = ("tcp://", "udp://", "sctp://")
_OURS = (
    "INITWARM_", "LWS_", "GROVE_", "PET_", "JOB_COMPLETION_", "VC_", "VK_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_",
    "MASTER_", "TORCHELASTIC_", "SLURM_",
)  # fmt: skip


def label(key: str) -> str:
    """The variable in which the pod spec declares this label."""
    return "INITWARM_LABEL_" + _as_name(key)


def annotation(key: str) -> str:
    """The variable in which the pod spec declares this annotation."""
    return "INITWARM_ANNOTATION_" + _as_name(key)


def service_links(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names that look like settings and were made by Kubernetes from the name of a Service, sorted.

    A Service `initwarm` puts INITWARM_PORT=tcp://10.0.0.1:80 into every pod of its namespace, and one `vc-a` with a
    port named `num` puts VC_A_SERVICE_PORT_NUM there, unless the pod says `enableServiceLinks: false`.
    """
    ours = [name for name in environ if name.startswith(_OURS)]
    services = [
        name.removesuffix("SERVICE_HOST")
        for name in ours
        if name.endswith("_SERVICE_HOST") and name.removesuffix("HOST") + "PORT" in environ
    ]
    return tuple(sorted(name for name in ours if _is_link(name, environ[name], services)))


def shown(value: str) -> str:
    """A value as messages show it: quoted, without what would move a cursor, and cut to a line."""
    return repr(value if len(value) <= 80 else value[:77] + "...")


def listed(values: Mapping[str, str]) -> str:
    """Variables and their values, as messages show them."""
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())


def parse_number(name: str, text: str, low: int, high: int) -> int:
    """Read a whole number that is written in ASCII digits and nothing else.

    Raises:
        TopologyError: it is written otherwise, or is not from low to high.
    """
    number = int(text) if _NUMBER.fullmatch(text) else -1
    if not low <= number <= high:
        raise TopologyError(
            f"{name} is {shown(text)}, which is no whole number from {low} to {high}.",
            NO_PLACE,
            f"Set {name} to a number in plain digits, or leave it unset.",
        )
    return number


def parse_nproc(name: str, text: str) -> int | None:
    """Read a number of ranks per pod; None for `gpu` and `auto`, which count devices at run time.

    Source:
        torch 2.14, torch.distributed.run, --nproc-per-node.
    """
    if text in ("gpu", "auto"):
        return None
    if not _NUMBER.fullmatch(text):
        raise TopologyError(
            f"{name} is {shown(text)}, which is neither a number nor `gpu` or `auto`.",
            "The ranks of this pod are unknown, so nothing was started.",
            f"Set {name} to the ranks of this pod, or to `gpu` for one a visible GPU.",
        )
    return parse_number(name, text, 1, MAX_NPROC)


def parse_host(name: str, text: str) -> tuple[str, int | None]:
    """Read a host name or IP address, and the port behind it if there is one; IPv6 has a port only behind brackets.

    Raises:
        TopologyError: it names no host.
    """
    host, port = _split_host(text)
    is_host = as_ip(host) is not None or (":" not in host and _HOST.fullmatch(host) is not None)
    if not is_host or host.lower() in ("none", "null"):
        raise TopologyError(
            f"{name} is {shown(text)}, which is no host name and no IP address.",
            "The leader cannot be reached, so nothing was started.",
            f"Set {name} to the host of node rank 0, as host, host:port or [IPv6]:port.",
        )
    return host, None if port is None else parse_number(f"The port in {name}", port, 1, 65535)


def parse_group(name: str, text: str) -> str:
    """Check that a group's name can be a directory and a store key.

    Raises:
        TopologyError: it cannot.
    """
    if not _GROUP.fullmatch(text):
        raise TopologyError(
            f"{name} is {shown(text)}, which cannot name a group.",
            "Nothing was started.",
            "Set --group or INITWARM_GROUP to at most 128 letters, digits, `.`, `_` and `-`, not beginning with a dot.",
        )
    return text


def as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, where a host is given as one."""
    if not _IP.fullmatch(host):
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@dataclass(frozen=True)
class Explicit:
    """What flags and `INITWARM_*` say, checked.

    Args:
        given: the text of each, by the flag or variable that said it.
        has_nproc: something was said about ranks per pod, if only that they are counted at run time.
    """

    source: str | None = None
    num_nodes: int | None = None
    node_rank: int | None = None
    nproc_per_node: int | None = None
    has_nproc: bool = False
    leader_address: str | None = None
    leader_port: int | None = None
    group: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)


class PodEnvironment:
    """The environment as one detector reads it; it keeps what had a value, and so what may be shown of it."""

    def __init__(self, environ: Mapping[str, str], explicit: Explicit) -> None:
        self.explicit = explicit
        self.saw: dict[str, str] = {}
        self._environ = environ

    def text(self, variable: str) -> str | None:
        """The value, or None where it is unset or empty."""
        value = self._environ.get(variable) or None
        if value is not None:
            self.saw[variable] = value
        return value

    def number(self, low: int, high: int, *variables: str) -> int | None:
        """The number that all of these variables give which have a value.

        Raises:
            TopologyError: one is no such number, or two differ.
        """
        found: dict[str, int] = {}
        for variable in variables:
            text = self.text(variable)
            if text is not None:
                found[variable] = parse_number(variable, text, low, high)
        if len(set(found.values())) > 1:
            values = " and ".join(f"{variable} is {number}" for variable, number in found.items())
            raise TopologyError(
                f"{values}, and both should say the same.", NO_PLACE, "Correct the one that the pod spec sets itself."
            )
        return next(iter(found.values()), None)

    def index(self, *variables: str) -> int | None:
        """A place among pods, from 0."""
        return self.number(0, MAX_NODES - 1, *variables)

    def size(self, *variables: str) -> int | None:
        """A number of pods, at least 1."""
        return self.number(1, MAX_NODES, *variables)

    def host(self, variable: str) -> str | None:
        """A host, without the port."""
        text = self.text(variable)
        return None if text is None else parse_host(variable, text)[0]

    def between(self, prefix: str, suffix: str) -> Iterator[str]:
        """What stands between prefix and suffix in the names of variables that have a value, sorted."""
        for variable in sorted(self._environ):
            middle = variable.removeprefix(prefix).removesuffix(suffix)
            if _VARIABLE.fullmatch(middle) and variable == prefix + middle + suffix and self.text(variable) is not None:
                yield middle


def _as_name(key: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", key.upper())


def _is_link(name: str, value: str, services: list[str]) -> bool:
    if value.startswith(_LINK_VALUE) and _LINK_NAME.fullmatch(name):
        return True
    return any(
        name.startswith(service) and _LINK_SUFFIX.fullmatch(name[len(service) :]) is not None for service in services
    )


def _split_host(text: str) -> tuple[str, str | None]:
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed is not None:
        # Brackets mean IPv6, so that a name in them is as wrong as no name.
        host = bracketed["host"]
        return (host if ":" in host else ""), bracketed["port"]
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, None
