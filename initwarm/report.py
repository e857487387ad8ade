"""What a person and a machine see: the outcome, its termination message, and one line per event.

The termination message has the fields of design section 13, outcome first, in at most 1 KiB of JSON; where that is too
little the text of the first failure is shortened, then the reason, and it stays valid JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from initwarm import errors

MESSAGE_BYTES = 1024
WARM = "warm"
COLD = "cold"
STOPPED = "stopped"
FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in the group.

    Args:
        rank: the rank it happened on, or None where it concerns no single rank.
        pod: the name of its pod.
        what: one sentence, or the last lines of a traceback.
    """

    rank: int | None
    pod: str
    what: str


@dataclass(frozen=True)
class Outcome:
    """How a run ended on this pod. Durations in seconds, counts in entries or look-ups."""

    outcome: str
    reason: str
    exit_code: int = errors.OK
    first_failure: Failure | None = None
    ranks: tuple[int, ...] = ()
    world_size: int | None = None
    strategy: str | None = None
    tuned: int = 0
    replayed: int = 0
    missed: int = 0
    bundle: str | None = None
    identity: str | None = None
    epoch: str | None = None
    seconds: float = 0.0

    def fields(self) -> dict[str, Any]:
        """The fields of the termination message, in its order."""
        fields = asdict(self)
        del fields["exit_code"]
        fields["ranks"] = list(self.ranks)
        fields["seconds"] = round(self.seconds, 2)
        return fields


def termination_message(outcome: Outcome) -> bytes:
    """The outcome as one line of JSON of at most 1 KiB."""
    fields = outcome.fields()
    encoded = _encode(fields)
    if len(encoded) > MESSAGE_BYTES and fields["first_failure"] is not None:
        fields["first_failure"] = dict(fields["first_failure"])
        encoded = _shorten(fields, fields["first_failure"], "what", keep_end=True)
    if len(encoded) > MESSAGE_BYTES and fields["first_failure"] is not None:
        encoded = _shorten(fields, fields["first_failure"], "pod")
    if len(encoded) > MESSAGE_BYTES:
        encoded = _shorten(fields, fields, "reason")
    if len(encoded) > MESSAGE_BYTES:
        # Only a pod with hundreds of ranks gets here; the outcome matters more than their list.
        fields["ranks"] = list(outcome.ranks[:1]) + list(outcome.ranks[-1:])
        encoded = _encode(fields)
    return encoded


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode()


def _shorten(fields: Mapping[str, Any], holder: dict[str, Any], key: str, keep_end: bool = False) -> bytes:
    """Cut one text until the message fits; a traceback says most at its end."""
    text = str(holder[key])
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        holder[key] = _cut(text, middle, keep_end)
        low, high = (middle, high) if len(_encode(fields)) <= MESSAGE_BYTES else (low, middle - 1)
    holder[key] = _cut(text, low, keep_end)
    return _encode(fields)


def _cut(text: str, length: int, keep_end: bool) -> str:
    if length >= len(text):
        return text
    return "..." + text[len(text) - length :] if keep_end else text[:length] + "..."


def event_as_json(name: str, fields: Mapping[str, Any], timestamp: str) -> str:
    """One event as one line of JSON."""
    return json.dumps({"time": timestamp, "event": name, **fields}, ensure_ascii=False, default=str)


def event_as_text(name: str, fields: Mapping[str, Any], timestamp: str) -> str:
    """One event as one line for a person."""
    rest = dict(fields)
    message = str(rest.pop("message", ""))
    details = " ".join(f"{key}={_short(value)}" for key, value in rest.items() if value is not None)
    head = f"{timestamp[11:19]} {name.removeprefix('initwarm.')}"
    return " ".join(part for part in (head + ":", message, f"[{details}]" if details else "") if part)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    is_digest = len(text) == 64 and all(character in "0123456789abcdef" for character in text)
    return text[:12] if is_digest else text
