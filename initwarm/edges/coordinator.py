"""The coordinator process: takes this pod through the round, as the leader or as a follower.

The leader announces one step at a time, carries out its own share like every other pod, collects the answers and
decides what follows. Whatever happens, all pods hear one end with one first cause.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from initwarm import __version__, policy, report
from initwarm.edges import jobs, network, processes
from initwarm.edges.barrier import GroupSpec
from initwarm.edges.leader import Leader
from initwarm.edges.member import GroupEnded, Member, as_error
from initwarm.edges.pod import Pod, error_of
from initwarm.edges.tuning import TuneResult
from initwarm.edges.worker import Order  # noqa: F401  pickled by workers of this process
from initwarm.errors import BarrierError, InitwarmError, Stopped, TuningTimeout
from initwarm.protocol import Answer, Hello, Holding, Step
from initwarm.report import Failure, Outcome

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from initwarm.edges.entry import RunSpec

POLL_SECONDS = 0.03
GROUP_CHECK_SECONDS = 0.5
WAIT_NOTICE_SECONDS = 10.0
#: What is left of the deadline when joining must have ended, and when tuning must have.
JOIN_SHARE = 0.5
PROOF_SHARE = 0.2
PROOF_SECONDS = 60.0
#: The agent kills everything at the deadline; the group is told before.
MARGIN_SECONDS = 2.0
GOODBYE_SECONDS = 10.0


def main(spec: RunSpec, conn: Connection, inherited: tuple[str, ...]) -> None:
    """Run this pod's round and send its outcome to the agent."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    jobs.quiet_elastic()
    if spec.start_method == "forkserver":
        processes.use_running_fork_server()

    def say(name: str, **fields: Any) -> None:
        conn.send((name, fields))

    say("initwarm.coordinator.started", message="torch and FlashInfer are imported", inherited=list(inherited))
    conn.send(Coordinator(spec, say, lambda: bool(stopping)).run())


