"""Work that may hang on a volume, done so that its caller hears a signal and the end of its time meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

#: How often the caller looks up from its wait.
LOOK_SECONDS = 0.1

T = TypeVar("T")


def carry_out(work: Callable[[], T], look: Callable[[], None]) -> T:
    """Do the work in a thread and return its result, or raise what it raised.

    Args:
        work: may hang for any time.
        look: called several times a second meanwhile; what it raises ends the wait, and the work is left alone.
    """
    results: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as problem:  # noqa: BLE001  raised again in the caller's thread
            problems.append(problem)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_SECONDS)
        if thread.is_alive():
            look()
    if problems:
        raise problems[0]
    return results[0]
