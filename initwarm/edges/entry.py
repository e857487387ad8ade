"""Where a process made by the agent begins. Standard library only, so that the agent can name these functions."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from typing import TYPE_CHECKING

from initwarm.errors import InitwarmError, UnavailableError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from initwarm.errors import VolumeError
    from initwarm.plan import Plan
    from initwarm.settings import Settings
    from initwarm.topology import Topology

#: What the fork server imports. Only these: a module inside a zipapp would be skipped in silence.
PRELOADED = ("torch", "flashinfer")


@dataclass(frozen=True)
class RunSpec:
    """What the coordinator is told. Moments are on this machine's monotonic clock, in seconds.

    Args:
        settings: of the run.
        plan: what to tune.
        topology: this pod's place.
        uid: names this process among all that ever claim this place.
        pod: the pod's name, for people.
        pod_uid: the pod's, if known: of two processes of one pod the later one is the one that lives.
        engine_root: directory that the server reads.
        scratch: a directory of this run alone, on this pod.
        deadline: when the run must have ended.
        start_method: `forkserver` or `spawn`.
        key: what bundles are authenticated with, or None.
        obstacle: why the cache volume can be read and not written, or None.
        failure: why this pod cannot take part, which its group has to hear, or None.
    """

    settings: Settings
    plan: Plan
    topology: Topology
    uid: str
    pod: str
    pod_uid: str | None
    engine_root: str
    scratch: str
    deadline: float
    start_method: str
    key: bytes | None
    obstacle: VolumeError | None
    failure: InitwarmError | None


def settle() -> None:
    """What every process of a run does first: leave what it inherited alone, and end when its parent ends."""
    # A collection would visit, and so copy, all that torch and FlashInfer brought into the fork server.
    gc.freeze()
    _die_with_parent()


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is None:
        return

    def watch(sentinel: int) -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def coordinate(spec: RunSpec, conn: Connection) -> None:
    """The coordinator process: speaks with the other pods and orders this pod's workers about."""
    inherited = tuple(name for name in PRELOADED if name in sys.modules)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle()
    # Here and not above: this import brings torch, which the agent must not have.
    try:
        from initwarm.edges import coordinator
    except InitwarmError as problem:
        conn.send(problem)
    except ImportError as problem:
        conn.send(
            UnavailableError(
                f"torch or FlashInfer cannot be imported here: {problem}.",
                "Nothing was tuned.",
                "Run initwarm in the serving image; the versions of its packages must fit each other.",
            )
        )
    else:
        coordinator.main(spec, conn, inherited)
