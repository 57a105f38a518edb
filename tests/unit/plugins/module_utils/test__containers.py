# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import threading
import types

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _containers

INSPECT = {
    "Id": "a" * 64,
    "Name": "/sglang_node",
    "RestartCount": 2,
    "State": {
        "Status": "exited",
        "Running": False,
        "Pid": 0,
        "ExitCode": 137,
        "OOMKilled": True,
        "StartedAt": "2026-11-30T09:01:44.17175416Z",
        "FinishedAt": "2026-11-30T09:02:00.5Z",
    },
    "Config": {"Image": "lmsysorg/sglang:spark", "Labels": {"com.docker.compose.project": "glm"}},
    "HostConfig": {
        "RestartPolicy": {"Name": "unless-stopped"},
        "NetworkMode": "bridge",
        "DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}],
    },
    "NetworkSettings": {"Ports": {"30000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "30000"}], "8000/tcp": None}},
}


def test_summary_takes_what_decisions_need():
    found = _containers.summary(INSPECT)
    assert found["name"] == "sglang_node" and found["gpu"] and found["compose_project"] == "glm"
    assert found["ports"] == [{"host_ip": "127.0.0.1", "host_port": 30000, "container_port": 30000, "protocol": "tcp"}]
    assert found["finished_at"] == "2026-11-30T09:02:00.500000000Z"
    assert _containers.exit_text(found) == "exited with code 137 (killed by the memory limit)"


def test_inspect_of_a_name_that_is_not_there_is_no_error():
    def run(argv, timeout=30, data=None):
        assert argv[:3] == ["docker", "container", "inspect"]
        return 1, json.dumps([INSPECT]), "Error: No such container: nosuch"

    assert list(_containers.Docker(run).inspect(["sglang_node", "nosuch", ""])) == ["sglang_node"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((1, "", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock"), "Cannot connect"),
        ((124, "", ""), "did not answer within 30 s"),
        ((127, "", "timeout: failed to run command"), "not there"),
        ((0, "no json", ""), "did not print JSON"),
    ],
)
def test_a_docker_that_does_not_answer_is_told(answer, message):
    with pytest.raises(_containers.DockerError, match=message):
        _containers.Docker(lambda argv, timeout=30, data=None: answer).inspect(["x"])


TOP = "UID PID PPID C STIME TTY TIME CMD\nroot 5234 5211 13 06:56 ? 00:00:08 /usr/bin/python3 /usr/local/bin/vllm serve /models/x\n"
ROW = "root 5269 5234 14 06:56 ? 00:00:08 "
ENGINE = f"{ROW}VLLM::EngineCore\n"


class Stopping:
    """A container whose engine and API server end after so many looks at its processes; None: never, without a KILL."""

    def __init__(self, engine, server, answer=(0, "vllm\n", "")):
        self.engine, self.server, self.answer = engine, server, answer
        self.looks, self.calls, self.over = 0, [], threading.Event()

    def run(self, argv, timeout=30, data=None):
        verb = argv[1]
        if verb == "top":
            self.looks += 1
            if self.server is not None and self.looks > self.server:
                self.over.set()
                return 1, "", "Error response from daemon: container is not running"
            return 0, TOP + (ENGINE if self.looks <= self.engine else ""), ""
        self.calls.append(" ".join(argv[1:]))
        if verb == "kill":
            self.over.set()
        elif not self.answer[0] and self.engine:
            assert self.over.wait(20), "the container was left to hang"
        return self.answer


@pytest.mark.parametrize(
    ("container", "killed", "looks"),
    [
        pytest.param(Stopping(0, 9), False, 1, id="something-else"),
        pytest.param(Stopping(1, 1), False, 2, id="ends-by-itself"),
        pytest.param(Stopping(1, None), True, 3, id="waits-for-answers-that-nobody-gives"),
        pytest.param(Stopping(12, 12), False, 13, id="drains"),
        pytest.param(Stopping(12, None), True, 14, id="drains-and-then-waits"),
    ],
)
def test_stop_does_not_wait_for_a_server_without_an_engine(monkeypatch, container, killed, looks):
    monkeypatch.setattr(_containers, "ENGINE_LOOK", 0.01)
    a_quarter_of_a_second_for_each_look = types.SimpleNamespace(monotonic=lambda: container.looks * 0.25)
    monkeypatch.setattr(_containers, "time", a_quarter_of_a_second_for_each_look)
    assert _containers.Docker(container.run).stop("vllm", 60.9) == (0, "vllm\n", "")
    assert container.calls == ["stop -t 60 vllm", *(["kill vllm"] if killed else [])]
    assert container.looks == looks


@pytest.mark.parametrize(
    ("title", "computes"),
    [
        *((title, True) for title in ("VLLM::EngineCore_DP0", "VLLM::Worker_PP0_TP1", "VLLM::Worker", "x::EngineCore")),
        *((title, False) for title in ("VLLM::APIServer_0", "VLLM::DPCoordinator", "ray::RayWorkerProc", "ray::WorkerGroup.run")),
    ],
)
def test_what_computes_is_known_by_its_title(title, computes):
    docker = _containers.Docker(lambda argv, timeout=30, data=None: (0, f"{TOP}{ROW}{title}\n", ""))
    assert docker._engine("vllm") == computes


def test_a_stop_that_docker_refuses_is_told(monkeypatch):
    monkeypatch.setattr(_containers, "ENGINE_LOOK", 0.02)
    assert _containers.Docker(Stopping(5, 9, (1, "", "no")).run).stop("vllm", 60) == (1, "", "no")
    with pytest.raises(_containers.DockerError, match="docker stop did not answer within 120 s"):
        _containers.Docker(Stopping(5, 9, (124, "", "")).run).stop("vllm", 60)


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [
        ("2026-11-30T09:01:44.1Z", "2026-11-30T09:01:44.100000000Z"),
        ("2026-11-30T09:01:44Z", "2026-11-30T09:01:44.000000000Z"),
        ("2026-11-30T09:01:44.123456789+01:00", "2026-11-30T09:01:44.123456789+01:00"),
    ],
)
def test_stamps_are_made_comparable(stamp, expected):
    assert _containers.split_stamp(f"{stamp} text") == (expected, "text")


def test_streams_are_merged_by_time():
    out = "2026-11-30T09:00:01.0Z a\n2026-11-30T09:00:03.0Z c\n"
    err = "2026-11-30T09:00:02.0Z b\n"
    assert [line.split(" ", 1)[1] for line in _containers.merge_streams(out, err).splitlines()] == ["a", "b", "c"]


def at(second, text):
    return f"2026-11-30T09:00:{second:012.9f}Z {text}\n"


def test_no_line_is_read_twice_and_none_is_lost():
    everything = [at(1.0, "same"), at(1.0, "same"), at(1.5, "x"), at(3.0, "y"), at(3.2, "late out"), at(3.3, "y"), at(9.0, "end")]
    cursor, got = None, []
    # what docker showed at each look: the line of the other stream (3.2) was written after the one of 3.3 had been read
    for shown in ([0, 1], [0, 1, 2], [0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]):
        since = (cursor or {}).get("since", "")
        text = "".join(everything[n] for n in shown if everything[n].partition(" ")[0] >= since)
        lines, cursor = _containers.unread(text, json.loads(json.dumps(cursor)))
        got += [line for dummy, line in lines]
    assert got == ["same", "same", "x", "y", "y", "late out", "end"]
    assert len(cursor["seen"]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/system.slice/docker-" + "a" * 64 + ".scope", ("a" * 64, None)),
        ("13:hugetlb:/docker/" + "b" * 64, ("b" * 64, None)),
        ("0::/docker/" + "c" * 64 + "/docker/" + "d" * 64, ("d" * 64, None)),
        ("0::/system.slice/ollama.service", (None, "ollama.service")),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service", (None, "vllm.service")),
        ("", (None, None)),
    ],
)
def test_owner_of_a_process(text, expected):
    assert _containers.owner_of_cgroup(text) == expected


def test_listeners():
    text = (
        'LISTEN 0      9       127.0.0.1:30000 0.0.0.0:* users:(("httpd",pid=313,fd=3))\n'
        "LISTEN 0      4096   127.0.0.11:41983 0.0.0.0:*\n"
        'LISTEN 0      128          [::]:22       [::]:* users:(("sshd",pid=108,fd=7),("x",pid=1,fd=1))\n'
        'LISTEN 0 10 192.168.200.12%enp1s0f1np1:6379 0.0.0.0:* users:(("gcs_server",pid=9,fd=1))\n'
    )
    assert [(e["address"], e["port"], e["process"], e["pid"]) for e in _containers.parse_ss(text)] == [
        ("127.0.0.1", 30000, "httpd", 313),
        ("127.0.0.11", 41983, None, None),
        ("::", 22, "sshd", 108),
        ("192.168.200.12", 6379, "gcs_server", 9),
    ]


def test_gpu_processes_of_a_gb10():
    text = "2401, /usr/lib/xorg/Xorg, 18\n9000, sglang::scheduler, 96073\n9001, python3, [N/A]\n"
    assert [(p["pid"], p["name"], p["memory_mib"]) for p in _containers.parse_gpu_processes(text)] == [
        (2401, "/usr/lib/xorg/Xorg", 18.0),
        (9000, "sglang::scheduler", 96073.0),
        (9001, "python3", None),
    ]


NODE = "/docker/" + "d" * 64  # a node of the lab is a container itself


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/sglang.service\n", (1000, "sglang.service")),
        (f"8:pids:{NODE}/user@1000.service\n1:name=systemd:{NODE}/user@1000.service/app.slice/sglang.service\n", (1000, "sglang.service")),
        ("0::/user.slice/user-1000.slice/user@1000.service/init.scope\n", None),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
        ("0::/system.slice/sglang.service\n", None),
        (f"0::/user.slice/user@1000.service/app.slice/docker.service/docker/{'a' * 64}\n", None),  # rootless Docker
        ("", None),
    ],
)
def test_units_of_a_user(text, expected):
    assert _containers.user_unit_of_cgroup(text) == expected
