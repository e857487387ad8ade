"""Every way in which initwarm fails on purpose, with its exit code.

A message states the fact, its effect and the next step, a full sentence each. Library exceptions are translated into
these once, at the edge that met them, with the original as the cause.
"""

from __future__ import annotations

OK = 0
USAGE = 64
BAD_DATA = 65
UNAVAILABLE = 69
INTERNAL = 70
VOLUME = 74
TIMED_OUT = 75
CONFIGURATION = 78
STOPPED = 143


class InitwarmError(Exception):
    """A failure that a person can act on.

    Args:
        fact: what was found, with the value and the name of the setting, variable or file.
        effect: what did not happen because of it.
        fix: the next step.
    """

    exit_code = INTERNAL
    #: Where in the group it happened, once that is known.
    rank: int | None = None
    pod: str | None = None

    def __init__(self, fact: str, effect: str = "", fix: str = "") -> None:
        super().__init__(fact, effect, fix)
        self.fact = fact
        self.effect = effect
        self.fix = fix

    def at(self, rank: int | None, pod: str) -> InitwarmError:
        """The same error, with the place where it happened unless it has one already."""
        self.rank = rank if self.rank is None else self.rank
        self.pod = self.pod or pod
        return self

    def __str__(self) -> str:
        return " ".join(part for part in (self.fact, self.effect, self.fix) if part)


class UsageError(InitwarmError):
    """The command line is malformed."""

    exit_code = USAGE


class DataError(InitwarmError):
    """What lies on disk is not what it claims to be (`verify` only; `run` sets it aside and goes on)."""

    exit_code = BAD_DATA


class UnavailableError(InitwarmError):
    """No usable device, or FlashInfer or torch cannot be used here."""

    exit_code = UNAVAILABLE


class TuningError(UnavailableError):
    """Tuning or its proof failed on some rank; every rank can still start cold."""


class TuningTimeout(TuningError):
    """Tuning did not end in its time."""

    exit_code = TIMED_OUT


class TuningBudgetSpent(TuningTimeout):
    """The time for tuning was used up; what is finished is kept for the next run."""


class VolumeError(InitwarmError):
    """The cache volume or the engine root cannot be read or written."""

    exit_code = VOLUME


class BarrierError(InitwarmError):
    """A rank was missing when its time was up, or the group lost one; a retry may succeed."""

    exit_code = TIMED_OUT


class LostRankError(BarrierError):
    """One rank is known to stand still or to be gone, which explains whatever the others report."""


class SupersededError(BarrierError):
    """A later process has this pod's place in the group."""


class LostLeaderError(BarrierError):
    """The leader, which holds the control channel, is gone or silent; another may answer in its place."""


class ConfigurationError(InitwarmError):
    """A setting, the plan, the topology or the peers contradict each other; a retry cannot succeed."""

    exit_code = CONFIGURATION


class TopologyError(ConfigurationError):
    """The pod's environment does not say, or contradicts itself on, which rank this is."""


class PlanError(ConfigurationError):
    """The plan is not valid."""


class Stopped(InitwarmError):
    """SIGTERM arrived."""

    exit_code = STOPPED


def error_named(name: str, text: str) -> InitwarmError:
    """The error of this class name that another process reported in words."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, InitwarmError):
        return kind(text)
    return InitwarmError(text)
