"""`verify --here`: whether this very process would hit what lies in the engine root.

Run in the serving container. It imports torch and FlashInfer, computes FlashInfer's own environment metadata as the
server will, and compares; nothing is measured and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from initwarm.catalog import Finding
from initwarm.edges.engine_root import EngineRoot
from initwarm.entries import parse_v1
from initwarm.errors import DataError, InitwarmError, UnavailableError
from initwarm.identity import FieldDifference, differences
from initwarm.jsontext import parse_json
from initwarm.settings import read_engine_root, topology_flags
from initwarm.topology import resolve


def verify_here(flags: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """What keeps a server in this container from hitting its cache; empty if nothing does.

    Raises:
        ConfigurationError: neither an engine root nor a cache root is set.
        UnavailableError: torch or FlashInfer cannot be imported here.
    """
    path = read_engine_root(flags, environ, lambda: resolve(environ, topology_flags(flags, environ)))
    root = EngineRoot(Path(path))
    return tuple(_findings(root, _current_metadata()))


def _current_metadata() -> Mapping[str, str]:
    try:
        import torch

        from initwarm.edges import tuning
    except InitwarmError:
        raise
    except ImportError as problem:
        raise UnavailableError(
            f"torch or FlashInfer cannot be imported here: {problem}.",
            "The environment could not be compared.",
            "Run `initwarm verify --here` in the serving container.",
        ) from problem
    is_gpu = torch.cuda.is_available()
    return tuning.collect_metadata(torch.device("cuda", 0) if is_gpu else torch.device("cpu"))


def _findings(root: EngineRoot, current: Mapping[str, str]) -> Iterator[Finding]:
    files = sorted(root.v1_path(0).parent.glob("rank*.json"))
    if not files:
        yield Finding(str(root.v1_path(0).parent), "no rank has a file here: the server will find nothing")
    first = None
    for file in files:
        try:
            data = file.read_bytes()
            metadata = parse_v1(data).metadata
        except OSError as problem:
            yield Finding(str(file), f"cannot be read: {problem.strerror}")
            continue
        except DataError as problem:
            yield Finding(str(file), problem.fact)
            continue
        first = data if first is None else first
        if data != first:
            yield Finding(str(file), f"holds other bytes than {files[0].name}: ranks would use different tactics")
        yield from (_mismatch(file, difference) for difference in differences(metadata, current))
    yield from _store_findings(root.store_path, current)


def _store_findings(store: Path, current: Mapping[str, str]) -> Iterator[Finding]:
    for manifest in sorted(store.glob("v2/*/manifest.json")):
        try:
            metadata = parse_json(manifest.read_bytes(), str(manifest))
        except OSError as problem:
            yield Finding(str(manifest), f"cannot be read: {problem.strerror}")
        except DataError as problem:
            yield Finding(str(manifest), problem.fact)
        else:
            saved = metadata if isinstance(metadata, dict) else {}
            yield from (_mismatch(manifest, difference) for difference in differences(saved, current))


def _mismatch(file: Path, difference: FieldDifference) -> Finding:
    return Finding(str(file), f"FlashInfer will ignore it: {difference}; tune in the image that serves")
