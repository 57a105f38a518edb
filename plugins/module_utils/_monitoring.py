# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What Prometheus can scrape on the nodes of a gang.

PRIVATE to the collection. Pure functions over plain data.
"""

from __future__ import annotations

import typing as t

# job: whether it is a target also when nothing listens. Ray and the GPU exporter are not on every node: a target that is never up is an alarm for nothing.
JOBS = {"vllm": True, "ray": False, "node": True, "gpu": False}


def _listens(facts: t.Mapping[str, t.Any] | None, port: int) -> bool:
    return any(int(entry.get("port") or 0) == port for entry in (facts or {}).get("listeners") or [])


def _target(address: str, port: int) -> str:
    """``host:port``; an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def targets(
    nodes: t.Sequence[t.Mapping[str, t.Any]], facts: t.Sequence[t.Mapping[str, t.Any]], ports: t.Mapping[str, int]
) -> tuple[list[dict[str, str]], list[str]]:
    """(targets, what a target needs and does not listen). ``nodes``: {node, head, address}; ``facts`` of those that answered, in any order."""
    known = {entry.get("name"): entry for entry in facts}
    found, silent = [], []
    for job, always in JOBS.items():
        for node in nodes:
            if job == "vllm" and not node["head"]:
                continue
            there = _listens(known.get(node["node"]), ports[job])
            if not (there or always):
                continue
            role = "head" if node["head"] else "worker"
            found.append({"job": job, "node": node["node"], "role": role, "target": _target(str(node["address"]), ports[job])})
            if not there:
                silent.append(f"{job} at {found[-1]['target']} ({node['node']})")
    return found, silent
