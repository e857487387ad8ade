"""What a person can set: one table of flags, each with its `INITWARM_<FLAG>` twin, read into one frozen record.

A flag beats the environment, which beats the default. An empty string is unset, since a chart declares variables that
some pods leave empty. A Kubernetes Service link that looks like a setting (`INITWARM_PORT=tcp://...`) is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from initwarm.errors import ConfigurationError, InitwarmError, UsageError
from initwarm.topology import Topology, TopologyFlags

STRATEGIES = ("auto", "leader", "split", "lockstep", "independent")
START_METHODS = ("auto", "forkserver", "spawn")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class Setting:
    """One flag of `run`: its name with dashes, what it means, and the values it takes."""

    flag: str
    help: str
    default: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    is_switch: bool = False

    @property
    def name(self) -> str:
        """The attribute and keyword that go with the flag."""
        return self.flag.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that says the same."""
        return "INITWARM_" + self.name.upper()


RUN_SETTINGS: tuple[Setting, ...] = (
    Setting("plan", "what to tune: `host` (built in, CPU) or a plan file", "host", "host|FILE"),
    Setting("strategy", "who measures", "auto", choices=STRATEGIES),
    Setting("cache-root", "shared volume with the bundles (required)", metavar="DIR"),
    Setting("engine-root", "what the server reads; default: below the cache root", metavar="DIR"),
    Setting("engine", "whose files to write there", "flashinfer", choices=("flashinfer",)),
    Setting("group", "name of the serving group; default: the workload's", metavar="NAME"),
    Setting("topology", "force one topology source, see `initwarm topology`", metavar="SOURCE"),
    Setting("nnodes", "pods in the group", metavar="N"),
    Setting("node-rank", "this pod's place, from 0", metavar="R"),
    Setting("nproc-per-node", "ranks of this pod; default: its visible GPUs", metavar="N|gpu|auto"),
    Setting("leader-address", "host of node rank 0", metavar="HOST"),
    Setting("port", "port of the control channel on the leader", metavar="P"),
    Setting("interface", "network interface of collectives", metavar="NAME"),
    Setting("deadline", "seconds for the whole run", "540", "S"),
    Setting("tuning-budget", "stop tuning after so many seconds and go on in the next run; default: none", metavar="S"),
    Setting("collective-timeout", "seconds for the barrier and each tuning all-reduce", "60", "S"),
    Setting("on-tuning-failure", "`continue`: all ranks start cold, exit 0", "continue", choices=("continue", "fail")),
    Setting("on-barrier-failure", "what a missing rank means", "fail", choices=("fail", "continue")),
    Setting("check-outputs", "publish no winner that disagrees with the default tactic", is_switch=True),
    Setting("cache-key-file", "believe only bundles authenticated with this key", metavar="FILE"),
    Setting("termination-message", "default: /dev/termination-log if writable", metavar="PATH"),
    Setting("log-format", "lines on stderr", "auto", choices=("auto", "text", "json")),
    Setting("report", "write the whole outcome as JSON", metavar="FILE"),
    Setting("start-method", "how workers get torch", "auto", choices=START_METHODS),
)

GC_SETTINGS: tuple[Setting, ...] = (
    Setting("keep-identities", "keep so many environments, those used last", "3", "N"),
    Setting("older-than", "keep what changed in this time: 30d, 36h, 90m, or seconds", "30d", "D"),
    Setting("dry-run", "print the same list and change nothing", is_switch=True),
)


@dataclass(frozen=True)
class Settings:
    """Everything that `run` was told. Durations are in seconds; paths are strings as given."""

    plan: str
    strategy: str
    cache_root: str
    engine_root: str | None
    engine: str
    topology: TopologyFlags
    interface: str | None
    deadline_seconds: float
    tuning_budget_seconds: float | None
    collective_timeout_seconds: float
    on_tuning_failure: str
    on_barrier_failure: str
    check_outputs: bool
    cache_key_file: str | None
    termination_message: str | None
    log_format: str
    report: str | None
    start_method: str
    is_disabled: bool
    command: tuple[str, ...] = field(default=())

    def engine_root_at(self, place: Topology) -> str:
        """Where the server of the pod at this place reads."""
        return self.engine_root or _default_engine_root(self.cache_root, place)

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks of a group, since each decides with it."""
        return {
            "strategy": self.strategy,
            "engine": self.engine,
            "tuning_budget_seconds": self.tuning_budget_seconds,
            "collective_timeout_seconds": self.collective_timeout_seconds,
            "on_tuning_failure": self.on_tuning_failure,
            "on_barrier_failure": self.on_barrier_failure,
            "check_outputs": self.check_outputs,
        }


def is_service_link(value: str) -> bool:
    """Whether Kubernetes made this value from a Service's name, as `X_PORT=tcp://10.0.0.1:80`."""
    return value.startswith(("tcp://", "udp://", "sctp://"))


