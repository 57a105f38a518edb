# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of a gang: every rule with what it accepts and refuses, and the containers exactly as docs/design.md says."""

from __future__ import annotations

import base64
import json
import re

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _plan
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

SNAPSHOT = f"/models/hub/models--Qwen--Qwen3.5-122B-A10B-FP8/snapshots/{gang.REVISION}"


def addressed(*addresses):
    """Nodes with these fabric addresses; the first is the head."""
    return [{**gang.member(), "name": f"spark-{n}", "head": n == 1, "address": address} for n, address in enumerate(addresses, 1)]


def told(problems):
    """(id, node) of each problem."""
    return [(problem.id, problem.node) for problem in problems]


# --- inputs


@pytest.mark.parametrize(
    ("members", "expected", "words"),
    [
        (addressed("192.168.200.12", "192.168.200.13"), [], ()),
        (addressed("192.168.200.12", ""), [("RAY-09", "spark-2")], ("spark_fabric_address ''", "the node's own IPv4 address")),
        (addressed("192.168.200.12", "spark-2.local"), [("RAY-09", "spark-2")], ("'spark-2.local'",)),
        (addressed("192.168.200.12", "192.168.200.13/24"), [("RAY-09", "spark-2")], ("without a prefix length",)),
        (addressed("192.168.200.12", "fd00::13"), [("RAY-09", "spark-2")], ("'fd00::13'",)),
        (
            addressed("10.1.230.180", "192.168.200.13"),
            [("RAY-09", "spark-1")],
            ("10.1.230.180", "inside spark_fabric_subnet 192.168.200.0/24"),
        ),
        (addressed("192.168.200.12", "192.168.200.12"), [("RAY-10", "spark-2")], ("which spark-1 has too", "different address")),
        (
            [{**m, "head": False} for m in addressed("192.168.200.12", "192.168.200.13")],
            [("input", "")],
            ("0 hosts in the group ray_head",),
        ),
        ([{**m, "head": True} for m in addressed("192.168.200.12", "192.168.200.13")], [("input", "")], ("2 hosts", "exactly one")),
    ],
)
def test_groups_and_addresses(members, expected, words):
    problems = _plan.input_problems(gang.settings(), members)
    assert told(problems) == expected
    assert all(word in problems[0].msg for word in words)


@pytest.mark.parametrize(
    ("nodes", "per_node", "tensor", "pipeline", "refused"),
    [
        (2, 1, 2, 1, False),
        (2, 1, 1, 2, False),
        (4, 1, 2, 2, False),
        (2, 2, 4, 1, False),
        (1, 1, 1, 1, False),
        (2, 1, 1, 1, True),
        (2, 1, 4, 1, True),
        (3, 1, 2, 1, True),
        (2, 1, 2, 2, True),
    ],
)
def test_ranks_are_the_gpus_of_the_inventory(nodes, per_node, tensor, pipeline, refused):
    values = gang.settings(gpus_per_node=per_node, tensor_parallel=tensor, pipeline_parallel=pipeline)
    problems = _plan.parallel_problems(values, nodes)
    assert [problem.id for problem in problems] == (["RAY-03"] if refused else [])
    if refused:
        assert problems[0].found.endswith(f"= {tensor * pipeline} ranks") and problems[0].expected.startswith(f"{nodes * per_node} ranks")


@pytest.mark.parametrize(
    ("nodes", "per_node", "tensor", "pipeline", "data", "words"),
    [
        (2, 1, 1, 1, 2, ()),
        (4, 1, 2, 1, 2, ()),
        (8, 1, 2, 2, 2, ()),
        (2, 2, 1, 1, 4, ()),
        (2, 2, 2, 1, 2, ()),
        (4, 2, 2, 2, 2, ()),
        (2, 1, 2, 1, 2, ("x spark_data_parallel 2 = 4 ranks", "2 ranks")),
        (3, 1, 1, 1, 2, ("= 2 ranks", "3 ranks")),
        (3, 2, 3, 1, 2, ("engines of 3 GPUs on nodes with 2", "take whole nodes")),
    ],
)
def test_engines_fill_the_gpus_of_the_inventory(nodes, per_node, tensor, pipeline, data, words):
    values = gang.settings(gpus_per_node=per_node, tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data)
    problems = _plan.parallel_problems(values, nodes)
    assert [problem.id for problem in problems] == (["RAY-03"] if words else [])
    assert all(word in problems[0].msg for word in words)


DENSE = {"num_hidden_layers": 6, "num_attention_heads": 8}
SPARSE = {"text_config": {**DENSE, "num_experts": 16}}


@pytest.mark.parametrize(
    ("config", "values", "ident", "words"),
    [
        (DENSE, {"pipeline_parallel": 6}, None, ()),
        (DENSE, {"pipeline_parallel": 7}, "pp-layers", ("spark_pipeline_parallel 7", "6 layers", "at most 6 stages")),
        ({"text_config": DENSE}, {"pipeline_parallel": 8}, "pp-layers", ("6 layers",)),
        ({}, {"pipeline_parallel": 7}, None, ()),
        (None, {"pipeline_parallel": 7}, None, ()),
        (DENSE, {"pipeline_parallel": 2, "env": {"VLLM_PP_LAYER_PARTITION": "4,2"}}, None, ()),
        (
            DENSE,
            {"pipeline_parallel": 2, "env": {"VLLM_PP_LAYER_PARTITION": "4,3"}},
            "pp-layers",
            ("PARTITION 4,3", "2 numbers", "sum is 6"),
        ),
        (DENSE, {"pipeline_parallel": 3, "env": {"VLLM_PP_LAYER_PARTITION": "3,3"}}, "pp-layers", ("3 numbers",)),
        (DENSE, {"pipeline_parallel": 2, "env": {"VLLM_PP_LAYER_PARTITION": "x"}}, "pp-layers", ("2 numbers",)),
        (DENSE, {"env": {"VLLM_PP_LAYER_PARTITION": "x"}}, None, ()),  # vLLM does not look at it
        (DENSE, {"tensor_parallel": 2, "data_parallel": 2, "executor": "mp"}, "dp-nodes", ("executor mp", "spark_executor: ray")),
        (DENSE, {"tensor_parallel": 1, "pipeline_parallel": 2, "data_parallel": 2, "executor": "mp"}, "dp-nodes", ()),
        (DENSE, {"tensor_parallel": 2, "data_parallel": 2, "executor": "mp", "gpus_per_node": 2}, None, ()),
        (DENSE, {"tensor_parallel": 1, "data_parallel": 2, "executor": "mp"}, None, ()),
        (DENSE, {"tensor_parallel": 2, "data_parallel": 2, "executor": "ray"}, None, ()),
        (SPARSE, {"tensor_parallel": 2, "data_parallel": 2, "executor": "mp"}, None, ()),
        (None, {"tensor_parallel": 2, "data_parallel": 2, "executor": "mp"}, None, ()),
        ({"num_attention_heads": 3}, {"tensor_parallel": 2}, "VLL-04", ("3 attention heads",)),
    ],
)
def test_what_a_model_cannot_be_split_into(config, values, ident, words):
    problems = gang.model_problems(gang.settings(**{"tensor_parallel": 1, **values}), config)
    assert [problem.id for problem in problems] == ([ident] if ident else [])
    assert all(word in problems[0].msg for word in words)


