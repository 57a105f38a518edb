# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role verify says at the end: how long each stage took, and for how long nothing answered."""

from __future__ import annotations

import time
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROLE = Path(__file__).resolve().parents[2] / "roles" / "verify"


def evaluate(
    name: str, head: dict[str, t.Any], worker: dict[str, t.Any] | None = None, record_left: bool = False, in_place: bool = False
) -> t.Any:
    role: dict[str, t.Any] = {}
    for part in ("vars", "defaults"):
        role.update(yaml.safe_load((ROLE / part / "main.yml").read_text(encoding="utf-8")))
    variables = {
        **{key: trust_as_template(value) for key, value in role.items()},
        "groups": {"sparks": ["spark_1", "spark_2"]},
        "hostvars": {"spark_1": head, "spark_2": worker or {}},
        "preflight_planned": {"plan": {"record_left": record_left, "addresses": [], "server_in_place": in_place}},
        **head,
    }
    return Templar(loader=DataLoader(), variables=variables).template(trust_as_template("{{ " + name + " }}"))


def test_the_stages_of_a_whole_run():
    now = time.time()
    head = {
        "preflight_inputs": {"began": now - 60},
        "model_download_began": now - 57.5,
        "image_sync_began": now - 50,
        "stop_service_began": now - 40,
        "ray_cluster_began": now - 35,
        "vllm_server_began": now - 30,
        "vllm_server_ended": now - 2,
    }
    seconds = evaluate("verify_seconds", head, {"model_sync_began": now - 48})
    assert list(seconds) == ["preflight", "model", "image", "sync", "stop", "ray", "vllm", "verify"]
    assert [seconds[name] for name in seconds][:7] == [2.5, 7.5, 2.0, 8.0, 5.0, 5.0, 28.0]
    assert seconds["verify"] >= 2


def test_the_stages_of_a_run_with_a_tag():
    now = time.time()
    assert list(evaluate("verify_seconds", {"preflight_inputs": {"began": now - 3}, "ray_cluster_began": now - 1})) == ["preflight", "ray"]


START = [{"stage": "container", "seconds": 4.5, "detail": ""}, {"stage": "weights", "seconds": 0.5, "detail": "5/5"}]
LAUNCHED = {"vllm_server_launched": True, "vllm_server_answered": 150.0, "vllm_server_start": START, "vllm_server_ready": {"skipped": True}}
STOPPED = {"stop_service_result": {"began": 110.0}}
KEPT = {"stop_service_kept_server": {"began": 120.25}, "stop_service_kept": {"changed": True}}


@pytest.mark.parametrize(
    ("head", "worker", "record_left", "said"),
    [
        ({}, {}, False, "none: what serves was left alone"),
        ({"vllm_server_launched": False}, {}, True, "none: what serves was left alone"),
        (LAUNCHED, {}, False, "none: nothing served before"),
        ({**LAUNCHED, "stop_service_result": {"skipped": True}}, {}, False, "none: nothing served before"),
        (LAUNCHED, {}, True, "not known: an earlier run had stopped what served before"),
        ({**LAUNCHED, **STOPPED}, {}, False, "40.0 s, from the stop"),
        ({**LAUNCHED, **STOPPED}, {"stop_service_result": {"began": 109.0}}, False, "41.0 s, from the stop"),
        ({**LAUNCHED, **KEPT}, {}, False, "29.8 s, from the stop"),
        ({**LAUNCHED, **STOPPED}, {}, True, "more than 40.0 s, from the stop"),
    ],
)
def test_downtime(head, worker, record_left, said):
    assert evaluate("verify_downtime", head, worker, record_left).strip().startswith(said)


def test_the_parts_of_the_start():
    assert evaluate("verify_start", LAUNCHED) == {"start": "container 4.5 s, weights 0.5 s"}
    assert evaluate("verify_start", {}) == {}


def test_the_summary():
    head = {
        **LAUNCHED,
        **STOPPED,
        "preflight_inputs": {"began": time.time() - 3, "settings": {"api_port": 30000, "served_model_name": "tiny"}},
        "inventory_hostname": "spark_1",
        "ansible_check_mode": False,
        "ray_cluster_began": time.time() - 1,
    }
    found = evaluate("verify_summary", head)
    assert found["downtime"].startswith("40.0 s") and found["start"] == "container 4.5 s, weights 0.5 s"
    assert found["stages"].startswith("preflight 2.0 s, ray 1.") and found["stages"].endswith(" s")


def test_the_summary_of_a_run_that_found_nothing_to_do():
    """It notes no stages: each note would take as long as a question to a node."""
    head = {
        "preflight_inputs": {"began": time.time() - 3, "settings": {"api_port": 30000, "served_model_name": "tiny"}},
        "inventory_hostname": "spark_1",
        "ansible_check_mode": False,
    }
    found = evaluate("verify_summary", head, in_place=True)
    assert found["endpoint"] == "http://spark_1:30000/v1"
    assert evaluate("verify_summary", {**head, "ansible_host": "fd00::5"}, in_place=True)["endpoint"] == "http://[fd00::5]:30000/v1"
    assert found["stages"].startswith("nothing to do, 3.") and found["downtime"] == "none: what serves was left alone"
