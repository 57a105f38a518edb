# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import fabric_test as module

ADDR = json.dumps(
    [
        {"ifname": "lo", "flags": ["LOOPBACK", "UP", "LOWER_UP"], "link_type": "loopback"},
        {
            "ifname": "fabric-port0",
            "flags": ["UP", "LOWER_UP"],
            "mtu": 9000,
            "link_type": "ether",
            "addr_info": [{"family": "inet", "local": "192.168.200.12", "prefixlen": 24}],
        },
    ]
)
PAIR = {
    "rail": 1,
    "source": "spark-1",
    "target": "spark-2",
    "interface": "enp1s0f1np1",
    "address": "192.168.200.12",
    "peer": "192.168.200.13",
    "mtu": 9000,
    "tool": "iperf3",
    "why": "",
    "expected": 0.0,
    "source_in": "node",
    "target_in": "node",
    "devices": ["", ""],
}
PONG = "5 packets transmitted, 5 received, 0% packet loss, time 802ms\nrtt min/avg/max/mdev = 0.04/0.06/0.09/0.01 ms\n"
FAST = json.dumps({"end": {"sum_received": {"bits_per_second": 23.2e9}}})


@pytest.fixture
def run_module(monkeypatch, capsys):
    """Runs the whole module; ``answers``: beginning of a command and its (rc, out, err), or a list of them in turn."""

    def run_module(answers=(), tools=("iperf3",), **params):
        run_module.asked = []
        turns = {key: list(value) if isinstance(value, list) else value for key, value in dict(answers).items()}

        def run_command(self, argv, data=None, **kwargs):
            assert argv[0] == "timeout", "every command is bounded"
            words = " ".join(argv[4:])
            run_module.asked.append(words)
            for begin, answer in turns.items():
                if words.startswith(begin):
                    return answer.pop(0) if isinstance(answer, list) else answer
            return 0, "", ""

        monkeypatch.setattr(AnsibleModule, "run_command", run_command)
        monkeypatch.setattr(module.Test.__init__, "__defaults__", (lambda name: name if name in tools else None,))
        monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
        with patch_module_args({"node": "spark-1", **params}), pytest.raises(SystemExit):
            module.main()
        result = json.loads(capsys.readouterr().out)
        assert result["changed"] is False
        return result

    return run_module


LOOK = {"step": "look", "address": "192.168.200.12", "subnet": "192.168.200.0/24"}


@pytest.mark.parametrize(
    ("answers", "image", "tools"),
    [
        ({"docker image": (1, "", "No such image")}, False, {"iperf3": "node", "ib_write_bw": ""}),
        ({"docker run": (1, "/usr/bin/iperf3\n", "")}, True, {"iperf3": "node", "ib_write_bw": ""}),
        ({"docker run": (0, "/usr/bin/iperf3\n/usr/bin/ib_write_bw\n", "")}, True, {"iperf3": "node", "ib_write_bw": "image"}),
    ],
)
def test_look(run_module, answers, image, tools):
    look = run_module({"ip ": (0, ADDR, ""), "nvidia-smi": (0, "GPU 0: NVIDIA GB10 (UUID: GPU-1)\n", ""), **answers}, image="i", **LOOK)[
        "look"
    ]
    assert (look["node"], look["image"], look["tools"], look["gpus"]) == ("spark-1", image, tools, 1)
    assert look["memory"] > 0
    assert [(link["interface"], link["rail"], link["mtu"]) for link in look["links"]] == [("fabric-port0", 1, 9000)]


def test_look_at_a_node_without_docker_or_gpu(run_module):
    look = run_module({"ip ": (0, ADDR, ""), "docker": (127, "", ""), "nvidia-smi": (9, "", "")}, tools=(), image="i", **LOOK)["look"]
    assert (look["image"], look["gpus"], look["tools"]) == (False, 0, {"iperf3": "", "ib_write_bw": ""})


def test_look_without_iproute2(run_module):
    assert "no ip" in run_module({"ip ": (127, "", "no ip")}, **LOOK)["look"]["error"]


def test_the_server_has_a_time_limit(run_module):
    run_module(step="serve", pair=PAIR, seconds=4)
    assert run_module.asked[0] == "systemctl stop dgxspark-fabric-test.service"
    assert run_module.asked[1].startswith(
        "systemd-run --quiet --no-ask-password --collect --unit=dgxspark-fabric-test --property=RuntimeMaxSec=34 -- iperf3 -s"
    )
    run_module(step="stop")
    assert run_module.asked == ["systemctl stop dgxspark-fabric-test.service"]


def test_measure(run_module):
    rows = run_module({"ping": (0, PONG, ""), "iperf3": (0, FAST, "")}, step="measure", pair=PAIR)["rows"]
    assert [(row["what"], row["measured"], row["verdict"]) for row in rows] == [
        ("ping", "5/5 at MTU 9000, 0.06 ms", "ok"),
        ("iperf3", "23.2 Gb/s", "no figure"),
    ]
    assert "-M do -s 8972 -I 192.168.200.12 192.168.200.13" in run_module.asked[0]


def test_a_server_that_is_not_there_yet_is_asked_again(run_module):
    refused = (1, '{"error": "unable to connect"}', "")
    rows = run_module({"ping": (0, PONG, ""), "iperf3": [refused, refused, (0, FAST, "")]}, step="measure", pair=PAIR)["rows"]
    assert rows[1]["measured"] == "23.2 Gb/s"
    rows = run_module({"ping": (0, PONG, ""), "iperf3": refused}, step="measure", pair=PAIR)["rows"]
    assert (rows[1]["verdict"], rows[1]["detail"]) == ("FAILED", "unable to connect") and len(run_module.asked) == 6


@pytest.mark.parametrize(
    ("ping", "pair", "detail"),
    [
        ((1, PONG.replace("5 received", "0 received"), ""), {}, "no answer to ping"),
        ((0, PONG, ""), {"tool": "", "why": "iperf3 is neither on spark-2"}, "iperf3 is neither on spark-2"),
    ],
)
def test_no_throughput_without_an_answer_or_a_tool(run_module, ping, pair, detail):
    rows = run_module({"ping": ping}, step="measure", pair={**PAIR, **pair})["rows"]
    assert (rows[1]["verdict"], rows[1]["detail"]) == ("not run", detail) and len(run_module.asked) == 1


@pytest.mark.parametrize(
    ("answer", "expected", "removed"),
    [
        ((0, 'RESULT {"skip": "PyTorch of the image sees no GPU"}\n', ""), {"skip": "PyTorch of the image sees no GPU"}, False),
        ((124, "", ""), {"error": "it did not end in time"}, True),
    ],
)
def test_rank_of_all_gather(run_module, answer, expected, removed):
    looks = [{"node": name, "links": [{"rdma_state": ""}]} for name in ("spark-2", "spark-1")]
    result = run_module({"docker run": answer}, step="all_gather", looks=looks, image="i", head="192.168.200.12")
    assert result["answer"] == {"node": "spark-1", **expected}
    assert "-e RANK=1 -e WORLD_SIZE=2" in run_module.asked[0] and "MASTER_ADDR=192.168.200.12" in run_module.asked[0]
    assert (run_module.asked[1:] == ["docker rm -f dgxspark-fabric-test-gather"]) is removed


def test_steps_of_the_controller(run_module):
    assert "action plugin" in run_module(step="report")["msg"]
