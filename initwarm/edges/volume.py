"""The cache volume: bundles that several pods share, published whole and believed only when proven.

    CACHEDIR.TAG, README
    v1/<identity>/manifest.json
    v1/<identity>/bundles/<plan>/<generation>-<sha256>/bundle.json, bundle.hmac and the files
    v1/quarantine/<name>/reason.json and what was set aside

A bundle is immutable and appears by one rename; the highest complete generation wins, and there is no pointer that
could be wrong. Writers exclude each other from a generation by the exclusive creation of its staging directory, not by
locks or clocks. What a killed writer leaves is never read. A volume that cannot be written can still be used.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from initwarm.bundle import (
    BUNDLE,
    MAC,
    Bundle,
    Place,
    StoredBundle,
    authenticate,
    encode_bundle,
    parse_place,
    record_files,
)
from initwarm.edges.files import Directory, RefusedError, make_top, unique_name, volume_error
from initwarm.edges.quarantine import Quarantined, generations_aside, set_aside, set_bundle_aside
from initwarm.edges.volume_reader import BUNDLES, LAYOUT, VolumeReader
from initwarm.errors import DataError, VolumeError
from initwarm.identity import MANIFEST, FieldDifference, Identity, differences, encode_manifest
from initwarm.jsontext import RECORD_BYTES, NewerSchemaError, canonical, is_digest, parse_json

__all__ = ["CacheVolume", "Nearby", "Quarantined", "StoredBundle"]

#: The volume can be read all the same.
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This directory is a cache of initwarm. See README beside this file.
"""
_README = b"""This directory is the cache of initwarm, which tunes FlashInfer before an LLM server starts.

Everything in it can be made again. Delete the directory, or any directory v1/<identity>, whenever no pod is starting;
the next start tunes anew. So may names that begin with .staging-, and v1/quarantine at any time.
`initwarm inspect` shows what is here, `initwarm verify` checks it.
"""


@dataclass(frozen=True)
class Nearby:
    """Another environment that the volume has bundles for, and the fields in which it differs from this one."""

    identity: str
    differences: tuple[FieldDifference, ...]

    def __str__(self) -> str:
        differing = "; ".join(str(difference) for difference in self.differences)
        return f"The volume has bundles for the environment {self.identity[:12]}, where {differing}"


