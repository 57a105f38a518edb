# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole gangs from recorded shapes: what preflight does with the nodes of ``fixtures/fabric/<shape>``, without Ansible."""

from __future__ import annotations

import pathlib
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric, _topology
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import read_hcas
from ansible_collections.dgxspark.serving.tests.unit.fixtures.fabric import shapes
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

SUBNET = "192.168.200.0/24"


class Gang:
    """The nodes of a shape. ``addresses`` are those of the inventory ({} means that it names none)."""

    def __init__(self, shape: str, root: pathlib.Path, addresses: dict[str, str] | None = None) -> None:
        self.shape = shape
        self.names = shapes.nodes(shape)
        self.seen = {name: shapes.load(shape, root / shape / name, name) for name in self.names}
        self.given = {name: (addresses or {}).get(name, "") for name in self.names}

    def find(self, subnet: str = "") -> dict[str, t.Any]:
        """The fabric that the inventory does not name, or the addresses in ``subnet``."""
        surveys = [
            {
                "node": name,
                "address": self.given[name],
                "ports": _fabric.survey(_fabric.parse_request({}), interfaces, read_hcas(sysfs)),
            }
            for name, (interfaces, sysfs) in self.seen.items()
        ]
        return _topology.find(surveys, subnet)

    def detect(self, node: str, subnets: list[str], addresses: dict[str, str], **more: t.Any) -> dict[str, t.Any]:
        """The fabric of one node."""
        interfaces, sysfs = self.seen[node]
        given = {
            "node": node,
            "subnets": subnets,
            "address": addresses.get(node, ""),
            "peers": [a for a in addresses.values() if a],
            **more,
        }
        return _fabric.detect(_fabric.parse_request(given), interfaces, read_hcas(sysfs), shapes.router(self.shape, node))

    def choices(self, subnets: list[str], addresses: dict[str, str], **more: t.Any) -> dict[str, t.Any]:
        """By node the fabric, or the Problem."""
        result: dict[str, t.Any] = {}
        for name in self.names:
            try:
                result[name] = self.detect(name, subnets, addresses, **more)
            except Problem as problem:
                result[name] = problem
        return result

    def members(self, choices: dict[str, t.Any]) -> list[dict[str, t.Any]]:
        """Members of a plan, healthy but for their fabric."""
        return [
            {"name": name, "head": name == self.names[0], "address": choice["address"], "node": gang.node(), "fabric": choice}
            for name, choice in choices.items()
        ]


def found(shape: str, root: pathlib.Path, **more: t.Any) -> list[dict[str, t.Any]]:
    """Members of a gang whose fabric nobody named. Raises the first Problem."""
    whole = Gang(shape, root)
    fabric = whole.find()
    choices = whole.choices([fabric["subnet"], *fabric["rails"]], fabric["addresses"], **more)
    for choice in choices.values():
        if isinstance(choice, Problem):
            raise choice
    return whole.members(choices)
