"""gc on real directories that the product's own writers made: beside others, killed, linked and refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from initwarm.addressbook import AddressRecord
from initwarm.bundle import V1_FILE
from initwarm.cli import main
from initwarm.edges import housekeeping
from initwarm.edges.files import Directory
from initwarm.edges.leases import TuningLease
from initwarm.edges.partials import Partials
from initwarm.edges.reading import verify_root
from initwarm.edges.rendezvous import AddressBook
from initwarm.edges.volume import CacheVolume
from initwarm.edges.volume_reader import VolumeReader
from initwarm.entries import encode_v1
from initwarm.errors import VolumeError
from initwarm.identity import Identity
from initwarm.retention import Report
from initwarm.rounds import RoundRecord
from initwarm.settings import GcSettings
from tests.support.bundles import IDENTITY, METADATA, OTHER_PLAN, PLAN, bundle_files, bundle_of, key, v1_file
from tests.support.volumes import CHILD, bundle_path, child_environment, load, prepared, publish, tree

DAY = 86_400.0
STRICT = GcSettings(0, 0.0, False)
NONCE = "ab" * 16


@pytest.fixture
def volume(tmp_path: Path) -> CacheVolume:
    return prepared(tmp_path / "cache")


def age(root: Path, days: float = 40) -> None:
    """Let everything below a directory have changed so many days ago."""
    when = time.time() - days * DAY
    for path in [*root.rglob("*"), root]:
        os.utime(path, (when, when), follow_symlinks=False)


def gc(volume: CacheVolume, keep: int = 0, older: float = 30 * DAY, dry: bool = False) -> Report:
    return housekeeping.clean(volume.root, GcSettings(keep, older, dry))


def gone(report: Report) -> list[str]:
    return [one.path for one in report.of("removed")]


def why(report: Report, path: Path | str) -> str:
    (found,) = [one.why for one in report.outcomes if str(path).endswith(one.path)]
    return found


def publish_other(volume: CacheVolume, number: int) -> str:
    """A bundle of another environment; returns the environment's digest."""
    metadata = {**METADATA, "cudnn_version": str(number)}
    identity, files = Identity(metadata), bundle_files(v1_file({key(): number}, metadata), has_store=False)
    volume.publish(identity, bundle_of(files, identity=identity.digest), files)
    return identity.digest


def record_round(volume: CacheVolume, bundle: str, identity: str = IDENTITY.digest, group: str = "decode-0") -> None:
    record = RoundRecord(group, (2, 2), PLAN, identity, bundle, "epoch", "0")
    volume.write_json(f"rounds/{group}.json", record.as_json())


def lease_of(volume: CacheVolume, plan: str = PLAN) -> TuningLease:
    return TuningLease(VolumeReader(volume.root), IDENTITY.digest, plan, "pod-a", "decode-0")


def inhabited(volume: CacheVolume) -> list[str]:
    """Everything that initwarm writes on a volume, out of use for 40 days; returns what a gc should remove."""
    first, second = publish(volume, 1), publish(volume, 2)
    other = publish_other(volume, 7)
    record_round(volume, second.digest)
    with Directory.open(bundle_path(volume, second).parent) as plan:
        plan.create(".staging-9").close()
    damaged = publish(volume, 3, plan=OTHER_PLAN)
    aside = volume.set_aside(damaged, "a test").moved_to
    assert aside is not None
    lease = lease_of(volume)
    assert lease.try_acquire()
    lease.release()
    Partials(volume.root, IDENTITY, PLAN, None).write("decode-0-0", encode_v1(v1_file()))
    AddressBook(str(volume.root), "decode-0").write(
        AddressRecord("decode-0", NONCE, 1, "pod", None, ("10.0.0.1",), 29710, 3)
    )
    age(volume.root)
    return sorted(
        [
            str(bundle_path(volume, first).relative_to(volume.root)),
            f"v1/{other}",
            f"v1/{IDENTITY.digest}/bundles/{PLAN}/.staging-9",
            str(aside.relative_to(volume.root)),
            f"v1/leases/{IDENTITY.digest}-{PLAN}",
            f"v1/partials/{IDENTITY.digest}",
            "v1/addresses/decode-0",
        ]
    )


