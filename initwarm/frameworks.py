"""What the operators that start serving groups tell a pod: LeaderWorkerSet, Grove, TrainJob, JobSet, Volcano, KubeRay.

Each function reads what its operator puts into init containers, and nothing that would need the API server. No peer's
name is ever constructed; the leader's address is taken only where the operator states it.
"""

from __future__ import annotations

from collections.abc import Mapping

from initwarm.environment import (
    MAX_NODES,
    NO_PLACE,
    PodEnvironment,
    annotation,
    label,
    parse_host,
    parse_nproc,
    parse_number,
    shown,
)
from initwarm.errors import TopologyError
from initwarm.places import INDEPENDENT, Reading, lacks

GROVE_FIRST_RANK = "INITWARM_GROVE_FIRST_RANK"
JOBSET_COMPLETIONS = "INITWARM_JOBSET_COMPLETIONS"
VOLCANO_TASKS = "INITWARM_VOLCANO_TASKS"

COMPLETION_INDEX = (
    "JOB_COMPLETION_INDEX",
    label("batch.kubernetes.io/job-completion-index"),
    annotation("batch.kubernetes.io/job-completion-index"),
)
_LWS = "leaderworkerset.sigs.k8s.io/"
_JOBSET = "jobset.sigs.k8s.io/"
_RAY_HOST = label("ray.io/replica-host-index")
_RAY_REPLICA = label("ray.io/worker-group-replica-name")
_VOLCANO_TASK = label("volcano.sh/task-spec")
#: The default task names of Volcano's pytorch plugin, in the order in which it numbers their pods.
_VOLCANO_ORDER = ("MASTER", "WORKER")


def leaderworkerset(env: PodEnvironment) -> Reading | None:
    """Pods of a LeaderWorkerSet group; the leader's is 0.

    Source:
        lws 060ab4d, pkg/utils/pod/pod_utils.go, AddLWSVariables.
    """
    index = env.index("LWS_WORKER_INDEX", label(_LWS + "worker-index"))
    size = env.size("LWS_GROUP_SIZE", annotation(_LWS + "size"))
    leader = env.host("LWS_LEADER_ADDRESS")
    name = env.text(label(_LWS + "name"))
    group = env.index(label(_LWS + "group-index"))
    if index is None and size is None and leader is None and name is None:
        return None
    if size is not None and size > 1 and leader is None and env.explicit.leader_address is None:
        raise TopologyError(
            f"LWS_LEADER_ADDRESS is empty or not set in a LeaderWorkerSet group of {size} pods.",
            "The leader cannot be reached, so nothing was started.",
            "Use LeaderWorkerSet 0.6 or newer, which sets it in init containers too, or set INITWARM_LEADER_ADDRESS.",
        )
    return Reading(
        node_rank=index,
        num_nodes=size,
        leader_address=leader,
        group=None if name is None or group is None else f"{name}-{group}",
        lacks=lacks(
            "This pod is of a LeaderWorkerSet, but LWS_WORKER_INDEX or LWS_GROUP_SIZE is empty or not set.",
            "Use LeaderWorkerSet 0.6 or newer, which sets both in init containers too.",
        ),
    )


def grove(env: PodEnvironment) -> Reading | None:
    """Pods of a Grove scaling group's replica, or of a clique outside one.

    Source:
        grove fcc3b3b, podclique/components/pod/pod.go; dynamo 34a62c3, grove.go, for the names of its two cliques.
    """
    index = env.index("GROVE_PCLQ_POD_INDEX")
    clique = env.text("GROVE_PCLQ_NAME")
    if index is None and clique is None:
        return None
    scaling_group = env.text("GROVE_PCSG_NAME")
    replica = env.index("GROVE_PCSG_INDEX")
    size = env.size("GROVE_PCSG_TEMPLATE_NUM_PODS") if scaling_group else None
    first = env.index(GROVE_FIRST_RANK)
    if first is None:
        first = _first_rank(index, clique or "", size) if scaling_group else 0
    return Reading(
        node_rank=None if first is None or index is None else first + index,
        num_nodes=size,
        group=clique if scaling_group is None or replica is None else f"{scaling_group}-{replica}",
        lacks=lacks(
            f"This pod is of the Grove clique {shown(clique or '')}, and its environment does not say which pods serve "
            "together.",
            f"Set INITWARM_NNODES to their number and, in the pod spec of each clique, {GROVE_FIRST_RANK} to the node "
            f"rank of its first pod; {INDEPENDENT}.",
        ),
    )


def _first_rank(index: int | None, clique: str, size: int | None) -> int | None:
    """Node rank of a clique's first pod; Dynamo's cliques are `<service>-ldr`, of the leader, and `<service>-wkr`."""
    if clique.endswith("-ldr") and index:
        raise TopologyError(
            f"GROVE_PCLQ_POD_INDEX is {index} in the leader's clique {shown(clique)}, which must have one pod.",
            "Its node rank would be another pod's, so nothing was started.",
            f"Give that clique one replica, or set {GROVE_FIRST_RANK} in the pod spec of each clique.",
        )
    if clique.endswith("-wkr") and size != 1:
        return 1
    return 0 if clique.endswith("-ldr") or size == 1 else None


