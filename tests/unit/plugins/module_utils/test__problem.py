# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem


def problem(**more):
    return Problem("NET-12", found="MTU 1500", expected="9000", remedy="set it", **more)


@pytest.mark.parametrize(
    ("more", "msg"),
    [
        ({}, "found MTU 1500; expected 9000. Remedy: set it"),
        ({"node": "spark-2"}, "spark-2: found MTU 1500; expected 9000. Remedy: set it"),
        ({"stage": "preflight"}, "preflight: found MTU 1500; expected 9000. Remedy: set it"),
        ({"node": "spark-2", "stage": "preflight"}, "spark-2: preflight: found MTU 1500; expected 9000. Remedy: set it"),
    ],
)
def test_message(more, msg):
    assert problem(**more).msg == msg == str(problem(**more))


def test_what_a_module_returns():
    assert problem(node="spark-2", stage="preflight").as_dict() == {
        "id": "NET-12",
        "node": "spark-2",
        "stage": "preflight",
        "found": "MTU 1500",
        "expected": "9000",
        "remedy": "set it",
    }


def test_details_are_kept_apart():
    assert problem(peer="spark-1", mtu=9000).as_dict()["details"] == {"peer": "spark-1", "mtu": 9000}


def test_a_node_can_be_named_later():
    late = problem()
    late.node = "spark-1"
    assert late.msg.startswith("spark-1: ") and late.as_dict()["node"] == "spark-1"
