"""The checker passes a clean run, and finds each thing that can be wrong with one."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import checker

Record = dict[str, Any]
IDENTITY_METADATA = {"flashinfer_version": "0.7.4", "gpu": "none"}
PLAN = "a" * 64


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def v1_file(tactic: int = 1) -> bytes:
    content: dict[str, Any] = {"_metadata": IDENTITY_METADATA, "('op', 'Runner', ((1,),), ())": ["Runner", tactic]}
    return json.dumps({**content, "_generation": digest(content)}, indent=2).encode()


def store_pack() -> dict[str, Any]:
    entry = {"key": "('op', 'Runner', ((1,),), ())", "runner": "Runner", "tactic": 1}
    return {"schema": 1, "env_hash": "0123456789abcdef", "manifest": {"gpu": "none"}, "entries": {"e.json": entry}}


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


def publish(cache: Path) -> Path:
    """A whole volume with one bundle; returns the bundle's directory."""
    files = {"flashinfer-v1.json": v1_file(), "flashinfer-store.json": json.dumps(store_pack()).encode()}
    identity = digest(IDENTITY_METADATA)
    bundle = {
        "schema": 1, "plan": PLAN, "identity": identity, "world_size": 2, "rank_free": True, "strategy": "split",
        "entries": 1, "flashinfer_version": "0.7.4",
        "files": {name: {"sha256": sha256(data), "size": len(data)} for name, data in files.items()},
    }  # fmt: skip
    place = cache / "v1" / identity / "bundles" / PLAN / f"1-{digest(bundle)}"
    for name, data in files.items():
        write(place / name, data)
    write(place / "bundle.json", {**bundle, "tool_version": "1"})
    write(cache / "v1" / identity / "manifest.json", {"schema": 1, "metadata": IDENTITY_METADATA})
    record = {
        "schema": 1, "group": "g", "nproc": [1, 1], "world_size": 2, "plan": PLAN, "identity": identity,
        "bundle": digest(bundle), "epoch": "e", "tool_version": "1",
    }  # fmt: skip
    write(cache / "v1" / "rounds" / "g.json", record)
    return place


def fill(engine: Path, rank: int) -> None:
    pack = store_pack()
    write(engine / "flashinfer-v1" / f"rank{rank}.json", v1_file())
    below = engine / "flashinfer-store" / "v2" / pack["env_hash"]
    write(below / "manifest.json", pack["manifest"])
    for name, entry in pack["entries"].items():
        write(below / "entries" / name, entry)


def message(pod: Record, **changes: Any) -> None:
    """Change what a pod said."""
    pod["message"] = json.dumps({**json.loads(pod["message"]), **changes})