def trainjob(env: PodEnvironment) -> Reading | None:
    """Pods with PET_* variables, from TrainJob or set by hand.

    PET_MASTER_PORT is not taken over: torchrun listens there, later in this pod's life or still in the leader's.

    Source:
        trainer 8c0f505, pkg/runtime/framework/plugins/torch/torch.go.
    """
    nodes = env.text("PET_NNODES")
    rank = env.index("PET_NODE_RANK")
    if nodes is None and rank is None:
        return None
    nproc = env.text("PET_NPROC_PER_NODE")
    return Reading(
        node_rank=env.index("JOB_COMPLETION_INDEX") if rank is None else rank,
        num_nodes=None if nodes is None else _fixed_number(nodes),
        nproc_per_node=None if nproc is None else parse_nproc("PET_NPROC_PER_NODE", nproc),
        leader_address=env.host("PET_MASTER_ADDR"),
        lacks=lacks(
            "Of PET_NNODES and PET_NODE_RANK only one is set.",
            "Name this init container in the runtime's mlPolicy.torch.envInjection.targets (Trainer 2.3 or newer), or "
            "set INITWARM_NNODES and INITWARM_NODE_RANK.",
        ),
    )


def _fixed_number(nodes: str) -> int:
    low, colon, high = nodes.partition(":")
    if colon and low != high and (low + high).isascii() and low.isdigit() and high.isdigit():
        raise TopologyError(
            f"PET_NNODES is {shown(nodes)}, which is a range.",
            "A barrier needs a fixed number of pods, so nothing was started.",
            "Give the job a fixed number of nodes, or set INITWARM_TOPOLOGY=explicit, INITWARM_NNODES and "
            "INITWARM_NODE_RANK.",
        )
    return parse_number("PET_NNODES", low if low == high else nodes, 1, MAX_NODES)


def jobset(env: PodEnvironment) -> Reading | None:
    """Pods of a JobSet. The completion index starts anew in each Job, and pods per Job are told nowhere.

    With one Job, or where the size of the group is that of one, a group is one Job; otherwise it is the whole JobSet.

    Source:
        jobset 08dfbdf, pkg/controllers/jobset_controller.go, labelAndAnnotateObject.
    """
    name = env.text(label(_JOBSET + "jobset-name"))
    job = env.index(label(_JOBSET + "job-global-index"))
    if name is None and job is None:
        return None
    jobs = env.size(label(_JOBSET + "global-replicas"))
    pod = env.index(*COMPLETION_INDEX)
    told = env.explicit.num_nodes
    completions = env.size(JOBSET_COMPLETIONS) or (told if jobs == 1 else None)
    coordinator = env.host(label(_JOBSET + "coordinator"))
    if completions is not None and pod is not None and pod >= completions:
        raise TopologyError(
            f"The completion index of this pod is {pod}, and its Job is said to have {completions} pods.",
            NO_PLACE,
            f"Set {JOBSET_COMPLETIONS} (with one Job, INITWARM_NNODES) to the completions of a Job.",
        )
    missing = lacks(
        f"This pod has completion index {_known(pod)} in Job {_known(job)} of {_known(jobs)} of JobSet "
        f"{shown(name or '')}, and how many pods a Job has is not told to them.",
        f"Set {JOBSET_COMPLETIONS} to the completions of a Job, and declare the JobSet's labels in the pod spec. Where "
        "each Job is a group of its own, set INITWARM_NNODES to the same number.",
    )
    if jobs == 1 or (completions is not None and completions == told):
        return Reading(pod, completions, None, coordinator if jobs == 1 else None, _job_group(env, name), lacks=missing)
    if completions is None or jobs is None or job is None or pod is None:
        return Reading(lacks=missing)
    if job >= jobs:
        raise TopologyError(
            f"{label(_JOBSET + 'job-global-index')} is {job}, but the JobSet has {jobs} Jobs.",
            NO_PLACE,
            "Take both from the pod's labels.",
        )
    return Reading(job * completions + pod, jobs * completions, None, coordinator, name, lacks=missing)


def _job_group(env: PodEnvironment, name: str | None) -> str | None:
    replicated_job = env.text(label(_JOBSET + "replicatedjob-name"))
    index = env.index(label(_JOBSET + "job-index"))
    return None if name is None or replicated_job is None or index is None else f"{name}-{replicated_job}-{index}"


def _known(number: int | None) -> str:
    return "(unknown)" if number is None else str(number)


