"""Judges the record of a run from what lies on disk and from the contract alone; imports nothing of the product.

The formats are those of docs/cache.md and of the JSON Schemas; outcomes and exit codes are those of the design.
`violations` says in plain words what does not hold; an empty list is a clean run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[2] / "initwarm" / "schemas"
LATE_SECONDS = 5.0
MESSAGE_BYTES = 1024
EXIT_CODES = {"warm": {0}, "cold": {0}, "stopped": {143}, "failed": {69, 74, 75, 78}}
BARRIER_PASSED = '"initwarm.barrier.passed"'
#: Of an error that nobody translated: the event, and what Python itself prints when a process ends so.
_BUGS = re.compile(r'"initwarm\.bug"|^Traceback \(most recent call last\)', re.MULTILINE)
_PLACE = re.compile(r"(0|[1-9][0-9]{0,17})-([0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_V1 = "flashinfer-v1.json"
_STORE = "flashinfer-store.json"
#: What pods of one group give as the first cause must be the same where nobody has lost the leader.
_ONE_CAUSE = ("full", "read_only", "io_error", "denied", "lost_handle", "wrong_version")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A permitted end of a pod: its outcome, its exit code, and a pattern that its reason must have."""

    outcome: str
    exit_code: int
    words: str = ""

    def fits(self, outcome: str, exit_code: int | None, reason: str) -> bool:
        """Whether a pod ended so."""
        return (self.outcome, self.exit_code) == (outcome, exit_code) and re.search(self.words, reason) is not None


WARM = Verdict("warm", 0)


def violations(record: Record) -> list[str]:
    """What a run did that it must not, in plain words."""
    checks = (_late, _orphans, _messages, _bugs, _alike, _volumes, _old_bundles, _fits)
    return [problem for check in checks for problem in check(record)]


def outcome_of(record: Record) -> str:
    """The outcome of the group in one word, for the table."""
    found = {_outcome(pod) for pod in _finals(record).values()}
    return "+".join(sorted(found)) or "nobody"


# What all runs have in common.


def _finals(record: Record) -> dict[int, Record]:
    """The last process of each node."""
    return {pod["node"]: pod for pod in record["pods"] if pod["role"] == "member"}


def _message(pod: Record) -> dict[str, Any]:
    try:
        message = json.loads(pod["message"] or "")
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _outcome(pod: Record) -> str:
    return "killed" if pod["status"] < 0 else str(_message(pod).get("outcome"))


def _log(pod: Record) -> str:
    path = Path(pod["log"])
    return path.read_text(errors="replace") if path.exists() else ""


def _has_passed(record: Record) -> bool:
    """Whether all ranks met, so that some may have gone on before a fault."""
    return any(BARRIER_PASSED in _log(pod) for pod in record["pods"])


def _has_joined_a_round(pod: Record) -> bool:
    return '"initwarm.group.joined"' in _log(pod)


def _late(record: Record) -> Iterator[str]:
    deadline = record["schedule"]["deadline_seconds"]
    for pod in record["pods"]:
        end = max(pod["started"] + deadline, pod["woken"] or 0) + LATE_SECONDS
        if not pod["is_killed"] and pod["ended"] > end:
            yield f"{pod['name']} ended {pod['ended'] - end + LATE_SECONDS:.1f} s after its deadline"
        limit = max(pod["terminated"] or 0, pod["woken"] or 0) + LATE_SECONDS
        if pod["terminated"] is not None and pod["ended"] > limit:
            yield f"{pod['name']} ended {pod['ended'] - pod['terminated']:.1f} s after SIGTERM"


def _orphans(record: Record) -> Iterator[str]:
    for pod in record["pods"]:
        if pod["survivors"]:
            yield f"{pod['name']} left {len(pod['survivors'])} processes behind: {pod['survivors']}"


def _messages(record: Record) -> Iterator[str]:
    for pod in record["pods"]:
        if pod["status"] < 0:
            if not pod["is_killed"]:
                yield f"{pod['name']} died of signal {-pod['status']}"
            continue
        message = _message(pod)
        if len((pod["message"] or "").encode()) > MESSAGE_BYTES:
            yield f"the termination message of {pod['name']} has more than {MESSAGE_BYTES} bytes"
        for problem in _against(message, "outcome"):
            yield f"the termination message of {pod['name']} is not one: {problem}"
        if pod["status"] not in EXIT_CODES.get(message.get("outcome", ""), ()):
            yield f"{pod['name']} has outcome {message.get('outcome')} and exit code {pod['status']}"


