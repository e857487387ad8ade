"""The table of sources from which a pod can know its place in a group, in order of precedence: specific before generic.

A new source is a function from the pod's environment to a reading, and one entry here. A source never guesses: what its
platform does not tell stays open. Which one is believed, and what follows when two disagree, is decided in `topology`.
"""

from __future__ import annotations

from initwarm import frameworks
from initwarm.environment import MAX_NPROC, MAX_RANKS, NO_PLACE, PodEnvironment, label
from initwarm.errors import TopologyError
from initwarm.frameworks import COMPLETION_INDEX
from initwarm.places import INDEPENDENT, Detector, Process, Reading, lacks

EXPLICIT = "explicit"
SINGLE = "single"
POD_NAME = "INITWARM_POD_NAME"
STATEFULSET_START = "INITWARM_STATEFULSET_START"

_POD_INDEX = label("apps.kubernetes.io/pod-index")
_POD_NAME_LABEL = label("statefulset.kubernetes.io/pod-name")
_JOB_NAME = label("batch.kubernetes.io/job-name")
#: A launcher sets these once a process. Without one of them RANK may as well count pods.
_WITNESSES = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID")


def _explicit(env: PodEnvironment) -> Reading | None:
    told = env.explicit
    env.saw.update(told.given)
    if not told.given:
        return None
    return Reading(told.node_rank, told.num_nodes, told.nproc_per_node, told.leader_address, told.group)


def _torchrun(env: PodEnvironment) -> Reading | None:
    """A child of torchrun, or of another launcher that numbers processes (pyxis).

    MASTER_PORT is not taken over: torchrun's own store listens there. GROUP_RANK is not read: a rendezvous numbers
    nodes by itself, so that it need not be the pod's index and no source can be compared with it.

    Source:
        torch 2.14, torch.distributed.elastic.agent.server.local_elastic_agent; pyxis 1075199, pyxis_slurmstepd.c.
    """
    if not _has_witness(env) or not (env.text("RANK") or env.text("WORLD_SIZE")):
        return None
    world_size = _required(env, "WORLD_SIZE", 1, MAX_RANKS)
    rank = _required(env, "RANK", 0, MAX_RANKS - 1)
    local_world_size = env.number(1, MAX_NPROC, "LOCAL_WORLD_SIZE")
    local_rank = _required(env, "LOCAL_RANK" if env.text("LOCAL_RANK") else "SLURM_LOCALID", 0, MAX_NPROC - 1)
    _check_below(rank, "RANK", world_size, "WORLD_SIZE")
    _check_below(local_rank, "LOCAL_RANK", local_world_size, "LOCAL_WORLD_SIZE")
    leader = env.host("MASTER_ADDR")
    _check_port_is_free(env, leader)
    pods = env.number(1, world_size, "GROUP_WORLD_SIZE")
    if pods is None and local_world_size is not None and world_size % local_world_size == 0:
        pods = world_size // local_world_size
    return Reading(
        num_nodes=pods,
        nproc_per_node=local_world_size,
        leader_address=leader,
        process=Process(rank, world_size, local_rank),
    )


def _has_witness(env: PodEnvironment) -> bool:
    found = [env.text(variable) for variable in _WITNESSES]
    return any(found)


def _required(env: PodEnvironment, variable: str, low: int, high: int) -> int:
    number = env.number(low, high, variable)
    if number is None:
        raise TopologyError(
            f"{variable} is empty or not set, although other variables of a process launcher are set.",
            NO_PLACE,
            "Start initwarm as the launcher's child with its environment, or set INITWARM_TOPOLOGY.",
        )
    return number


def _check_below(number: int, name: str, limit: int | None, limit_name: str) -> None:
    if limit is not None and number >= limit:
        raise TopologyError(
            f"{name} is {number} but {limit_name} is {limit}; it runs from 0 to {limit - 1}.",
            NO_PLACE,
            f"Correct {name} or {limit_name}.",
        )


def _check_port_is_free(env: PodEnvironment, leader: str | None) -> None:
    """Refuse the port of torchrun's own store: followers would ask it for a group that it knows nothing of."""
    port = env.explicit.leader_port
    if port is None or env.explicit.leader_address not in (None, leader) or env.text("MASTER_PORT") != str(port):
        return
    raise TopologyError(
        f"The port is set to {port}, which is MASTER_PORT, where the launcher's own store listens.",
        "The leader cannot listen there, so nothing was started.",
        "Set --port or INITWARM_PORT to another port, or leave it unset.",
    )


