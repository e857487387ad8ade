"""The wheel in an environment of its own that has neither torch nor FlashInfer nor the Kubernetes client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
COMMANDS = {
    "help": ["--help"],
    "topology": ["topology"],
    "topology explain": ["topology", "--explain"],
    "plan": ["plan", "host"],
    "inspect": ["inspect", "ROOT"],
    "verify": ["verify", "ROOT"],
}
# Each of these costs more than the commands themselves, or is not there.
HEAVY = ["torch", "flashinfer", "kubernetes", "asyncio", "multiprocessing", "yaml", "importlib.metadata"]
LOADED = """
import json, sys
from initwarm.cli import main
try:
    code = main(json.loads(sys.argv[1]))
except SystemExit as end:
    code = end.code or 0
loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print(json.dumps([code, loaded]), file=sys.stderr)
"""


@dataclass(frozen=True)
class CleanEnvironment:
    wheel: Path
    python: Path
    initwarm: Path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """A virtual environment with the built wheel and what it depends on, and nothing else."""
    directory = tmp_path_factory.mktemp("clean")
    environment, wheels = directory / "environment", directory / "wheels"
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    python = environment / "bin" / "python"
    if uv:
        run(uv, "build", "--quiet", "--wheel", "--out-dir", wheels, PROJECT)
        run(uv, "venv", "--quiet", "--python", sys.executable, environment)
        run(uv, "pip", "install", "--quiet", "--python", python, *wheels.glob("*.whl"))
    else:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, PROJECT)
        run(sys.executable, "-m", "venv", environment)
        run(python, "-m", "pip", "install", "--quiet", *wheels.glob("*.whl"))
    (wheel,) = wheels.glob("*.whl")
    return CleanEnvironment(wheel, python, environment / "bin" / "initwarm")


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done


def test_the_environment_lacks_what_a_serving_image_has(clean: CleanEnvironment) -> None:
    code = "import importlib.util, sys; print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])"

    assert run(clean.python, "-c", code, "torch", "flashinfer", "kubernetes").stdout.strip() == "[]"


def test_the_wheel_has_the_package_with_its_schemas_and_nothing_beside_it(clean: CleanEnvironment) -> None:
    names = zipfile.ZipFile(clean.wheel).namelist()

    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"initwarm"}
    in_tree = {f"initwarm/schemas/{path.name}" for path in (PROJECT / "initwarm" / "schemas").glob("*.json")}
    assert in_tree
    assert in_tree <= set(names)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_works_without_torch_flashinfer_and_kubernetes(
    clean: CleanEnvironment, command: list[str], tmp_path: Path
) -> None:
    words = [str(tmp_path) if word == "ROOT" else word for word in command]

    done = run(clean.initwarm, *words, cwd=tmp_path)

    assert done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_loads_nothing_that_makes_it_slow(
    clean: CleanEnvironment, command: list[str], tmp_path: Path
) -> None:
    words = [str(tmp_path) if word == "ROOT" else word for word in command]

    done = run(clean.python, "-I", "-c", LOADED, json.dumps(words), json.dumps(HEAVY), cwd=tmp_path)

    assert json.loads(done.stderr.splitlines()[-1]) == [0, []]


def test_python_m_initwarm_is_the_same_command(clean: CleanEnvironment, tmp_path: Path) -> None:
    assert run(clean.python, "-I", "-m", "initwarm", "--version", cwd=tmp_path).stdout.startswith("initwarm ")


def test_run_without_torch_ends_with_exit_69_and_says_what_is_missing(clean: CleanEnvironment, tmp_path: Path) -> None:
    command: list[str | Path] = [
        clean.initwarm,
        "run",
        "--plan",
        "host",
        "--nproc-per-node",
        "1",
        "--cache-root",
        tmp_path / "cache",
    ]
    command += ["--on-tuning-failure", "fail", "--log-format", "text"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    assert done.returncode == 69, done.stderr
    assert "torch" in done.stderr
