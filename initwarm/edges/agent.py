"""The agent: one process per pod that never imports torch, so that it answers a signal at once.

It prepares the volume, starts the fork server and the coordinator, prints what they say, keeps the deadline, ends every
process it started, and writes the termination message. Whatever ends a run, an engine root of a run that is not warm is
empty.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

from initwarm import errors, policy, report
from initwarm.edges import bounded, entry, gpus, processes
from initwarm.edges.console import Console
from initwarm.edges.engine_root import EngineRoot
from initwarm.edges.plans import load_plan
from initwarm.edges.reading import read_key
from initwarm.edges.volume import CacheVolume
from initwarm.errors import InitwarmError, Stopped, UnavailableError, VolumeError
from initwarm.planview import plan_warnings
from initwarm.report import Failure, Outcome
from initwarm.settings import Settings
from initwarm.topology import resolve

#: How long the coordinator may take to say goodbye to the group after SIGTERM, before everything is killed.
FAREWELL_SECONDS = 1.5
KILL_SECONDS = 2.0
TERMINATION_LOG = "/dev/termination-log"


def run(settings: Settings, environ: Mapping[str, str], console: Console) -> int:
    """Carry out `initwarm run` on this pod and return its exit code (design section 10)."""
    return Agent(settings, environ, console).run()


def refuse(problem: InitwarmError, engine_root: str | None, termination_message: str | None, console: Console) -> int:
    """End a run whose settings cannot be read, where a person and a machine look for it."""
    if engine_root is not None:
        with contextlib.suppress(VolumeError):
            EngineRoot(Path(engine_root)).empty()
    outcome = Outcome(report.FAILED, str(problem), problem.exit_code)
    write_termination_message(termination_message, outcome, console)
    console.event("initwarm.run.finished", message=outcome.reason, **_without_reason(outcome))
    return problem.exit_code


class Agent:
    """One run on one pod."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], console: Console) -> None:
        self.settings = settings
        self.environ = environ
        self.console = console
        self.started = time.monotonic()
        self.pod = environ.get("INITWARM_POD_NAME") or os.uname().nodename
        self.engine_root: EngineRoot | None = None
        self.scratch: str | None = None
        self.heard: Outcome | None = None
        self.num_nodes = 1
        self.stopping = False
        self.wake_read, self.wake_write = os.pipe()
        for descriptor in (self.wake_read, self.wake_write):
            os.set_blocking(descriptor, False)

    def run(self) -> int:
        """Install the handlers first: everything after this line may be interrupted."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        outcome = self._outcome()
        return self._finish(outcome)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.stopping = True

    def _outcome(self) -> Outcome:
        try:
            if self.settings.is_disabled:
                return self._disabled()
            # Off the main thread: a volume that hangs must keep neither a signal nor the deadline waiting.
            spec = bounded.carry_out(self._prepare, self._check_time)
            processes.be_subreaper(True)
            return self._supervise(spec)
        except InitwarmError as problem:
            return self._failed(problem)
        except Exception as problem:  # noqa: BLE001  a bug must still leave a message, an exit code and no process
            self.console.traceback()
            return self._failed(InitwarmError(f"initwarm failed: {type(problem).__name__}: {problem}"))

    def _disabled(self) -> Outcome:
        self._empty_engine_root()
        return Outcome(report.COLD, "INITWARM_DISABLE is set: the engine root was emptied and nothing was tuned")

    def _failed(self, problem: InitwarmError) -> Outcome:
        """What this pod alone can say: it did not get as far as the group, or lost it."""
        # A pod that starts cold alone would leave its peers to wait for it: softening is the group's to decide.
        settings = self.settings
        is_alone = self.num_nodes == 1
        outcome, exit_code = policy.judge(
            problem,
            settings.on_tuning_failure if is_alone else "fail",
            settings.on_barrier_failure if is_alone else "fail",
        )
        return Outcome(
            outcome=outcome,
            reason=str(problem),
            exit_code=exit_code,
            first_failure=None if isinstance(problem, Stopped) else Failure(None, self.pod, str(problem)),
        )

    def _empty_engine_root(self) -> None:
        """Take away what the last life left, before anything else can end this one."""
        path = self.settings.engine_root
        if path is None:
            path = self.settings.engine_root_at(resolve(self.environ, self.settings.topology))
        self.engine_root = EngineRoot(Path(path))
        self.engine_root.empty()

    def _prepare(self) -> entry.RunSpec:
        """Everything that can be refused before torch is imported, cheapest first."""
        try:
            unclean = None
            self._empty_engine_root()
        except VolumeError as problem:
            unclean = problem
        topology = resolve(self.environ, self.settings.topology)
        self.num_nodes = topology.num_nodes
        plan = load_plan(self.settings.plan)
        for warning in plan_warnings(plan):
            self.console.event("initwarm.plan.uncovered", message=warning)
        self.console.event(
            "initwarm.topology.resolved",
            message=f"node rank {topology.node_rank} of {topology.num_nodes} in group {topology.group}",
            source=topology.source,
        )
        key = read_key(self.settings.cache_key_file)
        obstacle, failure = self._check_volume_and_gpus(plan.device, key)
        if (failure := unclean or failure) is not None and topology.num_nodes == 1:
            raise failure
        self.scratch = _scratch()
        return entry.RunSpec(
            settings=self.settings,
            plan=plan,
            topology=topology,
            uid=f"{self.environ.get('INITWARM_POD_UID') or self.pod}:{uuid.uuid4().hex[:12]}",
            pod=self.pod,
            pod_uid=self.environ.get("INITWARM_POD_UID") or None,
            engine_root=self.settings.engine_root_at(topology),
            scratch=self.scratch,
            deadline=self.started + self.settings.deadline_seconds,
            start_method="spawn" if self.settings.start_method == "spawn" else "forkserver",
            key=key,
            obstacle=obstacle,
            failure=failure,
        )

    def _check_volume_and_gpus(self, device: str, key: bytes | None) -> tuple[VolumeError | None, InitwarmError | None]:
        """Why the volume can only be read, and why this pod cannot take part, if so."""
        volume = CacheVolume(Path(self.settings.cache_root), key)
        try:
            volume.prepare()
        except VolumeError as problem:
            return None, problem
        if volume.obstacle is not None:
            self.console.event("initwarm.cache.read_only", message=str(volume.obstacle))
        survey = gpus.visible_gpus(self.environ)
        self._set_child_environment(device, survey)
        if device == "cuda" and survey.count == 0:
            return volume.obstacle, UnavailableError(
                "The plan needs a GPU and this container sees none.",
                f"{survey.problem} Nothing was tuned; a CPU is never used instead.",
                "Give the init container the same nvidia.com/gpu limit (or resource claim) as the serving container.",
            )
        if device == "cuda" and survey.problem is not None:
            # torch is asked later; a default would be a guess.
            self.console.event("initwarm.gpu.unclear", message=survey.problem)
        return volume.obstacle, None

    def _set_child_environment(self, device: str, survey: gpus.GpuSurvey) -> None:
        """FlashInfer initialises CUDA while it is imported unless it is told the architectures (0.7.2.post1, 0.7.4)."""
        self.restore = dict(os.environ)
        architectures = gpus.arch_list(survey.capabilities)
        if device == "cuda" and architectures and not os.environ.get("FLASHINFER_CUDA_ARCH_LIST"):
            os.environ["FLASHINFER_CUDA_ARCH_LIST"] = architectures
        # torch.distributed.elastic would otherwise print a warning of its own for each worker it starts.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    def _supervise(self, spec: entry.RunSpec) -> Outcome:
        """Start the coordinator and follow it until it has an outcome, the deadline passes or a signal arrives."""
        context: Any = multiprocessing.get_context(spec.start_method)
        ours, theirs = context.Pipe()
        process = context.Process(target=entry.coordinate, args=(spec, theirs), name="initwarm-coordinator")
        self.console.capture_output()
        if spec.start_method == "forkserver":
            forkserver.set_forkserver_preload(list(entry.PRELOADED))
            forkserver.ensure_running()
            processes.use_running_fork_server()
        # Off the main thread: starting waits until the fork server has imported torch, and a signal must not wait.
        starter = threading.Thread(target=_start, args=(process, theirs, self.wake_write), daemon=True)
        starter.start()
        try:
            outcome = self._follow(process, starter, ours, spec)
        finally:
            left = processes.end_descendants(starter, KILL_SECONDS)
            self.console.release_output()
        if left:
            self.console.event("initwarm.process.stuck", message="could not be killed", pids=left)
        return outcome

    def _follow(self, process: Any, starter: threading.Thread, conn: Any, spec: entry.RunSpec) -> Outcome:
        """Listen until the coordinator has ended; what it has said of the outcome before holds whatever comes then."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake_read, selectors.EVENT_READ)
            selector.register(self.console.captured, selectors.EVENT_READ)
            selector.register(conn, selectors.EVENT_READ)
            while True:
                if self.stopping or time.monotonic() >= spec.deadline:
                    return self.heard or self._cut_short(process, conn)
                ready = {key.fileobj for key, _ in selector.select(min(1.0, spec.deadline - time.monotonic()))}
                if self.wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_read, 4096)
                if self.console.captured in ready:
                    self.console.forward_output()
                if conn in ready and not self._hear(conn):
                    selector.unregister(conn)
                    conn.close()
                if not starter.is_alive() and not _is_alive(process):
                    return self._last_word(process, conn)

    def _hear(self, conn: Any) -> bool:
        """Take one message of the coordinator: an event, progress, the outcome; False if there will be no more."""
        try:
            message = conn.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, Outcome):
            self.heard = message
        elif isinstance(message, InitwarmError):
            raise message
        elif message[0] == "progress":
            self.console.progress(**message[1])
        else:
            self.console.event(message[0], **message[1])
        return True

    def _last_word(self, process: Any, conn: Any) -> Outcome:
        """What an ended coordinator has said of the outcome, or that it was lost."""
        while not conn.closed and conn.poll(0) and self._hear(conn):
            pass
        if self.heard is not None:
            return self.heard
        self.console.forward_output()
        raise UnavailableError(
            f"The process that imports torch and FlashInfer ended with {_describe_exit(process)}"
            f"{self.console.last_output()}.",
            "Nothing was tuned.",
            "Try `python3 -c 'import torch, flashinfer'` in this image, and look at the container's memory limit.",
        )

    def _cut_short(self, process: Any, conn: Any) -> NoReturn:
        """The deadline or a signal came first; of a signal the coordinator tells its peers, briefly."""
        if self.stopping and _is_alive(process):
            with contextlib.suppress(OSError, AttributeError):
                os.kill(process.pid, signal.SIGTERM)
            end = time.monotonic() + FAREWELL_SECONDS
            while _is_alive(process) and time.monotonic() < end:
                if not conn.closed and conn.poll(0.02) and not self._hear(conn):
                    break
        self._check_time()
        raise AssertionError("neither a signal nor the deadline")

    def _check_time(self) -> None:
        """Raise if a signal or the deadline ends the run."""
        if self.stopping:
            raise Stopped("SIGTERM arrived before the run had ended.", "No engine file is visible.")
        if time.monotonic() >= self.started + self.settings.deadline_seconds:
            raise errors.BarrierError(
                f"The deadline of {self.settings.deadline_seconds:g} s passed and the run had not ended.",
                "No engine file is visible.",
                "Raise --deadline; finished bundles stay in the cache.",
            )

    def _finish(self, outcome: Outcome) -> int:
        """Leave the engine root true to the outcome, say it everywhere, and hand over."""
        if outcome.outcome != report.WARM and self.engine_root is not None:
            try:
                self.engine_root.empty()
            except VolumeError as problem:
                self.console.event("initwarm.engine_root.not_emptied", message=str(problem))
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
        outcome = _timed(outcome, time.monotonic() - self.started)
        self.console.close_progress()
        write_termination_message(self.settings.termination_message, outcome, self.console)
        self._write_report(outcome)
        self.console.event("initwarm.run.finished", message=outcome.reason, **_without_reason(outcome))
        if outcome.exit_code == errors.OK and self.settings.command:
            return self._hand_over()
        return outcome.exit_code

    def _write_report(self, outcome: Outcome) -> None:
        if self.settings.report is None:
            return
        try:
            text = json.dumps({"schema": 1, **outcome.fields(), "exit_code": outcome.exit_code}, indent=2)
            Path(self.settings.report).write_text(text + "\n")
        except OSError as problem:
            self.console.event(
                "initwarm.report.failed", message=f"{self.settings.report} cannot be written: {problem.strerror}"
            )

    def _hand_over(self) -> int:
        """Become the command, with the environment and the signal handlers that this process was started with."""
        signal.set_wakeup_fd(-1)
        # Python ignores the last two, and what is ignored stays so in the command.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        processes.be_subreaper(False)
        if self.stopping:
            return errors.STOPPED
        command = list(self.settings.command)
        sys.stdout.flush()
        try:
            os.execvpe(command[0], command, getattr(self, "restore", dict(os.environ)))  # noqa: S606
        except OSError as problem:
            self.console.event("initwarm.command.failed", message=f"{command[0]} cannot be run: {problem.strerror}")
            return errors.CONFIGURATION


