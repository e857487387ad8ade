"""Small real bundles for tests of the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files as package_files
from typing import Any

from initwarm.bundle import STORE_FILE, V1_FILE, Bundle, record_files
from initwarm.entries import V1File, encode_v1
from initwarm.identity import Identity
from initwarm.jsontext import canonical, sha256_hex
from initwarm.store import StorePack, encode_store

METADATA = {"flashinfer_version": "0.7.4", "cudnn_version": "91900", "gpu": "NVIDIA H200"}
IDENTITY = Identity(METADATA)
PLAN = "a" * 64
OTHER_PLAN = "b" * 64
POLICY = ["cuda_graph_profile_replays", 10, "l2_cache_policy", "hot"]


def key(op: str = "fp8_gemm", runner: str = "Cutlass", bucket: int = 128, extras: tuple[Any, ...] = ()) -> str:
    """A key in FlashInfer's form."""
    return str((op, runner, ((1, bucket, 64), (1, 64, 32)), extras))


def v1_file(tactics: Mapping[str, Any] | None = None, metadata: Mapping[str, str] = METADATA) -> V1File:
    """A v1 file with these tactics by key."""
    chosen = {key(bucket=bucket): bucket % 7 for bucket in (1, 2, 4, 128)} if tactics is None else tactics
    return V1File(dict(metadata), {name: [name.split("'")[3], tactic, POLICY] for name, tactic in chosen.items()})


def store_pack(v1: V1File, metadata: Mapping[str, str] = METADATA) -> StorePack:
    """The v2 store with the winners of a v1 file."""
    manifest = {**metadata, "cache_schema": "v2"}
    entries = {
        sha256_hex(name.encode())[:24] + ".json": {"key": name, "runner": entry[0], "tactic": entry[1]}
        for name, entry in v1.entries.items()
    }
    return StorePack(sha256_hex(canonical(manifest))[:16], manifest, entries)


def bundle_files(v1: V1File | None = None, has_store: bool = True) -> dict[str, bytes]:
    """The files of a bundle."""
    v1 = v1 or v1_file()
    store = {STORE_FILE: encode_store(store_pack(v1))} if has_store else {}
    return {V1_FILE: encode_v1(v1), **store}


def bundle_of(files: Mapping[str, bytes], **changes: Any) -> Bundle:
    """The record of these files."""
    values: dict[str, Any] = {
        "plan": PLAN,
        "identity": IDENTITY.digest,
        "files": record_files(files),
        "world_size": 4,
        "rank_free": True,
        "strategy": "leader",
        "entries": len([name for name in json.loads(files[V1_FILE]) if not name.startswith("_")]),
        "tool_version": "0.1.0",
        "flashinfer_version": "0.7.4",
    }
    return Bundle(**{**values, **changes})


def schema(name: str) -> Any:
    """A packaged JSON Schema."""
    return json.loads((package_files("initwarm") / "schemas" / f"{name}.schema.json").read_text())
