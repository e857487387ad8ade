"""What went wrong for others on shared volumes, tried on the cache volume with real processes, mounts and users.

Errors that no local file system gives come from a preloaded library (tests/support/volume_faults.c). Reports whose
tests are elsewhere are listed in docs/reports.md.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from initwarm.bundle import V1_FILE, Bundle, FileRecord, encode_bundle
from initwarm.edges.reading import verify_root
from initwarm.edges.volume import CacheVolume, StoredBundle
from tests.support.bundles import IDENTITY, PLAN, bundle_files, bundle_of, key, v1_file
from tests.support.volume_faults import VolumeFaults, compile_library
from tests.support.volumes import CHILD, bundle_path, child_environment, load, prepared, publish, racing, tree

KEY = b"0123456789abcdef"
needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs to mount (unshare -rm)",
)
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
#: A place on the volume, as a pattern of the library.
IN_PLAN = f"v1/{IDENTITY.digest}/bundles/{PLAN}"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def faults(library: Path, tmp_path: Path) -> VolumeFaults:
    return VolumeFaults(library, tmp_path / "faults.log")


@pytest.fixture
def volume(tmp_path: Path) -> CacheVolume:
    return prepared(tmp_path / "cache")


def meeting(faults: VolumeFaults, root: Path, told: list[str], body: str, late: Path | None = None) -> str:
    """Run Python on a volume in a process that meets these faults; return what it printed."""
    environment = {**child_environment(), **faults.environment(root, told, late)}
    command = [sys.executable, "-c", CHILD + body, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


USE = """
volume.prepare()
assert volume.obstacle is None, volume.obstacle
stored = publish(volume, 2)
volume.write_json("rounds/a.json", {"schema": 1})
assert volume.read_json("rounds/a.json") == {"schema": 1}
assert volume.load(IDENTITY, PLAN, 4) == (stored, ())
assert volume.get(IDENTITY.digest, PLAN, stored.generation, stored.digest) == stored
print(stored.generation)
"""


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY])
def test_r54_a_volume_that_removes_nothing_is_used_to_the_end(
    volume: CacheVolume, faults: VolumeFaults, code: int
) -> None:
    publish(volume)

    said = meeting(faults, volume.root, [f"remove:*:{code}:0"], USE)

    assert said == "2\n"
    assert faults.lines("fault")
    assert verify_root(volume.root) == ()


def test_r54_nothing_fails_a_publication_once_it_is_visible(volume: CacheVolume, faults: VolumeFaults) -> None:
    told = [f"{function}:{IN_PLAN}:{errno.EIO}:0" for function in ("close", "fsync")]

    assert meeting(faults, volume.root, told, USE) == "1\n"

    assert {line.partition(" ")[0] for line in faults.lines("fault")} == {"close", "fsync"}
    assert load(volume) is not None


FILL = """
from initwarm.edges.engine_root import EngineRoot
files = bundle_files()
root = EngineRoot(Path(sys.argv[1]))
for ranks in ((0, 1), (0,)):
    root.fill(files, ranks)
    print(sorted(path.name for path in (root.path / "flashinfer-v1").iterdir()), root.store_path.is_dir())
root.empty()
print([path.name for path in root.path.iterdir() if not path.name.startswith(".staging-")])
"""


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOTEMPTY])
def test_r54_an_engine_root_is_filled_where_what_it_replaces_cannot_be_removed(
    tmp_path: Path, faults: VolumeFaults, code: int
) -> None:
    said = meeting(faults, tmp_path / "engine", [f"remove:*:{code}:0"], FILL)

    assert said.splitlines() == ["['rank0.json', 'rank1.json'] True", "['rank0.json'] True", "[]"]
    assert faults.lines("fault")


LOAD = "print(volume.load(IDENTITY, PLAN, 4)[0] is not None)"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("function", ["open", "read"])
@pytest.mark.parametrize("name", ["bundle.json", "flashinfer-v1.json", "flashinfer-store.json"])
def test_r55_a_file_whose_handle_is_lost_twice_is_found(
    volume: CacheVolume, faults: VolumeFaults, name: str, function: str, code: int
) -> None:
    publish(volume)

    assert meeting(faults, volume.root, [f"{function}:*/{name}:{code}:2"], LOAD) == "True\n"

    assert len(faults.lines("fault")) == 2


@pytest.mark.parametrize(("code", "name"), [(errno.ESTALE, "ESTALE"), (errno.EIO, "EIO")])
def test_r55_a_handle_that_stays_lost_is_an_error_that_names_the_path_and_the_count(
    volume: CacheVolume, faults: VolumeFaults, code: int, name: str
) -> None:
    path = bundle_path(volume, publish(volume))
    body = "try:\n    volume.load(IDENTITY, PLAN, 4)\nexcept VolumeError as problem:\n    print(problem)"

    said = meeting(faults, volume.root, [f"open:*/bundle.json:{code}:0"], body)

    assert f"{path} " in said
    assert f"({name}), in each of 5 attempts. The cache volume cannot be read." in said
    assert len(faults.lines("fault")) == 5


LOSING_HANDLES = """
import errno, os
from initwarm.edges import volume_reader
volume_reader._pause = lambda seconds: None
mine = publish(volume, 1)
volume.write_json("rounds/a.json", {"n": 1})
tactic = 1
for code, count in ((errno.ESTALE, 2), (errno.EIO, 2), (errno.ESTALE, -2)):
    for path in (".", "v1", here := f"v1/{IDENTITY.digest}", f"{here}/bundles", f"{here}/bundles/{PLAN}", "v1/rounds"):
        tactic += 2
        fresh = publish(volume, tactic)
        os.environ["VOLUME_FAULTS"] = f"open:{path}:{code}:{count}"
        try:
            outcome = OPERATION
        except VolumeError as problem:
            outcome = problem
        os.environ["VOLUME_FAULTS"] = ""
        if outcome is not True:
            print(code, path, outcome)
