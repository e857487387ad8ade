"""Reading and writing below one directory, so that a reader sees a whole file or none and never leaves the directory.

Names are single components opened relative to an open directory, and symbolic links below the top are never followed:
what was checked is what is read. A write has its own name until it is complete and on disk. Nothing here locks,
compares clocks, or needs a file to outlive the replacement of its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from initwarm.errors import VolumeError

#: Pods of one workload run under several users of one group, whatever their umask.
FILE_MODE = 0o664
DIRECTORY_MODE = 0o2775

_CHUNK = 1 << 20
_LINK_OR_NOT_A_DIRECTORY = (errno.ELOOP, errno.ENOTDIR)
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EBADF)


class RefusedError(Exception):
    """A name below the directory is of a kind that is never written there: a link, a pipe, a file too large.

    Args:
        name: what was refused.
        why: a predicate, such as "is a symbolic link".
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.name = name
        self.why = why


class Directory:
    """An open directory. Use it as a context manager, or close it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Open the top; it alone may be reached over symbolic links, as mount points are."""
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        _close_read(self._descriptor)

    def names(self) -> list[str]:
        """Everything in the directory, sorted."""
        return sorted(os.listdir(self._descriptor))  # noqa: PTH208  (a descriptor has no pathlib twin)

    def child(self, name: str) -> Directory:
        """Open a directory in this one.

        Raises:
            RefusedError: the name is a link or no directory.
            OSError: it does not exist or cannot be opened.
        """
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            return Directory(os.open(name, flags, dir_fd=self._descriptor), self.path / name)
        except OSError as problem:
            if problem.errno in _LINK_OR_NOT_A_DIRECTORY:
                raise RefusedError(name, "is a symbolic link or not a directory") from problem
            raise

    def make(self, name: str) -> Directory:
        """Open a directory in this one, made where it is missing."""
        try:
            return self.child(name)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                self._mkdir(name)
                self.sync()
            return self.child(name)

    def create(self, name: str) -> Directory:
        """Make a directory and open it; of several processes one succeeds, the others get FileExistsError."""
        self._mkdir(name)
        return self.child(name)

    def read(self, name: str, limit: int) -> bytes:
        """The content of a plain file, read once from start to end.

        Raises:
            RefusedError: it is no plain file or larger than the limit.
            OSError: it does not exist or cannot be read.
        """
        try:
            # Without O_NONBLOCK a pipe of that name would hold this up for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except OSError as problem:
            if problem.errno in (errno.ELOOP, errno.ENXIO):
                raise RefusedError(name, "is a symbolic link or not a plain file") from problem
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RefusedError(name, "is not a plain file")
            if status.st_size > limit:
                raise RefusedError(name, f"has {status.st_size} bytes, more than {limit}")
            return _read_to_end(descriptor, name, status.st_size, limit)
        finally:
            _close_read(descriptor)

    def write(self, name: str, data: bytes) -> None:
        """Write a new file and force it to disk; the name must be free."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, FILE_MODE, dir_fd=self._descriptor)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            with _tolerated():
                os.fchmod(descriptor, FILE_MODE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file under its own name and put it in place of what was there."""
        staging = unique_name()
        try:
            self.write(staging, data)
            self.move(staging, self, name)
        except BaseException:
            self.discard(staging)
            raise
        self.sync_after_publication()

    def move(self, name: str, target: Directory, target_name: str) -> None:
        """Rename within this volume; a directory never replaces one that has content."""
        os.rename(name, target_name, src_dir_fd=self._descriptor, dst_dir_fd=target._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises:
            OSError: it is not there, or cannot be removed.
        """
        os.unlink(name, dir_fd=self._descriptor)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory.

        Raises:
            OSError: it is not there, not empty, or cannot be removed.
        """
        os.rmdir(name, dir_fd=self._descriptor)

    def status(self, name: str) -> os.stat_result:
        """Size and times of a name itself, not of what a link leads to."""
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def touch(self) -> float:
        """Set this directory's time of change to the volume's own time, in seconds since 1970, and return it."""
        os.utime(self._descriptor)
        return os.fstat(self._descriptor).st_mtime

    def discard(self, name: str) -> None:
        """Remove what this process staged: a file, or a directory of files. What cannot be removed stays, unseen."""
        with contextlib.suppress(OSError, RefusedError):
            os.unlink(name, dir_fd=self._descriptor)
            return
        with contextlib.suppress(OSError, RefusedError):
            with self.child(name) as staged:
                for inner in staged.names():
                    staged.discard(inner)
            os.rmdir(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Force the names in this directory to disk, where the file system can."""
        with _tolerated():
            os.fsync(self._descriptor)

    def sync_after_publication(self) -> None:
        """As `sync`, after the rename that made the work visible: nothing can undo that, so nothing may fail it."""
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)

    def _mkdir(self, name: str) -> None:
        os.mkdir(name, DIRECTORY_MODE, dir_fd=self._descriptor)
        with _tolerated():
            os.chmod(name, DIRECTORY_MODE, dir_fd=self._descriptor)


def make_top(path: Path) -> None:
    """Make a directory and those above it that are missing, for the group as well, whatever the umask.

    Raises:
        OSError: it cannot be made, or a file is in the way.
    """
    missing = [above for above in (path, *path.parents) if not above.exists()]
    for above in reversed(missing):
        above.mkdir(exist_ok=True)
        with _tolerated():
            above.chmod(DIRECTORY_MODE)
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, "is a file", str(path))


def unique_name() -> str:
    """A name for work in progress; no reader takes it for anything else, and no two writers share it."""
    return f".staging-{os.urandom(8).hex()}"


def is_staging(name: str) -> bool:
    """Whether a name is work in progress, or what a killed writer left of it."""
    return name.startswith(".staging-")


def volume_error(problem: OSError, path: Path, effect: str, attempts: int = 1) -> VolumeError:
    """Say what an operating system error on a volume means and what to do about it.

    Args:
        problem: the error.
        path: what was being read or written.
        effect: what did not happen because of it, as a sentence.
        attempts: how often it was tried.
    """
    described = _DESCRIPTIONS.get(problem.errno or 0)
    fact, fix = described(path) if described else (f"{path}: {problem.strerror or problem}.", "Check the volume.")
    if attempts > 1:
        fact = f"{fact[:-1]}, in each of {attempts} attempts."
    return VolumeError(fact, effect, fix)


def _close_read(descriptor: int) -> None:
    """Close what was only read: nothing is lost, whatever a network file system answers."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _read_to_end(descriptor: int, name: str, expected: int, limit: int) -> bytes:
    # One byte more than the size shows the end in the same call, so that a large file is not copied together.
    data = os.read(descriptor, expected + 1)
    while chunk := os.read(descriptor, _CHUNK) if data else b"":
        data += chunk
        if len(data) > limit:
            raise RefusedError(name, f"grew beyond {limit} bytes")
    return data


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    """Pass over what object stores mounted as file systems do not offer."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in _NOT_SUPPORTED:
            raise


def _full(path: Path) -> tuple[str, str]:
    free = "no"
    with contextlib.suppress(OSError):
        status = os.statvfs(_nearest(path))
        free = str(status.f_bavail * status.f_frsize)
    return (
        f"The volume of {path} is full: {free} bytes are free (ENOSPC).",
        "Enlarge the volume or delete what its README allows.",
    )


def _over_quota(path: Path) -> tuple[str, str]:
    return (
        f"The quota of user {os.geteuid()} on the volume of {path} is used up (EDQUOT).",
        "Raise the quota or delete what the volume's README allows.",
    )


def _read_only(path: Path) -> tuple[str, str]:
    return (
        f"The volume of {path} is mounted read-only (EROFS).",
        "Mount it with readOnly: false, or fill it from a pod that may write.",
    )


def _denied(path: Path) -> tuple[str, str]:
    groups = ",".join(str(group) for group in sorted({os.getegid(), *os.getgroups()}))
    fact = f"User {os.geteuid()} of groups {groups} may not use {path} (EACCES)"
    with contextlib.suppress(OSError):
        near = _nearest(path)
        status = near.stat()
        mode = stat.S_IMODE(status.st_mode)
        fact += f"; {near} belongs to {status.st_uid}:{status.st_gid}, has mode {mode:04o} and lies on {_kind(near)}"
    return f"{fact}.", "Set fsGroup for the pod, or make the directory writable for its group (chmod g+rwxs)."


def _stale(path: Path) -> tuple[str, str]:
    return f"The file server no longer knows {path} (ESTALE).", "Restart the pod so that the volume is mounted anew."


def _broken(path: Path) -> tuple[str, str]:
    return f"The device or file server of {path} reported an error (EIO).", "Check the storage behind the volume."


def _busy(path: Path) -> tuple[str, str]:
    return f"{path} is in use, or something is mounted there (EBUSY).", "Try again when nobody uses it."


def _not_a_directory(path: Path) -> tuple[str, str]:
    return f"{path} is a file or lies below one, and a directory is needed (ENOTDIR).", "Give the path of a directory."


def _missing(path: Path) -> tuple[str, str]:
    return f"{path} does not exist (ENOENT).", "Check the path and that the volume is mounted."


_DESCRIPTIONS = {
    errno.ENOSPC: _full,
    errno.EDQUOT: _over_quota,
    errno.EROFS: _read_only,
    errno.EACCES: _denied,
    errno.EPERM: _denied,
    errno.ESTALE: _stale,
    errno.EIO: _broken,
    errno.EBUSY: _busy,
    errno.ENOTDIR: _not_a_directory,
    errno.EEXIST: _not_a_directory,
    errno.ENOENT: _missing,
}


def _nearest(path: Path) -> Path:
    return next((near for near in (path, *path.parents) if near.exists()), Path("/"))


def _kind(path: Path) -> str:
    """The file system's type, from the longest mount point above the path."""
    mounts: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounts[before.split(" ")[4]] = after.split(" ")[0]
    resolved = path.resolve()
    return next((mounts[str(near)] for near in (resolved, *resolved.parents) if str(near) in mounts), "unknown")
