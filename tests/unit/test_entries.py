from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from initwarm.entries import V1File, encode_v1, merge_v1, op_of, parse_v1
from initwarm.errors import DataError
from initwarm.store import StorePack, encode_store, merge_store, pack_store, parse_store, unpack_store
from tests.support.bundles import METADATA, POLICY, key, store_pack, v1_file

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_a_file_is_encoded_to_the_same_bytes_again() -> None:
    data = encode_v1(V1File(METADATA, v1_file().entries, {"megamoe": {"x": 1}}))

    assert encode_v1(parse_v1(data)) == data


def test_names_come_in_the_order_of_flashinfer() -> None:
    names = list(json.loads(encode_v1(V1File(METADATA, {"b": ["R", 1], "a": ["R", 2]}, {"n": {}}))))

    assert names == ["_metadata", "_records", "a", "b", "_generation"]


def test_a_file_without_metadata_states_no_environment() -> None:
    assert parse_v1(b'{"a": ["R", 1]}').metadata == {}


@pytest.mark.parametrize(
    "entry", [[], ["R"], [1, 2], "R1", {"runner": "R"}, None, 7, ["R", 1, "policy"], ["R", 1, None], ["R", 1, 3]]
)
def test_r11_an_entry_of_another_shape_is_bad_data(entry: Any) -> None:
    with pytest.raises(DataError, match="entry"):
        parse_v1(json.dumps({"_metadata": {}, "key": entry}).encode())


@pytest.mark.parametrize(
    "content",
    ["[]", "3", '{"_metadata": []}', '{"_metadata": {"gpu": 3}}', '{"_records": []}', '{"_generation": 1}', "{"],
)
def test_a_file_of_another_shape_is_bad_data(content: str) -> None:
    with pytest.raises(DataError):
        parse_v1(content.encode())


@pytest.mark.parametrize("parse", [parse_v1, parse_store])
@given(data=st.one_of(st.binary(max_size=40), JSON.map(lambda value: json.dumps(value).encode())))
def test_no_bytes_raise_anything_but_bad_data(parse: Callable[[bytes], Any], data: bytes) -> None:
    with contextlib.suppress(DataError):
        parse(data)


def test_r126_the_union_holds_every_ranks_keys() -> None:
    zero = v1_file({key(bucket=1): 1})
    one = v1_file({key(bucket=2): 2})

    merged, found = merge_v1([zero, one])

    assert merged.entries == {**zero.entries, **one.entries}
    assert found == ()


def test_r8_the_lowest_rank_wins_and_every_difference_is_told() -> None:
    files = [v1_file({key(): tactic, key(bucket=2): 5}) for tactic in (3, 4, 3)]

    merged, found = merge_v1(files)

    assert merged.entries[key()] == ["Cutlass", 3, POLICY]
    assert [(one.key, one.values) for one in found] == [
        (key(), {0: ("Cutlass", 3), 1: ("Cutlass", 4), 2: ("Cutlass", 3)})
    ]


def test_r8_other_runners_for_the_same_shapes_are_a_difference_and_both_are_kept() -> None:
    zero, one = v1_file({key(): 3}), v1_file({key(runner="Cublas", extras=("x",)): 1})

    merged, found = merge_v1([zero, one])

    assert len(merged.entries) == 2
    assert [(one.key, one.values) for one in found] == [(key(), {0: ("Cutlass", 3), 1: ("Cublas", 1)})]


def test_other_measurements_of_the_same_winner_are_no_difference() -> None:
    zero, one = v1_file(), v1_file()
    for entry in one.entries.values():
        entry.append({"time_ms": 9.0})

    merged, found = merge_v1([zero, one])

    assert (merged.entries, found) == (zero.entries, ())


def test_r9_merging_in_rank_order_gives_the_same_bytes_for_all_ranks() -> None:
    files = [v1_file({key(bucket=bucket): 1 for bucket in buckets}) for buckets in ((1, 2), (2, 4))]

    assert encode_v1(merge_v1(files)[0]) == encode_v1(merge_v1([parse_v1(encode_v1(one)) for one in files])[0])


