import dataclasses
import json

import pytest

from initwarm.detectors import DETECTORS
from initwarm.environment import annotation, label
from initwarm.errors import TopologyError
from initwarm.topology import (
    Explanation,
    Row,
    Topology,
    TopologyFlags,
    explain,
    explanation_as_json,
    rank_offsets,
    render_explanation,
    render_topology,
    resolve,
    world_size,
)

POD_INDEX = label("apps.kubernetes.io/pod-index")
LWS = {"LWS_LEADER_ADDRESS": "vllm-3.vllm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
IMPOSSIBLE_NUMBERS = ["None", " 3 ", "1e3", str(2**70), "-1", "٣", "3.0", "0x1", "1_0", "+1", "01", "\x00", "1\n", "ⅷ"]


def refusal(environ: dict[str, str], **flags: str) -> TopologyError:
    with pytest.raises(TopologyError) as caught:
        resolve(environ, TopologyFlags(**flags))
    assert caught.value.exit_code == 78
    return caught.value


def rows(explanation: Explanation) -> dict[str, Row]:
    return {row.detector: row for row in explanation.rows}


# --- values


@pytest.mark.parametrize("value", [*IMPOSSIBLE_NUMBERS, "0"])
def test_an_impossible_size_is_refused_with_variable_value_and_fix(value: str) -> None:
    problem = refusal({"INITWARM_NNODES": value, "INITWARM_NODE_RANK": "0"})

    assert problem.fact.startswith(f"INITWARM_NNODES is {value!r}")
    assert "INITWARM_NNODES" in problem.fix


@pytest.mark.parametrize("value", IMPOSSIBLE_NUMBERS)
@pytest.mark.parametrize(
    "variable", ["INITWARM_NODE_RANK", "LWS_WORKER_INDEX", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", POD_INDEX]
)
def test_an_impossible_rank_is_refused_wherever_it_stands(variable: str, value: str) -> None:
    environ = {"PET_NNODES": "2"} if variable.startswith("PET_") else {}

    assert refusal({**environ, variable: value}).fact.startswith(f"{variable} is {value!r}")


def test_a_size_of_none_pods_is_refused_wherever_it_stands() -> None:
    assert "LWS_GROUP_SIZE is '0'" in refusal({**LWS, "LWS_GROUP_SIZE": "0"}).fact
    assert "INITWARM_JOBSET_COMPLETIONS is '0'" in refusal(
        {label("jobset.sigs.k8s.io/jobset-name"): "js", "INITWARM_JOBSET_COMPLETIONS": "0"}
    ).fact  # fmt: skip


def test_a_rank_outside_the_group_is_refused_with_what_said_so() -> None:
    problem = refusal({**LWS, "LWS_WORKER_INDEX": "2"})

    assert "Node rank 2 is no place among 2 pods" in problem.fact
    assert "LWS_WORKER_INDEX='2'" in problem.fact
    assert "0 to 1" in problem.fix


@pytest.mark.parametrize(
    ("flags", "is_valid"),
    [
        ({"nnodes": "150000"}, True),
        ({"nnodes": "150001"}, False),
        ({"node_rank": "150000"}, False),
        ({"port": "65535"}, True),
        ({"port": "65536"}, False),
        ({"port": "0"}, False),
        ({"nproc_per_node": "1024"}, True),
        ({"nproc_per_node": "1025"}, False),
    ],
)
def test_the_bounds_of_a_number_are_themselves_valid(flags: dict[str, str], is_valid: bool) -> None:
    whole = {"nnodes": "2", "node_rank": "0", **flags}

    assert (explain({}, TopologyFlags(**whole)).error is None) == is_valid


def test_a_huge_value_is_cut_in_the_message() -> None:
    assert len(str(refusal({"INITWARM_NNODES": "9" * 100_000}))) < 400


def test_a_flag_is_named_as_it_was_given() -> None:
    assert refusal({}, nnodes="0").fact.startswith("--nnodes is '0'")
    assert refusal({"INITWARM_NNODES": "0"}, nnodes="0").fact.startswith("INITWARM_NNODES is '0'")


def test_r95_variables_that_are_declared_for_all_frameworks_and_empty_are_unset() -> None:
    names = [
        "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "GROVE_PCLQ_POD_INDEX", "GROVE_PCLQ_NAME",
        "GROVE_PCSG_NAME", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR",
        "JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VC_WORKER_NUM", "RANK", "WORLD_SIZE", "LOCAL_RANK",
        "TORCHELASTIC_RUN_ID", "INITWARM_NNODES", "INITWARM_NODE_RANK", "INITWARM_TOPOLOGY", "INITWARM_PORT",
        "INITWARM_GROUP", "INITWARM_LEADER_ADDRESS", "INITWARM_NPROC_PER_NODE", "INITWARM_POD_NAME", "INITWARM_POD_IP",
        POD_INDEX, label("ray.io/replica-host-index"), label("ray.io/cluster"), label("volcano.sh/task-index"),
        label("jobset.sigs.k8s.io/jobset-name"), label("leaderworkerset.sigs.k8s.io/name"),
        annotation("leaderworkerset.sigs.k8s.io/size"),
    ]  # fmt: skip

    topology = resolve(dict.fromkeys(names, ""))

    assert topology == Topology("single", 0, 1, None, None, None, None, "default")


# --- explicit settings


def test_explicit_settings_alone_are_a_place() -> None:
    flags = TopologyFlags(
        nnodes="4", node_rank="2", leader_address="10.0.0.7", port="29800", nproc_per_node="8", group="g"
    )

    assert resolve({}, flags) == Topology("explicit", 2, 4, 8, None, "10.0.0.7", 29800, "g")


def test_a_flag_beats_its_variable() -> None:
    environ = {"INITWARM_NNODES": "2", "INITWARM_NODE_RANK": "1"}

    assert resolve(environ, TopologyFlags(nnodes="4")).num_nodes == 4


def test_one_explicit_pod_needs_no_rank() -> None:
    assert resolve({}, TopologyFlags(nnodes="1")) == Topology("explicit", 0, 1, None, None, None, None, "default")


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ({"nnodes": "2"}, "which of its group's pods this is"),
        ({"node_rank": "0"}, "how many pods"),
        ({"leader_address": "decode-0"}, "how many pods"),
    ],
)
def test_explicit_settings_that_are_no_whole_place_are_refused(flags: dict[str, str], missing: str) -> None:
    problem = refusal({}, **flags)

    assert missing in problem.fact
    assert "INITWARM_NNODES and INITWARM_NODE_RANK" in problem.fix