@pytest.mark.parametrize(
    ("config", "size", "allowed"),
    [
        ({"num_attention_heads": 32}, 2, None),
        ({"num_attention_heads": 40}, 3, "1, 2, 4, 5, 8, 10, 20, 40"),
        ({"text_config": {"num_attention_heads": 14}, "num_attention_heads": 12}, 3, "1, 2, 7, 14"),
        ({"text_config": {"num_attention_heads": 12}, "num_attention_heads": 14}, 3, None),
        ({"num_attention_heads": [12, 16, 20]}, 3, "1, 2, 4"),
        ({"num_attention_heads": [12, 16, 20]}, 2, None),
        ({"num_attention_heads": "12"}, 5, None),
        ({"num_attention_heads": None, "text_config": []}, 5, None),
        ({"text_config": "odd"}, 5, None),
        ({"model_type": "mamba"}, 3, None),
        ({}, 3, None),
        (None, 3, None),
    ],
)
def test_tensor_parallel_divides_the_heads(config, size, allowed):
    problem = _plan.heads_problem(gang.settings(tensor_parallel=size), config)
    assert (problem is None) == (allowed is None)
    if problem:
        assert (problem.id, problem.stage) == ("VLL-04", "model")
        assert problem.expected == f"a size that divides the heads: {allowed}"


@pytest.mark.parametrize(
    ("stop", "actions"),
    [
        ({"containers": ["glm-sglang"]}, ["stop"]),
        ({"containers": ["another"]}, ["refuse"]),
        ({}, ["refuse"]),
    ],
)
def test_only_what_is_named_may_be_stopped(stop, actions):
    facts = gang.node(containers=[gang.container("glm-sglang")], listeners=[gang.listener(30000, container="glm-sglang")])
    member = gang.member(facts=facts)
    values = gang.settings(stop={"containers": [], "units": [], "compose_projects": [], **stop})
    assert [claim["action"] for claim in _plan.node_claims(values, member)] == actions


# --- the nodes compared


def rails(*subnets, **more):
    return [{"interface": f"if{n}", "subnet": subnet, "active": True, **more} for n, subnet in enumerate(subnets)]


def test_warnings_of_detection_carry_their_node():
    members = gang.pair()
    assert _plan.fabric_warnings(members) == []
    members[0]["fabric"]["warnings"] = ["half of the port has no address"]
    members[1]["fabric"]["rail_count"] = 2
    assert _plan.fabric_warnings(members) == [
        "spark-1: half of the port has no address",
        "nodes with different numbers of rails (spark-1 1, spark-2 2): NCCL uses what both ends have",
    ]


# --- environment


def env_of(name="spark-1", **values):
    members = gang.pair()
    return _plan.environment(gang.settings(**values), next(m for m in members if m["name"] == name), members)


# docs/design.md, "Containers on the nodes": everything explicit on every node.
EVERYWHERE = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
    "NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p.log",
    "DO_NOT_TRACK": "1",
    "FLASHINFER_WORKSPACE_BASE": "/var/cache/kernels/flashinfer",
    "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
    "HF_HUB_CACHE": "/models/hub",
    "HF_HUB_OFFLINE": "1",
    "MASTER_ADDR": "192.168.200.12",
    "MN_IF_NAME": "enp1s0f1np1",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_HCA": "=rocep1s0f1:1",
    "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
    "NO_PROXY": "localhost,127.0.0.1,192.168.200.12,192.168.200.13",
    "OMPI_MCA_btl_tcp_if_include": "enp1s0f1np1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_num_prestart_python_workers": "0",
    "TORCHINDUCTOR_CACHE_DIR": "/var/cache/kernels/inductor",
    "TP_SOCKET_IFNAME": "enp1s0f1np1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRITON_CACHE_DIR": "/var/cache/kernels/triton",
    "UCX_NET_DEVICES": "enp1s0f1np1",
    "VLLM_CACHE_ROOT": "/var/cache/kernels/vllm",
    "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
    "VLLM_NO_USAGE_STATS": "1",
    "no_proxy": "localhost,127.0.0.1,192.168.200.12,192.168.200.13",
}


@pytest.mark.parametrize(("name", "address"), [("spark-1", "192.168.200.12"), ("spark-2", "192.168.200.13")])
def test_environment_of_each_node(name, address):
    """Ray and vLLM know each node by the same address, its own on the fabric; the head's is only MASTER_ADDR."""
    assert env_of(name) == {**EVERYWHERE, "RAY_NODE_IP_ADDRESS": address, "VLLM_HOST_IP": address}


def test_environment_without_ray():
    assert env_of(executor="mp") == {**EVERYWHERE, "VLLM_HOST_IP": "192.168.200.12"}


