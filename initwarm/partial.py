"""What an unfinished run leaves for the next one: winners of some units, which only this product reads. Pure.

    v1/partials/<identity>/<plan>/<group>-<rank>.json
    {"schema": 1, "plan": sha256, "identity": sha256, "v1": "<a v1 file as text>", "hmac": ... or null}

A server that found it would take it for complete, so it never lies where one looks, and it is no bundle.
"""

from __future__ import annotations

from collections.abc import Sequence

from initwarm.bundle import ENTRIES_BYTES, authenticate, is_authentic
from initwarm.entries import V1File, encode_v1, merge_v1, parse_v1
from initwarm.errors import DataError
from initwarm.identity import Identity
from initwarm.jsontext import canonical, parse_record

SCHEMA = 1
PARTIAL_BYTES = 2 * ENTRIES_BYTES


def encode_partial(plan: str, identity: str, v1: bytes, key: bytes | None) -> bytes:
    """The record of some winners.

    Args:
        plan: digest.
        identity: digest of the environment.
        v1: as FlashInfer saved them.
        key: what it is authenticated with, or None.
    """
    mac = None if key is None else authenticate(_signed(plan, identity, v1), key).decode().strip()
    return canonical({"schema": SCHEMA, "plan": plan, "identity": identity, "v1": v1.decode(), "hmac": mac})


def parse_partial(data: bytes, plan: str, identity: Identity, key: bytes | None) -> V1File:
    """The winners of a record.

    Raises:
        DataError: it is bad, of another plan or environment, or not authentic.
    """
    record = parse_record(data, "partial", SCHEMA, PARTIAL_BYTES)
    if record.get("plan") != plan or record.get("identity") != identity.digest or not isinstance(record.get("v1"), str):
        raise DataError("The partial is of another plan or environment")
    v1 = record["v1"].encode()
    mac = record.get("hmac")
    if key is not None and not is_authentic(
        _signed(plan, identity.digest, v1), str(mac).encode() if mac else None, key
    ):
        raise DataError("The partial is not authenticated with the key")
    file = parse_v1(v1)
    if file.metadata != dict(identity.metadata):
        raise DataError("The partial was tuned in another environment")
    return file


def merge_partials(files: Sequence[V1File]) -> bytes | None:
    """All winners in one v1 file; None if there are none."""
    return encode_v1(merge_v1(files)[0]) if any(file.entries for file in files) else None


def _signed(plan: str, identity: str, v1: bytes) -> bytes:
    return f"{plan}/{identity}/".encode() + v1
