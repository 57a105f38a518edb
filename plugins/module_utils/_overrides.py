# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network variables that a user sets in ``spark_env`` over what was detected: each consumer has its own syntax, and a wrong one hangs or dies late.

PRIVATE to the collection. Pure functions over plain data.
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

# Variables of plain interface names, and who reads them.
PLAIN = {
    "GLOO_SOCKET_IFNAME": "Gloo",
    "TP_SOCKET_IFNAME": "TensorPipe",
    "OMPI_MCA_btl_tcp_if_include": "Open MPI",
    "UCX_NET_DEVICES": "UCX",
    "MN_IF_NAME": "NVIDIA's images",
}
# Variables of NCCL's selectors ("=" exact), and what they name.
SELECTORS = {"NCCL_SOCKET_IFNAME": "interface", "NCCL_IB_HCA": "RDMA device"}
# Variables that have an input of their own, or whose value differs on every node.
OWN_INPUT = {
    "NCCL_IB_GID_INDEX": (
        "the index differs between devices and drifts (NCL-01)",
        "use spark_gid_index, which is checked on every node; empty is best",
    ),
    "VLLM_HOST_IP": ("spark_env is the same on all nodes, this is each node's own address", "set spark_fabric_address of each node"),
    "RAY_NODE_IP_ADDRESS": ("spark_env is the same on all nodes, this is each node's own address", "set spark_fabric_address of each node"),
    "MASTER_ADDR": ("it is the head's fabric address", "set spark_fabric_address of the head"),
}
ON_OFF = {"NCCL_IB_DISABLE": "01", "NCCL_CROSS_NIC": "012", "NCCL_IB_MERGE_NICS": "01", "NCCL_IB_SUBNET_AWARE_ROUTING": "01"}


def _refuse(name: str, value: str, expected: str, remedy: str, **more: t.Any) -> Problem:
    return Problem(
        "input", stage=more.pop("stage", "inputs"), found=f"{name} {value!r} in spark_env", expected=expected, remedy=remedy, **more
    )


def _names(value: str) -> list[str]:
    return [part.strip() for part in value.removeprefix("=").split(",")]


def form_problems(env: t.Mapping[str, t.Any]) -> list[Problem]:
    """Values that can never be right, before any node is asked. An empty text is left out of the containers and is no override."""
    problems = []
    for name, given in env.items():
        value = str(given)
        if value == "":
            continue
        if name in OWN_INPUT:
            why, remedy = OWN_INPUT[name]
            problems.append(_refuse(name, value, f"not here: {why}", remedy))
        elif name in PLAIN and re.search(r"[\^=\s]", value):
            why = f"plain names with commas: {PLAIN[name]} knows no '^' (exclude) and no '=' (exact), which are NCCL's"
            problems.append(
                _refuse(name, value, why, "leave it out, the collection sets the detected interface; or set spark_fabric_interface")
            )
        elif name in SELECTORS and value.startswith("^"):
            why = "what to use: an exclusion leaves every other interface to chance (NET-01)"
            remedy = f"leave it out; or set {'spark_fabric_interface' if name == 'NCCL_SOCKET_IFNAME' else 'spark_fabric_hcas'}"
            problems.append(_refuse(name, value, why, remedy))
        elif name in SELECTORS and re.search(r"[\^=\s]", value.removeprefix("=")):
            problems.append(
                _refuse(name, value, "one '=' in front of names with commas, such as '=enp1s0f1np1'", "correct it, or leave it out")
            )
        elif name in (*PLAIN, *SELECTORS) and not all(_names(value)):
            problems.append(_refuse(name, value, "names with commas between them, none of them empty", "correct it, or leave it out"))
        elif name in ON_OFF and value not in ON_OFF[name]:
            problems.append(_refuse(name, value, f"one of {', '.join(ON_OFF[name])}", "correct it, or leave it out"))
    return problems


def _there(names: t.Iterable[str], wanted: str, exact: bool) -> bool:
    return any(name == wanted or (not exact and name.startswith(wanted)) for name in names)


def node_problems(env: t.Mapping[str, t.Any], member: t.Mapping[str, t.Any]) -> list[Problem]:
    """Names that this node does not have, or cannot use: torch and NCCL would die of them after the old service was stopped.

    ``spark_env`` is the same on all nodes, so a name that only some of them have is found here as well.
    """
    rows = member["fabric"].get("candidates")
    if not rows:
        return []
    usable = {row["interface"] for row in rows if row["up"] and row["carrier"] and row["addresses"]}
    hcas = {row["hca"] for row in rows if row["hca"]}
    problems = []
    for name, given in env.items():
        value = str(given)
        known, what = usable, "interface that is up and has an IPv4 address"
        if name == "UCX_NET_DEVICES":
            known, what = usable | hcas | {"all"}, "interface or RDMA device"
        elif name == "NCCL_IB_HCA":
            known, what = hcas, "RDMA device"
        elif name not in PLAIN and name != "NCCL_SOCKET_IFNAME":
            continue
        exact = name in PLAIN or value.startswith("=")
        bare = [part.partition(":")[0] if known is not usable else part for part in _names(value)]
        missing = [part for part in bare if part and not _there(known, part, exact)]
        if missing:
            listed = ", ".join(sorted(known - {"all"})) or "none"
            problems.append(
                _refuse(
                    name,
                    value,
                    f"names of this node; {', '.join(missing)} is no {what} here (there are {listed})",
                    "leave it out: names may differ between nodes, the detected ones are set on each; or set spark_fabric_interface of the node",
                    stage="preflight",
                    node=member["name"],
                )
            )
    if str(env.get("NCCL_IB_DISABLE", "")) == "1" and member["fabric"].get("hcas") and "NCCL_IB_HCA" in env:
        problems.append(
            _refuse("NCCL_IB_DISABLE", "1", "no NCCL_IB_HCA beside it", "leave one of the two out", stage="preflight", node=member["name"])
        )
    return problems