def test_environment_of_the_inventory_wins_and_is_text():
    env = env_of(env={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": 4, "HF_HUB_OFFLINE": "0"})
    assert (env["NCCL_DEBUG"], env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == ("INFO", "4", "0")


def test_environment_never_has_an_empty_text():
    """An empty NCCL_* or *_IFNAME is not "unset" for those who read it."""
    env = env_of(env={"NCCL_IB_HCA": ""})
    assert "NCCL_IB_HCA" not in env and "" not in env.values()


def test_environment_never_pins_the_gid():
    assert "NCCL_IB_GID_INDEX" not in env_of()


def with_rails(*indexes):
    """A pair with one RDMA device on each node, its RoCE v2 GID at these indexes."""
    members = gang.pair()
    for member, index in zip(members, indexes, strict=True):
        member["fabric"]["rails"] = rails("192.168.200.0/24", hca="rocep1s0f1", gid_index=index)
    return members


@pytest.mark.parametrize(
    ("wanted", "indexes", "value"), [("auto", (3, 3), "3"), ("auto", (3, 5), None), ("5", (5, 5), "5"), ("", (3, 3), None)]
)
def test_environment_has_the_gid_only_where_it_is_right_for_all(wanted, indexes, value):
    members = with_rails(*indexes)
    values = gang.settings(gid_index=wanted)
    assert [_plan.environment(values, member, members).get("NCCL_IB_GID_INDEX") for member in members] == [value, value]
    assert gang.gang_problems(members, wanted) == []
    told = _plan.fabric_warnings(members, values)
    assert told == ([] if value or not wanted else [f"NCCL_IB_GID_INDEX is left out, {told[0].partition(', ')[2]}"])


def test_a_gid_index_that_is_wrong_on_one_node():
    assert told(gang.gang_problems(with_rails(3, 5), "3")) == [("NCL-01", "")]


def test_rails_in_different_subnets_are_not_crossed():
    members = gang.pair()
    for member in members:
        member["fabric"].update(rails=rails("192.168.200.0/24", "192.168.201.0/24"), hcas=["rocep1s0f1:1", "roceP2p1s0f1:1"])
    assert _plan.environment(gang.settings(), members[1], members)["NCCL_CROSS_NIC"] == "0"
    assert _plan.environment(gang.settings(env={"NCCL_CROSS_NIC": "1"}), members[1], members)["NCCL_CROSS_NIC"] == "1"
    assert "NCCL_CROSS_NIC" not in env_of()


def test_engine_waits_longer_than_we_do_and_our_limit_changes_no_container():
    assert int(env_of()["VLLM_ENGINE_READY_TIMEOUT_S"]) > 3600
    assert containers(ready_timeout=100) == containers(ready_timeout=7200)


# --- containers


def containers(name="spark-1", members=None, **values):
    plan = _plan.serving_plan(gang.settings(**values), members or gang.pair())
    return plan["nodes"][name]["containers"]


RAY_PORTS = [
    "--node-manager-port=6380",
    "--object-manager-port=6381",
    "--runtime-env-agent-port=6382",
    "--dashboard-agent-grpc-port=6383",
    "--dashboard-agent-listen-port=6384",
    "--metrics-export-port=6385",
    "--min-worker-port=20002",
    "--max-worker-port=20999",
]
RESOURCES = ["--num-gpus=1", "--num-cpus=2", "--object-store-memory=1073741824", "--disable-usage-stats"]
COMMON = {
    "image": gang.IMAGE,
    "volumes": [
        "/home/nvidia/.cache/huggingface/hub:/models/hub:ro",
        f"/var/lib/dgxspark-serving/kernels/{gang.FINGERPRINT[:12]}:/var/cache/kernels",
    ],
    "network_mode": "host",
    "ipc_mode": "host",
    "devices": ["/dev/infiniband:/dev/infiniband:rwm"],
    "capabilities": ["IPC_LOCK"],
    "ulimits": ["memlock:-1:-1", "stack:67108864:67108864"],
    "restart_policy": "no",
    "stop_timeout": 60,
}


def bare(definition):
    """Without environment, labels and the cluster's volume, which have tests of their own."""
    kept = {key: value for key, value in definition.items() if key not in ("env", "labels")}
    return {**kept, "volumes": [volume for volume in kept["volumes"] if not volume.startswith("spark-tmp")]}


def volume(**values):
    """The volume for /tmp of both containers of a cluster; the same on all nodes."""
    found = {d["volumes"][0] for name in gang.ADDRESSES if name != "spark-3" for d in containers(name, **values).values()}
    assert len(found) == 1
    return found.pop()


def test_a_cluster_has_a_volume_of_its_own_that_its_servers_share():
    assert re.fullmatch(r"spark-tmp-[0-9a-f]{12}:/tmp", volume())
    assert volume(max_model_len=4096) == volume()
    assert volume(ray_num_cpus=4) != volume()
    plan = _plan.serving_plan(gang.settings(), gang.pair())
    assert f"{plan['tmp_volume']}:/tmp" == volume()


def test_ranks_without_ray():
    server, rank = containers(executor="mp"), containers("spark-2", executor="mp")
    assert list(server) == list(rank) == ["spark-vllm"]
    serve = ["serve", SNAPSHOT, "--served-model-name", gang.MODEL, "--host", "0.0.0.0", "--port", "30000", "--tensor-parallel-size", "2"]
    serve += ["--distributed-executor-backend", "mp", "--gpu-memory-utilization", "0.8", "--nnodes", "2"]
    place = ["--master-addr", "192.168.200.12", "--master-port", "29501"]
    common = {"name": "spark-vllm", "entrypoint": ["vllm"], **COMMON}
    assert bare(server["spark-vllm"]) == {**common, "command": [*serve, "--node-rank", "0", *place]}
    assert bare(rank["spark-vllm"]) == {**common, "command": [*serve, "--node-rank", "1", *place, "--headless"]}
    assert rank["spark-vllm"]["env"]["VLLM_HOST_IP"] == "192.168.200.13" and "RAY_ADDRESS" not in server["spark-vllm"]["env"]
    assert not any("/tmp" in mount for mount in rank["spark-vllm"]["volumes"])


def test_stages_and_engines_without_ray():
    """Which engine and which stage a node has, vLLM derives from its rank."""
    staged = containers("spark-2", executor="mp", tensor_parallel=1, pipeline_parallel=2)["spark-vllm"]["command"]
    assert staged[staged.index("--tensor-parallel-size") :][:4] == ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"]
    assert not any("data-parallel" in str(word) for word in staged)
    for name in ("spark-1", "spark-2"):
        command = containers(name, executor="mp", tensor_parallel=1, data_parallel=2, dp_port=29600)["spark-vllm"]["command"]
        place = ["--data-parallel-size", "2", "--data-parallel-address", "192.168.200.12", "--data-parallel-rpc-port", "29600"]
        assert command[command.index("--data-parallel-size") :][:6] == place
        assert (command[-1] == "--headless") == (name == "spark-2")


@pytest.mark.parametrize(
    ("values", "local", "pack"),
    [
        ({"tensor_parallel": 1}, "1", "strict"),
        ({"tensor_parallel": 1, "gpus_per_node": 4, "data_parallel": 8}, "4", "strict"),
        ({"tensor_parallel": 2, "gpus_per_node": 4, "data_parallel": 4}, "2", "strict"),
        ({"tensor_parallel": 2}, "1", "span"),
        ({"tensor_parallel": 1, "pipeline_parallel": 2}, "1", "span"),
    ],
)
def test_engines_with_ray(values, local, pack):
    server = containers(**{"data_parallel": 2, **values})["spark-vllm"]
    command = server["command"]
    size = str(values.get("data_parallel", 2))
    place = ["--data-parallel-size", size, "--data-parallel-size-local", local, "--data-parallel-backend", "ray"]
    assert command[command.index("--data-parallel-size") :] == [*place, "--data-parallel-address", "192.168.200.12"]
    assert server["env"]["VLLM_RAY_DP_PACK_STRATEGY"] == pack
    assert "VLLM_RAY_DP_PACK_STRATEGY" not in containers(**{"data_parallel": 2, **values})["spark-ray"]["env"]
    assert "VLLM_RAY_DP_PACK_STRATEGY" not in containers()["spark-vllm"]["env"]


def test_another_split_does_not_replace_ray():
    for values in ({"tensor_parallel": 1, "pipeline_parallel": 2}, {"tensor_parallel": 1, "data_parallel": 2}):
        assert containers(**values)["spark-ray"] == containers()["spark-ray"]


def test_a_number_of_api_servers_is_for_the_head_only():
    words = ["--seed", "1", "--api-server-count", "7", "--enforce-eager", "--api_server_count=3"]
    head, rank = (containers(name, executor="mp", vllm_args=words)["spark-vllm"]["command"] for name in ("spark-1", "spark-2"))
    assert [word for word in words if word in head] == words
    assert [word for word in words if word in rank] == ["--seed", "1", "--enforce-eager"]


def test_ports_of_engines_without_ray():
    values = gang.settings(executor="mp", tensor_parallel=1, data_parallel=2)
    taken = gang.node(listeners=[gang.listener(29550)])
    assert "29550" in gang.node_problems(values, gang.member(facts=taken))[0].msg
    assert gang.node_problems(values, gang.member("spark-2", taken)) == []
    assert gang.node_problems(gang.settings(executor="mp"), gang.member(facts=taken)) == []
    assert gang.node_problems(gang.settings(tensor_parallel=1, data_parallel=2), gang.member(facts=taken)) == []
    assert 29550 in _plan.open_ports(values, True) and 29550 not in _plan.open_ports(values, False)


@pytest.mark.parametrize(
    ("values", "config", "talk"),
    [
        ({}, None, True),
        ({"tensor_parallel": 1, "pipeline_parallel": 2}, None, True),
        ({"tensor_parallel": 1, "data_parallel": 2}, DENSE, False),
        ({"tensor_parallel": 1, "data_parallel": 2}, SPARSE, True),
        ({"tensor_parallel": 2, "gpus_per_node": 2, "data_parallel": 2}, DENSE, False),
        ({"tensor_parallel": 2, "data_parallel": 2}, DENSE, True),
    ],
)
def test_whether_ranks_talk_over_the_fabric(values, config, talk):
    snapshot = {"complete": True, "verified": True, "revision": gang.REVISION, "manifest_digest": "d1", "path": "/x", "config": config}
    assert _plan.serving_plan(gang.settings(**values), gang.pair({"snapshot": snapshot}))["ranks_talk"] is talk


def test_ranks_are_counted_from_the_head_also_when_it_is_not_the_first():
    members = gang.pair()[::-1]
    for name, number in (("spark-1", "0"), ("spark-2", "1")):
        command = containers(name, members, executor="mp")["spark-vllm"]["command"]
        assert command[command.index("--node-rank") + 1] == number


def as_running(executor, **worker):
    """A pair on which a version of this executor runs; ``worker`` are changes to the worker's containers."""
    sides = [
        [gang.container(n, labels=d["labels"]) for n, d in containers(name, executor=executor).items()] for name in ("spark-1", "spark-2")
    ]
    return gang.pair({"containers": sides[0]}, {"containers": [{**c, **worker} for c in sides[1]]})


@pytest.mark.parametrize(
    ("running", "planned", "worker", "previous", "in_place"),
    [
        ("ray", "ray", {}, "ray", (True, True)),
        ("mp", "mp", {}, "mp", (True, True)),
        ("ray", "mp", {}, "ray", (True, False)),  # there is no Ray to replace: the stage vllm makes room
        ("mp", "ray", {}, "mp", (False, False)),
        ("mp", "mp", {"running": False, "state": "exited"}, "", (True, False)),
        ("ray", "ray", {"running": False, "state": "exited"}, "", (False, False)),
        ("ray", "ray", {"labels": {}}, "", (False, False)),
    ],
)
def test_one_executor_after_the_other(running, planned, worker, previous, in_place):
    plan = _plan.serving_plan(gang.settings(executor=planned), as_running(running, **worker))
    assert (plan["previous"], (plan["ray_in_place"], plan["server_in_place"])) == (previous, in_place)


def test_what_runs_after_an_interrupted_run_is_nothing_to_come_back_to():
    members = as_running("ray")
    members[1]["node"]["disks"] = {_plan.RECORD: {"checked": _plan.RECORD}}
    assert _plan.serving_plan(gang.settings(), members)["previous"] == ""


def test_ray_of_the_head():
    assert bare(containers()["spark-ray"]) == {
        "name": "spark-ray",
        "entrypoint": ["ray"],
        "command": [
            *["start", "--block", "--node-ip-address=192.168.200.12", "--head", "--port=6379", "--include-dashboard=false"],
            *RESOURCES,
            *RAY_PORTS,
        ],
        **COMMON,
    }


def test_ray_of_a_worker():
    assert bare(containers("spark-2")["spark-ray"]) == {
        "name": "spark-ray",
        "entrypoint": ["ray"],
        "command": ["start", "--block", "--node-ip-address=192.168.200.13", "--address=192.168.200.12:6379", *RESOURCES, *RAY_PORTS],
        **COMMON,
    }


def test_server_on_the_head_only():
    assert list(containers("spark-2")) == ["spark-ray"]
    server = containers()["spark-vllm"]
    assert bare(server) == {
        "name": "spark-vllm",
        "entrypoint": ["vllm"],
        "command": [
            *["serve", SNAPSHOT, "--served-model-name", gang.MODEL, "--host", "0.0.0.0", "--port", "30000"],
            *["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--gpu-memory-utilization", "0.8"],
        ],
        "pid_mode": "container:spark-ray",
        **COMMON,
    }
    assert server["env"] == {**containers()["spark-ray"]["env"], "RAY_ADDRESS": "192.168.200.12:6379"}


def different_ports():
    """The cable is in port 1 of the head and in port 0 of the worker."""
    members = gang.pair()
    names = {"enp1s0f1np1": "enp1s0f0np0", "rocep1s0f1": "rocep1s0f0"}
    env = members[1]["fabric"]["env"]
    for old, new in names.items():
        env = {key: value.replace(old, new) for key, value in env.items()}
    members[1]["fabric"] = gang.fabric("192.168.200.13", interface="enp1s0f0np0", env=env)
    return members


def test_ranks_keep_their_own_names_when_they_differ():
    """vLLM 0.17 on Ray gives every rank the NCCL_ and UCX_ variables of the head, but for those in a file."""
    members = different_ports()
    head, worker = containers(members=members), containers("spark-2", members=members)
    assert head["spark-ray"]["env"]["NCCL_IB_HCA"] == "=rocep1s0f1:1" and worker["spark-ray"]["env"]["NCCL_IB_HCA"] == "=rocep1s0f0:1"
    assert (worker["spark-ray"]["env"]["NCCL_SOCKET_IFNAME"], worker["spark-ray"]["env"]["GLOO_SOCKET_IFNAME"]) == (
        "=enp1s0f0np0",
        "enp1s0f0np0",
    )
    file = _plan.serving_plan(gang.settings(), members)["fabric"]["carry_over"]
    assert f"{file['path']}:/etc/vllm/ray_non_carry_over_env_vars.json:ro" in head["spark-vllm"]["volumes"]
    assert head["spark-vllm"]["env"]["VLLM_CONFIG_ROOT"] == "/etc/vllm"
    assert file["path"].startswith("/var/lib/dgxspark-serving/ray_env_") and file["path"].endswith(".json")
    names = json.loads(file["content"])
    assert {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES"} <= set(names)
    assert not {"NCCL_IB_DISABLE", "MASTER_ADDR", "VLLM_HOST_IP"} & set(names)  # equal everywhere, or never copied
    told_by = _plan.fabric_warnings(members, gang.settings())
    assert len(told_by) == 1 and "NCCL_IB_HCA" in told_by[0] and "differ between the nodes" in told_by[0]
    assert not any("vllm/ray" in volume for volume in head["spark-ray"]["volumes"])


def test_no_file_where_it_is_not_needed():
    assert _plan.serving_plan(gang.settings(), gang.pair())["fabric"]["carry_over"] == {}
    assert "VLLM_CONFIG_ROOT" not in containers()["spark-vllm"]["env"]
    assert _plan.serving_plan(gang.settings(executor="mp"), different_ports())["fabric"]["carry_over"] == {}


def test_a_configuration_directory_of_the_inventory_is_kept():
    server = containers(members=different_ports(), env={"VLLM_CONFIG_ROOT": "/opt/vllm"})["spark-vllm"]
    assert server["env"]["VLLM_CONFIG_ROOT"] == "/opt/vllm"
    assert any(volume.endswith(":/opt/vllm/ray_non_carry_over_env_vars.json:ro") for volume in server["volumes"])


def test_plan_tells_the_fabric_of_each_node():
    fabric = _plan.serving_plan(gang.settings(), different_ports())["fabric"]
    assert fabric["topology"] == "pair"
    assert fabric["env"]["spark-2"] == {
        "GLOO_SOCKET_IFNAME": "enp1s0f0np0",
        "MASTER_ADDR": "192.168.200.12",
        "MN_IF_NAME": "enp1s0f0np0",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=rocep1s0f0:1",
        "NCCL_SOCKET_IFNAME": "=enp1s0f0np0",
        "OMPI_MCA_btl_tcp_if_include": "enp1s0f0np0",
        "RAY_NODE_IP_ADDRESS": "192.168.200.13",
        "TP_SOCKET_IFNAME": "enp1s0f0np0",
        "UCX_NET_DEVICES": "enp1s0f0np0",
        "VLLM_HOST_IP": "192.168.200.13",
    }


def test_ray_itself_is_not_told_of_a_cluster():
    """With RAY_ADDRESS in its environment ``ray start --head`` refuses."""
    assert all("RAY_ADDRESS" not in containers(name)["spark-ray"]["env"] for name in ("spark-1", "spark-2"))


def test_nothing_is_privileged_or_restarted():
    for name in ("spark-1", "spark-2"):
        for definition in containers(name).values():
            assert "privileged" not in definition and definition["restart_policy"] == "no"


def test_a_node_without_rdma_gets_no_device():
    members = gang.pair(worker={"infiniband_dev": False})
    assert containers("spark-2", members)["spark-ray"]["devices"] == []
    assert containers("spark-1", members)["spark-ray"]["devices"] != []


@pytest.mark.parametrize(
    ("cache", "home", "expected"),
    [
        ("~/.cache/huggingface", "/home/nvidia", "/home/nvidia/.cache/huggingface"),
        ("~", "/home/nvidia", "/home/nvidia"),
        ("/data/models", "/home/nvidia", "/data/models"),
        ("~other/models", "/home/nvidia", "~other/models"),
    ],
)
def test_cache_is_in_the_home_on_the_node(cache, home, expected):
    assert _plan.cache_dir_of(gang.settings(model_cache=cache), {"user": {"home": home}}) == expected


def test_each_node_mounts_its_own_cache():
    members = gang.pair(worker={"user": {"home": "/home/dgx"}})
    assert "/home/dgx/.cache/huggingface/hub:/models/hub:ro" in containers("spark-2", members)["spark-ray"]["volumes"]


def test_labels():
    labels = containers()["spark-vllm"]["labels"]
    definition = labels.pop("dgxspark.serving.definition")
    assert len(definition) == 64
    assert labels == {
        "dgxspark.serving": "1",
        "dgxspark.serving.role": "server",
        "dgxspark.serving.model": gang.MODEL,
        "dgxspark.serving.revision": gang.REVISION,
        "dgxspark.serving.served_model_name": gang.MODEL,
    }
    assert [containers(name)["spark-ray"]["labels"]["dgxspark.serving.role"] for name in ("spark-1", "spark-2")] == ["head", "worker"]


# --- arguments of vllm serve


@pytest.mark.parametrize(
    ("values", "pair"),
    [
        ({"pipeline_parallel": 2, "tensor_parallel": 1}, ["--pipeline-parallel-size", "2"]),
        ({"max_model_len": 16384}, ["--max-model-len", "16384"]),
        ({"api_port": 8000}, ["--port", "8000"]),
        ({"vllm_args": ["--max-num-seqs", 4]}, ["--max-num-seqs", "4"]),
    ],
)
def test_arguments(values, pair):
    arguments = _plan.vllm_arguments(gang.settings(**values))
    assert pair[0] not in _plan.vllm_arguments(gang.settings()) or "8000" in pair
    assert arguments[arguments.index(pair[0]) + 1] == pair[1]


@pytest.mark.parametrize(
    ("argument", "variable"),
    [
        ("--port", "spark_api_port"),
        ("--port=8000", "spark_api_port"),
        ("--host", "spark_api_host"),
        ("--served-model-name", "spark_served_model_name"),
        ("--tensor-parallel-size=4", "spark_tensor_parallel"),
        ("-tp", "spark_tensor_parallel"),
        ("--pipeline-parallel-size", "spark_pipeline_parallel"),
        ("-pp", "spark_pipeline_parallel"),
        ("--distributed-executor-backend", "spark_executor"),
        ("--gpu-memory-utilization", "spark_gpu_memory_utilization"),
        ("--max-model-len", "spark_max_model_len"),
        ("--model", "spark_model"),
        ("--data-parallel-size", "spark_data_parallel"),
        ("-dp", "spark_data_parallel"),
        ("--data_parallel_size_local=1", "spark_data_parallel"),
        ("--data-parallel-rpc-port", "spark_dp_port"),
        ("--data-parallel-backend", "spark_executor"),
        ("--data-parallel-hybrid-lb", "not supported yet"),
        ("--data-parallel-rank", "not supported yet"),
        ("--max_model_len=4096", "spark_max_model_len"),
        ("--nnodes", "spark_executor"),
        ("--node_rank=1", "spark_executor"),
        ("--headless", "spark_executor"),
        ("--master-port", "spark_mp_port"),
    ],
)
def test_arguments_that_have_a_variable_are_refused(argument, variable):
    with pytest.raises(Problem) as caught:
        _plan.vllm_arguments(gang.settings(vllm_args=["--enforce-eager", argument]))
    assert caught.value.id == "input" and variable in caught.value.remedy
    assert f"{argument.partition('=')[0]} in spark_vllm_args" in caught.value.msg


@pytest.mark.parametrize("argument", ["--api-key", "--api_key=secret", "--uds", "--ssl-keyfile=/k", "--ssl_certfile"])
def test_what_would_hide_the_server_from_us_is_refused(argument):
    with pytest.raises(Problem) as caught:
        _plan.vllm_arguments(gang.settings(vllm_args=["--enforce-eager", argument]))
    assert caught.value.id == "input" and "gateway" in caught.value.remedy
    assert f"{argument.partition('=')[0]} in spark_vllm_args" in caught.value.msg and "secret" not in caught.value.msg


@pytest.mark.parametrize("argument", ["--hf-token", "--hf_token=hf_secret"])
def test_a_secret_among_the_arguments_is_refused(argument):
    with pytest.raises(Problem) as caught:
        _plan.vllm_arguments(gang.settings(vllm_args=["--return-tokens-as-token-ids", argument]))
    assert "spark_hf_token_file" in caught.value.remedy and "hf_secret" not in caught.value.msg


OWN_PORTS = {
    "the API on Ray's port": ({"api_port": 6379}, "port 6379 for both spark_api_port and spark_ray_port"),
    "the API on one of Ray's others": ({"api_port": 6380}, "port 6380 for both spark_api_port and Ray's node-manager-port"),
    "the API among Ray's workers": ({"api_port": 20500}, "port 20500 for both spark_api_port and Ray's ports for workers"),
    "Ray on one of its others": ({"ray_port": 6381}, "port 6381 for both spark_ray_port and Ray's object-manager-port"),
    "mp on the API": ({"executor": "mp", "mp_port": 30000}, "port 30000 for both spark_api_port and spark_mp_port"),
    "data parallel on mp": ({"executor": "mp", "data_parallel": 2, "dp_port": 29500, "mp_port": 29500}, "for both spark_mp_port and spark_dp_port"),
    "none": ({}, None),
    "Ray's, and no Ray": ({"executor": "mp", "api_port": 6380}, None),
    "the port of engines that are not": ({"executor": "mp", "dp_port": 30000}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", OWN_PORTS)
def test_a_port_that_a_service_would_use_twice_is_refused(case):
    values, found = OWN_PORTS[case]
    problems = gang.service_problems(gang.settings(**values), [gang.member("spark-1"), gang.member("spark-2")])
    assert [found in problem.msg for problem in problems if problem.id == "service-ports"] == ([True] if found else [])


# --- the digest of a definition: what replaces a running container, and what does not


def digests(name="spark-1", members=None, **values):
    found = containers(name, members, **values)
    return {key: value["labels"]["dgxspark.serving.definition"] for key, value in found.items()}


BOTH = {"spark-ray", "spark-vllm"}
SERVER = {"spark-vllm"}


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ({}, set()),
        ({"model": "Qwen/Qwen3-8B", "served_model_name": "q"}, SERVER),
        ({"served_model_name": "q"}, SERVER),
        ({"vllm_args": ["--enforce-eager"]}, SERVER),
        ({"api_port": 8000}, SERVER),
        ({"gpu_memory_utilization": 0.7}, SERVER),
        ({"image": "vllm:other"}, BOTH),
        ({"env": {"NCCL_DEBUG": "TRACE"}}, BOTH),
        ({"ray_port": 6400}, BOTH),
        ({"ulimits": []}, BOTH),
        ({"model_cache": "/data"}, BOTH),
        # Of no meaning to a running container.
        ({"stop_timeout": 5, "rollback": False, "download_timeout": 9, "ray_timeout": 9, "become": False}, set()),
        ({"fabric_throughput": 3, "fabric_throughput_min": 40, "require_rdma": False}, set()),
        ({"hf_endpoint": "http://hub", "hf_token_file": "/t", "model_offline": True, "model_exclude": ["*.bin"]}, set()),
        ({"stop": {"containers": ["x"], "units": [], "compose_projects": []}}, set()),
    ],
)
def test_definition_changes_with(values, changed):
    before, after = digests(), digests(**values)
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize(
    ("head", "worker", "changed_on_head", "changed_on_worker"),
    [
        ({"snapshot": {"revision": "f" * 40}}, {}, SERVER, set()),
        ({"image": {"fingerprint": "aa" * 32}}, {}, BOTH, {"spark-ray"}),  # what the head has is what the worker gets
        ({}, {"image": {"present": False, "fingerprint": None}}, set(), set()),
        ({"time": 1.0, "listeners": [gang.listener(8080)], "containers": [gang.container("x")]}, {}, set(), set()),
    ],
)
def test_definition_changes_with_the_facts(head, worker, changed_on_head, changed_on_worker):
    changed = {}
    for name in ("spark-1", "spark-2"):
        before, after = digests(name), digests(name, gang.pair(head, worker))
        changed[name] = {key for key in before if before[key] != after[key]}
    assert changed == {"spark-1": changed_on_head, "spark-2": changed_on_worker}


def test_the_digest_is_of_content_not_of_order():
    assert _plan.digest({"a": 1, "b": [2, 3]}) == _plan.digest({"b": [2, 3], "a": 1})
    assert _plan.digest([1, 2]) != _plan.digest([2, 1])


# --- what runs already


def running(name="spark-1", members=None, **changes):
    """The planned containers of a node as node_info would list them."""
    found = containers(name, members)
    return [gang.container(key, **{"labels": dict(value["labels"]), **changes}) for key, value in found.items()]


def served(**changes):
    """A pair on which everything runs as planned; ``changes`` are to the worker's containers."""
    return gang.pair({"containers": running("spark-1")}, {"containers": running("spark-2", **changes)})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, True),
        ({"running": False, "state": "exited"}, False),
        ({"labels": {"dgxspark.serving.definition": "other"}}, False),
        ({"labels": {}}, False),
        ({"name": "another"}, False),
    ],
)
def test_running_as_planned(found, expected):
    definition = containers()["spark-vllm"]
    present = {**gang.container("spark-vllm", labels=definition["labels"]), **found}
    assert _plan.running_as_planned({"containers": [gang.container("x"), present]}, definition) is expected


def test_plan_of_a_serving_pair():
    plan = _plan.serving_plan(gang.settings(), served())
    assert (plan["ray_in_place"], plan["server_in_place"], plan["server_present"], plan["stop_needed"]) == (True, True, True, False)
    assert plan["nodes"]["spark-1"]["in_place"] == {"spark-ray": True, "spark-vllm": True}
    assert plan["nodes"]["spark-1"]["known"] == {"spark-ray": "id-spark-ray", "spark-vllm": "id-spark-vllm"}


def test_a_dead_worker_is_a_broken_server():
    """The server's container on the head may still run: its ranks are gone."""
    plan = _plan.serving_plan(gang.settings(), served(running=False, state="exited"))
    assert (plan["ray_in_place"], plan["server_in_place"], plan["server_present"]) == (False, False, True)


def test_plan_of_a_fresh_pair():
    plan = _plan.serving_plan(gang.settings(), gang.pair())
    assert (plan["ray_in_place"], plan["server_in_place"], plan["server_present"], plan["record_left"]) == (False,) * 4
    assert (plan["head"], plan["head_address"], plan["gpus"]) == ("spark-1", "192.168.200.12", 2)
    assert plan["addresses"] == ["192.168.200.12", "192.168.200.13"]
    assert plan["nodes"]["spark-2"]["present"] == {"spark-ray": False, "spark-vllm": False}


def test_plan_with_an_old_service():
    old = {"containers": [gang.container("glm", gpu=True)]}
    stop = {"containers": ["glm"], "units": [], "compose_projects": []}
    assert _plan.serving_plan(gang.settings(stop=stop), gang.pair(worker=old))["stop_needed"] is True


GIB = 1 << 30
ROOM = {"total": 119 * GIB, "available": 30 * GIB, "free": 2 * GIB}


def listening(*ports):
    return [{"address": "0.0.0.0", "port": port, "pid": 7, "process": "x"} for port in ports]


@pytest.mark.parametrize(
    ("worker", "values", "expected"),
    [
        pytest.param({}, {}, True, id="it-holds-only-the-port-of-the-api"),
        pytest.param({"memory": {**ROOM, "available": 17 * GIB}}, {}, False, id="an-oom-daemon-could-take-it"),
        pytest.param({"memory": {"total": 24 * GIB, "available": 3.5 * GIB}}, {}, False, id="little-memory"),
        pytest.param({"memory": {"total": 24 * GIB, "available": 5 * GIB}}, {}, True, id="little-more-memory"),
        pytest.param({"memory": {}}, {}, False, id="memory-unknown"),
        pytest.param({"listeners": listening(30000, 6380)}, {}, False, id="it-holds-a-port-of-ray"),
        pytest.param({"listeners": listening(20999)}, {}, False, id="it-holds-a-port-of-rays-workers"),
        pytest.param({"listeners": listening(6379, 21000)}, {}, True, id="ports-that-only-the-head-needs"),
        pytest.param({"listeners_error": "ss: not found"}, {}, False, id="ports-unknown"),
        pytest.param(
            {"containers": [gang.container("glm"), gang.container("spark-ray", labels={_plan.LABEL: "1"})]}, {}, False, id="ours-runs-too"
        ),
        pytest.param({}, {"executor": "mp"}, False, id="no-ray"),
        pytest.param({}, {"stop": {"containers": [], "units": [], "compose_projects": []}}, False, id="nothing-to-stop"),
    ],
)
def test_ray_is_proven_beside_an_old_service_where_it_takes_nothing_from_it(worker, values, expected):
    old = {"containers": [gang.container("glm", gpu=True)], "listeners": listening(30000), "memory": ROOM}
    named = {"stop": {"containers": ["glm"], "units": [], "compose_projects": []}, **values}
    plan = _plan.serving_plan(gang.settings(**named), gang.pair(head=old, worker={**old, **worker}))
    assert plan["ray_beside"] is expected


def test_what_the_stages_before_found_wins():
    plan = _plan.serving_plan(gang.settings(), gang.pair(), "bb" * 32, "c" * 40)
    assert (plan["image_fingerprint"], plan["revision"]) == ("bb" * 32, "c" * 40)
    server = plan["nodes"]["spark-1"]["containers"]["spark-vllm"]
    assert server["command"][1].endswith("/snapshots/" + "c" * 40)
    assert "/var/lib/dgxspark-serving/kernels/bbbbbbbbbbbb:/var/cache/kernels" in server["volumes"]


def test_plan_of_empty_nodes():
    nothing = {"image": None, "snapshot": None}
    plan = _plan.serving_plan(gang.settings(model_revision="main"), gang.pair(nothing, nothing))
    assert (plan["image_fingerprint"], plan["revision"]) == ("unknown", "main")
    assert (plan["image_in_sync"], plan["snapshot_on_head"], plan["snapshot_in_sync"]) == (False, False, False)
    assert plan["image_missing"] == ["spark-1", "spark-2"]


STATES = {
    "in sync": ({}, {}, {}),
    "worker without the image": ({}, {"image": {"present": False}}, {"image_in_sync": False, "image_missing": ["spark-2"]}),
    "worker with another image": ({}, {"image": {"fingerprint": "0" * 64}}, {"image_in_sync": False, "image_missing": ["spark-2"]}),
    "head without the image": (
        {"image": {"present": False}},
        {},
        {"image_in_sync": False, "image_missing": ["spark-1", "spark-2"], "image_fingerprint": ""},
    ),
    "worker's snapshot incomplete": ({}, {"snapshot": {"complete": False}}, {"snapshot_in_sync": False}),
    "worker's snapshot never verified": ({}, {"snapshot": {"verified": False}}, {"snapshot_in_sync": False}),
    "worker's snapshot is another": ({}, {"snapshot": {"manifest_digest": "d2"}}, {"snapshot_in_sync": False}),
    "worker without a snapshot": ({}, {"snapshot": None}, {"snapshot_in_sync": False}),
    "head's snapshot incomplete": ({"snapshot": {"complete": False}}, {}, {"snapshot_in_sync": False, "snapshot_on_head": False}),
}


@pytest.mark.parametrize("case", STATES)
def test_gang_state(case):
    head, worker, changes = STATES[case]
    expected = {
        "image_fingerprint": gang.FINGERPRINT,
        "image_in_sync": True,
        "image_missing": [],
        "revision": gang.REVISION,
        "snapshot_on_head": True,
        "snapshot_in_sync": True,
    }
    assert _plan.gang_state(gang.settings(), gang.pair(head, worker)) == {**expected, **changes}


@pytest.mark.parametrize(
    ("disks", "expected"),
    [
        ({}, False),
        ({"/var/lib/dgxspark-serving/stopped.json": {"checked": "/var/lib/dgxspark-serving/stopped.json"}}, True),
        ({"/var/lib/dgxspark-serving/stopped.json": {"checked": "/var/lib"}}, False),
    ],
)
def test_a_record_that_an_earlier_run_left(disks, expected):
    assert _plan.serving_plan(gang.settings(), gang.pair(worker={"disks": disks}))["record_left"] is expected


@pytest.mark.parametrize(
    ("name", "label", "service", "expected"),
    [
        ("spark-vllm-next", "1", "", True),
        ("spark-vllm-next", "", "", False),
        ("spark-vllm-previous", "1", "", False),
        ("spark-vllm-chat-next", "1", "chat", True),
        ("spark-vllm-chat-next", "1", "", False),
    ],
)
def test_a_server_that_an_earlier_run_made_and_did_not_start(name, label, service, expected):
    made = gang.container(name, running=False, state="created", labels={"dgxspark.serving": label} if label else {})
    assert _plan.serving_plan(gang.settings(service=service), gang.pair({"containers": [made]}))["made_left"] is expected


# --- check mode


def test_container_diff_of_a_new_container():
    definition = containers()["spark-vllm"]
    shown = _plan.container_diff(gang.node(), definition)
    assert shown["changed"] and shown["before"] == {} and shown["after"]["privileged"] is False
    assert shown["actions"][0].startswith(f"would create container spark-vllm: vllm serve {SNAPSHOT} ")


def test_container_diff_of_another_definition():
    shown = _plan.container_diff(gang.node(containers=[gang.container("spark-vllm")]), containers()["spark-vllm"])
    assert shown["changed"] and shown["before"]["id"] == "id-spark-vllm" and "would replace" in shown["actions"][0]


def test_container_diff_of_what_runs():
    shown = _plan.container_diff(gang.node(containers=running()), containers()["spark-vllm"])
    assert not shown["changed"] and shown["actions"] == [] and shown["before"] == shown["after"]


def test_outline_is_in_the_order_of_the_stages():
    found = {
        "spark-1": {"vllm_server_planned": {"actions": ["would create container spark-vllm"]}, "image_sync_head": {"actions": ["pull x"]}},
        "spark-2": {"image_sync_worker": {"actions": ["copy x"]}, "stop_service_result": {"skipped": True}, "model_sync_result": None},
    }
    assert _plan.outline(["spark-1", "spark-2"], found) == [
        "spark-1: would pull x",
        "spark-2: would copy x",
        "spark-1: would create container spark-vllm",
    ]


# --- the facts of the gang


def test_members_are_head_first():
    members = gang.pair()
    found = _plan.members(gang.groups(members), gang.hostvars(members))
    assert [(m["name"], m["head"], m["address"]) for m in found] == [
        ("spark-1", True, "192.168.200.12"),
        ("spark-2", False, "192.168.200.13"),
    ]
    assert [{key: value for key, value in m.items() if key != "settings"} for m in found] == members
    assert [m["settings"]["fabric_address"] for m in found] == ["192.168.200.12", "192.168.200.13"]


@pytest.mark.parametrize(
    "lost",
    [
        {"preflight_node": None},
        {"preflight_node": {"failed": True}},
        {"preflight_fabric": None},
        {"preflight_fabric": {"skipped": True}},
    ],
)
def test_a_gang_is_all_or_none(lost):
    members = gang.pair()
    found = gang.hostvars(members)
    for key, value in lost.items():
        if value is None:
            del found["spark-2"][key]
        else:
            found["spark-2"][key] = value
    with pytest.raises(Problem) as caught:
        _plan.members(gang.groups(members), found)
    assert (caught.value.id, caught.value.node) == ("gang-incomplete", "spark-2")
    assert "--limit" in caught.value.remedy


CONFIG = {"num_attention_heads": 32}
LATER = {
    "nothing ran": ({}, {}),
    "skipped": ({"image_sync_head": {"skipped": True}, "model_sync_result": {"skipped": True}}, {}),
    "an image": ({"image_sync_worker": {"image": {"present": True, "fingerprint": "x"}}}, {"image": {"present": True, "fingerprint": "x"}}),
    "a snapshot": (
        {"model_sync_result": {"snapshot": {"revision": "r", "verified": True}, "manifest_digest": "d"}},
        {"snapshot": {"revision": "r", "verified": True, "complete": True, "manifest_digest": "d"}},
    ),
    "a snapshot that is not verified": (
        {"model_download_snapshot": {"snapshot": {"revision": "r", "verified": False}}},
        {"snapshot": {"revision": "r", "verified": False, "complete": False, "manifest_digest": None}},
    ),
    "a snapshot and its configuration": (
        {
            "model_download_snapshot": {"snapshot": {"revision": "r", "verified": True}, "manifest_digest": "d"},
            "model_download_config": {"content": base64.b64encode(json.dumps(CONFIG).encode()).decode()},
        },
        {"snapshot": {"revision": "r", "verified": True, "complete": True, "manifest_digest": "d", "config": CONFIG}},
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_later_facts(case):
    found, expected = LATER[case]
    assert _plan.later_facts(found) == expected


def test_later_facts_replace_those_of_preflight():
    members = gang.pair(worker={"image": None})
    found = gang.hostvars(members)
    found["spark-2"]["image_sync_worker"] = {"image": {"present": True, "fingerprint": gang.FINGERPRINT}}
    plan = _plan.serving_plan(gang.settings(), _plan.members(gang.groups(members), found))
    assert plan["image_in_sync"] is True


def test_what_the_others_must_reach():
    """Ray's services, the ends of its workers' range, and one port of those that the system gives; the control store on the head only."""
    found = _plan.serving_plan(gang.settings(), gang.pair())
    services = [6380, 6381, 6382, 6383, 6384, 6385, 20002, 20999, 45000]
    assert {item["node"]: item["ports"] for item in found["paths"]} == {"spark-1": [22, 6379, *services], "spark-2": [22, *services]}
    assert found["ray_ports"] == [6379, 6380, 6381, 6382, 6383, 6384, 6385]
