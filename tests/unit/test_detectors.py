from collections.abc import Mapping

import pytest

from initwarm.environment import annotation, label, parse_host, service_links
from initwarm.errors import TopologyError
from initwarm.topology import Topology, TopologyFlags, resolve

POD_INDEX = label("apps.kubernetes.io/pod-index")
LWS = {"LWS_LEADER_ADDRESS": "vllm-3.vllm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
TORCHRUN = {
    "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "decode-0.decode", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
GROVE = {
    "GROVE_PCS_NAME": "llm", "GROVE_PCS_INDEX": "0", "GROVE_PCLQ_NAME": "llm-0-decode-1-decode-wkr",
    "GROVE_HEADLESS_SERVICE": "llm-0", "GROVE_PCLQ_POD_INDEX": "2", "GROVE_PCSG_NAME": "llm-0-decode",
    "GROVE_PCSG_INDEX": "1", "GROVE_PCSG_TEMPLATE_NUM_PODS": "4",
}  # fmt: skip
TRAINJOB = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "tune-node-0-0.tune",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip
JOBSET = {
    label("jobset.sigs.k8s.io/jobset-name"): "serve",
    label("jobset.sigs.k8s.io/replicatedjob-name"): "prefill",
    label("jobset.sigs.k8s.io/job-index"): "0",
    label("jobset.sigs.k8s.io/job-global-index"): "1",
    label("jobset.sigs.k8s.io/global-replicas"): "2",
    "JOB_COMPLETION_INDEX": "1",
}
VOLCANO = {
    "VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1", "VC_MASTER_NUM": "1", "VC_MASTER_HOSTS": "job-master-0.job",
    "VC_WORKER_NUM": "3", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job,job-worker-2.job",
    label("volcano.sh/job-name"): "job", label("volcano.sh/task-spec"): "worker",
}  # fmt: skip
KUBERAY = {
    label("ray.io/cluster"): "ray",
    label("ray.io/group"): "workers",
    label("ray.io/worker-group-replica-index"): "0",
    label("ray.io/worker-group-replica-name"): "workers-xh3hf",
    label("ray.io/replica-host-index"): "1",
    "FQ_RAY_IP": "ray-head-svc.default.svc.cluster.local",
}


def place(environ: Mapping[str, str], **flags: str) -> Topology:
    return resolve(environ, TopologyFlags(**flags))


def refusal(environ: Mapping[str, str], **flags: str) -> TopologyError:
    with pytest.raises(TopologyError) as caught:
        place(environ, **flags)
    assert caught.value.exit_code == 78
    assert caught.value.fact
    assert caught.value.fix
    return caught.value


# --- what the pod spec declares


def test_the_variable_of_a_label_follows_from_its_key() -> None:
    assert label("apps.kubernetes.io/pod-index") == "INITWARM_LABEL_APPS_KUBERNETES_IO_POD_INDEX"
    assert annotation("leaderworkerset.sigs.k8s.io/size") == "INITWARM_ANNOTATION_LEADERWORKERSET_SIGS_K8S_IO_SIZE"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1", "127.0.0.1", None),
        ("127.0.0.1:29710", "127.0.0.1", 29710),
        ("::1", "::1", None),
        ("[::1]", "::1", None),
        ("[fd00::1]:29710", "fd00::1", 29710),
        ("fe80::1%eth0", "fe80::1%eth0", None),
        ("decode-0.decode.ns.svc.cluster.local.", "decode-0.decode.ns.svc.cluster.local.", None),
    ],
)
def test_r76_a_leader_is_a_name_or_an_address_with_or_without_a_port(text: str, host: str, port: int | None) -> None:
    assert parse_host("INITWARM_LEADER_ADDRESS", text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        " ",
        "None",
        "tcp://10.0.0.1:80",
        "a b",
        "a\n",
        "a:b:c",
        "[host]:1",
        "[::1",
        "host:0",
        "host:70000",
        "host:",
        "-a",
    ],
)
def test_r71_what_names_no_host_is_refused_with_its_variable_and_value(text: str) -> None:
    problem = refusal({"LWS_LEADER_ADDRESS": text, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"})

    assert "LWS_LEADER_ADDRESS" in problem.fact


def test_a_user_s_own_port_is_no_service_link_although_a_service_has_the_same_name() -> None:
    environ = {"INITWARM_SERVICE_HOST": "10.0.0.1", "INITWARM_SERVICE_PORT": "80", "INITWARM_PORT": "29800"}

    assert service_links(environ) == ("INITWARM_SERVICE_HOST", "INITWARM_SERVICE_PORT")
    assert place(environ).leader_port == 29800


def test_a_named_port_of_a_service_is_not_a_volcano_task() -> None:
    links = {"VC_WEB_SERVICE_HOST": "10.0.0.1", "VC_WEB_SERVICE_PORT": "80", "VC_WEB_SERVICE_PORT_NUM": "80"}

    assert place({**VOLCANO, **links}) == place(VOLCANO)


# --- launcher


def test_a_child_of_torchrun_is_one_rank_with_one_device() -> None:
    # MASTER_PORT is not the port of the control channel: torchrun's own store listens there.
    assert place(TORCHRUN) == Topology("torchrun", 9, 16, 1, 1, "decode-0.decode", None, "decode-0")


def test_a_child_of_torchrun_in_a_leaderworkerset_keeps_its_rank_and_takes_the_group_s_name() -> None:
    # A c10d rendezvous numbers nodes by arrival: GROUP_RANK 1 may well be worker index 0.
    topology = place({**TORCHRUN, **LWS, "LWS_WORKER_INDEX": "0", label("leaderworkerset.sigs.k8s.io/name"): "vllm"})

    assert (topology.source, topology.node_rank, topology.num_nodes) == ("torchrun", 9, 16)


def test_a_torchrun_of_other_size_than_the_group_is_a_conflict() -> None:
    problem = refusal({**TORCHRUN, "GROUP_WORLD_SIZE": "1", **LWS})

    assert "torchrun" in problem.fact
    assert "leaderworkerset" in problem.fact
    assert "GROUP_WORLD_SIZE='1'" in problem.fact


def test_pods_of_a_torchrun_without_group_world_size_follow_from_its_local_size() -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != "GROUP_WORLD_SIZE"}

    assert "torchrun says rank 9 of 16 processes, 2 pods" in refusal(environ, nnodes="3").fact


@pytest.mark.parametrize("pods", [{"INITWARM_NNODES": "3"}, {**LWS, "LWS_GROUP_SIZE": "3"}])
def test_more_pods_than_a_launcher_has_processes_are_a_conflict(pods: dict[str, str]) -> None:
    child = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host"}

    problem = refusal({**child, **pods})

    assert "WORLD_SIZE='2'" in problem.fact
    assert "3" in problem.fact


def test_as_many_pods_as_a_launcher_has_processes_are_no_conflict() -> None:
    child = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host"}

    assert place(child, nnodes="2").source == "torchrun"


@pytest.mark.parametrize("flags", [{"port": "29500"}, {"leader_address": "decode-0.decode:29500"}])
def test_the_port_of_the_launcher_s_own_store_is_refused(flags: dict[str, str]) -> None:
    problem = refusal({**TORCHRUN, "MASTER_PORT": "29500"}, **flags)

    assert "29500" in problem.fact
    assert "MASTER_PORT" in problem.fact
    assert "--port" in problem.fix


@pytest.mark.parametrize("flags", [{"port": "29501"}, {"port": "29500", "leader_address": "another.host"}])
def test_a_port_beside_the_launcher_s_own_store_is_taken(flags: dict[str, str]) -> None:
    assert place({**TORCHRUN, "MASTER_PORT": "29500"}, **flags).leader_port == int(flags["port"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": "16"}, "RANK is 16 but WORLD_SIZE is 16"),
        ({"LOCAL_RANK": "8"}, "LOCAL_RANK is 8 but LOCAL_WORLD_SIZE is 8"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is empty or not set"),
        ({"RANK": ""}, "RANK is empty or not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"LOCAL_RANK": ""}, "LOCALID is empty or not set"),
    ],
)
def test_impossible_ranks_of_a_launcher_are_refused(changes: dict[str, str], named: str) -> None:
    assert named in refusal({**TORCHRUN, **changes}).fact


def test_a_slurm_step_says_that_ranks_count_processes_and_where() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}

    topology = place(environ)

    assert (topology.node_rank, topology.num_nodes, topology.device_index) == (5, 8, 1)


# --- RANK means three different things


def test_r89_bare_rank_variables_are_refused_and_both_readings_shown() -> None:
    problem = refusal({"RANK": "1", "WORLD_SIZE": "2"}, nproc_per_node="4")

    assert "RANK is 1 and WORLD_SIZE is 2" in problem.fact
    assert "pod 1 of 2, with 4 ranks each" in problem.fact
    assert "one process with rank 1 of 2" in problem.fact
    assert "LOCAL_RANK" in problem.fix


@pytest.mark.parametrize(
    ("rank", "world_size"),
    [("1", "2"), ("1", "8"), ("5", "8")],
    ids=["Volcano: pods in both", "PyTorchJob: pods, processes", "torchrun: processes in both"],
)
def test_r89_bare_rank_variables_beside_a_source_are_held_against_all_that_they_can_mean(
    rank: str, world_size: str
) -> None:
    assert place({**TRAINJOB, "RANK": rank, "WORLD_SIZE": world_size}).source == "trainjob"


@pytest.mark.parametrize(("rank", "world_size"), [("0", "2"), ("1", "3"), ("0", "8")])
def test_r89_bare_rank_variables_that_can_mean_no_such_place_are_a_conflict(rank: str, world_size: str) -> None:
    problem = refusal({**TRAINJOB, "RANK": rank, "WORLD_SIZE": world_size})

    assert "rank-variables" in problem.fact
    assert "trainjob" in problem.fact


def test_r89_explicit_settings_settle_what_bare_rank_variables_mean() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "INITWARM_NODE_RANK": "1", "INITWARM_NNODES": "2"}

    assert place(environ).source == "explicit"


def test_r95_a_world_size_that_was_set_for_the_server_alone_places_no_pod() -> None:
    assert place({"WORLD_SIZE": "8"}).source == "single"


def test_a_bare_rank_without_world_size_is_refused() -> None:
    assert "WORLD_SIZE is unset" in refusal({"RANK": "0"}).fact


# --- LeaderWorkerSet


def test_a_worker_of_a_leaderworkerset() -> None:
    topology = place(LWS)

    assert topology == Topology("leaderworkerset", 1, 2, None, None, "vllm-3.vllm.default", None, "vllm-3")


def test_the_leader_s_pod_index_is_its_group_index_and_not_its_rank() -> None:
    topology = place({**LWS, "LWS_WORKER_INDEX": "0", POD_INDEX: "3"})

    assert (topology.source, topology.node_rank) == ("leaderworkerset", 0)


def test_the_group_of_a_leaderworkerset_is_named_by_its_labels() -> None:
    labels = {label("leaderworkerset.sigs.k8s.io/name"): "big", label("leaderworkerset.sigs.k8s.io/group-index"): "7"}

    assert place({**LWS, **labels}).group == "big-7"


def test_r95_labels_and_annotations_stand_in_where_an_old_leaderworkerset_sets_only_the_address() -> None:
    environ = {
        "LWS_LEADER_ADDRESS": "vllm-3.vllm.default",
        label("leaderworkerset.sigs.k8s.io/worker-index"): "1",
        annotation("leaderworkerset.sigs.k8s.io/size"): "2",
    }

    assert place(environ) == place(LWS)


def test_r93_a_worker_index_that_differs_from_the_label_is_refused() -> None:
    problem = refusal({**LWS, "LWS_WORKER_INDEX": "0", label("leaderworkerset.sigs.k8s.io/worker-index"): "1"})

    assert "LWS_WORKER_INDEX is 0 and INITWARM_LABEL_LEADERWORKERSET_SIGS_K8S_IO_WORKER_INDEX is 1" in problem.fact


def test_r93_two_pods_with_one_worker_index_both_say_where_their_rank_is_from() -> None:
    # Each pod alone cannot know of the other; the hello carries the source, and the group refuses the second.
    pods = [place({**LWS, "LWS_WORKER_INDEX": "0", "INITWARM_POD_UID": uid}) for uid in ("a", "b")]

    assert [(pod.node_rank, pod.source) for pod in pods] == [(0, "leaderworkerset")] * 2


@pytest.mark.parametrize("missing", ["LWS_WORKER_INDEX", "LWS_GROUP_SIZE"])
def test_r95_a_leaderworkerset_that_tells_too_little_is_refused_with_the_version_that_tells(missing: str) -> None:
    problem = refusal({**LWS, missing: ""})

    assert missing in problem.fact
    assert "0.6" in problem.fix


def test_r71_an_empty_leader_address_is_refused_and_never_passed_on() -> None:
    assert "LWS_LEADER_ADDRESS" in refusal({**LWS, "LWS_LEADER_ADDRESS": ""}).fact


def test_an_explicit_leader_address_stands_in_for_the_missing_one() -> None:
    topology = place({**LWS, "LWS_LEADER_ADDRESS": ""}, leader_address="10.0.0.1:29800")

    assert (topology.leader_address, topology.leader_port) == ("10.0.0.1", 29800)


# --- Grove


def test_a_pod_of_a_grove_worker_clique_comes_after_the_leader() -> None:
    topology = place(GROVE, leader_address="llm-0-decode-1-decode-ldr-0.llm-0")

    assert (topology.source, topology.node_rank, topology.num_nodes) == ("grove", 3, 4)
    assert topology.group == "llm-0-decode-1"


def test_the_pod_of_a_grove_leader_clique_is_the_leader() -> None:
    environ = {**GROVE, "GROVE_PCLQ_NAME": "llm-0-decode-1-decode-ldr", "GROVE_PCLQ_POD_INDEX": "0"}

    assert place(environ).node_rank == 0


def test_a_grove_leader_clique_with_two_pods_is_refused() -> None:
    environ = {**GROVE, "GROVE_PCLQ_NAME": "llm-0-decode-1-decode-ldr", "GROVE_PCLQ_POD_INDEX": "1"}

    assert "GROVE_PCLQ_POD_INDEX is 1" in refusal(environ).fact


def test_a_grove_clique_of_another_name_says_its_first_rank() -> None:
    environ = {**GROVE, "GROVE_PCLQ_NAME": "llm-0-decode-1-rest"}

    assert "INITWARM_GROVE_FIRST_RANK" in refusal(environ).fix
    assert place({**environ, "INITWARM_GROVE_FIRST_RANK": "1"}).node_rank == 3


def test_a_grove_clique_outside_a_scaling_group_needs_a_size() -> None:
    environ = {"GROVE_PCLQ_NAME": "llm-0-decode", "GROVE_PCLQ_POD_INDEX": "1"}

    assert "INITWARM_NNODES" in refusal(environ).fix
    assert place(environ, nnodes="2").group == "llm-0-decode"
    assert place({"GROVE_PCLQ_POD_INDEX": "1"}, nnodes="2").source == "grove"


def test_a_grove_pod_beyond_the_template_s_number_is_refused() -> None:
    assert "Node rank 5 is no place among 4 pods" in refusal({**GROVE, "GROVE_PCLQ_POD_INDEX": "4"}).fact


def test_a_scaling_group_of_one_pod_has_one_rank_whatever_its_clique_is_called() -> None:
    environ = {**GROVE, "GROVE_PCSG_TEMPLATE_NUM_PODS": "1", "GROVE_PCLQ_POD_INDEX": "0"}

    assert (place(environ).node_rank, place(environ).num_nodes) == (0, 1)


# --- TrainJob


def test_a_node_of_a_trainjob() -> None:
    assert place(TRAINJOB) == Topology("trainjob", 1, 2, 4, None, "tune-node-0-0.tune", None, "tune-node-0-0")


@pytest.mark.parametrize(
    "nodes", ["1:4", "4:2", "2:", ":2", "2:2:2", "two", "0", "0:0", "2 : 2", "٣", "1e3", str(2**70)]
)
def test_r92_elastic_and_impossible_node_counts_are_refused(nodes: str) -> None:
    assert "PET_NNODES is" in refusal({**TRAINJOB, "PET_NNODES": nodes}).fact


@pytest.mark.parametrize("nodes", ["1:4", "4:1"])
def test_r92_a_range_is_called_one(nodes: str) -> None:
    assert f"'{nodes}', which is a range" in refusal({**TRAINJOB, "PET_NNODES": nodes}).fact


@pytest.mark.parametrize("nodes", ["tcp://10.0.0.1:80", "2:", ":2", "1:x", "1:٣", "1:2:3"])
def test_r92_what_only_looks_like_a_range_is_shown_whole_as_no_number(nodes: str) -> None:
    assert f"'{nodes}', which is no whole number" in refusal({**TRAINJOB, "PET_NNODES": nodes}).fact


def test_r92_a_range_of_one_size_is_that_size() -> None:
    assert place({**TRAINJOB, "PET_NNODES": "2:2"}) == place(TRAINJOB)


def test_r92_an_empty_node_count_is_unset() -> None:
    assert place({"PET_NNODES": ""}).source == "single"


@pytest.mark.parametrize("nproc", ["auto", "gpu"])
def test_r92_ranks_of_a_node_that_are_counted_at_run_time_are_left_open(nproc: str) -> None:
    assert place({**TRAINJOB, "PET_NPROC_PER_NODE": nproc}).nproc_per_node is None


@pytest.mark.parametrize("nproc", ["cpu", "0", "-1", "4.0"])
def test_ranks_of_a_node_that_make_no_sense_are_refused(nproc: str) -> None:
    assert "PET_NPROC_PER_NODE is" in refusal({**TRAINJOB, "PET_NPROC_PER_NODE": nproc}).fact


def test_a_trainjob_without_node_rank_takes_the_completion_index() -> None:
    assert place({**TRAINJOB, "PET_NODE_RANK": "", "JOB_COMPLETION_INDEX": "1"}).node_rank == 1


def test_a_trainjob_s_jobset_is_not_asked_since_it_numbers_other_jobs_too() -> None:
    # With a dataset initializer the JobSet has two Jobs, and its global numbering is not the trainer's.
    assert place({**TRAINJOB, **JOBSET}).node_rank == 1


def test_a_trainjob_rank_that_is_not_the_completion_index_is_a_conflict() -> None:
    problem = refusal({**TRAINJOB, "JOB_COMPLETION_INDEX": "0"})

    assert "PET_NODE_RANK='1'" in problem.fact
    assert "JOB_COMPLETION_INDEX='0'" in problem.fact


def test_a_trainjob_with_only_half_of_its_variables_is_refused() -> None:
    assert "envInjection" in refusal({"PET_NODE_RANK": "1"}).fix


# --- JobSet and Indexed Job


def test_r99_ranks_count_through_all_jobs_of_a_jobset() -> None:
    pods = [
        place({
            **JOBSET,
            "INITWARM_JOBSET_COMPLETIONS": "2",
            label("jobset.sigs.k8s.io/replicatedjob-name"): replicated_job,
            label("jobset.sigs.k8s.io/job-global-index"): str(job),
            "JOB_COMPLETION_INDEX": str(pod),
        })
        for job, replicated_job in enumerate(("prefill", "decode"))
        for pod in range(2)
    ]  # fmt: skip

    assert [(pod.node_rank, pod.num_nodes, pod.group) for pod in pods] == [(rank, 4, "serve") for rank in range(4)]


def test_r99_a_size_of_one_job_makes_each_job_a_group_of_its_own() -> None:
    topology = place({**JOBSET, "INITWARM_JOBSET_COMPLETIONS": "2"}, nnodes="2")

    assert (topology.node_rank, topology.num_nodes, topology.group) == (1, 2, "serve-prefill-0")


@pytest.mark.parametrize("missing", ["jobset-name", "replicatedjob-name", "job-index"])
def test_a_job_of_a_jobset_is_never_named_by_half_of_its_labels(missing: str) -> None:
    environ = {**JOBSET, "INITWARM_JOBSET_COMPLETIONS": "2", label(f"jobset.sigs.k8s.io/{missing}"): ""}

    topology = place(environ, nnodes="2", leader_address="10.0.0.1")

    assert topology.group == "default"


def test_r99_a_jobset_of_several_jobs_without_completions_is_refused() -> None:
    problem = refusal(JOBSET, nnodes="4")

    assert "INITWARM_JOBSET_COMPLETIONS" in problem.fix


def test_a_jobset_of_one_job_needs_only_its_size() -> None:
    environ = {
        **JOBSET,
        label("jobset.sigs.k8s.io/global-replicas"): "1",
        label("jobset.sigs.k8s.io/job-global-index"): "0",
        label("jobset.sigs.k8s.io/coordinator"): "serve-prefill-0-0.serve",
    }

    topology = place(environ, nnodes="2")

    assert topology == Topology("jobset", 1, 2, None, None, "serve-prefill-0-0.serve", None, "serve-prefill-0")
    assert "INITWARM_JOBSET_COMPLETIONS" in refusal(environ).fix


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"JOB_COMPLETION_INDEX": "2"}, "completion index of this pod is 2"),
        ({label("jobset.sigs.k8s.io/job-global-index"): "2"}, "JOB_GLOBAL_INDEX is 2"),
        ({label("jobset.sigs.k8s.io/global-replicas"): ""}, "Job 1 of (unknown)"),
        ({"JOB_COMPLETION_INDEX": ""}, "completion index (unknown)"),
    ],
)
def test_impossible_places_in_a_jobset_are_refused(changes: dict[str, str], named: str) -> None:
    assert named in refusal({**JOBSET, "INITWARM_JOBSET_COMPLETIONS": "2", **changes}).fact


