"""The kernel's FUSE protocol, spoken directly, so that a file system of a test needs no library and no helper.

Every object that the kernel knows is held by an O_PATH descriptor of the backing file system, so that renames by others
below the backing directory cannot mislead it. Nothing is cached: each operation of a process is one request here.

Source: include/uapi/linux/fuse.h, protocol 7.31.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SUBTYPE = "fuse.faultfs"
ROOT = 1
DIRECT_IO = 1
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE = (
    1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15, 16,
)  # fmt: skip
STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, GETLK, SETLK, SETLKW, CREATE = (
    17, 18, 20, 25, 26, 27, 28, 29, 30, 31, 32, 33, 35,
)  # fmt: skip
INTERRUPT, BATCH_FORGET, RENAME2 = 36, 42, 45

_MAJOR, _MINOR = 7, 31
_MAX_WRITE = 1 << 17
_BUFFER = _MAX_WRITE + (1 << 14)
_MNT_DETACH = 2
_BIG_WRITES, _PARALLEL_DIROPS, _POSIX_LOCKS, _FLOCK_LOCKS = 1 << 5, 1 << 18, 1 << 1, 1 << 10
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")

_libc = ctypes.CDLL(None, use_errno=True)


def mount(device: int, at: Path, name: str) -> None:
    """Mount a FUSE connection; needs CAP_SYS_ADMIN.

    Args:
        device: an open /dev/fuse.
        at: an existing directory.
        name: what the table of mounts shows as the source.

    Raises:
        OSError: the kernel refused.
    """
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if _libc.mount(name.encode(), os.fsencode(at), SUBTYPE.encode(), 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount of {SUBTYPE}: {os.strerror(ctypes.get_errno())}", str(at))


def unmount(at: Path) -> bool:
    """Take a mount away at once, whoever uses it; whether there was one."""
    return bool(_libc.umount2(os.fsencode(at), _MNT_DETACH) == 0)


def mounts_below(top: Path) -> list[Path]:
    """Where file systems of this kind are mounted, the innermost first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        at = Path(before.split(" ")[4].encode().decode("unicode_escape"))
        if after.split(" ")[0] == SUBTYPE and at.is_relative_to(top):
            found.append(at)
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class Request:
    """One operation of a process: the object that it is about, and who asks."""

    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int
    body: memoryview


@dataclass
class _Node:
    descriptor: int
    key: tuple[int, int]
    lookups: int = 0


class Nodes:
    """The objects that the kernel knows, by the numbers that it knows them by.

    Args:
        top: the backing directory.
    """

    def __init__(self, top: str) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[tuple[int, int], int] = {}
        self._last = ROOT
        descriptor = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._nodes = {ROOT: _Node(descriptor, _key(os.fstat(descriptor)), 1)}

    def descriptor(self, number: int) -> int:
        """The O_PATH descriptor of an object."""
        with self._lock:
            found = self._nodes.get(number)
        if found is None:
            raise OSError(errno.ESTALE, "unknown to this mount")
        return found.descriptor

    def find(self, parent: int, name: str) -> tuple[int, os.stat_result]:
        """Look a name up in a directory, which the kernel counts until it forgets the object."""
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor(parent))
        status = os.fstat(descriptor)
        with self._lock:
            number = self._numbers.get(_key(status))
            if number is None:
                self._last = number = self._last + 1
                self._numbers[_key(status)] = number
                self._nodes[number] = _Node(descriptor, _key(status))
            else:
                # Also the root, through a name such as `.`, keeps its number.
                os.close(descriptor)
            self._nodes[number].lookups += 1
        return number, status

    def forget(self, number: int, lookups: int) -> None:
        """Take so many look-ups back; an object that is known no more is let go."""
        with self._lock:
            node = self._nodes.get(number)
            if node is None or number == ROOT:
                return
            node.lookups -= lookups
            if node.lookups <= 0:
                del self._nodes[number], self._numbers[node.key]
                os.close(node.descriptor)


class Connection:
    """Requests of the kernel, each handed to an operation.

    Args:
        device: an open /dev/fuse that is mounted.
        nodes: what the kernel knows.
        operations: by opcode; each returns the body of its answer or raises OSError.
        has_locks: without them flock and fcntl locks fail with ENOLCK; with them they hold on this mount only.
    """

    def __init__(
        self, device: int, nodes: Nodes, operations: dict[int, Callable[[Request], bytes]], has_locks: bool
    ) -> None:
        self._device = device
        self._nodes = nodes
        self._has_locks = has_locks
        self._operations = {INIT: self._init, GETLK: _no_lock, SETLK: _no_lock, SETLKW: _no_lock, **operations}

    def serve(self) -> None:
        """Answer requests until the mount is gone; several threads may do so."""
        while True:
            try:
                data = os.read(self._device, _BUFFER)
            except OSError as problem:
                if problem.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return
            _, opcode, unique, node, uid, gid, pid, _, _ = _IN.unpack_from(data)
            request = Request(opcode, unique, node, uid, gid, pid, memoryview(data)[_IN.size :])
            if opcode == FORGET:
                self._nodes.forget(node, struct.unpack_from("<Q", request.body)[0])
            elif opcode == BATCH_FORGET:
                for index in range(struct.unpack_from("<I", request.body)[0]):
                    self._nodes.forget(*struct.unpack_from("<QQ", request.body, 8 + 16 * index))
            elif opcode != INTERRUPT:
                self._answer(request)

    def _answer(self, request: Request) -> None:
        body, code = b"", 0
        try:
            operation = self._operations.get(request.opcode)
            if operation is None:
                raise OSError(errno.ENOSYS, "not offered")
            body = operation(request)
        except OSError as problem:
            code = problem.errno or errno.EIO
        # It fails where the process was killed meanwhile, and then nobody waits for the answer.
        with contextlib.suppress(OSError):
            os.write(self._device, _OUT.pack(_OUT.size + len(body), -code, request.unique) + body)

    def _init(self, request: Request) -> bytes:
        _, _, readahead, offered = struct.unpack_from("<4I", request.body)
        wanted = _BIG_WRITES | _PARALLEL_DIROPS
        if not self._has_locks:
            # Announced, so that the kernel asks and hears that there are none, instead of keeping them itself.
            wanted |= _POSIX_LOCKS | _FLOCK_LOCKS
        head = struct.pack("<4I2H2I2HI", _MAJOR, _MINOR, readahead, wanted & offered, 16, 12, _MAX_WRITE, 1, 0, 0, 0)
        return head.ljust(64, b"\0")


def entry(number: int, status: os.stat_result) -> bytes:
    """The answer to a look-up; it is believed for no time."""
    return _ENTRY.pack(number, 0, 0, 0, 0, 0) + attributes(status)


def denial(seconds: float) -> bytes:
    """The answer that a name does not exist, which the kernel believes for so long."""
    whole, part = divmod(seconds, 1)
    return _ENTRY.pack(0, 0, int(whole), 0, int(part * 1e9), 0) + bytes(_ATTR.size)


def attributes(status: os.stat_result) -> bytes:
    """What stat(2) tells, as the kernel wants it."""
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return _ATTR.pack(
        status.st_ino, status.st_size, status.st_blocks, *(time // 10**9 for time in times),
        *(time % 10**9 for time in times), status.st_mode, status.st_nlink, status.st_uid, status.st_gid,
        status.st_rdev & 0xFFFFFFFF, 4096, 0,
    )  # fmt: skip


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _no_lock(request: Request) -> bytes:
    raise OSError(errno.ENOLCK, "no locks")
