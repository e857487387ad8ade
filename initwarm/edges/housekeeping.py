"""Lists what a cache volume holds, and removes from it what `initwarm.retention` decides, while groups use the volume.

What goes is renamed away first, to `v1/.staging-gc-<nonce>`, which no reader looks at, and erased there: nobody ever
sees a part of it. Who had it open already finds it gone, which is a miss. A gc that is killed leaves such a name, and
the next one erases it. Links are never followed, and names that initwarm does not write are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from initwarm.addressbook import ADDRESSES
from initwarm.bundle import BUNDLE, MAC, STORE_FILE, V1_FILE, Place, parse_bundle, parse_place
from initwarm.edges.files import Directory, RefusedError, is_staging, unique_name, volume_error
from initwarm.edges.leases import LEASES
from initwarm.edges.partials import PARTIALS
from initwarm.edges.reading import ROUNDS
from initwarm.edges.volume_reader import BUNDLES, LAYOUT, QUARANTINE, VolumeReader, parts_of
from initwarm.errors import DataError, VolumeError
from initwarm.identity import MANIFEST
from initwarm.jsontext import RECORD_BYTES, NewerSchemaError, is_digest, parse_json, parse_record
from initwarm.lease import RECORD
from initwarm.retention import BundleFacts, Item, Kind, Listing, Outcome, Report, Retention, Round, claim_on, decide
from initwarm.rounds import SCHEMA as ROUND_SCHEMA
from initwarm.rounds import parse_round
from initwarm.settings import GcSettings

TRASH = ".staging-gc-"
MAX_DEPTH = 64

_UNTOUCHED = "It was left as it is."
#: The volume can be listed all the same, for a dry run.
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HEX = "[0-9a-f]{64}"
_PLACE = f"{BUNDLES}/{_HEX}/(0|[1-9][0-9]*)-{_HEX}/"
_FILE = "|".join(map(re.escape, (BUNDLE, MAC, V1_FILE, STORE_FILE)))
_LEASE = re.compile(f"({_HEX})-({_HEX})")
_QUARANTINED = re.compile(r"([0-9a-f]{16}-[0-9a-f]{16}-[0-9]+-)?[0-9a-f]{16}")
#: What initwarm writes in an item, by path in it. A directory ends in a slash, and so does the item's own empty path;
#: what is neither a directory nor a plain file ends in `@`. Work in progress may be anywhere.
_IDENTITY = re.compile(f"/|{MANIFEST}|{BUNDLES}/({_HEX}/)?|{_PLACE}({_FILE})?")
_BUNDLE = re.compile(f"/|{_FILE}")
_PARTIALS = re.compile(r"/|[^/.][^/]*\.json")
_PARTIALS_OF_IDENTITY = re.compile(rf"/|{_HEX}/([^/.][^/]*\.json)?")
_TERMS = re.compile(f"/|[1-9][0-9]*/({RECORD})?")
_ADDRESS = re.compile("")
_ADDRESSES = re.compile(r"/|[0-9a-f]{32}\.json")
_ANYTHING = re.compile(".*", re.DOTALL)
_WORK = re.compile(r"(.*/)?\.staging-.*", re.DOTALL)

Parts = tuple[str, ...]


def clean(root: Path, settings: GcSettings) -> Report:
    """Remove from a cache root what nobody uses any more, or say what would be removed.

    Errors with one item do not stop the rest; they are outcomes.

    Raises:
        VolumeError: the volume cannot be read, or not be written; nothing was removed.
    """
    try:
        with Directory.open(root) as top:
            if LAYOUT not in top.names():
                return Report(str(root), settings.is_dry_run, False, ())
            with top.child(LAYOUT) as layout:
                return _Housekeeper(VolumeReader(root), layout, settings).report()
    except OSError as problem:
        raise volume_error(problem, root, "Nothing was removed.") from problem
    except RefusedError as problem:
        raise VolumeError(
            f"{root}: {problem}.", "Nothing was removed.", "Give the root of a cache volume."
        ) from problem


class _Housekeeper:
    """One gc of one volume; `layout` is its directory v1."""

    def __init__(self, reader: VolumeReader, layout: Directory, settings: GcSettings) -> None:
        self._reader = reader
        self._layout = layout
        self._settings = settings
        self._survey = Survey(reader)

    def report(self) -> Report:
        now, is_host_clock = self._now()
        retention = Retention(self._settings.keep_identities, self._settings.older_than, now)
        outcomes = []
        for verdict in decide(self._survey.listing(), retention):
            item, what, why = verdict.item, "kept", verdict.why
            if item.is_unreadable:
                what = "failed"
            elif verdict.is_removed and self._settings.is_dry_run:
                what = "removed"
            elif verdict.is_removed:
                what, why = self._remove(item, why, retention)
            outcomes.append(Outcome(item.path, item.kind, item.size, what, why))
        return Report(str(self._reader.root), self._settings.is_dry_run, is_host_clock, tuple(outcomes))

    def _now(self) -> tuple[float, bool]:
        """The time by the volume's clock, whose times of change are compared with it; or else by this host's."""
        name = unique_name()
        try:
            self._layout.write(name, b"")
            return self._layout.status(name).st_mtime, False
        except OSError as problem:
            if problem.errno in _FULL:
                # A full volume is what this command is for: changing a time needs no space.
                return self._layout.touch(), False
            if self._settings.is_dry_run and problem.errno in _NOT_WRITABLE:
                return time.time(), True
            raise
        finally:
            self._layout.discard(name)

    def _remove(self, item: Item, why: str, retention: Retention) -> tuple[str, str]:
        """Take an item away, unless something has begun to use it since it was listed."""
        path = self._reader.root / item.path
        try:
            if self._survey.has_changed(item):
                return "kept", "changed while gc looked"
            if item.kind in (Kind.IDENTITY, Kind.BUNDLE):
                claim = claim_on(item, self._survey.claims(), retention)
                if claim is not None:
                    return "kept", claim
            trash = item.path.rpartition("/")[2] if item.kind is Kind.TRASH else self._set_away(item)
        except FileNotFoundError:
            return "removed", f"{why} (another process was faster)"
        except OSError as problem:
            return "failed", str(volume_error(problem, path, _UNTOUCHED))
        except (RefusedError, VolumeError) as problem:
            return "failed", f"{problem} {_UNTOUCHED}"
        try:
            self._erase(trash)
        except OSError as problem:
            trash_path = self._reader.root / LAYOUT / trash
            effect = "What is left of it is out of sight, and the next gc goes on with it."
            return "failed", str(volume_error(problem, trash_path, effect))
        return "removed", why

    def _set_away(self, item: Item) -> str:
        """Rename an item out of every reader's sight; on disk before anything in it is erased."""
        *above, name = item.path.split("/")
        trash = _trash_name()
        with self._reader.open(tuple(above)) as directory:
            directory.move(name, self._layout, trash)
            directory.sync()
        self._layout.sync()
        return trash

    def _erase(self, trash: str) -> None:
        """Erase what has been set away. Directories in it are moved up first, so that none is too deep to reach."""
        waiting = [trash]
        for name in waiting:
            with contextlib.suppress(FileNotFoundError):
                if not _is_directory(self._layout.status(name)):
                    self._layout.remove(name)
                    continue
                with self._layout.child(name) as directory:
                    for inner in directory.names():
                        if _is_directory(directory.status(inner)):
                            waiting.append(_trash_name())
                            directory.move(inner, self._layout, waiting[-1])
                        else:
                            directory.remove(inner)
                self._layout.remove_directory(name)


