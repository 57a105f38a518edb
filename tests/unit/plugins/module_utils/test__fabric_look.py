# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils._fabric import parse_request
from ansible_collections.dgxspark.serving.plugins.module_utils._fabric_look import Ports
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.modules import node_info
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes

SHAPE = "twin_own_subnet"
FABRIC = {"subnets": ["192.168.200.0/24"], "address": "192.168.200.12", "peers": ["192.168.200.13"], "require_rdma": True}


@pytest.fixture
def run(tmp_path):
    """iproute2 of a recorded node, whose sysfs lies in tmp_path."""
    shapes.tree(SHAPE, tmp_path)
    data = shapes.data(SHAPE)

    def run(argv):
        if argv == ["ip", "-j", "-d", "addr"]:
            return 0, json.dumps(data["addr"]), ""
        assert argv[:4] == ["ip", "-j", "route", "get"]
        return shapes.route_answer(SHAPE, shapes.HEAD, argv[-1])

    return run


def test_choice_and_survey(run, tmp_path):
    ports = Ports(run, "spark-1", str(tmp_path))
    chosen = ports.choose(parse_request(FABRIC))
    assert (chosen["interface"], chosen["address"], chosen["rdma"]) == ("enp1s0f1np1", "192.168.200.12", True)
    assert "192.168.200.12" in json.dumps(ports.survey(parse_request({})))


@pytest.mark.parametrize(
    ("answer", "words"),
    [((127, "", "ip is not installed"), "code 127: ip is not installed"), ((0, "1: lo: <LOOPBACK>", ""), "'ip -j -d addr': ")],
)
def test_without_an_iproute2_that_prints_json(answer, words):
    with pytest.raises(Problem) as caught:
        Ports(lambda argv: answer, "spark-1").choose(parse_request(FABRIC))
    assert caught.value.id == "iproute2" and words in caught.value.msg
    assert node_info.chosen(lambda argv: answer, FABRIC, "spark-1") is None


def test_node_info_makes_the_same_choice(run, tmp_path):
    options = {**FABRIC, "interface": "", "hcas": [], "sysfs_path": str(tmp_path)}
    assert node_info.chosen(run, options, "spark-1") == Ports(run, "spark-1", str(tmp_path)).choose(parse_request(FABRIC))
    # what is wrong is told by the module that is asked next
    assert node_info.chosen(run, {**options, "subnets": ["203.0.113.0/24"]}, "spark-1") is None
    assert node_info.chosen(run, {**options, "interface": "^eth"}, "spark-1") is None
    assert node_info.chosen(run, None, "spark-1") is None
