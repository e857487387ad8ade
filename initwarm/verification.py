"""Whether the content of a bundle is what its place on the volume, its own record and the environment say.

One set of rules for `run`, which sets a bundle aside at the first problem, and for `verify`, which lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from initwarm.bundle import (
    BUNDLE,
    MAC,
    STORE_FILE,
    V1_FILE,
    Bundle,
    FileRecord,
    Place,
    is_authentic,
    parse_bundle,
)
from initwarm.entries import V1File, parse_v1
from initwarm.errors import DataError
from initwarm.identity import differences
from initwarm.jsontext import NewerSchemaError, canonical, sha256_hex
from initwarm.store import StorePack, agrees, parse_store

#: A file that could not be read as a plain file: why.
Unreadable = str


@dataclass(frozen=True)
class Examined:
    """What was found in the place of a bundle.

    Args:
        bundle: what bundle.json states, or None where it cannot be read.
        v1: the content of the v1 file, or None where it is bad.
        store: the packed store, or None where there is none or it is bad.
        problems: every way in which the content is not what it claims to be; empty where it can be used.
        is_newer: a newer version of the tool wrote it, so that nothing here was judged.
    """

    bundle: Bundle | None = None
    v1: V1File | None = None
    store: StorePack | None = None
    problems: tuple[str, ...] = field(default=())
    is_newer: bool = False


def examine_record(place: Place, data: bytes, mac: bytes | None, key: bytes | None) -> Examined:
    """Judge a bundle.json against the names of its directories and, with a key, its authentication."""
    problems: list[str] = []
    try:
        bundle = parse_bundle(data)
    except NewerSchemaError:
        return Examined(is_newer=True)
    except DataError as problem:
        return Examined(problems=(problem.fact,))
    if key is not None and not is_authentic(data, mac, key):
        state = "is missing" if mac is None else f"does not authenticate {BUNDLE} with this key"
        problems.append(f"{MAC} {state}")
    stated = {"digest": bundle.digest, "identity": bundle.identity, "plan": bundle.plan}
    for name, value in stated.items():
        claimed = getattr(place, name)
        if value != claimed:
            problems.append(f"{BUNDLE} has the {name} {value}, and lies under {claimed}")
    return Examined(bundle, problems=tuple(problems))


def examine_files(
    place: Place, found: Examined, files: Mapping[str, bytes | Unreadable], metadata: Mapping[str, str] | None
) -> Examined:
    """Judge the files of a bundle whose record has been read.

    Args:
        place: where it lies.
        found: from `examine_record`, with a bundle.
        files: content by name, or why it cannot be read.
        metadata: of the environment, or None where only its digest is known.
    """
    assert found.bundle is not None
    problems = [*found.problems]
    for name, record in found.bundle.files.items():
        problems.extend(_content_problems(name, record, files[name]))
    v1: V1File | None = None
    store: StorePack | None = None
    try:
        v1 = _parsed_v1(files, problems)
        store = _parsed_store(files, problems)
    except NewerSchemaError:
        return Examined(found.bundle, is_newer=True)
    if v1 is not None:
        problems.extend(_v1_problems(place, found.bundle, v1, metadata))
    if store is not None and v1 is not None:
        problems.extend(_store_problems(store, v1))
    return Examined(found.bundle, v1, store, tuple(problems))


def _content_problems(name: str, record: FileRecord, content: bytes | Unreadable) -> list[str]:
    if isinstance(content, Unreadable):
        return [f"{name} {content}"]
    if len(content) != record.size:
        return [f"{name} has {len(content)} bytes instead of {record.size}"]
    digest = sha256_hex(content)
    return [f"{name} has the SHA-256 {digest} instead of {record.sha256}"] if digest != record.sha256 else []


def _parsed_v1(files: Mapping[str, bytes | Unreadable], problems: list[str]) -> V1File | None:
    content = files[V1_FILE]
    if isinstance(content, Unreadable):
        return None
    try:
        return parse_v1(content)
    except DataError as problem:
        problems.append(problem.fact)
        return None


def _parsed_store(files: Mapping[str, bytes | Unreadable], problems: list[str]) -> StorePack | None:
    content = files.get(STORE_FILE)
    if content is None or isinstance(content, Unreadable):
        return None
    try:
        return parse_store(content)
    except NewerSchemaError:
        raise
    except DataError as problem:
        problems.append(problem.fact)
        return None


def _v1_problems(place: Place, bundle: Bundle, v1: V1File, metadata: Mapping[str, str] | None) -> list[str]:
    problems: list[str] = []
    if len(v1.entries) != bundle.entries:
        problems.append(f"{V1_FILE} has {len(v1.entries)} entries instead of {bundle.entries}")
    if metadata is not None:
        differing = "; ".join(str(difference) for difference in differences(v1.metadata, metadata))
        if differing:
            problems.append(f"{V1_FILE} was tuned in another environment: {differing}")
    elif sha256_hex(canonical(v1.metadata)) != place.identity:
        problems.append(f"{V1_FILE} was tuned in another environment than {place.identity}")
    return problems


def _store_problems(store: StorePack, v1: V1File) -> list[str]:
    problems: list[str] = []
    differing = "; ".join(str(difference) for difference in differences(store.manifest, v1.metadata))
    if differing:
        problems.append(f"{STORE_FILE} is of another environment than {V1_FILE}: {differing}")
    disagreeing = sum(1 for entry in store.entries.values() if not agrees(entry, v1))
    if disagreeing:
        problems.append(f"{STORE_FILE} has {disagreeing} winners that {V1_FILE} does not have")
    return problems