def test_a_size_that_is_neither_a_job_nor_the_jobset_is_a_conflict() -> None:
    problem = refusal({**JOBSET, "INITWARM_JOBSET_COMPLETIONS": "2"}, nnodes="3")

    assert "explicit says 3 pods (--nnodes='3')" in problem.fact


def test_an_indexed_job_needs_a_size() -> None:
    environ = {"JOB_COMPLETION_INDEX": "1", label("batch.kubernetes.io/job-name"): "seed"}

    problem = refusal(environ)

    assert "INITWARM_NNODES" in problem.fix
    assert "INITWARM_TOPOLOGY=single" in problem.fix
    assert place(environ, nnodes="2") == Topology("indexed-job", 1, 2, None, None, None, None, "seed")


def test_a_completion_index_beyond_the_size_is_refused() -> None:
    assert "Node rank 2 is no place among 2 pods" in refusal({"JOB_COMPLETION_INDEX": "2"}, nnodes="2").fact


# --- Volcano


def test_r91_all_tasks_of_a_volcano_job_are_counted_the_master_first() -> None:
    assert place(VOLCANO) == Topology("volcano", 2, 4, None, None, "job-master-0.job", None, "job")


def test_r91_helper_tasks_are_named_as_what_may_not_take_part() -> None:
    problem = refusal({**VOLCANO, "VC_EXTRAS_NUM": "4"})

    assert "VC_EXTRAS_*" in problem.fact
    assert "VC_EXTRAS_NUM=4" in problem.fact
    assert "INITWARM_VOLCANO_TASKS" in problem.fix


