# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types

import pytest
import yaml

from ansible_collections.dgxspark.serving.plugins.action import serving_plan
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang


@pytest.fixture
def run(monkeypatch):
    """run(name, members, settings, found=..., **arguments): what the action answers on the host ``name``."""
    monkeypatch.setattr(serving_plan.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    def run(name="spark-1", members=None, values=None, found=None, **arguments):
        members = members or gang.pair()
        hostvars = gang.hostvars(members, values)
        for host, variables in (found or {}).items():
            hostvars[host].update(variables)
        plugin = serving_plan.ActionModule.__new__(serving_plan.ActionModule)
        plugin._task = types.SimpleNamespace(args=arguments, check_mode=True)
        return plugin.run(None, {**hostvars[name], "groups": gang.groups(members), "hostvars": hostvars})

    return run


def test_no_connection_is_made():
    assert serving_plan.ActionModule._requires_connection is False and serving_plan.ActionModule.TRANSFERS_FILES is False


def test_a_healthy_pair(run):
    for name in ("spark-1", "spark-2"):
        result = run(name)
        assert not result.get("failed") and result["changed"] is False
        assert sorted(result["plan"]["nodes"]) == ["spark-1", "spark-2"]


def test_one_node_tells_everything_that_was_found_on_all(run):
    members = gang.pair({"python_requests": None}, {"docker": {"gpu_capable": False, "gpu_reason": "no runtime"}})
    answers = {name: run(name, members) for name in ("spark-1", "spark-2")}
    told = answers["spark-1"]
    assert told["failed"] and not answers["spark-2"].get("failed") and "plan" not in answers["spark-2"]
    assert [line[:40] for line in told["msg"].splitlines()] == [
        "spark-1: preflight: found no Python pack",
        "spark-2: preflight: found Docker 28.5.1 ",
    ]
    assert told["problem"]["id"] == "DOC-05"
    assert sorted(told["problem"]) == ["expected", "found", "id", "node", "remedy", "stage"]
    assert [(found["rule"], found["severity"], found["node"], found["id"]) for found in told["findings"]] == [
        ("python_requests", "error", "spark-1", "DOC-05"),
        ("docker_gpu", "error", "spark-2", "DOC-01"),
    ]


def test_a_problem_of_one_node_is_told_by_it(run):
    members = gang.pair({}, {"python_requests": None})
    assert not run("spark-1", members).get("failed")
    assert run("spark-2", members)["problem"]["node"] == "spark-2"


def test_in_a_play_of_the_head_alone_the_head_tells_it(run):
    members = gang.pair({}, {"python_requests": None})
    answer = run("spark-1", members, found={"spark-1": {"ansible_play_hosts_all": ["spark-1"]}})
    assert answer["failed"] and answer["problem"]["node"] == "spark-2"


def test_a_wrong_input_and_a_wrong_host_are_one_message(run):
    answer = run("spark-1", gang.pair({"python_requests": None}), gang.settings(vllm_args=["--port=1"]))
    assert [line.partition(": found ")[0] for line in answer["msg"].splitlines()] == ["spark-1", "spark-1: preflight"]
    assert "--port in spark_vllm_args" in answer["msg"] and answer["problem"]["id"] == "input"


def test_an_override_makes_an_error_a_warning_or_nothing(run):
    members = gang.pair({}, {"python_requests": None})
    for name in ("spark-1", "spark-2"):
        result = run(name, members, gang.settings(gate={"python_requests": "warn"}))
        assert not result.get("failed") and result["plan"]
        assert bool(result.get("warnings")) is (name == "spark-1")
    told = run("spark-1", members, gang.settings(gate={"python_requests": "warn"}))["warnings"]
    assert len(told) == 1 and told[0].startswith("spark-2: preflight: found no Python package requests")
    assert "warnings" not in run("spark-1", members, gang.settings(gate={"python_requests": "ignore"}))


def test_each_node_has_its_own_overrides(run):
    members = gang.pair({"python_requests": None}, {"python_requests": None})
    own = {
        "spark-2": {
            "preflight_inputs": {"settings": {**gang.settings(gate={"python_requests": "ignore"}), "fabric_address": "192.168.200.13"}}
        }
    }
    assert [found["node"] for found in run("spark-1", members, found=own)["findings"]] == ["spark-1"]
    assert not run("spark-2", members, found=own).get("failed")  # the head tells its own


def test_the_plan_says_what_memory_the_launch_needs(run):
    members = gang.pair(MEMORY, MEMORY)
    plan = run("spark-1", members, gang.settings(gate={"page_cache": "ignore"}))["plan"]
    assert plan["nodes"]["spark-2"]["memory"] == {"need": int(SPARK * 0.8), "short": "error", "cache": "ignore"}


GANG = {
    "clocks": (gang.pair(worker={"time": 1.0}), {}, "clock-skew"),
    "architectures": (gang.pair(worker={"machine": "x86_64"}), {}, "DOC-11"),
    "ranks": (gang.pair(), {"tensor_parallel": 4}, "RAY-03"),
    "heads": (gang.pair({"snapshot": {"config": {"num_attention_heads": 7}}}), {}, "VLL-04"),
    "addresses": ([gang.member("spark-1"), {**gang.member("spark-2"), "address": "192.168.201.13"}], {}, "RAY-09"),
}


@pytest.mark.parametrize("case", GANG)
def test_what_concerns_all_is_told_by_the_head_alone(run, case):
    members, values, expected = GANG[case]
    answers = {name: run(name, members, gang.settings(**values)) for name in ("spark-1", "spark-2")}
    assert answers["spark-1"]["failed"] and answers["spark-1"]["problem"]["id"] == expected
    assert answers["spark-1"]["problem"]["node"]
    assert not answers["spark-2"].get("failed")


def test_a_wrong_argument_of_the_server_is_told_by_the_head(run):
    values = gang.settings(vllm_args=["--port=1"])
    head = run("spark-1", values=values)
    assert (head["problem"]["id"], head["problem"]["node"]) == ("input", "spark-1")
    worker = run("spark-2", values=values)
    assert not worker.get("failed") and "plan" not in worker


def test_check_false_applies_no_rules(run):
    result = run("spark-1", gang.pair({"python_requests": None}), check=False)
    assert not result.get("failed") and result["plan"]["head"] == "spark-1"


def test_a_node_without_facts_ends_it(run):
    result = run("spark-1", found={"spark-2": {"preflight_node": {"failed": True}}}, check=False)
    assert result["failed"] and result["problem"]["id"] == "gang-incomplete" and result["problem"]["node"] == "spark-2"


def test_arguments_win_over_facts(run):
    plan = run("spark-1", image_fingerprint="ab" * 32, revision="c" * 40)["plan"]
    assert (plan["image_fingerprint"], plan["revision"]) == ("ab" * 32, "c" * 40)


def test_warnings_are_told_once(run):
    members = gang.pair()
    members[1]["fabric"]["warnings"] = ["no RDMA"]
    assert run("spark-1", members, warn=True)["warnings"] == ["spark-2: no RDMA"]
    assert "warnings" not in run("spark-2", members, warn=True)
    assert "warnings" not in run("spark-1", members)


def test_show_is_the_diff_of_a_container_that_check_mode_cannot_create(run):
    result = run("spark-1", show="spark-vllm")
    assert result["changed"] is True and result["actions"][0].startswith("would create container spark-vllm: vllm serve ")
    assert result["diff"]["before"] == ""
    assert yaml.safe_load(result["diff"]["after"])["restart_policy"] == "no"


def test_show_of_what_runs_or_does_not_belong_here(run):
    labels = run("spark-1")["plan"]["nodes"]["spark-1"]["containers"]["spark-vllm"]["labels"]
    members = gang.pair({"containers": [gang.container("spark-vllm", labels=labels)]})
    result = run("spark-1", members, show="spark-vllm")
    assert result["changed"] is False and "diff" not in result
    worker = run("spark-2", show="spark-vllm")
    assert worker["changed"] is False and "diff" not in worker and "actions" not in worker


def test_outline(run):
    found = {"spark-2": {"image_sync_worker": {"actions": ["copy the image"]}}}
    assert run("spark-1", found=found, outline=True)["outline"] == ["spark-2: would copy the image"]


SPARK = 127535084 * 1024
MEMORY = {"memory": {"total": SPARK}}
LLAMA = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}


