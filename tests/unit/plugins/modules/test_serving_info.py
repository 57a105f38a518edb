# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest
import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils import _ray
from ansible_collections.dgxspark.serving.plugins.modules import serving_info

PARAMS = {
    "node": "spark-1",
    "url": "http://127.0.0.1:30000",
    "container": "spark-vllm",
    "ray_container": "spark-ray",
    "ray_address": "192.168.200.12:6379",
    "interval": 1.0,
}
TABLE = {
    "nodes": [{"address": "192.168.200.12", "alive": True, "hostname": "a", "death": "", "resources": {}}],
    "errors": [],
    "ray": "2.60.0",
}
START = "2026-01-01T00:00:00.5Z"


def status(body="", code=200):
    return {"kind": "status", "status": code, "body": body, "error": ""}


REFUSED = {"kind": "refused", "status": 0, "body": "", "error": ""}
GOOD = {
    "/health": status(),
    "/metrics": status("vllm:num_requests_running 1\n"),
    "/v1/models": status('{"data": [{"id": "m", "max_model_len": 4096}, {"id": "adapter", "parent": "m"}]}'),
}


def inspected(name, running=True, code=0):
    state = {"Status": "running" if running else "exited", "Running": running, "StartedAt": START, "ExitCode": code}
    return {"Name": f"/{name}", "Id": name * 8, "State": state, "Config": {"Labels": {}}, "HostConfig": {}}


def look(containers=(), answers=None, log="", **params):
    """(what was found, commands, seconds slept)."""
    commands, slept = [], []

    def run(argv, timeout=30, data=None):
        commands.append(argv)
        if argv[1] == "exec":
            return 0, f"\n{_ray.MARK}{json.dumps(TABLE)}\n", ""
        if argv[1] == "logs":
            return 0, log, ""
        missing = len(containers) < 2
        return (1 if missing else 0), json.dumps(list(containers)), "Error: No such container: x" if missing else ""

    it = serving_info.Look({**PARAMS, **params}, run, lambda url, path: (answers or GOOD)[path])
    it.now, it.sleep = iter(float(n) for n in range(100)).__next__, slept.append
    return it.all(), [c[1] for c in commands], slept


BOTH = (inspected("spark-vllm"), inspected("spark-ray"))


def test_a_healthy_server():
    found, commands, slept = look(BOTH)
    assert found["healthy"] and found["health"] == "HTTP 200"
    assert found["models"] == ["m"] and found["max_model_len"] == 4096
    assert [s["running"] for s in found["metrics"]] == [1, 1] and found["metrics"][0]["at"] < found["metrics"][1]["at"]
    assert found["ray"]["nodes"] == [{"address": "192.168.200.12", "alive": True, "hostname": "a", "death": ""}]
    assert commands == ["container", "exec"] and len(slept) == 1 and slept[0] <= 1


@pytest.mark.parametrize(
    ("log", "running", "expected"),
    [
        ("(APIServer pid=1) INFO 01-01 00:00:01 vLLM API server version 0.32.0", True, ("container", False, "")),
        (
            "INFO 01-01 00:00:01 [x.py:1] Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:01<00:02]",
            True,
            ("weights", False, ""),
        ),
        ("INFO:     Application startup complete.", True, ("api", True, "")),
        ("vllm: error: unrecognized arguments: --what", False, ("container", False, "--what")),
    ],
)
def test_a_server_that_is_not_healthy_is_read_from_its_log(log, running, expected):
    containers = (inspected("spark-vllm", running, 0 if running else 2), inspected("spark-ray"))
    found, commands, slept = look(containers, {"/health": REFUSED}, f"2026-01-01T00:00:01.000000000Z {log}\n")
    assert (found["stage"], found["listening"]) == expected[:2] and expected[2] in found["cause"]
    assert found["metrics"] == [] and slept == [] and "logs" in commands


def test_a_server_that_ended_is_not_asked():
    found = look((inspected("spark-vllm", False, 1), inspected("spark-ray")), {})[0]
    assert found["healthy"] is False and found["health"] == ""


@pytest.mark.parametrize(
    ("containers", "params"),
    [((), {}), (BOTH[:1], {}), (BOTH, {"ray_address": ""}), ((BOTH[0], inspected("spark-ray", False)), {})],
)
def test_ray_is_not_asked_where_it_does_not_run(containers, params):
    found, commands, dummy = look(containers, **params)
    assert found["ray"] is None and "exec" not in commands


def test_a_docker_that_does_not_answer_is_no_failure():
    it = serving_info.Look(PARAMS, lambda argv, timeout=30, data=None: (124, "", ""))
    assert it.all()["healthy"] is False


def test_nobody_listens():
    assert serving_info.get("http://127.0.0.1:9", "/health")["kind"] == "refused"
    assert serving_info.get("nonsense", "/health")["kind"] == "broken"


def test_documented_are_the_results():
    told = yaml.safe_load(serving_info.RETURN)["server"]["contains"]
    dead = look((inspected("spark-vllm", False, 1), inspected("spark-ray")), {})[0]
    assert set(told) == set(dead) | set(look(BOTH)[0])