class CacheVolume:
    """The cache volume at a root.

    Args:
        root: a directory; made where it is missing and can be.
        key: authenticates bundles; with a key, those without its HMAC are set aside.
    """

    def __init__(self, root: Path, key: bytes | None = None) -> None:
        self.root = root
        self.key = key
        self.obstacle: VolumeError | None = None
        """Why the volume can only be read, or None."""
        self._reader = VolumeReader(root, key)

    @property
    def read_only(self) -> bool:
        """Whether `prepare` found that the volume can be read and not written."""
        return self.obstacle is not None

    def prepare(self) -> None:
        """Mark the directory as a cache and find out whether it can be written.

        Raises:
            VolumeError: it can be neither written nor read.
        """
        self.obstacle = None
        effect = "The cache volume cannot be written."
        try:
            with self._translated(self.root, effect):
                self._reader.patiently(lambda: _mark_and_probe(self.root), self.root, effect)
        except VolumeError as obstacle:
            cause = obstacle.__cause__
            if not (isinstance(cause, OSError) and cause.errno in _NOT_WRITABLE and self._can_be_read()):
                raise
            self.obstacle = obstacle

    def load(
        self, identity: Identity, plan: str, world_size: int
    ) -> tuple[StoredBundle | None, tuple[Quarantined, ...]]:
        """Find the newest bundle that is complete, proven and usable, and set aside what only claims to be one.

        Args:
            identity: the environment of this group.
            plan: digest of its plan.
            world_size: its ranks.

        Returns:
            The bundle or None, and what was set aside.

        Raises:
            VolumeError: the volume cannot be read.
        """
        aside = self._set_intruders_aside((LAYOUT, identity.digest, BUNDLES, plan))
        for place in self._places(identity.digest, plan):
            stored, found = self._reader.examine(place, identity.metadata)
            if found.problems:
                aside.append(set_bundle_aside(self._reader, place, "; ".join(found.problems)))
            elif stored is not None and stored.bundle.serves(world_size):
                return stored, tuple(aside)
        return None, tuple(aside)

    def get(self, identity_digest: str, plan: str, generation: int, digest: str) -> StoredBundle | None:
        """Read one announced bundle, or return None while it is not (wholly) visible yet. Sets nothing aside.

        Raises:
            VolumeError: the volume cannot be read.
        """
        if not (is_digest(identity_digest) and is_digest(plan) and is_digest(digest)):
            return None
        manifest = self._reader.manifest_if_good(identity_digest)
        place = Place(identity_digest, plan, generation, digest)
        return self._reader.examine(place, manifest.metadata if manifest else None)[0]

    def find(self, identity_digest: str, plan: str, digest: str) -> StoredBundle | None:
        """As `get`, of whatever generation it is on this volume."""
        places = self._places(identity_digest, plan) if is_digest(identity_digest) and is_digest(plan) else []
        generations = [place.generation for place in places if place.digest == digest]
        return next((found for one in generations if (found := self.get(identity_digest, plan, one, digest))), None)

    def publish(self, identity: Identity, bundle: Bundle, files: Mapping[str, bytes]) -> StoredBundle:
        """Make a bundle visible to every pod, or find that the very same one already is.

        A process killed at any instant has published all of it or nothing.

        Args:
            identity: the environment that it was tuned in.
            bundle: what it states; must describe the files.
            files: content by name.

        Raises:
            VolumeError: it could not be written; what was there stays as it was.
        """
        if bundle.identity != identity.digest or dict(bundle.files) != record_files(files):
            raise ValueError("the bundle describes another identity or other files")
        parts = (LAYOUT, bundle.identity, BUNDLES, bundle.plan)
        size = sum(len(data) for data in files.values())
        effect = f"The bundle of {size} bytes was not published; what was there before stays readable."
        with self._translated(self.root.joinpath(*parts), effect):
            self._set_intruders_aside(parts)
            present = self._same(identity, bundle)
            if present is not None:
                return present
            with self._made((LAYOUT,), effect) as layout:
                self._put_identity(layout, identity)
            with self._made(parts, effect) as parent:
                generation = self._put_bundle(parent, bundle, files)
            return StoredBundle(bundle, files, generation, bundle.digest)

    def set_aside(self, stored: StoredBundle, reason: str) -> Quarantined:
        """Quarantine a bundle that is intact and useless, so that no pod adopts it again."""
        return set_bundle_aside(self._reader, stored.place, reason)

    def nearby(self, identity: Identity) -> tuple[Nearby, ...]:
        """The other environments on the volume, the most similar first, to say why this one is a miss."""
        found: list[Nearby] = []
        for name in self._reader.names((LAYOUT,)):
            if is_digest(name) and name != identity.digest and self._reader.names((LAYOUT, name, BUNDLES)):
                manifest = self._reader.manifest_if_good(name)
                if manifest is not None:
                    found.append(Nearby(name, differences(manifest.metadata, identity.metadata)))
        return tuple(sorted(found, key=lambda near: (len(near.differences), near.identity)))

    def write_json(self, relative: str, value: Any) -> None:
        """Write a record, whole or not at all, in place of an older one.

        Args:
            relative: its path below the layout's directory, such as `rounds/decode-0.json`.
            value: JSON only.

        Raises:
            VolumeError: it could not be written.
        """
        parts, effect = _record_parts(relative), "The record was not written."
        with self._translated(self.root.joinpath(*parts), effect), self._made(parts[:-1], effect) as directory:
            directory.replace(parts[-1], canonical(value))

    def read_json(self, relative: str, limit: int = RECORD_BYTES) -> Any | None:
        """Read a record that `write_json` wrote; None where there is none, or a bad one, which is set aside.

        Args:
            relative: as for `write_json`.
            limit: the greatest size in bytes.

        Raises:
            VolumeError: the volume cannot be read.
        """
        parts = _record_parts(relative)
        try:
            return parse_json(self._reader.read(parts, limit), relative, limit)
        except FileNotFoundError:
            return None
        except (DataError, RefusedError) as problem:
            set_aside(self._reader, parts, str(problem))
            return None

    def remove_record(self, relative: str) -> None:
        """Take a record away, if there is one.

        Raises:
            VolumeError: it is still there.
        """
        parts = _record_parts(relative)
        with (
            self._translated(self.root.joinpath(*parts), "The record is still there."),
            contextlib.suppress(FileNotFoundError),
            self._reader.open(parts[:-1]) as directory,
        ):
            directory.remove(parts[-1])

    def _can_be_read(self) -> bool:
        try:
            self._reader.names((LAYOUT,))
        except VolumeError:
            return False
        return self.root.is_dir()

    def _places(self, identity: str, plan: str) -> list[Place]:
        """The bundles that there may be, newest first; of one generation the greater digest, for every reader."""
        names = self._reader.names((LAYOUT, identity, BUNDLES, plan))
        found = (parse_place(identity, plan, name) for name in names)
        newest_first = sorted((place for place in found if place), key=lambda place: (place.generation, place.digest))
        return newest_first[::-1]

    def _set_intruders_aside(self, parts: tuple[str, ...]) -> list[Quarantined]:
        """Clear the path to a plan's bundles of links and files where only directories are ever made."""
        try:
            self._reader.patiently(lambda: self._reader.open_listed(parts).close(), self.root.joinpath(*parts))
        except RefusedError as problem:
            intruder = parts[: parts.index(problem.name) + 1]
            # The layout's own directory holds the quarantine, so nothing can be moved there from its place.
            return [] if intruder == (LAYOUT,) else [set_aside(self._reader, intruder, str(problem))]
        except (FileNotFoundError, VolumeError):
            # Missing, or told by the read that follows.
            return []
        return []

    def _same(self, identity: Identity, bundle: Bundle) -> StoredBundle | None:
        """The bundle that is already there under this digest, if it is good; a bad one is set aside."""
        for place in self._places(bundle.identity, bundle.plan):
            if place.digest == bundle.digest:
                stored, found = self._reader.examine(place, identity.metadata)
                if stored is not None:
                    return stored
                if found.problems:
                    set_bundle_aside(self._reader, place, "; ".join(found.problems))
        return None

    def _made(self, parts: tuple[str, ...], effect: str) -> Directory:
        """Open a directory below the root, made where it is missing."""
        path = self.root.joinpath(*parts)
        return self._reader.patiently(lambda: self._reader.open(parts, make=True), path, effect)

    def _put_identity(self, layout: Directory, identity: Identity) -> None:
        if identity.digest not in layout.names():
            _publish_identity(layout, identity)
        self._heal_manifest(layout, identity)

    def _heal_manifest(self, layout: Directory, identity: Identity) -> None:
        try:
            self._reader.manifest(identity.digest)
        except NewerSchemaError:
            return
        except (DataError, RefusedError) as problem:
            set_aside(self._reader, (LAYOUT, identity.digest, MANIFEST), str(problem))
        except FileNotFoundError:
            pass
        else:
            return
        with layout.child(identity.digest) as directory:
            directory.replace(MANIFEST, encode_manifest(identity))

    def _put_bundle(self, parent: Directory, bundle: Bundle, files: Mapping[str, bytes]) -> int:
        generation, staging = self._take_generation(parent, bundle)
        try:
            with parent.child(staging) as stage:
                for name, data in files.items():
                    stage.write(name, data)
                record = encode_bundle(bundle)
                if self.key is not None:
                    stage.write(MAC, authenticate(record, self.key))
                stage.write(BUNDLE, record)
                stage.sync()
            parent.move(staging, parent, f"{generation}-{bundle.digest}")
        except BaseException:
            parent.discard(staging)
            raise
        parent.sync_after_publication()
        return generation

    def _take_generation(self, parent: Directory, bundle: Bundle) -> tuple[int, str]:
        """Claim the next generation: nobody else stages it at the same time, and nobody has published it before."""
        generation = 1 + max(self._taken(parent, bundle), default=0)
        while True:
            staging = f".staging-{generation}"
            try:
                parent.create(staging).close()
            except FileExistsError:
                generation += 1
                continue
            if generation not in self._taken(parent, bundle):
                return generation, staging
            parent.discard(staging)
            generation += 1

    def _taken(self, parent: Directory, bundle: Bundle) -> Iterator[int]:
        """The generations that were published, also those set aside since: none comes back with another content."""
        for name in parent.names():
            place = parse_place(bundle.identity, bundle.plan, name)
            if place is not None:
                yield place.generation
        yield from generations_aside(self._reader, bundle.identity, bundle.plan)

    @contextlib.contextmanager
    def _translated(self, path: Path, effect: str) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise volume_error(problem, path, effect) from problem
        except RefusedError as problem:
            raise VolumeError(f"{path}: {problem}.", effect, "Remove it; only directories belong here.") from problem


def _mark_and_probe(root: Path) -> None:
    make_top(root)
    with Directory.open(root) as top:
        _probe(top)


def _probe(root: Directory) -> None:
    """Do what a publication does, so that it cannot be the first to fail."""
    with root.make(LAYOUT) as layout:
        staging, moved = unique_name(), unique_name()
        layout.create(staging).close()
        layout.move(staging, layout, moved)
        layout.discard(moved)
    present = root.names()
    for name, content in (("CACHEDIR.TAG", _TAG), ("README", _README)):
        if name not in present:
            root.replace(name, content)


def _publish_identity(layout: Directory, identity: Identity) -> None:
    staging = unique_name()
    try:
        with layout.create(staging) as stage:
            stage.write(MANIFEST, encode_manifest(identity))
            stage.sync()
        layout.move(staging, layout, identity.digest)
    except OSError as problem:
        layout.discard(staging)
        # Somebody else has published the same environment meanwhile.
        if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    layout.sync_after_publication()


def _record_parts(relative: str) -> tuple[str, ...]:
    parts = relative.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"not a path below the volume: {relative!r}")
    return (LAYOUT, *parts)
