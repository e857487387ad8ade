"""The published result of one plan in one environment: what bundle.json says, and its digest.

bundle.json is the completeness marker and names every file by size and SHA-256, so it cannot vouch for other content.
It holds no path and no time. Fields are fixed for a schema version: a new field is a new version, which older readers
take as a miss.

    {"schema": 1, "plan": sha256, "identity": sha256, "files": {"flashinfer-v1.json": {"sha256": ..., "size": ...}},
     "world_size": 8, "rank_free": true, "strategy": "leader", "entries": 23, "tool_version": ...,
     "flashinfer_version": ...}
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from initwarm.errors import DataError
from initwarm.jsontext import canonical, is_digest, parse_record, sha256_hex

SCHEMA = 1
BUNDLE = "bundle.json"
MAC = "bundle.hmac"
V1_FILE = "flashinfer-v1.json"
STORE_FILE = "flashinfer-store.json"
#: Of one file of entries, in bytes; 100,000 entries with all their fields take about half of it.
ENTRIES_BYTES = 128 << 20

_FILES = frozenset((V1_FILE, STORE_FILE))
_PLACE = re.compile(r"(0|[1-9][0-9]{0,17})-([0-9a-f]{64})")


@dataclass(frozen=True)
class FileRecord:
    """A file of a bundle: SHA-256 in hexadecimal, and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Bundle:
    """What a bundle states about itself.

    Args:
        plan: digest of the plan.
        identity: digest of the environment.
        files: by name; `flashinfer-v1.json` always, `flashinfer-store.json` where FlashInfer has a v2 store.
        world_size: ranks of the group that tuned it.
        rank_free: no key contains a rank, so that groups of any size hit it.
        strategy: who measured.
        entries: cache entries in the v1 file.
        tool_version: of initwarm, for information; not in the digest, so that an update of the tool stays warm.
        flashinfer_version: for people; the identity decides.
    """

    plan: str
    identity: str
    files: Mapping[str, FileRecord]
    world_size: int
    rank_free: bool
    strategy: str
    entries: int
    tool_version: str
    flashinfer_version: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON without the tool's version."""
        record = _as_record(self)
        del record["tool_version"]
        return sha256_hex(canonical(record))

    def serves(self, world_size: int) -> bool:
        """Whether a group of this size can use it."""
        return self.rank_free or self.world_size == world_size


@dataclass(frozen=True)
class Place:
    """Where a bundle lies on the volume; the names are claims that its content must bear out."""

    identity: str
    plan: str
    generation: int
    digest: str

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.generation}-{self.digest}"


@dataclass(frozen=True)
class StoredBundle:
    """A verified bundle, with its files in memory.

    Args:
        bundle: what it states.
        files: content by name.
        generation: grows with every publication for a plan and identity.
        digest: of the bundle.
    """

    bundle: Bundle
    files: Mapping[str, bytes]
    generation: int
    digest: str

    @property
    def place(self) -> Place:
        """Where it lies."""
        return Place(self.bundle.identity, self.bundle.plan, self.generation, self.digest)


def parse_place(identity: str, plan: str, name: str) -> Place | None:
    """The place that a directory name stands for, or None where it is not a bundle's."""
    match = _PLACE.fullmatch(name)
    return Place(identity, plan, int(match[1]), match[2]) if match else None


def record_files(files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """The records of a bundle's files."""
    return {name: FileRecord(sha256_hex(data), len(data)) for name, data in sorted(files.items())}


def encode_bundle(bundle: Bundle) -> bytes:
    """bundle.json, canonical."""
    return canonical(_as_record(bundle))


def parse_bundle(data: bytes) -> Bundle:
    """Read a bundle.json.

    Raises:
        NewerSchemaError: a newer version wrote it.
        DataError: it is not one, or names a file that a bundle cannot have.
    """
    record = parse_record(data, BUNDLE, SCHEMA)
    expected = {field.name for field in fields(Bundle)}
    if record.keys() != expected:
        wrong = ", ".join(sorted(repr(name) for name in record.keys() ^ expected))
        raise DataError(f"{BUNDLE} lacks or has in excess: {wrong}")
    for name in ("plan", "identity"):
        if not is_digest(record[name]):
            raise DataError(f"{BUNDLE} has a {name} that is not a SHA-256: {record[name]!r}")
    for name in ("strategy", "tool_version", "flashinfer_version"):
        if not isinstance(record[name], str):
            raise DataError(f"{BUNDLE} has a {name} that is not text: {record[name]!r}")
    if not isinstance(record["rank_free"], bool):
        raise DataError(f"{BUNDLE} has a rank_free that is neither true nor false: {record['rank_free']!r}")
    _require_count(record, "world_size", 1)
    _require_count(record, "entries", 0)
    return Bundle(**{**record, "files": _parse_files(record["files"])})


def authenticate(data: bytes, key: bytes) -> bytes:
    """What lies in bundle.hmac: HMAC-SHA256 over bundle.json, in hexadecimal."""
    return hmac.new(key, data, hashlib.sha256).hexdigest().encode() + b"\n"


def is_authentic(data: bytes, mac: bytes | None, key: bytes) -> bool:
    """Whether a holder of the key wrote this bundle.json, and through its digests the files."""
    return mac is not None and hmac.compare_digest(authenticate(data, key).strip(), mac.strip())


def _as_record(bundle: Bundle) -> dict[str, Any]:
    record = asdict(bundle)
    record["files"] = {name: asdict(file) for name, file in bundle.files.items()}
    return {"schema": SCHEMA, **record}


def _require_count(record: Mapping[str, Any], name: str, least: int) -> None:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{BUNDLE} has a {name} that is not a whole number from {least}: {value!r}")


def _parse_files(value: Any) -> dict[str, FileRecord]:
    if not isinstance(value, dict) or V1_FILE not in value:
        raise DataError(f"{BUNDLE} does not name {V1_FILE} among its files")
    files: dict[str, FileRecord] = {}
    for name, record in value.items():
        if name not in _FILES:
            raise DataError(f"{BUNDLE} names a file that a bundle cannot have: {name!r}")
        if not isinstance(record, dict) or record.keys() != {"sha256", "size"} or not is_digest(record["sha256"]):
            raise DataError(f"{BUNDLE} does not give {name} by sha256 and size")
        _require_count(record, "size", 0)
        if record["size"] > ENTRIES_BYTES:
            raise DataError(f"{BUNDLE} gives {name} {record['size']} bytes, more than {ENTRIES_BYTES}")
        files[name] = FileRecord(record["sha256"], record["size"])
    return files
