# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role rollback decides and says, from what its tasks registered on the nodes. The tasks themselves run in molecule/rollback."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLE = Path(__file__).resolve().parents[2] / "roles" / "rollback"


def trusted(value: t.Any) -> t.Any:
    if isinstance(value, dict):
        return {key: trusted(item) for key, item in value.items()}
    return trust_as_template(value) if isinstance(value, str) else value


def variables(**nodes: dict[str, t.Any]) -> dict[str, t.Any]:
    """The role's variables over two nodes; what a node is given is what its tasks registered."""
    plan = {"head": "spark_1", "record_left": False, "server_present": False, "server_in_place": False, "stop_needed": False}
    found = {name: {"inventory_hostname": name, "__rollback_look": {"touched": False, "ended": {}}} for name in ("spark_1", "spark_2")}
    for name, values in nodes.items():
        plan.update(values.pop("plan", {}))
        found[name].update(values)
    role = {}
    for part in ("vars", "defaults"):
        role.update(yaml.safe_load((ROLE / part / "main.yml").read_text(encoding="utf-8")))
    return {
        **{key: trusted(value) for key, value in role.items()},
        "groups": {"sparks": list(found)},
        "hostvars": found,
        "ansible_check_mode": False,
        "preflight_planned": {"plan": plan},
        "preflight_inputs": {"settings": {"rollback": True}},
    }


def evaluate(name: str, **nodes: dict[str, t.Any]) -> t.Any:
    templar = Templar(loader=DataLoader(), variables=variables(**nodes))
    return templar.template(trust_as_template("{{ " + name + " }}"))


CAUSE = {"rollback_cause": "spark_1: vllm: it broke"}
TOUCHED = {"__rollback_look": {"touched": True, "ended": {}}}
RAY = {"id": "r", "address": "192.168.200.12", "port": 6379, "gpus": 1}
SERVER = {"id": "v", "served_model_name": "tiny", "url": "http://127.0.0.1:30000"}
HEAD = {"own": {"spark-ray": RAY, "spark-vllm": SERVER}, "intact": False}
WORKER = {"own": {"spark-ray": {**RAY, "address": "192.168.200.13", "port": 0}}, "intact": False}
OLD = {"plan": {"stop_needed": True}}
STOPPED = {"stop_service_result": {"failed": True}}
RESTORED = {"rollback_restored": {"changed": True}}


def failed(text: str) -> dict[str, t.Any]:
    return {"problem": {"id": "x"}, "msg": text, "changed": False}


@pytest.mark.parametrize(
    ("head", "worker", "said"),
    [
        ({**CAUSE}, {}, "Nothing had been stopped by this run."),
        ({**CAUSE, **TOUCHED, **OLD}, {}, "The old service was not stopped."),
        ({**CAUSE, **TOUCHED, **OLD, **STOPPED}, {}, "Nothing had been stopped by this run."),
        ({**CAUSE, **TOUCHED, **OLD, **STOPPED, **RESTORED}, {}, "The old service serves again."),
        (
            {**CAUSE, **TOUCHED, "rollback_removed": HEAD},
            {"rollback_removed": WORKER},
            "The version that ran before (tiny) serves again.",
        ),
        (
            {**CAUSE, **TOUCHED, **RESTORED, "rollback_removed": HEAD},
            {"rollback_removed": WORKER},
            "The version that ran before (tiny) serves again. The old service serves again.",
        ),
        (
            {**CAUSE, **TOUCHED, "rollback_removed": HEAD, "rollback_failure": "spark_1: no Ray"},
            {"rollback_removed": WORKER},
            "What ran before could not be brought back: spark_1: no Ray.",
        ),
        (
            {**CAUSE, **TOUCHED, "rollback_removed": HEAD},
            {},
            "What ran before could not be brought back: spark_2 does not answer.",
        ),
        (
            {**CAUSE, **TOUCHED, "rollback_removed": HEAD},
            {"rollback_removed": {**WORKER, **failed("spark_2: it is gone")}},
            "What ran before could not be brought back: spark_2: it is gone.",
        ),
        (
            {**CAUSE, **TOUCHED, "rollback_removed": HEAD, "rollback_previous": failed("spark_1: no answer")},
            {"rollback_removed": WORKER},
            "What ran before could not be brought back: spark_1: no answer.",
        ),
        (
            {**CAUSE, **TOUCHED, "rollback_restored": failed("spark_1: no old service")},
            {},
            "What ran before could not be brought back: spark_1: no old service.",
        ),
        (
            {**CAUSE, **TOUCHED, **RESTORED},
            {"__rollback_look": {"unreachable": True}},
            "The old service serves again. spark_2 did not answer, so nothing was brought back there",
        ),
        (
            {**CAUSE, **TOUCHED, "vllm_server_proven": True},
            {},
            "The server had given real answers by then and is left as it is.",
        ),
        (
            {**CAUSE, **TOUCHED, "rollback_removed": {"own": {}}, "plan": {"server_present": True}},
            {"rollback_removed": {"own": {}}},
            "run the playbook again.",
        ),
    ],
)
def test_what_is_said(head, worker, said):
    message = evaluate("rollback_message", spark_1=head, spark_2=worker)
    assert message.startswith("spark_1: vllm: it broke. ") and said in " ".join(message.split())


