"""Runs real pods, each an agent process of its own, from one process that has imported torch and FlashInfer.

The product's fork server is started by executing Python anew, which imports torch for 7 s of CPU per pod. Here the same
command is carried out in a fork of this process instead, so that everything else of a pod is real and a test takes a
second. Requests come as JSON lines on stdin; for each, one line with the pid and later one with the status goes out.
"""

import contextlib
import ctypes
import json
import logging
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

import flashinfer  # noqa: F401
import torch

import initwarm
from initwarm.cli import main

_execute = util.spawnv_passfds
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


def fork_instead(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """What multiprocessing uses to start its fork server: a fork of this process, left with the same descriptors."""
    words = [os.fsdecode(word) for word in arguments]
    if "forkserver" not in words[-1]:
        return int(_execute(path, arguments, descriptors))
    pid = os.fork()
    if pid:
        return pid
    try:
        close_descriptors(but=descriptors)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        exec(words[-1], {})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def start(request: dict[str, Any]) -> int:
    """Fork a pod and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environ"])
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target, descriptor in ((0, null), (1, log), (2, log)):
            os.dup2(descriptor, target)
        close_descriptors()
        sys.path[:0] = request["path"]
        place(request.get("placement") or {})
        # What another image would have: the values are read after this, in every process of the pod.
        torch.version.cuda = os.environ.get("TEST_CUDA_VERSION", torch.version.cuda)
        initwarm.__version__ = os.environ.get("TEST_TOOL_VERSION", initwarm.__version__)
        util.spawnv_passfds = fork_instead  # type: ignore[assignment]
        status = main(request["arguments"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def close_descriptors(but: Sequence[int] = ()) -> None:
    """Close what a fork has inherited; FlashInfer's log opens its file again when it is written to."""
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.FileHandler):
                handler.close()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in but:
            with contextlib.suppress(OSError):
                os.close(int(name))


def place(wanted: dict[str, Any]) -> None:
    """Go where the pod is to run: into namespaces, and to another user; see `tests.support.netns.placement`."""
    directory = Path.cwd()
    for path in wanted.get("namespaces", ()):
        with Path(path).open() as namespace:
            if _libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    # Another table of mounts has a root of its own, where the process would be.
    os.chdir(directory)
    if wanted.get("umask") is not None:
        os.umask(wanted["umask"])
    if not wanted.get("has_home", True):
        os.environ.pop("HOME", None)
    if wanted.get("gid") is not None:
        os.setgroups([])
        os.setgid(wanted["gid"])
    if wanted.get("uid") is not None:
        os.setuid(wanted["uid"])
        # After a change of user /proc/self is root's until the next execve(2), which a forked pod never does.
        _libc.prctl(_PR_SET_DUMPABLE, 1)


def serve() -> None:
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(read, selectors.EVENT_READ)
    out = os.dup(1)
    os.dup2(2, 1)
    print_line(out, {"ready": True})
    names: dict[int, int] = {}
    pending = b""
    while True:
        for key, _ in selector.select():
            if key.fileobj == read:
                with contextlib.suppress(BlockingIOError):
                    os.read(read, 4096)
                continue
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = start(request)
                names[pid] = request["id"]
                print_line(out, {"id": request["id"], "pid": pid})
        while names:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in names:
                print_line(out, {"id": names.pop(pid), "status": os.waitstatus_to_exitcode(status)})


def print_line(descriptor: int, value: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    serve()