def test_a_volcano_task_without_pods_changes_nothing() -> None:
    assert place({**VOLCANO, "VC_EXTRAS_NUM": "0"}) == place(VOLCANO)


def test_r91_helper_tasks_do_not_count_when_the_tasks_are_told() -> None:
    topology = place({**VOLCANO, "VC_EXTRAS_NUM": "4", "INITWARM_VOLCANO_TASKS": "master,worker"})

    assert (topology.node_rank, topology.num_nodes) == (2, 4)


def test_r91_a_pod_of_a_helper_task_has_no_place() -> None:
    environ = {**VOLCANO, "VC_EXTRAS_NUM": "4", "INITWARM_VOLCANO_TASKS": "master,worker"}

    assert "'extras'" in refusal({**environ, label("volcano.sh/task-spec"): "extras"}).fact


def test_a_volcano_job_of_one_task_needs_no_task_name() -> None:
    environ = {
        "VC_TASK_INDEX": "2",
        "VC_LLM_SERVER_NUM": "3",
        "VC_LLM_SERVER_HOSTS": "j-llm-server-0.j,j-llm-server-1.j",
    }

    topology = place(environ)

    assert (topology.node_rank, topology.num_nodes, topology.leader_address) == (2, 3, "j-llm-server-0.j")


def test_a_volcano_task_with_a_dash_is_found_under_its_variable() -> None:
    environ = {"VC_TASK_INDEX": "0", "VC_LLM_A_NUM": "1", "VC_LLM_B_NUM": "1", label("volcano.sh/task-spec"): "llm-b"}

    assert place({**environ, "INITWARM_VOLCANO_TASKS": "llm-a,llm-b"}).node_rank == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"VC_TASK_INDEX": "3", "VK_TASK_INDEX": "3"}, "VC_TASK_INDEX is 3, but VC_WORKER_NUM is 3"),
        ({"VK_TASK_INDEX": "2"}, "VC_TASK_INDEX is 1 and VK_TASK_INDEX is 2"),
        ({"INITWARM_VOLCANO_TASKS": "master,workers"}, "INITWARM_VOLCANO_TASKS is 'master,workers'"),
        ({"INITWARM_VOLCANO_TASKS": "worker,worker"}, "INITWARM_VOLCANO_TASKS is"),
        ({"INITWARM_VOLCANO_TASKS": ","}, "INITWARM_VOLCANO_TASKS is"),
        ({"VC_WORKER_NUM": "three"}, "VC_WORKER_NUM is 'three'"),
        ({"VC_MASTER_HOSTS": " "}, "VC_MASTER_HOSTS is ' '"),
        ({label("volcano.sh/task-spec"): ""}, "of which task"),
        ({"VC_WORKER_NUM": "", "VC_MASTER_NUM": ""}, "no VC_<TASK>_NUM"),
    ],
)
def test_what_cannot_be_in_a_volcano_job_is_refused(changes: dict[str, str], named: str) -> None:
    assert named in refusal({**VOLCANO, **changes}).fact