def write_termination_message(path: str | None, outcome: Outcome, console: Console) -> None:
    """Write the outcome in one write, in place: the file is a bind mount, which cannot be renamed over."""
    if path is None:
        if not os.access(TERMINATION_LOG, os.W_OK):
            return
        path = TERMINATION_LOG
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(report.termination_message(outcome))
    except OSError as problem:
        console.event("initwarm.termination_message.failed", message=f"{path} cannot be written: {problem.strerror}")


def _start(process: Any, theirs: Any, wake: int) -> None:
    with contextlib.suppress(OSError, EOFError):
        process.start()
    theirs.close()
    with contextlib.suppress(OSError):
        os.write(wake, b"\0")


def _is_alive(process: Any) -> bool:
    with contextlib.suppress(ValueError, AssertionError):
        return bool(process.is_alive())
    return False


def _describe_exit(process: Any) -> str:
    try:
        code = process.exitcode
    except (ValueError, AssertionError):
        code = None
    if code is None:
        return "no exit status"
    if code < 0:
        name = signal.Signals(-code).name
        return f"{name} (out of memory?)" if name == "SIGKILL" else name
    return f"exit status {code}"


def _timed(outcome: Outcome, seconds: float) -> Outcome:
    return Outcome(**{**outcome.__dict__, "seconds": seconds})


def _without_reason(outcome: Outcome) -> dict[str, Any]:
    return {key: value for key, value in outcome.fields().items() if key != "reason"}


def _scratch() -> str:
    """A directory of this run; an image with a read-only root may have no /tmp."""
    for directory in (None, "/dev/shm"):  # noqa: S108
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix="initwarm-", dir=directory)
    raise VolumeError("No temporary directory is writable.", "Nothing was started.", "Mount an emptyDir at /tmp.")
