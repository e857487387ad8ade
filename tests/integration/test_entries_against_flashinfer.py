"""The codecs against the installed FlashInfer: the same bytes, and files that it loads."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from initwarm.entries import V1File, encode_v1, merge_v1, parse_v1
from initwarm.identity import differences
from initwarm.store import encode_store, merge_store, pack_store, parse_store, unpack_store

# One process writes everything that the tests look at, since importing FlashInfer takes seconds.
WRITE = """
import contextlib, json, sys
from pathlib import Path
import torch
from flashinfer.autotuner import AutoTuner
import flashinfer.autotuner as package
module = sys.modules[AutoTuner.__module__]
from flashinfer.autotune_cache import ManagedAutotuneCache

out = Path(sys.argv[1])
tuner = AutoTuner.get()
if not hasattr(tuner, "_file_config_selections"):
    sys.exit(0)
metadata = module._collect_metadata()
policy = ["cuda_graph_profile_replays", None, "l2_cache_policy", "cold-chain:8"]
chosen = {"time_ms": 0.012345, "runner_up_ms": None, "margin": -0.001, "candidates": 7}
def shapes(bucket):
    return ((1, bucket, 8192), (1, 8192, 2560), (1,), (-1,))
def key(op, runner, bucket, extras=()):
    return (op, runner, shapes(bucket), extras)
keys = [
    (key("fp8_gemm", "CutlassFp8GemmRunner", 512), 3),
    (key("fp8_gemm", "CublasFp8GemmRunner", 16, (torch.float8_e4m3fn, True, None, "Gru\\u00df")), [128, [1, 2], -1]),
    (key("trtllm::fused_moe::gemm1", "MoERunner", 8192), -1),
]
for rank in (0, 1):
    tuner.clear_cache()
    for number, (name, tactic) in enumerate(keys):
        if number != 2 or rank:
            text = str(name)
            tuner._file_configs[text] = (name[1], module._json_to_tactic(tactic))
            if number:
                tuner._file_config_policies[text] = tuple(policy)
            if number == 2:
                tuner._file_config_selections[text] = chosen
    if rank:
        tuner.publish_namespaced_records("megamoe", {"b": [1.5, None], "a": {"z": 1, "y": "\\u00e9"}})
    tuner.save_configs(str(out / f"rank{rank}.json"))
    store = ManagedAutotuneCache(metadata, out / f"store{rank}")
    for number, (name, tactic) in enumerate(keys):
        if number != 2 or rank:
            measured = tuple(policy) if number else None
            store.publish(str(name), name[1], tactic, key_fields=name, profiling_policy=measured)
(out / "metadata.json").write_text(json.dumps(metadata))
"""
LOAD = """
import json, sys
from pathlib import Path
from flashinfer.autotuner import AutoTuner
module = sys.modules[AutoTuner.__module__]
from flashinfer.autotune_cache import ManagedAutotuneCache
tuner, out, found = AutoTuner.get(), Path(sys.argv[1]), {}
for path in sorted(out.glob("*.json")):
    if path.name != "metadata.json":
        tuner.clear_cache()
        found[path.name] = [tuner.load_configs(str(path)), len(tuner._file_configs)]
store = ManagedAutotuneCache(module._collect_metadata(), out / "merged-store")
_, total, skipped = store.preload()
found["store"] = [total, skipped]
cases = json.loads((out / "cases").read_text())
current = module._collect_metadata()
found["classified"] = [[sorted(part) for part in module._classify_metadata_mismatches(case, current)] for case in cases]
print(json.dumps(found))
"""


def flashinfer(code: str, *arguments: str) -> str:
    """Run code where FlashInfer is installed, without a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs FlashInfer")
    out = tmp_path_factory.mktemp("flashinfer")
    flashinfer(WRITE, str(out))
    if not (out / "metadata.json").exists():
        pytest.skip("needs a FlashInfer that records how a winner was chosen (0.7.4)")
    return out


def store_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_of_flashinfer_is_encoded_to_its_own_bytes(written: Path, rank: int) -> None:
    data = (written / f"rank{rank}.json").read_bytes()

    assert encode_v1(parse_v1(data)) == data


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_of_flashinfer_is_unpacked_to_its_own_bytes(written: Path, rank: int) -> None:
    files = store_files(written / f"store{rank}")

    assert unpack_store(parse_store(encode_store(pack_store(files)))) == files


def test_flashinfer_loads_what_was_merged_and_classifies_metadata_alike(written: Path, tmp_path: Path) -> None:
    metadata = json.loads((written / "metadata.json").read_text())
    files = [parse_v1((written / f"rank{rank}.json").read_bytes()) for rank in (0, 1)]
    merged, found = merge_v1(files)
    packs = [pack_store(store_files(written / f"store{rank}")) for rank in (0, 1)]
    first = next(iter(metadata))
    cases: list[dict[str, Any]] = [
        {**metadata, first: "another"},
        {**metadata, first: "*", "untracked": "x"},
        {**metadata, first: None},
        {**metadata, first: "None"},
        {},
    ]
    (tmp_path / "cases").write_text(json.dumps(cases))
    (tmp_path / "merged.json").write_bytes(encode_v1(merged))
    (tmp_path / "hard.json").write_bytes(encode_v1(V1File({**metadata, first: "another"}, merged.entries)))
    for name, data in unpack_store(merge_store(packs, merged)).items():
        path = tmp_path / "merged-store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    answers = json.loads(flashinfer(LOAD, str(tmp_path)))

    assert found == ()
    assert answers["merged.json"] == [True, 3]
    assert answers["hard.json"] == [False, 0]
    assert answers["store"] == [3, 0]
    assert answers["classified"] == [
        [sorted(one.field for one in differences(case, metadata) if one.kind == kind) for kind in ("hard", "soft")]
        for case in cases
    ]
