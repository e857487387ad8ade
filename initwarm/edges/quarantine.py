"""Setting aside what only claims to be a bundle, so that the next reader does not meet it again.

    v1/quarantine/<name>/reason.json            why, and where it lay
    v1/quarantine/<name>/<its last name>        what was set aside, as it was found

Names hold no time. Those of bundles begin with identity, plan and generation, because a generation that was set aside
must never come back with another content.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from initwarm import __version__
from initwarm.bundle import Place
from initwarm.edges.files import RefusedError, unique_name
from initwarm.edges.volume_reader import LAYOUT, QUARANTINE, VolumeReader, again, parts_of
from initwarm.jsontext import canonical

SCHEMA = 1
REASON = "reason.json"


@dataclass(frozen=True)
class Quarantined:
    """Something that was set aside.

    Args:
        path: where it lay.
        reason: what is wrong with it.
        moved_to: where it lies now, or None where it could not be moved and is only passed over.
    """

    path: Path
    reason: str
    moved_to: Path | None


def set_aside(volume: VolumeReader, parts: tuple[str, ...], reason: str, head: str = "") -> Quarantined:
    """Move a file or directory of the volume to the quarantine. Never raises: it is passed over where it cannot move.

    Args:
        volume: the volume.
        parts: the names that lead to it from the root.
        reason: what is wrong with it.
        head: begins its name there.
    """
    path = volume.root.joinpath(*parts)
    name = f"{head}{unique_name().removeprefix('.staging-')}"
    try:
        with (
            again(lambda: volume.open(parts[:-1])) as above,
            again(lambda: volume.open((LAYOUT, QUARANTINE), make=True)) as quarantine,
        ):
            with quarantine.create(name) as target:
                try:
                    above.move(parts[-1], target, parts[-1])
                except OSError:
                    quarantine.discard(name)
                    raise
                # From here on it is set aside, also on a volume too full to say why.
                with contextlib.suppress(OSError):
                    record = {"schema": SCHEMA, "path": "/".join(parts), "reason": reason, "tool_version": __version__}
                    target.replace(REASON, canonical(record))
            quarantine.sync_after_publication()
    except FileNotFoundError:
        return Quarantined(path, f"{reason} (another reader has set it aside already)", None)
    except (OSError, RefusedError) as problem:
        return Quarantined(path, f"{reason} (left in place: {problem})", None)
    return Quarantined(path, reason, volume.root / LAYOUT / QUARANTINE / name)


def set_bundle_aside(volume: VolumeReader, place: Place, reason: str) -> Quarantined:
    """As `set_aside`, for a bundle."""
    head = f"{_head(place.identity, place.plan)}{place.generation}-"
    return set_aside(volume, parts_of(place), reason, head)


def generations_aside(volume: VolumeReader, identity: str, plan: str) -> Iterator[int]:
    """The generations of a plan that were set aside."""
    head = _head(identity, plan)
    for name in volume.names((LAYOUT, QUARANTINE)):
        generation = name.removeprefix(head).partition("-")[0]
        if name.startswith(head) and generation.isdecimal():
            yield int(generation)


def _head(identity: str, plan: str) -> str:
    return f"{identity[:16]}-{plan[:16]}-"
