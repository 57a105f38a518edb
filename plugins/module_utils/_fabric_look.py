# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What iproute2 and sysfs of this node say of its ports, and the choice made of that.

PRIVATE to the collection. The choice itself is in _fabric; here is what has to be read for it.
"""

from __future__ import annotations

import os
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._fabric import Request, detect, survey
from ansible_collections.dgxspark.serving.plugins.module_utils._netif import Interface, Route, Sysfs, add_sysfs, parse_addr, parse_route
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import read_hcas

Run = t.Callable[[t.Sequence[str]], tuple[int, str, str]]


def read_file(path: str) -> str:
    """Text of a small file."""
    with open(path, encoding="utf-8", errors="replace") as handle:
        return handle.read()


class Ports:
    """The ports of this node. ``run`` executes a command with a limit and answers (code, output, errors); 127 where it is not installed."""

    def __init__(self, run: Run, node: str, sysfs_path: str = "/sys") -> None:
        self._run = run
        self._node = node
        self._sysfs = Sysfs(sysfs_path, read_file, os.listdir, os.path.realpath)

    def _interfaces(self) -> list[Interface]:
        rc, out, err = self._run(["ip", "-j", "-d", "addr"])
        try:
            if rc != 0:
                raise ValueError(f"it failed with code {rc}: {' '.join((err or out).split())}")
            interfaces = parse_addr(out)
        except ValueError as exc:
            raise Problem(
                "iproute2",
                found=f"'ip -j -d addr': {exc}",
                expected="iproute2 that can print JSON (4.13 or newer)",
                remedy="install the package iproute2 on this node",
                node=self._node,
                stage="preflight",
            ) from exc
        add_sysfs(interfaces, self._sysfs)
        return interfaces

    def route(self, peer: str) -> Route:
        """The kernel's route to a peer."""
        return parse_route(peer, *self._run(["ip", "-j", "route", "get", peer]))

    def choose(self, request: Request) -> dict[str, t.Any]:
        """The fabric interface (see ``_fabric.detect``). Raises Problem."""
        return detect(request, self._interfaces(), read_hcas(self._sysfs), self.route)

    def survey(self, request: Request) -> list[dict[str, t.Any]]:
        """What could be a fabric or carry its sockets (see ``_fabric.survey``). Raises Problem."""
        return survey(request, self._interfaces(), read_hcas(self._sysfs))
