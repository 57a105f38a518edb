# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A condition that is no boolean is an error since ansible-core 2.19, unless somebody has switched that off: then the scenarios would prove nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ansible
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_this_ansible_is_strict() -> None:
    assert tuple(map(int, ansible.__version__.split(".")[:2])) >= (2, 19)


def test_nothing_of_ours_switches_it_off() -> None:
    files = [ROOT / "ansible.cfg", *(ROOT / ".config").rglob("*.yml"), *(ROOT / "molecule").rglob("*.yml"), *(ROOT / "scripts").glob("*")]
    assert [path.name for path in files if path.is_file() and "broken_conditionals" in path.read_text(encoding="utf-8").lower()] == []


@pytest.mark.parametrize(("condition", "code"), [("[1] | length > 0", 0), ("[1]", 2)])
def test_a_list_is_no_condition(tmp_path: Path, condition: str, code: int) -> None:
    """As every scenario runs: with our configuration."""
    play = tmp_path / "play.yml"
    play.write_text(f"- hosts: localhost\n  gather_facts: false\n  tasks:\n    - debug:\n      when: {condition!r}\n", encoding="utf-8")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", "-c", "local", str(play)],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout
