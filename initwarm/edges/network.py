"""Names, addresses and interfaces of this host, and what collectives must be told about them.

Gloo binds to whatever the host's name resolves to, which is 127.0.0.1 on some nodes and nothing in an IPv6-only pod; so
it is told the interface that leads to the leader. Names are resolved anew on each call, because a peer's address
changes when its pod is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from initwarm.errors import BarrierError, ConfigurationError

_IFF_LOOPBACK = 0x8
_ANY_PORT = 9  # a UDP socket that is connected sends nothing; the port only has to be valid
_ADDRESS_BYTES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # offset in the sockaddr, and length
_NSSWITCH = Path("/etc/nsswitch.conf")

_silent_lock = threading.Lock()
_silent = 0

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("ifa_next", ctypes.POINTER(_Ifaddrs)),
    ("ifa_name", ctypes.c_char_p),
    ("ifa_flags", ctypes.c_uint),
    ("ifa_addr", ctypes.c_void_p),
]


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Families and addresses of a host, in the order in which they should be tried; empty while the name is unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return list(dict.fromkeys((family, str(sockaddr[0])) for family, _, _, _, sockaddr in found))


def resolve_any(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """As `resolve`, also where the pod's search list lacks the cluster's domains, so that short names stay unknown."""
    names = [host]
    if "." in host and _is_name(host) and not host.endswith("."):
        names += [f"{host}.", f"{host}.svc.cluster.local."]
    return next((found for name in names if (found := resolve(name, port))), [])


def resolve_soon(host: str, port: int, seconds: float) -> list[tuple[socket.AddressFamily, str]]:
    """As `resolve_any`, and empty where no answer comes within so many seconds."""
    found: list[tuple[socket.AddressFamily, str]] = []
    thread = threading.Thread(target=lambda: found.extend(resolve_any(host, port)), name="resolver", daemon=True)
    thread.start()
    thread.join(seconds)
    return list(found)


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """Have this process take the names of hosts from its own files alone.

    Each connection of a `TCPStore` looks up the names of its ends, which nobody needs: the client while it connects,
    the server in the one thread that answers all clients. Where the name server is silent, that takes 5 s or more.

    Source:
        torch, c10d::detail::formatSockAddr, which calls getnameinfo in SocketImpl's constructor and in
        LibUVStoreDaemon::onConnect; glibc, nss/nss_database.c.
    """
    forget_name_servers()
    try:
        yield
    finally:
        _count_silent(-1)


def forget_name_servers() -> None:
    """As `without_name_servers`, for as long as this process lives."""
    _count_silent(1)


def _count_silent(change: int) -> None:
    global _silent
    with _silent_lock:
        before, _silent = _silent, _silent + change
        # Another C library than glibc has no such function.
        if bool(before) != bool(_silent):
            with contextlib.suppress(AttributeError, OSError):
                configure = ctypes.CDLL(None)["__nss_configure_lookup"]
                configure(b"hosts", b"files" if _silent else _sources_of_hosts())


def _sources_of_hosts() -> bytes:
    """Where this machine is set up to look for hosts."""
    with contextlib.suppress(OSError):
        for line in _NSSWITCH.read_bytes().splitlines():
            database, _, sources = line.partition(b"#")[0].partition(b":")
            if database.strip() == b"hosts" and sources.strip():
                return sources.strip()
    return b"files dns"


def _is_name(host: str) -> bool:
    try:
        _parse_address(host)
    except ValueError:
        return True
    return False


def own_addresses(environ: Mapping[str, str], interface: str | None = None) -> list[str]:
    """The addresses of this pod at which others may reach it, in the order in which they should be tried.

    Those of the chosen interface first; then what the downward API says (INITWARM_POD_IP, several with commas), then
    the other interfaces. Loopback addresses serve only where there is nothing else, link-local ones never.

    Args:
        environ: the pod's environment.
        interface: the one to use; None reads INITWARM_INTERFACE and NCCL_SOCKET_IFNAME.
    """
    held = [(name, address) for name, flags, address in _interface_addresses() if not flags & _IFF_LOOPBACK]
    usable = [(name, address) for name, address in held if not address.is_link_local]
    chosen = interface or environ.get("INITWARM_INTERFACE") or environ.get("NCCL_SOCKET_IFNAME") or ""
    preferred = [str(address) for name, address in usable if chosen and _matches_nccl(name, chosen)]
    told = [text.strip() for text in environ.get("INITWARM_POD_IP", "").split(",")]
    told = [text for text in told if text and not _is_name(text)]
    rest = [str(address) for _, address in usable]
    return list(dict.fromkeys([*preferred, *told, *rest])) or ["127.0.0.1", "::1"]


def _matches_nccl(name: str, value: str) -> bool:
    """Whether NCCL would use this interface: names are prefixes, `=` makes them exact, `^` excludes them."""
    patterns = tuple(value.lstrip("^=").split(","))
    if value.startswith("^"):
        return not name.startswith(patterns)
    return name in patterns if value.startswith("=") else name.startswith(patterns)


def address_towards(host: str, port: int) -> str:
    """The local address from which this machine reaches a host. Nothing is sent.

    Raises:
        BarrierError: the name is not known yet, or there is no route to any of its addresses; a retry may succeed.
    """
    reasons: list[str] = []
    for family, address in resolve(host, port):
        local, reason = _local_address(family, address, port)
        if local is not None:
            return local
        reasons.append(f"{address}: {reason}")
    raise BarrierError(
        f"The leader's host {host!r} has no address that can be reached from here"
        + (f" ({'; '.join(reasons)})." if reasons else ", since its name does not resolve."),
        "This pod cannot join its group yet.",
        "Check that the leader's pod exists and that its headless Service has publishNotReadyAddresses.",
    )


def _local_address(family: socket.AddressFamily, address: str, port: int) -> tuple[str | None, str]:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            return str(probe.getsockname()[0]), ""
    except OSError as error:
        return None, error.strerror or str(error)


def interface_of(address: str) -> str | None:
    """The interface that holds a local address; None if none does. Every 127.x address is on the loopback."""
    wanted = _parse_address(address)
    loopback = None
    for name, flags, held in _interface_addresses():
        if held == wanted:
            return name
        if flags & _IFF_LOOPBACK:
            loopback = name
    return loopback if wanted.is_loopback else None


def collective_environment(
    environ: Mapping[str, str], leader_address: str, interface: str | None = None
) -> dict[str, str]:
    """What to set for gloo and NCCL, so that both use the interface that leads to the leader.

    A variable that the user has set is checked and left alone. Where the address towards the leader is on no interface
    of this host, nothing is set.

    Args:
        environ: the pod's environment.
        leader_address: host name or address of node rank 0, which may be this host itself.
        interface: the interface to use; None reads INITWARM_INTERFACE and, if that is unset, asks the route.

    Raises:
        ConfigurationError: a named interface does not exist here.
        BarrierError: the leader's name does not resolve, or there is no route to it.
    """
    present = [name for _, name in socket.if_nameindex()]
    named = interface or environ.get("INITWARM_INTERFACE") or None
    if named is not None and named not in present:
        raise _unknown_interface("The interface of collectives", named, present)
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME"), environ.get("NCCL_SOCKET_IFNAME")
    _check_gloo(gloo, present)
    _check_nccl(nccl, present)
    if gloo and nccl:
        return {}
    chosen = named or interface_of(address_towards(leader_address, _ANY_PORT))
    if chosen is None:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": _as_nccl_pattern(chosen, present)}
    return {variable: value for variable, value in wanted.items() if not environ.get(variable)}


def _as_nccl_pattern(name: str, present: Sequence[str]) -> str:
    """NCCL reads a name as a prefix; `=` makes it exact, and is used only where it must be, since not all builds do."""
    is_prefix = any(other != name and other.startswith(name) for other in present)
    return f"={name}" if is_prefix else name


def _check_gloo(value: str | None, present: Sequence[str]) -> None:
    if not value:
        return
    if value.startswith(("^", "=")):
        raise ConfigurationError(
            f"GLOO_SOCKET_IFNAME is {value!r}, which is the syntax of NCCL_SOCKET_IFNAME.",
            "Gloo looks for an interface of that very name and would fail.",
            f"Set it to one of {', '.join(present)}, or unset it.",
        )
    for name in value.split(","):
        if name not in present:
            raise _unknown_interface("GLOO_SOCKET_IFNAME", value, present)


def _check_nccl(value: str | None, present: Sequence[str]) -> None:
    if not value:
        return
    if not any(_matches_nccl(name, value) for name in present):
        raise _unknown_interface("NCCL_SOCKET_IFNAME", value, present)


def _unknown_interface(what: str, value: str, present: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{what} is {value!r}, and no interface of this pod goes by that.",
        "Collectives would have nothing to bind to.",
        f"Use one of {', '.join(present)}, or unset it to follow the route to the leader.",
    )


def _parse_address(address: str) -> IPAddress:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return mapped if mapped is not None else parsed


def _interface_addresses() -> Iterator[tuple[str, int, IPAddress]]:
    """Name, flags and address of each interface's IPv4 and IPv6 addresses, from getifaddrs(3)."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        entry = first
        while entry:
            held = _address_at(entry.contents.ifa_addr)
            if held is not None:
                yield os.fsdecode(entry.contents.ifa_name), entry.contents.ifa_flags, held
            entry = entry.contents.ifa_next
    finally:
        libc.freeifaddrs(first)


def _address_at(sockaddr: int | None) -> IPAddress | None:
    if sockaddr is None:
        return None
    family = ctypes.cast(sockaddr, ctypes.POINTER(ctypes.c_ushort)).contents.value
    for known, (offset, length) in _ADDRESS_BYTES.items():
        if family == known:
            return ipaddress.ip_address(ctypes.string_at(sockaddr + offset, length))
    return None