def test_whatever_is_out_of_use_goes_and_what_a_round_names_stays(volume: CacheVolume) -> None:
    expected = inhabited(volume)

    dry = gc(volume, dry=True)
    real = gc(volume)

    assert sorted(gone(real)) == expected
    assert dry.outcomes == real.outcomes
    assert real.of("failed") == []
    assert why(real, f"v1/{IDENTITY.digest}") == "in use by group decode-0"
    for path in expected:
        assert not (volume.root / path).exists()
    found = load(volume)
    assert found is not None
    assert found.generation == 2
    assert verify_root(volume.root) == ()
    assert list(volume.root.rglob(".staging*")) == []


def test_the_bytes_that_it_states_are_those_that_are_freed(volume: CacheVolume) -> None:
    inhabited(volume)
    before = sum(map(len, tree(volume.root).values()))

    report = gc(volume)

    assert sum(one.size for one in report.of("removed")) == before - sum(map(len, tree(volume.root).values()))


def test_a_second_gc_removes_nothing_more(volume: CacheVolume) -> None:
    inhabited(volume)
    gc(volume)
    before = tree(volume.root)

    assert gone(gc(volume)) == []
    assert tree(volume.root) == before


def test_a_dry_run_changes_nothing(volume: CacheVolume) -> None:
    def state() -> dict[Path, Any]:
        return {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in (volume.root / "v1").rglob("*")}

    inhabited(volume)
    before, files = state(), tree(volume.root)

    assert len(gone(gc(volume, dry=True))) == 7

    assert (state(), tree(volume.root)) == (before, files)


def test_a_volume_in_use_and_one_that_is_new_lose_nothing(volume: CacheVolume) -> None:
    publish(volume, 1), publish(volume, 2)
    (volume.root / "v1" / ".staging-live").mkdir()
    before = tree(volume.root)

    assert gone(gc(volume, 0, 0.0)) == []
    assert tree(volume.root) == before


def test_the_newest_are_kept(volume: CacheVolume) -> None:
    names = [publish_other(volume, number) for number in range(4)]
    for number, name in enumerate(names):
        age(volume.root / "v1" / name, 50 - number)

    assert sorted(gone(gc(volume, 2))) == sorted(f"v1/{name}" for name in names[:2])


def test_names_that_initwarm_does_not_write_are_never_touched(volume: CacheVolume) -> None:
    stored = publish(volume)
    strange = ["v1/notes", "v1/rounds/notes", "v1/leases/x/1/lease.json", "v1/quarantine/mine", "v1/partials/x/y.json"]
    strange += ["engine/decode-0/0/flashinfer-v1/rank0.json", "jit/a.so", f"v1/{'c' * 64}/notes", "v1/addresses/g/x"]
    strange += [str((bundle_path(volume, publish_for(volume)) / "x").relative_to(volume.root))]
    for name in strange:
        (volume.root / name).parent.mkdir(parents=True, exist_ok=True)
        (volume.root / name).write_text("mine")
    age(volume.root)

    report = gc(volume, 0, 0.0)

    assert gone(report) == []
    assert [name for name in strange if not (volume.root / name).exists()] == []
    assert why(report, f"v1/{IDENTITY.digest}").endswith("/x, which initwarm does not write")
    assert bundle_path(volume, stored).exists()


def publish_for(volume: CacheVolume) -> Any:
    return publish(volume, 5, plan=OTHER_PLAN)


