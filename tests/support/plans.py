"""Plan documents for tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from initwarm.plan import Plan
from initwarm.planfile import parse_plan

SOURCE = "plan.json"
REMOVED = object()

HOST_MATMUL: dict[str, Any] = {
    "call": "initwarm.host_matmul",
    "args": {"a": {"dtype": "float32", "shape": ["M", 8]}, "b": {"dtype": "float32", "shape": [8, 4]}},
    "buckets": [1, 2],
}
BMM_FP8: dict[str, Any] = {
    "call": "flashinfer.bmm_fp8",
    "args": {
        "A": {"dtype": "float8_e4m3fn", "shape": [1, "M", 8192]},
        "B": {"dtype": "float8_e4m3fn", "shape": [1, 8192, 2560], "layout": "column_major"},
        "A_scale": {"dtype": "float32", "shape": [1]},
        "B_scale": {"dtype": "float32", "shape": [1]},
        "dtype": "bfloat16",
    },
    "buckets": {"max": 8192},
}
MM_BF16: dict[str, Any] = {
    "call": "flashinfer.mm_bf16",
    "args": {
        "a": {"dtype": "bfloat16", "shape": ["M", 512]},
        "b": {"dtype": "bfloat16", "shape": [512, 256], "layout": "column_major"},
    },
    "buckets": [16, 32],
}
#: A call that another package brings.
ACME_OP: dict[str, Any] = {
    "call": "acme.op",
    "args": {"x": {"dtype": "int32", "shape": ["M"]}, "alpha": 0.5},
    "buckets": [1],
}
EXTRA_CALLS = frozenset(["acme.op"])


def document(*calls: dict[str, Any], device: str = "cpu", **fields: Any) -> dict[str, Any]:
    """A plan document with these calls."""
    return {"version": 1, "device": device, **fields, "calls": list(calls)}


def parse(value: Any) -> Plan:
    """Read a document."""
    return parse_plan(json.dumps(value), SOURCE, EXTRA_CALLS)


def changed(value: Any, path: Iterable[str | int], new: Any) -> Any:
    """A copy with another value at this path, or with none."""
    value = copy.deepcopy(value)
    *parents, last = path
    place = value
    for key in parents:
        place = place[key]
    if new is REMOVED:
        del place[last]
    else:
        place[last] = new
    return value


def plan_file(directory: Path, *calls: dict[str, Any], name: str = "plan.json") -> list[str]:
    """Flags for a plan of faulty ops; buckets of 1 to 4 tokens unless a call says otherwise."""
    document = {
        "version": 1,
        "device": "cpu",
        "calls": [
            {
                "call": "faults.op",
                "buckets": call.pop("buckets", {"max": 4}),
                "rank_free": not call.get("rank_in_key", False),
                **{key: call.pop(key) for key in ("ranks", "collectives") if key in call},
                "args": call,
            }
            for call in map(dict, calls)
        ],
    }
    path = directory / name
    path.write_text(json.dumps(document))
    return ["--plan", str(path)]