def read_settings(flags: Mapping[str, Any], environ: Mapping[str, str], command: Sequence[str] = ()) -> Settings:
    """Settings of `run` from parsed flags and the environment.

    Raises:
        ConfigurationError: a value is not one that the setting takes; the message names the flag or variable.
    """
    chosen = {setting.name: _choose(setting, flags, environ) for setting in RUN_SETTINGS}
    value = {name: text for name, (text, _) in chosen.items()}
    where = {name: origin for name, (_, origin) in chosen.items()}
    is_disabled = _switch(environ.get("INITWARM_DISABLE") or None, "INITWARM_DISABLE")
    cache_root = value["cache_root"]
    if cache_root is None and not (is_disabled and value["engine_root"]):
        raise ConfigurationError(
            "No cache root is set.",
            "Nothing was started.",
            "Give --cache-root DIR or INITWARM_CACHE_ROOT, a directory on the volume that the pods share.",
        )
    return Settings(
        plan=str(value["plan"]),
        strategy=str(value["strategy"]),
        cache_root=cache_root or "",
        engine_root=value["engine_root"],
        engine=str(value["engine"]),
        topology=topology_flags(flags, environ),
        interface=value["interface"],
        deadline_seconds=_seconds(value["deadline"], where["deadline"]),
        tuning_budget_seconds=None
        if value["tuning_budget"] is None
        else _seconds(value["tuning_budget"], where["tuning_budget"]),
        collective_timeout_seconds=_seconds(value["collective_timeout"], where["collective_timeout"]),
        on_tuning_failure=str(value["on_tuning_failure"]),
        on_barrier_failure=str(value["on_barrier_failure"]),
        check_outputs=_switch(value["check_outputs"], where["check_outputs"]),
        cache_key_file=value["cache_key_file"],
        termination_message=value["termination_message"],
        log_format=str(value["log_format"]),
        report=value["report"],
        start_method=str(value["start_method"]),
        is_disabled=is_disabled,
        command=tuple(command),
    )


@dataclass(frozen=True)
class GcSettings:
    """What `gc` was told; `older_than` is in seconds."""

    keep_identities: int
    older_than: float
    is_dry_run: bool


def read_gc_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> GcSettings:
    """Settings of `gc` from parsed flags and the environment.

    Raises:
        UsageError: a flag has a value that it does not take.
        ConfigurationError: a variable has one.
    """
    chosen = {setting.name: _choose(setting, flags, environ) for setting in GC_SETTINGS}
    keep, keep_origin = chosen["keep_identities"]
    age, age_origin = chosen["older_than"]
    if not re.fullmatch(r"[0-9]{1,9}", keep or "", re.ASCII):
        raise _refused(keep, keep_origin, "Give a whole number from 0.")
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", age or "", re.ASCII)
    if match is None:
        raise _refused(age, age_origin, "Give a whole number of days, hours, minutes or seconds: 30d, 36h, 90m, 600.")
    return GcSettings(int(keep or 0), float(match[1]) * _UNITS[match[2]], _switch(*chosen["dry_run"]))


def _refused(text: str | None, origin: str, fix: str) -> InitwarmError:
    kind = UsageError if origin.startswith("--") else ConfigurationError
    return kind(f"{origin} is {text!r}.", "Nothing was removed.", fix)


def topology_flags(flags: Mapping[str, Any], environ: Mapping[str, str]) -> TopologyFlags:
    """The part of the settings that says where this pod is."""
    value = {setting.name: _choose(setting, flags, environ)[0] for setting in RUN_SETTINGS}
    return TopologyFlags(
        source=value["topology"],
        nnodes=value["nnodes"],
        node_rank=value["node_rank"],
        nproc_per_node=value["nproc_per_node"],
        leader_address=value["leader_address"],
        port=value["port"],
        group=value["group"],
    )


def read_engine_root(flags: Mapping[str, Any], environ: Mapping[str, str], place: Callable[[], Topology]) -> str:
    """The engine root of this pod, for commands that need nothing else.

    Raises:
        ConfigurationError: neither an engine root nor a cache root is set.
    """
    value = {setting.name: _choose(setting, flags, environ)[0] for setting in RUN_SETTINGS}
    if value["engine_root"] is None and value["cache_root"] is None:
        raise ConfigurationError(
            "Neither an engine root nor a cache root is set.",
            "Nothing was done.",
            "Give --engine-root DIR or INITWARM_ENGINE_ROOT.",
        )
    return value["engine_root"] or _default_engine_root(value["cache_root"] or "", place())


def _default_engine_root(cache_root: str, place: Topology) -> str:
    """Below the cache root, one per pod, so that several pods on one machine do not empty each other's."""
    return f"{cache_root}/engine/{place.group}/{place.node_rank}"


def _choose(setting: Setting, flags: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str | None, str]:
    given = flags.get(setting.name)
    if given is not None and given is not False:
        return _allowed(setting, "1" if given is True else str(given), "--" + setting.flag), "--" + setting.flag
    text = environ.get(setting.variable, "")
    if text and not is_service_link(text):
        return _allowed(setting, text, setting.variable), setting.variable
    return setting.default, "--" + setting.flag


def _allowed(setting: Setting, text: str, origin: str) -> str:
    if setting.choices is not None and text not in setting.choices:
        raise ConfigurationError(
            f"{origin} is {text!r}.", "Nothing was started.", f"Use one of {', '.join(setting.choices)}."
        )
    return text


def _seconds(text: str | None, origin: str) -> float:
    return _number(text, origin, float, lambda number: math.isfinite(number) and 1 <= number <= 86_400)


def _number(text: str | None, origin: str, kind: type[float], is_valid: Callable[[float], bool]) -> float:
    try:
        number = kind(text or "")
    except ValueError:
        number = math.nan
    if not is_valid(number):
        raise ConfigurationError(
            f"{origin} is {text!r}.", "Nothing was started.", "Give a number of seconds from 1 to 86400."
        )
    return number


def _switch(text: str | None, origin: str) -> bool:
    if text is None or text.lower() in ("0", "false", "no"):
        return False
    if text.lower() in ("1", "true", "yes"):
        return True
    raise ConfigurationError(f"{origin} is {text!r}.", "Nothing was started.", "Use 1 or 0.")
