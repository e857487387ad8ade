"""Why pods of a group do not meet, in the words of the objects that people edit. Pure.

An init container cannot see how its pod was made, so the usual causes are listed, each with the field to change.

Source:
    The controllers' code as of 2026-08: StatefulSet podManagementPolicy, LeaderWorkerSet startupPolicy, Volcano and
    PyTorchJob Services, Istio's redirection of init containers.
"""

from __future__ import annotations

#: After so long without any contact the causes are listed, once.
FIRST_SECONDS = 60.0
#: Then one short line per this time.
AGAIN_SECONDS = 60.0

_ORDER = (
    "pods are started one after the other, each waiting for the one before to be ready: set podManagementPolicy: "
    "Parallel in a StatefulSet (not OrderedReady), startupPolicy: LeaderCreated in a LeaderWorkerSet (not "
    "LeaderReady), and no start condition that waits for ready pods of the same group (WaitForWorkersReady)"
)
_NAME = (
    "the leader's name is not published before it is ready: set publishNotReadyAddresses: true on the headless Service "
    "(Volcano: svc plugin --publish-not-ready-addresses; PyTorchJob has no such field: share a cache volume)"
)
_POLICY = (
    "a NetworkPolicy blocks the control port, or the ports of the collectives: allow all ports between the pods of the "
    "group, ingress and egress, and DNS"
)
_MESH = (
    "a service mesh redirects init containers to a sidecar that does not run yet: annotate the pods with "
    'sidecar.istio.io/inject: "false", or exclude the port'
)
_SIZE = (
    "the size is wrong, so that a pod is waited for that does not exist: compare `initwarm topology --explain` in each"
)
_UNSCHEDULED = "a pod is not scheduled or still pulls its image: kubectl get pods -o wide"


def why_no_leader(is_name_unknown: bool) -> str:
    """The usual causes, for a pod that found no leader."""
    causes = [_NAME, _ORDER] if is_name_unknown else [_ORDER, _NAME]
    return _listed("No leader was found yet", [*causes, _POLICY, _MESH, _UNSCHEDULED])


def why_nobody_came(missing: int) -> str:
    """The usual causes, for a leader that nobody has contacted."""
    return _listed(
        f"{missing} pods have not contacted the leader yet", [_ORDER, _NAME, _POLICY, _MESH, _SIZE, _UNSCHEDULED]
    )


def _listed(fact: str, causes: list[str]) -> str:
    return (
        f"{fact}. The usual causes: " + "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1)) + "."
    )


class Reminder:
    """When to list the causes and when to say one short line; seconds since the wait began."""

    def __init__(self) -> None:
        self._next = FIRST_SECONDS

    def is_due(self, waited_seconds: float) -> bool:
        """Whether something should be said now; said once per due moment."""
        if waited_seconds < self._next:
            return False
        self._next = waited_seconds + AGAIN_SECONDS
        return True

    @staticmethod
    def is_first(waited_seconds: float) -> bool:
        """Whether this is the long text's turn."""
        return waited_seconds < FIRST_SECONDS + AGAIN_SECONDS
