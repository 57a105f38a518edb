# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two services on the same nodes: names, ports and memory, and that one never takes the other for something to stop."""

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _models, _plan, _service, _settings, _tenants
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

STOP = {"containers": [], "units": [], "compose_projects": []}


def values(**more):
    """Inputs as the plan gets them."""
    return _settings.resolve(gang.settings(**more))


def as_facts(definition, **more):
    """The container of a definition as node_info lists it."""
    return gang.container(
        definition["name"], labels=definition["labels"], arguments=[str(word) for word in definition["command"]], gpu=True, **more
    )


def serving(*several, **more):
    """A pair on which these services run."""
    members = gang.pair()
    for settings in several:
        plan = _plan.serving_plan(settings, gang.pair())
        for member in members:
            member["node"]["containers"] += [as_facts(d, **more) for d in plan["nodes"][member["name"]]["containers"].values()]
    return members


DEFAULT = values(gpu_memory_utilization=0.5)
CHAT = values(service="chat", api_port=30001, port_offset=100, gpu_memory_utilization=0.3)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("", True), ("chat", True), ("a-1", True), ("x" * 20, True),
        ("x" * 21, False), ("Chat", False), ("-a", False), ("a-", False), ("a b", False), ("a/b", False), ("previous", False), ("my-previous", False),
        ("next", False), ("chat-next", False), ("nextcoder", True), ("next-1", True),
    ],
)  # fmt: skip
def test_what_a_service_can_be_called(name, fits):
    assert _service.is_name(name) is fits
    assert (not _settings.value_problems(gang.settings(service=name))) is fits


@pytest.mark.parametrize(("offset", "fits"), [(0, True), (100, True), (1100, True), (50, False), (-100, False), (1200, False)])
def test_offsets(offset, fits):
    assert (not _settings.value_problems(gang.settings(port_offset=offset))) is fits


def test_ports_move_by_the_offset():
    assert [CHAT[name] for name in ("ray_port", "mp_port", "dp_port", "api_port")] == [6479, 29601, 29650, 30001]
    assert _plan.ray_worker_ports(CHAT) == (21002, 21999) and _plan.ray_worker_ports(DEFAULT) == (20002, 20999)
    command = _plan.serving_plan(CHAT, gang.pair())["nodes"]["spark-1"]["containers"]["spark-ray"]["command"]
    assert {"--port=6479", "--node-manager-port=6480", "--min-worker-port=21002", "--max-worker-port=21999"} <= set(command)
    assert not set(_plan.ray_ports(CHAT, True)) & set(_plan.ray_ports(DEFAULT, True))
    assert _plan.ray_worker_ports(values(port_offset=1100))[1] < 32768, "the system gives away what is above"


def test_what_a_service_has_of_its_own():
    plan = _plan.serving_plan(CHAT, gang.pair())
    server = plan["nodes"]["spark-1"]["containers"]["spark-vllm"]
    assert (server["name"], server["pid_mode"]) == ("spark-vllm-chat", "container:spark-ray-chat")
    assert server["labels"]["dgxspark.serving.service"] == "chat" and plan["tmp_volume"].startswith("spark-tmp-chat-")
    assert server["env"]["RAY_ADDRESS"] == "192.168.200.12:6479"
    assert (CHAT["record"], CHAT["names"]["spark-ray"]) == ("/var/lib/dgxspark-serving/stopped-chat.json", "spark-ray-chat")
    rank = _plan.serving_plan({**CHAT, "executor": "mp"}, gang.pair())["nodes"]["spark-2"]["containers"]["spark-vllm"]
    assert rank["name"] == "spark-vllm-chat" and rank["command"][-2:] == ["29601", "--headless"]


def test_the_only_service_has_nothing_added():
    plan = _plan.serving_plan(values(), gang.pair())
    assert [c["name"] for c in plan["nodes"]["spark-1"]["containers"].values()] == ["spark-ray", "spark-vllm"]
    assert "dgxspark.serving.service" not in str(plan["nodes"]) and plan["tmp_volume"].count("-") == 2
    assert values()["record"] == _plan.RECORD == "/var/lib/dgxspark-serving/stopped.json"


@pytest.mark.parametrize(("mine", "other"), [(DEFAULT, CHAT), (CHAT, DEFAULT)])
def test_each_sees_only_its_own(mine, other):
    both = serving(mine, other)
    plan = _plan.serving_plan(mine, both)
    assert plan["server_in_place"] and plan["previous"] == "ray" and not plan["stop_needed"]
    assert gang.service_problems(mine, both) == [] and plan["beside"] == {other["service"]: ["spark-1", "spark-2"]}
    assert list(plan["nodes"]["spark-1"]["known"]) == [_service.own(role, mine["service"]) for role in ("spark-ray", "spark-vllm")]
    alone = _plan.serving_plan(mine, serving(other))
    assert not alone["server_present"] and alone["previous"] == "" and not alone["stop_needed"]
    assert all(claim["action"] == "ours" for member in both for claim in _plan.node_claims(mine, member))
    assert all(gang.node_problems(mine, member) == [] for member in both)


def test_a_named_service_may_have_no_container_of_somebody_else():
    facts = gang.node(containers=[gang.container("spark-vllm-chat")])
    assert [p.id for p in gang.node_problems(CHAT, gang.member(facts=facts))] == ["name-taken"]
    assert gang.node_problems(DEFAULT, gang.member(facts=facts)) == []


