"""The partials of one plan and environment on the cache volume."""

from __future__ import annotations

import contextlib
from pathlib import Path

from initwarm.edges.files import RefusedError, volume_error
from initwarm.edges.volume_reader import LAYOUT, VolumeReader
from initwarm.entries import V1File
from initwarm.errors import DataError, VolumeError
from initwarm.identity import Identity
from initwarm.partial import PARTIAL_BYTES, encode_partial, merge_partials, parse_partial

PARTIALS = "partials"


class Partials:
    """What unfinished runs have left.

    Args:
        root: of the cache.
        identity: the environment.
        plan: digest of the plan.
        key: what they are authenticated with, or None.
    """

    def __init__(self, root: Path, identity: Identity, plan: str, key: bytes | None) -> None:
        self._reader = VolumeReader(root)
        self._identity = identity
        self._plan = plan
        self._key = key
        self._parts = (LAYOUT, PARTIALS, identity.digest, plan)

    def read(self) -> bytes | None:
        """All of it as one v1 file; None if there is nothing. What cannot be used is passed over.

        Raises:
            VolumeError: the volume cannot be read.
        """
        return merge_partials([file for name in self._reader.names(self._parts) if (file := self._read(name))])

    def _read(self, name: str) -> V1File | None:
        if not name.endswith(".json") or name.startswith("."):
            return None
        try:
            data = self._reader.read((*self._parts, name), PARTIAL_BYTES)
            return parse_partial(data, self._plan, self._identity, self._key)
        except (DataError, RefusedError, FileNotFoundError):
            return None

    def write(self, name: str, v1: bytes) -> None:
        """Keep some winners, in place of what this name kept before.

        Args:
            name: of the group and rank; one component of a path.
            v1: as FlashInfer saved them.

        Raises:
            VolumeError: they could not be written; what was there stays.
        """
        try:
            with self._reader.open(self._parts, make=True) as directory:
                data = encode_partial(self._plan, self._identity.digest, v1, self._key)
                directory.replace(f"{name}.json", data)
        except OSError as problem:
            path = self._reader.root.joinpath(*self._parts)
            raise volume_error(problem, path, "What is finished is not kept for the next run.") from problem
        except RefusedError as problem:
            raise VolumeError(str(problem), "What is finished is not kept for the next run.") from problem

    def clear(self) -> None:
        """Remove them, as far as that goes: the work is finished."""
        with contextlib.suppress(OSError, RefusedError), self._reader.open(self._parts[:-1]) as directory:
            directory.discard(self._plan)