"""


@pytest.mark.parametrize(
    "operation",
    [
        "volume.prepare() or volume.obstacle is None",
        "volume.load(IDENTITY, PLAN, 4) == (fresh, ())",
        "volume.get(IDENTITY.digest, PLAN, mine.generation, mine.digest) == mine",
        "publish(volume, tactic + 1).generation == fresh.generation + 1",
        "volume.write_json('rounds/a.json', {'n': 1}) or True",
        "volume.read_json('rounds/a.json') == {'n': 1}",
        "volume.set_aside(fresh, 'no rank hit it').moved_to is not None",
        "len(volume.nearby(Identity({'gpu': 'another'}))) == 1",
    ],
)
def test_r55_a_directory_whose_handle_is_lost_now_and_then_stops_nothing(
    volume: CacheVolume, faults: VolumeFaults, operation: str
) -> None:
    body = "from initwarm.identity import Identity\n" + LOSING_HANDLES.replace("OPERATION", operation)

    assert meeting(faults, volume.root, [], body) == ""

    assert len(faults.lines("fault")) >= 4


WATCHING = """
from initwarm.edges.volume_reader import VolumeReader
reader = VolumeReader(volume.root)
plan = ("v1", IDENTITY.digest, "bundles", PLAN)
volume.prepare()
assert volume.load(IDENTITY, PLAN, 4) == (None, ())
assert volume.read_json("rounds/a.json") is None
assert reader.names(plan) == reader.names(("v1", "leases", "a")) == []
print("looked", flush=True)
for announced in sys.stdin:
    generation, digest = announced.split()
    found = volume.get(IDENTITY.digest, PLAN, int(generation), digest)
    print(found is not None, len(reader.names(plan)), volume.read_json("rounds/a.json"), flush=True)
"""


class Watcher:
    """Another host's process, which has found nothing; a name that it once looked up in vain stays unknown to it."""

    def __init__(self, faults: VolumeFaults, root: Path, late: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD + WATCHING, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**child_environment(), **faults.environment(root, late=late)},
        )
        assert self._line() == "looked"

    def look_for(self, announced: StoredBundle) -> str:
        """Whether it sees an announced bundle, how many are listed, and the record."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{announced.generation} {announced.digest}\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


@pytest.fixture
def watcher(volume: CacheVolume, faults: VolumeFaults, tmp_path: Path) -> Iterator[Watcher]:
    watching = Watcher(faults, volume.root, tmp_path / "late")
    yield watching
    watching.process.communicate(timeout=60)
    assert watching.process.returncode == 0


def test_what_nobody_announced_is_not_looked_up_so_that_no_cache_denies_it_later(
    volume: CacheVolume, faults: VolumeFaults, watcher: Watcher
) -> None:
    stored = publish(volume)
    volume.write_json("rounds/a.json", {"n": 1})

    assert watcher.look_for(stored) == "True 1 {'n': 1}"
    assert faults.lines("absent") == []


def test_an_announced_bundle_that_a_cache_denies_is_not_there_yet_and_found_later(
    volume: CacheVolume, faults: VolumeFaults, watcher: Watcher, tmp_path: Path
) -> None:
    publish(volume, 1)
    announced = publish(prepared(tmp_path / "elsewhere"), 2)
    announced = replace(announced, generation=2)

    assert watcher.look_for(announced) == "False 1 None"
    assert publish(volume, 2) == announced
    assert watcher.look_for(announced) == "False 2 None"
    (tmp_path / "late").touch()
    assert watcher.look_for(announced) == "True 2 None"
    assert len(faults.lines("absent")) == 1
    assert not (volume.root / "v1" / "quarantine").exists()


KILLED_AT_RANDOM = """
import os, random, select, signal, time
from initwarm.bundle import V1_FILE, Bundle, FileRecord, encode_bundle
from initwarm.edges.reading import verify_root