def test_neither_its_ports_nor_its_gpu_are_something_to_stop():
    (head, _worker) = serving(CHAT)
    head["node"]["listeners"] = [gang.listener(30001, container="spark-vllm-chat")]
    head["node"]["gpu"]["processes"] = [
        {"pid": 9, "name": "VLLM::Worker", "memory_mib": 9000, "container": "spark-ray-chat", "user": "root"}
    ]
    assert _tenants.claims(head["node"], STOP, [30001]) == []
    mine = _tenants.claims(head["node"], STOP, [30001], service="chat")
    assert {claim["action"] for claim in mine} == {"ours"} and {claim["name"] for claim in mine} == {"spark-ray-chat", "spark-vllm-chat"}
    assert _tenants.claims(head["node"], {**STOP, "containers": ["spark-vllm-chat"]}, [30001]) == []
    assert _tenants.stop_plan(head["node"], {**STOP, "containers": ["spark-vllm-chat"]}) == []


PORTS = {
    "all": ({"api_port": 30000, "port_offset": 0}, ["spark-1", "30000", "20002 to 20999"], "another spark_api_port than 30000 and spark_port_offset: 100"),
    "the API port alone": ({"api_port": 30000}, ["spark-1", "port 30000 of service chat"], "set another spark_api_port than 30000 for service chat"),
    "Ray's alone": ({"port_offset": 0}, ["6379, 6380"], "set spark_port_offset: 100 for service chat"),
    "the API port is one of Ray's": ({"api_port": 6380}, ["port 6380"], "another spark_api_port than 6380 for"),
    "the API port is one of Ray's workers'": ({"api_port": 20500}, ["port 20500"], "another spark_api_port than 20500"),
}  # fmt: skip


@pytest.mark.parametrize("case", PORTS)
def test_ports_that_two_would_have(case):
    more, found, remedy = PORTS[case]
    chat = values(**{"service": "chat", "api_port": 30001, "port_offset": 100, "gpu_memory_utilization": 0.3, **more})
    (problem,) = gang.service_problems(chat, serving(DEFAULT))
    assert problem.id == "service-ports" and all(word in problem.msg for word in [*found, "which the service without a name uses too"])
    assert remedy in problem.remedy


def test_the_offset_that_is_free():
    third = values(service="third", api_port=30002, gpu_memory_utilization=0.1)
    (first, second) = gang.service_problems(third, serving(DEFAULT, CHAT))[:2] * 2
    assert "spark_port_offset: 200" in first.remedy and first is second


def test_ports_without_ray():
    mp, other = (
        values(executor="mp", gpu_memory_utilization=0.4),
        values(service="chat", api_port=30001, executor="mp", gpu_memory_utilization=0.3),
    )
    (problem,) = gang.service_problems(other, serving(mp))
    assert "port 29501 of service chat" in problem.found and "spark_port_offset: 100" in problem.remedy
    assert gang.service_problems(values(service="chat", api_port=30001, gpu_memory_utilization=0.3), serving(mp)) == [], (
        "Ray has other ports"
    )


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.3, ()),
        (0.4, ()),
        (0.45, ("0.45 beside 0.5 of the service without a name, 0.95 together", "at most 0.90", "lower it to 0.4 or less")),
    ],
)
def test_memory_of_both(share, words):
    chat = values(service="chat", api_port=30001, port_offset=100, gpu_memory_utilization=share)
    problems = gang.service_problems(chat, serving(DEFAULT))
    assert [problem.id for problem in problems] == (["service-memory"] if words else [])
    assert all(word in problems[0].msg for word in words)


def test_one_that_ended_keeps_its_place():
    problems = gang.service_problems(
        values(service="chat", port_offset=100, api_port=30001, gpu_memory_utilization=0.8), serving(DEFAULT, running=False, state="exited")
    )
    assert [problem.id for problem in problems] == ["service-memory"]


def test_a_server_on_a_node_of_another_inventory():
    alone = [{**serving(DEFAULT)[1], "head": True}]
    assert gang.service_problems({**CHAT, "tensor_parallel": 1}, alone) == []
    assert "its share of the memory is not counted" in gang.service_warnings(CHAT, alone)[0]
    assert gang.service_warnings(CHAT, serving(DEFAULT)) == []


def test_what_is_set_aside_is_no_service():
    members = serving(DEFAULT)
    for member in members:
        for container in member["node"]["containers"]:
            container["name"] += "-previous"
    assert _service.beside(members, "chat") == {}


def test_models_of_all_services_are_in_use():
    assert len(_models.served([m["node"] for m in serving(DEFAULT, values(**{**gang_other(), "service": "chat"}))])) == 2


def gang_other():
    return {"model": "example-org/other", "model_revision": "b" * 40, "api_port": 30001, "port_offset": 100}


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://127.0.0.1:1"), ("", "http://127.0.0.1:1"), ("a.b", "http://a.b:1"),
     ("fd00::5", "http://[fd00::5]:1"), ("[fd00::5]", "http://[fd00::5]:1")],
)  # fmt: skip
def test_where_a_server_answers(host, url):
    assert _service.local_url(host, 1) == url


@pytest.mark.parametrize("listed", [None, [], {}, {"data": None}, {"data": ["m"]}, {"data": [{"id": "adapter", "parent": "m"}]}])
def test_no_models(listed):
    assert _service.base_models(listed) == []


def test_ports_of_a_command_line():
    assert _service.ports("spark-vllm", ["serve", "/m", "--port", "30000", "--node-rank", "0", "--master-port", "29501"]) == [
        (30000, 30000),
        (29501, 29501),
    ]
    assert _service.ports("spark-vllm", ["serve", "/m", "--port", "30000", "--node-rank", "1", "--master-port", "29501", "--headless"]) == [
        (29501, 29501)
    ]
    assert _service.ports("spark-ray", ["start", "--address=1.2.3.4:6379", "--node-manager-port=6380"]) == [(6380, 6380)]
