"""Many runs at once, each judged: what the tests and `scripts/faults` share."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults import checker, driver
from tests.faults.schedule import Schedule, schedule

#: A driver that was not run for so long says that the machine stood still: nothing can be said of deadlines then.
STARVED_SECONDS = 2.5
#: How often a run is repeated because of that.
REPEATS = 3


@dataclass(frozen=True)
class Judged:
    """What became of one run.

    Args:
        seed: of the run.
        kind: its faults.
        outcome: of the group.
        seconds: that it took.
        problems: what it did that it must not.
        directory: where it is kept if there are any.
        repeats: how often it was run again, since the machine had stood still in a run with problems.
    """

    seed: int
    kind: str
    outcome: str
    seconds: float
    problems: tuple[str, ...]
    directory: str
    repeats: int = 0
    starved_seconds: float = 0.0


def kind_of(planned: Schedule) -> str:
    """The faults of a schedule, in words."""
    return " + ".join(fault.kind for fault in planned.faults) or "none"


def judge(seed: int, theatre: driver.Theatre, keep: Path | None = None) -> Judged:
    """Run one seed and check it; where a promise was broken its directory is copied below `keep`."""
    judged, repeats = _judge_once(seed, theatre, keep), 0
    while judged.problems and judged.starved_seconds >= STARVED_SECONDS and repeats < REPEATS:
        judged, repeats = _judge_once(seed, theatre, keep), repeats + 1
    return replace(judged, repeats=repeats)


def _judge_once(seed: int, theatre: driver.Theatre, keep: Path | None) -> Judged:
    planned = schedule(seed, driver.available())
    began = time.monotonic()
    problems: list[str] = []
    outcome, starved = "broken", 0.0
    with driver.run_directory() as directory:
        try:
            for record in driver.perform(planned, directory, theatre):
                life = "again: " if outcome != "broken" else ""
                starved = max(starved, record["starved_seconds"])
                outcome = outcome if life else checker.outcome_of(record)
                problems += [life + problem for problem in checker.violations(record)]
        except Exception:  # a run that cannot be driven or judged is a failure like any other
            problems.append(traceback.format_exc())
        seconds = time.monotonic() - began
        judged = Judged(
            seed, kind_of(planned), outcome, seconds, tuple(problems), str(directory), starved_seconds=starved
        )
        if problems and keep is not None:
            target = keep / str(seed)
            shutil.copytree(directory, target, dirs_exist_ok=True)
            judged = replace(judged, directory=str(target))
    return judged


def judged_as_they_end(
    chosen: Sequence[int], theatre: driver.Theatre, jobs: int, keep: Path | None = None
) -> Iterator[Judged]:
    """Run these seeds, so many at once."""
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(judge, seed, theatre, keep) for seed in chosen]):
            yield future.result()


def run_all(
    chosen: Sequence[int],
    theatre: driver.Theatre,
    jobs: int,
    keep: Path | None = None,
    show: Callable[[Judged], None] = lambda _judged: None,
) -> list[Judged]:
    """Run these seeds, so many at once, and show each as it ends."""
    found = []
    for judged in judged_as_they_end(chosen, theatre, jobs, keep):
        show(judged)
        found.append(judged)
    return found
