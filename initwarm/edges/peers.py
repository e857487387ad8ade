"""The other pods of a round, as far as this pod knows them, and whether their hearts beat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from initwarm.edges.channel import Channel, Watch


def beat_key(uid: str) -> str:
    """Where the process of this name counts its heartbeats."""
    return f"beat/{uid}"


class Peers:
    """Who has which place in one round.

    Args:
        channel: of the round.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._watch = Watch()
        #: By node rank: `uid`, `pod` and what else it said when it took its place.
        self.places: dict[int, dict[str, Any]] = {}

    def describe(self, node_rank: int) -> str:
        """What is known of a pod, for those who wait for it."""
        place = self.places.get(node_rank)
        if place is None:
            return f"node rank {node_rank}, of which nothing was heard"
        words = self._watch.describe(beat_key(place["uid"])) or f"(pod {place['pod']})"
        return f"node rank {node_rank} {words}"

    def stand_still(self, nodes: Iterable[int], seconds: float) -> dict[int, float]:
        """Those of these pods whose counter has not moved for longer than this, each with for how many seconds.

        Raises:
            LostLeaderError: the leader does not answer.
        """
        known = [node for node in nodes if node in self.places]
        stills = self._watch.look(self._channel, [beat_key(self.places[node]["uid"]) for node in known])
        return {node: still for node, still in zip(known, stills, strict=True) if still > seconds}
