"""Reading the cache volume: what lies where, and whether it is what it claims to be. Changes nothing.

Each file is opened once, relative to open directories, without following links, and read from start to end. A network
file system that lost its handle is asked again a few times before that is an error. It may also remember for a minute
that a name was not there, so a name that nobody has announced is looked for in its directory's listing first.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from initwarm.bundle import BUNDLE, MAC, FileRecord, Place, StoredBundle
from initwarm.edges.files import Directory, RefusedError, volume_error
from initwarm.errors import DataError
from initwarm.identity import MANIFEST, Identity, parse_manifest
from initwarm.jsontext import RECORD_BYTES
from initwarm.verification import Examined, Unreadable, examine_files, examine_record

LAYOUT = "v1"
BUNDLES = "bundles"
QUARANTINE = "quarantine"

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.05
#: A network file system answers so for a moment after a change by another host, and then no longer.
_TRANSIENT = (errno.ESTALE, errno.EIO)
_MISSING = "is missing"

T = TypeVar("T")


class VolumeReader:
    """The cache volume at a root, for reading.

    Args:
        root: its directory.
        key: with a key, bundles without its HMAC have a problem.
    """

    def __init__(self, root: Path, key: bytes | None = None) -> None:
        self.root = root
        self.key = key
        #: What directories listed when they were last looked at; names that were there need no second look.
        self._listed: dict[tuple[str, ...], frozenset[str]] = {}

    def open(self, parts: tuple[str, ...], make: bool = False) -> Directory:
        """Open a directory below the root, step by step; with `make`, missing ones are made.

        Raises:
            RefusedError: one of the names is a link or no directory.
            OSError: one does not exist, or cannot be opened or made.
        """
        directory = Directory.open(self.root)
        for part in parts:
            with directory:
                directory = directory.make(part) if make else directory.child(part)
        return directory

    def open_listed(self, parts: tuple[str, ...]) -> Directory:
        """As `open`, and looks no name up that its directory does not list: it may be there a moment later.

        Raises:
            RefusedError, OSError: as `open` does.
        """
        directory = Directory.open(self.root)
        for depth, part in enumerate(parts):
            with directory:
                self._must_list(directory, parts[:depth], part)
                directory = directory.child(part)
        return directory

    def _must_list(self, directory: Directory, parts: tuple[str, ...], name: str) -> None:
        if name not in self._listed.get(parts, ()) and name not in self._list(directory, parts):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory.path / name))

    def _list(self, directory: Directory, parts: tuple[str, ...]) -> list[str]:
        names = directory.names()
        self._listed[parts] = frozenset(names)
        return names

    def names(self, parts: tuple[str, ...]) -> list[str]:
        """Everything in a directory below the root; nothing where there is no such directory.

        Raises:
            VolumeError: it cannot be read.
        """

        def read() -> list[str]:
            with self.open_listed(parts) as directory:
                return self._list(directory, parts)

        try:
            return self.patiently(read, self.root.joinpath(*parts))
        except (FileNotFoundError, RefusedError):
            return []

    def read(self, parts: tuple[str, ...], limit: int) -> bytes:
        """The content of a file below the root.

        Raises:
            FileNotFoundError: there is none.
            RefusedError: it is no plain file, too large, or not reached over plain directories.
            VolumeError: it cannot be read.
        """

        def read() -> bytes:
            with self.open_listed(parts[:-1]) as directory:
                self._must_list(directory, parts[:-1], parts[-1])
                return directory.read(parts[-1], limit)

        return self.patiently(read, self.root.joinpath(*parts))

    def manifest(self, identity: str) -> Identity:
        """The environment of a directory.

        Raises:
            FileNotFoundError: it has no manifest.
            DataError: the manifest is bad, or another environment's.
            NewerSchemaError: a newer version wrote it.
            RefusedError, VolumeError: it cannot be read.
        """
        manifest = parse_manifest(self.read((LAYOUT, identity, MANIFEST), RECORD_BYTES))
        if manifest.digest != identity:
            raise DataError(f"{MANIFEST} is of the environment {manifest.digest}, and lies under {identity}")
        return manifest

    def manifest_if_good(self, identity: str) -> Identity | None:
        """The environment of a directory, where its manifest says it and can be believed."""
        try:
            return self.manifest(identity)
        except (DataError, RefusedError, FileNotFoundError):
            return None

    def examine(self, place: Place, metadata: Mapping[str, str] | None) -> tuple[StoredBundle | None, Examined]:
        """Read a bundle and judge it.

        Args:
            place: where it lies.
            metadata: of the environment, or None where only its digest is known.

        Returns:
            The bundle where it can be used, and what was found. Without bundle.json nothing claims to be complete,
            and nothing was found.

        Raises:
            VolumeError: it cannot be read.
        """
        try:
            return self.patiently(lambda: self._examine(place, metadata), self.root.joinpath(*parts_of(place)))
        except FileNotFoundError:
            return None, Examined()
        except RefusedError as problem:
            return None, Examined(problems=(str(problem),))

    def patiently(self, operation: Callable[[], T], path: Path, effect: str = "The cache volume cannot be read.") -> T:
        """Carry out what can be repeated, `again` where that helps, and translate what stays an error.

        Raises:
            FileNotFoundError, RefusedError: as the operation does.
            VolumeError: for every other error of the operating system.
        """
        try:
            return again(operation)
        except FileNotFoundError:
            raise
        except OSError as problem:
            attempts = _ATTEMPTS if problem.errno in _TRANSIENT else 1
            raise volume_error(problem, path, effect, attempts) from problem

    def _examine(self, place: Place, metadata: Mapping[str, str] | None) -> tuple[StoredBundle | None, Examined]:
        with self.open(parts_of(place)) as directory:
            record = directory.read(BUNDLE, RECORD_BYTES)
            found = examine_record(place, record, self._mac(directory), self.key)
            if found.bundle is None:
                return None, found
            content = {name: _content(directory, name, file) for name, file in found.bundle.files.items()}
            if _MISSING in content.values():
                # Damaged, or taken away since it was opened: then there is nothing here, and nobody to blame.
                self.open(parts_of(place)).close()
        bundle = found.bundle
        found = examine_files(place, found, content, metadata)
        if found.problems or found.is_newer:
            return None, found
        files = {name: data for name, data in content.items() if isinstance(data, bytes)}
        return StoredBundle(bundle, files, place.generation, place.digest), found

    def _mac(self, directory: Directory) -> bytes | None:
        if self.key is None:
            return None
        try:
            return directory.read(MAC, RECORD_BYTES)
        except FileNotFoundError:
            return None


def again(operation: Callable[[], T]) -> T:
    """Carry out what can be repeated, up to five times in a second where a network file system lost its handle."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return operation()
        except OSError as problem:
            if problem.errno not in _TRANSIENT:
                raise
        _pause(_FIRST_PAUSE_SECONDS * 2**attempt)
    return operation()


def parts_of(place: Place) -> tuple[str, ...]:
    """The names that lead from the root to a bundle."""
    return (LAYOUT, place.identity, BUNDLES, place.plan, place.name)


def _content(directory: Directory, name: str, record: FileRecord) -> bytes | Unreadable:
    try:
        return directory.read(name, record.size)
    except FileNotFoundError:
        return _MISSING
    except RefusedError as problem:
        return problem.why


def _pause(seconds: float) -> None:
    time.sleep(seconds)