def test_logs_that_could_not_be_kept_are_not_claimed():
    kept = "The logs are kept in /var/lib/dgxspark-serving/failed on the nodes"
    assert f"{kept}." in evaluate("rollback_message", spark_1={**CAUSE, **TOUCHED}, spark_2=TOUCHED)
    full = {"__rollback_look": {"touched": True, "ended": {}, "error": "No space left on device"}}
    message = " ".join(evaluate("rollback_message", spark_1={**CAUSE, **TOUCHED}, spark_2=full).split())
    assert f"{kept}, but not all on spark_2 (No space left on device)." in message


@pytest.mark.parametrize(
    ("head", "worker", "removed"),
    [
        ({}, {}, False),
        ({}, TOUCHED, True),
        ({"plan": {"record_left": True}}, {}, True),
        ({"stop_service_kept_server": {"kept": True}}, {}, True),
        ({"stop_service_kept_server": {"kept": False}}, {}, False),
        ({"stop_service_kept_server": {"skipped": True}}, {}, False),
        ({**TOUCHED, "vllm_server_proven": True}, {}, False),
        ({**TOUCHED, "vllm_server_ready": {"ready": True}}, {}, True),  # it answers, but not over RDMA,
    ],
)
def test_whether_there_is_something_to_remove(head, worker, removed):
    assert evaluate("rollback_remove", spark_1=head, spark_2=worker) is removed


def test_the_first_cause_is_that_of_the_container_that_ended_first():
    ended = {"node": "spark_2", "time": "2026-01-01T00:00:00Z", "text": "spark_2: found container spark-ray exited."}
    message = evaluate("rollback_message", spark_1=CAUSE, spark_2={"__rollback_look": {"touched": True, "ended": ended}})
    assert message.startswith("spark_2: found container spark-ray exited. What was seen of it: spark_1: vllm: it broke. ")
    told = {"rollback_cause": "spark_2: vllm: found container spark-ray exited"}
    message = evaluate("rollback_message", spark_1=told, spark_2={**told, "__rollback_look": {"touched": True, "ended": ended}})
    assert message.count("found container") == 1


@pytest.mark.parametrize(
    ("head", "worker", "steps"),
    [
        (HEAD, WORKER, [("spark-ray", True), ("spark-ray", False), ("spark-vllm", True)]),
        ({"own": {"spark-vllm": SERVER}}, {"own": {"spark-vllm": SERVER}}, [("spark-vllm", False), ("spark-vllm", True)]),
    ],
)
def test_the_order_of_the_start(head, worker, steps):
    found = evaluate("__rollback_steps", spark_1={"rollback_removed": head}, spark_2={"rollback_removed": worker})
    assert [(step["container"], step["head"]) for step in found] == steps


def test_the_cluster_that_is_started_again():
    rays = evaluate("__rollback_rays", spark_1={"rollback_removed": HEAD}, spark_2={"rollback_removed": WORKER})
    assert [ray["address"] for ray in rays] == ["192.168.200.12", "192.168.200.13"]
    assert evaluate("__rollback_intact", spark_1={"rollback_removed": HEAD}, spark_2={"rollback_removed": WORKER}) is False
    whole = {"rollback_removed": {**HEAD, "intact": True}}
    assert evaluate("__rollback_intact", spark_1=whole, spark_2={"rollback_removed": {**WORKER, "intact": True}}) is True


def test_the_bundle():
    settings = {"settings": {"rollback": True, "diagnostics_dir": "~/x", "diagnostics_keep": 3}}
    worker = {"preflight_inputs": settings, "rollback_node": {"node": {"memory": 1}}}
    documents = evaluate(
        "rollback_bundle_documents",
        spark_1={**CAUSE, **TOUCHED, "plan": {"nodes": {"spark_1": {"containers": {"spark-ray": {}}}, "spark_2": {"containers": {}}}}},
        spark_2=worker,
    )
    assert documents["diagnosis"]["causes"] == ["spark_1: vllm: it broke"]
    assert documents["diagnosis"]["nodes"]["spark_1"]["touched"] is True
    assert documents["settings"] == {"spark_1": {}, "spark_2": settings["settings"]}
    assert documents["containers"] == {"spark_1": {"spark-ray": {}}, "spark_2": {}}
    assert documents["node_info"] == {"spark_1": {}, "spark_2": {"node": {"memory": 1}}}


def test_what_a_node_said_last_that_did_not_join_ray():
    names = {"spark-ray": "spark-ray", "spark-vllm": "spark-vllm"}
    settings = {"preflight_inputs": {"settings": {"fabric_address": "192.168.200.13", "names": names}}}
    look = {
        "touched": True,
        "ended": {},
        "containers": [{"name": "spark-vllm", "last": "no"}, {"name": "spark-ray", "last": "no route to the head"}],
    }
    head = {**CAUSE, "rollback_missing": ["192.168.200.13"]}
    message = evaluate("rollback_message", spark_1=head, spark_2={**settings, "__rollback_look": look})
    assert message.startswith("spark_1: vllm: it broke. The last lines of spark-ray on spark_2: no route to the head. ")
    assert "last lines" not in evaluate("rollback_message", spark_1=CAUSE, spark_2={**settings, "__rollback_look": look})


def test_a_node_that_stopped_answering_is_named():
    message = evaluate("rollback_message", spark_1=TOUCHED, spark_2={"__rollback_look": {"unreachable": True}})
    assert message.startswith("spark_2 stopped answering (see UNREACHABLE above). ")
