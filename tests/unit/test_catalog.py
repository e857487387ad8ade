from __future__ import annotations

import json
from typing import Any

from initwarm.bundle import V1_FILE, Place
from initwarm.catalog import (
    Contents,
    Finding,
    IdentitySummary,
    contents_as_json,
    findings_as_json,
    render_contents,
    render_findings,
    summarise_bundle,
)
from initwarm.entries import V1File
from initwarm.verification import Examined
from tests.support.bundles import IDENTITY, METADATA, PLAN, bundle_files, bundle_of, key, store_pack, v1_file

PLACE = Place(IDENTITY.digest, PLAN, 3, "c" * 64)


def examined(v1: V1File, **changes: Any) -> Examined:
    return Examined(**{"bundle": bundle_of(bundle_files(v1)), "v1": v1, "store": store_pack(v1), **changes})


def contents(found: Examined) -> Contents:
    bundle = summarise_bundle(PLACE, found)
    return Contents("/cache", (IdentitySummary(IDENTITY.digest, METADATA, None, (bundle,)),), {}, 0)


def selected(margin: Any) -> dict[str, Any]:
    return {"time_ms": 1.0, "runner_up_ms": 1.01, "margin": margin, "candidates": 12}


def test_r10_near_ties_are_counted_and_the_closest_listed() -> None:
    v1 = v1_file({key(bucket=bucket): bucket for bucket in range(30)})
    for bucket in range(30):
        v1.entries[key(bucket=bucket)].append(selected(bucket / 1000))

    bundle = summarise_bundle(PLACE, examined(v1))

    assert (bundle.ops[0].near_ties, bundle.ops[0].margins, bundle.ops[0].smallest_margin) == (30, 30, 0.0)
    assert [tie.margin for tie in bundle.near_ties] == [number / 1000 for number in range(10)]
    assert "near tie +0.30%: Cutlass 3 for" in render_contents(contents(examined(v1)))


def test_a_clear_winner_is_no_near_tie() -> None:
    v1 = v1_file({key(): 1})
    v1.entries[key()].append(selected(0.5))

    bundle = summarise_bundle(PLACE, examined(v1))

    assert (bundle.ops[0].near_ties, bundle.near_ties) == (0, ())


def test_margins_of_another_kind_are_passed_over() -> None:
    v1 = v1_file({key(bucket=number): 1 for number in range(5)})
    margins: list[Any] = [None, "x", True, [1], {}]
    for entry, margin in zip(v1.entries.values(), margins, strict=True):
        entry.append(selected(margin))

    assert summarise_bundle(PLACE, examined(v1)).ops[0].margins == 0


def test_ops_have_entry_counts_and_tactics_of_every_kind() -> None:
    v1 = v1_file({key("a", bucket=1): 5, key("a", bucket=2): 5, key("a", bucket=3): [[1, 2], 3], key("b"): None})

    ops = summarise_bundle(PLACE, examined(v1)).ops

    assert [(op.op, op.entries, dict(op.tactics)) for op in ops] == [
        ("a", 3, {"Cutlass 5": 2, "Cutlass [[1, 2], 3]": 1}),
        ("b", 1, {"Cutlass null": 1}),
    ]


def test_text_says_what_a_bundle_is() -> None:
    text = render_contents(contents(examined(v1_file())))

    assert f"bundle {PLACE.digest} generation 3" in text
    assert "serves any world size, entries 4, store 4, FlashInfer 0.7.4" in text
    assert "gpu: NVIDIA H200" in text


def test_bad_and_newer_bundles_are_shown_as_such() -> None:
    bad = contents(Examined(problems=("bundle.json is missing",)))
    newer = contents(Examined(is_newer=True))

    assert "BAD: bundle.json is missing" in render_contents(bad)
    assert "newer version" in render_contents(newer)


def test_an_empty_root_says_so() -> None:
    assert render_contents(Contents("/cache", (), {}, 0)) == "/cache holds no bundles."


def test_json_is_json() -> None:
    value = contents_as_json(contents(examined(v1_file())))

    assert json.loads(json.dumps(value))["identities"][0]["bundles"][0]["generation"] == 3


def test_findings_are_all_listed() -> None:
    findings = [Finding("/cache/a", "x"), Finding("/cache/b\x1b[0m", f"{V1_FILE} is missing")]

    assert render_findings(findings) == "/cache/a: x\n/cache/b\\x1b[0m: flashinfer-v1.json is missing\n2 findings."
    assert findings_as_json(findings)["findings"][0] == {"path": "/cache/a", "problem": "x"}
    assert render_findings([]) == "No findings."
