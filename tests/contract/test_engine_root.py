"""The engine root on a real directory: what servers read appears whole, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from initwarm.bundle import STORE_FILE, V1_FILE
from initwarm.edges.engine_root import EngineRoot
from initwarm.errors import DataError, VolumeError
from initwarm.store import unpack_store
from tests.support.bundles import bundle_files, key, store_pack, v1_file

FILES = bundle_files()


@pytest.fixture
def engine_root(tmp_path: Path) -> EngineRoot:
    return EngineRoot(tmp_path / "engine")


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_every_rank_of_the_pod_gets_the_same_bytes_and_the_store_is_expanded(engine_root: EngineRoot) -> None:
    engine_root.fill(FILES, (2, 3))

    assert tree(engine_root.path) == {
        "flashinfer-v1/rank2.json": FILES[V1_FILE],
        "flashinfer-v1/rank3.json": FILES[V1_FILE],
        **{f"flashinfer-store/{name}": data for name, data in unpack_store(store_pack(v1_file())).items()},
    }
    assert engine_root.v1_path(3).read_bytes() == FILES[V1_FILE]
    assert (engine_root.store_path / "v2").is_dir()


def test_without_a_store_there_is_no_store_directory(engine_root: EngineRoot) -> None:
    engine_root.fill(bundle_files(has_store=False), (0,))

    assert not engine_root.store_path.exists()


def test_an_empty_store_has_its_manifest(engine_root: EngineRoot) -> None:
    engine_root.fill(bundle_files(v1_file({})), (0,))

    assert [path.name for path in engine_root.store_path.rglob("*.json")] == ["manifest.json"]


def test_r5_a_second_fill_leaves_nothing_of_the_first(engine_root: EngineRoot) -> None:
    engine_root.fill(FILES, (0, 1))
    other = bundle_files(v1_file({key(bucket=7): 1}))

    engine_root.fill(other, (0,))

    assert set(tree(engine_root.path)) == {
        "flashinfer-v1/rank0.json",
        *(f"flashinfer-store/{name}" for name in unpack_store(store_pack(v1_file({key(bucket=7): 1})))),
    }


def test_emptying_removes_what_is_ours_and_leaves_the_rest(engine_root: EngineRoot) -> None:
    engine_root.fill(FILES, (0,))
    for name in ("vllm/hash", "sglang/key", ".staging-0123", "mine", ".cache"):
        (engine_root.path / name).mkdir(parents=True)
        (engine_root.path / name / "file").write_text("x")

    engine_root.empty()

    assert sorted(path.name for path in engine_root.path.iterdir()) == [".cache", "mine"]


def test_emptying_what_does_not_exist_does_nothing(engine_root: EngineRoot) -> None:
    engine_root.empty()

    assert not engine_root.path.exists()


def test_links_are_removed_and_not_followed(engine_root: EngineRoot, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    engine_root.path.mkdir()
    (engine_root.path / "vllm").symlink_to(tmp_path / "precious")
    (engine_root.path / "flashinfer-v1").symlink_to(tmp_path / "precious")
    (engine_root.path / "sglang").write_text("a file")

    engine_root.empty()

    assert list(engine_root.path.iterdir()) == []
    assert (tmp_path / "precious" / "file").exists()


@pytest.mark.parametrize("name", ["engine", "engine/below"])
def test_a_file_in_place_of_the_root_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "engine").write_text("")
    root = EngineRoot(tmp_path / name)

    with pytest.raises(VolumeError, match=r"is a file .*finds no tactics"):
        root.fill(FILES, (0,))
    with pytest.raises(VolumeError, match=r"is a file .*not emptied"):
        root.empty()


def test_a_bad_store_leaves_nothing_behind(engine_root: EngineRoot) -> None:
    with pytest.raises(DataError):
        engine_root.fill({**FILES, STORE_FILE: b"{}"}, (0,))

    assert not engine_root.path.exists()


def test_a_failure_half_way_leaves_no_half_written_directory(
    engine_root: EngineRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    calls: list[int] = []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 6:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)

    with pytest.raises(VolumeError, match="ENOSPC"):
        engine_root.fill(FILES, (0,))
    assert set(tree(engine_root.path)) <= {"flashinfer-v1/rank0.json"}


def test_r64_another_user_can_read_and_the_group_write_whatever_the_umask(engine_root: EngineRoot) -> None:
    before = os.umask(0o077)
    try:
        engine_root.fill(FILES, (0,))
    finally:
        os.umask(before)

    below = [path.stat().st_mode & 0o777 for path in engine_root.path.rglob("*")]
    assert set(below) == {0o664, 0o775}
    assert engine_root.path.stat().st_mode & 0o775 == 0o775
