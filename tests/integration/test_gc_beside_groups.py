"""gc, told to keep nothing, beside groups that tune, adopt and join: they end as they would without it."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from initwarm.edges import housekeeping
from initwarm.retention import Kind, Report
from initwarm.settings import GcSettings
from tests.support.groups import Group
from tests.support.pods import Pod, PodServer

DAY = 86_400.0


def gc_until_the_end(root: Path, pods: Sequence[Pod]) -> list[Report]:
    """Clean the volume again and again until every pod has ended."""
    pods[0].wait_for("initwarm.group.joined")
    reports = []
    while not all(pod.ended.is_set() for pod in pods):
        reports.append(housekeeping.clean(root, GcSettings(0, 0.0, False)))
    return reports


def age(root: Path) -> None:
    """Let everything below a directory have changed 40 days ago."""
    when = time.time() - 40 * DAY
    for path in root.rglob("*"):
        os.utime(path, (when, when))


def test_gc_takes_nothing_from_a_group_that_tunes_nor_from_its_next_life(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 2, 1)
    root = group.cache_root(0)

    pods = group.start()
    reports = gc_until_the_end(root, pods)
    bundle = group.assert_warm(pods, tuned=True)
    assert [one for report in reports for one in report.outcomes if one.what != "kept"] == []

    age(root)
    pods = group.start()
    reports = gc_until_the_end(root, pods)
    assert group.assert_warm(pods, tuned=False) == bundle
    assert [report.of("failed") for report in reports if report.of("failed")] == []


def test_a_group_whose_bundle_goes_while_it_starts_is_warm_all_the_same(pod_server: PodServer, tmp_path: Path) -> None:
    group = Group(pod_server, tmp_path, 1, 2)
    root = group.cache_root(0)
    group.assert_warm(group.run(), tuned=True)
    age(root)

    (pod,) = group.start()
    removed = []
    while not pod.ended.is_set():
        removed += housekeeping.clean(root, GcSettings(0, 0.0, False)).of("removed")

    assert (pod.status, pod.message["outcome"], pod.message["missed"]) == (0, "warm", 0)
    assert Kind.IDENTITY in {one.kind for one in removed}
    assert pod.events("initwarm.cache.quarantined") == []
