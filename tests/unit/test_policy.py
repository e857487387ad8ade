import pytest

from initwarm import errors
from initwarm.policy import judge


@pytest.mark.parametrize(
    ("kind", "on_tuning", "on_barrier", "expected"),
    [
        (errors.UnavailableError, "continue", "fail", ("cold", 0)),
        (errors.UnavailableError, "fail", "fail", ("failed", 69)),
        (errors.TuningError, "continue", "fail", ("cold", 0)),
        (errors.TuningTimeout, "continue", "fail", ("cold", 0)),
        (errors.TuningTimeout, "fail", "continue", ("failed", 75)),
        (errors.VolumeError, "continue", "fail", ("cold", 0)),
        (errors.VolumeError, "fail", "continue", ("failed", 74)),
        (errors.BarrierError, "continue", "fail", ("failed", 75)),
        (errors.BarrierError, "fail", "continue", ("cold", 0)),
        (errors.Stopped, "continue", "continue", ("stopped", 143)),
        (errors.ConfigurationError, "continue", "continue", ("failed", 78)),
        (errors.TopologyError, "continue", "continue", ("failed", 78)),
        (errors.PlanError, "continue", "continue", ("failed", 78)),
        (errors.UsageError, "continue", "continue", ("failed", 64)),
        (errors.InitwarmError, "continue", "continue", ("failed", 70)),
    ],
)
def test_the_exit_code_follows_the_failure_policy(
    kind: type[errors.InitwarmError], on_tuning: str, on_barrier: str, expected: tuple[str, int]
) -> None:
    assert judge(kind("what happened"), on_tuning, on_barrier) == expected


def test_an_error_keeps_the_first_place_it_was_given() -> None:
    problem = errors.TuningError("fact").at(3, "pod-a").at(1, "pod-b")

    assert (problem.rank, problem.pod) == (3, "pod-a")


@pytest.mark.parametrize("name", ["BarrierError", "TopologyError", "TuningTimeout"])
def test_an_error_survives_being_named_to_another_process(name: str) -> None:
    problem = errors.error_named(name, "A sentence.")

    assert type(problem).__name__ == name
    assert str(problem) == "A sentence."


@pytest.mark.parametrize("name", ["ValueError", "annotations", "OK", "__doc__", ""])
def test_a_name_that_is_no_error_of_ours_is_a_bug(name: str) -> None:
    assert errors.error_named(name, "text").exit_code == 70
