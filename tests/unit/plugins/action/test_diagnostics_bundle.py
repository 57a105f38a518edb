# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import tarfile
import types

import pytest

from ansible_collections.dgxspark.serving.plugins.action import diagnostics_bundle, failure_diagnosis


@pytest.fixture(autouse=True)
def local_tmp(monkeypatch, tmp_path):
    monkeypatch.setattr(failure_diagnosis.C, "DEFAULT_LOCAL_TMP", str(tmp_path / "run"))


def look(node, answer, monkeypatch):
    """The action of failure_diagnosis with this answer of its module."""
    plugin = failure_diagnosis.ActionModule.__new__(failure_diagnosis.ActionModule)
    plugin._connection = None
    plugin._execute_module = lambda task_vars: dict(answer)
    monkeypatch.setattr(failure_diagnosis.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    return plugin.run(None, {"inventory_hostname": node})


def bundle(monkeypatch, check=False, **arguments):
    plugin = diagnostics_bundle.ActionModule.__new__(diagnostics_bundle.ActionModule)
    plugin._task = types.SimpleNamespace(args=arguments, check_mode=check)
    monkeypatch.setattr(diagnostics_bundle.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    return plugin.run(None, {})


def read(path):
    with tarfile.open(path) as tar:
        return {member.name.split("/", 1)[1]: tar.extractfile(member).read().decode() for member in tar.getmembers()}


def test_from_the_nodes_to_the_file(monkeypatch, tmp_path):
    shown = look("spark-1", {"touched": True, "evidence": {"spark-vllm.log": "a line\n"}}, monkeypatch)
    assert shown == {"touched": True, "evidence": ["spark-vllm.log"]}  # the logs are in no result
    result = bundle(
        monkeypatch,
        directory=str(tmp_path / "out"),
        nodes=["spark-1", "spark-2"],
        message="spark-1: it broke",
        documents={"settings": {"hf_token": "abc", "port": 1}},
    )
    assert (result["error"], result["missing"], result["changed"]) == ("", ["spark-2"], True)
    files = read(result["path"])
    assert (
        sorted(files)
        == result["files"]
        == ["about.json", "message.txt", "settings.json", "spark-1/spark-vllm.log", "spark-2/NOT-REACHED.txt"]
    )
    assert files["spark-1/spark-vllm.log"] == "a line\n" and files["message.txt"] == "spark-1: it broke\n"
    assert json.loads(files["settings.json"]) == {"hf_token": "(removed)", "port": 1}
    about = json.loads(files["about.json"])
    assert about["dgxspark.serving"][0].isdigit() and about["ansible-core"].startswith("2.")


def test_the_part_of_a_node_is_for_the_user_alone(monkeypatch, tmp_path):
    look("spark-1", {"evidence": {"a": "b"}}, monkeypatch)
    folder = tmp_path / "run" / "diagnostics"
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "spark-1").stat().st_mode & 0o777 == 0o600


def test_without_evidence_nothing_is_kept(monkeypatch, tmp_path):
    assert look("spark-1", {"touched": False}, monkeypatch) == {"touched": False}
    assert not (tmp_path / "run").exists()


def test_old_ones_go(monkeypatch, tmp_path):
    for second in range(3):
        (tmp_path / f"spark-diagnostics-20200101T00000{second}Z.tar.gz").touch()
    result = bundle(monkeypatch, directory=str(tmp_path), keep=2, nodes=[])
    assert result["removed"] == [f"spark-diagnostics-20200101T00000{second}Z.tar.gz" for second in (0, 1)]
    assert os.path.exists(result["path"])


@pytest.mark.parametrize("arguments", [{"directory": ""}, {"directory": "x", "check": True}])
def test_none_is_written(monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    result = bundle(monkeypatch, nodes=["spark-1"], **arguments)
    assert (result["path"], result["error"], result["changed"]) == ("", "", False) and os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_is_told_and_no_failure(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    result = bundle(monkeypatch, directory=str(tmp_path / "file" / "x"), nodes=[])
    assert not result.get("failed") and "file" in result["error"] and result["path"] == ""
    assert "nonsense" in bundle(monkeypatch, directory="x", nodes=[], nonsense=1)["error"]
