"""What only claims to be a bundle: damaged, foreign, linked, newer or unauthenticated content of the cache volume."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from initwarm.bundle import STORE_FILE, V1_FILE, Bundle, FileRecord, encode_bundle
from initwarm.catalog import render_contents
from initwarm.edges.reading import inspect_root, read_key, verify_root
from initwarm.edges.volume import CacheVolume
from initwarm.entries import encode_v1
from initwarm.errors import ConfigurationError, VolumeError
from tests.support.bundles import IDENTITY, METADATA, PLAN, key, v1_file
from tests.support.volumes import bundle_path, load, prepared, publish, tree

KEY = b"0123456789abcdef"


@pytest.fixture
def volume(tmp_path: Path) -> CacheVolume:
    return prepared(tmp_path / "cache")


def rewritten(path: Path, v1: bytes) -> None:
    """Replace the v1 file and make bundle.json and the directory's name agree with it, as a liar would."""
    record = json.loads((path / "bundle.json").read_bytes())
    record["files"] = {V1_FILE: FileRecord(hashlib.sha256(v1).hexdigest(), len(v1))}
    record["entries"] = 1
    del record["schema"]
    bundle = Bundle(**record)
    (path / V1_FILE).write_bytes(v1)
    (path / "bundle.json").write_bytes(encode_bundle(bundle))
    path.rename(path.with_name(f"1-{bundle.digest}"))


def poison_hard(path: Path) -> None:
    rewritten(path, encode_v1(v1_file({key(): 1}, {**METADATA, "gpu": "NVIDIA B200"})))


def poison_soft(path: Path) -> None:
    rewritten(path, encode_v1(v1_file({key(): 1}, {**METADATA, "gpu": "unknown"})))


def poison_unattributed(path: Path) -> None:
    rewritten(path, json.dumps({key(): ["Cutlass", 1]}).encode())


def poison_shape(path: Path) -> None:
    rewritten(path, json.dumps({"_metadata": METADATA, key(): "Cutlass"}).encode())


def poison_depth(path: Path) -> None:
    rewritten(path, b'{"_metadata": {}, "k": ["R", ' + b"[" * 50_000 + b"]" * 50_000 + b"]}")


def poison_store(path: Path) -> None:
    record = json.loads((path / "bundle.json").read_bytes())
    record["entries"] = 3
    (path / "bundle.json").write_text(json.dumps(record))


def flip(path: Path) -> None:
    data = bytearray((path / V1_FILE).read_bytes())
    data[-2] ^= 1
    (path / V1_FILE).write_bytes(data)


def escape(path: Path) -> None:
    record = json.loads((path / "bundle.json").read_bytes())
    record["files"]["../../x"] = record["files"][V1_FILE]
    (path / "bundle.json").write_text(json.dumps(record))


def link_a_file(path: Path) -> None:
    (path / V1_FILE).rename(path.parents[4] / "elsewhere")
    (path / V1_FILE).symlink_to(path.parents[4] / "elsewhere")


def link_the_directory(path: Path) -> None:
    path.rename(path.parents[4] / "elsewhere")
    path.symlink_to(path.parents[4] / "elsewhere")


def pipe_instead_of_a_file(path: Path) -> None:
    (path / V1_FILE).unlink()
    os.mkfifo(path / V1_FILE)


def file_instead_of_the_directory(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: (path / V1_FILE).write_bytes((path / V1_FILE).read_bytes()[:40]), "40 bytes instead of"),
    "one bit": (flip, "has the SHA-256"),
    "grown": (lambda path: (path / V1_FILE).write_bytes((path / V1_FILE).read_bytes() + b" "), "more than"),
    "missing": (lambda path: (path / STORE_FILE).unlink(), "flashinfer-store.json is missing"),
    "record truncated": (lambda path: (path / "bundle.json").write_bytes(b'{"schema": 1,'), "is not JSON"),
    "record deep": (lambda path: (path / "bundle.json").write_bytes(b"[" * 90_000), "bundle.json is n"),
    "record huge": (lambda path: os.truncate(path / "bundle.json", 1 << 33), "more than"),
    "record of another": (poison_store, "has the digest"),
    "renamed": (lambda path: path.rename(path.with_name(f"9-{'e' * 64}")), "has the digest"),
    "escape": (escape, "'../../x'"),
    "hard": (poison_hard, "gpu is 'NVIDIA B200' there and 'NVIDIA H200' here (hard)"),
    "soft": (poison_soft, "gpu is 'unknown' there and 'NVIDIA H200' here (soft)"),
    "unattributed": (poison_unattributed, "gpu is None there"),
    "shape": (poison_shape, "entry that is not [runner, tactic, ...]"),
    "deep": (poison_depth, "deeper than 64"),
    "linked file": (link_a_file, "is a symbolic link"),
    "linked directory": (link_the_directory, "is a symbolic link"),
    "pipe": (pipe_instead_of_a_file, "is not a plain file"),
    "not a directory": (file_instead_of_the_directory, "not a directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_r59_what_only_claims_to_be_a_bundle_is_told_by_verify_and_set_aside_by_load(
    volume: CacheVolume, damage: str
) -> None:
    stored = publish(volume)
    DAMAGE[damage][0](bundle_path(volume, stored))

    found = verify_root(volume.root)
    bundle, aside = volume.load(IDENTITY, PLAN, 4)

    assert any(DAMAGE[damage][1] in finding.problem for finding in found)
    assert bundle is None
    assert DAMAGE[damage][1] in aside[0].reason
    assert aside[0].moved_to is not None
    assert os.path.lexists(aside[0].moved_to / aside[0].path.name)
    assert json.loads((aside[0].moved_to / "reason.json").read_bytes())["reason"] == aside[0].reason
    assert verify_root(volume.root) == ()
    assert volume.load(IDENTITY, PLAN, 4) == (None, ())
    assert publish(volume).files == stored.files


