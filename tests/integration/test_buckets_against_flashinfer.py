"""The grid against the installed FlashInfer: the same buckets, and the same rounding of every token count."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from initwarm.buckets import coverage, hybrid_bucket, hybrid_buckets

GREATEST = 16384
MAXIMA = sorted({*range(1, GREATEST + 1, 97), *hybrid_buckets(GREATEST), 6000, 10000})

# In a process of its own, since importing FlashInfer takes seconds and a GPU's driver with it.
ASK = """
import json, sys
from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets, map_to_hybrid_bucket_uncapped
from flashinfer.gemm import gemm_base

greatest, maxima = json.loads(sys.argv[1])
answer = {
    "buckets": [[int(bucket) for bucket in get_hybrid_num_tokens_buckets(maximum)] for maximum in maxima],
    "mapped": [int(map_to_hybrid_bucket_uncapped(number)) for number in range(1, greatest + 1)],
    "calls": {
        name: [
            [[int(bucket) for bucket in spec.gen_tuning_buckets(greatest)] for spec in specs],
            [[int(spec.map_to_tuning_buckets(number)) for number in range(1, greatest + 1)] for spec in specs],
        ]
        for name, specs in (
            ("bmm_fp8", gemm_base._FP8_GEMM_SM100_TUNING_CONFIG.dynamic_tensor_specs),
            ("mm_bf16", gemm_base._BF16_GEMM_SM100_TUNING_CONFIG.dynamic_tensor_specs),
        )
    },
}
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def flashinfer() -> Any:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    command = [sys.executable, "-c", ASK, json.dumps([GREATEST, MAXIMA])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=100)
    return json.loads(done.stdout.splitlines()[-1])


def test_r15_buckets_are_those_that_flashinfer_tunes(flashinfer: Any) -> None:
    theirs = dict(zip(MAXIMA, map(tuple, flashinfer["buckets"]), strict=True))

    assert theirs == {maximum: hybrid_buckets(maximum) for maximum in MAXIMA}


def test_r15_every_token_count_is_rounded_as_flashinfer_rounds_it(flashinfer: Any) -> None:
    assert flashinfer["mapped"] == [hybrid_bucket(number) for number in range(1, GREATEST + 1)]


@pytest.mark.parametrize("call", ["bmm_fp8", "mm_bf16"])
def test_r15_the_bucket_that_a_call_looks_up_is_one_that_it_tunes_for_every_token_count(
    flashinfer: Any, call: str
) -> None:
    (tuned,), (looked_up,) = flashinfer["calls"][call]

    missed = [number for number, bucket in enumerate(looked_up, start=1) if bucket not in tuned]

    assert missed == []
    assert tuple(tuned) == hybrid_buckets(GREATEST)
    assert looked_up == [hybrid_bucket(number) for number in range(1, GREATEST + 1)]


@pytest.mark.parametrize("greatest", [6000, 10000, 16000])
def test_r15_what_flashinfer_misses_below_a_maximum_off_the_grid_is_what_coverage_names(
    flashinfer: Any, greatest: int
) -> None:
    tuned = hybrid_buckets(greatest)

    missed = [number for number, bucket in enumerate(flashinfer["mapped"][:greatest], start=1) if bucket not in tuned]

    assert missed
    assert missed == [number for gap in coverage(tuned, greatest) for number in range(gap.first, gap.last + 1)]
