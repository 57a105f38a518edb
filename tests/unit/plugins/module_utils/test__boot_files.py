# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program that is put on a node is whole, and what is in place is recognised."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _boot_files

SETTINGS = {
    "boot": True,
    "boot_wait": 1800,
    "gpus_per_node": 1,
    "executor": "ray",
    "ray_port": 6379,
    "mp_port": 29501,
    "dp_port": 29550,
    "data_parallel": 1,
    "service": "",
    "api_local_url": "http://127.0.0.1:30000",
    "served_model_name": "tiny",
    "ready_timeout": 3600,
}
NODES = {
    "spark-1": {"head": True, "address": "192.168.200.12", "containers": {"spark-ray": {"labels": {"dgxspark.serving.definition": "abc"}}}},
}
PLAN = {"head_address": "192.168.200.12", "addresses": ["192.168.200.12", "192.168.200.13"], "nodes": NODES}


def written(tmp_path, content):
    for path, text in content.items():
        target = tmp_path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return lambda path: (tmp_path / path.lstrip("/")).read_text(encoding="utf-8")


def test_the_program_runs_with_the_nodes_python_alone(tmp_path):
    """Nothing of Ansible and nothing that the files do not bring: a gang file that is not there is told, and no traceback."""
    written(tmp_path, _boot_files.program(_boot_files.sources()))
    program = tmp_path / _boot_files.PROGRAM_DIR.lstrip("/") / "boot.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys, runpy; sys.path.insert(0, {str(program.parent)!r}); sys.argv = ['boot', '/nowhere/boot.json'];"
         f" runpy.run_path({str(program)!r}, run_name='__main__')"],
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "") and done.stderr == (
        "down: /nowhere/boot.json: [Errno 2] No such file or directory: '/nowhere/boot.json'\n"
    )


def test_every_module_that_the_program_imports_is_brought():
    for name, text in _boot_files.sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and "ansible" in str(node.module):
                own = node.module.rpartition(".")[2]
                wanted = [own] if own.startswith("_") else [alias.name for alias in node.names]
                assert set(wanted) <= set(_boot_files.SOURCES), name


IN_PLACE = {"enabled": True, "state": "active"}


@pytest.mark.parametrize(
    "change, facts, expected",
    [
        ({}, {}, (True, True)),
        ({}, {"state": "failed"}, (False, True)),
        ({}, {"state": "inactive"}, (False, True)),
        ({}, {"enabled": False}, (False, True)),
        ({_boot_files.UNIT_PATH: "[Unit]\n"}, {}, (False, True)),
        ({f"{_boot_files.PROGRAM_DIR}/{_boot_files.PACKAGE}/_ray.py": ""}, {}, (False, True)),
        ({_boot_files.GANG_PATH: "{}\n"}, {}, (False, True)),
        (None, {"enabled": False, "state": "inactive"}, (False, False)),
    ],
    ids=["in place", "failed", "stopped", "not enabled", "other unit", "other program", "other gang", "nothing there"],
)
def test_in_place(tmp_path, change, facts, expected):
    texts = _boot_files.sources()
    content = {**_boot_files.program(texts), _boot_files.GANG_PATH: _boot_files.gang_text(_boot_files.gang_of(SETTINGS, PLAN, "spark-1"))}
    read = written(tmp_path, {} if change is None else {**content, **change})
    state = _boot_files.state_of(read, lambda path: True, "active")
    planned = _boot_files.boot_plan(SETTINGS, PLAN, "spark-1", {"boot": {**state, **IN_PLACE, **facts}}, texts)
    assert (planned["in_place"], planned["present"]) == expected and planned["wanted"] is True


def test_what_the_unit_has_to_know():
    assert _boot_files.gang_of(SETTINGS, PLAN, "spark-1") == {
        "node": "spark-1",
        "head": True,
        "address": "192.168.200.12",
        "head_address": "192.168.200.12",
        "addresses": ["192.168.200.12", "192.168.200.13"],
        "gpus_per_node": 1,
        "executor": "ray",
        "ray_port": 6379,
        "mp_port": 29501,
        "url": "http://127.0.0.1:30000",
        "served_model": "tiny",
        "containers": {"spark-ray": "abc"},
        "wait": 1800,
        "ready_timeout": 3600,
    }


def test_the_unit_never_restarts_by_itself_and_leaves_the_containers():
    lines = _boot_files.UNIT.splitlines()
    assert "Restart=no" in lines and "KillMode=process" in lines and _boot_files.UNIT_NAME == "dgxspark-serving.service"


def test_a_second_service_has_a_unit_of_its_own():
    paths, own = _boot_files.Paths("chat"), _boot_files.program({"_boot": "x"}, "chat")
    assert (paths.unit_name, paths.gang) == ("dgxspark-serving-chat.service", "/var/lib/dgxspark-serving/boot-chat.json")
    assert not set(own) & set(_boot_files.program({"_boot": "x"})) and all("chat" in path for path in own)
    assert f"ExecStart=/usr/bin/python3 {paths.program}/boot.py {paths.gang}" in own[paths.unit]
    gang = _boot_files.gang_of({**SETTINGS, "service": "chat"}, PLAN, "spark-1")
    assert gang["service"] == "chat" and gang["containers"] == {"spark-ray-chat": "abc"}