class Survey:
    """What is on a volume, without changing anything.

    Args:
        reader: of the volume.
    """

    def __init__(self, reader: VolumeReader) -> None:
        self._reader = reader

    def listing(self) -> Listing:
        """Everything that could be removed, and what is known to be in use.

        Raises:
            VolumeError: one of the directories in which all of a kind lie cannot be read.
        """
        claims = self.claims()
        return replace(claims, items=(*claims.items, *self._unclaiming()))

    def claims(self) -> Listing:
        """What says that an environment is in use: rounds, leases and partials.

        Raises:
            VolumeError: as for `listing`.
        """
        items: list[Item | None] = []
        for name in self._reader.names((LAYOUT, LEASES)):
            if match := _LEASE.fullmatch(name):
                parts = (LAYOUT, LEASES, name)
                items.append(self._item(Kind.LEASE, parts, _TERMS, identity=match[1], plan=match[2]))
        items += map(self._partials, filter(is_digest, self._reader.names((LAYOUT, PARTIALS))))
        rounds, unread = [], []
        for name in self._reader.names((LAYOUT, ROUNDS)):
            if name.endswith(".json") and not is_staging(name):
                try:
                    rounds.append(self._round((LAYOUT, ROUNDS, name)))
                except NewerSchemaError:
                    unread.append("/".join((LAYOUT, ROUNDS, name)))
        return Listing(_present(items), tuple(one for one in rounds if one is not None), tuple(unread))

    def has_changed(self, item: Item) -> bool:
        """Whether an item has changed since it was listed.

        Raises:
            FileNotFoundError: it is gone.
            RefusedError, VolumeError: it cannot be read.
        """
        fresh = self._measured(tuple(item.path.split("/")), _ANYTHING)
        return (fresh["size"], fresh["touched"]) != (item.size, item.touched)

    def _unclaiming(self) -> tuple[Item, ...]:
        found = self._unfinished(())
        for name in self._reader.names((LAYOUT,)):
            if is_staging(name):
                found.append(self._item(Kind.TRASH if name.startswith(TRASH) else Kind.STAGING, (LAYOUT, name)))
            elif is_digest(name):
                found.append(self._identity(name))
        for above in (ROUNDS, LEASES, PARTIALS, ADDRESSES):
            found += self._unfinished((LAYOUT, above))
        for name in filter(_QUARANTINED.fullmatch, self._reader.names((LAYOUT, QUARANTINE))):
            found += [self._item(Kind.QUARANTINE, (LAYOUT, QUARANTINE, name))]
        found += [self._addresses(name) for name in self._reader.names((LAYOUT, ADDRESSES)) if not name.startswith(".")]
        return _present(found)

    def _identity(self, identity: str) -> Item | None:
        top = (LAYOUT, identity)
        try:
            parts = self._unfinished(top)
            for plan in filter(is_digest, self._reader.names((*top, BUNDLES))):
                above = (*top, BUNDLES, plan)
                places = (parse_place(identity, plan, name) for name in self._reader.names(above))
                parts += [*self._unfinished(above), *(self._bundle(place) for place in places if place is not None)]
        except VolumeError as problem:
            return _unreadable(Kind.IDENTITY, top, problem, identity=identity)
        return self._item(Kind.IDENTITY, top, _IDENTITY, identity=identity, parts=_present(parts))

    def _bundle(self, place: Place) -> Item | None:
        item = self._item(Kind.BUNDLE, parts_of(place), _BUNDLE, identity=place.identity, plan=place.plan)
        if item is None or item.is_unreadable:
            return item
        facts = BundleFacts(place.generation, place.digest, None, False)
        with contextlib.suppress(FileNotFoundError, RefusedError, DataError, VolumeError, OSError):
            bundle = parse_bundle(self._reader.read((*parts_of(place), BUNDLE), RECORD_BYTES))
            with self._reader.open(parts_of(place)) as directory:
                is_whole = all(directory.status(name).st_size == file.size for name, file in bundle.files.items())
            serves = None if bundle.rank_free else bundle.world_size
            facts = replace(facts, serves=serves, is_whole=is_whole and bundle.digest == place.digest)
        return replace(item, bundle=facts)

    def _partials(self, identity: str) -> Item | None:
        top = (LAYOUT, PARTIALS, identity)
        found = []
        try:
            for plan in filter(is_digest, self._reader.names(top)):
                parts = _present(self._unfinished((*top, plan)))
                item = self._item(Kind.PARTIALS, (*top, plan), _PARTIALS, identity=identity, plan=plan, parts=parts)
                found.append(item)
        except VolumeError as problem:
            return _unreadable(Kind.PARTIALS, top, problem, identity=identity)
        return self._item(Kind.PARTIALS, top, _PARTIALS_OF_IDENTITY, identity=identity, parts=_present(found))

    def _addresses(self, group: str) -> Item | None:
        top = (LAYOUT, ADDRESSES, group)
        try:
            found = self._unfinished(top)
            for name in filter(_ADDRESSES.fullmatch, self._reader.names(top)):
                found += [self._item(Kind.ADDRESSES, (*top, name), _ADDRESS)]
        except VolumeError as problem:
            return _unreadable(Kind.ADDRESSES, top, problem)
        return self._item(Kind.ADDRESSES, top, _ADDRESSES, parts=_present(found))

    def _round(self, parts: Parts) -> Round | None:
        """What a record names; None where it is one that no pod believes.

        Raises:
            NewerSchemaError: a newer version wrote it.
            VolumeError: it cannot be read.
        """
        try:
            data = self._reader.read(parts, RECORD_BYTES)
            parse_record(data, parts[-1], ROUND_SCHEMA)
            record = parse_round(parse_json(data, parts[-1]))
            if record is None:
                return None
            return Round(record.group, record.identity, record.bundle, self._measured(parts, _ANYTHING)["written"])
        except NewerSchemaError:
            raise
        except (FileNotFoundError, DataError, RefusedError):
            return None

    def _unfinished(self, above: Parts) -> list[Item | None]:
        names = filter(is_staging, self._reader.names(above))
        return [self._item(Kind.STAGING, (*above, name)) for name in names]

    def _item(self, kind: Kind, at: Parts, shape: re.Pattern[str] = _ANYTHING, **known: Any) -> Item | None:
        """An item as it is now; None where it is gone."""
        try:
            return Item("/".join(at), kind, **self._measured(at, shape), **known)
        except FileNotFoundError:
            return None
        except RefusedError as problem:
            return Item("/".join(at), kind, 0, 0.0, math.inf, obstacle=str(problem), **known)
        except VolumeError as problem:
            return _unreadable(kind, at, problem, **known)

    def _measured(self, parts: Parts, shape: re.Pattern[str]) -> dict[str, Any]:
        """Size and times of an item, and what in it is a stranger's.

        Raises:
            FileNotFoundError: there is none.
            RefusedError, VolumeError: it cannot be read.
        """

        def look() -> list[tuple[str, os.stat_result]]:
            with self._reader.open(parts[:-1]) as above:
                return list(_walk(above, parts[-1]))

        found = self._reader.patiently(look, self._reader.root.joinpath(*parts))
        files = [(path, status) for path, status in found if not _is_directory(status)]
        strange = [path for path, _ in found if not (shape.fullmatch(path) or _WORK.fullmatch(path))]
        return {
            "size": sum(status.st_size for _, status in files),
            "written": max((status.st_mtime for path, status in files if not _WORK.fullmatch(path)), default=0.0),
            "touched": max(status.st_mtime for _, status in found),
            "obstacle": _obstacle(strange[0]) if strange else None,
        }


