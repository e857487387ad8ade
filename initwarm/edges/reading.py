"""Reading a whole cache root for `inspect` and `verify`. Changes nothing; each file is read, hashed and parsed once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

from initwarm.bundle import BUNDLE, Place, parse_place
from initwarm.catalog import Contents, Finding, IdentitySummary, summarise_bundle
from initwarm.edges.files import Directory, RefusedError, is_staging, volume_error
from initwarm.edges.quarantine import REASON
from initwarm.edges.volume_reader import BUNDLES, LAYOUT, QUARANTINE, VolumeReader, parts_of
from initwarm.errors import ConfigurationError, DataError, VolumeError
from initwarm.identity import MANIFEST, Identity
from initwarm.jsontext import RECORD_BYTES, NewerSchemaError, is_digest, parse_record
from initwarm.verification import Examined

ROUNDS = "rounds"
#: A shorter key could be found by trying.
_LEAST_KEY_BYTES = 16


def read_key(path: str | None) -> bytes | None:
    """The key that authenticates bundles, from its file; None where no file is given.

    Raises:
        ConfigurationError: the file cannot be read, or the key is too short.
    """
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as problem:
        raise ConfigurationError(
            f"The key file {path} cannot be read: {problem.strerror}.",
            "No bundle was read or written.",
            "Mount the secret, or leave --cache-key-file away.",
        ) from problem
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigurationError(
            f"The key in {path} has {len(key)} bytes.",
            "No bundle was read or written.",
            f"Use at least {_LEAST_KEY_BYTES} random bytes.",
        )
    return key


def inspect_root(root: Path, key: bytes | None = None) -> Contents:
    """Read what a cache root holds, good or bad.

    Raises:
        VolumeError: it cannot be read.
    """
    with _uncollected():
        return _contents(_reader(root, key))


def verify_root(root: Path, key: bytes | None = None) -> tuple[Finding, ...]:
    """Check everything that a cache root claims; what a newer version wrote is passed over.

    Raises:
        VolumeError: it cannot be read.
    """
    with _uncollected():
        return tuple(_findings(_reader(root, key)))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Parse without the cyclic collector: of millions of new values none is garbage, and it would visit all, often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _contents(reader: VolumeReader) -> Contents:
    names = reader.names((LAYOUT,))
    unfinished = sum(map(is_staging, names))
    identities = []
    for name in filter(is_digest, names):
        manifest, problem = _manifest(reader, name)
        unfinished += sum(map(is_staging, _plan_names(reader, name)))
        bundles = tuple(summarise_bundle(place, found) for place, found in _bundles(reader, name, manifest))
        identities.append(IdentitySummary(name, manifest.metadata if manifest else None, problem, bundles))
    return Contents(str(reader.root), tuple(identities), _reasons(reader), unfinished)


def _reader(root: Path, key: bytes | None) -> VolumeReader:
    """A reader of a root that can be read: a missing volume must not look like an empty one."""
    try:
        with Directory.open(root) as top:
            if LAYOUT in top.names():
                top.child(LAYOUT).close()
    except OSError as problem:
        raise volume_error(problem, root, "Nothing was read.") from problem
    except RefusedError as problem:
        raise VolumeError(f"{root}: {problem}.", "Nothing was read.", "Give the root of a cache volume.") from problem
    return VolumeReader(root, key)


def _findings(reader: VolumeReader) -> Iterator[Finding]:
    for name in filter(is_digest, reader.names((LAYOUT,))):
        manifest, problem = _manifest(reader, name)
        if problem is not None:
            yield Finding(str(reader.root / LAYOUT / name / MANIFEST), problem)
        yield from _refused(reader, (LAYOUT, name, BUNDLES))
        for plan in filter(is_digest, reader.names((LAYOUT, name, BUNDLES))):
            yield from _refused(reader, (LAYOUT, name, BUNDLES, plan))
        for place, found in _bundles(reader, name, manifest):
            path = str(reader.root.joinpath(*parts_of(place)))
            yield from (Finding(path, problem) for problem in found.problems)
    for name in reader.names((LAYOUT, ROUNDS)):
        yield from _round_findings(reader, name)


def _manifest(reader: VolumeReader, identity: str) -> tuple[Identity | None, str | None]:
    try:
        return reader.manifest(identity), None
    except NewerSchemaError:
        return None, None
    except FileNotFoundError:
        # Unless a gc has taken all of it away since it was listed.
        return None, f"{MANIFEST} is missing" if identity in reader.names((LAYOUT,)) else None
    except (DataError, RefusedError) as problem:
        return None, str(problem)


def _bundles(reader: VolumeReader, identity: str, manifest: Identity | None) -> Iterator[tuple[Place, Examined]]:
    for plan in filter(is_digest, reader.names((LAYOUT, identity, BUNDLES))):
        names = reader.names((LAYOUT, identity, BUNDLES, plan))
        places = [place for name in names if (place := parse_place(identity, plan, name))]
        for place in sorted(places, key=lambda place: (place.generation, place.digest), reverse=True):
            _, found = reader.examine(place, manifest.metadata if manifest else None)
            if found == Examined():
                if place.name not in reader.names((LAYOUT, identity, BUNDLES, plan)):
                    continue
                found = Examined(problems=(f"{BUNDLE} is missing",))
            yield place, found


def _plan_names(reader: VolumeReader, identity: str) -> Iterator[str]:
    for plan in reader.names((LAYOUT, identity, BUNDLES)):
        yield from reader.names((LAYOUT, identity, BUNDLES, plan))


def _refused(reader: VolumeReader, parts: tuple[str, ...]) -> Iterator[Finding]:
    """What stands on the path to bundles and is no directory, so that its bundles are not read."""
    try:
        reader.patiently(lambda: reader.open(parts).close(), reader.root.joinpath(*parts))
    except FileNotFoundError:
        return
    except RefusedError as problem:
        yield Finding(str(reader.root.joinpath(*parts)), str(problem))


def _round_findings(reader: VolumeReader, name: str) -> Iterator[Finding]:
    if is_staging(name):
        return
    try:
        parse_record(reader.read((LAYOUT, ROUNDS, name), RECORD_BYTES), name, 1)
    except (NewerSchemaError, FileNotFoundError):
        return
    except (DataError, RefusedError) as problem:
        yield Finding(str(reader.root / LAYOUT / ROUNDS / name), str(problem))


def _reasons(reader: VolumeReader) -> Mapping[str, str]:
    return {name: _reason(reader, name) for name in reader.names((LAYOUT, QUARANTINE)) if not is_staging(name)}


def _reason(reader: VolumeReader, name: str) -> str:
    try:
        record = parse_record(reader.read((LAYOUT, QUARANTINE, name, REASON), RECORD_BYTES), REASON, 1)
    except (DataError, RefusedError, FileNotFoundError):
        return "unknown"
    return str(record.get("reason"))
