"""`initwarm run` on volumes as others met them: read-only, full, without locks, with errors of network file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.groups import Group
from tests.support.plans import plan_file
from tests.support.pods import PodServer
from tests.support.volume_faults import VolumeFaults, compile_library

needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount (root)")
#: What `run` may leave on a cache volume, all of it published whole.
PUBLISHED = re.compile(
    r"CACHEDIR\.TAG|README"
    r"|v1/[0-9a-f]{64}/manifest\.json"
    r"|v1/[0-9a-f]{64}/bundles/[0-9a-f]{64}/\d+-[0-9a-f]{64}/(bundle\.json|flashinfer-(v1|store)\.json)"
    r"|v1/(rounds|addresses|leases|partials)/.+\.json"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def preloaded_server(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodServer]:
    """Pods of this server meet the faults that their environment tells."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(library))
        server = PodServer(tmp_path_factory.mktemp("workspace"))
    yield server
    server.close()


@pytest.fixture
def faults(library: Path, tmp_path: Path) -> VolumeFaults:
    return VolumeFaults(library, tmp_path / "faults.log")


@contextlib.contextmanager
def mounted(path: Path, *commands: list[str]) -> Iterator[None]:
    """Mount something at a path, for as long as the block lasts."""
    path.mkdir(exist_ok=True)
    for command in commands:
        subprocess.run(["mount", *command, str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill_up(path: Path) -> None:
    """Write until the volume takes no more."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 4096)


def stamps(root: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and time of change of each file."""
    found = {str(path.relative_to(root)): path.stat() for path in root.rglob("*") if path.is_file()}
    return {name: (status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found.items()}


def bundles(root: Path) -> dict[str, tuple[int, int, int]]:
    return {name: stamp for name, stamp in stamps(root).items() if "/bundles/" in name}


def test_r51_only_what_is_published_lies_on_the_volume_and_it_does_not_change(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 1, 2)
    root = group.cache_root(0)
    group.assert_warm(group.run(), tuned=True)
    before = bundles(root)

    group.assert_warm(group.run(), tuned=False)

    assert before
    assert bundles(root) == before
    assert [name for name in stamps(root) if not PUBLISHED.fullmatch(name)] == []


def test_r54_a_run_on_a_volume_that_removes_nothing_is_warm(
    preloaded_server: PodServer, faults: VolumeFaults, tmp_path: Path
) -> None:
    # The engine root as well: by default it lies on the volume.
    environ = faults.environment(tmp_path, [f"remove:{below}/*:{errno.EBUSY}:0" for below in ("cache", "engine-0")])
    group = Group(preloaded_server, tmp_path, 1, 2, environ=environ)

    first = group.assert_warm(group.run(), tuned=True)
    second = group.assert_warm(group.run(), tuned=False)

    assert first == second
    assert {line.split(" ")[1].partition("/")[0] for line in faults.lines("fault")} == {"cache", "engine-0"}


def test_r55_a_run_that_loses_the_bundle_s_handle_twice_is_warm(
    preloaded_server: PodServer, faults: VolumeFaults, tmp_path: Path
) -> None:
    group = Group(preloaded_server, tmp_path)
    first = group.assert_warm(group.run(), tuned=True)
    environ = faults.environment(group.cache_root(0), [f"open:*/bundle.json:{errno.ESTALE}:2"])

    assert group.assert_warm(group.run(environ=environ), tuned=False) == first

    assert len(faults.lines("fault")) == 2


def test_r55_a_run_that_never_gets_the_bundle_s_handle_names_the_path_and_the_count(
    preloaded_server: PodServer, faults: VolumeFaults, tmp_path: Path
) -> None:
    group = Group(preloaded_server, tmp_path)
    group.assert_warm(group.run(), tuned=True)
    environ = faults.environment(group.cache_root(0), [f"open:*/bundle.json:{errno.ESTALE}:0"])

    (pod,) = group.run("--on-tuning-failure", "fail", environ=environ)

    assert (pod.status, pod.message["outcome"]) == (74, "failed")
    assert str(next(group.cache_root(0).glob("v1/*/bundles/*/*"))) in pod.message["reason"]
    assert "(ESTALE), in each of 5 attempts" in pod.message["reason"]
    assert "Traceback" not in pod.log
    assert len(faults.lines("fault")) == 5
    group.assert_nothing_visible([pod])


def test_r61_a_run_asks_a_volume_for_no_lock_and_no_hard_link(
    preloaded_server: PodServer, faults: VolumeFaults, tmp_path: Path
) -> None:
    told = [f"lock:*:{errno.ENOLCK}:0", f"link:*:{errno.EPERM}:0"]
    group = Group(preloaded_server, tmp_path, 2, 1, environ=faults.environment(tmp_path / "cache", told))

    first = group.assert_warm(group.run(), tuned=True)
    second = group.assert_warm(group.run(), tuned=False)

    assert first == second
    assert faults.lines("asked") == []


@needs_mounts
def test_r63_a_read_only_volume_with_the_bundle_is_warm(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1)
    first = group.assert_warm(group.run(), tuned=True)
    root = group.cache_root(0)

    with mounted(root, ["--bind", str(root)], ["-o", "remount,ro,bind"]):
        pods = group.run()

    assert group.assert_warm(pods, tuned=False) == first
    assert all(pod.events("initwarm.cache.read_only") for pod in pods)


@needs_mounts
def test_r63_a_read_only_volume_without_the_bundle_names_the_mount_and_the_value(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 1, 2)

    with mounted(group.cache_root(0), ["-t", "tmpfs", "-o", "ro,size=64k", "none"]):
        (pod,) = group.run("--on-tuning-failure", "fail")

    assert (pod.status, pod.message["outcome"]) == (74, "failed")
    assert f"The volume of {group.cache_root(0)} is mounted read-only" in pod.message["reason"]
    assert "readOnly: false" in pod.message["reason"]
    group.assert_nothing_visible([pod])


@needs_mounts
def test_r65_a_volume_that_fills_up_keeps_the_old_bundle_and_all_ranks_are_cold(
    pod_server: PodServer, tmp_path: Path
) -> None:
    group = Group(pod_server, tmp_path, 2, 1)
    root = group.cache_root(0)

    with mounted(root, ["-t", "tmpfs", "-o", "size=1m", "none"]):
        first = group.assert_warm(group.run(), tuned=True)
        before = bundles(root)
        fill_up(root / "filler")
        cold = group.run(*plan_file(tmp_path, {"buckets": [1, 2]}))
        after = bundles(root)
        group.assert_nothing_visible(cold)
        (root / "filler").unlink()
        again = group.run()

    assert before
    assert after == before
    for pod in cold:
        assert (pod.status, pod.message["outcome"]) == (0, "cold"), pod.log
        assert f"The volume of {root}/v1/" in pod.message["reason"]
        assert "is full: 0 bytes are free (ENOSPC)" in pod.message["reason"]
    assert group.assert_warm(again, tuned=False) == first


def test_r67_a_volume_that_moved_is_warm(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path)
    first = group.assert_warm(group.run(), tuned=True)
    group.cache_root(0).rename(tmp_path / "b")

    assert group.assert_warm(group.run("--cache-root", str(tmp_path / "b")), tuned=False) == first


def test_a_cold_group_on_a_volume_whose_names_are_denied_for_a_while_tunes_once(
    preloaded_server: PodServer, faults: VolumeFaults, tmp_path: Path
) -> None:
    environ = faults.environment(tmp_path / "cache", late=tmp_path / "never")
    group = Group(preloaded_server, tmp_path, 2, 1, environ=environ)

    pods = group.run()

    bundle = group.assert_warm(pods, tuned=True)
    assert [Path(path).name for path in group.cache_root(0).glob("v1/*/bundles/*/*")] == [f"1-{bundle}"]
    # Directories may be: who is about to make them looks first.
    assert [name for name in faults.lines("absent") if re.match(r"v1/[0-9a-f]{64}/bundles/[0-9a-f]{64}/", name)] == []
