# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A healthy reference pair as plain data, for tests of the plan: settings as ``serving_settings`` returns them (defaults of the
role preflight and the inputs of inventory/sparks), facts as ``node_info`` and ``nccl_interface_info`` return them.
"""

from __future__ import annotations

import copy
import functools
import typing as t
from pathlib import Path

import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils import _gate
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

ROOT = Path(__file__).resolve().parents[3]
ADDRESSES = {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13", "spark-3": "192.168.200.14"}
IMAGE = "hellohal2064/vllm-qwen3.5-gb10:latest"
MODEL = "Qwen/Qwen3.5-122B-A10B-FP8"
REVISION = "a099dee70ccfcd8d5dda56aaa0b60cb8ecadabc9"
FINGERPRINT = "5f" * 32


@functools.cache
def options() -> dict[str, t.Any]:
    """The specification of the inputs, as it stands in the role preflight."""
    path = ROOT / "roles" / "preflight" / "meta" / "argument_specs.yml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]


def settings(**more: t.Any) -> dict[str, t.Any]:
    """Every input without its prefix: the defaults, then those of the reference pair, then ``more``."""
    values = {name.removeprefix("spark_"): copy.deepcopy(spec.get("default")) for name, spec in options().items()}
    values["stop"] = {"containers": [], "units": [], "compose_projects": [], "accept_no_rollback": False}
    values.update(
        image=IMAGE,
        model=MODEL,
        model_revision=REVISION,
        served_model_name=MODEL,
        fabric_subnet="192.168.200.0/24",
        fabric_address=ADDRESSES["spark-1"],
        api_local_url="http://127.0.0.1:30000",
    )
    unknown = set(more) - set(values)
    assert not unknown, f"no such input: {unknown}"
    return {**values, **more}


def node(**more: t.Any) -> dict[str, t.Any]:
    """Facts of a Spark that has everything; ``docker={...}`` and ``gpu={...}`` are merged, other keys replaced."""
    facts: dict[str, t.Any] = {
        "hostname": "spark",
        "machine": "aarch64",
        "time": 1_700_000_000.0,
        "python_requests": "2.31.0",
        "user": {"name": "nvidia", "uid": 1000, "gid": 1000, "home": "/home/nvidia", "groups": ["nvidia"]},
        "docker": {
            "installed": True,
            "reachable": True,
            "error": None,
            "version": "28.5.1",
            "runtimes": ["io.containerd.runc.v2", "nvidia", "runc"],
            "gpu_capable": True,
            "gpu_reason": "runtime nvidia",
        },
        "gpu": {"count": 1, "driver": "580.95.05", "devices": [], "processes": [], "error": None},
        "image": {"present": True, "fingerprint": FINGERPRINT, "id": "sha256:1"},
        "snapshot": {"complete": True, "verified": True, "revision": REVISION, "manifest_digest": "d1", "path": "/x", "config": None},
        "containers": [],
        "listeners": [],
        "unit_states": {},
        "disks": {},
        "infiniband_dev": True,
    }
    for key, value in more.items():
        facts[key] = {**facts[key], **value} if key in ("docker", "gpu", "image", "snapshot") and isinstance(value, dict) else value
    return facts


def fabric(address: str, **more: t.Any) -> dict[str, t.Any]:
    """The choice of ``nccl_interface_info`` on a node with one cable and RDMA."""
    return {
        "interface": "enp1s0f1np1",
        "address": address,
        "mtu": 9000,
        "rails": [{"interface": "enp1s0f1np1", "subnet": "192.168.200.0/24", "active": True}],
        "rail_count": 1,
        "warnings": [],
        "env": {
            "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
            "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
            "TP_SOCKET_IFNAME": "enp1s0f1np1",
            "MN_IF_NAME": "enp1s0f1np1",
            "NCCL_IB_DISABLE": "0",
            "NCCL_IB_HCA": "=rocep1s0f1:1",
            "UCX_NET_DEVICES": "enp1s0f1np1",
            "OMPI_MCA_btl_tcp_if_include": "enp1s0f1np1",
            "VLLM_HOST_IP": address,
        },
        **more,
    }


def member(name: str = "spark-1", facts: dict[str, t.Any] | None = None, choice: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
    """One node of the gang; spark-1 is the head."""
    return {
        "name": name,
        "head": name == "spark-1",
        "address": ADDRESSES[name],
        "node": facts or node(),
        "fabric": choice or fabric(ADDRESSES[name]),
    }


def pair(head: dict[str, t.Any] | None = None, worker: dict[str, t.Any] | None = None) -> list[dict[str, t.Any]]:
    """Two nodes; ``head`` and ``worker`` are changes to their facts."""
    return [member("spark-1", node(**(head or {}))), member("spark-2", node(**(worker or {})))]


def container(name: str, **more: t.Any) -> dict[str, t.Any]:
    """A running container as ``node_info`` lists it."""
    return {
        "name": name,
        "id": f"id-{name}",
        "image": IMAGE,
        "state": "running",
        "running": True,
        "pid": 4000,
        "labels": {},
        "ports": [],
        "compose_project": None,
        "gpu": False,
        "started_at": "2026-01-01T00:00:00Z",
        **more,
    }


def listener(port: int, **more: t.Any) -> dict[str, t.Any]:
    """A process that listens, as ``node_info`` lists it."""
    return {"address": "0.0.0.0", "port": port, "pid": 4711, "process": "python3", "user": "dgx", "container": None, "unit": None, **more}


def hostvars(members: list[dict[str, t.Any]], values: dict[str, t.Any] | None = None) -> dict[str, dict[str, t.Any]]:
    """What the hosts of the inventory hold after the role preflight."""
    return {
        m["name"]: {
            "inventory_hostname": m["name"],
            "preflight_inputs": {"settings": {**(values or settings()), "fabric_address": m["address"]}},
            "preflight_node": {"node": m["node"]},
            "preflight_fabric": {"fabric": m["fabric"]},
        }
        for m in members
    }


def groups(members: list[dict[str, t.Any]]) -> dict[str, list[str]]:
    """The groups of the inventory."""
    return {
        "ray_head": [m["name"] for m in members if m["head"]],
        "ray_workers": [m["name"] for m in members if not m["head"]],
    }


def node_problems(values: dict[str, t.Any], one: dict[str, t.Any]) -> list[Problem]:
    """What the host gate refuses of this one node."""
    found = _gate.errors(_gate.judge(_gate.Look(values, [one])))
    return [finding.problem for finding in found if not finding.gang]


def gang_problems(members: list[dict[str, t.Any]], gid_index: str = "") -> list[Problem]:
    """What it refuses when the nodes are compared."""
    found = _gate.errors(_gate.judge(_gate.Look(settings(gid_index=gid_index), members)))
    return [finding.problem for finding in found if finding.gang]


def of_rules(
    values: dict[str, t.Any], members: list[dict[str, t.Any]], rules: tuple[str, ...], config: dict[str, t.Any] | None = None
) -> list[Problem]:
    """What these rules of the host gate find."""
    return [finding.problem for finding in _gate.judge(_gate.Look(values, members, config=config)) if finding.rule in rules]


def model_problems(values: dict[str, t.Any], config: dict[str, t.Any] | None) -> list[Problem]:
    """How this model cannot be split."""
    return of_rules(values, [member()], ("attention_heads", "pipeline_stages", "engine_nodes"), config)


def service_problems(values: dict[str, t.Any], members: list[dict[str, t.Any]]) -> list[Problem]:
    """What this service would take from another one."""
    return of_rules(values, members, ("service_ports", "service_memory"))


def service_warnings(values: dict[str, t.Any], members: list[dict[str, t.Any]]) -> list[str]:
    """What is not known of another one."""
    return [problem.msg for problem in of_rules(values, members, ("service_unknown",))]
