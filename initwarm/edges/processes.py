"""Ending everything that a run started, on Linux.

The agent is the subreaper of its descendants: a process whose parent dies is handed to the agent, so one walk over
/proc finds all of them, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def be_subreaper(is_wanted: bool) -> None:
    """Have orphaned descendants handed to this process; PID 1 of a container is handed them anyway."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


def descendants() -> list[int]:
    """Process ids of all living descendants, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The command name is in parentheses and may contain spaces and parentheses itself.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        waiting = [child for parent in waiting for child in children.get(parent, [])]
        found += waiting
    return found


def use_running_fork_server() -> None:
    """Keep multiprocessing from starting another fork server in this process.

    It hands the server's address and lifeline down to a child, and would all the same start a second server there,
    which imports torch again, because it looks for the server among the child's own children. In the agent it would
    start a new one while the agent is ending everything.
    """
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # noqa: SLF001


def end_descendants(starter: threading.Thread, timeout_seconds: float) -> list[int]:
    """Kill and reap all descendants; returns those that are still there when the time is up.

    Args:
        starter: a thread that may be starting one at this moment.
        timeout_seconds: for each of the two sweeps, of which the second finds what the thread started meanwhile.
    """
    _kill_descendants(timeout_seconds)
    starter.join(timeout_seconds)
    left = _kill_descendants(timeout_seconds)
    # Last of all: it removes the semaphores of killed processes.
    with contextlib.suppress(OSError, ChildProcessError):
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # noqa: SLF001
    return left


def _kill_descendants(timeout_seconds: float) -> list[int]:
    tracker_pid = getattr(resource_tracker._resource_tracker, "_pid", None)  # noqa: SLF001
    end = time.monotonic() + timeout_seconds
    while True:
        left = [pid for pid in descendants() if pid != tracker_pid]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(tracker_pid)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.01)


def _reap(tracker_pid: int | None) -> None:
    """Collect ended children, but leave the tracker's status to multiprocessing."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == tracker_pid:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                os.waitpid(int(entry.name), os.WNOHANG)
