import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from initwarm.environment import annotation, label
from initwarm.errors import TopologyError
from initwarm.topology import (
    Topology,
    TopologyFlags,
    explain,
    explanation_as_json,
    rank_offsets,
    render_explanation,
    resolve,
    world_size,
)

VARIABLES = [
    "INITWARM_TOPOLOGY", "INITWARM_NNODES", "INITWARM_NODE_RANK", "INITWARM_NPROC_PER_NODE", "INITWARM_LEADER_ADDRESS",
    "INITWARM_PORT", "INITWARM_GROUP", "INITWARM_POD_NAME", "INITWARM_POD_IP", "INITWARM_GROVE_FIRST_RANK",
    "INITWARM_JOBSET_COMPLETIONS", "INITWARM_STATEFULSET_START", "INITWARM_VOLCANO_TASKS", "INITWARM_SERVICE_HOST",
    "INITWARM_SERVICE_PORT", "INITWARM_PORT_80_TCP", "HOSTNAME",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_LOCALID",
    "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX",
    "GROVE_PCLQ_POD_INDEX", "GROVE_PCLQ_NAME", "GROVE_PCSG_NAME", "GROVE_PCSG_INDEX", "GROVE_PCSG_TEMPLATE_NUM_PODS",
    "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT", "JOB_COMPLETION_INDEX",
    "VC_TASK_INDEX", "VK_TASK_INDEX", "VC_MASTER_NUM", "VC_WORKER_NUM", "VC_MASTER_HOSTS", "VC_X_NUM", "VC__NUM",
    *map(label, (
        "leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/group-index",
        "leaderworkerset.sigs.k8s.io/worker-index", "jobset.sigs.k8s.io/jobset-name",
        "jobset.sigs.k8s.io/replicatedjob-name", "jobset.sigs.k8s.io/job-index", "jobset.sigs.k8s.io/job-global-index",
        "jobset.sigs.k8s.io/global-replicas", "jobset.sigs.k8s.io/coordinator", "batch.kubernetes.io/job-name",
        "batch.kubernetes.io/job-completion-index", "volcano.sh/job-name", "volcano.sh/task-spec",
        "volcano.sh/task-index", "ray.io/cluster", "ray.io/replica-host-index", "ray.io/worker-group-replica-name",
        "apps.kubernetes.io/pod-index", "statefulset.kubernetes.io/pod-name",
    )),
    annotation("leaderworkerset.sigs.k8s.io/size"),
    annotation("batch.kubernetes.io/job-completion-index"),
]  # fmt: skip
NASTY = [
    "", " ", "0", "1", "2", "3", "4", "8", "-1", "01", " 3 ", "1e3", str(2**70), "None", "null", "NaN", "٣", "²", "1:4",
    "2:2", ":", "2:", "auto", "gpu", "cpu", "tcp://10.0.0.1:80", "master,worker", ",", "a,b", "..", "../../etc", ".",
    "a/b", "\n", "\x00", "\x1b[2J", "\udc80", "{}", "[::1]", "[", "::1", "127.0.0.1", "10.0.0.1:0", "host", "host:1:2",
    "x" * 5000, "9" * 5000, "web-3", "explicit", "torchrun", "leaderworkerset", "grove", "trainjob", "jobset",
    "volcano", "kuberay", "indexed-job", "statefulset", "rank-variables", "single", "a-wkr", "a-ldr",
]  # fmt: skip
GROUP = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")

values = st.sampled_from(NASTY) | st.text(max_size=20)
few = st.integers(min_value=0, max_value=5).map(str)
names = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
hostile = st.dictionaries(st.sampled_from(VARIABLES) | st.text(min_size=1, max_size=20), values, max_size=12)
nearly_right = st.dictionaries(st.sampled_from(VARIABLES), few, max_size=20)
flags = st.builds(TopologyFlags, **dict.fromkeys(vars(TopologyFlags()), st.none() | values | few))