def test_r2_an_older_good_bundle_is_used_in_place_of_a_bad_one(volume: CacheVolume) -> None:
    older, newer = publish(volume, 1), publish(volume, 2)
    flip(bundle_path(volume, newer))

    bundle, aside = volume.load(IDENTITY, PLAN, 4)

    assert bundle == older
    assert len(aside) == 1


def test_verify_changes_nothing_and_tells_all(volume: CacheVolume) -> None:
    for tactic in (1, 2):
        flip(bundle_path(volume, publish(volume, tactic)))
    (volume.root / "v1" / IDENTITY.digest / "manifest.json").write_text("{")
    (volume.root / "v1" / "rounds").mkdir()
    (volume.root / "v1" / "rounds" / "a.json").write_text("[]")
    before = tree(volume.root)

    found = verify_root(volume.root)

    assert tree(volume.root) == before
    assert len([one for one in found if "flashinfer-v1.json has the SHA-256" in one.problem]) == 2
    assert any("manifest.json is not JSON" in one.problem for one in found)
    assert any("a.json is not a JSON object" in one.problem for one in found)


def test_a_newer_schema_is_a_miss_and_stays(volume: CacheVolume) -> None:
    path = bundle_path(volume, publish(volume))
    (path / "bundle.json").write_text('{"schema": 2, "everything": "else"}')

    assert volume.load(IDENTITY, PLAN, 4) == (None, ())
    assert verify_root(volume.root) == ()
    assert path.is_dir()
    assert "newer version" in render_contents(inspect_root(volume.root))
    assert publish(volume).generation == 2


def test_a_newer_manifest_stays(volume: CacheVolume) -> None:
    publish(volume)
    manifest = volume.root / "v1" / IDENTITY.digest / "manifest.json"
    manifest.write_text('{"schema": 2}')

    publish(volume, 2)

    assert manifest.read_text() == '{"schema": 2}'


@pytest.mark.parametrize("content", [None, b"{", b'{"schema": 1, "metadata": {"gpu": "another"}}'])
def test_a_bad_manifest_is_healed_by_the_next_publication(volume: CacheVolume, content: bytes | None) -> None:
    publish(volume)
    manifest = volume.root / "v1" / IDENTITY.digest / "manifest.json"
    good = manifest.read_bytes()
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)

    publish(volume, 2)

    assert manifest.read_bytes() == good


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_r68_a_link_on_the_way_to_the_bundles_is_not_followed(volume: CacheVolume, tmp_path: Path, depth: int) -> None:
    stored = publish(volume)
    path = bundle_path(volume, stored).parents[3 - depth]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    found = verify_root(volume.root)
    bundle, aside = volume.load(IDENTITY, PLAN, 4)

    assert any("symbolic link" in one.problem for one in found)
    assert bundle is None
    assert [one.path for one in aside] == [path]
    assert publish(volume).files == stored.files
    assert not path.is_symlink()


def test_a_linked_layout_is_an_error_and_not_followed(volume: CacheVolume, tmp_path: Path) -> None:
    layout = volume.root / "v1"
    layout.rename(tmp_path / "elsewhere")
    layout.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(VolumeError, match="symbolic link"):
        volume.prepare()
    with pytest.raises(VolumeError, match="symbolic link"):
        verify_root(volume.root)


def test_with_a_key_only_authenticated_bundles_are_used(volume: CacheVolume) -> None:
    publish(volume)
    keyed = CacheVolume(volume.root, KEY)

    assert "bundle.hmac is missing" in verify_root(volume.root, KEY)[0].problem
    bundle, aside = keyed.load(IDENTITY, PLAN, 4)
    assert bundle is None
    assert "bundle.hmac is missing" in aside[0].reason

    stored = publish(keyed)
    assert load(keyed) == stored
    assert load(volume) == stored
    assert verify_root(volume.root, KEY) == ()
    assert "with this key" in verify_root(volume.root, b"another key 0123")[0].problem


def test_with_a_key_the_same_bundle_without_it_is_published_anew(volume: CacheVolume) -> None:
    publish(volume)

    stored = publish(CacheVolume(volume.root, KEY))

    assert stored.generation == 2
    assert verify_root(volume.root, KEY) == ()


def test_r68_with_a_key_a_bundle_that_was_rehashed_is_refused(volume: CacheVolume) -> None:
    keyed = CacheVolume(volume.root, KEY)
    stored = publish(keyed)
    rewritten(bundle_path(volume, stored), encode_v1(v1_file({key(): 99})))

    assert load(volume) is not None
    assert load(keyed) is None


def test_a_key_file_is_read_and_a_short_key_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    (tmp_path / "short").write_bytes(b"x\n")

    assert read_key(str(tmp_path / "key")) == KEY
    assert read_key(None) is None
    for name in ("short", "missing"):
        with pytest.raises(ConfigurationError, match=name):
            read_key(str(tmp_path / name))