def _indexed_job(env: PodEnvironment) -> Reading | None:
    index = env.index(*COMPLETION_INDEX)
    if index is None:
        return None
    return Reading(
        node_rank=index,
        group=env.text(_JOB_NAME),
        lacks=lacks(
            f"This pod has completion index {index} of an Indexed Job, whose number of pods is not told to them.",
            f"Set INITWARM_NNODES to the Job's completions; {INDEPENDENT}.",
        ),
    )


def _statefulset(env: PodEnvironment) -> Reading | None:
    index = env.index(_POD_INDEX)
    if index is None:
        return None
    start = env.index(STATEFULSET_START) or 0
    size = env.explicit.num_nodes
    rank = index - start
    if rank < 0 or (size is not None and rank >= size):
        raise TopologyError(
            f"{_POD_INDEX} is {index}, which is no place among {'the' if size is None else size} pods that are counted "
            f"from {start}.",
            NO_PLACE,
            f"Set {STATEFULSET_START} to the StatefulSet's spec.ordinals.start, and INITWARM_NNODES to its replicas; "
            f"{INDEPENDENT}.",
        )
    pod = env.text(_POD_NAME_LABEL) or env.text(POD_NAME) or ""
    return Reading(
        node_rank=rank,
        group=pod.removesuffix(f"-{index}") if pod.endswith(f"-{index}") else None,
        lacks=lacks(
            f"This pod has index {index} of a StatefulSet, whose number of pods is not told to them.",
            f"Set INITWARM_NNODES to the StatefulSet's replicas; {INDEPENDENT}.",
        ),
    )


def _rank_variables(env: PodEnvironment) -> Reading | None:
    """RANK without a witness: PyTorchJob counts pods in RANK and processes in WORLD_SIZE, Volcano pods in both."""
    if _has_witness(env) or env.text("RANK") is None:
        return None
    rank = env.number(0, MAX_RANKS - 1, "RANK")
    size = env.number(1, MAX_RANKS, "WORLD_SIZE")
    assert rank is not None
    _check_below(rank, "RANK", size, "WORLD_SIZE")
    of = "an unknown number" if size is None else size
    nproc = env.explicit.nproc_per_node
    pods = f"pod {rank} of {of}" + (f", with {nproc} ranks each" if nproc else "")
    return Reading(
        uncounted=(rank, size),
        lacks=lacks(
            f"RANK is {rank} and WORLD_SIZE is {'unset' if size is None else size}, and nothing says what they count: "
            f"counting pods, this is {pods}; counting processes, this is one process with rank {rank} of {of}.",
            "If they count pods, set INITWARM_NODE_RANK and INITWARM_NNODES to the same values; if they count "
            "processes, start initwarm from a launcher that sets LOCAL_RANK too, as torchrun does.",
        ),
    )


def _is_possible_rank(reading: Reading, other: Reading) -> bool:
    """Whether RANK and WORLD_SIZE fit the other's place, whatever they count."""
    rank, world_size = reading.uncounted or (0, None)
    if world_size is None or other.num_nodes is None:
        return True
    if world_size % other.num_nodes:
        return False
    return other.node_rank is None or other.node_rank in (rank, rank // (world_size // other.num_nodes))


def _single(_env: PodEnvironment) -> Reading:
    return Reading(node_rank=0, num_nodes=1)


DETECTORS: tuple[Detector, ...] = (
    Detector(EXPLICIT, "explicit", "--nnodes, --node-rank and other flags, or INITWARM_*", _explicit),
    Detector("torchrun", "launcher", "RANK, WORLD_SIZE and LOCAL_RANK", _torchrun),
    Detector(
        "leaderworkerset",
        "framework",
        "LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS or the labels of a LeaderWorkerSet",
        frameworks.leaderworkerset,
    ),
    Detector("grove", "framework", "GROVE_PCLQ_POD_INDEX, GROVE_PCLQ_NAME", frameworks.grove),
    Detector("trainjob", "framework", "PET_NNODES, PET_NODE_RANK", frameworks.trainjob),
    Detector("jobset", "framework", "the labels of a JobSet", frameworks.jobset, part_of=("trainjob",)),
    Detector("volcano", "framework", "VC_TASK_INDEX, VK_TASK_INDEX or the label task-index", frameworks.volcano),
    Detector("kuberay", "framework", "the labels of a multi-host replica of a RayCluster", frameworks.kuberay),
    Detector("indexed-job", "generic", "JOB_COMPLETION_INDEX", _indexed_job, part_of=("jobset",)),
    Detector("statefulset", "generic", _POD_INDEX, _statefulset, part_of=("leaderworkerset",)),
    Detector("rank-variables", "generic", "RANK without LOCAL_RANK", _rank_variables, agrees=_is_possible_rank),
    Detector(SINGLE, "none", "no other source", _single),
)