class Coordinator:
    """One pod's part of one round."""

    def __init__(self, spec: RunSpec, say: Callable[..., None], is_stopping: Callable[[], bool]) -> None:
        self.spec = spec
        self.say = say
        self.is_stopping = is_stopping
        self.member = Member(spec, say)
        self.pod = Pod(spec, say, self.pump)
        self.pod.note = self.member.note
        self.phase_end = spec.deadline
        self.phase_error: InitwarmError = BarrierError("The deadline passed.")
        self.waiting_for: tuple[int, ...] = ()
        self.waiting_since = time.monotonic()
        self.offsets: tuple[int, ...] = ()
        self.hold_group = False
        self._last_check = 0.0
        self._last_notice = time.monotonic()
        self._served: set[str] = set()

    def run(self) -> Outcome:
        """Take the pod through the round; never raises."""
        try:
            end = self._round()
        except GroupEnded as ended:
            end = dict(ended.data)
        except InitwarmError as problem:
            end = self._end_of(problem)
        except Exception as problem:  # noqa: BLE001  a bug must reach the termination message
            trace = traceback.format_exc()
            self.say("initwarm.bug", message=trace)
            end = self._end_of(InitwarmError(f"initwarm failed: {type(problem).__name__}: {problem}\n{trace}"))
        self._close(end)
        return self._outcome(end)

    def _round(self) -> dict[str, Any]:
        self.pod.probe()
        self._join()
        self.say("initwarm.group.joined", message=f"joined epoch {self.member.epoch}", epoch=self.member.epoch)
        self.pod.environment = self._collective_environment()
        hello = self._hello()
        self.member.say_hello(hello)
        if self.member.is_leader:
            return Leader(self).lead()
        return self._follow()

    def _join(self) -> None:
        """Open the channel, or look for the leader until joining has taken its share of the deadline."""
        if self.member.is_leader:
            self.member.open()
            return
        where = f"{self.member.host}:{self.member.port}"
        self.begin_phase(
            self.join_seconds(),
            BarrierError(
                f"No leader (node rank 0) answered at {where} within {self.join_seconds():.0f} s.",
                "This pod joined no group.",
                "Check that the leader pod runs, that its name resolves (publishNotReadyAddresses) and that the port "
                "is reachable (NetworkPolicy).",
            ),
        )
        self.wait_for(lambda: self.member.look_for_leader() or None, pause=0.2, what=(0,))
        self.hold_group = True

    def _collective_environment(self) -> Mapping[str, str]:
        """Over which interface the workers meet: the one towards the leader, since gloo would ask for the host's name."""
        address = self.spec.topology.leader_address if self.spec.topology.num_nodes > 1 else None
        return network.collective_environment(os.environ, address or "127.0.0.1", self.spec.settings.interface)

    def join_seconds(self) -> float:
        """How long a pod may be missing."""
        return self.spec.settings.deadline_seconds * JOIN_SHARE

    def _hello(self) -> Hello:
        self.pod.look_up(self.spec.topology.num_nodes * len(self.pod.probed.identity))
        held = self.pod.held
        return Hello(
            node_rank=self.spec.topology.node_rank,
            uid=self.spec.uid,
            pod=self.spec.pod,
            epoch=self.member.epoch,
            tool_version=__version__,
            plan=self.spec.plan.digest,
            settings=self.spec.settings.shared(),
            source=self.spec.topology.source,
            identity=self.pod.probed.identity,
            features=self.pod.probed.features,
            devices=self.pod.probed.devices,
            holding=None if held is None else Holding(held.digest, held.generation),
        )

    def _follow(self) -> dict[str, Any]:
        """Carry out the leader's steps until it announces the end."""
        number = 0
        while True:
            self.begin_phase(
                self.spec.deadline - time.monotonic() - MARGIN_SECONDS,
                BarrierError("The deadline passed and the leader had not announced the end.", "Nothing is warm."),
            )
            step = self.wait_for(lambda number=number: self.member.step(number), what=(0,))  # type: ignore[misc]
            self.member.answer(number, self.carry_out(step))
            number += 1

    def carry_out(self, step: Step) -> Answer:
        """This pod's share of a step; an error becomes the answer, so that the leader hears it."""
        node_rank = self.spec.topology.node_rank
        self.member.note(step.kind)
        try:
            data = getattr(self, f"_do_{step.kind}")(step)
        except (Stopped, GroupEnded):
            raise
        except InitwarmError as problem:
            return Answer(node_rank, error=as_error(problem, self.spec.pod))
        return Answer(node_rank, data)

    def _do_tune(self, step: Step) -> dict[str, Any]:
        data = step.data
        self.pod.first_rank = data["offsets"][self.spec.topology.node_rank]
        self.begin_phase(self.tune_seconds(), TuningTimeout("Tuning did not end before the deadline."))
        ends = self.pod.tune(data, lambda rank: self._lockstep_group(data, rank))
        answers: dict[str, Any] = {}
        for rank, end in ends.items():
            if isinstance(end.result, TuneResult) and end.error is None:
                answers[str(rank)] = self._tuned(end.result)
            elif end.kind is None and end.last_note is not None and end.last_note[1].tactic is not None:
                return {"lost": {"rank": rank, "tactic": vars(end.last_note[1].tactic), "what": end.error}}
        failed = [(rank, end) for rank, end in ends.items() if end.error is not None]
        if failed:
            # A rank that only lost its peers says less than the one that they lost.
            rank, end = min(failed, key=lambda one: (one[1].kind == "BarrierError", one[1].error == "stopped", one[0]))
            raise error_of(end, rank, self.spec.pod)
        return {"ranks": answers}

    def tune_seconds(self) -> float:
        """How long tuning may take, so that proof and barrier still fit before the deadline."""
        rest = self.spec.deadline - time.monotonic() - MARGIN_SECONDS
        return rest - min(PROOF_SECONDS, rest * PROOF_SHARE)

    def _tuned(self, result: TuneResult) -> dict[str, Any]:
        """What the leader needs of one rank's result; the bytes go under their digest."""
        return {
            "v1": self.member.channel.send_blob(result.v1),
            "store": None if result.store is None else self.member.channel.send_blob(result.store),
            "tuned": result.tuned,
            "failed": list(result.failed),
            "degraded": list(result.degraded),
            "rejected": [vars(tactic) for tactic in result.rejected],
        }

    def _lockstep_group(self, data: Mapping[str, Any], rank: int) -> GroupSpec | None:
        if data["strategy"] != "lockstep":
            return None
        stage = next(ranks for ranks in data["stages"] if rank in ranks)
        return self._group(f"tune/{data['round']}/{data['attempt']}/{stage[0]}", "gloo", stage.index(rank), len(stage))

    def _group(self, name: str, backend: str, rank: int, size: int) -> GroupSpec:
        return GroupSpec(
            host=self.member.host,
            port=self.member.port,
            prefix=f"{self.member.epoch}/group/{name}",
            backend=backend,
            rank=rank,
            size=size,
            timeout_seconds=self.spec.settings.collective_timeout_seconds,
        )

    def _do_adopt(self, step: Step) -> dict[str, Any]:
        """Have the bundle's bytes, from the volume or from the pod that holds them, and fill the engine root."""
        data = step.data
        self.pod.first_rank = data["offsets"][self.spec.topology.node_rank]
        self.begin_phase(self.tune_seconds(), TuningTimeout("The bundle did not arrive before the deadline."))
        if self.pod.find(data["digest"], data["generation"]) is None:
            self._fetch(data["digest"], data["holder"])
        self.pod.fill()
        return {}

    def _fetch(self, digest: str, holder: int) -> None:
        from initwarm.bundle import parse_bundle

        self.say("initwarm.bundle.fetching", message=f"bundle {digest[:12]} comes from node rank {holder}")
        self.member.channel.write(f"want/{digest}", "1")
        listing = json.loads(self.wait_for(lambda: self.member.channel.read(f"files/{digest}"), what=(holder,)))
        blobs = {
            name: self.wait_for(lambda sha=sha: self.member.channel.receive_blob(sha), what=(holder,))  # type: ignore[misc]
            for name, sha in listing.items()
        }
        record = parse_bundle(blobs.pop("bundle.json"))
        self.pod.keep(record, blobs)

    def _serve(self) -> None:
        """Send the bundle that this pod holds to those who asked for it."""
        held = self.pod.held
        if held is None or held.digest in self._served:
            return
        if self.member.channel.read(f"want/{held.digest}") is None:
            return
        from initwarm.bundle import encode_bundle

        files = {"bundle.json": encode_bundle(held.bundle), **held.files}
        listing = {name: self.member.channel.send_blob(data) for name, data in files.items()}
        self.member.channel.write(f"files/{held.digest}", json.dumps(listing))
        self._served.add(held.digest)

    def _do_discard(self, step: Step) -> dict[str, Any]:
        self.pod.discard(step.data["digest"], step.data["reason"])
        return {}

    def _do_prove(self, _step: Step) -> dict[str, Any]:
        self.begin_phase(
            self.spec.deadline - time.monotonic() - MARGIN_SECONDS,
            TuningTimeout("The replay did not end before the deadline."),
        )
        return {"problems": self.pod.prove()}

    def _do_barrier(self, step: Step) -> dict[str, Any]:
        # The collective has a timeout of its own; the bound beyond it is for a worker that does not keep it.
        bound = 2 * self.spec.settings.collective_timeout_seconds
        self.begin_phase(bound, BarrierError("A rank did not come back from the barrier."))
        data = step.data
        self.pod.meet(lambda rank: self._group(f"barrier/{step.number}", data["backend"], rank, data["size"]))
        return {}

    def begin_phase(self, seconds: float, error: InitwarmError) -> None:
        """Bound what follows, within the deadline; the error is raised when the bound ends."""
        self.phase_end = min(time.monotonic() + seconds, self.spec.deadline - MARGIN_SECONDS)
        self.phase_error = error

    def wait_for(self, look: Callable[[], Any], what: tuple[int, ...], pause: float = POLL_SECONDS) -> Any:
        """Look until there is something, keeping the group in sight; says what it waits for every 10 s."""
        self.waiting_for, self.waiting_since = what, time.monotonic()
        try:
            while True:
                found = look()
                if found is not None:
                    return found
                self.pump()
                time.sleep(pause)
        finally:
            self.waiting_for = ()

    def pump(self) -> None:
        """Notice SIGTERM, the end of the phase, who is gone, and who wants bytes."""
        now = time.monotonic()
        if self.is_stopping():
            raise Stopped("SIGTERM arrived before the run had ended.", "No engine file is visible.")
        if self.member.is_joined and now - self._last_check > GROUP_CHECK_SECONDS:
            self._last_check = now
            self.member.check_group()
            self._serve()
        if now >= self.phase_end:
            raise self.phase_error
        if now - self._last_notice > WAIT_NOTICE_SECONDS:
            self._last_notice = now
            self._notice(now)

    def _notice(self, now: float) -> None:
        names = [self.member.watch.describe(one) for one in self.waiting_for if one != self.spec.topology.node_rank]
        if names:
            seconds = round(now - self.waiting_since)
            self.say("initwarm.wait.continued", message=f"waiting for {'; '.join(names)}", waited_seconds=seconds)

    def _end_of(self, problem: InitwarmError) -> dict[str, Any]:
        """The end that this pod announces (leader), or reports when it lost the group (follower)."""
        settings = self.spec.settings
        outcome, exit_code = policy.judge(problem, settings.on_tuning_failure, settings.on_barrier_failure)
        is_stopped = isinstance(problem, Stopped)
        failure = (
            None if is_stopped else {"rank": problem.rank, "pod": problem.pod or self.spec.pod, "what": str(problem)}
        )
        end = {
            "outcome": outcome,
            "exit_code": exit_code,
            "reason": str(problem).splitlines()[0],
            "first_failure": failure,
            "strategy": None,
            "bundle": None,
        }
        self._tell(problem, end)
        return end

    def _tell(self, problem: InitwarmError, end: dict[str, Any]) -> None:
        """Let the others know, as far as the channel still works."""
        if not self.member.is_joined:
            return
        try:
            if not self.member.is_leader:
                self.member.leave(problem)
                if not isinstance(problem, Stopped):
                    # The leader's end is everybody's: the same first cause on all pods.
                    end.update(self._hear_end() or {})
                return
            if isinstance(problem, Stopped):
                lost = BarrierError(
                    f"The leader (pod {self.spec.pod}) was stopped.", "The group cannot go on without it."
                )
                kind, code = policy.judge(lost, "fail", self.spec.settings.on_barrier_failure)
                failure = {"rank": None, "pod": self.spec.pod, "what": str(lost)}
                end = {**end, "outcome": kind, "exit_code": code, "reason": str(lost), "first_failure": failure}
            self.member.announce_end(end)
        except InitwarmError:
            return

    def _hear_end(self) -> Mapping[str, Any] | None:
        limit = time.monotonic() + 2 * GROUP_CHECK_SECONDS + 2
        while time.monotonic() < min(limit, self.spec.deadline):
            text = self.member.channel.read("end")
            if text is not None:
                return dict(json.loads(text))
            time.sleep(POLL_SECONDS)
        return None

    def _close(self, end: Mapping[str, Any]) -> None:
        """End the workers, and keep the store open until every living pod has heard the end."""
        self.pod.close()
        if not self.member.is_joined:
            return
        try:
            if not self.member.is_leader:
                self.member.leave(None)
                return
            patience = 1.0 if end["outcome"] == report.STOPPED else GOODBYE_SECONDS
            limit = time.monotonic() + patience
            others = range(1, self.spec.topology.num_nodes)
            while time.monotonic() < limit:
                present = [one for one in others if self.member.channel.read(f"place/{one}") is not None]
                if all(self.member.has_left(one) for one in present):
                    break
                time.sleep(POLL_SECONDS)
        except InitwarmError:
            return
        finally:
            self.member.close()

    def _outcome(self, end: Mapping[str, Any]) -> Outcome:
        is_warm = end["outcome"] == report.WARM
        failure = end["first_failure"]
        probed = self.pod._probe  # noqa: SLF001
        return Outcome(
            outcome=end["outcome"],
            reason=end["reason"],
            exit_code=end["exit_code"],
            first_failure=None if failure is None else Failure(**failure),
            ranks=self.pod.ranks if probed is not None else (),
            world_size=end.get("world_size"),
            strategy=end["strategy"],
            tuned=self.pod.tuned,
            replayed=self.pod.replayed,
            missed=self.pod.missed,
            bundle=end["bundle"] if is_warm else None,
            identity=self.pod.identity.digest if probed is not None and probed.identity else None,
            epoch=self.member.epoch or None,
        )
