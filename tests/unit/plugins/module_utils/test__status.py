# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _status
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

NOW = 1_767_225_600.0 + 3600  # an hour after the containers of gang.container were started
# Lines of /metrics of vLLM 0.32 in the lab, after one request; HELP lines left out.
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="sparklab/tiny-qwen3"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="sparklab/tiny-qwen3"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="sparklab/tiny-qwen3",reason="capacity"} 2.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="sparklab/tiny-qwen3"} 20.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="sparklab/tiny-qwen3"} 1.7644e+09
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="sparklab/tiny-qwen3"} 48.0
"""


def memory():
    return {"total": 120 * 2**30, "available": 20 * 2**30}


def labels(**more):
    return {"dgxspark.serving": "1", **{f"dgxspark.serving.{key}": value for key, value in more.items()}}


def ours(name, **more):
    """A container of ours that runs the planned image."""
    known = labels(model=gang.MODEL, revision=gang.REVISION, served_model_name=gang.MODEL)
    return gang.container(name, **{"labels": known, "image_id": "sha256:1", "exit_code": 0, **more})


def unit(state="active", enabled=True, text="serves"):
    return {"files": "0" * 64, "enabled": enabled, "state": state, "text": text}


def row(name, containers=(), server=None, settings=None, **more):
    facts = gang.node(time=NOW, memory=memory(), containers=list(containers), **more)
    facts.setdefault("boot", unit())
    address = gang.ADDRESSES[name]
    return _status.node_row(
        name, name == "spark-1", address, settings or gang.settings(), facts, gang.fabric(address, rdma=True), server=server
    )


def ray(*addresses, dead=()):
    nodes = [{"address": a, "alive": True} for a in addresses] + [{"address": a, "alive": False} for a in dead]
    return {"nodes": nodes, "errors": [], "ray": "2.60.0"}


BOTH = ray("192.168.200.12", "192.168.200.13")
HEALTHY = {
    "healthy": True,
    "health": "HTTP 200",
    "models": [gang.MODEL],
    "max_model_len": 4096,
    "metrics": [
        {"at": 10.0, "running": 1.0, "waiting": 0.0, "prompt_tokens": 20.0, "generation_tokens": 48.0},
        {"at": 11.0, "running": 2.0, "waiting": 3.0, "prompt_tokens": 20.0, "generation_tokens": 83.5},
    ],
    "ray": BOTH,
}
LOADING = {
    "healthy": False,
    "health": "connection refused",
    "models": [],
    "metrics": [],
    "stage": "weights",
    "detail": "2/5",
    "loading_seconds": 34.0,
    "listening": False,
    "cause": "",
    "ray": BOTH,
}


def pair(head=("spark-vllm", "spark-ray"), worker=("spark-ray",), server=None, **more):
    return [row("spark-1", [ours(n) for n in head], server, **more), row("spark-2", [ours(n) for n in worker])]


def document(rows, **more):
    return _status.document(rows, {**gang.settings(**more), "endpoint_host": "10.1.230.180"})


# --- metrics


def test_the_figures_of_metrics():
    assert _status.parse_metrics(METRICS) == {"running": 1, "waiting": 2, "prompt_tokens": 20, "generation_tokens": 48}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("<html>not found</html>", {}),
        ("sglang:num_running_reqs 3.0\n", {}),
        ("vllm:num_requests_running 2\n", {"running": 2}),
        ('vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 4\n', {"running": 5}),
        ("vllm:num_requests_running NaN\n", {}),
        ("vllm:num_requests_running what\n", {}),
    ],
)
def test_other_metrics(text, expected):
    assert _status.parse_metrics(text) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (2, 3, 35.5, 0.0)),
        ({"generation_tokens": 3.0}, (2, 3, None, 0.0)),  # started again in between
        ({"at": 10.0}, (2, 3, None, None)),
    ],
)
def test_load_of_two_samples(change, expected):
    first, last = HEALTHY["metrics"]
    found = _status.load([first, {**last, **change}])
    assert (found["running"], found["waiting"], found["tokens_per_second"], found["prompt_tokens_per_second"]) == expected


def test_load_of_other_numbers_of_samples():
    assert _status.load([]) is None and _status.load([{"at": 1.0}]) is None
    assert _status.load(HEALTHY["metrics"][:1])["tokens_per_second"] is None


# --- a node


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [
        ("2026-01-01T00:00:00Z", 3600),
        ("2026-01-01T00:00:00.123456789Z", 3600),
        ("2026-01-01T01:00:00.5+01:00", 3600),
        ("2026-01-01T02:00:00Z", 0),  # a clock that was set back
        ("0001-01-01T00:00:00Z", None),
        ("", None),
        ("yesterday", None),
    ],
)
def test_seconds_since(stamp, expected):
    assert _status.seconds_since(stamp, NOW) == expected


def test_a_row():
    found = row("spark-1", [ours("spark-ray"), ours("spark-vllm"), gang.container("jellyfin")])
    assert [c["name"] for c in found["containers"]] == ["spark-vllm", "spark-ray"]
    assert found["containers"][0]["seconds"] == 3600
    assert found["memory"]["used"] == 100 * 2**30
    assert found["image"]["planned"] is True and found["image"]["fingerprint"] == gang.FINGERPRINT
    assert found["fabric"]["rails"] == 1 and found["fabric"]["rdma"] is True
    assert found["model_folder"] == "/home/nvidia/.cache/huggingface/hub/models--Qwen--Qwen3.5-122B-A10B-FP8"


def test_a_container_of_our_name_without_our_label_is_not_ours():
    assert row("spark-1", [gang.container("spark-vllm")])["containers"] == []


def test_another_image_than_the_inventorys():
    found = row("spark-1", [ours("spark-ray", image="old:1", image_id="sha256:2")])["image"]
    assert (found["planned"], found["reference"], found["fingerprint"]) == (False, "old:1", None)


def test_a_record_is_there_when_its_own_path_was_found():
    disks = {"/var/lib/x.json": {"checked": "/var/lib/x.json"}, "/var/lib/y.json": {"checked": "/var/lib"}}
    assert row("spark-1", disks=disks)["records"] == ["/var/lib/x.json"]


# --- the gang in each state


OLD = gang.container("glm-sglang", ports=[{"host_ip": "127.0.0.1", "host_port": 30000, "container_port": 30000, "protocol": "tcp"}])
OLD_PORT = gang.listener(30000, container="glm-sglang", process="docker-proxy")
STOP = {"containers": ["glm-sglang"], "units": [], "compose_projects": []}
DOWN = _status.unreachable_row("spark-2", False, "192.168.200.13", "no answer within 8 s")
EXITED = {"running": False, "state": "exited", "exit_code": 1}

CASES = {
    "serving": (pair(server=HEALTHY), "serving", "it answers", 0),
    "loading": (pair(server=LOADING), "loading", "stage weights 2/5, for 34 s", 0),
    "hung": (pair(server={**LOADING, "listening": True, "health": "no answer in time (within 2 s)"}), "not_answering", "within 2 s", 0),
    "fatal line": (pair(server={**LOADING, "cause": "out of memory"}), "failed", "at stage weights 2/5: out of memory", 0),
    "exited": (
        [row("spark-1", [ours("spark-vllm", **EXITED), ours("spark-ray")], {**LOADING, "cause": "bad flag"}), pair()[1]],
        "failed",
        "container spark-vllm exited with code 1: bad flag",
        1,
    ),
    "worker unreachable": ([pair(server=HEALTHY)[0], DOWN], "degraded", "not all is well", 1),
    "worker's container gone": (pair(worker=(), server=HEALTHY), "degraded", "not all is well", 1),
    "worker not alive in Ray": (
        pair(server={**HEALTHY, "ray": ray("192.168.200.12", dead=["192.168.200.13"])}),
        "degraded",
        "not all is well",
        1,
    ),
    "a stranger in Ray": (
        pair(server={**HEALTHY, "ray": ray("192.168.200.12", "192.168.200.13", "192.168.200.99")}),
        "degraded",
        "not all is well",
        1,
    ),
    "another name": (pair(server={**HEALTHY, "models": ["other"]}), "degraded", "not all is well", 1),
    "head unreachable": (
        [_status.unreachable_row("spark-1", True, "192.168.200.12", "no SSH connection: timed out"), DOWN],
        "unknown",
        "the head spark-1 does not answer",
        2,
    ),
    "head's Docker down": (
        [row("spark-1", docker={"error": "not running", "reachable": False}), pair()[1]],
        "unknown",
        "Docker on the head spark-1",
        1,
    ),
    "head looked at in part": ([{**pair()[0], "error": "looked at only in part: late"}, pair()[1]], "unknown", "could not be asked", 1),
    "without Ray": (
        [row("spark-1", [ours("spark-vllm")], {**HEALTHY, "ray": None}), row("spark-2", [ours("spark-vllm")])],
        "serving",
        "it answers",
        0,
    ),
    "a rank without Ray ended": (
        [row("spark-1", [ours("spark-vllm")], {**HEALTHY, "ray": None}), row("spark-2", [ours("spark-vllm", **EXITED)])],
        "failed",
        "the server's rank on spark-2, container spark-vllm, exited with code 1",
        1,
    ),
    "a rank without Ray is gone": (
        [row("spark-1", [ours("spark-vllm")], {**HEALTHY, "ray": None}), row("spark-2")],
        "degraded",
        "not all is well",
        1,
    ),
    "ranks without their server": (
        [row("spark-1"), row("spark-2", [ours("spark-vllm")])],
        "failed",
        "the head has no container spark-vllm; its ranks on spark-2 wait for it",
        1,
    ),
    "ray alone": (pair(head=("spark-ray",), server={**LOADING, "ray": BOTH}), "ray_only", "Ray runs", 0),
    "nothing": (pair(head=(), worker=()), "stopped", "nothing runs", 0),
    "old service": (
        [row("spark-1", [OLD], listeners=[OLD_PORT], settings=gang.settings(stop=STOP)), pair(worker=())[1]],
        "old_service",
        "container glm-sglang holds the API port; nothing of ours serves",
        0,
    ),
    "old service without the port": (
        [row("spark-1", [gang.container("glm-sglang")], settings=gang.settings(stop=STOP)), pair(worker=())[1]],
        "old_service",
        "container glm-sglang runs",
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_states(case):
    rows, state, text, problems = CASES[case]
    found = document(rows)
    assert (found["state"], len(found["problems"])) == (state, problems), found["problems"]
    assert text in found["text"]
    assert state in _status.STATES
    assert json.loads(json.dumps(found)) == found
    shown = _status.table(found)
    assert shown.startswith(state.upper().replace("_", " ") + ": ")
    assert all(name in shown for name in ("spark-1", "spark-2"))
    assert max(len(line) for line in shown.splitlines() if not line.startswith(("!", " ")) and ": " not in line) <= 125


def test_every_state_has_a_case():
    assert set(_status.STATES) == {state for dummy, state, dummy, dummy in CASES.values()}


# --- the unit for the boot


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (unit(), "on"),
        (unit("activating", text="waits: the gang is not complete"), "starting"),
        (unit("failed", text="down: no worker"), "failed"),
        (unit("failed", enabled=False), "failed"),
        (unit("inactive"), "idle"),
        (unit("inactive", enabled=False), "off"),
        (unit("not-found", enabled=False), "off"),
        (unit("active", enabled=False), "off"),  # runs now, and not after the next boot
        (unit("unknown"), None),
        ({}, None),
    ],
)
def test_the_unit_for_the_boot(found, expected):
    assert (_status.boot_of(found) or {}).get("state") == expected


WAITS = "waits: the gang is not complete: 192.168.200.13 is not in the cluster (60 of 1800 s)"
REASON = "down: the gang was not complete within 1800 s"


@pytest.mark.parametrize(
    ("units", "server", "cells", "notes"),
    [
        ((unit(), unit(text="is part of the gang")), HEALTHY, ["on", "on"], []),
        ((unit("not-found", False), unit("not-found", False)), HEALTHY, ["off", "off"], []),
        ((unit(), unit("not-found", False)), HEALTHY, ["on", "off"], ["spark-2: no unit for the boot"]),
        ((unit("failed", text=REASON), unit()), HEALTHY, ["FAILED", "on"], [f"spark-1: the unit for the boot has failed: {REASON}"]),
        ((unit("failed", text=""), unit()), HEALTHY, ["FAILED", "on"], ["spark-1: the unit for the boot has failed: see systemctl status"]),
        ((unit("activating", text=WAITS), unit()), LOADING, ["starting", "on"], [f"spark-1: after the boot: {WAITS}"]),
        ((unit(text=WAITS), unit()), LOADING, ["on", "on"], [f"spark-1: after the boot: {WAITS}"]),
        ((unit(text=WAITS), unit()), HEALTHY, ["on", "on"], []),
        ((unit(text="stands by: no spark-vllm of this definition on this node"), unit()), LOADING, ["on", "on"], []),
        (({}, unit()), HEALTHY, ["-", "on"], []),
    ],
)
def test_what_status_tells_of_the_units_for_the_boot(units, server, cells, notes):
    rows = [
        row("spark-1", [ours("spark-vllm"), ours("spark-ray")], server, boot=units[0]),
        row("spark-2", [ours("spark-ray")], boot=units[1]),
    ]
    found = document(rows)
    lines = _status.table(found).splitlines()
    assert [text.split()[-1] for text in lines if text.startswith("spark-")] == cells
    assert len(found["notes"]) == len(notes)
    assert [note for note, begin in zip(found["notes"], notes, strict=True) if not note.startswith(begin)] == []
    assert found["state"] in ("serving", "loading")  # a unit alone makes no other state


def test_the_document_of_a_server():
    found = document(pair(server=HEALTHY))
    assert found["endpoint"] == "http://10.1.230.180:30000/v1"
    assert _status.document(pair(), {**gang.settings(), "endpoint_host": "fd00::5"})["endpoint"] == "http://[fd00::5]:30000/v1"
    assert (found["model"], found["revision"], found["served_model_name"]) == (gang.MODEL, gang.REVISION, gang.MODEL)
    assert found["ray"] == {"alive": 2, "planned": 2, "unexpected": [], "version": "2.60.0"}
    assert found["load"]["tokens_per_second"] == 35.5
    assert found["stage"] is None
    assert [sorted(set(node) & {"server", "model_folder"}) for node in found["nodes"]] == [[], []]


def test_the_table_of_a_server():
    assert _status.table(document(pair(server=HEALTHY))).splitlines() == [
        "SERVING: it answers",
        "Model     Qwen/Qwen3.5-122B-A10B-FP8 @ a099dee70ccf",
        "Endpoint  http://10.1.230.180:30000/v1",
        "Requests  2 running, 3 waiting; 35.5 tokens/s (prompts 0 tokens/s)",
        "Ray       alive 2/2",
        "",
        "NODE     ROLE    FABRIC          RAILS   RAY    CONTAINERS            SINCE       MEMORY USED      IMAGE         BOOT",
        "spark-1  head    192.168.200.12  1 RDMA  alive  spark-vllm spark-ray  1 h 00 min  100.0/120.0 GiB  5f5f5f5f5f5f  on",
        "spark-2  worker  192.168.200.13  1 RDMA  alive  spark-ray             1 h 00 min  100.0/120.0 GiB  5f5f5f5f5f5f  on",
    ]


def test_a_node_that_is_down_is_one_line_and_one_sentence():
    shown = _status.table(document([pair(server=HEALTHY)[0], DOWN]))
    assert "spark-2  worker  192.168.200.13  -       alive  NO ANSWER" in shown
    assert shown.splitlines()[-1] == "! spark-2: no answer within 8 s"


def test_a_ray_container_that_ended_is_not_shown_as_alive():
    """Ray itself notices the end of a node only after some time."""
    rows = [pair(server=HEALTHY)[0], row("spark-2", [ours("spark-ray", **{**EXITED, "exit_code": 137})])]
    line = next(text for text in _status.table(document(rows)).splitlines() if text.startswith("spark-2"))
    assert " exited " in line and "spark-ray EXITED" in line


def test_ray_that_was_not_asked_is_not_called_dead():
    found = document(pair(server={**LOADING, "ray": None}))
    assert found["problems"] == [] and [node["ray"]["alive"] for node in found["nodes"]] == [None, None]
    assert " up " in _status.table(found)


@pytest.mark.parametrize(
    ("rows", "more", "note"),
    [
        (pair(server=HEALTHY), {"model": "Qwen/other"}, "the inventory says Qwen/other now"),
        (pair(head=(), worker=(), disks={"/a": {"checked": "/a"}}), {}, "an old service was stopped here"),
        (pair(server=HEALTHY, disks={"/a": {"checked": "/a"}}), {}, ""),
        (
            [row("spark-1", [ours("spark-vllm-previous", **EXITED)], disks={"/a": {"checked": "/a"}}), pair(worker=())[1]],
            {},
            "the version before is kept, stopped, until the new one is proven",
        ),
        ([row("spark-1", [gang.container("spark-vllm-previous", **EXITED)]), pair(worker=())[1]], {}, ""),
    ],
)
def test_notes(rows, more, note):
    notes = document(rows, **more)["notes"]
    assert notes == [] if not note else notes[0].startswith(note)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "-"),
        (0, "0 s"),
        (119.9, "119 s"),
        (120, "2 min"),
        (3599, "59 min"),
        (11100, "3 h 05 min"),
        (12 * 86400 + 4 * 3600, "12 d 4 h"),
    ],
)
def test_duration(seconds, expected):
    assert _status.duration(seconds) == expected


def of_chat(name, **more):
    """A container of a second service."""
    labels = {"dgxspark.serving": "1", "dgxspark.serving.service": "chat", "dgxspark.serving.served_model_name": "small"}
    return gang.container(name, labels=labels, image_id="sha256:1", arguments=["serve", "/m", "--port", "30001"], **more)


def test_a_second_service_is_told_beside_the_first():
    rows = [
        row("spark-1", [ours("spark-vllm"), ours("spark-ray"), of_chat("spark-vllm-chat"), of_chat("spark-ray-chat")], HEALTHY),
        row("spark-2", [ours("spark-ray"), of_chat("spark-ray-chat", running=False, state="exited")]),
    ]
    found = document(rows)
    assert found["state"] == "serving" and found["problems"] == []
    assert [c["name"] for c in rows[0]["containers"]] == ["spark-vllm", "spark-ray"] and rows[0]["others"] == []
    assert found["services"][0]["nodes"] == {"spark-1": True, "spark-2": False} and found["services"][0]["port"] == 30001
    (line,) = [line for line in _status.table(found).splitlines() if "Beside" in line]
    assert line.startswith("Beside it: service chat (small, port 30001) runs on spark-1 for ") and line.endswith("ENDED on spark-2")


def test_the_first_is_told_beside_the_second():
    settings = gang.settings(service="chat", api_port=30001)
    both = [ours("spark-vllm"), ours("spark-ray"), of_chat("spark-vllm-chat"), of_chat("spark-ray-chat")]
    rows = [
        row("spark-1", both, {**HEALTHY, "models": ["small"]}, settings),
        row("spark-2", [ours("spark-ray"), of_chat("spark-ray-chat")], None, settings),
    ]
    found = document(rows, service="chat", api_port=30001)
    assert found["state"] == "serving" and found["served_model_name"] == "small" and found["endpoint"].endswith(":30001/v1")
    assert [c["name"] for c in rows[0]["containers"]] == ["spark-vllm-chat", "spark-ray-chat"]
    assert "Beside it: the service without a name" in _status.table(found)


def test_without_a_second_service_nothing_is_said_of_one():
    assert "Beside" not in _status.table(document(pair(server=HEALTHY)))


@pytest.mark.parametrize("worker", [["spark-ray"], ["spark-vllm"], []])
def test_a_run_without_the_head(worker):
    """status.yml --limit spark-2."""
    rows = [row("spark-2", [ours(name) for name in worker])]
    found = document(rows)
    assert (found["state"], found["text"]) == ("unknown", "the head is not in this run")
    assert found["model"] is None and [node["node"] for node in found["nodes"]] == ["spark-2"] and found["notes"] == []
    assert _status.table(found).startswith("UNKNOWN: the head is not in this run")
    assert _status.verdict(rows, []) == ("unknown", "the head is not in this run")
