"""Functions of a test in processes of their own, forked from one that has imported torch and FlashInfer."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.pods import PLUGINS, ROOT

PATIENCE_SECONDS = 100.0


@dataclass
class Ended:
    """How a process ended.

    Args:
        exit_code: negative for a signal.
        value: what the function returned.
        error: the traceback of what it raised.
        said: what it said meanwhile.
    """

    exit_code: int
    value: Any = None
    error: str | None = None
    said: list[Any] = field(default_factory=list)


def _child(
    conn: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environ: Mapping[str, str]
) -> None:
    os.environ.update(environ)
    sys.path[:0] = [str(PLUGINS)]
    try:
        value = function(*arguments, lambda what: conn.send(("said", what)))
    except Exception:
        conn.send(("error", traceback.format_exc()))
    else:
        conn.send(("value", value))


class TunerProcesses:
    """Starts them; torch is imported once for all."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "flashinfer"])

    def run(self, function: Callable[..., Any], *arguments: Any, world_size: int = 1) -> list[Ended]:
        """Call `function(*arguments, say)` once per rank, each in a process with that RANK, and wait for all."""
        ends: list[Ended] = []
        running = []
        for rank in range(world_size):
            ours, theirs = self._context.Pipe(duplex=False)
            environ = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
            process = self._context.Process(target=_child, args=(theirs, function, arguments, environ), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        for process, conn in running:
            end = Ended(0)
            try:
                while conn.poll(PATIENCE_SECONDS):
                    kind, content = conn.recv()
                    if kind == "said":
                        end.said.append(content)
                    else:
                        setattr(end, kind, content)
            except EOFError:
                pass
            process.join(PATIENCE_SECONDS)
            assert process.exitcode is not None, f"a process of {function.__name__} is still running"
            end.exit_code = process.exitcode
            conn.close()
            process.close()
            ends.append(end)
        return ends


def gloo_group(directory: Path) -> Any:
    """The group of this process's rank and all others, which meet over a file."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=30),
    )
    return dist.group.WORLD


__all__ = ["PLUGINS", "ROOT", "Ended", "TunerProcesses", "gloo_group"]