def _bugs(record: Record) -> Iterator[str]:
    for pod in record["pods"]:
        if found := _BUGS.search(_log(pod)):
            yield f"the log of {pod['name']} has {found[0]}"


# What servers would find.


def _files(root: str) -> dict[str, bytes]:
    """Every file below an engine root that is visible: what is staged or taken away has another name."""
    top = Path(root)
    paths = [path for path in top.rglob("*") if path.is_file()]
    named = {path.relative_to(top).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in sorted(named.items()) if not name.startswith(".staging-")}


def _alike(record: Record) -> Iterator[str]:
    finals = _finals(record)
    warm = {node: pod for node, pod in finals.items() if _outcome(pod) == "warm"}
    roots = {node["node"]: node["engine_root"] for node in record["nodes"]}
    for node, root in roots.items():
        files = _files(root)
        pod = finals.get(node)
        if pod is not None and pod["status"] < 0:
            # Nobody could clean up, and nobody serves here: but what is visible must be whole.
            yield from _broken_engine_files(f"node {node} (killed)", files)
        elif node not in warm and files:
            yield f"node {node} is not warm and shows {len(files)} engine files, such as {next(iter(files))}"
    for root in record["other_engine_roots"]:
        yield from _broken_engine_files(root, _files(root))
    for pod in record["pods"]:
        is_warm = pod["role"] != "member" and _outcome(pod) == "warm" and bool(warm)
        if is_warm and _message(pod)["bundle"] != _message(next(iter(warm.values())))["bundle"]:
            yield f"{pod['name']} is warm with another bundle than the group"
    if not warm:
        return
    yield from _unlike(record, warm, {node: _files(roots[node]) for node in warm})
    others = [pod for node, pod in finals.items() if node not in warm]
    # The others had gone on, or went on with the record of the round that they were in before, as nobody led them.
    has_joined = all("joined round" in _message(pod)["reason"] for pod in warm.values())
    is_excused = (_has_passed(record) or has_joined) and all(
        pod["status"] < 0 or pod["terminated"] is not None or not _has_joined_a_round(pod) for pod in others
    )
    if others and not is_excused:
        ends = ", ".join(f"{pod['name']} {_outcome(pod)} ({pod['status']})" for pod in others)
        yield f"some pods are warm and others not: {ends}"


def _unlike(record: Record, warm: Mapping[int, Record], files: Mapping[int, dict[str, bytes]]) -> Iterator[str]:
    """Differences between the warm pods, and between each of them and its bundle."""
    messages = {node: _message(pod) for node, pod in warm.items()}
    for field in ("bundle", "identity", "world_size"):
        values = {str(message.get(field)) for message in messages.values()}
        if len(values) != 1:
            yield f"warm pods differ in {field}: {sorted(values)}"
    ranks = sorted((rank for message in messages.values() for rank in message["ranks"]), key=str)
    schedule = record["schedule"]
    if len(warm) == schedule["num_nodes"] and ranks != list(range(schedule["num_nodes"] * schedule["nproc"])):
        yield f"the ranks of the group are {ranks}"
    v1 = set()
    for node, message in messages.items():
        if message["missed"] or not message["replayed"]:
            yield f"node {node} is warm with {message['replayed']} look-ups replayed and {message['missed']} missed"
        expected = {f"flashinfer-v1/rank{rank}.json" for rank in message["ranks"]}
        found = {name for name in files[node] if name.startswith("flashinfer-v1/")}
        if found != expected:
            yield f"node {node} shows {sorted(found)} instead of {sorted(expected)}"
        v1 |= {files[node][name] for name in found}
        yield from _broken_engine_files(f"node {node}", files[node])
    if len(v1) != 1:
        yield f"the ranks have {len(v1)} different v1 files"
    stores = [
        {name: data for name, data in one.items() if name.startswith("flashinfer-store/")} for one in files.values()
    ]
    if any(store != stores[0] for store in stores):
        yield "the pods have different v2 stores"
    digest = str(next(iter(messages.values())).get("bundle"))
    yield from _unlike_bundle(record, digest, v1, stores[0])


