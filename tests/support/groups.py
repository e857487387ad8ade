"""A serving group of a test: its pods, their cache roots, and what must hold for all of them at the end."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.pods import Pod, PodServer, free_port


@dataclass
class Group:
    """Pods of one group on this machine.

    Args:
        server: what pods are forked from.
        directory: of the test.
        num_nodes: pods.
        nproc: ranks of each pod.
        arguments: further flags of `run`, for all pods.
        has_own_roots: each pod has a cache root of its own, instead of one for all.
        environ: of all pods, in addition to the least that a pod needs.
        leader_address: what pods are told; None tells them none, so that only the volume says it.
        placements: where and as whom each pod runs, as `PodServer.start` takes it.
        has_uids: pods have the uid that the API server would give them: the same after a restart of the container.
    """

    server: PodServer
    directory: Path
    num_nodes: int = 1
    nproc: int = 1
    arguments: Sequence[str] = ()
    has_own_roots: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    leader_address: str | None = "127.0.0.1"
    placements: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    has_uids: bool = False
    lives: int = 0
    restarts: int = 0

    def cache_root(self, node_rank: int) -> Path:
        return self.directory / (f"cache-{node_rank}" if self.has_own_roots else "cache")

    def engine_root(self, node_rank: int) -> Path:
        return self.directory / f"engine-{node_rank}"

    def start(
        self, *more: str, environ: Mapping[str, str] | None = None, nodes: Sequence[int] | None = None
    ) -> list[Pod]:
        """Start the pods of the next life of the group."""
        self.lives += 1
        port = free_port()
        return [self.start_pod(node, port, *more, environ=environ) for node in nodes or range(self.num_nodes)]

    def start_pod(self, node: int, port: int, *more: str, environ: Mapping[str, str] | None = None) -> Pod:
        """Start one pod; port 0 tells it none."""
        arguments = [
            "run", "--cache-root", str(self.cache_root(node)), "--engine-root", str(self.engine_root(node)),
            "--nnodes", str(self.num_nodes), "--node-rank", str(node), "--nproc-per-node", str(self.nproc),
            "--group", "test",
        ]  # fmt: skip
        if self.num_nodes > 1 and self.leader_address is not None:
            arguments += ["--leader-address", self.leader_address]
        if self.num_nodes > 1 and port:
            arguments += ["--port", str(port)]
        name = f"pod-{node}-life-{self.lives}"
        uid = {"INITWARM_POD_UID": name.replace("-", "")} if self.has_uids else {}
        return self.server.start(
            self.directory,
            f"{name}-restart-{self.restarts}" if self.restarts else name,
            [*arguments, *self.arguments, *more],
            {**self.environ, **uid, **(environ or {})},
            placement=self.placements.get(node),
        )

    def restart_pod(self, node: int, port: int, *more: str) -> Pod:
        """Start a pod's container once more, as the kubelet does: the same pod, another process."""
        self.restarts += 1
        return self.start_pod(node, port, *more)

    def run(self, *more: str, environ: Mapping[str, str] | None = None) -> list[Pod]:
        """One life of the group, to its end."""
        pods = self.start(*more, environ=environ)
        for pod in pods:
            pod.wait()
        return pods

    def files(self, node: int) -> dict[str, str]:
        """Digest of each file that the server of this pod would find."""
        root = self.engine_root(node)
        return {
            str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def assert_warm(self, pods: Sequence[Pod], tuned: bool) -> str:
        """All ranks have the same bytes and every pod says so; returns the bundle's digest."""
        messages = [pod.message for pod in pods]
        for pod, message in zip(pods, messages, strict=True):
            assert (pod.status, message["outcome"]) == (0, "warm"), f"{message}\n{pod.log}"
            assert message["missed"] == 0
            assert message["replayed"] > 0
            assert pod.processes() == []
        assert (sum(message["tuned"] for message in messages) > 0) == tuned, [pod.log for pod in pods]
        assert len({(message["bundle"], message["identity"], message["epoch"]) for message in messages}) == 1
        ranks = [rank for message in messages for rank in message["ranks"]]
        assert ranks == list(range(self.num_nodes * self.nproc))
        assert {message["world_size"] for message in messages} == {len(ranks)}
        v1 = {
            digest
            for node in range(self.num_nodes)
            for name, digest in self.files(node).items()
            if name.startswith("flashinfer-v1/")
        }
        assert len(v1) == 1
        stores = [
            {name: digest for name, digest in self.files(node).items() if name.startswith("flashinfer-store/")}
            for node in range(self.num_nodes)
        ]
        assert all(store == stores[0] for store in stores)
        return str(messages[0]["bundle"])

    def assert_nothing_visible(self, pods: Sequence[Pod]) -> None:
        """No rank has a file that a server could load, and nothing runs."""
        for node in range(self.num_nodes):
            assert self.files(node) == {}
        for pod in pods:
            assert pod.processes() == []

    def forget(self, node: int) -> None:
        """Take a pod's own bundles away, so that only the others hold one."""
        assert self.has_own_roots
        shutil.rmtree(self.cache_root(node) / "v1")
