"""What the pods of a group tell each other before any collective, and what follows from it. Pure.

Each pod says one hello for all its ranks. The leader computes one verdict from all of them and announces steps; every
pod carries a step out and answers. Nobody decides alone to skip or to go on, because a step that only some ranks take
is how servers hang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from initwarm.errors import ConfigurationError, InitwarmError, error_named

SCHEMA = 1
HELLO_BYTES = 1 << 20


@dataclass(frozen=True)
class Holding:
    """A verified, complete bundle that a pod has on its volume, and which groups it serves."""

    digest: str
    generation: int
    world_size: int
    rank_free: bool


@dataclass(frozen=True)
class Hello:
    """What a pod states about itself and its ranks.

    Args:
        node_rank: the pod's place in the group.
        uid: names the process, so that two claims to one place can be told apart.
        pod: the pod's name, for people.
        epoch: the incarnation that the pod believes it has joined.
        tool_version: of initwarm; pods of two versions do not follow one protocol.
        plan: digest of the plan.
        settings: the settings that must be equal on all ranks.
        source: the topology source that gave the rank.
        identity: FlashInfer's own metadata of each local rank's environment, in local rank order.
        features: what FlashInfer offers here, by name.
        devices: name of each local rank's device, such as a GPU's UUID, or "cpu".
        seconds_left: until this pod's deadline.
        holding: the bundle for this plan and identity on this pod's volume, or None.
    """

    node_rank: int
    uid: str
    pod: str
    epoch: str
    tool_version: str
    plan: str
    settings: Mapping[str, Any]
    source: str
    identity: tuple[Mapping[str, str], ...]
    features: Mapping[str, Any]
    devices: tuple[str, ...]
    seconds_left: float
    holding: Holding | None = None

    @property
    def nproc(self) -> int:
        """How many ranks the pod contributes."""
        return len(self.identity)


def encode_hello(hello: Hello) -> str:
    """A hello as JSON, with the version of its schema."""
    return json.dumps({"schema": SCHEMA, **asdict(hello)}, sort_keys=True)


def parse_hello(text: str) -> Hello:
    """Read a hello that another pod wrote.

    Raises:
        ConfigurationError: it is not a hello of this schema; another version of the tool wrote it.
    """
    try:
        data = json.loads(text)
        if data.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        known = {name.name for name in fields(Hello)}
        values = {key: value for key, value in data.items() if key in known}
        values["holding"] = Holding(**values["holding"]) if values["holding"] else None
        values["identity"] = tuple(dict(one) for one in values["identity"])
        values["devices"] = tuple(str(one) for one in values["devices"])
        return Hello(**values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise ConfigurationError(
            f"A peer said a hello that this version cannot read: {text[:200]!r}.",
            "The group did not start.",
            "Use one version of initwarm on all pods of the group.",
        ) from problem


@dataclass(frozen=True)
class Adopt:
    """All ranks take these bytes; some pod already has them."""

    digest: str
    generation: int
    holder: int


@dataclass(frozen=True)
class Tune:
    """Nobody holds a bundle: every rank starts cold."""


@dataclass(frozen=True)
class Conflict:
    """The pods contradict each other; the text names the pods and both values."""

    fact: str
    fix: str


Verdict = Adopt | Tune | Conflict


def verdict(hellos: Sequence[Hello]) -> Verdict:
    """What the group does, from the hellos of all its pods in node rank order.

    The newest generation wins, ties go to the greater digest, so that every order of hellos gives one answer.
    """
    conflict = _conflict(hellos)
    if conflict is not None:
        return conflict
    world_size = sum(hello.nproc for hello in hellos)
    holders = [
        hello
        for hello in hellos
        if hello.holding is not None and (hello.holding.rank_free or hello.holding.world_size == world_size)
    ]
    if not holders:
        return Tune()
    best = max((_holding(hello) for hello in holders), key=lambda held: (held.generation, held.digest))
    holder = min(hello.node_rank for hello in holders if _holding(hello) == best)
    return Adopt(best.digest, best.generation, holder)


def _holding(hello: Hello) -> Holding:
    assert hello.holding is not None
    return hello.holding


def _conflict(hellos: Sequence[Hello]) -> Conflict | None:
    first = hellos[0]
    for other in hellos[1:]:
        if other.tool_version != first.tool_version:
            return _differ(
                "initwarm", first, first.tool_version, other, other.tool_version, "Use one version on all pods."
            )
        if other.plan != first.plan:
            return _differ("plan", first, first.plan[:12], other, other.plan[:12], "Give every pod the same plan.")
        for key in sorted(first.settings.keys() | other.settings.keys()):
            ours, theirs = first.settings.get(key), other.settings.get(key)
            if ours != theirs:
                return _differ(key, first, ours, other, theirs, "Give every pod the same setting.")
    return _identity_conflict(hellos)


def _identity_conflict(hellos: Sequence[Hello]) -> Conflict | None:
    first = hellos[0].identity[0] if hellos[0].identity else None
    owner = hellos[0]
    for hello in hellos:
        for identity in hello.identity:
            if first is None:
                first, owner = identity, hello
            for key in sorted(first.keys() | identity.keys()):
                if first.get(key) != identity.get(key):
                    fix = "Run every pod of the group from one image and on one GPU product."
                    return _differ(key, owner, first.get(key), hello, identity.get(key), fix)
    return None


def _differ(what: str, one: Hello, ours: Any, other: Hello, theirs: Any, fix: str) -> Conflict:
    return Conflict(f"The pods disagree on {what}: {_who(one)} has {ours!r} and {_who(other)} has {theirs!r}.", fix)


def _who(hello: Hello) -> str:
    return f"node rank {hello.node_rank} (pod {hello.pod})"


@dataclass(frozen=True)
class Step:
    """An order of the leader to all pods.

    Args:
        number: steps are counted from 0; each is announced once.
        kind: `tune`, `adopt`, `prove`, `barrier` or `end`.
        data: what the kind needs, JSON only.
    """

    number: int
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A pod's answer to a step.

    Args:
        node_rank: who answers.
        data: what the kind of step asks for.
        error: why the pod could not, as `{kind, what, rank, pod}`, or None.
    """

    node_rank: int
    data: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None


def encode(record: Step | Answer) -> str:
    """A step or an answer as JSON."""
    return json.dumps(asdict(record), sort_keys=True)


def parse_step(text: str) -> Step:
    """Read a step of this epoch's leader, which runs the same version of the protocol."""
    return Step(**json.loads(text))


def parse_answer(text: str) -> Answer:
    """Read an answer of this epoch's pod."""
    return Answer(**json.loads(text))


def first_error(answers: Sequence[Answer]) -> Mapping[str, Any] | None:
    """The error that everybody reports, so that all pods name the same: the earliest, from answers in order of arrival.

    A rank that is known to be lost explains the others, however late that is known; one that only lost its peers says
    least.
    """
    errors = [answer.error for answer in answers if answer.error is not None]
    order = {"LostRankError": 0, "BarrierError": 2}
    return min(errors, key=lambda error: order.get(error["kind"], 1), default=None)


def as_error(problem: InitwarmError, pod: str) -> dict[str, Any]:
    """An error as JSON for the other pods."""
    return {"kind": type(problem).__name__, "what": str(problem), "rank": problem.rank, "pod": problem.pod or pod}


def from_error(error: Mapping[str, Any]) -> InitwarmError:
    """The error that another pod reported."""
    return error_named(error["kind"], error["what"]).at(error["rank"], error["pod"])
