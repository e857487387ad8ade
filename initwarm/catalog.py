"""What `inspect` and `verify` tell about a cache root: summaries of what was read, and their text and JSON."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from initwarm.bundle import Place
from initwarm.entries import V1File, op_of
from initwarm.jsontext import printable
from initwarm.verification import Examined

#: Relative distance to the runner-up that measurements of other ranks exceed by noise alone.
NEAR_TIE = 0.035
#: How many of the closest near ties are listed for a bundle; the rest is counted.
LISTED_TIES = 10
#: How many of the most frequent tactics the text lists for an op; JSON has all.
LISTED_TACTICS = 5


@dataclass(frozen=True)
class NearTie:
    """A winner whose lead is within noise, so that measuring again may choose another.

    Args:
        key: of the entry.
        runner: that won.
        tactic: that won, as JSON.
        margin: runner-up's time over the winner's, minus 1.
        time_ms: of the winner, in milliseconds, or None where FlashInfer does not say.
        runner_up_ms: of the fastest other candidate.
        candidates: how many were measured.
    """

    key: str
    runner: str
    tactic: Any
    margin: float
    time_ms: Any
    runner_up_ms: Any
    candidates: Any


@dataclass(frozen=True)
class OpSummary:
    """The entries of one op.

    Args:
        op: FlashInfer's name of it.
        entries: how many.
        tactics: how many entries each runner and tactic won, the most frequent first.
        margins: how many entries say by how much they won.
        smallest_margin: of these, or None.
        near_ties: how many of these won by less than noise.
    """

    op: str
    entries: int
    tactics: Mapping[str, int]
    margins: int
    smallest_margin: float | None
    near_ties: int


@dataclass(frozen=True)
class BundleSummary:
    """A bundle, or what lies in the place of one. Fields that cannot be read are None."""

    generation: int
    digest: str
    plan: str
    strategy: str | None
    world_size: int | None
    rank_free: bool | None
    entries: int | None
    store_entries: int | None
    flashinfer_version: str | None
    tool_version: str | None
    is_newer: bool
    problems: tuple[str, ...]
    ops: tuple[OpSummary, ...]
    near_ties: tuple[NearTie, ...]


@dataclass(frozen=True)
class IdentitySummary:
    """An environment: its manifest, or why that cannot be read, and its bundles, newest first for each plan."""

    digest: str
    metadata: Mapping[str, str] | None
    problem: str | None
    bundles: tuple[BundleSummary, ...]


@dataclass(frozen=True)
class Contents:
    """Everything below a cache root.

    Args:
        root: its path.
        identities: the environments.
        quarantined: what was set aside, name to reason.
        unfinished: how many directories killed or running writers have left.
    """

    root: str
    identities: tuple[IdentitySummary, ...]
    quarantined: Mapping[str, str]
    unfinished: int


@dataclass(frozen=True)
class Finding:
    """Something that is not what it claims to be.

    Args:
        path: of it.
        problem: what is wrong.
    """

    path: str
    problem: str


def summarise_bundle(place: Place, found: Examined) -> BundleSummary:
    """The summary of a bundle that was read and judged."""
    bundle = found.bundle
    ops, ties = _summarise_entries(found.v1) if found.v1 is not None else ((), ())
    return BundleSummary(
        generation=place.generation,
        digest=place.digest,
        plan=place.plan,
        strategy=bundle.strategy if bundle else None,
        world_size=bundle.world_size if bundle else None,
        rank_free=bundle.rank_free if bundle else None,
        entries=len(found.v1.entries) if found.v1 else None,
        store_entries=len(found.store.entries) if found.store else None,
        flashinfer_version=bundle.flashinfer_version if bundle else None,
        tool_version=bundle.tool_version if bundle else None,
        is_newer=found.is_newer,
        problems=found.problems,
        ops=ops,
        near_ties=ties,
    )


def contents_as_json(contents: Contents) -> dict[str, Any]:
    """The contents as JSON values."""
    return {"schema": 1, **asdict(contents)}


def findings_as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as JSON values."""
    return {"schema": 1, "findings": [asdict(finding) for finding in findings]}


def render_findings(findings: Sequence[Finding]) -> str:
    """The findings for a person, one a line."""
    if not findings:
        return "No findings."
    lines = [printable(f"{finding.path}: {finding.problem}") for finding in findings]
    return "\n".join([*lines, f"{len(findings)} finding{'s' if len(findings) > 1 else ''}."])


