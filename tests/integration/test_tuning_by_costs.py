"""Which winners come out of FlashInfer's real AutoTuner when a table says what each tactic costs at each bucket."""

import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from initwarm.entries import V1File, encode_v1, op_of, parse_v1
from initwarm.errors import UnavailableError
from initwarm.hostplan import host_plan
from initwarm.plan import Call, TensorSpec, Unit
from initwarm.store import parse_store

with warnings.catch_warnings():
    # FlashInfer uses what its own dependencies have deprecated.
    warnings.simplefilter("ignore")
    import flashinfer
    import torch
    import tqdm
    from flashinfer.autotuner import AutoTuner, TunableRunner

    from initwarm.edges import hostops, tuning
    from initwarm.edges.installation import features
    from initwarm.edges.outputs import agree
    from initwarm.edges.replay import replay
    from initwarm.edges.tuning import Tactic, TuneResult

CPU = torch.device("cpu")
OP = "tests::table"
#: Milliseconds of each tactic at each bucket; no two buckets have the same winner.
COSTS = {1: (1, 2, 3, 4), 2: (4, 1, 2, 3), 4: (3, 4, 1, 2), 8: (2, 3, 4, 1)}
WINNERS = {1: 0, 2: 1, 4: 2, 8: 3}


class TableRunner(TunableRunner):  # type: ignore[misc]
    """Doubles its input, but for the tactic that is wrong."""

    timed: list[tuple[int, int]]
    wrong: int | None

    def __init__(self) -> None:
        self.timed = []
        self.wrong = None

    def __hash__(self) -> int:
        return hash(type(self).__name__)

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[int]:
        return list(range(4))

    def host_time(self, inputs: list[torch.Tensor], tactic: int) -> float:
        num_tokens = inputs[0].shape[0]
        self.timed.append((num_tokens, tactic))
        return COSTS[num_tokens][tactic] * 1e-3

    def forward(self, inputs: list[torch.Tensor], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        return inputs[0] * (3 if tactic == self.wrong else 2)


runner = TableRunner()


def recipe(unit: Unit, device: torch.device) -> Callable[[], Any]:
    x = torch.ones(unit.bucket, 4, device=device)

    def call() -> Any:
        chosen, tactic = AutoTuner.get().choose_one(OP, [runner], hostops._BY_TOKENS, [x])
        return chosen([x], tactic=tactic)

    return call


@pytest.fixture(autouse=True)
def _leaves_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tuner, the table runner and what `quiet` does are of one test alone; the call is found as a plug-in."""
    monkeypatch.setattr(AutoTuner, "_instance", None)
    if not torch.cuda.is_available():
        # Also undoes what `install` does.
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for logger in flashinfer_loggers():
        monkeypatch.setattr(logger, "handlers", list(logger.handlers))
        monkeypatch.setattr(logger, "propagate", logger.propagate)
    monkeypatch.setattr(tqdm.tqdm, "__init__", tqdm.tqdm.__init__)
    runner.timed, runner.wrong = [], None
    package = tmp_path_factory.mktemp("site")
    info = package / "initwarm_table-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: initwarm-table\nVersion: 0\n")
    points = [f"tests.table = {__name__}:recipe", "tests.broken = no_such_module_anywhere:recipe"]
    (info / "entry_points.txt").write_text("\n".join(["[initwarm.calls]", *points]))
    monkeypatch.syspath_prepend(str(package))


def flashinfer_loggers() -> Sequence[logging.Logger]:
    return (importlib.import_module("flashinfer.jit.core").logger, logging.getLogger("flashinfer"))


@pytest.fixture
def group_of_one() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def units(call: str = "tests.table") -> tuple[Unit, ...]:
    whole = Call(call, {}, buckets=tuple(COSTS))
    return tuple(Unit(0, whole, bucket) for bucket in whole.buckets)


def matmul_units() -> tuple[Unit, ...]:
    tensors = {"a": TensorSpec("float32", ("M", 64)), "b": TensorSpec("float32", (64, 64))}
    whole = Call("initwarm.host_matmul", tensors, buckets=(1, 2))
    return tuple(Unit(0, whole, bucket) for bucket in whole.buckets)


def tune(directory: Path, of: Sequence[Unit] | None = None, **options: Any) -> TuneResult:
    given: dict[str, Any] = {
        "excluded": (),
        "group": None,
        "resume": None,
        "save_to": directory / "partial.json",
        "check_outputs": False,
        "report": lambda _: None,
    }
    return tuning.tune(units() if of is None else of, CPU, **{**given, **options})


def changed(v1: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    file = parse_v1(v1)
    entries = dict(file.entries)
    change(entries)
    return encode_v1(V1File(file.metadata, entries, file.records))


def winners(v1: bytes) -> dict[int, Any]:
    """By bucket; a key begins with (op, runner, ((bucket, ...."""
    return {int(key.split("((")[1].split(",")[0]): entry[1] for key, entry in parse_v1(v1).entries.items()}


def key_of(v1: bytes, bucket: int) -> str:
    (key,) = (key for key in parse_v1(v1).entries if f"(({bucket}," in key)
    return key


def test_each_bucket_gets_its_fastest_tactic(tmp_path: Path) -> None:
    result = tune(tmp_path)

    assert winners(result.v1) == WINNERS
    assert runner.timed == [(bucket, tactic) for bucket in COSTS for tactic in range(4)]
    assert (result.tuned, result.measured) == (4, 16)


def test_flashinfer_loads_the_file_of_the_host_plan_whole(tmp_path: Path) -> None:
    plan = host_plan().units_of(0)
    result = tune(tmp_path, plan)
    path = tmp_path / "v1.json"
    path.write_bytes(result.v1)
    AutoTuner._instance = None

    assert AutoTuner.get().load_configs(str(path)) is True

    entries = parse_v1(result.v1).entries
    assert set(AutoTuner.get()._file_configs) == set(entries)
    assert len(entries) == len(plan)
    assert {op_of(key) for key in entries} == {hostops.MATMUL_OP, hostops.SOFTMAX_OP}


def test_the_file_is_byte_for_byte_what_the_codec_writes(tmp_path: Path) -> None:
    v1 = tune(tmp_path).v1

    assert encode_v1(parse_v1(v1)) == v1


def test_r20_only_the_unit_that_is_missing_is_measured(tmp_path: Path) -> None:
    whole = tune(tmp_path)
    partial = tmp_path / "partial.json"
    partial.write_bytes(changed(whole.v1, lambda entries: entries.pop(key_of(whole.v1, 4))))
    runner.timed.clear()

    result = tune(tmp_path, resume=partial)

    assert runner.timed == [(4, tactic) for tactic in range(4)]
    assert (result.tuned, result.measured) == (1, 4)
    assert winners(result.v1) == WINNERS


def test_r18_excluded_tactics_give_way_to_the_fastest_of_the_others(tmp_path: Path) -> None:
    result = tune(tmp_path, excluded=[Tactic(OP, "TableRunner", 1), Tactic(OP, "TableRunner", 3)])

    assert {tactic for _, tactic in runner.timed} == {0, 2}
    assert winners(result.v1) == {1: 0, 2: 2, 4: 2, 8: 0}


def test_r18_a_tactic_is_excluded_of_its_own_op_and_runner_alone(tmp_path: Path) -> None:
    result = tune(tmp_path, excluded=[Tactic("other::op", "TableRunner", 0), Tactic(OP, "OtherRunner", 0)])

    assert winners(result.v1) == WINNERS


@pytest.mark.parametrize("is_resumed", [False, True])
def test_r24_a_wrong_winner_gives_way_to_the_next_fastest(tmp_path: Path, is_resumed: bool) -> None:
    partial = tmp_path / "partial.json"
    if is_resumed:
        partial.write_bytes(tune(tmp_path).v1)
        runner.timed.clear()
    runner.wrong = 2

    result = tune(tmp_path, resume=partial if is_resumed else None, check_outputs=True)

    assert winners(result.v1) == {1: 0, 2: 1, 4: 3, 8: 3}
    assert result.rejected == (Tactic(OP, "TableRunner", 2),)
    assert result.tuned == (1 if is_resumed else 4)
    if is_resumed:
        assert runner.timed == [(4, 0), (4, 1), (4, 3)]
    if result.store is not None:
        assert {entry["tactic"] for entry in parse_store(result.store).entries.values()} == {0, 1, 3}


@pytest.mark.skipif(not features().has_process_group, reason="this FlashInfer has no tuning group")
def test_r9_a_group_of_one_has_the_winners_of_a_rank_alone(tmp_path: Path, group_of_one: Any) -> None:
    result = tune(tmp_path, group=group_of_one, check_outputs=True, excluded=[Tactic(OP, "TableRunner", 0)])

    assert winners(result.v1) == {1: 1, 2: 1, 4: 2, 8: 3}
    assert (result.failed, result.tuned) == ((), 4)
    assert flashinfer.autotuner.get_autotune_process_group() is None


def test_r11_the_host_ops_refuse_a_tactic_that_they_do_not_have(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"

    def forge(entries: dict[str, Any]) -> None:
        for entry in entries.values():
            entry[1] = 77

    path.write_bytes(changed(tune(tmp_path, matmul_units()).v1, forge))

    failed = replay(matmul_units(), CPU, path, None, lambda _: None).failed

    assert len(failed) == 2
    assert all(" 77: " in one for one in failed)


def test_a_call_whose_package_does_not_import_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"The call tests\.broken cannot be imported from no_such_module"):
        tune(tmp_path, units("tests.broken"))


def test_r23_features_are_those_of_the_installed_flashinfer() -> None:
    found = features()

    assert found.flashinfer_version == flashinfer.__version__
    assert found.has_process_group == hasattr(flashinfer.autotuner, "set_autotune_process_group")
    assert found.has_store == hasattr(flashinfer, "autotune_v2")
    assert found.rank_free_moe == (not found.flashinfer_version.startswith(("0.6.", "0.7.0", "0.7.1")))


def test_r89_log_lines_and_bars_stay_off_the_streams(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for logger in flashinfer_loggers():
        logger.handlers = [*logger.handlers, logging.StreamHandler(sys.stderr)]
        logger.propagate = True
    path = tmp_path / "rank0.json"

    v1 = tune(tmp_path, excluded=[Tactic(OP, "TableRunner", 1)], check_outputs=True).v1
    path.write_bytes(changed(v1, lambda entries: entries.pop(key_of(v1, 8))))
    missed = replay(units(), CPU, path, None, lambda _: None).missed

    assert missed == (key_of(v1, 8),)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_r24_coarser_types_may_differ_more(dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}.get(dtype, 0.15)
    base = torch.tensor([-1.0, 1.0], dtype=torch.float64)

    assert agree((base * (1 + tolerance / 2)).to(dtype), base.to(dtype))
    assert not agree((base * (1 + tolerance * 2)).to(dtype), base.to(dtype))
    assert not agree(base.to(dtype), base.to(torch.int64))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([float("inf"), 1.0], [3e38, 1.0], False),
        ([float("nan"), 1.0], [1.0, float("nan")], False),
        ([float("nan"), 1.0], [float("inf"), 1.0], False),
        ([1e-3, 2.0], [2.9e-3, 2.0], True),
        ([1.0], [[1.0]], False),
    ],
)
def test_r24_outputs_agree_only_where_they_are_finite_alike(one: Any, other: Any, expected: bool) -> None:
    assert agree(torch.tensor(one), torch.tensor(other)) is expected
    assert agree(torch.tensor(other), torch.tensor(one)) is expected


def test_r24_sequences_agree_one_by_one_and_a_missing_output_disagrees() -> None:
    whole = torch.tensor([1, 2])

    assert agree((whole, [whole]), (whole.clone(), [whole.clone()]))
    assert not agree((whole, whole), (whole,))
    assert not agree([whole, whole], [whole, whole + 1])
    assert not agree(whole, None)
    assert not agree((whole, None), (whole, whole))
