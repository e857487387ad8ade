"""The directory that servers read, filled from one verified bundle.

    flashinfer-v1/rank<r>.json      for each rank of this pod, the same bytes
    flashinfer-store/v2/...         FlashInfer's v2 store, where the bundle has one

Each of the two appears whole or not at all, and disappears whole, so a crash leaves nothing to half-believe. Files are
readable by every user, since the server may run under another one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from initwarm.bundle import STORE_FILE, V1_FILE
from initwarm.edges.files import Directory, RefusedError, is_staging, make_top, unique_name, volume_error
from initwarm.errors import VolumeError
from initwarm.store import parse_store, unpack_store

_V1 = "flashinfer-v1"
_STORE = "flashinfer-store"
#: Everything that is ever written here; other names belong to somebody else.
_OURS = ("vllm", "sglang", _V1, _STORE)


class EngineRoot:
    """The engine root at a path; the path need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def store_path(self) -> Path:
        """The root of the v2 store, what FLASHINFER_AUTOTUNE_CACHE_DIR names."""
        return self.path / _STORE

    def v1_path(self, rank: int) -> Path:
        """The v1 file of a rank."""
        return self.path / _V1 / f"rank{rank}.json"

    def empty(self) -> None:
        """Remove what this product writes, each directory at once, and leave everything else alone.

        Raises:
            VolumeError: the path is a file, or something in it cannot be taken away.
        """
        with self._translated("The engine root was not emptied."):
            try:
                root = Directory.open(self.path)
            except FileNotFoundError:
                return
            with root:
                for name in root.names():
                    if name in _OURS or is_staging(name):
                        self._remove(root, name)
                root.sync()

    def fill(self, files: Mapping[str, bytes], ranks: Sequence[int]) -> None:
        """Write what the server reads, in place of what an earlier fill wrote.

        Args:
            files: of a verified bundle, by name.
            ranks: the ranks of this pod.

        Raises:
            VolumeError: the path is a file, or cannot be written.
            DataError: the packed store is bad.
        """
        content = {_V1: {f"rank{rank}.json": files[V1_FILE] for rank in ranks}}
        if STORE_FILE in files:
            content[_STORE] = unpack_store(parse_store(files[STORE_FILE]))
        with self._translated("The server finds no tactics here."):
            make_top(self.path)
            with Directory.open(self.path) as root:
                for name in (_V1, _STORE):
                    self._remove(root, name)
                for name, inner in content.items():
                    self._put(root, name, inner)
                root.sync()

    def _put(self, root: Directory, name: str, files: Mapping[str, bytes]) -> None:
        staging = unique_name()
        try:
            with root.create(staging) as stage:
                _write_tree(stage, files)
            root.move(staging, root, name)
        except BaseException:
            self._remove(root, staging)
            raise

    def _remove(self, root: Directory, name: str) -> None:
        """Take the name away first, so that nobody sees a directory that is half removed.

        Without its name it is never read, so what cannot be removed then (an NFS client keeps the directory of a file
        that a server still has open) is left to the next call.
        """
        staging = name
        if not is_staging(name):
            staging = unique_name()
            try:
                root.move(name, root, staging)
            except FileNotFoundError:
                return
        path = root.path / staging
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _translated(self, effect: str) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise volume_error(problem, self.path, effect) from problem
        except RefusedError as problem:
            raise VolumeError(f"{self.path}: {problem}.", effect, "Remove it, or give another directory.") from problem


def _write_tree(directory: Directory, files: Mapping[str, bytes]) -> None:
    """Write files by relative name; each directory is opened and forced to disk once."""
    below: dict[str, dict[str, bytes]] = {}
    for relative, data in files.items():
        name, _, rest = relative.partition("/")
        if rest:
            below.setdefault(name, {})[rest] = data
        else:
            directory.write(name, data)
            # The replay does not look at every file, and a bad one says nothing against the bundle.
            if directory.read(name, len(data)) != data:
                raise RefusedError(name, "reads back as other bytes than were written")
    for name, inner in below.items():
        with directory.create(name) as child:
            _write_tree(child, inner)
    directory.sync()