def _unlike_bundle(record: Record, digest: str, v1: set[bytes], store: Mapping[str, bytes]) -> Iterator[str]:
    damaged = record["damaged"]
    places = [place for root in _cache_roots(record) for place in root.glob(f"v1/*/bundles/*/*-{digest}")]
    whole = [place for place in places if not any(path.startswith(str(place)) for path in damaged)]
    if not whole and not damaged and not record["faults"]:
        yield f"the bundle {digest[:12]} that pods have is on no volume"
    for place in whole:
        if {hashlib.sha256(data).hexdigest() for data in v1} != {_sha256(place / _V1)}:
            yield f"the v1 files of the ranks are not those of {place}"
        if (place / _STORE).exists():
            pack = json.loads((place / _STORE).read_bytes())
            below = f"flashinfer-store/v2/{pack['env_hash']}"
            packed = {f"{below}/entries/{name}": entry for name, entry in pack["entries"].items()}
            packed[f"{below}/manifest.json"] = pack["manifest"]
            if {name: json.loads(data) for name, data in store.items()} != packed:
                yield f"the v2 stores of the pods are not that of {place}"


def _broken_engine_files(where: str, files: Mapping[str, bytes]) -> Iterator[str]:
    for name, data in files.items():
        problem = _v1_problem(data) if name.startswith("flashinfer-v1/") else _json_problem(data)
        if problem:
            yield f"{where}: {name} {problem}"


def _json_problem(data: bytes) -> str:
    try:
        json.loads(data)
    except ValueError as problem:
        return f"does not parse: {problem}"
    return ""


def _v1_problem(data: bytes) -> str:
    if problem := _json_problem(data):
        return problem
    content = json.loads(data)
    generation = content.pop("_generation", None)
    return "" if generation == _digest(content) else "does not match its own digest"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"


# What lies on the volumes.


@functools.cache
def _validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text()))


def _against(value: Any, name: str) -> list[str]:
    return [error.message[:200] for error in _validator(name).iter_errors(value)]


def _cache_roots(record: Record) -> list[Path]:
    return sorted({Path(node["cache_root"]) for node in record["nodes"]})


def _volumes(record: Record) -> Iterator[str]:
    damaged = set(record["damaged"])
    for root in _cache_roots(record):
        for path in sorted((root / "v1").glob("*")):
            if _DIGEST.fullmatch(path.name):
                yield from _environment_problems(path, damaged)
            elif path.name in ("rounds", "addresses", "leases"):
                yield from _record_problems(path, damaged)
            elif path.name not in ("quarantine", "partials") and not path.name.startswith(".staging-"):
                yield f"{path} is no part of the layout"
        for path in sorted((root / "v1" / "partials").rglob("*.json")):
            if not _is_staged(path) and (problem := _json_problem(path.read_bytes())) and str(path) not in damaged:
                yield f"{path} {problem}"
        for path in sorted((root / "v1" / "quarantine").glob("*/reason.json")):
            yield from _schema_problems(path, "quarantine", damaged)


def _is_staged(path: Path) -> bool:
    return any(part.startswith(".staging-") for part in path.parts)


def _record_problems(folder: Path, damaged: set[str]) -> Iterator[str]:
    kind = {"rounds": "round", "addresses": "address", "leases": "lease"}[folder.name]
    for path in sorted(folder.rglob("*.json")):
        if not _is_staged(path):
            yield from _schema_problems(path, kind, damaged)


def _schema_problems(path: Path, kind: str, damaged: set[str]) -> Iterator[str]:
    if str(path) in damaged:
        return
    data = path.read_bytes()
    problems = [problem] if (problem := _json_problem(data)) else _against(json.loads(data), kind)
    for problem in problems:
        yield f"{path} is no {kind} record: {problem}"


def _environment_problems(path: Path, damaged: set[str]) -> Iterator[str]:
    manifest = path / "manifest.json"
    if manifest.exists() and str(manifest) not in damaged:
        yield from _schema_problems(manifest, "manifest", damaged)
        if (
            not _json_problem(manifest.read_bytes())
            and _digest(json.loads(manifest.read_bytes())["metadata"]) != path.name
        ):
            yield f"{manifest} is of another environment"
    for place in sorted(path.glob("bundles/*/*")):
        if place.name.startswith(".staging-"):
            continue
        match = _PLACE.fullmatch(place.name)
        if match is None:
            yield f"{place} is no part of the layout"
        elif not any(one.startswith(f"{place}/") for one in damaged):
            yield from (f"{place}: {problem}" for problem in _bundle_problems(place, path.name, match[2]))


