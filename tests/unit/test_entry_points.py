# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every way in is named where a person looks for it: make help, README, the files for containers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import typing as t
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE)
PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml") if not path.name.endswith(".meta.yml"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """What `make help` shows: name and text."""
    done = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True, timeout=60)
    return {name: text.strip() for name, text in re.findall(r"^  (\S+)\s+(.*)$", done.stdout, re.MULTILINE)}


def test_help_shows_every_target(shown: dict[str, str]) -> None:
    assert len(TARGETS) > 15
    assert [name for name in TARGETS if not shown.get(name)] == []


def test_help_shows_every_playbook(shown: dict[str, str]) -> None:
    assert [name for name in PLAYBOOKS if len(shown.get(name, "")) < 15] == []
    assert sorted(set(shown) - set(TARGETS)) == [name for name in PLAYBOOKS if name not in TARGETS]


def test_no_target_is_a_file() -> None:
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert phony and sorted(phony[1].replace("\\", " ").split()) == sorted(TARGETS)


def test_every_script_is_behind_a_target() -> None:
    scripts = [path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and os.access(path, os.X_OK)]
    callers = MAKEFILE + "".join((ROOT / "scripts" / name).read_text(encoding="utf-8") for name in scripts)
    assert [
        name for name in scripts if f"scripts/{name}" not in MAKEFILE and f"scripts/{name}" not in callers.replace(f"`scripts/{name}", "")
    ] == []


def test_every_stage_of_ci_is_a_script_and_a_target() -> None:
    source = (ROOT / "scripts" / "ci.py").read_text(encoding="utf-8")
    stages = re.findall(r'^    "(\w+)": \(', source, re.MULTILINE)
    assert {"lint", "unit", "sanity", "artifact", "molecule", "importer", "docs", "environment", "matrix"} <= set(stages)
    assert [name for name in stages if not os.access(ROOT / "scripts" / name, os.X_OK)] == []
    assert [name for name in stages if f"scripts/{name}" not in MAKEFILE] == []


def test_readme_names_every_playbook_module_role_and_callback() -> None:
    modules = [path.stem for path in (ROOT / "plugins" / "modules").glob("*.py")]
    roles = [path.parent.parent.name for path in (ROOT / "roles").glob("*/meta/main.yml")]
    callbacks = [path.stem for path in (ROOT / "plugins" / "callback").glob("*.py")]
    assert [name for name in PLAYBOOKS if f"playbooks/{name}.yml" not in README] == []
    assert sorted(name for name in modules if f"`{name}`" not in README) == []
    assert sorted(name for name in roles if f"roles/{name}/README.md" not in README) == []
    assert sorted(name for name in callbacks if f"dgxspark.serving.{name}" not in README) == []


def own_inputs(playbook: str) -> set[str]:
    """The inputs that a playbook takes beside those of the inventory (``also`` of serving_settings)."""
    found: set[str] = set()

    def look(part: t.Any) -> None:
        if isinstance(part, dict):
            arguments = part.get("dgxspark.serving.serving_settings")
            if isinstance(arguments, dict) and isinstance(arguments.get("also"), dict):
                found.update(arguments["also"])
            for value in part.values():
                look(value)
        elif isinstance(part, list):
            for value in part:
                look(value)

    look(yaml.safe_load((ROOT / "playbooks" / f"{playbook}.yml").read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_inputs_of_a_playbook_are_documented(playbook: str) -> None:
    documents = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert sorted(name for name in own_inputs(playbook) if f"`{name}" not in documents and f" {name}=" not in documents) == []


def test_some_playbook_has_inputs_of_its_own() -> None:
    assert {"spark_output", "spark_output_file"} <= own_inputs("status")


# --- files for containers


def test_execution_environment_names_files_that_exist() -> None:
    for name in ("execution-environment.yml", "meta/execution-environment.yml"):
        dependencies = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["dependencies"]
        files = [value for value in dependencies.values() if isinstance(value, str)]
        assert files and [value for value in files if not (ROOT / value).is_file()] == []


def test_supported_versions_agree() -> None:
    """meta/runtime.yml, the matrix, the exceptions for sanity and README name the same ansible-core."""
    runtime = yaml.safe_load((ROOT / "meta" / "runtime.yml").read_text(encoding="utf-8"))["requires_ansible"]
    matrix = re.findall(r"\[(2\.\d+)\]=", (ROOT / "scripts" / "matrix").read_text(encoding="utf-8"))
    assert runtime == f">={matrix[0]}.0"
    assert sorted(path.stem.removeprefix("ignore-") for path in (ROOT / "tests" / "sanity").glob("ignore-*.txt")) == matrix
    assert sorted(path.stem.removeprefix("core-") for path in (ROOT / "scripts" / "tools").glob("core-*.txt")) == matrix
    assert f"ansible-core {matrix[0]} to {matrix[-1]}" in README
    for core in matrix:
        assert f"ansible-core=={core}." in (ROOT / "scripts" / "tools" / f"core-{core}.txt").read_text(encoding="utf-8")


def test_devcontainer_runs_what_is_there() -> None:
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8")
    found = json.loads("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//")))
    assert found["image"].rpartition(":")[2] not in ("", "latest")
    command = found["postCreateCommand"].split()
    assert os.access(ROOT / command[-1], os.X_OK)
    variables = found["remoteEnv"]
    assert variables["ANSIBLE_COLLECTIONS_PATH"].removeprefix("${containerWorkspaceFolder}/") == "playbooks/collections"
    assert variables["PATH"].startswith("${containerWorkspaceFolder}/.venv/bin:")


def test_tools_are_pinned() -> None:
    loose = []
    for path in [ROOT / "scripts" / "requirements.txt", *(ROOT / "scripts" / "tools").glob("*.txt")]:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith(("#", "-c ")) and "==" not in line:
                loose.append(f"{path.name}: {line}")
    assert loose == []
