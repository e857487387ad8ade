"""Pods as a test sees them: start some, wait for their ends, read what they said."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests" / "plugins"
PATIENCE_SECONDS = 100.0


@dataclass
class Pod:
    """One agent process and what it leaves behind."""

    name: str
    directory: Path
    pid: int = 0
    status: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)

    @property
    def log(self) -> str:
        path = self.directory / f"{self.name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        found = []
        for line in self.log.splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and (name is None or event.get("event") == name):
                    found.append(event)
        return found

    @property
    def message(self) -> dict[str, Any]:
        """The termination message."""
        data = (self.directory / f"{self.name}.message").read_bytes()
        assert len(data) <= 1024
        message = json.loads(data)
        assert isinstance(message, dict)
        return message

    def wait(self, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        assert self.ended.wait(timeout_seconds), f"{self.name} is still running:\n{self.log}"
        assert self.status is not None
        return self.status

    def wait_for(self, event: str, timeout_seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """The first event of this name, as soon as the pod has said it."""
        pause = threading.Event()
        for _ in range(int(timeout_seconds / 0.02)):
            found = self.events(event)
            if found:
                return found[0]
            assert not self.ended.is_set(), f"{self.name} ended without saying {event}:\n{self.log}"
            pause.wait(0.02)
        raise AssertionError(f"{self.name} did not say {event}:\n{self.log}")

    def wait_for_text(self, text: str, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """Until the pod has printed this."""
        pause = threading.Event()
        for _ in range(int(timeout_seconds / 0.02)):
            if text in self.log:
                return
            pause.wait(0.02)
        raise AssertionError(f"{self.name} did not print {text}:\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def processes(self) -> list[int]:
        """Living processes of this pod: they are of one process group."""
        return living_processes(self.pid)


def living_processes(process_group: int) -> list[int]:
    """Processes of a group that run; the kernel may not have collected ended ones yet."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[2]) == process_group:
                    found.append(int(entry.name))
    return found


class PodServer:
    """The process that pods are forked from."""

    def __init__(self, workspace: Path) -> None:
        #: FlashInfer's, of all pods: it is read once, when FlashInfer is imported.
        self.workspace = workspace
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.pod_server"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "FLASHINFER_WORKSPACE_BASE": str(workspace),
            },
        )
        self._pods: dict[int, Pod] = {}
        self._starting = threading.Lock()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "ready" in said:
                self._ready.set()
            elif "pid" in said:
                self._pods[said["id"]].pid = said["pid"]
                self._pods[said["id"]].started.set()
            else:
                pod = self._pods[said["id"]]
                pod.status = said["status"]
                pod.ended.set()

    def start(
        self,
        directory: Path,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
        placement: Mapping[str, Any] | None = None,
    ) -> Pod:
        """Fork a pod.

        Args:
            directory: for its log and termination message.
            name: of the pod and of these files.
            arguments: of `initwarm`.
            environ: in addition to the least that a pod needs.
            command: what follows `--`.
            placement: namespaces, user and umask of the pod (`tests.support.netns.placement`); None for this
                process's own.
        """
        assert self._ready.wait(120), "torch and FlashInfer were not imported in two minutes"
        pod = Pod(name, directory)
        with self._starting:
            number = len(self._pods)
            self._pods[number] = pod
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH") if key in os.environ}
        request = {
            "id": number,
            "arguments": [
                *arguments,
                "--termination-message",
                str(directory / f"{name}.message"),
                *(["--", *command] if command else []),
            ],
            "environ": {
                **kept,
                "PYTHONPATH": f"{ROOT}:{PLUGINS}",
                "INITWARM_LOG_FORMAT": "json",
                "INITWARM_POD_NAME": name,
                "OMP_NUM_THREADS": "1",
                **(environ or {}),
            },
            "path": [str(PLUGINS)],
            "stderr": str(directory / f"{name}.log"),
            "placement": dict(placement or {}),
        }
        assert self._process.stdin is not None
        with self._starting:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        assert pod.started.wait(30)
        return pod

    def close(self) -> None:
        """End the server, and the pods that a failed test has left."""
        for pod in self._pods.values():
            if not pod.ended.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pod.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._thread.join(5)


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to connections meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