def _bundle_problems(place: Path, identity: str, digest: str) -> Iterator[str]:
    marker = place / "bundle.json"
    if not marker.exists():
        yield "there is no bundle.json"
        return
    data = marker.read_bytes()
    if problem := _json_problem(data):
        yield f"bundle.json {problem}"
        return
    bundle = json.loads(data)
    problems = _against(bundle, "bundle")
    yield from (f"bundle.json: {problem}" for problem in problems)
    if problems:
        return
    if _digest({key: value for key, value in bundle.items() if key != "tool_version"}) != digest:
        yield "bundle.json does not match the name of the directory"
    if (bundle["identity"], bundle["plan"]) != (identity, place.parent.name):
        yield "bundle.json is of another environment or plan"
    for name, file in bundle["files"].items():
        path = place / name
        if _sha256(path) != file["sha256"] or path.stat().st_size != file["size"]:
            yield f"{name} does not match its digest"
        elif problem := (_v1_problem if name == _V1 else _json_problem)(path.read_bytes()):
            yield f"{name} {problem}"


def _old_bundles(record: Record) -> Iterator[str]:
    """What was published before the fault is still there, byte for byte."""
    damaged = [Path(path).parent for path in record["damaged"]]
    for path, digest in record["before"].items():
        if Path(path).parent not in damaged and _sha256(Path(path)) != digest:
            yield f"{path}, which was published before, is {'changed' if Path(path).exists() else 'gone'}"


# What fits the fault.


def _fits(record: Record) -> Iterator[str]:
    struck = [fault for fault in record["faults"] if fault["struck"] is not None]
    has_passed = _has_passed(record)
    kinds = "+".join(fault["kind"] for fault in struck) or "no fault"
    reasons = set()
    for pod in record["pods"]:
        is_last = pod["role"] != "member" or pod is _finals(record)[pod["node"]]
        if pod["status"] < 0 or not is_last:
            continue
        message = _message(pod)
        reason = str(message.get("reason", ""))
        expected = _expected(pod, struck, record, has_passed)
        if not any(one.fits(str(message.get("outcome")), pod["status"], reason) for one in expected):
            yield f"{pod['name']} after {kinds}: {message.get('outcome')}, exit code {pod['status']}: {reason}"
        if pod["role"] == "member" and pod["terminated"] is None:
            reasons.add(reason)
    if struck and all(fault["kind"] in _ONE_CAUSE for fault in struck) and len(reasons) > 1 and not has_passed:
        yield f"the pods give different causes: {sorted(reasons)}"


def _expected(pod: Record, struck: Sequence[Record], record: Record, has_passed: bool) -> list[Verdict]:
    """How this pod may end; several faults permit what any of them does, and a warm end only if all of them do."""
    warm_if_passed = [WARM] if has_passed else []
    if pod["role"] == "old":
        words = r"in place of this|leads group|deadline|No leader|stood still|was heard"
        return [Verdict("failed", 75, words), *warm_if_passed]
    if pod["role"] == "rival":
        return [Verdict("failed", 78, r"Two living pods claim node rank|is taken on this pod"), *warm_if_passed]
    permitted = [_permitted(fault, record, has_passed, pod["node"]) for fault in struck]
    found = [one for each in permitted for one in each if one != WARM]
    if pod["terminated"] is not None:
        # Unless the round had ended by then: warm, or by another fault.
        earlier = [
            one for fault, each in zip(struck, permitted, strict=True) if fault["kind"] != "terminate" for one in each
        ]
        return [Verdict("stopped", 143, "SIGTERM"), *warm_if_passed, *(one for one in earlier if one != WARM)]
    return [*found, WARM] if all(WARM in each for each in permitted) else found


def _permitted(fault: Record, record: Record, has_passed: bool, node: int) -> list[Verdict]:
    """How the pod at a node may end after this fault."""
    kind, schedule, is_target = fault["kind"], record["schedule"], fault["target"] == node
    if kind in ("kill", "terminate", "torn_rename"):
        if fault["successor"] is None:
            return _lost(fault, record, has_passed)
        # What the others have gone on with lies on volumes of theirs.
        is_stranded = has_passed and schedule["has_own_volumes"] and is_target
        return [WARM, *([Verdict("failed", 75, "No leader|said no hello")] if is_stranded else [])]
    if kind == "stop":
        if fault["variant"] != "long":
            return [WARM]
        return [*_lost(fault, record, has_passed), *([Verdict("failed", 75, "deadline")] if is_target else [])]
    if kind == "cut":
        return [WARM] if fault["variant"] == "heals" else _cut_off(has_passed)
    if kind == "missing_pod":
        return [WARM] if schedule["has_bundle"] else [_absent(fault)]
    if kind == "late_pod":
        if fault["variant"] != "too_late":
            return [WARM]
        # The others name it; it finds them gone.
        return [Verdict("failed", 75, r"said no hello|No leader")] if is_target else [_absent(fault)]
    if kind == "duplicate_rank":
        words = rf"Two living pods claim node rank {fault['target']} |is taken on this pod"
        return [Verdict("failed", 78, words), *([WARM] if has_passed else [])]
    if kind == "wrong_version":
        what = {"TEST_TOOL_VERSION": "initwarm", "TEST_CUDA_VERSION": "cuda_version"}[fault["variant"]]
        return [Verdict("failed", 78, f"The pods disagree on {what}: .*node rank {fault['target']} ")]
    if kind == "slow":
        words = "deadline|in time|time was up|before|within|did not"
        return [WARM, _soft(schedule, 75, words), Verdict("failed", 75, words)]
    # A pod that comes back alone, and cannot take what the others have, must not start cold beside them.
    alone = [Verdict("failed", 74)] if has_passed and is_target else []
    return [*_of_a_volume(fault, schedule), *alone]