def life(root, tactic, seconds):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        publish(CacheVolume(root), tactic, count=30)
        os._exit(0)
    os.close(write)
    # Until the child has ended, or its instant has come.
    select.select([read], [], [], seconds)
    os.kill(child, signal.SIGKILL)
    os.close(read)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

chance = random.Random(56)
killed = 0
for start in range(0, 200, 20):
    root = Path(sys.argv[1]) / str(start)
    volume = CacheVolume(root)
    volume.prepare()
    began = time.monotonic()
    life(root, start, 60)
    usual = time.monotonic() - began
    seen = 1
    for tactic in range(start + 1, start + 21):
        killed += life(root, tactic, chance.uniform(0, usual))
        assert verify_root(root) == (), verify_root(root)
        stored, aside = volume.load(IDENTITY, PLAN, 4)
        assert aside == () and stored.generation >= seen
        seen = stored.generation
print(killed, len(list(Path(sys.argv[1]).rglob(".staging-*"))), len(list(Path(sys.argv[1]).rglob("bundle.json"))))
"""


def test_r56_of_200_writers_killed_at_random_instants_none_leaves_half_a_bundle(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD + KILLED_AT_RANDOM, str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=110)

    assert done.returncode == 0, done.stderr
    killed, unfinished, whole = map(int, done.stdout.split())
    assert killed > 50, "else the instants say little"
    assert unfinished > 10
    assert whole > 10


def test_r57_readers_beside_a_writer_only_ever_see_whole_bundles(volume: CacheVolume) -> None:
    publish(volume)
    body = """
me, last = int(sys.argv[2]), 40
sys.stdin.readline()
if me == 0:
    for number in range(2, last + 1):
        publish(volume, number, count=50)
seen = loads = 0
while seen < last:
    stored, aside = volume.load(IDENTITY, PLAN, 4)
    assert aside == ()
    assert stored.generation >= seen
    seen, loads = stored.generation, loads + 1
print(loads)
"""

    loads = [int(printed) for printed in racing(body, volume.root, 9)]

    assert max(loads) > 1
    assert verify_root(volume.root) == ()


def test_r57_readers_of_files_that_are_rewritten_in_place_miss_and_never_fail(volume: CacheVolume) -> None:
    body = """
