# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way of the evidence to the bundle is in test_diagnostics_bundle.py."""

from __future__ import annotations

import types

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.dgxspark.serving.plugins.action import failure_diagnosis


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    monkeypatch.setattr(failure_diagnosis.C, "DEFAULT_LOCAL_TMP", str(tmp_path / "run"))
    monkeypatch.setattr(failure_diagnosis.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    made = failure_diagnosis.ActionModule.__new__(failure_diagnosis.ActionModule)
    made._connection = None
    made._execute_module = lambda task_vars: {"touched": True, "evidence": {"a": "b"}}
    return made


def test_a_node_that_is_gone_is_tried_once(plugin):
    options = {}
    plugin._connection = types.SimpleNamespace(set_option=options.__setitem__)
    plugin.run(None, {"inventory_hostname": "spark-1"})
    assert options == {"reconnection_retries": 0}


def test_evidence_that_cannot_be_kept_is_a_warning(plugin, tmp_path):
    (tmp_path / "run").touch()
    result = plugin.run(None, {"inventory_hostname": "spark-1"})
    assert result["touched"] and "could not be kept" in result["warnings"][0]


def test_names_of_nodes_stay_in_the_folder(plugin):
    failure_diagnosis.keep("../x", {"a": "b"})
    assert failure_diagnosis.kept("../x") == {"a": "b"} and failure_diagnosis.kept("y") is None


def test_a_node_that_does_not_answer_ends_nothing(plugin):
    """An unreachable host in a rescue would end it on all hosts."""

    def gone(task_vars):
        raise AnsibleConnectionFailure("timed out")

    plugin._execute_module = gone
    assert plugin.run(None, {"inventory_hostname": "spark-1"}) == {"changed": False, "error": "no SSH connection: timed out"}