def loaded(gib, **more):
    """A pair with the memory of Sparks and a model of so many GiB on the head."""
    snapshot = {"bytes": 999 << 30, "weights": gib << 30, "complete": True, "config": LLAMA, **more}
    return gang.pair({**MEMORY, "snapshot": snapshot}, MEMORY)


def test_weights_that_cannot_fit_are_refused_by_the_head(run):
    head = run("spark-1", loaded(200))
    assert head["failed"] and (head["problem"]["id"], head["problem"]["stage"]) == ("MEM-03", "memory")
    assert not run("spark-2", loaded(200)).get("failed")
    assert not run("spark-1", loaded(200), check=False).get("failed")


def test_a_context_that_may_not_fit_is_a_warning_without_being_asked(run):
    told = run("spark-1", loaded(130), gang.settings(gpu_memory_utilization=0.6))["warnings"]
    assert len(told) == 1 and "131072 tokens" in told[0] and told[0].endswith("(rule memory_context)")
    assert "warnings" not in run("spark-2", loaded(130), gang.settings(gpu_memory_utilization=0.6))
    assert "warnings" not in run("spark-1", loaded(130), gang.settings(max_model_len=8192))


def test_a_server_that_runs_has_shown_that_it_fits(run):
    settings = gang.settings(gpu_memory_utilization=0.6)
    members = loaded(130)
    for member in members:
        containers = run(member["name"], members, settings)["plan"]["nodes"][member["name"]]["containers"]
        member["node"]["containers"] = [gang.container(name, labels=planned["labels"]) for name, planned in containers.items()]
    result = run("spark-1", members, settings)
    assert result["plan"]["server_in_place"] and "warnings" not in result


