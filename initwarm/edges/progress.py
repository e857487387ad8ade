"""What this pod's ranks have finished of a tuning that has not ended, for whoever goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from initwarm import strategy
from initwarm.edges.entry import RunSpec
from initwarm.edges.partials import Partials
from initwarm.entries import encode_v1, merge_v1, parse_v1
from initwarm.errors import DataError, VolumeError
from initwarm.identity import Identity

#: How often what is finished is copied to the volume, for the case that this pod does not live to say it.
KEEP_SECONDS = 10.0


class Progress:
    """The progress files of one pod.

    Args:
        spec: of the run.
        say: prints an event.
        identity: of this pod's ranks, once it is known.
    """

    def __init__(self, spec: RunSpec, say: Callable[..., None], identity: Callable[[], Identity]) -> None:
        self._spec = spec
        self._say = say
        self._identity = identity
        self._kept: dict[int, int] = {}
        self._kept_at = time.monotonic()

    @property
    def partials(self) -> Partials:
        """What unfinished runs of this plan in this environment have left on the volume."""
        root = Path(self._spec.settings.cache_root)
        return Partials(root, self._identity(), self._spec.plan.digest, self._spec.key)

    def path(self, rank: int, round_number: int) -> Path:
        """Where a rank saves each unit that it has finished."""
        return Path(self._spec.scratch) / f"progress-{round_number}-{rank}.json"

    def resume(self, rank: int, data: Mapping[str, Any], base: bytes | None) -> str | None:
        """A file of all that this rank need not measure: what every rank was given, and what it has finished itself."""
        own = self.path(rank, data["round"])
        files = [] if base is None else [parse_v1(base)]
        if data["strategy"] == strategy.LOCKSTEP:
            # A unit that only some ranks resume would make the others wait in its reduce.
            own.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            try:
                files.append(merge_v1([*files, parse_v1(own.read_bytes())])[0])
            except DataError:
                own.unlink()  # FlashInfer would not replace it
        if not files:
            return None
        path = Path(self._spec.scratch) / f"resume-{rank}.json"
        path.write_bytes(encode_v1(files[-1]))
        return str(path)

    def of(self, rank: int, round_number: int) -> bytes | None:
        """What this rank has finished so far, as a v1 file."""
        with contextlib.suppress(OSError):
            return self.path(rank, round_number).read_bytes()
        return None

    def keep(self, ranks: Sequence[int], round_number: int, is_last: bool = False) -> None:
        """Copy what is finished to the volume, where the next life of this group finds it."""
        if time.monotonic() - self._kept_at < KEEP_SECONDS and not is_last:
            return
        self._kept_at = time.monotonic()
        for rank in ranks:
            data = self.of(rank, round_number)
            if data is None or self._kept.get(rank) == len(data):
                continue
            try:
                self.partials.write(f"{self._spec.topology.group}-{rank}", data)
            except VolumeError as problem:
                self._say("initwarm.partial.not_kept", message=str(problem))
                return
            self._kept[rank] = len(data)
