"""Workers: one process per job, started through `torch.distributed.elastic.multiprocessing`, one context per rank.

One failed process ends its whole context, so ranks that share a context would take each other down. Each context runs
in a thread of its own, off the main thread, because elastic replaces the signal handlers of the main one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from initwarm import errors

#: elastic's own patience is 30 s, longer than a pod's grace period.
KILL_SECONDS = 2
POLL_SECONDS = 0.02
#: The error of a job that was ended from here.
STOPPED = "stopped"


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: with a result, or with what went wrong.

    Args:
        local_rank: whose job it was.
        result: what the worker sent, or None.
        error: the message and the end of the traceback, or how the process was lost.
        is_lost: the process ended without a word, as by a signal.
        kind: name of the error's class in `initwarm.errors`, or None if the process was lost or raised another.
        last_note: what the worker last said that it was doing.
        moment: when it ended, on this machine's monotonic clock.
    """

    local_rank: int
    result: Any = None
    error: str | None = None
    kind: str | None = None
    last_note: Any = None
    is_lost: bool = False
    moment: float = field(default_factory=time.monotonic)


def quiet_elastic() -> None:
    """elastic logs a traceback of its own for each worker that fails; the job's end carries the worker's."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)


class Job:
    """One worker process and the thread that looks after it.

    Args:
        local_rank: of the worker.
        entrypoint: function of (connection, spec), run in the worker.
        spec: what it is told; picklable.
        environment: variables that the worker gets on top of its parent's.
        start_method: `forkserver` or `spawn`.
        directory: for elastic's error file.
        on_note: called, on the job's thread, with each thing the worker says before its result.
    """

    def __init__(
        self,
        local_rank: int,
        entrypoint: Callable[..., Any],
        spec: Any,
        environment: Mapping[str, str],
        start_method: str,
        directory: str,
        on_note: Callable[[int, Any], None],
    ) -> None:
        self.local_rank = local_rank
        self.end: JobEnd | None = None
        self._news = threading.Event()
        self._on_note = on_note
        self._last_note: Any = None
        self._stop = threading.Event()
        self._conn, self._theirs = multiprocessing.get_context(start_method).Pipe()
        self._arguments = (entrypoint, spec, dict(environment), start_method, directory)
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, name=f"job-{local_rank}", daemon=True)
        self._thread.start()

    def order(self, message: Any) -> None:
        """Send the worker a message; one that is gone says so by its end."""
        with contextlib.suppress(OSError):
            self._conn.send(message)

    @property
    def result(self) -> Any:
        """What the worker has sent as its result so far, or None."""
        return self._result

    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self.end is not None

    def has_spoken(self) -> bool:
        """Whether there is a result, or there will be none."""
        return self._result is not None or self.end is not None

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the worker says something or ends, or the time is up."""
        self._news.wait(timeout_seconds)
        self._news.clear()

    def stop(self) -> None:
        """Ask the thread to end the process; `join` waits for it."""
        self._stop.set()

    def join(self, timeout_seconds: float) -> bool:
        """Wait until the process has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.end = self._supervise()
        except Exception as problem:  # noqa: BLE001  a thread's exception would otherwise be lost, and the job wait for ever
            self.end = JobEnd(self.local_rank, error=f"the worker could not be started: {problem!r}")
        self._news.set()

    def _supervise(self) -> JobEnd:
        entrypoint, spec, environment, start_method, directory = self._arguments
        context = start_processes(
            name=f"initwarm-{self.local_rank}",
            entrypoint=entrypoint,
            args={0: (self._theirs, spec)},
            envs={0: environment},
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            start_method=start_method,
        )
        self._theirs.close()
        while True:
            self._listen()
            if self._stop.is_set():
                context.close(signal.SIGTERM, KILL_SECONDS)
                return JobEnd(self.local_rank, self._result, STOPPED, last_note=self._last_note)
            ended = context.wait(0)
            if ended is None:
                continue
            self._listen()
            failure = ended.failures.get(0)
            if failure is None:
                return JobEnd(self.local_rank, self._result, last_note=self._last_note)
            error, kind, is_lost = _explain(failure)
            return JobEnd(self.local_rank, self._result, error, kind, self._last_note, is_lost)

    def _listen(self) -> None:
        """Take what the worker has said; waits a moment if that is nothing."""
        if self._conn.closed:
            time.sleep(POLL_SECONDS)
            return
        try:
            waiting = POLL_SECONDS
            while self._conn.poll(waiting):
                kind, content = self._conn.recv()
                if kind == "result":
                    self._result = content
                    self._news.set()
                else:
                    self._last_note = (kind, content)
                    self._on_note(self.local_rank, (kind, content))
                waiting = 0
        except (EOFError, OSError):
            self._conn.close()


def _explain(failure: Any) -> tuple[str, str | None, bool]:
    """The worker's own words, from elastic's error file, or how the process was lost."""
    try:
        message = json.loads(Path(failure.error_file).read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"the worker process was lost: {_exit_name(failure.exitcode)}", None, True
    trace = str(message["extraInfo"]["py_callstack"]) if isinstance(message, dict) else str(message)
    text = str(message["message"]) if isinstance(message, dict) else trace
    name, _, sentence = text.partition(": ")
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, errors.InitwarmError):
        return sentence, name, False
    return trace.strip() or text, None, False


def _exit_name(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"{name} (out of memory?)" if name == "SIGKILL" else name
    return f"exit status {code}"