@given(hostile | nearly_right, flags)
def test_nothing_but_a_topology_error_comes_of_any_environment(environ: Mapping[str, str], told: TopologyFlags) -> None:
    explanation = explain(environ, told)

    assert (explanation.topology is None) != (explanation.error is None)
    assert render_explanation(explanation).encode()
    assert json.dumps(explanation_as_json(explanation))
    if explanation.error is None:
        check_sound(resolve(environ, told))
        return
    with pytest.raises(TopologyError) as caught:
        resolve(environ, told)
    assert caught.value.exit_code == 78
    assert caught.value.fact
    assert caught.value.fix
    assert str(caught.value).encode()
    assert len(str(caught.value)) < 4000


def check_sound(topology: Topology) -> None:
    assert 0 <= topology.node_rank < topology.num_nodes
    assert GROUP.fullmatch(topology.group)
    assert topology.nproc_per_node is None or topology.nproc_per_node >= 1
    assert topology.leader_port is None or 0 < topology.leader_port < 65536
    assert topology.leader_address is None or re.fullmatch(r"[A-Za-z0-9._:%-]+", topology.leader_address)


@given(hostile)
def test_variables_that_are_set_to_nothing_change_nothing(environ: Mapping[str, str]) -> None:
    present = {name: value for name, value in environ.items() if value}
    emptied = {**dict.fromkeys(VARIABLES, ""), **present}

    one, other = explain(present), explain(emptied)

    assert one.topology == other.topology
    assert str(one.error) == str(other.error)


@given(st.lists(st.integers(min_value=0, max_value=16), max_size=12))
def test_ranks_of_pods_neither_overlap_nor_leave_a_gap(counts: list[int]) -> None:
    ranks = [first + local for first, count in zip(rank_offsets(counts), counts, strict=True) for local in range(count)]

    assert ranks == list(range(world_size(counts)))


@dataclass(frozen=True)
class Workload:
    """One group as its platform starts it: what each pod sees, in order of node rank."""

    source: str
    pods: Sequence[Mapping[str, str]]
    flags: TopologyFlags


@st.composite
def leaderworkersets(draw: st.DrawFn) -> Workload:
    name, group, size = draw(names), draw(st.integers(0, 4)), draw(st.integers(1, 6))
    has_labels = draw(st.booleans())
    declared = {
        label("leaderworkerset.sigs.k8s.io/name"): name,
        label("leaderworkerset.sigs.k8s.io/group-index"): str(group),
        annotation("leaderworkerset.sigs.k8s.io/size"): str(size),
    }
    pods = [
        {
            "LWS_LEADER_ADDRESS": f"{name}-{group}.{name}.default",
            "LWS_GROUP_SIZE": str(size),
            "LWS_WORKER_INDEX": str(index),
            # The leader is a pod of the leaders' StatefulSet, so its index there is that of its group.
            label("apps.kubernetes.io/pod-index"): str(index or group),
            label("leaderworkerset.sigs.k8s.io/worker-index"): str(index) if has_labels else "",
            "INITWARM_POD_NAME": f"{name}-{group}-{index}" if index else f"{name}-{group}",
            **(declared if has_labels else {}),
        }
        for index in range(size)
    ]
    return Workload("leaderworkerset", pods, TopologyFlags())


@st.composite
def grove_groups(draw: st.DrawFn) -> Workload:
    name, replica = draw(names), draw(st.integers(0, 3))
    is_dynamo = draw(st.booleans())
    cliques = [1, draw(st.integers(1, 4))] if is_dynamo else draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    roles = ["ldr", "wkr"] if is_dynamo else [f"c{number}" for number in range(len(cliques))]
    firsts = [0, *accumulate(cliques)]
    pods = [
        {
            "GROVE_PCLQ_NAME": f"{name}-{replica}-{role}",
            "GROVE_PCLQ_POD_INDEX": str(index),
            "GROVE_PCSG_NAME": name,
            "GROVE_PCSG_INDEX": str(replica),
            "GROVE_PCSG_TEMPLATE_NUM_PODS": str(sum(cliques)),
            "INITWARM_GROVE_FIRST_RANK": "" if is_dynamo else str(first),
        }
        for role, count, first in zip(roles, cliques, firsts, strict=False)
        for index in range(count)
    ]
    return Workload("grove", pods, TopologyFlags())


