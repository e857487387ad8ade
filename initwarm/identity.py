"""What makes tactics valid: FlashInfer's own metadata of an environment, its digest, and how two of them differ.

The versions of this tool, of the serving engine and of the chart are not part of it, so that their updates keep every
cache warm.

    {"schema": 1, "metadata": {"flashinfer_version": "0.7.4", "gpu": "NVIDIA H200", ...}}        manifest.json
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from initwarm.jsontext import canonical, parse_record, sha256_hex, text_map

SCHEMA = 1
MANIFEST = "manifest.json"
#: What FlashInfer records when it cannot determine a field.
_INDETERMINATE = (None, "unknown", "None")


@dataclass(frozen=True)
class Identity:
    """An environment in which tactics were tuned, or would be used.

    Args:
        metadata: as FlashInfer collects it, field to value.
    """

    metadata: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the metadata; the environment's name on disk."""
        return sha256_hex(canonical(dict(self.metadata)))


@dataclass(frozen=True)
class FieldDifference:
    """A field of the metadata that does not agree.

    Args:
        field: its name.
        saved: what the file states, or None where it states nothing.
        current: what this environment has.
        kind: `hard` where a definite value differs, so that FlashInfer neither loads nor overwrites the file; `soft`
            where the writer could not determine the value.
    """

    field: str
    saved: Any
    current: str
    kind: Literal["hard", "soft"]

    def __str__(self) -> str:
        return f"{self.field} is {self.saved!r} there and {self.current!r} here ({self.kind})"


def differences(saved: Mapping[str, Any], current: Mapping[str, str]) -> tuple[FieldDifference, ...]:
    """Name every field in which saved metadata does not fit the current environment; empty where FlashInfer loads it.

    `"*"` fits everything, and fields that the current environment does not track are ignored.

    Source:
        FlashInfer 0.7.4, autotuner._classify_metadata_mismatches.
    """
    return tuple(
        FieldDifference(
            field,
            saved.get(field),
            value,
            "soft" if saved.get(field) in _INDETERMINATE else "hard",
        )
        for field, value in current.items()
        if saved.get(field) not in (value, "*")
    )


def encode_manifest(identity: Identity) -> bytes:
    """The readable record of an environment that lies beside its bundles."""
    return canonical({"schema": SCHEMA, "metadata": dict(identity.metadata)})


def parse_manifest(data: bytes) -> Identity:
    """Read a manifest.

    Raises:
        NewerSchemaError: a newer version wrote it.
        DataError: it is not a manifest.
    """
    record = parse_record(data, MANIFEST, SCHEMA)
    return Identity(text_map(record.get("metadata"), f"The metadata of {MANIFEST}"))