# --- KubeRay


def test_a_host_of_a_multi_host_replica_needs_a_size() -> None:
    assert "numOfHosts" in refusal(KUBERAY).fix

    topology = place(KUBERAY, nnodes="2")

    # The head is not host 0 of the replica, so its address is not the leader's.
    assert topology == Topology("kuberay", 1, 2, None, None, None, None, "ray-workers-xh3hf")


@pytest.mark.parametrize(
    "missing",
    [
        ("ray.io/replica-host-index",),
        ("ray.io/worker-group-replica-name",),
        ("ray.io/replica-host-index", "ray.io/worker-group-replica-name", "ray.io/worker-group-replica-index"),
    ],
)
def test_r102_missing_labels_of_a_multi_host_replica_name_the_feature_gate(missing: tuple[str, ...]) -> None:
    problem = refusal({**KUBERAY, **{label(key): "" for key in missing}}, nnodes="2")

    assert label(missing[0]) in problem.fact
    assert "RayMultiHostIndexing" in problem.fix
    assert "1.6" in problem.fix


def test_r102_a_replica_name_without_host_index_is_refused_even_without_a_size() -> None:
    assert "RayMultiHostIndexing" in refusal({**KUBERAY, label("ray.io/replica-host-index"): ""}).fix


def test_a_single_host_ray_worker_has_no_peers() -> None:
    environ = {label("ray.io/cluster"): "ray", label("ray.io/worker-group-replica-index"): "4", "FQ_RAY_IP": "head"}

    assert place(environ).source == "single"