@st.composite
def trainjobs(draw: st.DrawFn) -> Workload:
    name, size = draw(names), draw(st.integers(1, 6))
    initializers = draw(st.integers(0, 2))
    nodes = draw(st.sampled_from([str(size), f"{size}:{size}"]))
    in_init_containers = {} if draw(st.booleans()) else {"RANK": "{}", "WORLD_SIZE": str(size * 4)}
    pods = [
        {
            "PET_NNODES": nodes,
            "PET_NODE_RANK": str(index),
            "PET_NPROC_PER_NODE": "4",
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "JOB_COMPLETION_INDEX": str(index),
            label("jobset.sigs.k8s.io/jobset-name"): name,
            label("jobset.sigs.k8s.io/job-global-index"): str(initializers),
            label("jobset.sigs.k8s.io/global-replicas"): str(initializers + 1),
            **{variable: text.format(index) for variable, text in in_init_containers.items()},
        }
        for index in range(size)
    ]
    return Workload("trainjob", pods, TopologyFlags())


@st.composite
def jobsets(draw: st.DrawFn) -> Workload:
    name, jobs, completions = draw(names), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pods = [
        {
            "JOB_COMPLETION_INDEX": str(pod),
            "INITWARM_JOBSET_COMPLETIONS": str(completions),
            **jobset_labels(name, f"part{job}", 0, job, jobs),
        }
        for job in range(jobs)
        for pod in range(completions)
    ]
    is_told = jobs > 1 and draw(st.booleans())
    return Workload("jobset", pods, TopologyFlags(nnodes=str(jobs * completions) if is_told else None))


@st.composite
def jobs_of_a_jobset(draw: st.DrawFn) -> Workload:
    name, jobs, completions = draw(names), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    job = draw(st.integers(0, jobs - 1))
    told = {"INITWARM_JOBSET_COMPLETIONS": str(completions)} if jobs > 1 else {}
    pods = [
        {"JOB_COMPLETION_INDEX": str(pod), **told, **jobset_labels(name, "decode", job, job, jobs)}
        for pod in range(completions)
    ]
    return Workload("jobset", pods, TopologyFlags(nnodes=str(completions)))


def jobset_labels(name: str, replicated_job: str, index: int, global_index: int, jobs: int) -> dict[str, str]:
    return {
        label("jobset.sigs.k8s.io/jobset-name"): name,
        label("jobset.sigs.k8s.io/replicatedjob-name"): replicated_job,
        label("jobset.sigs.k8s.io/job-index"): str(index),
        label("jobset.sigs.k8s.io/job-global-index"): str(global_index),
        label("jobset.sigs.k8s.io/global-replicas"): str(jobs),
    }


@st.composite
def volcano_jobs(draw: st.DrawFn) -> Workload:
    job = draw(names)
    tasks = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    helpers = draw(st.booleans())
    sizes = {task: draw(st.integers(1, 3)) for task in tasks}
    hosts = {task: ",".join(f"{job}-{task}-{index}.{job}" for index in range(size)) for task, size in sizes.items()}
    shared = {
        "INITWARM_VOLCANO_TASKS": ",".join(tasks) if helpers or len(tasks) > 1 else "",
        label("volcano.sh/job-name"): job,
        **{f"VC_{variable(task)}_NUM": str(size) for task, size in sizes.items()},
        **{f"VC_{variable(task)}_HOSTS": text for task, text in hosts.items()},
        **({"VC_HELPER_99_NUM": "4"} if helpers else {}),
    }
    pods = [
        {**shared, "VC_TASK_INDEX": str(index), "VK_TASK_INDEX": str(index), label("volcano.sh/task-spec"): task}
        for task, size in sizes.items()
        for index in range(size)
    ]
    return Workload("volcano", pods, TopologyFlags())


def variable(task: str) -> str:
    return task.upper().replace("-", "_")


