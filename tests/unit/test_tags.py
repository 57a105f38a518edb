# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each tag of playbooks/site.yml runs, from any directory, on the inventory for real machines (which is only parsed here)."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "playbooks" / "site.yml"
INVENTORY = ROOT / "inventory" / "sparks"
# `site.yml` comes with the roles: a checkout that has roles and no site.yml is broken, not unfinished.
UNFINISHED = not SITE.exists() and not any((ROOT / "roles").glob("*/tasks/main.yml"))

BESIDE = ["ray_cluster", "vllm_server"]  # what is made while an old service still serves
ORDER = ["preflight", "model_download", "image_sync", "model_sync", *BESIDE, "stop_service", "ray_cluster", "vllm_server", "verify", "boot"]
# In every run. (The way back when a stage fails is in a rescue: --list-tasks does not show it.)
ALWAYS = {"preflight"}
# tag: roles that it runs besides that one
EXPECTED: dict[str, set[str]] = {
    "preflight": set(),
    "model": {"model_download", "model_sync"},
    "sync": {"image_sync", "model_sync"},
    "image": {"image_sync"},
    "stop": {"stop_service"},
    "boot": {"boot"},
    "ray": {"boot", "ray_cluster"},
    "vllm": {"boot", "vllm_server"},
    "verify": {"verify"},
}

TASK = re.compile(r"^\s+(?:dgxspark\.serving\.)?(?P<role>[a-z_]+) : (?P<name>.+?)\tTAGS: \[(?P<tags>[^\]]*)\]$")
# Ansible itself tags the check of a role's arguments `always`: it is listed for every role of a play, whatever the tag.
ARGUMENTS = "Validating arguments against arg spec"


def include_role_names() -> set[str]:
    """Names of the tasks that bring in another role while the play runs: Ansible lists those without the name of their own role."""
    found = set()
    for path in (ROOT / "roles").glob("*/tasks/*.yml"):
        for task in yaml.safe_load(path.read_text(encoding="utf-8")) or []:
            if "ansible.builtin.include_role" in task:
                found.add(task["name"])
    return found


def roles_in(listing: str) -> list[str]:
    """Roles with a task in an answer of ``--list-tasks``, in their order."""
    found = [match["role"] for match in map(TASK.match, listing.splitlines()) if match and not match["name"].startswith(ARGUMENTS)]
    return [role for role, dummy in itertools.groupby(found)]


def tasks_without_role(listing: str) -> list[str]:
    """Tasks that a play has beside its roles."""
    lines = listing.splitlines()
    return [line.strip() for line in lines if "TAGS: [" in line and not line.lstrip().startswith("play #") and not TASK.match(line)]


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PYTHONPYCACHEPREFIX",) if name in os.environ}
    return subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), str(SITE), "-i", str(INVENTORY), *arguments],
        cwd="/",
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(Path.home()),
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
            **kept,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@functools.cache
def answers() -> dict[tuple[str, ...], subprocess.CompletedProcess[str]]:
    """Every call that the tests look at, made side by side."""
    calls = [("--syntax-check",), ("--list-tasks",), *(("--list-tasks", "--tags", tag) for tag in EXPECTED)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(calls, pool.map(lambda call: started(*call), calls), strict=True))


def playbook(*arguments: str) -> subprocess.CompletedProcess[str]:
    return answers()[arguments]


def listing(*arguments: str) -> str:
    result = playbook("--list-tasks", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(UNFINISHED, reason="no roles and no playbooks/site.yml yet")
class TestSite:
    def test_syntax(self) -> None:
        result = playbook("--syntax-check")
        assert result.returncode == 0, result.stderr
        assert "WARNING" not in result.stderr

    @pytest.mark.parametrize("tag", EXPECTED)
    def test_tag_runs_its_roles_and_no_other(self, tag: str) -> None:
        assert set(roles_in(listing("--tags", tag))) == EXPECTED[tag] | ALWAYS

    def test_all_stages_in_their_order(self) -> None:
        assert roles_in(listing()) == ORDER

    def test_plays_have_no_tasks_of_their_own(self) -> None:
        assert [line for line in tasks_without_role(listing()) if line.partition("\t")[0] not in include_role_names()] == []

    def test_the_model_brings_the_image_of_the_head_when_it_is_needed(self) -> None:
        """What downloads the model is in the serving image: with ``--tags model`` alone it has to be there too, without the role's copies."""
        tasks = yaml.safe_load((ROOT / "roles" / "model_download" / "tasks" / "download.yml").read_text(encoding="utf-8"))
        needed = [task["ansible.builtin.include_role"] for task in tasks if "image is on the head" in task["name"]]
        assert [(role["tasks_from"], role["apply"]) for role in needed] == [("head", {"tags": ["model"]})]
        assert "image_sync" not in roles_in(listing("--tags", "model"))

    def test_no_other_tags(self) -> None:
        used = {tag.strip() for tags in re.findall(r"TAGS: \[([^\]]*)\]", listing()) for tag in tags.split(",")}
        assert used - {""} == set(EXPECTED) | {"always"}


def test_roles_in() -> None:
    text = (
        "playbook: playbooks/site.yml\n\n"
        "  play #1 (sparks): Preflight\tTAGS: [preflight,always]\n    tasks:\n"
        "      dgxspark.serving.preflight : Read the node\tTAGS: [always, preflight]\n"
        "      dgxspark.serving.preflight : Check: rules\tTAGS: [always, preflight]\n\n"
        "  play #5 (sparks): Serve\tTAGS: []\n    tasks:\n"
        "      dgxspark.serving.vllm_server : Validating arguments against arg spec 'main' - Starts vLLM\tTAGS: [always, vllm]\n"
        "      Look around\tTAGS: [ray]\n"
        "      dgxspark.serving.ray_cluster : Start Ray\tTAGS: [ray]\n"
    )
    assert roles_in(text) == ["preflight", "ray_cluster"]
    assert tasks_without_role(text) == ["Look around\tTAGS: [ray]"]
