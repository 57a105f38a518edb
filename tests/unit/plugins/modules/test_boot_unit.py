# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files and the unit of a node, below a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _boot_files
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.modules import boot_unit

PROGRAM = {_boot_files.UNIT_PATH: "[Unit]\n", f"{_boot_files.PROGRAM_DIR}/boot.py": "pass\n"}
GANG = {"node": "spark-1"}
LINK = _boot_files.WANTS_PATH


class Systemctl:
    def __init__(self, state="inactive", rc=0):
        self.state, self.rc, self.calls = state, rc, []

    def __call__(self, argv, timeout=30, data=None):
        self.calls.append(argv[1])
        if argv[1] == "is-active":
            return (0 if self.state == "active" else 3), self.state + "\n", ""
        return self.rc, "", "Access denied" if self.rc else ""


def unit(tmp_path, systemctl, check=False):
    return boot_unit.BootUnit(
        "spark-1", systemctl, lambda path, content: Path(path).write_text(content, encoding="utf-8") and None, check, str(tmp_path)
    )


def present(tmp_path, systemctl, program=None, gang=None, check=False):
    made = unit(tmp_path, systemctl, check)
    made.present(program or PROGRAM, gang or GANG)
    return made


def tree(tmp_path):
    return sorted("/" + str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir() or path.is_symlink())


def test_new_then_unchanged(tmp_path):
    systemctl = Systemctl()
    assert present(tmp_path, systemctl).actions == [
        f"write {_boot_files.UNIT_PATH}",
        f"write the program in {_boot_files.PROGRAM_DIR}",
        f"write {_boot_files.GANG_PATH}",
        "enable the unit",
        "start the unit",
    ]
    assert tree(tmp_path) == sorted([*PROGRAM, _boot_files.GANG_PATH, LINK]) and os.readlink(f"{tmp_path}{LINK}") == _boot_files.UNIT_PATH
    assert systemctl.calls == ["is-active", "restart"], "systemd is never reloaded: that can take the GPUs away from running containers"
    again = Systemctl("active")
    assert present(tmp_path, again).actions == [] and again.calls == ["is-active"]


@pytest.mark.parametrize(
    "program, gang, state, actions",
    [
        (PROGRAM, {"node": "spark-9"}, "active", [f"write {_boot_files.GANG_PATH}", "restart the unit"]),
        (PROGRAM, GANG, "failed", ["start the unit"]),
        ({**PROGRAM, _boot_files.UNIT_PATH: "[Service]\n"}, GANG, "active", [f"write {_boot_files.UNIT_PATH}", "restart the unit"]),
    ],
    ids=["other gang", "failed", "other unit"],
)
def test_only_what_changed(tmp_path, program, gang, state, actions):
    present(tmp_path, Systemctl())
    made = present(tmp_path, Systemctl(state), program, gang)
    assert made.actions == actions


def test_check_mode_tells_the_same_and_changes_nothing(tmp_path):
    systemctl = Systemctl()
    made = present(tmp_path, systemctl, check=True)
    assert "start the unit" in made.actions and tree(tmp_path) == [] and systemctl.calls == ["is-active"]
    assert made.after == {_boot_files.UNIT_PATH: "[Unit]\n", _boot_files.GANG_PATH: _boot_files.gang_text(GANG)}, "no code in the diff"


def test_absent(tmp_path):
    present(tmp_path, Systemctl())
    systemctl = Systemctl("active")
    made = unit(tmp_path, systemctl)
    made.absent()
    assert tree(tmp_path) == [] and systemctl.calls == ["is-active", "stop"] and made.actions[0] == "stop the unit"
    nothing = unit(tmp_path, Systemctl())
    nothing.absent()
    assert nothing.actions == []


def test_systemd_refuses(tmp_path):
    with pytest.raises(Problem) as caught:
        present(tmp_path, Systemctl(rc=1))
    assert caught.value.id == "boot-unit" and caught.value.node == "spark-1"
    assert "systemctl restart dgxspark-serving.service ended with 1: Access denied" in caught.value.found
