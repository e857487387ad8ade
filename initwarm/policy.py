"""What a failure means for the outcome and the exit code (design section 10). Pure."""

from __future__ import annotations

from initwarm import errors, report
from initwarm.errors import BarrierError, InitwarmError, Stopped, UnavailableError, VolumeError


def judge(problem: InitwarmError, on_tuning_failure: str, on_barrier_failure: str) -> tuple[str, int]:
    """Outcome and exit code of a run that met this problem.

    Starting cold is safe when all ranks do it, so trouble with tuning or the volume is not fatal unless asked for. A
    missing rank is, since the server would miss it too. Usage, configuration, bugs and SIGTERM are never softened.
    """
    if isinstance(problem, Stopped):
        return report.STOPPED, problem.exit_code
    is_soft = (isinstance(problem, UnavailableError | VolumeError) and on_tuning_failure == "continue") or (
        isinstance(problem, BarrierError) and on_barrier_failure == "continue"
    )
    return (report.COLD, errors.OK) if is_soft else (report.FAILED, problem.exit_code)