def test_links_are_never_followed(volume: CacheVolume, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    linked = publish_other(prepared(outside), 2)
    layout = volume.root / "v1"
    layout.joinpath(linked).symlink_to(outside / "v1" / linked)
    for name in ("leases", "partials", "addresses"):
        layout.joinpath(name).symlink_to(outside)
    in_quarantine = layout / "quarantine" / ("0" * 16)
    in_quarantine.mkdir(parents=True)
    (in_quarantine / "link").symlink_to(outside)
    (layout / ".staging-1").symlink_to(outside)
    age(outside)
    age(volume.root)
    before = tree(outside)

    report = gc(volume, 0, 0.0)

    assert sorted(gone(report)) == ["v1/.staging-1", f"v1/quarantine/{'0' * 16}"]
    assert why(report, f"v1/{linked}") == "is not what initwarm writes there"
    assert tree(outside) == before
    assert layout.joinpath(linked).is_symlink()


def test_what_was_set_aside_may_be_deep_and_of_any_kind(volume: CacheVolume) -> None:
    top = volume.root / "v1" / "quarantine" / ("0" * 16)
    top.joinpath(*"abcdefgh").mkdir(parents=True)
    os.mkfifo(top / "a" / "pipe")
    deep = volume.root / "v1" / "quarantine" / ("1" * 16)
    deep.joinpath(*["d"] * 80).mkdir(parents=True)
    age(volume.root)

    report = gc(volume)

    assert gone(report) == [f"v1/quarantine/{'0' * 16}"]
    assert "is nested deeper than 64" in why(report, f"v1/quarantine/{'1' * 16}")


# Beside others.


def test_a_bundle_that_is_taken_away_while_it_is_read_is_a_miss_and_nobodys_fault(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(volume)
    age(volume.root)
    real = Directory.read

    def read(directory: Directory, name: str, limit: int) -> bytes:
        if name == V1_FILE:
            monkeypatch.undo()
            assert gone(gc(volume)) == [f"v1/{IDENTITY.digest}"]
        return real(directory, name, limit)

    monkeypatch.setattr(Directory, "read", read)

    assert volume.load(IDENTITY, PLAN, 4) == (None, ())
    assert publish(volume).generation == 1


@pytest.mark.parametrize("step", ["manifest", "examine"])
def test_what_is_taken_away_while_it_is_verified_is_no_finding(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    publish(volume)
    age(volume.root)
    real = getattr(VolumeReader, step)

    def after_gc(reader: VolumeReader, *arguments: Any) -> Any:
        monkeypatch.undo()
        assert gone(gc(volume)) == [f"v1/{IDENTITY.digest}"]
        return real(reader, *arguments)

    monkeypatch.setattr(VolumeReader, step, after_gc)

    assert verify_root(volume.root) == ()


def test_a_reader_beside_it_sees_whole_bundles_or_none(volume: CacheVolume) -> None:
    body = """
import select
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    bundle, aside = volume.load(IDENTITY, PLAN, 4)
    assert aside == (), aside
"""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", CHILD + body, str(volume.root)]
    reader = subprocess.Popen(command, text=True, env=child_environment(), **pipes)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    for number in range(60):
        files = bundle_files(v1_file({key(bucket=bucket): number for bucket in range(300)}))
        volume.publish(IDENTITY, bundle_of(files), files)
        age(volume.root)
        assert gone(gc(volume)) == [f"v1/{IDENTITY.digest}"]
    _, err = reader.communicate("stop\n", timeout=60)

    assert reader.returncode == 0, err
    assert verify_root(volume.root) == ()


class Meanwhile(housekeeping.Survey):
    """Lets something happen between the listing and the removal."""

    happens: Any = None

    def listing(self) -> Any:
        found = super().listing()
        type(self).happens()
        return found


@pytest.mark.parametrize("what", ["publish", "round", "lease", "partial"])
def test_what_comes_into_use_after_it_was_listed_stays(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stored = publish(volume)
    age(volume.root)
    lease = lease_of(volume)
    happens = {
        "publish": lambda: publish(volume, 2),
        "round": lambda: record_round(volume, stored.digest),
        "lease": lease.try_acquire,
        "partial": lambda: Partials(volume.root, IDENTITY, PLAN, None).write("g-0", encode_v1(v1_file())),
    }
    monkeypatch.setattr(Meanwhile, "happens", happens[what])
    monkeypatch.setattr(housekeeping, "Survey", Meanwhile)

    report = gc(volume)
    lease.release()

    assert gone(report) == []
    assert why(report, f"v1/{IDENTITY.digest}").startswith(
        {"publish": "changed while gc looked", "round": "in use by group decode-0"}.get(what, "a group tunes for it")
    )
    assert load(volume) is not None


def test_two_at_once_do_each_others_work(volume: CacheVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = inhabited(volume)

    def other() -> None:
        monkeypatch.undo()
        assert sorted(gone(gc(volume))) == expected

    monkeypatch.setattr(Meanwhile, "happens", other)
    monkeypatch.setattr(housekeeping, "Survey", Meanwhile)

    report = gc(volume)

    assert report.of("failed") == []
    assert load(volume) is not None


def test_a_newer_versions_round_record_keeps_every_bundle(volume: CacheVolume) -> None:
    publish(volume, 1), publish(volume, 2)
    volume.write_json("rounds/decode-0.json", {"schema": 2, "names": "what this version cannot know"})
    age(volume.root)

    assert gone(gc(volume)) == []

    volume.write_json("rounds/decode-0.json", {"schema": 1, "what": "nobody believes"})
    assert gone(gc(volume)) == [f"v1/{IDENTITY.digest}"]


def test_a_newer_versions_bundle_is_not_for_this_version_to_judge(volume: CacheVolume) -> None:
    old, new = publish(volume, 1), publish(volume, 2)
    path = bundle_path(volume, new) / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "schema": 2}))
    age(volume.root)

    report = gc(volume, 1)

    assert gone(report) == []
    assert why(report, bundle_path(volume, old)) == "the newest of its plan"


DRIVER = """
import os, shutil, signal
from initwarm.edges import housekeeping
from initwarm.edges.reading import verify_root
from initwarm.settings import GcSettings

left = -1
def counted(function):
    def call(*args, **named):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*args, **named)
    return call

def clean(root):
    return housekeeping.clean(root, GcSettings(0, 0.0, False))

number = 0
while True:
    root = Path(sys.argv[1]) / str(number)
    shutil.copytree(Path(sys.argv[1]) / "base", root, copy_function=shutil.copy2)
    child = os.fork()
    if child == 0:
        for name in ("open", "mkdir", "write", "fsync", "rename", "unlink", "rmdir", "close", "listdir", "stat"):
            setattr(os, name, counted(getattr(os, name)))
        left = number
        clean(root)
        os._exit(0)
    was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    bundle, aside = CacheVolume(root).load(IDENTITY, PLAN, 4)
    assert aside == (), (number, aside)
    assert verify_root(root) == (), (number, verify_root(root))
    clean(root)
    left_over = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    left_over = [name for name in left_over if not name.split("/")[-1].startswith(".staging-") or "gc" in name]
    print(was_killed, bundle is not None, left_over)
    shutil.rmtree(root)
    if not was_killed:
        break
    number += 1
"""


def test_killed_at_any_operation_it_leaves_nothing_half_visible_and_the_next_one_finishes(tmp_path: Path) -> None:
    volume = prepared(tmp_path / "base")
    publish(volume)
    publish_other(volume, 1)
    (volume.root / "v1" / "quarantine" / ("0" * 16) / "a" / "b").mkdir(parents=True)
    age(volume.root)

    command = [sys.executable, "-c", CHILD + DRIVER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=110)

    assert done.returncode == 0, done.stderr
    rows = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert len(rows) > 100
    assert [row[0] for row in rows] == ["True"] * (len(rows) - 1) + ["False"]
    assert [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True), "once gone, it stays away"
    assert {row[1] for row in rows} == {"True", "False"}
    assert {row[2] for row in rows} == {"['CACHEDIR.TAG', 'README', 'v1', 'v1/quarantine']"}


# Volumes that refuse.


def mounted(mount: str, volume: CacheVolume, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command after a mount that nobody else sees."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs to mount (unshare -rm)")
    script = f'{mount} && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-m", "initwarm", "gc", str(volume.root)]
    environment = child_environment()
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False
    )


def test_a_read_only_volume_is_an_error_and_a_dry_run_says_whose_clock_it_used(volume: CacheVolume) -> None:
    expected = inhabited(volume)
    mount = f"mount --bind {volume.root} {volume.root} && mount -o remount,ro,bind {volume.root}"
    before = tree(volume.root)

    real = mounted(mount, volume, "--keep-identities", "0")
    dry = mounted(mount, volume, "--keep-identities", "0", "--dry-run")

    assert (real.returncode, real.stdout) == (74, "")
    assert "is mounted read-only (EROFS). Nothing was removed." in real.stderr
    assert dry.returncode == 0, dry.stderr
    assert sorted(line.split()[3] for line in dry.stdout.splitlines() if line.startswith("would remove")) == expected
    assert "ages are by this host's clock" in dry.stdout
    assert tree(volume.root) == before


def test_an_item_that_cannot_be_moved_is_named_and_the_rest_goes(volume: CacheVolume) -> None:
    busy, other = publish_other(volume, 1), publish_other(volume, 2)
    age(volume.root)
    place = volume.root / "v1" / busy

    done = mounted(f"mount --bind {place} {place}", volume, "--keep-identities", "0")

    assert done.returncode == 74
    assert f"FAILED identity v1/{busy}" in done.stdout
    assert "(EBUSY). It was left as it is." in done.stdout
    assert f"removed identity v1/{other}" in done.stdout
    assert (place / "manifest.json").exists()
    assert not (volume.root / "v1" / other).exists()


def test_what_cannot_be_erased_is_out_of_sight_and_the_next_one_goes_on(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(volume)
    age(volume.root)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        report = gc(volume)

    (failed,) = report.of("failed")
    assert "the next gc goes on with it" in failed.why
    assert load(volume) is None
    assert verify_root(volume.root) == ()
    assert [path.rpartition("-")[0] for path in gone(gc(volume))] != []
    assert list(volume.root.rglob(".staging*")) == []


@pytest.mark.parametrize("name", ["identity", "group", "partials"])
def test_an_item_that_cannot_be_read_is_named_and_the_rest_goes(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bad, other = publish_other(volume, 1), publish_other(volume, 2)
    for path in ("addresses/decode-0", f"partials/{bad}"):
        volume.root.joinpath("v1", path).mkdir(parents=True)
    age(volume.root)
    (path,) = {"identity": [f"v1/{bad}"], "group": ["v1/addresses/decode-0"], "partials": [f"v1/partials/{bad}"]}[name]
    real = Directory.child

    def child(directory: Directory, inner: str) -> Directory:
        if directory.path / inner == volume.root / path:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(directory, inner)

    monkeypatch.setattr(Directory, "child", child)

    report = gc(volume)

    assert [one.path for one in report.of("failed")] == [path]
    assert f"v1/{other}" in gone(report)
    assert volume.root.joinpath(path).exists()
    assert (volume.root / "v1" / bad).exists() == (name != "group")


@pytest.mark.parametrize("name", ["rounds", "leases", "partials"])
def test_nothing_goes_where_it_cannot_be_known_what_is_in_use(
    volume: CacheVolume, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inhabited(volume)
    before = tree(volume.root)
    real = Directory.child

    def child(directory: Directory, inner: str) -> Directory:
        if inner == name:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(directory, inner)

    monkeypatch.setattr(Directory, "child", child)

    with pytest.raises(VolumeError, match="EACCES"):
        gc(volume)
    assert tree(volume.root) == before


def test_a_full_volume_can_be_cleaned(volume: CacheVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    inhabited(volume)
    real = os.open

    def full(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", full)

    report = gc(volume)

    assert len(gone(report)) == 7
    assert not report.is_host_clock


def test_the_clock_is_the_volumes(volume: CacheVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(volume)
    monkeypatch.setattr(time, "time", lambda: 1e11)

    assert gone(gc(volume)) == []


# The command line.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["gc", *arguments])
    return (code, *capsys.readouterr())


def test_the_command_prints_a_list_or_json(volume: CacheVolume, capsys: pytest.CaptureFixture[str]) -> None:
    expected = inhabited(volume)
    arguments = [str(volume.root), "--keep-identities", "1", "--older-than", "7d"]

    code, text, _ = run(capsys, *arguments, "--dry-run")
    assert code == 0
    assert text.splitlines()[-1].startswith(f"{volume.root}: would remove 7 (")
    code, out, _ = run(capsys, *arguments, "--format", "json")
    value = json.loads(out)

    assert code == 0
    assert sorted(one["path"] for one in value["outcomes"] if one["what"] == "removed") == expected
    assert (value["schema"], value["dry_run"], value["clock"]) == (1, False, "volume")
    assert run(capsys, *arguments)[1].splitlines()[-1] == f"{volume.root}: removed 0 (0 bytes), kept 2"


@pytest.mark.parametrize(
    "flags", [["--older-than", "soon"], ["--keep-identities", "-1"], ["--older", "1"], ["--format", "xml"], ["--", "x"]]
)
def test_bad_flags_are_a_usage_error_and_nothing_goes(
    volume: CacheVolume, capsys: pytest.CaptureFixture[str], flags: Sequence[str]
) -> None:
    inhabited(volume)
    before = tree(volume.root)

    code, out, err = run(capsys, str(volume.root), *flags)

    assert (code, out) == (64, "")
    assert err.startswith("initwarm: ")
    assert tree(volume.root) == before


def test_a_root_that_is_missing_a_file_or_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "v1").symlink_to(tmp_path / "other")

    for name in ("missing", "file", "linked"):
        code, _, err = run(capsys, str(tmp_path / name))
        assert code == 74
        assert "Nothing was removed." in err
    assert run(capsys, str(tmp_path / "other"))[:2] == (0, f"{tmp_path / 'other'}: removed 0 (0 bytes), kept 0\n")
    assert list((tmp_path / "other").iterdir()) == []
