from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parents[2]
OUTSIDE = {"__init__", "__main__", "cli"}


def contract(name: str) -> dict[str, Any]:
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = [contract for contract in settings["contracts"] if contract["id"] == name]
    return dict(found)


def test_every_module_that_decides_is_under_the_contract_that_keeps_it_pure() -> None:
    modules = {path.stem for path in (PROJECT / "initwarm").glob("*.py")} - OUTSIDE

    assert {f"initwarm.{module}" for module in modules} == set(contract("pure")["source_modules"])
