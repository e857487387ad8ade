"""The command line: parses it, imports what the command needs and nothing else, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from initwarm import __version__, errors
from initwarm.errors import InitwarmError, UsageError
from initwarm.settings import GC_SETTINGS, RUN_SETTINGS, Setting, read_gc_settings, read_settings, topology_flags

EXAMPLES = {
    "run": "example: initwarm run --plan host --nproc-per-node 4 --cache-root /cache -- vllm serve MODEL",
    "topology": "example: initwarm topology --explain",
    "plan": "example: initwarm plan host",
    "inspect": "example: initwarm inspect /cache",
    "verify": "example: initwarm verify /cache   or, in the serving container: initwarm verify --here",
    "gc": "example: initwarm gc /cache --keep-identities 3 --older-than 30d --dry-run",
}
TOPOLOGY_FLAGS = ("group", "topology", "nnodes", "node-rank", "nproc-per-node", "leader-address", "port")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", "Nothing was done.", f"Try `{self.prog} --help`.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parser = _parser()
        flags, command = _split_command(words)
        given = vars(parser.parse_args(flags))
        if command and given["verb"] != "run":
            raise UsageError("Only `run` takes a command after `--`.", "Nothing was done.")
        return int(given.pop("function")(given, command))
    except InitwarmError as problem:
        print(f"initwarm: {problem}", file=sys.stderr)  # noqa: T201
        return problem.exit_code
    except BrokenPipeError:
        # The reader of our output (`| head`) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return errors.OK


def _split_command(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _parser() -> _Parser:
    parser = _Parser(
        prog="initwarm",
        description="Tune FlashInfer's kernels before an LLM server starts, prove the cache on every rank, and meet at "
        "a barrier.",
        epilog=EXAMPLES["run"],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"initwarm {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=_Parser)
    run = _verb(verbs, "run", "tune or adopt, prove, meet; then exit or become COMMAND", _run)
    run.usage = "initwarm run [FLAGS] [-- COMMAND ...]     (each flag is also INITWARM_<FLAG>)"
    for setting in RUN_SETTINGS:
        _add_setting(run, setting)
    topology = _verb(verbs, "topology", "say which rank this pod has, and why", _topology)
    topology.add_argument("--explain", action="store_true", help="print the whole decision table")
    topology.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    for setting in RUN_SETTINGS:
        if setting.flag in TOPOLOGY_FLAGS:
            _add_setting(topology, setting)
    plan = _verb(verbs, "plan", "check a plan and show what it tunes", _plan)
    plan.add_argument("plan", metavar="host|FILE", help="the built-in plan or a plan file")
    plan.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    inspect = _verb(verbs, "inspect", "list what a cache root holds", _inspect)
    inspect.add_argument("root", metavar="ROOT", help="the cache root")
    inspect.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    verify = _verb(verbs, "verify", "check every digest of a cache root, or whether this container will hit", _verify)
    verify.add_argument("root", metavar="ROOT", nargs="?", help="the cache root")
    verify.add_argument("--here", action="store_true", help="compare this environment with the engine root")
    verify.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    for setting in RUN_SETTINGS:
        if setting.flag in ("engine-root", "cache-root", "cache-key-file"):
            _add_setting(verify, setting)
    gc = _verb(verbs, "gc", "remove from a cache root what nobody uses any more", _gc)
    gc.add_argument("root", metavar="ROOT", help="the cache root")
    gc.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    for setting in GC_SETTINGS:
        _add_setting(gc, setting)
    return parser


def _verb(verbs: Any, name: str, summary: str, function: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=summary, description=summary, epilog=EXAMPLES[name], allow_abbrev=False, formatter_class=_wide
    )
    parser.set_defaults(function=function)
    return parser


def _wide(prog: str) -> argparse.HelpFormatter:
    """A line for each flag of `run`, so that its help fits a screen."""
    return argparse.HelpFormatter(prog, max_help_position=36, width=110)


def _add_setting(parser: argparse.ArgumentParser, setting: Setting) -> None:
    # No `choices` and no `default` here: both belong to the settings, where the environment's twin is checked too.
    shown = "|".join(setting.choices) if setting.choices else setting.metavar
    text = setting.help + (f"; default: {setting.default}" if setting.default else "")
    if setting.is_switch:
        parser.add_argument("--" + setting.flag, action="store_true", default=None, help=text)
    else:
        parser.add_argument("--" + setting.flag, metavar=shown, help=text)


def _run(given: dict[str, Any], command: Sequence[str]) -> int:
    from initwarm.edges import agent, console

    try:
        settings = read_settings(given, os.environ, command)
    except InitwarmError as problem:
        path, engine_root = (
            given[name] or os.environ.get("INITWARM_" + name.upper()) or None
            for name in ("termination_message", "engine_root")
        )
        return agent.refuse(problem, engine_root, path, console.Console())
    return agent.run(settings, os.environ, console.Console(settings.log_format))


def _topology(given: dict[str, Any], _command: Sequence[str]) -> int:
    from initwarm import topology

    explanation = topology.explain(os.environ, topology_flags(given, os.environ))
    if given["format"] == "json":
        _print(json.dumps(topology.explanation_as_json(explanation), indent=2))
    elif given["explain"]:
        _print(topology.render_explanation(explanation))
    else:
        _print(topology.render_topology(topology.resolve(os.environ, topology_flags(given, os.environ))))
    return errors.OK if explanation.error is None else errors.CONFIGURATION


def _plan(given: dict[str, Any], _command: Sequence[str]) -> int:
    from initwarm.edges.plans import load_plan
    from initwarm.planview import plan_as_json, render_plan

    plan = load_plan(given["plan"])
    is_json = given["format"] == "json"
    _print(json.dumps(plan_as_json(plan), indent=2) if is_json else render_plan(plan))
    return errors.OK


def _inspect(given: dict[str, Any], _command: Sequence[str]) -> int:
    from initwarm import catalog
    from initwarm.edges import reading

    contents = reading.inspect_root(Path(given["root"]))
    _print(
        json.dumps(catalog.contents_as_json(contents), indent=2)
        if given["format"] == "json"
        else catalog.render_contents(contents)
    )
    return errors.OK


def _verify(given: dict[str, Any], _command: Sequence[str]) -> int:
    if given["here"] == (given["root"] is not None):
        raise UsageError("`verify` takes either ROOT or --here.", "Nothing was checked.", EXAMPLES["verify"] + ".")
    from initwarm.edges import here, reading

    findings = (
        here.verify_here(given, os.environ)
        if given["here"]
        else reading.verify_root(Path(given["root"]), reading.read_key(given.get("cache_key_file")))
    )
    from initwarm import catalog

    _print(
        json.dumps(catalog.findings_as_json(findings), indent=2)
        if given["format"] == "json"
        else catalog.render_findings(findings)
    )
    return errors.BAD_DATA if findings else errors.OK


def _gc(given: dict[str, Any], _command: Sequence[str]) -> int:
    from initwarm import retention
    from initwarm.edges import housekeeping

    report = housekeeping.clean(Path(given["root"]), read_gc_settings(given, os.environ))
    is_json = given["format"] == "json"
    _print(json.dumps(retention.report_as_json(report), indent=2) if is_json else retention.render_report(report))
    return errors.VOLUME if report.of("failed") else errors.OK


def _print(text: str) -> None:
    print(text)  # noqa: T201
