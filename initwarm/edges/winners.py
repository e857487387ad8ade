"""The winners of a v1 file in FlashInfer's v2 store, written by FlashInfer itself and packed into one file."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from initwarm.entries import parse_v1
from initwarm.errors import TuningError
from initwarm.store import encode_store, pack_store


def publish_winners(v1: bytes, key_fields: Mapping[str, Any], root: Path) -> bytes:
    """The packed store with exactly the winners of a v1 file.

    Args:
        v1: as FlashInfer saved it in this environment.
        key_fields: the parts of each key; an entry without them is read when it is first asked for instead of at once.
        root: directory to write the store in.

    Raises:
        TuningError: FlashInfer could not write an entry, of which it only logs a warning.

    Source:
        FlashInfer 0.7.2.post1 and 0.7.4, autotune_cache.ManagedAutotuneCache; the manifest is that of `autotune_v2`
        without a measurement policy, which is what vLLM opens.
    """
    file = parse_v1(v1)
    cache = importlib.import_module("flashinfer.autotune_cache").ManagedAutotuneCache(file.metadata, root)
    cache._ensure_dirs()  # noqa: SLF001  a store without entries has a manifest too
    for key, (runner, tactic, *more) in file.entries.items():
        # FlashInfer 0.7.0 keeps no policy, and its store takes none.
        policy = {"profiling_policy": tuple(more[0])} if more else {}
        cache.publish(key, runner, tactic, key_fields=key_fields.get(key), **policy)
    pack = pack_store({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()})
    if len(pack.entries) != len(file.entries):
        raise TuningError(
            f"FlashInfer wrote {len(pack.entries)} of {len(file.entries)} entries of its store in {root}.",
            "Nothing was published.",
            "The directory is on TMPDIR; free some space there.",
        )
    return encode_store(pack)
