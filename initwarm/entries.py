"""FlashInfer's v1 cache file: one JSON file with the winner of every key, its codec and the union over ranks.

    {"_metadata": {...}, "_records": {...}, "<key>": [runner, tactic, policy?, selection?], ..., "_generation": sha256}

A file that FlashInfer wrote is encoded to the same bytes again. The v2 store is in `store.py`.

Source:
    FlashInfer 0.7.4, AutoTuner.save_configs and load_configs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from initwarm.bundle import ENTRIES_BYTES, V1_FILE
from initwarm.errors import DataError
from initwarm.identity import differences
from initwarm.jsontext import canonical, parse_object, sha256_hex, text_map

_METADATA = "_metadata"
_RECORDS = "_records"
_GENERATION = "_generation"
_KEY_HEAD = re.compile(r"\('([^']*)', '([^']*)', ")


@dataclass(frozen=True)
class V1File:
    """The content of a v1 file.

    Args:
        metadata: the environment in which it was tuned; empty where the file does not say.
        entries: by key; runner, tactic, then measurement policy and how the winner was chosen where FlashInfer says.
        records: what products keep in the file under a name of their own.
    """

    metadata: dict[str, str]
    entries: dict[str, list[Any]]
    records: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A key for which ranks chose differently.

    Args:
        key: the key; of the lowest rank where they chose other runners, since keys contain the runner.
        values: runner and tactic, by rank.
    """

    key: str
    values: Mapping[int, tuple[str, Any]]


def parse_v1(data: bytes, what: str = V1_FILE) -> V1File:
    """Read a v1 file.

    Raises:
        DataError: FlashInfer could not load it, or would load it as something else.
    """
    content = parse_object(data, what, ENTRIES_BYTES)
    metadata = text_map(content.pop(_METADATA, {}), f"The metadata of {what}")
    records = content.pop(_RECORDS, {})
    generation = content.pop(_GENERATION, "")
    if not isinstance(records, dict):
        raise DataError(f"{what} has {_RECORDS} that are not a JSON object")
    if not isinstance(generation, str):
        raise DataError(f"{what} has a {_GENERATION} that is not text")
    for key, entry in content.items():
        if not (type(entry) is list and len(entry) >= 2 and type(entry[0]) is str):
            raise DataError(f"{what} has an entry that is not [runner, tactic, ...]: {key[:200]!r}")
        if len(entry) > 2 and type(entry[2]) is not list:
            raise DataError(f"{what} has an entry whose policy is not a list: {key[:200]!r}")
    return V1File(metadata, content, records)


def encode_v1(file: V1File) -> bytes:
    """A v1 file in the bytes that FlashInfer itself writes."""
    ordered: dict[str, Any] = {_METADATA: file.metadata}
    if file.records:
        ordered[_RECORDS] = file.records
    for key in sorted(file.entries):
        ordered[key] = file.entries[key]
    ordered[_GENERATION] = sha256_hex(canonical(ordered))
    return json.dumps(ordered, indent=2).encode()


def merge_v1(files: Sequence[V1File]) -> tuple[V1File, tuple[Difference, ...]]:
    """The union of the ranks' files, so that each rank finds its own keys in one file that is the same for all.

    For a key with several tactics the lowest rank's entry is taken whole. Where ranks chose other *runners* for the
    same shapes, their keys differ and all are kept: every rank looks them up in the same order.

    Args:
        files: of ranks 0, 1, ... in this order; not empty.

    Returns:
        The union, and every choice in which ranks differ.

    Raises:
        DataError: the files are of different environments.
    """
    first = files[0]
    entries: dict[str, list[Any]] = {}
    records: dict[str, Any] = {}
    for rank, file in enumerate(files):
        _require_same_environment(rank, file, first)
        for key, entry in file.entries.items():
            entries.setdefault(key, entry)
        _merge_records(records, file.records)
    found = (*_tactic_differences(files), *_runner_differences(files))
    return V1File(first.metadata, entries, records), found


def select_v1(file: V1File, keys: Collection[str]) -> V1File:
    """The same file with these entries only."""
    return V1File(file.metadata, {key: entry for key, entry in file.entries.items() if key in keys}, file.records)


def op_of(key: str) -> str:
    """The custom op of a key, or the whole key where it is not in FlashInfer's form."""
    end = key.find("'", 2)
    return key[2:end] if end > 0 and key.startswith("('") else key


def _require_same_environment(rank: int, file: V1File, first: V1File) -> None:
    differing = differences(file.metadata, first.metadata) or differences(first.metadata, file.metadata)
    if differing:
        names = ", ".join(difference.field for difference in differing)
        raise DataError(
            f"Rank {rank} and rank 0 tuned in different environments: {names} differ.",
            "Their entries were not merged.",
            "Run every pod of the group from one image and on one GPU product.",
        )


def _merge_records(records: dict[str, Any], others: Mapping[str, Any]) -> None:
    for name, content in others.items():
        present = records.get(name)
        if isinstance(present, dict) and isinstance(content, dict):
            records[name] = {**content, **present}
        else:
            records.setdefault(name, content)


def _tactic_differences(files: Sequence[V1File]) -> tuple[Difference, ...]:
    chosen: dict[str, dict[int, tuple[str, Any]]] = {}
    for rank, file in enumerate(files):
        for key, entry in file.entries.items():
            chosen.setdefault(key, {})[rank] = (entry[0], entry[1])
    return tuple(Difference(key, values) for key, values in sorted(chosen.items()) if not _all_equal(values))


def _runner_differences(files: Sequence[V1File]) -> tuple[Difference, ...]:
    """The shapes that several ranks tuned and for which they chose other runners."""
    chosen: dict[tuple[str, str], dict[int, dict[str, str]]] = {}
    for rank, file in enumerate(files):
        for key in file.entries:
            shapes = _op_and_profile(key)
            if shapes is not None:
                chosen.setdefault(shapes, {}).setdefault(rank, {})[file.entries[key][0]] = key
    return tuple(_runner_difference(files, ranks) for _, ranks in sorted(chosen.items()) if _runners_differ(ranks))


def _runners_differ(ranks: Mapping[int, Mapping[str, str]]) -> bool:
    first, *others = (runners.keys() for runners in ranks.values())
    return any(other != first for other in others)


def _runner_difference(files: Sequence[V1File], ranks: Mapping[int, Mapping[str, str]]) -> Difference:
    shared = set.intersection(*(set(runners) for runners in ranks.values()))
    values: dict[int, tuple[str, Any]] = {}
    for rank, runners in ranks.items():
        runner = min(set(runners) - shared or set(runners))
        values[rank] = (runner, files[rank].entries[runners[runner]][1])
    lowest = min(values)
    return Difference(ranks[lowest][values[lowest][0]], values)


def _op_and_profile(key: str) -> tuple[str, str] | None:
    match = _KEY_HEAD.match(key)
    if match is None:
        return None
    depth = 0
    for place in range(match.end(), len(key)):
        depth += {"(": 1, ")": -1}.get(key[place], 0)
        if depth == 0:
            return match[1], key[match.end() : place + 1]
    return None


def _all_equal(values: Mapping[int, Any]) -> bool:
    first, *others = values.values()
    return all(other == first for other in others)