def test_explicit_settings_complete_what_a_source_leaves_open() -> None:
    topology = resolve({"JOB_COMPLETION_INDEX": "1"}, TopologyFlags(nnodes="2", leader_address="seed-0.seed"))

    assert topology == Topology("indexed-job", 1, 2, None, None, "seed-0.seed", None, "default")


def test_an_explicit_rank_that_a_source_confirms_is_explicit_and_keeps_the_source_s_leader() -> None:
    topology = resolve(LWS, TopologyFlags(node_rank="1", nnodes="2"))

    assert (topology.source, topology.leader_address, topology.group) == ("explicit", "vllm-3.vllm.default", "vllm-3")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nnodes": "4"}, "explicit says 4 pods (--nnodes='4')"),
        ({"node_rank": "0"}, "explicit says node rank 0 (--node-rank='0')"),
        ({"nnodes": "2", "node_rank": "0"}, "explicit says node rank 0 of 2"),
    ],
)
def test_an_explicit_setting_that_a_source_contradicts_is_a_conflict(flags: dict[str, str], said: str) -> None:
    problem = refusal(LWS, **flags)

    assert said in problem.fact
    assert "leaderworkerset says node rank 1 of 2 (LWS_WORKER_INDEX='1'" in problem.fact
    assert "--topology" in problem.fix


def test_ranks_per_pod_that_differ_are_a_conflict_and_gpu_counts_them_anew() -> None:
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"}

    assert "4 ranks per pod" in refusal(environ, nproc_per_node="4").fact
    assert resolve(environ, TopologyFlags(nproc_per_node="gpu")).nproc_per_node is None


def test_an_explicit_rank_beyond_the_explicit_size_is_refused() -> None:
    problem = refusal({"INITWARM_NNODES": "2", "INITWARM_NODE_RANK": "2"})

    assert "INITWARM_NNODES='2', INITWARM_NODE_RANK='2'" in problem.fact


def test_two_ports_that_differ_are_refused() -> None:
    assert "29800" in refusal({}, nnodes="1", leader_address="a:29800", port="29801").fact


# --- which source is believed


def test_two_frameworks_that_disagree_are_a_conflict_that_names_both() -> None:
    problem = refusal({**LWS, "VC_TASK_INDEX": "0", "VC_WORKER_NUM": "4"})

    assert "leaderworkerset says node rank 1 of 2 (LWS_WORKER_INDEX='1'" in problem.fact
    assert "volcano says node rank 0 of 4 (VC_TASK_INDEX='0', VC_WORKER_NUM='4')" in problem.fact
    assert "(leaderworkerset, volcano)" in problem.fix