def render_contents(contents: Contents) -> str:
    """The contents for a person."""
    lines = [line for identity in contents.identities for line in _identity_lines(identity)]
    if not contents.identities:
        lines.append(f"{contents.root} holds no bundles.")
    if contents.quarantined:
        lines.append(f"quarantine: {len(contents.quarantined)}")
        lines.extend(f"  {name}: {reason}" for name, reason in sorted(contents.quarantined.items()))
    if contents.unfinished:
        lines.append(f"unfinished: {contents.unfinished} (may be deleted while no pod is starting)")
    return "\n".join(printable(line) for line in lines)


def _identity_lines(identity: IdentitySummary) -> list[str]:
    lines = [f"identity {identity.digest}"]
    if identity.problem is not None:
        lines.append(f"  BAD: {identity.problem}")
    lines.extend(f"  {name}: {_cut(value)}" for name, value in (identity.metadata or {}).items())
    for bundle in identity.bundles:
        lines.extend(_bundle_lines(bundle))
    return lines


def _bundle_lines(bundle: BundleSummary) -> list[str]:
    lines = [f"  bundle {bundle.digest} generation {bundle.generation} plan {bundle.plan[:12]}"]
    if bundle.is_newer:
        return [*lines, "    written by a newer version of initwarm"]
    if bundle.strategy is not None:
        serves = "any world size" if bundle.rank_free else f"world size {bundle.world_size} only"
        store = f", store {bundle.store_entries}" if bundle.store_entries is not None else ""
        lines.append(
            f"    strategy {bundle.strategy}, tuned by {bundle.world_size} ranks, serves {serves}, "
            f"entries {bundle.entries}{store}, FlashInfer {bundle.flashinfer_version}, initwarm {bundle.tool_version}"
        )
    lines.extend(f"    BAD: {problem}" for problem in bundle.problems)
    for op in bundle.ops:
        lines.extend(_op_lines(op))
    lines.extend(
        f"    near tie {tie.margin:+.2%}: {tie.runner} {json.dumps(tie.tactic)} for {_cut(tie.key)}"
        for tie in bundle.near_ties
    )
    return lines


def _op_lines(op: OpSummary) -> list[str]:
    margins = ""
    if op.smallest_margin is not None:
        margins = f", smallest margin {op.smallest_margin:+.2%}, near ties {op.near_ties} of {op.margins}"
    listed = [f"{tactic} x{count}" for tactic, count in list(op.tactics.items())[:LISTED_TACTICS]]
    if len(op.tactics) > LISTED_TACTICS:
        listed.append(f"and {len(op.tactics) - LISTED_TACTICS} more")
    return [f"    op {op.op}: {op.entries} entries{margins}", f"      {', '.join(listed)}"]


def _cut(text: str, length: int = 160) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _summarise_entries(v1: V1File) -> tuple[tuple[OpSummary, ...], tuple[NearTie, ...]]:
    ops: list[OpSummary] = []
    close: list[tuple[float, str]] = []
    for op, items in sorted(_items_by_op(v1.entries).items()):
        winners = Counter([(entry[0], _as_text(entry[1])) for _, entry in items])
        margins = _margins(items)
        ties = [one for one in margins if one[0] < NEAR_TIE]
        smallest = min(margins)[0] if margins else None
        tactics = {f"{runner} {tactic}": count for (runner, tactic), count in winners.most_common()}
        ops.append(OpSummary(op, len(items), tactics, len(margins), smallest, len(ties)))
        close.extend(ties)
    return tuple(ops), tuple(_near_tie(key, v1.entries[key]) for _, key in heapq.nsmallest(LISTED_TIES, close))


def _items_by_op(entries: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    grouped: dict[str, list[tuple[str, Any]]] = {}
    head, items = "\0", grouped.setdefault("", [])
    for item in entries.items():
        if not item[0].startswith(head):
            # Keys are sorted, so that this is once per op and not once per entry.
            op = op_of(item[0])
            head, items = f"('{op}', ", grouped.setdefault(op, [])
        items.append(item)
    return {op: items for op, items in grouped.items() if items}


def _as_text(tactic: Any) -> Any:
    return tactic if type(tactic) is int else json.dumps(tactic)


def _margins(items: Sequence[tuple[str, Any]]) -> list[tuple[float, str]]:
    """By how much each of these won, where FlashInfer says."""
    found = [(entry[3].get("margin"), key) for key, entry in items if len(entry) > 3 and type(entry[3]) is dict]
    return [(margin, key) for margin, key in found if type(margin) is float or type(margin) is int]


def _near_tie(key: str, entry: Sequence[Any]) -> NearTie:
    chosen = entry[3]
    return NearTie(
        key=key,
        runner=entry[0],
        tactic=entry[1],
        margin=chosen["margin"],
        time_ms=chosen.get("time_ms"),
        runner_up_ms=chosen.get("runner_up_ms"),
        candidates=chosen.get("candidates"),
    )
