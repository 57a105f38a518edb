# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import time

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _benchmark, _transfer
from ansible_collections.dgxspark.serving.plugins.modules import serving_benchmark

MARK = "@dgxspark-benchmark "
CONTAINER = {
    "Image": "sha256:1",
    "State": {"StartedAt": "2026-11-30T18:00:00Z"},
    "Config": {"Entrypoint": ["vllm"], "Cmd": ["serve", "/m"], "Env": ["VLLM_HOST_IP=1.2.3.4", "HF_TOKEN=geheim"], "Image": "r:1"},
}


def params(**more):
    return {"node": "spark-1", "container": "spark-vllm", "url": "http://127.0.0.1:30000", "job": {}, "progress": "", **more}


def test_look(tmp_path):
    commands = []

    def run(argv, timeout=30, data=None):
        commands.append(argv)
        if argv[1:3] == ["container", "inspect"]:
            return 0, json.dumps([CONTAINER]), ""
        if argv[1:3] == ["image", "inspect"]:
            return 0, json.dumps([{"RepoDigests": ["r@sha256:2"]}]), ""
        assert data == _benchmark.program_source()
        return 0, f"hello\n{MARK}{json.dumps({'kind': 'look', 'versions': {'vllm': '0.32.0'}})}\n", ""

    server = serving_benchmark.Benchmark(params(), run, str(tmp_path)).look()["server"]
    assert server == {
        "command": ["vllm", "serve", "/m"],
        "env": {"VLLM_HOST_IP": "1.2.3.4"},
        "image": "r:1",
        "image_id": "sha256:1",
        "digests": ["r@sha256:2"],
        "started_at": "2026-11-30T18:00:00Z",
        "versions": {"vllm": "0.32.0"},
        "error": "",
    }
    assert commands[-1][:6] == ["docker", "exec", "--interactive", "spark-vllm", "python3", "-u"]


def test_a_container_without_python(tmp_path):
    def run(argv, timeout=30, data=None):
        return (126, "", 'exec: "python3": not found') if argv[1] == "exec" else (1, "", "No such container")

    server = serving_benchmark.Benchmark(params(), run, str(tmp_path)).look()["server"]
    assert server["error"] == 'exec: "python3": not found'
    assert server["command"] == []


@pytest.fixture
def measure(tmp_path):
    """measure(told, error): the result, and the progress that was written; what docker exec prints is written by a stand-in of it."""

    def measure(told, error="", rc=0, wait=0.0):
        written, asked = [], []

        class Progress(_transfer.Progress):
            def __call__(self, what, done=0, total=0, unit=""):
                written.append((what, done, total, unit))

        def run(argv, timeout=30, data=None):
            asked.append((argv, timeout))
            with open(argv[4], "w", encoding="utf-8") as out, open(argv[5], "w", encoding="utf-8") as err:
                for line in told:
                    out.write(f"{MARK}{json.dumps(line)}\n")
                err.write(error)
            time.sleep(wait)
            return rc, "", ""

        job = {"argv": ["--seed", "1"], "limit": 20, "total": 4, "what": "point 1 of 1", "warm": {}}
        benchmark = serving_benchmark.Benchmark(params(job=job), run, str(tmp_path), lambda url: url.endswith(":30000"))
        return benchmark.measure(Progress("")), written, asked

    return measure


def test_measure(measure):
    told = [
        {"kind": "progress", "done": 3, "total": 4},
        {"kind": "end", "rc": 0, "late": False, "result": {"completed": 4}, "seconds": 2.0, "tail": "x"},
    ]
    result, written, asked = measure(told, wait=1.3)
    assert result["end"] == {"rc": 0, "late": False, "result": {"completed": 4}, "seconds": 2.0, "tail": "x"}
    assert result["healthy"] is True
    assert written[0] == ("point 1 of 1", 0, 4, "requests") and written[-1] == ("point 1 of 1", 3, 4, "requests")
    ((argv, timeout),) = asked
    assert timeout == 80  # the bound inside has to come first
    assert json.loads(argv[-1])["step"] == "measure"


def test_a_container_that_ends_meanwhile(measure):
    result, _written, _asked = measure([], "Error response from daemon: container spark-vllm is not running", rc=1)
    assert result["end"] is None
    assert result["said"] == "Error response from daemon: container spark-vllm is not running"