@st.composite
def ray_replicas(draw: st.DrawFn) -> Workload:
    size = draw(st.integers(1, 5))
    shared = {label("ray.io/cluster"): draw(names), label("ray.io/worker-group-replica-name"): draw(names)}
    pods = [{**shared, label("ray.io/replica-host-index"): str(index)} for index in range(size)]
    return Workload("kuberay", pods, TopologyFlags(nnodes=str(size)))


@st.composite
def indexed_jobs(draw: st.DrawFn) -> Workload:
    size = draw(st.integers(1, 6))
    shared = {label("batch.kubernetes.io/job-name"): draw(names)}
    pods = [
        {**shared, "JOB_COMPLETION_INDEX": str(index), label("batch.kubernetes.io/job-completion-index"): str(index)}
        for index in range(size)
    ]
    return Workload("indexed-job", pods, TopologyFlags(nnodes=str(size)))


@st.composite
def statefulsets(draw: st.DrawFn) -> Workload:
    name, size, start = draw(names), draw(st.integers(1, 6)), draw(st.integers(0, 20))
    pods = [
        {
            label("apps.kubernetes.io/pod-index"): str(start + index),
            "INITWARM_STATEFULSET_START": str(start) if start else "",
            "INITWARM_POD_NAME": f"{name}-{start + index}",
        }
        for index in range(size)
    ]
    return Workload("statefulset", pods, TopologyFlags(nnodes=str(size)))


@st.composite
def explicit_groups(draw: st.DrawFn) -> Workload:
    size = draw(st.integers(1, 6))
    pods = [{"INITWARM_NODE_RANK": str(index), "INITWARM_NNODES": str(size)} for index in range(size)]
    return Workload("explicit", pods, TopologyFlags(leader_address="10.0.0.7"))


@st.composite
def torchrun_children(draw: st.DrawFn) -> Workload:
    """The pods of a LeaderWorkerSet whose torchrun numbered them by arrival."""
    group = draw(leaderworkersets())
    nproc = draw(st.integers(1, 4))
    arrival = draw(st.permutations(range(len(group.pods))))
    size = len(group.pods)
    pods = [
        {
            **group.pods[pod],
            "RANK": str(node * nproc + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(size * nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(size),
            "MASTER_ADDR": "10.0.0.1",
        }
        for node, pod in enumerate(arrival)
        for local in range(nproc)
    ]
    return Workload("torchrun", pods, TopologyFlags())


GROUPS: dict[str, Callable[[], st.SearchStrategy[Workload]]] = {
    "leaderworkerset": leaderworkersets,
    "grove": grove_groups,
    "trainjob": trainjobs,
    "jobset": jobsets,
    "one job of a jobset": jobs_of_a_jobset,
    "volcano": volcano_jobs,
    "kuberay": ray_replicas,
    "indexed job": indexed_jobs,
    "statefulset": statefulsets,
    "explicit": explicit_groups,
    "torchrun": torchrun_children,
}
noise = st.fixed_dictionaries(
    {
        "HOSTNAME": names,
        "WORLD_SIZE_OF_SERVER": few,
        "INITWARM_PORT": st.sampled_from(["", "tcp://10.0.0.1:80"]),
        "KUBERNETES_SERVICE_HOST": st.just("10.0.0.1"),
        "MASTER_PORT": st.sampled_from(["", "29500", "tcp://10.0.0.1:80"]),
        label("pod-template-hash"): names,
    }
)


@pytest.mark.parametrize("kind", GROUPS)
@given(data=st.data())
def test_pods_of_one_group_have_all_ranks_once_and_one_name(kind: str, data: st.DataObject) -> None:
    group = data.draw(GROUPS[kind]())
    around = data.draw(noise)

    places = [resolve({**around, **pod}, group.flags) for pod in group.pods]

    assert [place.node_rank for place in places] == list(range(len(group.pods)))
    assert {place.num_nodes for place in places} == {len(group.pods)}
    assert {place.source for place in places} == {group.source}
    assert len({place.group for place in places}) == 1
    assert len({(place.leader_address, place.leader_port) for place in places}) == 1