def fails(pod: Record, status: int, reason: str, outcome: str = "failed") -> None:
    pod["status"] = status
    message(pod, outcome=outcome, reason=reason, bundle=None, replayed=0)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A clean run of two warm pods."""
    place = publish(tmp_path / "cache")
    pods, nodes = [], []
    for node in range(2):
        engine = tmp_path / f"engine-{node}"
        fill(engine, node)
        said = {
            "outcome": "warm", "reason": "1 entries tuned", "first_failure": None, "ranks": [node], "world_size": 2,
            "strategy": "split", "tuned": 1, "replayed": 2, "missed": 0, "bundle": place.name.partition("-")[2],
            "identity": digest(IDENTITY_METADATA), "epoch": "e", "seconds": 3.0,
        }  # fmt: skip
        pods.append(
            {
                "name": f"pod-{node}-1", "node": node, "role": "member", "pod_uid": f"uid-{node}", "status": 0,
                "message": json.dumps(said), "log": str(write(tmp_path / f"pod-{node}.log", b"")), "started": 0.0,
                "ended": 3.0, "is_killed": False, "terminated": None, "woken": None, "survivors": [],
            }
        )  # fmt: skip
        nodes.append({"node": node, "engine_root": str(engine), "cache_root": str(tmp_path / "cache")})
    schedule = {
        "num_nodes": 2, "nproc": 1, "deadline_seconds": 20.0, "on_tuning_failure": "continue", "has_bundle": False,
        "has_own_volumes": False,
    }  # fmt: skip
    return {
        "schedule": schedule, "faults": [], "nodes": nodes, "other_engine_roots": [], "pods": pods, "before": {},
        "damaged": [],
    }  # fmt: skip


def fault(kind: str, **changes: Any) -> Record:
    return {
        "kind": kind, "target": 1, "root": "cache", "skip": 0, "count": None, "variant": "", "successor": None,
        "struck": 1.0, **changes,
    }  # fmt: skip


def empty_engine_roots(record: Record) -> None:
    for node in record["nodes"]:
        for path in sorted(Path(node["engine_root"]).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def all_fail(record: Record, status: int, reason: str, outcome: str = "failed") -> None:
    empty_engine_roots(record)
    for pod in record["pods"]:
        fails(pod, status, reason, outcome)


def engine(record: Record, node: int) -> Path:
    return Path(record["nodes"][node]["engine_root"])


def bundle_of(record: Record) -> Path:
    return next(Path(record["nodes"][0]["cache_root"]).glob("v1/*/bundles/*/*"))


def test_the_checker_knows_no_code_of_the_product() -> None:
    tree = ast.parse(Path(checker.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] in ("initwarm", "tests")]


def test_a_clean_run_passes(record: Record) -> None:
    assert checker.violations(record) == []
    assert checker.outcome_of(record) == "warm"


def _late(record: Record) -> None:
    record["pods"][1]["ended"] = 25.5


def _slow_to_stop(record: Record) -> None:
    record["pods"][1].update(terminated=1.0, ended=6.5)


def _orphan(record: Record) -> None:
    record["pods"][0]["survivors"] = [4711]


def _no_message(record: Record) -> None:
    record["pods"][0]["message"] = None


def _long_message(record: Record) -> None:
    message(record["pods"][0], reason="x" * 1024)


def _message_of_another_form(record: Record) -> None:
    message(record["pods"][0], ranks="all")


def _wrong_exit_code(record: Record) -> None:
    record["pods"][0]["status"] = 75


def _signal(record: Record) -> None:
    record["pods"][0]["status"] = -11


def _bug(record: Record) -> None:
    Path(record["pods"][0]["log"]).write_text("Traceback (most recent call last):\n")


def _mixed(record: Record) -> None:
    fails(record["pods"][1], 75, "lost")


def _one_cold_without_files(record: Record) -> None:
    fails(record["pods"][1], 0, "cold", "cold")
    for path in engine(record, 1).rglob("*.json"):
        path.unlink()


def _visible_though_cold(record: Record) -> None:
    all_fail(record, 0, "nothing", "cold")
    fill(engine(record, 0), 0)


def _other_bytes(record: Record) -> None:
    write(engine(record, 1) / "flashinfer-v1" / "rank1.json", v1_file(2))


def _rank_without_file(record: Record) -> None:
    (engine(record, 1) / "flashinfer-v1" / "rank1.json").unlink()


def _torn_engine_file(record: Record) -> None:
    for node in range(2):
        write(engine(record, node) / "flashinfer-v1" / f"rank{node}.json", v1_file()[:40])


def _other_store(record: Record) -> None:
    next(engine(record, 1).glob("flashinfer-store/v2/*/entries/e.json")).write_text("{}")


def _other_store_than_the_bundle_s(record: Record) -> None:
    for node in range(2):
        next(engine(record, node).glob("flashinfer-store/v2/*/entries/e.json")).write_text("{}")


def _missed(record: Record) -> None:
    message(record["pods"][0], missed=1)


def _other_bundle(record: Record) -> None:
    message(record["pods"][0], bundle="b" * 64)


def _ranks(record: Record) -> None:
    message(record["pods"][1], ranks=[0])


def _cut_file(record: Record) -> None:
    path = bundle_of(record) / "flashinfer-v1.json"
    path.write_bytes(path.read_bytes()[:50])


def _no_marker(record: Record) -> None:
    (bundle_of(record) / "bundle.json").unlink()


def _renamed_bundle(record: Record) -> None:
    bundle_of(record).rename(bundle_of(record).with_name("2-" + "c" * 64))


def _bad_round(record: Record) -> None:
    write(Path(record["nodes"][0]["cache_root"]) / "v1" / "rounds" / "g.json", {"schema": 1})


def _bad_manifest(record: Record) -> None:
    write(bundle_of(record).parents[2] / "manifest.json", {"schema": 1, "metadata": {"gpu": "another"}})


def _litter(record: Record) -> None:
    write(Path(record["nodes"][0]["cache_root"]) / "v1" / "what.tmp", b"")


def _old_bundle_gone(record: Record) -> None:
    record["before"] = {str(bundle_of(record) / "gone.json"): "d" * 64}


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (_late, "after its deadline"),
        (_slow_to_stop, "after SIGTERM"),
        (_orphan, "left 1 processes behind"),
        (_no_message, "is not one"),
        (_long_message, "more than 1024 bytes"),
        (_message_of_another_form, "is not one"),
        (_wrong_exit_code, "exit code 75"),
        (_signal, "died of signal 11"),
        (_bug, "Traceback"),
        (_mixed, "some pods are warm and others not"),
        (_mixed, "is not warm and shows"),
        (_one_cold_without_files, "some pods are warm and others not"),
        (_visible_though_cold, "is not warm and shows"),
        (_other_bytes, "different v1 files"),
        (_rank_without_file, "instead of"),
        (_torn_engine_file, "does not parse"),
        (_torn_engine_file, "are not those of"),
        (_other_store, "different v2 stores"),
        (_other_store_than_the_bundle_s, "are not that of"),
        (_missed, "1 missed"),
        (_other_bundle, "differ in bundle"),
        (_ranks, "the ranks of the group are"),
        (_cut_file, "does not match its digest"),
        (_no_marker, "there is no bundle.json"),
        (_renamed_bundle, "does not match the name"),
        (_bad_round, "is no round record"),
        (_bad_manifest, "of another environment"),
        (_litter, "no part of the layout"),
        (_old_bundle_gone, "is gone"),
    ],
)
def test_what_is_wrong_is_found(record: Record, break_it: Callable[[Record], None], words: str) -> None:
    break_it(record)
    assert any(words in problem for problem in checker.violations(record)), checker.violations(record)


LOST = "Nothing was heard for 30 s from node rank 1 (pod pod-1-1)."
ABSENT = "Of 2 pods, node ranks [1] said no hello within 5 s."


@pytest.mark.parametrize(
    ("kind", "changes", "status", "outcome", "reason", "is_permitted"),
    [
        ("missing_pod", {}, 75, "failed", ABSENT, True),
        ("missing_pod", {}, 75, "failed", "Somebody is missing.", False),
        ("missing_pod", {}, 0, "cold", ABSENT, False),
        ("kill", {}, 75, "failed", LOST, True),
        ("kill", {}, 0, "cold", LOST, False),
        ("kill", {"successor": "same"}, 75, "failed", LOST, False),
        ("read_only", {"target": 0}, 0, "cold", "The volume is mounted read-only.", True),
        ("read_only", {"target": 0}, 74, "failed", "The volume is mounted read-only.", False),
        ("read_only", {"target": 1}, 0, "cold", "The volume is mounted read-only.", False),
        ("full", {"target": 0, "skip": 3}, 0, "cold", "The volume is full (ENOSPC).", True),
        ("full", {"target": 0, "skip": 3}, 0, "cold", "Something went wrong.", False),
        ("short_write", {}, 0, "cold", "The volume is full (ENOSPC).", False),
        ("stale_listing", {}, 75, "failed", "The deadline passed.", False),
        ("wrong_version", {"variant": "TEST_TOOL_VERSION"}, 78, "failed",
         "The pods disagree on initwarm: node rank 0 (pod a) has '1' and node rank 1 (pod b) has '99.0'.", True),
        ("wrong_version", {"variant": "TEST_TOOL_VERSION"}, 78, "failed", "The pods disagree on plan.", False),
        ("duplicate_rank", {}, 78, "failed", "Two living pods claim node rank 1 of group g: a and b.", True),
        ("duplicate_rank", {}, 78, "failed", "Two living pods claim node rank 0 of group g: a and b.", False),
        ("late_pod", {"variant": "too_late"}, 75, "failed", ABSENT, True),
        ("late_pod", {"variant": "too_late", "target": 0}, 75, "failed", ABSENT, False),
        ("stop", {"variant": "long"}, 75, "failed", "The deadline passed.", False),
        ("cut", {"variant": "heals"}, 75, "failed", LOST, False),
        ("cut", {}, 75, "failed", LOST, True),
        ("io_error", {"root": "engine"}, 74, "failed", "The device reported an error (EIO).", False),
    ],
)  # fmt: skip
def test_an_end_fits_its_fault_or_is_found(
    record: Record, kind: str, changes: Record, status: int, outcome: str, reason: str, is_permitted: bool
) -> None:
    record["faults"] = [fault(kind, **changes)]
    all_fail(record, status, reason, outcome)
    problems = checker.violations(record)
    assert (problems == []) == is_permitted, problems


def test_a_warm_end_is_found_where_a_group_cannot_be_warm(record: Record) -> None:
    record["faults"] = [fault("missing_pod")]
    assert any("after missing_pod: warm" in problem for problem in checker.violations(record))


def test_a_fault_that_did_not_strike_excuses_nothing(record: Record) -> None:
    record["faults"] = [fault("kill", struck=None)]
    all_fail(record, 75, LOST)
    assert any("after no fault: failed" in problem for problem in checker.violations(record))


def test_pods_that_give_different_causes_are_found(record: Record) -> None:
    record["faults"] = [fault("full", target=0)]
    all_fail(record, 0, "The volume is full (ENOSPC).", "cold")
    message(record["pods"][1], reason="It is full, too.")
    assert any("different causes" in problem for problem in checker.violations(record))


def test_a_pod_that_is_terminated_when_the_round_has_ended_otherwise_may_say_so(record: Record) -> None:
    record["faults"] = [fault("read_only", target=0), fault("terminate", successor="same")]
    all_fail(record, 0, "The volume is mounted read-only.", "cold")
    record["pods"][1]["terminated"] = 2.0
    assert checker.violations(record) == []

    record["faults"].pop(0)

    assert any("pod-1-1 after terminate: cold" in problem for problem in checker.violations(record))


def test_an_old_leader_is_warm_only_if_all_ranks_met_in_its_round(record: Record) -> None:
    record["faults"] = [fault("old_leader", target=0, variant="alive")]
    old = {**copy.deepcopy(record["pods"][0]), "name": "pod-0-0", "role": "old"}
    record["pods"].append(old)
    assert any("pod-0-0 after old_leader: warm" in problem for problem in checker.violations(record))

    Path(old["log"]).write_text(checker.BARRIER_PASSED)

    assert checker.violations(record) == []


def test_a_pod_that_no_leader_ever_let_in_does_not_spoil_what_the_others_share(record: Record) -> None:
    """It comes back when the others have gone on, and cannot take what they have."""
    Path(record["pods"][0]["log"]).write_text(checker.BARRIER_PASSED)
    record["faults"] = [fault("full", root="engine"), fault("kill", successor="same")]
    fails(record["pods"][1], 74, "The volume is full (ENOSPC).")
    for path in engine(record, 1).rglob("*.json"):
        path.unlink()
    assert checker.violations(record) == []

    Path(record["pods"][1]["log"]).write_text('"initwarm.group.joined"')

    assert any("some pods are warm and others not" in problem for problem in checker.violations(record))


def test_what_was_damaged_on_purpose_is_not_the_product_s_doing(record: Record) -> None:
    _cut_file(record)
    record["damaged"] = [str(bundle_of(record) / "flashinfer-v1.json")]
    record["faults"] = [fault("truncated", target=0, variant="written")]
    assert checker.violations(record) == []


def test_a_killed_pod_may_leave_whole_files_and_no_torn_ones(record: Record) -> None:
    Path(record["pods"][0]["log"]).write_text(checker.BARRIER_PASSED)
    record["faults"] = [fault("kill")]
    record["pods"][1].update(status=-9, is_killed=True, message=None)
    assert checker.violations(record) == []

    write(engine(record, 1) / "flashinfer-v1" / "rank1.json", v1_file()[:30])

    assert any("(killed)" in problem for problem in checker.violations(record))


def test_the_table_counts_outcomes_by_fault() -> None:
    text = checker.table([("kill", "warm"), ("kill", "failed"), ("none", "warm")])
    assert text.splitlines() == [
        "| fault | failed | warm | runs |",
        "|---|---|---|---|",
        "| kill | 1 | 1 | 2 |",
        "| none |  | 1 | 1 |",
        "| all | 1 | 2 | 3 |",
    ]


def test_a_record_is_judged_without_being_changed(record: Record) -> None:
    before = copy.deepcopy(record)
    checker.violations(record)
    assert record == before