def test_an_explicit_place_needs_no_labels_of_kuberay() -> None:
    assert place({label("ray.io/cluster"): "ray"}, nnodes="2", node_rank="1").source == "explicit"


# --- StatefulSet


def test_r98_ordinals_that_start_elsewhere_and_a_lying_hostname() -> None:
    environ = {"HOSTNAME": "web-7", POD_INDEX: "12", "INITWARM_STATEFULSET_START": "10", "INITWARM_POD_NAME": "web-12"}

    assert place(environ, nnodes="4") == Topology("statefulset", 2, 4, None, None, None, None, "web")


def test_r98_an_index_beyond_the_size_hints_at_ordinals_start() -> None:
    problem = refusal({"HOSTNAME": "web-7", POD_INDEX: "12"}, nnodes="4")

    assert f"{POD_INDEX} is 12" in problem.fact
    assert "spec.ordinals.start" in problem.fix


def test_r98_an_index_below_the_start_is_refused() -> None:
    assert "ordinals.start" in refusal({POD_INDEX: "2", "INITWARM_STATEFULSET_START": "10"}, nnodes="4").fix


def test_r98_a_hostname_alone_places_no_pod() -> None:
    assert place({"HOSTNAME": "web-7"}) == place({})


def test_a_statefulset_needs_a_size() -> None:
    problem = refusal({POD_INDEX: "1"})

    assert "INITWARM_NNODES" in problem.fix
    assert "INITWARM_TOPOLOGY=single" in problem.fix


def test_a_statefulset_of_independent_replicas_says_single() -> None:
    topology = place({POD_INDEX: "1", "INITWARM_TOPOLOGY": "single", "INITWARM_POD_NAME": "web-1"})

    assert topology == Topology("single", 0, 1, None, None, None, None, "web-1")


# --- single


def test_r100_a_pod_without_any_group_has_as_many_ranks_as_it_is_told() -> None:
    assert place({}, nproc_per_node="2") == Topology("single", 0, 1, 2, None, None, None, "default")


def test_r104_no_peer_s_name_is_constructed() -> None:
    # Pods of arbitrary names: what is known of the leader is what was told, to the letter.
    environ = {label("leaderworkerset.sigs.k8s.io/name"): "set", label("leaderworkerset.sigs.k8s.io/group-index"): "1"}

    assert place({**LWS, **environ, "INITWARM_POD_NAME": "zebra"}).leader_address == LWS["LWS_LEADER_ADDRESS"]
    assert place({POD_INDEX: "1", "INITWARM_POD_NAME": "web-1"}, nnodes="2").leader_address is None
    assert place(GROVE).leader_address is None
