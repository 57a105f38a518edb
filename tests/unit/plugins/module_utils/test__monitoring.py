# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _monitoring

NODES = [{"node": "spark-1", "head": True, "address": "10.1.230.180"}, {"node": "spark-2", "head": False, "address": "fd00::13"}]
PORTS = {"vllm": 30000, "ray": 6385, "node": 9100, "gpu": 9400}


def facts(name: str, *ports: int) -> dict:
    return {"name": name, "listeners": [{"port": port, "address": "0.0.0.0"} for port in ports]}


@pytest.mark.parametrize(
    ("known", "jobs", "silent"),
    [
        ([facts("spark-2", 22, 9100), facts("spark-1", 30000, 9100)], ["vllm", "node", "node"], []),
        ([facts("spark-1", 30000, 9100, 6385, 9400), facts("spark-2", 9100, 6385)], ["vllm", "ray", "ray", "node", "node", "gpu"], []),
        (
            [facts("spark-1", 22)],
            ["vllm", "node", "node"],
            ["vllm at 10.1.230.180:30000 (spark-1)", "node at 10.1.230.180:9100 (spark-1)", "node at [fd00::13]:9100 (spark-2)"],
        ),
    ],
)
def test_targets(known: list, jobs: list[str], silent: list[str]) -> None:
    found, quiet = _monitoring.targets(NODES, known, PORTS)
    assert [entry["job"] for entry in found] == jobs
    assert quiet == silent
    assert found[0] == {"job": "vllm", "node": "spark-1", "role": "head", "target": "10.1.230.180:30000"}
