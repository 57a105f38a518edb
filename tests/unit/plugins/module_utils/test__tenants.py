# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _tenants


def container(name, **more):
    base = {
        "name": name,
        "id": name * 8,
        "state": "running",
        "running": True,
        "pid": 100,
        "labels": {},
        "ports": [],
        "compose_project": None,
        "gpu": False,
        "started_at": "1",
    }
    return {**base, **more}


def listener(port, address="127.0.0.1", **more):
    return {"address": address, "port": port, "pid": 4711, "process": "python3", "user": "root", "container": None, "unit": None, **more}


def published(port, host="127.0.0.1"):
    return [{"host_ip": host, "host_port": port, "container_port": 8000, "protocol": "tcp"}]


OURS = {"dgxspark.serving": "1"}
NOTHING = {"containers": [], "units": [], "compose_projects": []}
CASES = {
    "loopback listener of a named container": (
        {"containers": [container("sglang")], "listeners": [listener(30000, container="sglang")]},
        {"containers": ["sglang"]},
        [("container", "sglang", "stop", 30000)],
    ),
    "the same, not named": (
        {"containers": [container("sglang")], "listeners": [listener(30000, container="sglang")]},
        NOTHING,
        [("container", "sglang", "refuse", 30000)],
    ),
    "published without a proxy process": (
        {"containers": [container("web", ports=published(30000))], "listeners": []},
        NOTHING,
        [("container", "web", "refuse", 30000)],
    ),
    "docker-proxy belongs to its container": (
        {
            "containers": [container("web", ports=published(30000))],
            "listeners": [listener(30000, process="docker-proxy", unit="docker.service")],
        },
        {"containers": ["web"]},
        [("container", "web", "stop", 30000)],
    ),
    "a stopped container holds nothing": (
        {"containers": [container("web", state="exited", running=False, ports=published(30000), gpu=True)], "listeners": []},
        {"containers": ["web"]},
        [],
    ),
    "a container in a restart loop does": (
        {"containers": [container("web", state="restarting", running=False, ports=published(30000))], "listeners": []},
        {"containers": ["web"]},
        [("container", "web", "stop", 30000)],
    ),
    "ours on the host network": (
        {"containers": [container("spark-vllm", labels=OURS, gpu=True)], "listeners": [listener(30000, "0.0.0.0", container="spark-vllm")]},
        NOTHING,
        [("container", "spark-vllm", "ours", 30000)],
    ),
    "ours wins over the stop list": (
        {"containers": [container("spark-vllm", labels=OURS)], "listeners": [listener(30000, container="spark-vllm")]},
        {"containers": ["spark-vllm"]},
        [("container", "spark-vllm", "ours", 30000)],
    ),
    "a compose project is one claim": (
        {
            "containers": [
                container("glm-api-1", compose_project="glm", ports=published(30000)),
                container("glm-db-1", compose_project="glm"),
            ],
            "listeners": [],
        },
        {"compose_projects": ["glm"]},
        [("compose_project", "glm", "stop", 30000)],
    ),
    "a unit, with or without its suffix": (
        {"containers": [], "listeners": [listener(30000, unit="ollama.service")], "unit_states": {"ollama.service": "active"}},
        {"units": ["ollama"]},
        [("unit", "ollama.service", "stop", 30000)],
    ),
    "a unit that is not named": (
        {"containers": [], "listeners": [listener(30000, unit="vllm-cluster.service")]},
        NOTHING,
        [("unit", "vllm-cluster.service", "refuse", 30000)],
    ),
    "a bare process of a login session": (
        {"containers": [], "listeners": [listener(30000, "::", unit="user@1000.service", process="llama-server", user="dgx")]},
        NOTHING,
        [("process", "llama-server", "refuse", 30000)],
    ),
    "named, running, holds nothing of ours": (
        {"containers": [container("idle")], "listeners": []},
        {"containers": ["idle"]},
        [("container", "idle", "stop", None)],
    ),
    "named and not there": (
        {"containers": [], "listeners": [], "unit_states": {"x.service": "inactive"}},
        {"containers": ["gone"], "units": ["x"], "compose_projects": ["y"]},
        [],
    ),
    "another port": ({"containers": [], "listeners": [listener(22)]}, NOTHING, []),
    "GPU container that is not named": (
        {"containers": [container("comfy", gpu=True)], "listeners": []},
        NOTHING,
        [("container", "comfy", "refuse", None)],
    ),
    "the desktop is no tenant": (
        {
            "containers": [],
            "listeners": [],
            "gpu": {"processes": [{"pid": 1, "name": "/usr/lib/xorg/Xorg", "memory_mib": 900}, {"pid": 2, "name": "x", "memory_mib": 6}]},
        },
        NOTHING,
        [],
    ),
    "a bare GPU process": (
        {"containers": [], "listeners": [], "gpu": {"processes": [{"pid": 9, "name": "ollama", "memory_mib": 32888}]}},
        NOTHING,
        [("process", "ollama", "refuse", None)],
    ),
    "a GPU process of what is stopped": (
        {
            "containers": [container("sglang", gpu=True)],
            "listeners": [],
            "gpu": {"processes": [{"pid": 9, "name": "sglang::scheduler", "memory_mib": 96073}]},
        },
        {"containers": ["sglang"]},
        [("container", "sglang", "stop", None)],
    ),
    "a GPU process of somebody else beside what is stopped": (
        {
            "containers": [container("sglang", gpu=True)],
            "listeners": [],
            "gpu": {"processes": [{"pid": 9, "name": "python3", "memory_mib": 40000, "user": "anna", "container": None, "unit": None}]},
        },
        {"containers": ["sglang"]},
        [("process", "python3", "refuse", None), ("container", "sglang", "stop", None)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_claims(name):
    node, stop, expected = CASES[name]
    found = _tenants.claims(node, stop, [30000, 6379])
    assert [(c["kind"], c["name"], c["action"], c["port"]) for c in found] == expected


def test_refusal_names_everything():
    node = {
        "containers": [container("sglang")],
        "listeners": [listener(30000, container="sglang"), listener(6379, "0.0.0.0", process="redis", pid=9, user="redis")],
    }
    problem = _tenants.refusal(_tenants.claims(node, NOTHING, [30000, 6379]), "spark-2")
    assert problem.id == "port-held"
    assert problem.msg == (
        "spark-2: preflight: found container sglang (process python3, pid 4711, user root) on 127.0.0.1:30000; process redis (pid 9, "
        "user redis) on *:6379; expected port 6379, 30000 "
        "to be free, or held by something that spark_stop names. Remedy: add it to spark_stop (containers: [sglang]) if it may be "
        "stopped, or stop it by hand (sudo kill 9), or "
        "choose another port"
    )


def test_refusal_of_a_gpu_tenant():
    problem = _tenants.refusal(_tenants.claims({"containers": [container("comfy", gpu=True)]}, NOTHING, [30000]), "spark-1")
    assert problem.id == "gpu-held" and "container comfy" in problem.found and "containers: [comfy]" in problem.remedy


def test_no_refusal_when_everything_may_be_stopped():
    node = {"containers": [container("sglang")], "listeners": [listener(30000, container="sglang")]}
    found = _tenants.claims(node, {"containers": ["sglang"]}, [30000])
    assert _tenants.refusal(found, "spark-2") is None
    assert _tenants.to_stop(found) == {"containers": ["sglang"], "units": [], "compose_projects": []}


def test_stop_plan_order_and_content():
    node = {
        "containers": [
            container("old", restart_policy="unless-stopped", auto_remove=True),
            container("glm-db-1", compose_project="glm", started_at="1"),
            container("glm-api-1", compose_project="glm", started_at="2", ports=published(30000)),
            container("mine", labels=OURS),
            container("down", state="exited", running=False),
        ],
        "listeners": [listener(30001, "0.0.0.0", container="old"), listener(11434, unit="ollama.service")],
        "unit_states": {"ollama.service": "active", "off.service": "inactive"},
        "unit_enabled": {"ollama.service": "enabled"},
    }
    plan = _tenants.stop_plan(
        node, {"containers": ["old", "mine", "down", "nosuch"], "units": ["ollama", "off"], "compose_projects": ["glm"]}
    )
    assert [(i["kind"], i["name"], i["containers"], i["ports"]) for i in plan] == [
        ("unit", "ollama.service", [], [{"address": "127.0.0.1", "port": 11434}]),
        ("compose_project", "glm", ["glm-api-1", "glm-db-1"], [{"address": "127.0.0.1", "port": 30000}]),
        ("container", "old", ["old"], [{"address": "*", "port": 30001}]),
    ]
    assert plan[0]["enabled"] == "enabled" and plan[2]["restart_policy"] == {"old": "unless-stopped"} and plan[2]["auto_remove"]


def test_a_rerun_after_an_interruption_loses_nothing():
    first = {
        "kind": "container",
        "name": "old",
        "containers": ["old"],
        "ports": [{"address": "*", "port": 1}],
        "restart_policy": {"old": "always"},
        "stopped_at": 1,
    }
    record = _tenants.merge_record(None, first, node="spark-1", memory_before=5)
    record = _tenants.merge_record(record, {**first, "ports": [], "restart_policy": {"old": "no"}, "stopped_at": 2})
    record = _tenants.merge_record(record, {"kind": "unit", "name": "u.service", "containers": [], "ports": []})
    assert [e["name"] for e in record["stopped"]] == ["old", "u.service"]
    assert record["stopped"][0]["ports"] == [{"address": "*", "port": 1}] and record["stopped"][0]["restart_policy"] == {"old": "always"}
    assert record["memory_before"] == 5 and record["version"] == 1


@pytest.mark.parametrize(
    ("listeners", "expected"),
    [
        ([], ["127.0.0.1:30000", "*:80"]),
        ([listener(30000), listener(80, "::")], []),
        ([listener(30000, "0.0.0.0"), listener(80, "127.0.0.1")], ["*:80"]),
    ],
)
def test_not_listening(listeners, expected):
    assert _tenants.not_listening([{"address": "127.0.0.1", "port": 30000}, {"address": "*", "port": 80}], listeners) == expected


def test_units_that_exist():
    text = "Id=a.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\n\n"
    text += "Id=b.service\nLoadState=not-found\nActiveState=inactive\nUnitFileState=\n"
    assert list(_tenants.parse_units(text)) == ["a.service"]
