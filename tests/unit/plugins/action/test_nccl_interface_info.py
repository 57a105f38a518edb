# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types

import pytest

from ansible_collections.dgxspark.serving.plugins.action import nccl_interface_info as action

FABRIC = {"subnets": ["192.168.200.0/24"], "address": "192.168.200.12", "peers": ["192.168.200.13"], "require_rdma": True}


@pytest.mark.parametrize(("known", "asked"), [({"interface": "enp1s0f1np1"}, False), ({}, True), (None, True), ("", True)])
def test_the_node_is_asked_only_for_what_is_not_known(monkeypatch, known, asked):
    calls = []
    monkeypatch.setattr(action.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    plugin = action.ActionModule.__new__(action.ActionModule)
    plugin._task = types.SimpleNamespace(args={**FABRIC, "known": known})
    plugin._execute_module = lambda module_args, task_vars: calls.append(module_args) or {"fabric": {"interface": "asked"}}
    answer = plugin.run(None, {})
    assert calls == ([FABRIC] if asked else [])
    assert answer["fabric"] == ({"interface": "asked"} if asked else known)
