"""The cache volume on a real directory: what is published is found, and what only claims to be is set aside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from initwarm.bundle import STORE_FILE, V1_FILE
from initwarm.catalog import render_contents
from initwarm.edges.reading import inspect_root, verify_root
from initwarm.edges.volume import CacheVolume
from initwarm.errors import VolumeError
from initwarm.identity import Identity
from initwarm.store import encode_store
from tests.support.bundles import (
    IDENTITY,
    METADATA,
    OTHER_PLAN,
    PLAN,
    bundle_files,
    bundle_of,
    key,
    schema,
    store_pack,
    v1_file,
)
from tests.support.volumes import bundle_path, load, prepared, publish, tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def volume(root: Path) -> CacheVolume:
    return prepared(root)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_was_published_is_found(volume: CacheVolume) -> None:
    stored = publish(volume)

    assert load(volume) == stored
    assert volume.get(IDENTITY.digest, PLAN, stored.generation, stored.digest) == stored
    assert verify_root(volume.root) == ()


def test_the_layout_is_that_of_the_documentation(volume: CacheVolume) -> None:
    stored = publish(volume)

    assert sorted(tree(volume.root)) == sorted(
        [
            "CACHEDIR.TAG",
            "README",
            f"v1/{IDENTITY.digest}/manifest.json",
            *(
                f"v1/{IDENTITY.digest}/bundles/{PLAN}/1-{stored.digest}/{name}"
                for name in ("bundle.json", V1_FILE, STORE_FILE)
            ),
        ]
    )
    assert (volume.root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_everything_written_follows_its_schema(volume: CacheVolume) -> None:
    stored = publish(volume)
    aside = volume.set_aside(stored, "no rank hit it")
    stored = publish(volume)

    assert aside.moved_to is not None
    jsonschema.validate(json.loads((aside.moved_to / "reason.json").read_bytes()), schema("quarantine"))
    jsonschema.validate(json.loads((bundle_path(volume, stored) / "bundle.json").read_bytes()), schema("bundle"))
    manifest = volume.root / "v1" / IDENTITY.digest / "manifest.json"
    jsonschema.validate(json.loads(manifest.read_bytes()), schema("manifest"))


@pytest.mark.parametrize("name", ["bundle", "manifest", "round", "quarantine"])
def test_the_packaged_schemas_are_schemas(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))


def test_r10_publishing_the_same_again_gives_the_bundle_that_is_there(volume: CacheVolume) -> None:
    first = publish(volume)
    before = tree(volume.root)

    assert publish(volume) == first
    assert tree(volume.root) == before


def test_the_highest_generation_wins(volume: CacheVolume) -> None:
    published = [publish(volume, tactic) for tactic in (1, 2, 3)]

    assert [stored.generation for stored in published] == [1, 2, 3]
    assert load(volume) == published[2]


def test_generations_are_numbers_and_not_names(volume: CacheVolume) -> None:
    published = [publish(volume, tactic) for tactic in range(11)]

    assert load(volume) == published[-1]


def test_a_generation_that_is_being_written_by_another_is_passed_over(volume: CacheVolume) -> None:
    first = publish(volume)
    (bundle_path(volume, first).parent / ".staging-2").mkdir()

    assert publish(volume, 2).generation == 3


def test_a_generation_that_was_set_aside_does_not_come_back(volume: CacheVolume) -> None:
    publish(volume, 1)
    volume.set_aside(publish(volume, 2), "no rank hit it")

    assert publish(volume, 3).generation == 3


def test_of_one_generation_every_reader_takes_the_same(volume: CacheVolume) -> None:
    one, two = publish(volume, 1), publish(volume, 2)
    bundle_path(volume, two).rename(bundle_path(volume, two).with_name(f"1-{two.digest}"))

    found = load(volume)

    assert found is not None
    assert found.digest == max(one.digest, two.digest)


def test_r14_another_tool_version_stays_warm(volume: CacheVolume) -> None:
    stored = publish(volume)

    assert publish(volume, tool_version="99.0.0") == stored


def test_plans_and_environments_are_apart(volume: CacheVolume) -> None:
    publish(volume)
    other = Identity({**METADATA, "gpu": "NVIDIA B200"})

    assert volume.load(IDENTITY, OTHER_PLAN, 4) == (None, ())
    assert volume.load(other, PLAN, 4) == (None, ())


def test_r13_the_nearest_environment_is_named_with_the_field_that_differs(volume: CacheVolume) -> None:
    publish(volume)
    here = Identity({**METADATA, "cudnn_version": "92101"})

    [near] = volume.nearby(here)

    assert str(near) == (
        f"The volume has bundles for the environment {IDENTITY.digest[:12]}, "
        "where cudnn_version is '91900' there and '92101' here (hard)"
    )
    assert volume.nearby(IDENTITY) == ()


def test_a_rank_free_bundle_serves_every_world_size(volume: CacheVolume) -> None:
    stored = publish(volume)

    assert load(volume, 16) == stored


def test_a_bundle_with_ranks_in_its_keys_is_a_miss_for_another_world_size_and_stays(volume: CacheVolume) -> None:
    older = publish(volume, 1, rank_free=False, world_size=8)
    newer = publish(volume, 2, rank_free=False, world_size=4)

    assert load(volume, 4) == newer
    assert load(volume, 8) == older
    assert volume.load(IDENTITY, PLAN, 2) == (None, ())


def test_what_a_killed_writer_left_is_never_seen(volume: CacheVolume) -> None:
    stored = publish(volume)
    path = bundle_path(volume, stored)
    path.rename(path.with_name(".staging-1"))

    assert volume.load(IDENTITY, PLAN, 4) == (None, ())
    assert verify_root(volume.root) == ()
    assert inspect_root(volume.root).unfinished == 1


def test_a_directory_that_is_not_wholly_visible_yet_is_no_bundle_and_stays(volume: CacheVolume) -> None:
    stored = publish(volume)
    path = bundle_path(volume, stored)
    (path / "bundle.json").unlink()

    assert volume.load(IDENTITY, PLAN, 4) == (None, ())
    assert volume.get(IDENTITY.digest, PLAN, stored.generation, stored.digest) is None
    assert path.is_dir()
    assert [one.problem for one in verify_root(volume.root)] == ["bundle.json is missing"]


def test_a_store_that_disagrees_with_the_file_is_a_finding(volume: CacheVolume) -> None:
    files = bundle_files(v1_file({key(): 1}))
    files[STORE_FILE] = encode_store(store_pack(v1_file({key(): 2})))
    volume.publish(IDENTITY, bundle_of(files), files)

    assert "1 winners that flashinfer-v1.json does not have" in verify_root(volume.root)[0].problem
    assert load(volume) is None


def test_announced_bundles_are_waited_for_and_never_set_aside(volume: CacheVolume) -> None:
    stored = publish(volume)
    place = (IDENTITY.digest, PLAN, stored.generation, stored.digest)
    (bundle_path(volume, stored) / V1_FILE).unlink()

    assert volume.get(*place) is None
    assert volume.get(IDENTITY.digest, PLAN, 99, stored.digest) is None
    assert volume.get("../..", PLAN, 1, stored.digest) is None
    assert bundle_path(volume, stored).is_dir()


def test_r67_the_volume_may_be_mounted_elsewhere(volume: CacheVolume, tmp_path: Path) -> None:
    stored = publish(volume)
    volume.root.rename(tmp_path / "b")

    assert load(CacheVolume(tmp_path / "b")) == stored


def test_records_are_written_whole_and_replaced(volume: CacheVolume) -> None:
    assert volume.read_json("rounds/a.json") is None
    volume.write_json("rounds/a.json", {"schema": 1})
    volume.write_json("rounds/a.json", {"schema": 1, "n": 2})

    assert volume.read_json("rounds/a.json") == {"schema": 1, "n": 2}
    assert names(volume.root / "v1" / "rounds") == ["a.json"]


@pytest.mark.parametrize("content", [b"{", b"[" * 5000, b" " * 2_000_000])
def test_a_bad_record_is_none_and_set_aside(volume: CacheVolume, content: bytes) -> None:
    volume.write_json("rounds/a.json", {})
    (volume.root / "v1" / "rounds" / "a.json").write_bytes(content)

    assert volume.read_json("rounds/a.json") is None
    assert names(volume.root / "v1" / "rounds") == []
    assert len(names(volume.root / "v1" / "quarantine")) == 1


@pytest.mark.parametrize("relative", ["../x", "/etc/passwd", "rounds/../../x", "rounds//x", "", "a\0b"])
def test_records_lie_below_the_volume(volume: CacheVolume, relative: str) -> None:
    with pytest.raises(ValueError, match="below the volume"):
        volume.write_json(relative, {})


def test_a_bundle_that_describes_other_files_is_a_bug(volume: CacheVolume) -> None:
    files = bundle_files()

    with pytest.raises(ValueError, match="other files"):
        volume.publish(IDENTITY, bundle_of(files), {**files, V1_FILE: b"{}"})


def test_quarantined_and_good_bundles_are_inspected(volume: CacheVolume) -> None:
    volume.set_aside(publish(volume), "no rank hit it")
    stored = publish(volume, 2)

    text = render_contents(inspect_root(volume.root))

    assert f"bundle {stored.digest} generation 2" in text
    assert "op fp8_gemm: 1 entries" in text
    assert "no rank hit it" in text


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("")])
def test_what_is_no_cache_root_is_an_error_for_inspect_and_verify(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "x")

    for read in (inspect_root, verify_root):
        with pytest.raises(VolumeError, match="Nothing was read"):
            read(tmp_path / "x")


def test_an_empty_root_has_no_findings(tmp_path: Path) -> None:
    assert verify_root(tmp_path) == ()
    assert inspect_root(tmp_path).identities == ()


def test_r66_each_file_is_opened_once(volume: CacheVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    files = bundle_files(v1_file({key(bucket=number): 1 for number in range(500)}))
    volume.publish(IDENTITY, bundle_of(files), files)
    opened: list[str] = []
    real = os.open

    def counting(path: Any, flags: int, *args: Any, **named: Any) -> int:
        opened.append(str(path))
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", counting)

    assert load(volume) is not None
    assert [opened.count(name) for name in ("bundle.json", V1_FILE, STORE_FILE)] == [1, 1, 1]
    assert len(opened) < 40


def test_r64_files_and_directories_are_writable_for_the_group_whatever_the_umask(root: Path) -> None:
    before = os.umask(0o077)
    try:
        volume = CacheVolume(root)
        volume.prepare()
        publish(volume)
    finally:
        os.umask(before)

    below = list((root / "v1").rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in below if path.is_file()} == {0o664}
    assert {path.stat().st_mode & 0o7777 for path in below if path.is_dir()} == {0o2775}


def test_replacing_the_tool_version_keeps_the_published_record(volume: CacheVolume) -> None:
    stored = publish(volume)

    again = volume.publish(IDENTITY, replace(stored.bundle, tool_version="2"), stored.files)

    assert again.bundle.tool_version == stored.bundle.tool_version