def test_two_sources_that_agree_are_no_conflict() -> None:
    # The usual way to start torchrun in a LeaderWorkerSet: PET_NNODES=$(LWS_GROUP_SIZE) and so on.
    environ = {**LWS, "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "vllm-3.vllm"}

    verdicts = {name: row.verdict for name, row in rows(explain(environ)).items()}

    assert resolve(environ).source == "leaderworkerset"
    assert (verdicts["leaderworkerset"], verdicts["trainjob"]) == ("believed", "agrees")


def test_a_nonsensical_value_of_a_lower_source_is_refused_too() -> None:
    assert "PET_NNODES is '1:4'" in refusal({**LWS, "PET_NNODES": "1:4"}).fact


def test_a_forced_source_is_the_only_one_asked() -> None:
    environ = {**LWS, "VC_TASK_INDEX": "0", "VC_WORKER_NUM": "4", "PET_NNODES": "1:4"}

    assert resolve(environ, TopologyFlags(source="volcano")).num_nodes == 4
    assert resolve({**environ, "INITWARM_TOPOLOGY": "leaderworkerset"}).num_nodes == 2
    assert resolve(environ, TopologyFlags(source="single")).num_nodes == 1
    assert resolve(environ, TopologyFlags(source="explicit", nnodes="3", node_rank="2")).node_rank == 2


def test_a_forced_source_that_the_pod_does_not_have_is_refused_with_what_it_needs() -> None:
    problem = refusal(LWS, source="grove")

    assert "grove" in problem.fact
    assert "GROVE_PCLQ_POD_INDEX" in problem.fix


def test_an_unknown_source_is_refused_with_the_known_ones() -> None:
    problem = refusal({}, source="lsw")

    assert "--topology is 'lsw'" in problem.fact
    assert "leaderworkerset, grove" in problem.fix


def test_a_forced_source_and_an_explicit_size_that_differ_are_a_conflict() -> None:
    assert "single says node rank 0 of 1" in refusal({}, source="single", nnodes="2").fact


# --- the pod's own address


def test_a_leader_whose_leader_is_another_pod_is_a_conflict() -> None:
    environ = {"INITWARM_POD_IP": "10.0.0.5", "INITWARM_LEADER_ADDRESS": "10.0.0.7", "INITWARM_NNODES": "2"}

    assert "10.0.0.5" in refusal({**environ, "INITWARM_NODE_RANK": "0"}).fact
    assert resolve({**environ, "INITWARM_NODE_RANK": "1"}).node_rank == 1


def test_r94_a_follower_that_is_its_own_leader_is_a_conflict() -> None:
    environ = {"INITWARM_POD_IP": "fd00::5", "INITWARM_LEADER_ADDRESS": "[fd00:0::5]:29710", "INITWARM_NNODES": "2"}

    assert "fd00::5" in refusal({**environ, "INITWARM_NODE_RANK": "1"}).fact
    assert resolve({**environ, "INITWARM_NODE_RANK": "0"}).node_rank == 0


def test_a_lone_pod_may_have_a_leader_s_address_that_it_does_not_use() -> None:
    environ = {"INITWARM_POD_IP": "10.0.0.5", "INITWARM_LEADER_ADDRESS": "10.0.0.7", "INITWARM_NNODES": "1"}

    assert resolve(environ).num_nodes == 1


def test_addresses_of_two_families_are_not_compared() -> None:
    environ = {"INITWARM_POD_IP": "10.0.0.5", "INITWARM_LEADER_ADDRESS": "fd00::5", "INITWARM_NNODES": "2"}

    assert resolve({**environ, "INITWARM_NODE_RANK": "0"}).leader_address == "fd00::5"


# --- the group's name


@pytest.mark.parametrize("group", [".hidden", "..", "a/b", "a b", "a\n", "é", "x" * 129, "a:b"])
def test_a_group_that_cannot_be_a_directory_is_refused(group: str) -> None:
    problem = refusal({}, group=group)

    assert problem.fact.startswith("--group is ")
    assert "128" in problem.fix


@pytest.mark.parametrize("group", ["a", "A.b_c-9", "x" * 128, "-", "_"])
def test_a_group_that_can_be_a_directory_is_taken(group: str) -> None:
    assert resolve({}, TopologyFlags(group=group)).group == group


def test_a_group_name_from_a_label_is_checked_as_well() -> None:
    labels = {label("leaderworkerset.sigs.k8s.io/name"): "../x", label("leaderworkerset.sigs.k8s.io/group-index"): "0"}

    assert "'../x-0'" in refusal({**LWS, **labels}).fact


def test_a_lone_pod_s_group_is_the_pod_and_several_pods_never_are() -> None:
    assert resolve({"INITWARM_POD_NAME": "llm-7d9-x2"}).group == "llm-7d9-x2"
    assert resolve({"INITWARM_POD_NAME": "llm-7d9-x2"}, TopologyFlags(nnodes="1")).group == "llm-7d9-x2"
    assert resolve({"INITWARM_POD_NAME": "a"}, TopologyFlags(nnodes="2", node_rank="0")).group == "default"
    assert resolve({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}).group == "default"
    assert "INITWARM_POD_NAME is" in refusal({"INITWARM_POD_NAME": "x" * 129}).fact


@pytest.mark.parametrize(
    ("environ", "nnodes", "changes"),
    [
        (LWS, None, {"LWS_LEADER_ADDRESS": "vllm-4.vllm.default"}),
        (
            {
                "GROVE_PCLQ_NAME": "a-0-ldr",
                "GROVE_PCLQ_POD_INDEX": "0",
                "GROVE_PCSG_NAME": "a",
                "GROVE_PCSG_INDEX": "0",
            },
            "2",
            {"GROVE_PCLQ_NAME": "a-1-ldr", "GROVE_PCSG_INDEX": "1"},
        ),
        (
            {
                "JOB_COMPLETION_INDEX": "0",
                label("jobset.sigs.k8s.io/jobset-name"): "js",
                label("jobset.sigs.k8s.io/replicatedjob-name"): "decode",
                label("jobset.sigs.k8s.io/job-index"): "0",
                label("jobset.sigs.k8s.io/job-global-index"): "0",
                label("jobset.sigs.k8s.io/global-replicas"): "2",
                "INITWARM_JOBSET_COMPLETIONS": "2",
            },
            "2",
            {label("jobset.sigs.k8s.io/job-index"): "1", label("jobset.sigs.k8s.io/job-global-index"): "1"},
        ),
        (
            {
                label("ray.io/cluster"): "ray",
                label("ray.io/worker-group-replica-name"): "w-1",
                label("ray.io/replica-host-index"): "0",
            },
            "2",
            {label("ray.io/worker-group-replica-name"): "w-2"},
        ),
    ],
    ids=["leaderworkerset", "grove", "jobset", "kuberay"],
)
def test_two_groups_of_one_workload_have_two_names(
    environ: dict[str, str], nnodes: str | None, changes: dict[str, str]
) -> None:
    flags = TopologyFlags(nnodes=nnodes)

    assert resolve(environ, flags).group != resolve({**environ, **changes}, flags).group


# --- ranks


def test_r90_pods_with_1_2_and_2_gpus_have_five_ranks_without_gap_or_overlap() -> None:
    counts = (1, 2, 2)

    assert world_size(counts) == 5
    assert rank_offsets(counts) == (0, 1, 3)


def test_r90_a_pod_without_gpus_takes_no_rank() -> None:
    assert rank_offsets((0, 8, 8)) == (0, 0, 8)
    assert rank_offsets(()) == ()
    assert world_size(()) == 0


# --- the decision table


def test_the_table_names_every_detector_in_order_of_precedence() -> None:
    assert [row.detector for row in explain({}).rows] == [detector.name for detector in DETECTORS]
    assert [detector.tier for detector in DETECTORS] == sorted(
        (detector.tier for detector in DETECTORS),
        key=["explicit", "launcher", "framework", "generic", "none"].index,
    )


def test_the_table_says_what_won_and_why_the_others_lost() -> None:
    explanation = explain({**LWS, POD_INDEX: "1"}, TopologyFlags(port="29800"))
    by_name = rows(explanation)

    assert (by_name["leaderworkerset"].verdict, by_name["leaderworkerset"].why) == ("believed", "says node rank 1 of 2")
    assert by_name["leaderworkerset"].saw == LWS
    assert by_name["statefulset"].verdict == "set aside"
    assert "leaderworkerset" in by_name["statefulset"].why
    assert by_name["explicit"].verdict == "completes"
    assert by_name["grove"].verdict == "absent"
    assert by_name["single"].verdict == "absent"
    assert explanation.error is None


def test_r100_the_table_says_that_nothing_but_single_was_found() -> None:
    explanation = explain({})

    assert {row.verdict for row in explanation.rows if row.detector != "single"} == {"absent"}
    assert rows(explanation)["single"].verdict == "believed"


def test_the_table_of_a_conflict_has_both_sides_and_the_error() -> None:
    explanation = explain({**LWS, "JOB_COMPLETION_INDEX": "0"})
    by_name = rows(explanation)

    assert by_name["leaderworkerset"].verdict == by_name["indexed-job"].verdict == "conflicts"
    assert explanation.topology is None
    assert explanation.error is not None
    assert str(explanation.error) in render_explanation(explanation)


def test_the_table_of_a_refused_setting_still_shows_what_the_pod_has() -> None:
    by_name = rows(explain({**LWS, "INITWARM_NNODES": "x"}))

    assert (by_name["explicit"].verdict, by_name["explicit"].saw) == ("refused", {"INITWARM_NNODES": "x"})
    assert by_name["leaderworkerset"].verdict == "matched"


def test_the_table_of_a_forced_source_says_that_the_others_were_not_asked() -> None:
    by_name = rows(explain(LWS, TopologyFlags(source="single")))

    assert by_name["leaderworkerset"].verdict == "not asked"
    assert by_name["single"].verdict == "believed"


def test_service_links_are_ignored_and_listed_by_name_alone() -> None:
    links = {
        "INITWARM_PORT": "tcp://10.0.0.9:80", "INITWARM_SERVICE_HOST": "10.0.0.9", "INITWARM_SERVICE_PORT": "80",
        "INITWARM_SERVICE_PORT_HTTP": "80", "INITWARM_PORT_80_TCP": "tcp://10.0.0.9:80",
        "INITWARM_PORT_80_TCP_ADDR": "10.0.0.9", "INITWARM_PORT_80_TCP_PORT": "80", "INITWARM_PORT_80_TCP_PROTO": "tcp",
        "LWS_WORKER_PORT": "udp://10.0.0.9:53", "KUBERNETES_PORT": "tcp://10.0.0.9:443",
    }  # fmt: skip

    explanation = explain({**links, **LWS})

    assert explanation.topology == resolve(LWS)
    assert explanation.ignored == tuple(sorted(set(links) - {"KUBERNETES_PORT"}))
    assert "10.0.0.9" not in render_explanation(explanation)
    assert "10.0.0.9" not in json.dumps(explanation_as_json(explanation))


def test_a_service_link_that_was_copied_into_the_port_flag_is_ignored_too() -> None:
    link = "tcp://10.0.0.9:80"

    assert resolve({"INITWARM_PORT": link}, TopologyFlags(port=link)).leader_port is None
    assert "--port is 'tcp://" in refusal({}, port=link).fact


def test_nothing_is_shown_that_no_detector_reads() -> None:
    secret = "hunter2-0123456789"
    environ = {**LWS, "HF_TOKEN": secret, "INITWARM_CACHE_KEY": secret, "LWS_TOKEN": secret, "VC_TOKEN": secret}

    explanation = explain(environ)

    assert secret not in render_explanation(explanation)
    assert secret not in json.dumps(explanation_as_json(explanation))


def test_the_table_as_json_is_complete() -> None:
    good = json.loads(json.dumps(explanation_as_json(explain(LWS))))
    bad = explanation_as_json(explain({**LWS, "LWS_GROUP_SIZE": "0"}))

    assert good["topology"] == dataclasses.asdict(resolve(LWS))
    assert good["error"] is None
    assert [row["detector"] for row in good["detectors"]] == [detector.name for detector in DETECTORS]
    assert good["detectors"][2]["saw"] == LWS
    assert bad["topology"] is None
    assert set(bad["error"]) == {"fact", "effect", "fix"}


def test_a_place_is_shown_with_source_group_and_leader() -> None:
    text = render_topology(resolve(LWS, TopologyFlags(port="29800")))

    assert "leaderworkerset" in text
    assert "1 of 2" in text
    assert "vllm-3.vllm.default, port 29800" in text


def test_a_lone_pod_is_shown_without_a_leader() -> None:
    text = render_topology(resolve({}))

    assert "0 of 1" in text
    assert "counted at run time" in text
    assert "leader" not in text


def test_a_launcher_s_child_is_shown_with_its_device() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}

    assert "device          1" in render_topology(resolve(environ))


def test_what_is_shown_cannot_move_a_cursor() -> None:
    text = render_explanation(explain({**LWS, "LWS_WORKER_INDEX": "\x1b[2J\udc80"}))

    assert "\x1b" not in text
    assert text.encode()
