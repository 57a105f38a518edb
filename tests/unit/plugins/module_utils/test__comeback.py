# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _comeback


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["sleep", "infinity"], True),
        (["/usr/bin/sleep", "infinity"], True),
        (["/sbin/docker-init", "--", "sleep", "infinity"], True),
        (["tini", "-g", "--", "tail", "-f", "/dev/null"], True),
        (["bash"], True),
        (["/bin/bash", "-l"], True),
        (["sh", "-c", "exec sleep infinity"], True),
        (["sh", "-c", "server & sleep infinity"], False),
        (["bash", "-c", "python3 -m sglang.launch_server"], False),
        (["bash", "/start.sh"], False),
        (["python3", "-m", "sglang.launch_server"], False),
        ([], False),
    ],
)
def test_idle(command, expected):
    assert _comeback.idle(command) is expected


# pid: (parent, command); 100 is the container's own process, 1 a process outside.
SERVER = ["python3", "serve"]


@pytest.mark.parametrize(
    ("processes", "idle", "expected"),
    [
        ({100: (1, ["sleep"])}, True, []),
        ({100: (1, ["sleep"]), 200: (1, SERVER), 201: (200, ["rank"])}, True, [200]),
        ({100: (1, ["serve"]), 110: (100, ["rank"])}, False, []),
        ({100: (1, ["serve"]), 110: (100, ["rank"]), 200: (1, ["helper"])}, False, [200]),
        # nohup in a shell that is gone: a child of the main process now
        ({100: (1, ["sleep"]), 200: (100, SERVER)}, True, [200]),
        # somebody sits in a shell and has started it there; the shell alone is no service
        ({100: (1, ["sleep"]), 200: (1, ["bash"]), 201: (200, SERVER)}, True, [201]),
        ({100: (1, ["sleep"]), 200: (1, ["-bash"])}, True, []),
        # a shell with a command is the command
        ({100: (1, ["sleep"]), 200: (1, ["bash", "-c", "python3 serve"]), 201: (200, SERVER)}, True, [200]),
        ({}, True, []),
    ],
)
def test_started_by_hand(processes, idle, expected):
    parents = {pid: parent for pid, (parent, dummy) in processes.items()}
    assert _comeback.started_by_hand(parents, 100, idle, lambda pid: processes[pid][1]) == expected


def test_top():
    assert _comeback.parse_top("    PID    PPID\n   4711    4690\n   4800    4690\n") == {4711: 4690, 4800: 4690}
    assert _comeback.parse_top("") == {}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"Healthcheck": {"Test": ["CMD-SHELL", "curl -f http://localhost/"]}}, ["/bin/sh", "-c", "curl -f http://localhost/"]),
        ({"Healthcheck": {"Test": ["CMD", "curl", "-f"]}}, ["curl", "-f"]),
        ({"Healthcheck": {"Test": ["NONE"]}}, []),
        ({}, []),
    ],
)
def test_health_check(config, expected):
    assert _comeback.health_check(config) == expected


def test_age():
    stat = "4711 (a) b) S 1 4711 4711 0 -1 4194560 900 0 0 0 5 2 0 0 20 0 9 0 250000 1 2"
    assert _comeback.age(stat, "2530.50 9000.00") == pytest.approx(30.5)
    assert _comeback.age("", "2530.50 9000.00") == _comeback.age(stat, "") == float("inf")


def test_environment():
    text = "PATH=/bin\0HF_TOKEN=a=b\0HOSTNAME=x\0BROKEN=two\nlines\0EMPTY=\0"
    assert _comeback.environment(text, ["PATH=/bin", "OTHER=1"]) == {"HF_TOKEN": "a=b", "EMPTY": ""}


@pytest.mark.parametrize(
    ("mode", "hostname", "kept", "networks"),
    [
        ("host", "spark-1", False, {}),
        ("bridge", "aaaaaaaaaaaa", False, {}),
        ("bridge", "mine", True, {}),
        ("glm_default", "mine", True, {"glm_default": {"Aliases": ["api"]}}),
    ],
)
def test_definition(mode, hostname, kept, networks):
    inspected = {
        "Id": "a" * 64,
        "Config": {"Hostname": hostname, "Image": "x:1", "Cmd": ["serve"]},
        "HostConfig": {"NetworkMode": mode, "AutoRemove": True},
        "NetworkSettings": {"Networks": {mode: {"Aliases": ["api"], "IPAMConfig": None, "NetworkID": "n"}}},
    }
    body = _comeback.definition(inspected)
    assert (body["Image"], body["Cmd"], body["HostConfig"]) == ("x:1", ["serve"], inspected["HostConfig"])
    assert ("Hostname" in body) is kept
    assert body.get("NetworkingConfig", {}).get("EndpointsConfig", {}) == networks


def test_data_that_go_with_the_container():
    mounts = [
        {"Type": "volume", "Name": "e" * 64, "Destination": "/data"},
        {"Type": "volume", "Name": "models", "Destination": "/models"},
        {"Type": "bind", "Destination": "/x"},
    ]
    assert _comeback.nameless_volumes({"Mounts": mounts}) == ["/data"]
    assert _comeback.nameless_volumes({}) == []


def test_what_may_be_shown_holds_no_environment():
    entry = {
        "name": "old",
        "by_hand": {"old": [{"argv": ["/usr/bin/python3", "-m", "x"], "env": {"TOKEN": "hush"}}]},
        "definitions": {"old": {"Env": ["TOKEN=hush"]}},
    }
    record = {"node": "spark-1", "stopped": [entry]}
    assert _comeback.public_record(record) == {"node": "spark-1", "stopped": [{"name": "old", "commands": {"old": ["python3"]}}]}
    assert _comeback.public_record(None) is None
