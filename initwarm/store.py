"""FlashInfer's v2 store, a directory with one small file per entry, packed into one file that can travel and be hashed.

    v2/<env_hash>/manifest.json                     env_hash = sha256(canonical JSON of the manifest)[:16]
    v2/<env_hash>/entries/<op_hash>.json            op_hash = sha256(key)[:24]
    {"schema": 1, "env_hash": ..., "manifest": {...}, "entries": {"<op_hash>.json": {...}}}        packed

Unpacking gives the bytes that FlashInfer wrote. These functions see names and bytes, never a directory.

Source:
    FlashInfer 0.7.4, autotune_cache.ManagedAutotuneCache and _atomic_write_json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from initwarm.bundle import ENTRIES_BYTES, STORE_FILE
from initwarm.entries import V1File
from initwarm.errors import DataError
from initwarm.jsontext import RECORD_BYTES, canonical, parse_object, parse_record, sha256_hex, text_map

SCHEMA = 1
_VERSION = "v2"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StorePack:
    """The content of a v2 store of one environment.

    Args:
        env_hash: FlashInfer's name of the environment and the measurement policy.
        manifest: both of these, field to value.
        entries: by file name; each has key, runner, tactic, and mostly key_fields and profiling_policy.
    """

    env_hash: str
    manifest: dict[str, str]
    entries: dict[str, dict[str, Any]]


def pack_store(files: Mapping[str, bytes]) -> StorePack:
    """Pack the files of a store.

    Args:
        files: by name relative to the store's root, such as `v2/0123456789abcdef/manifest.json`. FlashInfer's
            temporary files, which a killed writer leaves, are passed over.

    Raises:
        DataError: they are not the store of exactly one environment.
    """
    manifests: dict[str, bytes] = {}
    entries: dict[str, dict[str, Any]] = {}
    owners: set[str] = set()
    for name, data in sorted(files.items()):
        version, env_hash, *rest = name.split("/") if name.count("/") >= 2 else ("", "")
        if rest and rest[-1].startswith("."):
            continue
        if version == _VERSION and rest == [_MANIFEST]:
            manifests[env_hash] = data
        elif version == _VERSION and len(rest) == 2 and rest[0] == "entries":
            owners.add(env_hash)
            entries[rest[1]] = parse_object(data, name)
        else:
            raise DataError(f"The store has a file that FlashInfer does not write: {name!r}")
    if len(manifests) != 1 or owners - manifests.keys():
        raise DataError(f"The store holds {len(manifests | dict.fromkeys(owners))} environments instead of one")
    env_hash, data = manifests.popitem()
    return _checked(StorePack(env_hash, text_map(parse_object(data, _MANIFEST), _MANIFEST), entries), "The store")


def unpack_store(pack: StorePack) -> dict[str, bytes]:
    """The files of the store, by name relative to its root, in the bytes that FlashInfer writes."""
    top = f"{_VERSION}/{pack.env_hash}"
    files = {f"{top}/{_MANIFEST}": _as_written(pack.manifest)}
    files.update({f"{top}/entries/{name}": _as_written(entry) for name, entry in sorted(pack.entries.items())})
    return files


def encode_store(pack: StorePack) -> bytes:
    """The packed file, canonical."""
    return canonical({"schema": SCHEMA, "env_hash": pack.env_hash, "manifest": pack.manifest, "entries": pack.entries})


def parse_store(data: bytes, what: str = STORE_FILE) -> StorePack:
    """Read a packed store.

    Raises:
        NewerSchemaError: a newer version wrote it.
        DataError: it is not one, or a name in it is not what its content gives.
    """
    record = parse_record(data, what, SCHEMA, ENTRIES_BYTES)
    manifest = text_map(record.get("manifest"), f"The manifest of {what}")
    entries = record.get("entries")
    if not isinstance(entries, dict):
        raise DataError(f"{what} has entries that are not a JSON object")
    return _checked(StorePack(str(record.get("env_hash")), manifest, entries), what)


def merge_store(packs: Sequence[StorePack], winners: V1File) -> StorePack:
    """The union of the ranks' stores, with the winners of the merged v1 file.

    Of several entries for a key the lowest rank's that agrees with the v1 file is taken; a key on which none agrees is
    left out, so that a server which reads the store and one which reads the file can never use different tactics.

    Args:
        packs: of ranks 0, 1, ... in this order; not empty.
        winners: the merged v1 file.

    Raises:
        DataError: the stores are of different environments.
    """
    first = packs[0]
    entries: dict[str, dict[str, Any]] = {}
    for rank, pack in enumerate(packs):
        if pack.manifest != first.manifest:
            raise DataError(
                f"Rank {rank} and rank 0 have stores of different environments: {pack.env_hash}, {first.env_hash}.",
                "They were not merged.",
                "Run every pod of the group from one image and on one GPU product.",
            )
        for name, entry in pack.entries.items():
            if name not in entries and agrees(entry, winners):
                entries[name] = entry
    return StorePack(first.env_hash, first.manifest, entries)


def agrees(entry: Mapping[str, Any], winners: V1File) -> bool:
    """Whether a store's entry states the winner of the v1 file; a key that only the store has cannot disagree."""
    winner = winners.entries.get(entry["key"])
    return winner is None or (entry["runner"] == winner[0] and entry["tactic"] == winner[1])


def _as_written(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


def _checked(pack: StorePack, what: str) -> StorePack:
    if pack.env_hash != sha256_hex(canonical(pack.manifest))[:16]:
        raise DataError(f"{what} has the environment hash {pack.env_hash!r}, which its manifest does not give")
    for name, entry in pack.entries.items():
        if type(entry) is not dict or type(entry.get("key")) is not str or type(entry.get("runner")) is not str:
            raise DataError(f"{what} has an entry without key and runner: {name!r}")
        if "tactic" not in entry:
            raise DataError(f"{what} has an entry without a tactic: {name!r}")
        # A lone surrogate is valid in JSON and has no UTF-8; FlashInfer cannot have hashed it.
        if name != sha256(entry["key"].encode(errors="replace")).hexdigest()[:24] + ".json":
            raise DataError(f"{what} has an entry under a name that its key does not give: {name!r}")
    if len(canonical(pack.manifest)) > RECORD_BYTES:
        raise DataError(f"{what} has a manifest larger than {RECORD_BYTES} bytes")
    return pack