def volcano(env: PodEnvironment) -> Reading | None:
    """Pods of a Volcano job's tasks, numbered task by task.

    Source:
        volcano ed72c7c, pkg/controllers/job/plugins/env and svc.
    """
    index = env.index("VC_TASK_INDEX", "VK_TASK_INDEX", label("volcano.sh/task-index"))
    if index is None:
        return None
    job = env.text(label("volcano.sh/job-name"))
    sizes = {
        task: parse_number(f"VC_{task}_NUM", env.text(f"VC_{task}_NUM") or "", 0, MAX_NODES)
        for task in env.between("VC_", "_NUM")
    }
    order = _task_order(env, sizes)
    task = _task_of(env, order)
    if task is None:
        return Reading(group=job, lacks=_volcano_lacks(sizes))
    if index >= sizes[task]:
        raise TopologyError(
            f"VC_TASK_INDEX is {index}, but VC_{task}_NUM is {sizes[task]}.", NO_PLACE, "Correct the one that is wrong."
        )
    first = next(one for one in order if sizes[one])
    hosts = env.text(f"VC_{first}_HOSTS")
    return Reading(
        node_rank=sum(sizes[one] for one in order[: order.index(task)]) + index,
        num_nodes=sum(sizes[one] for one in order),
        leader_address=None if hosts is None else parse_host(f"VC_{first}_HOSTS", hosts.split(",")[0])[0],
        group=job,
    )


def _task_order(env: PodEnvironment, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The tasks whose pods serve together, the leader's first; empty where nothing says which."""
    told = env.text(VOLCANO_TASKS)
    if told is None:
        tasks = tuple(task for task in sizes if sizes[task])
        if len(tasks) == 1:
            return tasks
        return tuple(task for task in _VOLCANO_ORDER if task in tasks) if set(tasks) <= set(_VOLCANO_ORDER) else ()
    order = tuple(_task_variable(task) for task in told.split(","))
    if len(set(order)) < len(order) or not set(order) <= set(sizes):
        raise TopologyError(
            f"{VOLCANO_TASKS} is {shown(told)}, but the job's tasks are {', '.join(sizes) or 'not known'}.",
            NO_PLACE,
            "Name each task once, the leader's first, separated by commas. The job's svc plugin must be enabled.",
        )
    return order


def _task_of(env: PodEnvironment, order: tuple[str, ...]) -> str | None:
    own = env.text(_VOLCANO_TASK)
    if own is None or not order:
        return order[0] if len(order) == 1 and env.text(VOLCANO_TASKS) is None else None
    task = _task_variable(own)
    if task not in order:
        raise TopologyError(
            f"This pod is of the Volcano task {shown(own)}, and the group has the tasks {', '.join(order)}.",
            "It has no place in the group, so nothing was started.",
            f"Do not run initwarm in that task, or name it in {VOLCANO_TASKS}.",
        )
    return task


def _volcano_lacks(sizes: Mapping[str, int]) -> TopologyError:
    told = ", ".join(f"VC_{task}_NUM={number}" for task, number in sizes.items()) or "no VC_<TASK>_NUM"
    helpers = [f"VC_{task}_*" for task in sizes if task not in _VOLCANO_ORDER]
    return lacks(
        f"This pod is of a Volcano job with {told}; nothing says of which task it is, or which tasks serve together"
        + (f" ({', '.join(helpers)} may be helpers that do not run initwarm)." if helpers else "."),
        f"Enable the job's svc plugin, declare {_VOLCANO_TASK} from the label volcano.sh/task-spec, and set "
        f"{VOLCANO_TASKS} to the tasks that run initwarm, the leader's first, as `master,worker`.",
    )


def _task_variable(task: str) -> str:
    return task.upper().replace("-", "_")


def kuberay(env: PodEnvironment) -> Reading | None:
    """Hosts of one multi-host replica of a KubeRay worker group; other Ray pods have no place among peers.

    The head's address (FQ_RAY_IP) is not that of host 0, so it is not the leader's.

    Source:
        kuberay feeaf72, ray-operator/controllers/ray/raycluster_controller.go, RayMultiHostIndexing.
    """
    cluster = env.text(label("ray.io/cluster"))
    host = env.index(_RAY_HOST)
    replica = env.text(_RAY_REPLICA)
    told = env.explicit
    has_peers = told.num_nodes is not None and told.num_nodes > 1
    if host is None and replica is None and (cluster is None or not has_peers):
        return None
    missing = [variable for variable, value in ((_RAY_HOST, host), (_RAY_REPLICA, replica)) if value is None]
    is_named = replica is not None or told.group is not None
    return Reading(
        node_rank=host if is_named else None,
        group="-".join(part for part in (cluster, replica) if part) if replica else None,
        lacks=_ray_index_lacks(missing) if missing else _ray_size_lacks(host),
    )


def _ray_index_lacks(missing: list[str]) -> TopologyError:
    return lacks(
        f"This pod is of a KubeRay cluster without the labels of a multi-host replica: no {' and no '.join(missing)}.",
        "Declare both from the pod's labels, and enable KubeRay's feature gate RayMultiHostIndexing (KubeRay 1.5 or "
        "newer; on by default from 1.6), which sets them where numOfHosts is above 1.",
    )


def _ray_size_lacks(host: int | None) -> TopologyError:
    return lacks(
        f"This pod is host {host} of a replica of a KubeRay worker group, whose number of hosts is not told to them.",
        f"Set INITWARM_NNODES to the worker group's numOfHosts; {INDEPENDENT}.",
    )