def _of_a_volume(fault: Record, schedule: Record) -> list[Verdict]:
    """Errors of a file system; those of the group's own volume cost a warm start only where nothing else has it."""
    kind = fault["kind"]
    words = {
        "full": r"is full|ENOSPC",
        "read_only": r"read-only|EROFS",
        "io_error": r"EIO|Input/output",
        "denied": r"EACCES|Permission denied|may not|not allowed",
        "lost_handle": r"ESTALE",
    }.get(kind, "")
    cold = _soft(schedule, 74, words)
    if fault["root"] == "engine" and kind in ("full", "read_only", "io_error", "denied"):
        return [WARM, cold]
    if fault["root"] == "engine" and kind in ("truncated", "flipped"):
        return [WARM, _soft(schedule, 74, "reads back as other bytes")]
    if kind == "lost_handle":
        return [WARM] if fault["count"] else [cold]
    if kind == "io_error":
        return [WARM, cold]
    if kind in ("full", "read_only", "denied"):
        if fault["target"] != 0 or schedule["has_bundle"]:
            return [WARM]
        return [cold] if kind == "read_only" and fault["skip"] == 0 else [WARM, cold]
    return [WARM]


def _soft(schedule: Record, exit_code: int, words: str) -> Verdict:
    """Trouble with tuning or the volume: all ranks start cold, unless that was asked to be a failure."""
    if schedule["on_tuning_failure"] == "continue":
        return Verdict("cold", 0, words)
    return Verdict("failed", exit_code, words)


def _lost(fault: Record, record: Record, has_passed: bool) -> list[Verdict]:
    """A pod went and nobody came: the others name it, or had gone on before."""
    node = fault["target"]
    names = "|".join(re.escape(pod["name"]) + r"\b" for pod in record["pods"] if pod["node"] == node)
    words = rf"{names}|node ranks? \[?{node}\b|Node rank {node}\b|stood still"
    if record["schedule"]["num_nodes"] == 1:
        words += "|deadline"
    recorded = [Verdict("warm", 0, "joined round")] if record["schedule"]["has_bundle"] else []
    return [Verdict("failed", 75, words), *recorded, *([WARM] if has_passed else [])]


def _cut_off(has_passed: bool) -> list[Verdict]:
    words = (
        r"was heard|answered nothing|could not meet|No leader|said no hello|control channel|did not leave the barrier"
    )
    return [Verdict("failed", 75, words), *([WARM] if has_passed else [])]


def _absent(fault: Record) -> Verdict:
    node = fault["target"]
    words = rf"node ranks \[[0-9, ]*{node}[0-9, ]*\] said no hello"
    return Verdict("failed", 75, r"No leader \(node rank 0\)" if node == 0 else words)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Fault x outcome x count as Markdown, from the kind and the outcome of each run."""
    outcomes = sorted({outcome for _, outcome in rows})
    lines = ["| fault | " + " | ".join(outcomes) + " | runs |", "|---" * (len(outcomes) + 2) + "|"]
    for kind in sorted({kind for kind, _ in rows}):
        counts = [sum(row == (kind, outcome) for row in rows) for outcome in outcomes]
        lines.append(f"| {kind} | " + " | ".join(str(count or "") for count in counts) + f" | {sum(counts)} |")
    lines.append("| all | " + " | ".join(str(sum(o == x for _, o in rows)) for x in outcomes) + f" | {len(rows)} |")
    return "\n".join(lines) + "\n"