import json
from initwarm.bundle import V1_FILE
from initwarm.edges.volume_reader import parts_of
me, done = int(sys.argv[2]), volume.root / "done"
sys.stdin.readline()
found = aside = missed = 0
if me == 0:
    for number in range(120):
        stored = volume.load(IDENTITY, PLAN, 4)[0] or publish(volume, number, count=50)
        for path in volume.root.joinpath(*parts_of(stored.place)).glob("*.json"):
            try:
                content = path.read_bytes()
                path.write_bytes(content[: len(content) // 2])
                path.write_bytes(content)
            except FileNotFoundError:
                pass
    done.touch()
while me and not done.exists():
    stored, quarantined = volume.load(IDENTITY, PLAN, 4)
    found += stored is not None
    aside += len(quarantined)
    if stored is not None:
        tactics = [entry[1] for name, entry in json.loads(stored.files[V1_FILE]).items() if not name.startswith("_")]
        assert len(tactics) == 50 and len(set(tactics)) == 1, tactics
    else:
        missed += 1
print(found, aside, missed)
"""

    printed = [[int(word) for word in out.split()] for out in racing(body, volume.root, 9)]

    assert [sum(count) > 0 for count in zip(*printed, strict=True)] == [True, True, True]


def traced(root: Path, body: str) -> list[str]:
    """What a process that runs Python on a volume asks the kernel below it, by strace."""
    command = ["strace", "-f", "-y", "-s0", sys.executable, "-c", CHILD + body, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stderr.splitlines() if f"{root}/" in line or f"{root}>" in line]


READING = re.compile(r"(openat|read|fstat|newfstatat|getdents64|lseek|close|execve|fcntl)\(")
CLAIMING = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|F_(OFD_)?SETLKW?|F_SETLEASE")


@needs_strace
@pytest.mark.parametrize("has_key", [False, True])
def test_r61_adopting_asks_a_closed_volume_for_nothing_but_to_read(volume: CacheVolume, has_key: bool) -> None:
    keyed = CacheVolume(volume.root, KEY if has_key else None)
    stored = publish(keyed)
    for path in (volume.root, *volume.root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    calls = traced(
        volume.root,
        f"""
volume = CacheVolume(volume.root, {keyed.key!r})
stored, aside = volume.load(IDENTITY, PLAN, 4)
assert volume.get(IDENTITY.digest, PLAN, stored.generation, stored.digest) == stored
assert volume.read_json("rounds/a.json") is None
assert volume.nearby(IDENTITY) == ()
""",
    )

    assert len([call for call in calls if call.startswith("openat") and f"{stored.digest}/bundle.json>" in call]) == 2
    assert [call for call in calls if not READING.match(call) or CLAIMING.search(call)] == []


def test_r61_a_volume_with_neither_locks_nor_hard_links_is_used_to_the_end(
    volume: CacheVolume, faults: VolumeFaults
) -> None:
    publish(volume)
    told = [f"lock:*:{errno.ENOLCK}:0", f"link:*:{errno.EPERM}:0"]
    control = """
import fcntl, os
for ask in (
    lambda file: fcntl.flock(file, fcntl.LOCK_SH), lambda file: fcntl.lockf(file, fcntl.LOCK_EX),
    lambda file: fcntl.fcntl(file, fcntl.F_SETLK, bytes(32)), lambda file: os.lockf(file.fileno(), os.F_LOCK, 0),
    lambda file: os.link(file.name, file.name + "2"),
):
    with (volume.root / "README").open("r+b") as file:
        try:
            ask(file)
            print("was granted")
        except OSError:
            pass
"""
    assert meeting(faults, volume.root, told, control) == ""
    assert len(faults.lines("fault")) == 5
    faults.log.unlink()

    assert meeting(faults, volume.root, told, USE + "volume.set_aside(stored, 'no rank hit it')") == "2\n"

    assert faults.lines("asked") == []
    assert verify_root(volume.root) == ()


@needs_strace
def test_r66_the_reads_of_a_bundle_do_not_grow_with_its_entries(tmp_path: Path) -> None:
    counts = []
    for count in (1, 500):
        volume = prepared(tmp_path / str(count))
        files = bundle_files(v1_file({key(bucket=number): 1 for number in range(count)}))
        volume.publish(IDENTITY, bundle_of(files), files)
        calls = traced(volume.root, LOAD)
        reads = [call for call in calls if re.match(r"p?read(64)?\(", call)]
        opened = [call for call in calls if call.startswith("openat") and re.search(r"/[\w.-]+\.(json|hmac)>$", call)]
        counts.append((len(calls), len(reads), len(opened)))

    assert counts[0] == counts[1]
    # Each file is opened once, and read in one piece and once more to find its end.
    assert counts[0][1:] == (6, 3)


@needs_mounts
def test_r67_a_volume_is_warm_at_every_path_and_holds_none(volume: CacheVolume, tmp_path: Path) -> None:
    keyed = CacheVolume(volume.root, KEY)
    stored = publish(keyed)
    keyed.write_json("rounds/a.json", {"n": 1})
    keyed.set_aside(publish(keyed, 2), "no rank hit it")
    elsewhere = tmp_path / "b"
    elsewhere.mkdir()
    body = (
        CHILD
        + f"""
volume = CacheVolume(Path(sys.argv[1]), {KEY!r})
volume.prepare()
stored, aside = volume.load(IDENTITY, PLAN, 4)
print(stored.generation, stored.digest, aside, volume.read_json("rounds/a.json"))
"""
    )
    mounts = f"mount --bind {volume.root} {elsewhere} && mount -t tmpfs none {volume.root}"

    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mounts} && exec "$@"', "sh", sys.executable, "-c", body, str(elsewhere)],
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=60,
    )

    assert done.stdout == f"1 {stored.digest} () {{'n': 1}}\n", done.stderr
    assert [name for name, data in tree(volume.root).items() if str(tmp_path).encode() in data] == []


def replaced_by_a_link(path: Path, target: Path) -> None:
    """Put a link in place of the v1 file, and make bundle.json and the directory's name agree with what it leads to."""
    content = target.read_bytes()
    record = json.loads((path / "bundle.json").read_bytes())
    del record["schema"]
    files = {**record["files"], V1_FILE: FileRecord(hashlib.sha256(content).hexdigest(), len(content))}
    bundle = Bundle(**{**record, "files": {name: files[name] for name in (V1_FILE,)}})
    (path / V1_FILE).unlink()
    (path / V1_FILE).symlink_to(target)
    (path / "bundle.json").write_bytes(encode_bundle(bundle))
    path.rename(path.with_name(f"1-{bundle.digest}"))


@pytest.mark.parametrize("reader_key", [None, KEY])
@pytest.mark.parametrize("target", ["/etc/passwd", "good"])
def test_r68_a_link_in_place_of_a_file_is_refused_however_well_it_is_vouched_for(
    volume: CacheVolume, tmp_path: Path, target: str, reader_key: bytes | None
) -> None:
    path = bundle_path(volume, publish(CacheVolume(volume.root, KEY)))
    good = tmp_path / "good"
    good.write_bytes((path / V1_FILE).read_bytes())
    replaced_by_a_link(path, Path(target) if target.startswith("/") else good)

    bundle, aside = CacheVolume(volume.root, reader_key).load(IDENTITY, PLAN, 4)

    assert bundle is None
    assert len(aside) == 1
    assert aside[0].moved_to is not None
    expected = "is a symbolic link" if reader_key is None else "does not authenticate"
    assert expected in aside[0].reason
    assert load(volume) is None


USERS = (1000660000, 1000770000)
ONE_TURN = """
from initwarm.bundle import V1_FILE
from initwarm.edges.engine_root import EngineRoot
from initwarm.edges.volume_reader import parts_of
me = int(sys.argv[2])
volume.prepare()
assert volume.obstacle is None, volume.obstacle
stored, aside = volume.load(IDENTITY, PLAN, 4)
assert aside == ()
volume.write_json("rounds/a.json", {"schema": 1, "turn": me})
engine = EngineRoot(Path(sys.argv[1] + "-engine"))
engine.empty()
if me % 3 == 2:
    # What the other user published turns out to be bad.
    path = volume.root.joinpath(*parts_of(stored.place)) / V1_FILE
    path.write_bytes(b"{")
    stored, (aside,) = volume.load(IDENTITY, PLAN, 4)
    assert aside.moved_to is not None, aside.reason
published = publish(volume, me)
engine.fill(published.files, (0,))
print(None if stored is None else stored.generation, published.generation, volume.read_json("rounds/a.json"))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_user(user: int, body: str, *arguments: str) -> str:
    """Run Python as a user of group 0 whom nobody has heard of, with a closed umask, no home and no other group."""
    prefix = [
        "setpriv",
        "--reuid",
        str(user),
        "--regid",
        "0",
        "--clear-groups",
        "sh",
        "-c",
        'umask 077; exec "$@"',
        "sh",
    ]
    for python in (sys.executable, "/usr/bin/python3"):
        command = [*prefix, python, "-c"]
        probe = [*command, "import initwarm.edges.volume, tests.support.bundles"]
        if subprocess.run(probe, capture_output=True, env=child_environment(), check=False).returncode == 0:
            break
    else:
        pytest.skip("needs to become another user who can run Python with this repository")
    done = subprocess.run(
        [*command, CHILD + body, *arguments], capture_output=True, text=True, env=child_environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_r64_two_users_with_closed_umasks_take_turns_and_stay_warm(public: Path) -> None:
    public.chmod(0o2775)

    said = [as_user(USERS[turn % 2], ONE_TURN, str(public / "cache"), str(turn)) for turn in range(6)]

    loaded = [None, 1, 1, 3, 4, 4]
    assert said == [f"{seen} {turn + 1} {{'schema': 1, 'turn': {turn}}}\n" for turn, seen in enumerate(loaded)]
    assert verify_root(public / "cache") == ()


def test_r64_a_cold_volume_of_another_user_says_whose_it_is(public: Path) -> None:
    root = public / "cache"
    root.mkdir(mode=0o755)
    os.chown(root, 1, 1)

    said = as_user(
        2,
        """
volume.prepare()
print(volume.load(IDENTITY, PLAN, 4))
print(volume.obstacle)
try:
    publish(volume)
except VolumeError as problem:
    print(problem.exit_code, problem)
""",
        str(root),
    )

    loaded, obstacle, refused = said.splitlines()
    assert loaded == "(None, ())"
    for told in (obstacle, refused):
        assert f"User 2 of groups 0 may not use {root}" in told
        assert f"{root} belongs to 1:1, has mode 0755 and lies on" in told
    assert refused.startswith("74 ")