def test_records_are_united() -> None:
    files = [V1File(METADATA, {}, {"n": {"a": rank, str(rank): rank}}) for rank in (0, 1)]

    assert merge_v1(files)[0].records == {"n": {"a": 0, "0": 0, "1": 1}}


def test_files_of_different_environments_are_not_merged() -> None:
    with pytest.raises(DataError, match=r"Rank 1 and rank 0 .* gpu differ"):
        merge_v1([v1_file(), v1_file(metadata={**METADATA, "gpu": "NVIDIA B200"})])


@pytest.mark.parametrize(("name", "op"), [(key("trtllm::x"), "trtllm::x"), ("odd", "odd"), ("", ""), ("('", "('")])
def test_op_of_a_key(name: str, op: str) -> None:
    assert op_of(name) == op


def test_a_store_is_unpacked_to_the_files_that_were_packed() -> None:
    pack = store_pack(v1_file())
    files = unpack_store(pack)

    assert pack_store({**files, f"v2/{pack.env_hash}/entries/.autotune_x.tmp": b"half"}) == pack
    assert unpack_store(parse_store(encode_store(pack))) == files


def test_a_store_of_two_environments_is_refused() -> None:
    files = unpack_store(store_pack(v1_file()))
    other = unpack_store(store_pack(v1_file(), {**METADATA, "gpu": "x"}))

    with pytest.raises(DataError, match="2 environments"):
        pack_store({**files, **other})


@pytest.mark.parametrize("name", ["v2/x/../../etc", "manifest.json", "v1/x/manifest.json", "v2/x/y/z/w", ""])
def test_a_store_with_foreign_files_is_refused(name: str) -> None:
    with pytest.raises(DataError):
        pack_store({**unpack_store(store_pack(v1_file())), name: b"{}"})


@pytest.mark.parametrize(
    "change",
    [
        {"env_hash": "../../../../tmp/x"},
        {"env_hash": "0" * 16},
        {"manifest": {"gpu": 1}},
        {"entries": []},
        {"entries": {"../x.json": {"key": "k", "runner": "r", "tactic": 1}}},
        {"entries": {"x.json": 1}},
        {"entries": {"x.json": {"key": "\ud800", "runner": "r", "tactic": 1}}},
        {"entries": {"x.json": {"key": "k", "runner": "r"}}},
    ],
)
def test_a_packed_store_that_lies_is_bad_data(change: dict[str, Any]) -> None:
    content = {**json.loads(encode_store(store_pack(v1_file()))), **change}

    with pytest.raises(DataError):
        parse_store(json.dumps(content).encode())


def test_the_merged_store_has_the_winners_of_the_merged_file() -> None:
    files = [v1_file({key(): tactic, key(bucket=rank): 9}) for rank, tactic in enumerate((3, 4), 1)]
    winners, _ = merge_v1(files)

    merged = merge_store([store_pack(one) for one in reversed(files)], winners)

    assert {entry["key"]: entry["tactic"] for entry in merged.entries.values()} == {
        name: entry[1] for name, entry in winners.entries.items()
    }


def test_a_store_entry_without_its_winner_is_left_out() -> None:
    file = v1_file({key(): 3})

    assert merge_store([store_pack(v1_file({key(): 4}))], file).entries == {}


def test_stores_of_different_environments_are_not_merged() -> None:
    packs = [store_pack(v1_file(), {**METADATA, "gpu": gpu}) for gpu in ("a", "b")]

    with pytest.raises(DataError, match="different environments"):
        merge_store(packs, v1_file())


def test_an_empty_store_keeps_its_manifest() -> None:
    pack = store_pack(v1_file({}))

    assert pack_store(unpack_store(pack)) == StorePack(pack.env_hash, pack.manifest, {})
