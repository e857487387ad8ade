"""A lease on tuning one plan in one environment, held on the cache volume by one of the groups that share it.

    v1/leases/<identity>-<plan>/<term>/lease.json

Making the directory of a term is what takes it: of several processes one succeeds, on every file system, and a process
killed right after it holds up the others for the lease duration and no longer. `initwarm.lease` decides, this module
looks and writes, in a thread of its own: a volume that answers slowly or not at all never holds up the caller, who has
peers to answer and a deadline. The holder writes once in a retry period; those who wait only read.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from initwarm.edges.files import Directory, RefusedError, volume_error
from initwarm.edges.volume_reader import LAYOUT, VolumeReader
from initwarm.errors import VolumeError
from initwarm.jsontext import is_digest
from initwarm.lease import (
    LEASE_BYTES,
    RECORD,
    Holder,
    LeaseRecord,
    LeaseSettings,
    Observation,
    Step,
    decide,
    describe,
    encode_lease,
    follow,
    is_in_time,
    observe,
)

LEASES = "leases"

_DEFAULTS = LeaseSettings()
#: For how long a caller waits for the volume. A later answer is found by the next call.
_ANSWER_SECONDS = 1.0
_EFFECT = "The lease on tuning was not taken, so that another group may tune the same."
_TERM = re.compile(r"[1-9][0-9]*", re.ASCII)


class TuningLease:
    """One process's part in a lease: it waits, holds, or has lost it. For one tuning; make another one for the next.

    Args:
        reader: of the cache volume.
        identity: digest of the environment.
        plan: digest of the plan.
        holder: names this process; no two that live at the same time share a name.
        group: that it tunes for, for people.
        settings: the durations; those of all groups on a volume agree.
        clock: monotonic seconds of this host.
        pod: with what, and a colon, the names of all processes of this pod begin; None where that is not known.

    Raises:
        ValueError: identity or plan is no digest.
    """

    def __init__(
        self,
        reader: VolumeReader,
        identity: str,
        plan: str,
        holder: str,
        group: str,
        settings: LeaseSettings = _DEFAULTS,
        clock: Callable[[], float] = time.monotonic,
        pod: str | None = None,
    ) -> None:
        if not (is_digest(identity) and is_digest(plan)):
            raise ValueError(f"not digests: {identity!r}, {plan!r}")
        self._reader = reader
        self._parts = (LAYOUT, LEASES, f"{identity}-{plan}")
        self._record = LeaseRecord(holder, group, 0, False)
        self._settings = settings
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._count = 0
        self._written_at = 0.0
        # Below: of both threads, under this lock, which nobody keeps while the volume is asked.
        self._changed = threading.Condition()
        self._holder = Holder(holder, pod)
        self._observed: Observation | None = None
        self._asked_at: float | None = None
        self._is_over = False
        self._loss: str | None = None
        self._problem: Exception | None = None

    def try_acquire(self) -> bool:
        """Look once, and take the lease where it is free; the caller comes again after a retry period.

        Returns:
            Whether this process holds it. A volume that does not answer within a second leaves that open, and the
            next call finds the answer. After `release` it is never held.

        Raises:
            VolumeError: the volume cannot be read, or the lease is free and the volume cannot be written. Nothing
                speaks against tuning without a lease then.
        """
        with self._changed:
            if self._is_over or self._is_held():
                return self._is_held()
            self._ask()
            self._changed.wait_for(lambda: self._asked_at is None, _ANSWER_SECONDS)
            if self._asked_at is None and self._problem is not None:
                raise self._problem
            return self._is_held()

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lease now. False as soon as another could have taken it."""
        with self._changed:
            return self._is_held()

    @property
    def is_lost(self) -> bool:
        """Whether this process held the lease and does not any more, other than by `release`."""
        with self._changed:
            has_expired = self._holder.term is not None and not self._is_over and not self._is_held()
            return self._loss is not None or has_expired

    def describe(self) -> str:
        """Who holds the lease, and for how many seconds it has not moved, as a line for people."""
        with self._changed:
            now = self._clock()
            if self._is_over:
                return "the lease is given back"
            if self._is_held():
                return f"term {self._holder.term} is held by this process"
            if self._loss is not None or self._holder.term is not None:
                return f"the lease is lost: {self._loss or 'it was not renewed in time'}"
            seen = "nothing is known of the lease yet" if self._observed is None else describe(self._observed, now)
            silent = 0.0 if self._asked_at is None else now - self._asked_at
            return f"{seen}; the volume has not answered for {silent:.0f} s" if silent >= _ANSWER_SECONDS else seen

    def release(self) -> None:
        """Give the lease back, so that others need not wait for it to stand still. Never raises; again is nothing.

        A volume that does not answer is waited for a second at most.
        """
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_ANSWER_SECONDS)

    def _is_held(self) -> bool:
        return not self._is_over and is_in_time(self._holder, self._clock(), self._settings)

    def _ask(self) -> None:
        if self._asked_at is None:
            self._asked_at = self._clock()
            self._problem = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # What follows runs in the lease's own thread.

    def _run(self) -> None:
        while self._await_work():
            problem: Exception | None = None
            try:
                self._work()
            except OSError as error:
                problem = volume_error(error, self._reader.root.joinpath(*self._parts), _EFFECT)
                problem.__cause__ = error
            except RefusedError as error:
                path = self._reader.root.joinpath(*self._parts)
                problem = VolumeError(f"{path}: {error}.", _EFFECT, "Remove it; only directories belong here.")
            except Exception as error:  # noqa: BLE001  raised again in the caller's thread
                problem = error
            with self._changed:
                self._problem = problem
                self._asked_at = None
                self._changed.notify_all()
        self._give_back()

    def _await_work(self) -> bool:
        """Wait until somebody asks or a renewal is due; False once the lease is over."""
        with self._changed:
            while not self._is_over and self._asked_at is None:
                is_renewing = self._holder.term is not None
                due = self._written_at + self._settings.retry_period - self._clock() if is_renewing else None
                if due is not None and due <= 0:
                    break
                self._changed.wait(due)
            return not self._is_over

    def _work(self) -> None:
        before = self._clock()
        fresh = self._look()
        with self._changed:
            self._observed = follow(self._observed, fresh)
            decision = decide(self._observed, before, self._settings, self._holder)
        if decision.term is None:
            return
        if decision.step is Step.ACQUIRE:
            self._take(decision.term)
        elif decision.step is Step.RENEW:
            self._renew(decision.term)
        else:
            self._lose(decision.why)

    def _look(self) -> Observation:
        # Each directory is opened anew, which makes a client of NFS ask the server whether its cache is still right.
        term = max(_terms(self._reader.names(self._parts)), default=None)
        data = None
        if term is not None:
            with contextlib.suppress(FileNotFoundError, RefusedError):
                data = self._reader.read((*self._parts, str(term), RECORD), LEASE_BYTES)
        return observe(term, data, self._clock())

    def _take(self, term: int) -> None:
        started = self._clock()
        with self._reader.open(self._parts, make=True) as directory:
            try:
                directory.create(str(term)).close()
            except FileExistsError:
                # Somebody was faster.
                return
            terms = list(_terms(directory.names()))
            if max(terms, default=term) > term:
                # The look was so old that this term had come and gone.
                directory.discard(str(term))
                return
            with directory.child(str(term)) as own:
                self._write(own, 0, started)
            with self._changed:
                self._holder = replace(self._holder, term=term, renewed=started)
                self._loss = None
            # The one before may still be looked at.
            for old in terms:
                if old < term - 1:
                    directory.discard(str(old))

    def _renew(self, term: int) -> None:
        started = self._clock()
        try:
            with self._reader.open((*self._parts, str(term))) as own:
                self._write(own, self._count + 1, started)
        except FileNotFoundError:
            self._lose(f"term {term} is gone from the volume")
            return
        with self._changed:
            # What has been reported as lost must not come back.
            if is_in_time(self._holder, self._clock(), self._settings):
                self._holder = replace(self._holder, term=term, renewed=started)
                return
        self._lose("a renewal took too long")

    def _write(self, own: Directory, count: int, started: float, released: bool = False) -> None:
        self._written_at = started
        own.replace(RECORD, encode_lease(LeaseRecord(self._record.holder, self._record.group, count, released)))
        self._count = count

    def _lose(self, why: str) -> None:
        with self._changed:
            self._holder = replace(self._holder, term=None)
            self._loss = why

    def _give_back(self) -> None:
        term = self._holder.term
        if term is None or not is_in_time(self._holder, self._clock(), self._settings):
            return
        with (
            contextlib.suppress(OSError, RefusedError),
            self._reader.open((*self._parts, str(term))) as own,
        ):
            self._write(own, self._count + 1, self._clock(), released=True)


def _terms(names: Iterable[str]) -> Iterable[int]:
    return (int(name) for name in names if _TERM.fullmatch(name))