def _obstacle(path: str) -> str:
    name = path.rstrip("/@")
    return f"holds {name}, which initwarm does not write" if name else "is not what initwarm writes there"


def _unreadable(kind: Kind, parts: Parts, problem: VolumeError, **known: Any) -> Item:
    return Item("/".join(parts), kind, 0, 0.0, math.inf, obstacle=str(problem), is_unreadable=True, **known)


def _walk(above: Directory, name: str, path: str = "", depth: int = 0) -> Iterator[tuple[str, os.stat_result]]:
    """An item and everything in it; what vanishes meanwhile is passed over, since its directory has changed then."""
    status = above.status(name)
    if not _is_directory(status):
        yield path if stat.S_ISREG(status.st_mode) else f"{path}@", status
        return
    yield f"{path}/", status
    if depth == MAX_DEPTH:
        raise RefusedError(name, f"is nested deeper than {MAX_DEPTH}")
    with above.child(name) as directory:
        for inner in directory.names():
            with contextlib.suppress(FileNotFoundError):
                yield from _walk(directory, inner, f"{path}/{inner}" if path else inner, depth + 1)


def _is_directory(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode)


def _present(items: Iterable[Item | None]) -> tuple[Item, ...]:
    return tuple(item for item in items if item is not None)


def _trash_name() -> str:
    return TRASH + unique_name().removeprefix(".staging-")
