"""Tuning and replay in one process, with FlashInfer's real AutoTuner: on the host plan, and on ops with faults."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from initwarm.buckets import replay_points
from initwarm.edges import calls, installation, replay, tuning
from initwarm.edges.outputs import agree
from initwarm.edges.replay import ReplayResult
from initwarm.edges.tuners import HostTuner, Tactic, install
from initwarm.edges.tuning import Progress, TuneResult
from initwarm.entries import parse_v1
from initwarm.errors import PlanError, TuningError, UnavailableError
from initwarm.hostplan import host_plan
from initwarm.plan import Call, TensorSpec, Unit
from initwarm.planfile import parse_plan
from initwarm.store import parse_store, unpack_store
from tests.support.pods import PLUGINS
from tests.support.tuner_processes import TunerProcesses, gloo_group

CPU = torch.device("cpu")
HAS_STORE = installation.features().has_store
needs_store = pytest.mark.skipif(not HAS_STORE, reason="needs a FlashInfer with the v2 store")
#: How often a replay looks each key up: in the v1 file, and in the store where there is one.
FORMATS = 2 if HAS_STORE else 1


@pytest.fixture(autouse=True)
def _own_tuner_and_jit_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flashinfer.autotuner import AutoTuner
    from flashinfer.jit import env

    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setattr(AutoTuner, "_instance", None)
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", tmp_path / "cached_ops")
    # FlashInfer 0.6.18 asks ldconfig for each save.
    monkeypatch.setattr(tuning, "CHEAP_SAVE_SECONDS", 60)


@pytest.fixture(scope="module")
def processes() -> TunerProcesses:
    return TunerProcesses()


def units_of(*faults: dict[str, Any], buckets: Sequence[int] = (1, 2, 4)) -> tuple[Unit, ...]:
    """Units of a plan with one faulty op per mapping."""
    source = [{"call": "faults.op", "buckets": list(buckets), "args": one} for one in faults]
    document = {"version": 1, "device": "cpu", "calls": source}
    return parse_plan(json.dumps(document), "test", frozenset({"faults.op"})).units_of(0)


def tune(units: Sequence[Unit], directory: Path, **options: Any) -> TuneResult:
    arguments: dict[str, Any] = {
        "excluded": (),
        "group": None,
        "resume": None,
        "check_outputs": False,
        "report": lambda _progress: None,
        "save_to": directory / "progress.json",
        **options,
    }
    return tuning.tune(units, CPU, **arguments)


def replayed(units: Sequence[Unit], result: TuneResult, directory: Path) -> ReplayResult:
    """What a server would find of a result."""
    v1 = directory / "rank0.json"
    v1.write_bytes(result.v1)
    root = None
    if result.store is not None:
        root = directory / "store"
        for name, data in unpack_store(parse_store(result.store)).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
    return replay.replay(units, CPU, v1, root, lambda _progress: None)


def tactics_of(result: TuneResult) -> dict[str, Any]:
    return {key: entry[1] for key, entry in parse_v1(result.v1).entries.items()}


def test_the_host_plan_is_tuned_and_then_found_in_both_formats(tmp_path: Path) -> None:
    units = host_plan().units_of(0)

    result = tune(units, tmp_path, check_outputs=True)
    found = replayed(units, result, tmp_path)

    assert (result.failed, result.degraded, result.rejected) == ((), (), ())
    assert result.tuned == len(units) == len(tactics_of(result))
    assert result.measured > 3 * len(units)
    points = sum(len(replay_points(call.buckets)) for call in host_plan().calls)
    assert found == ReplayResult(hits=FORMATS * points, missed=(), profiled=0, built=(), failed=())


def test_nothing_to_tune_gives_empty_files_that_load(tmp_path: Path) -> None:
    result = tune((), tmp_path)

    assert (result.tuned, result.measured, tactics_of(result)) == (0, 0, {})
    assert replayed((), result, tmp_path) == ReplayResult(0, (), 0, (), ())


def test_a_server_that_tunes_on_top_of_the_result_measures_nothing(tmp_path: Path) -> None:
    from initwarm.edges.installation import autotuner, flashinfer

    units = units_of({})
    result = tune(units, tmp_path)
    replayed(units, result, tmp_path)
    call = calls.prepare(units[-1], CPU)

    tuner = install(CPU)
    with autotuner.autotune(True, cache=str(tmp_path / "rank0.json")):
        call()
    assert tuner.take().measured == []
    if HAS_STORE:
        tuner = install(CPU)
        with flashinfer.autotune_v2("tune", cache_root=str(tmp_path / "store")):
            call()
        # The store races the default tactic too, but only for what it has to measure.
        assert tuner.take().measured == []


def test_both_formats_have_the_same_winners(tmp_path: Path) -> None:
    result = tune(host_plan().units_of(0), tmp_path)

    if result.store is None:
        assert not HAS_STORE
    else:
        entries = parse_store(result.store).entries.values()
        file = parse_v1(result.v1)
        assert {entry["key"]: entry["tactic"] for entry in entries} == tactics_of(result)
        assert all(entry["key_fields"] for entry in entries)
        assert {entry["key"]: [entry["profiling_policy"]] for entry in entries} == {
            key: entry[2:3] for key, entry in file.entries.items()
        }


def test_the_metadata_is_flashinfers_own(tmp_path: Path) -> None:
    result = tune(units_of({}, buckets=[1]), tmp_path)

    assert parse_v1(result.v1).metadata == installation.collect_metadata(CPU)
    assert installation.features().flashinfer_version == installation.collect_metadata(CPU)["flashinfer_version"]


def test_nothing_is_written_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    units = units_of({"name": "half", "raises": "most"}, {"name": "none", "raises": "all"})

    replayed(units, tune(units, tmp_path), tmp_path)

    assert capfd.readouterr() == ("", "")
    # Made when FlashInfer was imported, so that its stream is not the one that is captured here.
    handlers = importlib.import_module("flashinfer.jit.core").logger.handlers
    assert {type(handler) for handler in handlers} <= {logging.FileHandler, logging.NullHandler}


def test_progress_names_the_unit_and_before_each_measurement_the_tactic(tmp_path: Path) -> None:
    said: list[Progress] = []

    tune(units_of({"tactics": 2}, buckets=[1, 2]), tmp_path, report=said.append)

    assert [(one.done, one.total, one.tactic and one.tactic.tactic) for one in said] == [
        (0, 2, None), (0, 2, 0), (0, 2, 1), (1, 2, None), (1, 2, 0), (1, 2, 1),
    ]  # fmt: skip
    assert said[-1].text == "unit 2/2, calls[0] faults.op M=2, FaultyRunner 1"


def test_r20_finished_units_are_not_measured_again(tmp_path: Path) -> None:
    units = units_of({"name": "first"}, {"name": "second"})
    tune(units[:4], tmp_path)

    result = tune(units, tmp_path, resume=tmp_path / "progress.json")

    assert (result.tuned, result.measured) == (2, 8)
    assert replayed(units, result, tmp_path).missed == ()


@pytest.mark.parametrize("damage", ["garbage", "a list", "an entry of no list", "another environment"])
def test_a_progress_file_that_cannot_be_used_is_replaced(tmp_path: Path, damage: str) -> None:
    units = units_of({})
    tune(units, tmp_path)
    path = tmp_path / "progress.json"
    content = json.loads(path.read_text())
    path.write_text(
        {
            "garbage": "{",
            "a list": "[]",
            "an entry of no list": json.dumps({**content, "key": 7}),
            "another environment": json.dumps({**content, "_metadata": {**content["_metadata"], "gpu": "NVIDIA H20"}}),
        }[damage]
    )

    assert tune(units, tmp_path, resume=path).tuned == 3
    assert tune(units, tmp_path, resume=path).tuned == 0


def test_saving_slows_down_where_it_is_dear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[str] = []
    seconds = iter(float(moment) for moment in range(1000))

    def save(_self: HostTuner, path: str) -> None:
        saves.append(Path(path).name)
        Path(path).write_text("{}")

    monkeypatch.setattr(HostTuner, "save_configs", save)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: 0.0, thread_time=lambda: next(seconds)))
    monkeypatch.setattr(tuning, "publish_winners", lambda *_: None)
    monkeypatch.setattr(tuning, "CHEAP_SAVE_SECONDS", 0.5)

    tune(units_of({}, {}, {}), tmp_path)

    assert saves.count("progress.json") == 1


def test_r16_an_op_that_fell_back_for_lack_of_memory_is_a_failed_unit(tmp_path: Path) -> None:
    units = units_of({"name": "good"}, {"name": "bad", "out_of_memory": 4})

    result = tune(units, tmp_path)

    assert result.failed == ("calls[1] faults.op M=4 (faults::bad: out of memory in FaultyRunner 0)",)
    assert "faults::bad: " in result.degraded[0]
    assert "MemoryError: no room for this tactic" in result.degraded[0]
    assert len(tactics_of(result)) == 5
    assert any("faults::bad" in key for key in replayed(units, result, tmp_path).missed)


def test_r16_a_call_that_has_no_room_itself_is_a_failed_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        raise MemoryError("no room for the output")

    monkeypatch.setattr(tuning, "prepare", lambda unit, device: call)

    assert tune(units_of({}, buckets=[2]), tmp_path).failed == (
        "calls[0] faults.op M=2 (out of memory: no room for the output)",
    )


def test_r16_inputs_that_have_no_room_are_an_error_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_args, **_options: (_ for _ in ()).throw(MemoryError("none left")))

    with pytest.raises(TuningError, match=r"needs 0\.00 GiB for its inputs, and cpu has no room: none left"):
        calls.prepare(host_plan().units_of(0)[0], CPU)


def test_r19_one_tactic_that_runs_is_enough_and_the_op_is_degraded(tmp_path: Path) -> None:
    units = units_of({"raises": "most", "tactics": 21})

    result = tune(units, tmp_path)

    assert result.failed == ()
    assert result.degraded == (
        "faults::op: 20 tactics failed of 21, the last FaultyRunner 19: RuntimeError: unsupported tactic",
    )
    assert set(tactics_of(result).values()) == {20}
    assert replayed(units, result, tmp_path).missed == ()


def test_r19_where_no_tactic_runs_the_unit_has_failed(tmp_path: Path) -> None:
    result = tune(units_of({"raises": "all"}, buckets=[1]), tmp_path)

    (failed,) = result.failed
    assert failed.startswith("calls[0] faults.op M=1 (faults::op: 4 tactics failed of 4, the last FaultyRunner 3: ")
    assert result.tuned == 0


def test_a_few_failed_tactics_do_not_degrade_an_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = HostTuner._measure

    def measure(self: HostTuner, runner: Any, inputs: Any, tactic: Any, *args: Any, **options: Any) -> float:
        if tactic == 3:
            raise RuntimeError("unsupported tactic")
        return stock(self, runner, inputs, tactic, *args, **options)

    monkeypatch.setattr(HostTuner, "_measure", measure)

    assert tune(units_of({}), tmp_path).degraded == ()


@pytest.mark.parametrize("tactic", [0, 1])
def test_r18_an_excluded_tactic_is_not_run(tmp_path: Path, tactic: int) -> None:
    said: list[Progress] = []

    excluded = (Tactic("faults::op", "FaultyRunner", tactic),)
    result = tune(units_of({}), tmp_path, excluded=excluded, report=said.append)

    assert tactic not in {one.tactic.tactic for one in said if one.tactic}
    assert set(tactics_of(result).values()) == {1 - tactic if tactic == 0 else 0}
    assert result.measured == 3 * 3


def test_r18_a_tactic_that_is_a_tuple_is_excluded_too(tmp_path: Path) -> None:
    said: list[Progress] = []
    excluded = Tactic("initwarm::host_matmul", "HostBlockedMatmulRunner", [64, 256])

    tune(host_plan().units_of(0)[:1], tmp_path, excluded=(excluded,), report=said.append)

    measured = [one.tactic for one in said if one.tactic]
    assert excluded not in measured
    assert Tactic("initwarm::host_matmul", "HostBlockedMatmulRunner", [64, 64]) in measured


def test_r18_where_all_tactics_are_excluded_the_unit_has_failed(tmp_path: Path) -> None:
    result = tune(units_of({"tactics": 1}), tmp_path, excluded=(Tactic("faults::op", "FaultyRunner", 0),))

    assert len(result.failed) == 3
    assert "all are excluded" in result.failed[0]


def aborting(units: Sequence[Unit], directory: Path, say: Callable[[Any], None]) -> None:
    tuning.CHEAP_SAVE_SECONDS = 60
    tune(units, directory, report=say)


def test_r18_the_last_report_of_a_killed_process_names_the_tactic_and_its_finished_units_are_kept(
    tmp_path: Path, processes: TunerProcesses
) -> None:
    units = units_of({"name": "first"}, {"name": "second", "abort": 2}, {"name": "third"})

    (end,) = processes.run(aborting, units, tmp_path)
    culprit = end.said[-1].tactic
    result = tune(units, tmp_path, resume=tmp_path / "progress.json", excluded=(culprit,))

    assert end.exit_code == -6
    assert culprit == Tactic("faults::second", "FaultyRunner", 2)
    assert result.failed == ()
    assert (result.tuned, result.measured) == (6, 3 * 3 + 3 * 4)


def test_r18_a_kernel_that_loses_the_gpu_ends_the_process_and_is_the_last_one_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Progress] = []
    monkeypatch.setattr(HostTuner, "_is_device_lost", lambda _self: True)

    with pytest.raises(SystemExit, match="faults::op FaultyRunner 0 left the GPU unusable: unsupported tactic"):
        tune(units_of({"raises": "most"}), tmp_path, report=said.append)

    assert said[-1].tactic == Tactic("faults::op", "FaultyRunner", 0)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_r24_a_winner_with_other_numbers_is_rejected_and_the_unit_measured_again(
    tmp_path: Path, is_resumed: bool
) -> None:
    units = units_of({"name": "good"}, {"name": "bad", "wrong": 2})
    path = tmp_path / "progress.json"
    if is_resumed:
        assert 2 in tactics_of(tune(units, tmp_path)).values()

    result = tune(units, tmp_path, check_outputs=True, resume=path if is_resumed else None)

    assert result.failed == ()
    assert set(result.rejected) == {Tactic("faults::bad", "FaultyRunner", 2)}
    assert set(tactics_of(result).values()) == {0}
    assert result.tuned == (3 if is_resumed else 6)
    assert replayed(units, result, tmp_path).missed == ()


def test_r24_of_two_ops_in_a_call_only_the_wrong_one_loses_its_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = units_of({"name": "good", "costs": "rank"}, {"name": "bad", "wrong": 3}, buckets=[2])
    good, bad = (calls.prepare(unit, CPU) for unit in units)
    monkeypatch.setattr(tuning, "prepare", lambda unit, device: lambda: (good(), bad()))

    result = tune(units[:1], tmp_path, check_outputs=True)

    assert result.rejected == (Tactic("faults::bad", "FaultyRunner", 3),)
    assert result.failed == ()
    assert len(tactics_of(result)) == 2


def test_r24_a_unit_of_which_every_tactic_is_wrong_has_failed(tmp_path: Path) -> None:
    result = tune(units_of({"wrong": 0, "tactics": 1}, buckets=[1]), tmp_path, check_outputs=True)

    assert "all are excluded" in result.failed[0]
    assert (result.tuned, tactics_of(result)) == (0, {})


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.001], True),
        ([1.0, 2.0], [1.0, 2.01], False),
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1.0, float("nan")], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, float("inf")], False),
        ([1.0, float("inf")], [1.0, float("-inf")], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e-3, 0.0], [0.0, 0.0], False),
        ([], [], True),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_r24_outputs_agree_up_to_what_their_type_can_hold(one: list[float], other: list[float], expected: bool) -> None:
    assert agree(torch.tensor(one), torch.tensor(other)) is expected
    assert agree((torch.tensor(one), None), (torch.tensor(other), None)) is expected


def test_r24_bfloat16_may_differ_by_its_rounding_and_integers_not_at_all() -> None:
    exact = torch.linspace(-4, 4, 1000)

    assert agree(exact.bfloat16(), (exact * 1.004).bfloat16())
    assert not agree(exact.bfloat16(), exact.flip(0).bfloat16())
    assert not agree(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_a_call_that_raises_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match=r"calls\[0\] faults\.op M=1 failed: LookupError: the very cause"):
        tune(units_of({"error": "the very cause"}), tmp_path)


def test_r11_a_winner_that_its_kernel_refuses_fails_under_its_key(tmp_path: Path) -> None:
    units = units_of({"name": "good"}, {"name": "bad"}, buckets=[1, 2])
    result = tune(units, tmp_path)
    v1 = tmp_path / "rank0.json"
    content = json.loads(result.v1)
    (key,) = [key for key in content if "faults::bad" in key and "(2, 4)" in key]
    content[key][1] = 77
    v1.write_text(json.dumps(content))

    found = replay.replay(units, CPU, v1, None, lambda _progress: None)

    assert found.failed == (f"{key} with FaultyRunner 77: ValueError: no tactic 77",)
    assert (found.hits, found.missed, found.profiled) == (4, (), 0)


def test_r126_a_bundle_that_misses_is_reported_with_the_exact_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = units_of({"rank_in_key": True}, buckets=[1, 4])
    result = tune(units, tmp_path)
    monkeypatch.setenv("RANK", "3")

    found = replayed(units, result, tmp_path)

    assert found.hits == 0
    assert found.missed == (
        "('faults::op', 'FaultyRunner', ((1, 4),), (3,))",
        "('faults::op', 'FaultyRunner', ((4, 4),), (3,))",
    )
    assert found.profiled == 0


def test_r21_a_bucket_that_was_not_tuned_is_missed_under_the_key_that_a_server_asks_for(tmp_path: Path) -> None:
    result = tune(units_of({}, buckets=[4, 6]), tmp_path, check_outputs=True)

    found = replayed(units_of({}, buckets=[4, 8]), result, tmp_path)

    assert len(tactics_of(result)) == 2
    assert found.missed == ("('faults::op', 'FaultyRunner', ((8, 4),), ())",)


def test_r24_a_wrong_winner_is_found_at_a_bucket_off_the_grid_too(tmp_path: Path) -> None:
    result = tune(units_of({"wrong": 2}, buckets=[6]), tmp_path, check_outputs=True)

    assert result.rejected == (Tactic("faults::op", "FaultyRunner", 2),)


def test_r13_a_file_of_another_environment_is_named_by_the_field(tmp_path: Path) -> None:
    units = units_of({})
    result = tune(units, tmp_path)
    content = json.loads(result.v1)
    content["_metadata"]["cudnn_version"] = "1"
    v1 = tmp_path / "rank0.json"
    v1.write_text(json.dumps(content))

    found = replay.replay(units, CPU, v1, None, lambda _progress: None)

    (missed,) = found.missed
    here = installation.collect_metadata(CPU)["cudnn_version"]
    assert f"FlashInfer refuses rank0.json: cudnn_version is '1' there and {here!r} here (hard)" in missed
    assert found.hits == 0


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"key": 7}'])
def test_a_file_that_cannot_be_read_misses_every_key(tmp_path: Path, content: bytes | None) -> None:
    v1 = tmp_path / "rank0.json"
    if content is not None:
        v1.write_bytes(content)

    found = replay.replay(units_of({}), CPU, v1, None, lambda _progress: None)

    (missed,) = found.missed
    assert missed.startswith("every key: ")
    assert "rank0.json" in missed


@needs_store
def test_a_store_without_an_entry_misses_it_though_the_file_has_it(tmp_path: Path) -> None:
    units = units_of({}, buckets=[1, 2])
    result = tune(units, tmp_path)
    replayed(units, result, tmp_path)
    key = "('faults::op', 'FaultyRunner', ((2, 4),), ())"
    (entry,) = [path for path in (tmp_path / "store").rglob("entries/*.json") if key in path.read_text()]
    entry.unlink()

    found = replay.replay(units, CPU, tmp_path / "rank0.json", tmp_path / "store", lambda _progress: None)

    assert (found.hits, found.missed) == (3, (key,))


def test_r25_what_a_replay_builds_is_named_and_a_second_replay_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = units_of({"builds": True}, buckets=[1])
    result = tune(units, tmp_path)
    (tmp_path / "cached_ops" / "faults" / "op-0.so").unlink()

    def prepare(unit: Unit, device: torch.device) -> Callable[[], Any]:
        (tmp_path / "cached_ops" / "module.lock").touch()  # as FlashInfer's every use of a module does
        return calls.prepare(unit, device)

    monkeypatch.setattr(replay, "prepare", prepare)

    first = replayed(units, result, tmp_path)
    second = replayed(units, result, tmp_path)

    assert first.built == ("faults/op-0.so",)
    assert second.built == ()


def test_r22_a_call_that_tunes_nothing_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "prepare", lambda unit, device: lambda: torch.zeros(1))

    result = tune(units_of({}), tmp_path, check_outputs=True)

    assert (result.tuned, result.measured, result.failed) == (0, 0, ())


def lockstep(units: Sequence[Unit], directory: Path, options: dict[str, Any], say: Callable[[Any], None]) -> TuneResult:
    return tune(units, directory, group=gloo_group(directory), **options)


def alone(units: Sequence[Unit], directory: Path, say: Callable[[Any], None]) -> TuneResult:
    return tune(units, directory)


@pytest.mark.parametrize("world_size", [2, 4])
def test_r8_r9_ranks_in_a_group_choose_alike_though_each_prefers_another_tactic(
    tmp_path: Path, processes: TunerProcesses, world_size: int
) -> None:
    units = units_of({"costs": "rank", "tactics": 7})

    ends = processes.run(lockstep, units, tmp_path, {}, world_size=world_size)

    assert [end.error for end in ends] == [None] * world_size
    first, *others = (end.value for end in ends)
    assert all((other.v1, other.store) == (first.v1, first.store) for other in others)
    assert first.tuned == 3


def test_r8_ranks_without_a_group_choose_differently(tmp_path: Path, processes: TunerProcesses) -> None:
    units = units_of({"costs": "rank", "tactics": 7}, buckets=[1])

    one, other = (end.value for end in processes.run(alone, units, tmp_path, world_size=2))

    assert tactics_of(one) != tactics_of(other)


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ({"raises": "most"}, {}),
        ({}, {"excluded": (Tactic("faults::op", "FaultyRunner", 0),)}),
        ({"wrong": 1}, {"check_outputs": True}),
        ({"raises": "all"}, {"check_outputs": True}),
    ],
    ids=["tactics fail", "a tactic is excluded", "a winner is rejected", "no tactic runs"],
)
def test_a_group_stays_in_step_where(
    tmp_path: Path, processes: TunerProcesses, fault: dict[str, Any], options: dict[str, Any]
) -> None:
    units = units_of({**fault, "name": "op", "costs": "rank"}, {"name": "next"})

    ends = processes.run(lockstep, units, tmp_path, options, world_size=2)

    assert [end.error for end in ends] == [None, None]
    one, other = (end.value for end in ends)
    assert (one.v1, one.failed, one.rejected) == (other.v1, other.failed, other.rejected)
    assert len([key for key in tactics_of(one) if "faults::next" in key]) == 3


def excluding_on_rank_0(directory: Path, say: Callable[[Any], None]) -> TuneResult:
    excluded = (Tactic("faults::op", "FaultyRunner", 0),) if os.environ["RANK"] == "0" else ()
    return tune(units_of({}), directory, group=gloo_group(directory), excluded=excluded)


def test_r18_a_tactic_that_only_one_rank_excludes_is_taken_by_none(tmp_path: Path, processes: TunerProcesses) -> None:
    ends = processes.run(excluding_on_rank_0, tmp_path, world_size=2)

    assert [end.error for end in ends] == [None, None]
    assert [set(tactics_of(end.value).values()) for end in ends] == [{1}, {1}]


def wrong_on_rank_1(directory: Path, say: Callable[[Any], None]) -> TuneResult:
    wrong = {"wrong": 0} if os.environ["RANK"] == "1" else {}
    return tune(units_of(wrong), directory, group=gloo_group(directory), check_outputs=True)


def test_r24_a_winner_that_is_wrong_on_one_rank_is_rejected_on_all(tmp_path: Path, processes: TunerProcesses) -> None:
    ends = processes.run(wrong_on_rank_1, tmp_path, world_size=2)

    assert [end.error for end in ends] == [None, None]
    one, other = (end.value for end in ends)
    assert one.rejected == other.rejected == (Tactic("faults::op", "FaultyRunner", 0),)
    assert one.v1 == other.v1
    assert set(tactics_of(one).values()) == {1}


@pytest.mark.parametrize(
    ("spec", "shape", "strides"),
    [
        (TensorSpec("bfloat16", ("M", 64)), (8, 64), (64, 1)),
        (TensorSpec("float8_e4m3fn", (1, 64, 32), "column_major"), (1, 64, 32), (2048, 1, 64)),
        (TensorSpec("float8_e5m2", ("M", 64)), (8, 64), (64, 1)),
        (TensorSpec("float32", (1,)), (1,), (1,)),
        (TensorSpec("float32", ()), (), ()),
        (TensorSpec("int32", ("M", 4)), (8, 4), (4, 1)),
    ],
    ids=str,
)
def test_tensors_are_as_declared_random_and_the_same_each_time(
    spec: TensorSpec, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    tensor = calls.make_tensor(spec, 8, CPU, seed=3)

    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, strides, getattr(torch, spec.dtype))
    numbers = tensor.double().flatten()
    assert torch.equal(numbers, calls.make_tensor(spec, 8, CPU, seed=3).double().flatten())
    assert not torch.equal(numbers, calls.make_tensor(spec, 8, CPU, seed=4).double().flatten())
    if numbers.numel() == 1:
        assert 0.5 <= numbers.item() <= 1.5
    else:
        assert numbers.std() > 0.5
        assert (numbers == 0).double().mean() < 0.05


def test_r17_no_more_memory_is_allocated_than_the_plan_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec("float8_e4m3fn", ("M", 4096))
    asked: list[int] = []
    stock = torch.randn

    def randn(shape: torch.Size, **options: Any) -> Any:
        asked.append(shape.numel())
        return stock(shape, **options)

    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(calls, "_CHUNK", 1 << 12)

    tensor = calls.make_tensor(spec, 32, CPU, seed=0)

    assert tensor.untyped_storage().nbytes() == spec.num_bytes(32)
    assert max(asked) == 1 << 12


def test_a_call_that_no_package_brings_is_refused() -> None:
    with pytest.raises(PlanError, match=r"No installed package brings the call nobody\.knows"):
        calls.prepare(Unit(0, Call("nobody.knows", {}), 1), CPU)


def test_r23_a_function_that_this_flashinfer_lacks_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer

    monkeypatch.delattr(flashinfer, "mm_bf16")
    specs = {"a": TensorSpec("bfloat16", ("M", 8)), "b": TensorSpec("bfloat16", (8, 8), "column_major")}

    with pytest.raises(UnavailableError, match=r"This FlashInfer has no flashinfer\.mm_bf16"):
        calls.prepare(Unit(0, Call("flashinfer.mm_bf16", specs), 1), CPU)


@pytest.mark.parametrize(
    "problem", [ImportError("no cuda.bindings"), AssertionError("not compiled"), RuntimeError("x")]
)
def test_r23_flashinfer_that_cannot_be_imported_is_explained(
    monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def refuse(_name: str) -> None:
        raise problem

    monkeypatch.setattr(installation, "importlib", SimpleNamespace(import_module=refuse))

    with pytest.raises(UnavailableError, match=f"{type(problem).__name__}: {problem}.*cuda-python"):
        installation.import_flashinfer()


def test_r23_flashinfer_is_imported_on_a_build_of_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_compiled(_device: int) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    def like_flashinfer_0_6_18(name: str) -> str:
        try:
            torch.cuda.get_device_properties(0)
        except (ImportError, RuntimeError):
            return name
        return ""

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", not_compiled)
    monkeypatch.setattr(installation, "importlib", SimpleNamespace(import_module=like_flashinfer_0_6_18))

    assert installation.import_flashinfer() == "flashinfer"
    assert torch.cuda.get_device_properties is not_compiled
