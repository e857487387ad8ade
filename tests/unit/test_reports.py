"""docs/reports.md names tests that exist, and misses no report of the parts that it covers."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "reports.md").read_text()
ROWS = dict(re.findall(r"^\| (R\d+) \| .+? \| (.+) \|$", TABLE, re.MULTILINE))
AUTOTUNER = {f"R{number}" for number in range(1, 27)} - {"R4", "R12"}
VOLUMES = {"R51", *(f"R{number}" for number in range(54, 69))} - {"R60"}
RENDEZVOUS = {f"R{number}" for number in range(69, 89)} - {"R73", "R83"}
RANKS = {f"R{number}" for number in range(89, 105)} - {"R97"}
#: How a row begins that has no test yet.
WAITS = "waits for "


def test_no_report_is_missing() -> None:
    assert set(ROWS) >= AUTOTUNER | VOLUMES | RENDEZVOUS | RANKS


@pytest.mark.parametrize("report", sorted(report for report, row in ROWS.items() if not row.startswith(WAITS)))
def test_each_row_names_tests_that_exist_and_carry_its_number(report: str) -> None:
    known = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", ROWS[report])

    assert named
    assert [name for name in named if f"def {name}(" not in known] == []
    assert any(re.search(rf"_{report.lower()}_", name) for name in named)