def test_what_runs_and_is_launched_again_is_asked_as_before_a_launch(run):
    """restart.yml: all rules, and our own server is neither a holder of the GPU and the ports nor used memory."""
    full = {"total": SPARK, "available": SPARK // 10, "free": SPARK // 20, "shm_total": 64 << 20}
    members = gang.pair({"memory": {**full, "shm_total": SPARK // 2}}, {"memory": full})
    for member in members:
        containers = run(member["name"], members, check=False)["plan"]["nodes"][member["name"]]["containers"]
        member["node"]["containers"] = [gang.container(name, labels=planned["labels"], gpu=True) for name, planned in containers.items()]
        member["node"]["gpu"]["processes"] = [{"pid": 4000, "name": "python3", "memory_mib": 90000, "user": "root"}]
        port = 30000 if member["head"] else 6400
        member["node"]["listeners"] = [gang.listener(port, pid=4000, user="root", container=next(iter(containers)))]
    assert run("spark-2", members)["plan"]["server_in_place"]
    answer = run("spark-2", members, launch=True)
    assert answer["failed"] and [finding["rule"] for finding in answer["findings"]] == ["shm"]
    members[1]["node"]["memory"]["shm_total"] = SPARK // 2
    assert run("spark-1", members, launch=True)["plan"]["server_in_place"] and "warnings" not in run("spark-1", members, launch=True)


def test_before_the_model_is_there_the_recipe_says_its_size(run):
    members = loaded(300, complete=False, config=None)  # what is there of it so far says nothing
    inputs = {"settings": {**gang.settings(), "fabric_address": gang.ADDRESSES["spark-1"]}, "recipe": {"weights_gib": 250.0}}
    assert run("spark-1", members, found={"spark-1": {"preflight_inputs": inputs}})["problem"]["id"] == "MEM-03"
    assert not run("spark-1", members).get("failed")


def test_what_was_just_downloaded_counts(run):
    rows = [{"path": f"model-{n}.safetensors", "size": 125 << 30} for n in (1, 2)]
    found = {"spark-1": {"model_download_snapshot": {"manifest": rows}}}
    assert run("spark-1", loaded(1), found=found)["problem"]["id"] == "MEM-03"
    rows = [{"path": f"original/{n}.safetensors", "size": 125 << 30} for n in (1, 2)]  # for other programs
    assert not run("spark-1", loaded(1), found={"spark-1": {"model_download_snapshot": {"manifest": rows}}}).get("failed")


def test_nodes_with_different_memory(run):
    members = gang.pair(MEMORY, {"memory": {"total": SPARK // 2}})
    (told,) = run("spark-1", members)["warnings"]
    assert told.startswith("spark-2: memory: found 60.8 GiB of memory, and 121.6 GiB on spark-1") and told.endswith("(rule memory_uneven)")
