"""Groups of real pods under faults that follow from a seed; `scripts/faults` runs many more of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.driver import Theatre, available, why_not
from tests.faults.schedule import KINDS, schedule, seeds
from tests.faults.suite import Judged, kind_of, run_all

SEED = 1
RUNS = 50
#: Pods mostly wait; more at once make each slower than the others can use (docs/faults.md).
JOBS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Judged]]:
    with Theatre(tmp_path_factory.mktemp("theatre")) as theatre:
        judged = run_all(seeds(SEED, RUNS), theatre, JOBS, tmp_path_factory.mktemp("kept"))
        yield {one.seed: one for one in judged}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(SEED, RUNS), ids=lambda seed: f"{kind_of(schedule(seed))}-{seed}")
def test_a_group_keeps_its_promises(results: dict[int, Judged], seed: int) -> None:
    judged = results[seed]
    replay = f"replay: .venv/bin/python scripts/faults --only {seed}; logs: {judged.directory}"
    assert not judged.problems, "\n".join([f"{judged.kind} -> {judged.outcome}", *judged.problems, replay])


@pytest.mark.parametrize("kind", KINDS)
def test_this_machine_shows(kind: str) -> None:
    """Other kinds are drawn in place of one that it cannot show; the reason stands here."""
    if kind not in available():
        pytest.skip(f"{kind} cannot be shown: {why_not()[kind]}")
