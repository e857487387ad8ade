"""A file system that passes every operation through to a directory, and asks hooks before it does.

Without hooks that object it behaves as the backing directory does; what makes it misbehave is in `faultfs`.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.support import fuse
from tests.support.fuse import Request

_FATTR_MODE, _FATTR_UID, _FATTR_GID, _FATTR_SIZE, _FATTR_ATIME, _FATTR_MTIME = (1 << bit for bit in range(6))
_FATTR_ATIME_NOW, _FATTR_MTIME_NOW = 1 << 7, 1 << 8
_SETATTR = struct.Struct("<II6Q8I")


class Hooks(Protocol):
    """What decides how operations end. All methods are called from several threads."""

    #: For how long the kernel may believe that a name does not exist, in seconds.
    negative_seconds: float

    def before(self, op: str, paths: tuple[str, ...], pid: int) -> None:
        """Called before an operation is carried out; raises OSError to make it fail."""

    def room(self, path: str, size: int) -> int:
        """How many bytes of a write are carried out."""

    def after_close(self, path: str, place: str) -> None:
        """Called when a process closes a file that it wrote; it can be opened at this place."""

    def listing(self, path: str, names: list[str]) -> list[str]:
        """The names that a listing of a directory shows."""

    def changed(self, path: str, exists: bool) -> None:
        """Called when a name was made or taken away through this mount."""


@dataclass
class _Handle:
    descriptor: int
    path: str
    is_dirty: bool = False
    names: list[str] = field(default_factory=list)


class PassThrough:
    """One mount.

    Args:
        backing: the directory that is shown.
        device: an open /dev/fuse.
        hooks: decide over each operation.
        has_locks: as for `Connection`.
    """

    def __init__(self, backing: Path, device: int, hooks: Hooks, has_locks: bool) -> None:
        self._top = os.path.realpath(backing)
        self._hooks = hooks
        self._nodes = fuse.Nodes(self._top)
        self._lock = threading.Lock()
        self._handles: dict[int, _Handle] = {}
        self.connection = fuse.Connection(
            device,
            self._nodes,
            {
                fuse.LOOKUP: self._lookup, fuse.GETATTR: self._getattr, fuse.SETATTR: self._setattr,
                fuse.READLINK: self._readlink, fuse.SYMLINK: self._symlink, fuse.MKDIR: self._mkdir,
                fuse.UNLINK: self._unlink, fuse.RMDIR: self._rmdir, fuse.RENAME: self._rename,
                fuse.RENAME2: self._rename2, fuse.LINK: self._link, fuse.OPEN: self._open, fuse.CREATE: self._create,
                fuse.READ: self._read, fuse.WRITE: self._write, fuse.FLUSH: self._flush, fuse.RELEASE: self._release,
                fuse.FSYNC: self._fsync, fuse.OPENDIR: self._opendir, fuse.READDIR: self._readdir,
                fuse.RELEASEDIR: self._release, fuse.FSYNCDIR: self._fsyncdir, fuse.STATFS: self._statfs,
            },
            has_locks,
        )  # fmt: skip

    def _fd(self, request: Request) -> int:
        return self._nodes.descriptor(request.node)

    def _place(self, request: Request) -> str:
        """A name of the object itself, for calls that take none of O_PATH descriptors."""
        return f"/proc/self/fd/{self._fd(request)}"

    def _path(self, node: int, *names: str) -> str:
        """Where an object lies now, relative to the backing directory."""
        path = str(Path(f"/proc/self/fd/{self._nodes.descriptor(node)}").readlink()).removesuffix(" (deleted)")
        return os.path.normpath("/".join((os.path.relpath(path, self._top), *names)))

    def _check(self, op: str, request: Request, *names: str) -> str:
        """Ask the hooks; returns the path of the object, or of a name in it."""
        path = self._path(request.node, *names)
        self._hooks.before(op, (path,), request.pid)
        return path

    def _entry(self, request: Request, name: str) -> bytes:
        return fuse.entry(*self._nodes.find(request.node, name))

    def _status(self, request: Request) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + fuse.attributes(os.fstat(self._fd(request)))

    # Objects

    def _lookup(self, request: Request) -> bytes:
        name = _names(request.body)[0]
        self._check("lookup", request, name)
        try:
            return self._entry(request, name)
        except FileNotFoundError:
            if self._hooks.negative_seconds <= 0:
                raise
            return fuse.denial(self._hooks.negative_seconds)

    def _getattr(self, request: Request) -> bytes:
        self._check("getattr", request)
        return self._status(request)

    def _setattr(self, request: Request) -> bytes:
        self._check("setattr", request)
        values = _SETATTR.unpack_from(request.body)
        valid, size, atime, mtime, atime_ns, mtime_ns, mode, uid, gid = (
            values[index] for index in (0, 3, 5, 6, 8, 9, 11, 13, 14)
        )
        place = self._place(request)
        if valid & (_FATTR_UID | _FATTR_GID):
            os.chown(place, uid if valid & _FATTR_UID else -1, gid if valid & _FATTR_GID else -1)
        if valid & _FATTR_MODE:
            Path(place).chmod(stat.S_IMODE(mode))
        if valid & _FATTR_SIZE:
            os.truncate(place, size)
        if valid & (_FATTR_ATIME_NOW | _FATTR_MTIME_NOW):
            os.utime(place)
        elif valid & (_FATTR_ATIME | _FATTR_MTIME):
            os.utime(place, ns=(atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns))
        return self._status(request)

    def _statfs(self, request: Request) -> bytes:
        self._check("statfs", request)
        found = os.statvfs(self._top)
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I", *counts, found.f_bsize, found.f_namemax, found.f_frsize, 0) + bytes(24)

    # Names

    def _made(self, request: Request, name: str) -> bytes:
        """Give a new object to whom it belongs, since the backing file system saw this process make it."""
        directory = self._fd(request)
        takes_group = os.fstat(directory).st_mode & stat.S_ISGID
        os.chown(name, request.uid, -1 if takes_group else request.gid, dir_fd=directory, follow_symlinks=False)
        self._hooks.changed(self._path(request.node, name), True)
        return self._entry(request, name)

    def _mkdir(self, request: Request) -> bytes:
        (mode,) = struct.unpack_from("<I", request.body)
        name = _names(request.body[8:])[0]
        self._check("mkdir", request, name)
        os.mkdir(name, mode, dir_fd=self._fd(request))
        return self._made(request, name)

    def _symlink(self, request: Request) -> bytes:
        name, target = _names(request.body)[:2]
        self._check("symlink", request, name)
        os.symlink(target, name, dir_fd=self._fd(request))
        return self._made(request, name)

    def _link(self, request: Request) -> bytes:
        (old,) = struct.unpack_from("<Q", request.body)
        name = _names(request.body[8:])[0]
        path = self._check("link", request, name)
        os.link(f"/proc/self/fd/{self._nodes.descriptor(old)}", name, dst_dir_fd=self._fd(request))
        self._hooks.changed(path, True)
        return self._entry(request, name)

    def _readlink(self, request: Request) -> bytes:
        self._check("readlink", request)
        return os.fsencode(os.readlink("", dir_fd=self._fd(request)))

    def _unlink(self, request: Request) -> bytes:
        name = _names(request.body)[0]
        path = self._check("unlink", request, name)
        os.unlink(name, dir_fd=self._fd(request))
        self._hooks.changed(path, False)
        return b""

    def _rmdir(self, request: Request) -> bytes:
        name = _names(request.body)[0]
        path = self._check("rmdir", request, name)
        os.rmdir(name, dir_fd=self._fd(request))
        self._hooks.changed(path, False)
        return b""

    def _rename(self, request: Request) -> bytes:
        return self._move(request, struct.unpack_from("<Q", request.body)[0], request.body[8:])

    def _rename2(self, request: Request) -> bytes:
        target, flags = struct.unpack_from("<QI", request.body)
        if flags:
            raise OSError(errno.EINVAL, "no exchange and no exclusion, as on network file systems")
        return self._move(request, target, request.body[16:])

    def _move(self, request: Request, target: int, names: memoryview) -> bytes:
        old, new = _names(names)[:2]
        paths = self._path(request.node, old), self._path(target, new)
        self._hooks.before("rename", paths, request.pid)
        os.rename(old, new, src_dir_fd=self._fd(request), dst_dir_fd=self._nodes.descriptor(target))
        self._hooks.changed(paths[0], False)
        self._hooks.changed(paths[1], True)
        return b""

    # Content

    def _opened(self, handle: _Handle) -> bytes:
        with self._lock:
            self._handles[handle.descriptor] = handle
        # Past the page cache, so that a read sees what others wrote and a short write is the process's own.
        return struct.pack("<QII", handle.descriptor, fuse.DIRECT_IO, 0)

    def _handle(self, request: Request) -> _Handle:
        with self._lock:
            found = self._handles.get(struct.unpack_from("<Q", request.body)[0])
        if found is None:
            raise OSError(errno.EBADF, "not open")
        return found

    def _open(self, request: Request) -> bytes:
        (flags,) = struct.unpack_from("<I", request.body)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        path = self._check("open_to_write" if writes else "open", request)
        kept = flags & (os.O_ACCMODE | os.O_TRUNC | os.O_NONBLOCK)
        return self._opened(_Handle(os.open(self._place(request), kept | os.O_CLOEXEC), path))

    def _create(self, request: Request) -> bytes:
        flags, mode = struct.unpack_from("<2I", request.body)
        name = _names(request.body[16:])[0]
        path = self._check("create", request, name)
        kept = flags & (os.O_ACCMODE | os.O_TRUNC | os.O_EXCL) | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, kept, stat.S_IMODE(mode), dir_fd=self._fd(request))
        return self._made(request, name) + self._opened(_Handle(descriptor, path))

    def _read(self, request: Request) -> bytes:
        handle = self._handle(request)
        offset, size = struct.unpack_from("<QI", request.body, 8)
        self._check("read", request)
        return os.pread(handle.descriptor, size, offset)

    def _write(self, request: Request) -> bytes:
        handle = self._handle(request)
        offset, size = struct.unpack_from("<QI", request.body, 8)
        path = self._check("write", request)
        data = request.body[40 : 40 + min(size, self._hooks.room(path, size))]
        handle.is_dirty = True
        return struct.pack("<II", os.pwrite(handle.descriptor, data, offset), 0)

    def _flush(self, request: Request) -> bytes:
        handle = self._handle(request)
        path = self._check("close", request)
        if handle.is_dirty:
            self._hooks.after_close(path, self._place(request))
        return b""

    def _release(self, request: Request) -> bytes:
        handle = self._handle(request)
        with self._lock:
            del self._handles[handle.descriptor]
        os.close(handle.descriptor)
        return b""

    def _fsync(self, request: Request) -> bytes:
        self._check("fsync", request)
        os.fsync(self._handle(request).descriptor)
        return b""

    def _fsyncdir(self, request: Request) -> bytes:
        self._check("fsyncdir", request)
        os.fsync(self._handle(request).descriptor)
        return b""

    def _opendir(self, request: Request) -> bytes:
        path = self._check("opendir", request)
        return self._opened(_Handle(os.open(self._place(request), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path))

    def _readdir(self, request: Request) -> bytes:
        handle = self._handle(request)
        start, size = struct.unpack_from("<QI", request.body, 8)
        path = self._check("readdir", request)
        if start == 0:
            handle.names = [".", "..", *sorted(self._hooks.listing(path, os.listdir(handle.descriptor)))]
        found = b""
        for index, name in enumerate(handle.names[start:], start + 1):
            raw = os.fsencode(name)
            one = struct.pack("<QQII", index, index, len(raw), 0) + raw
            one += bytes(-len(one) % 8)
            if len(found) + len(one) > size:
                break
            found += one
        return found


def _names(data: memoryview) -> list[str]:
    return [os.fsdecode(part) for part in bytes(data).split(b"\0")]
