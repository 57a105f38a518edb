# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What teardown.yml removes of files, by its own expressions and tasks: those that look at files run here, in a directory of the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
REMOVE: dict[str, t.Any] = yaml.safe_load((ROOT / "playbooks" / "teardown.yml").read_text(encoding="utf-8"))[1]
FILES = ("Look which records", "Find what we keep", "Ensure it is gone", "Ensure the directories", "Ensure the model", "Summary")
MODEL = ("Ensure the model",)
NODES = ("spark-1", "spark-2")


def settings(**more: t.Any) -> dict[str, t.Any]:
    return {
        "service": "",
        "model": "org/m2",
        "image": "org/a:1",
        "remove_model": False,
        "remove_image": False,
        "restore_old": False,
        **more,
    }


def server(service: str, role: str, model: str) -> dict[str, t.Any]:
    return {"service": service, "role": role, "model": model, "image": "org/a:1", "image_id": "sha256:1"}


class Node:
    """Two nodes with one directory for notes, on this machine, as far as their files go."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.state.mkdir()
        (folder / "run").mkdir()
        for name in NODES:
            (folder / f"model-{name}").mkdir()

    def files(self, *names: str) -> None:
        for name in names:
            (self.state / name).write_text("x", encoding="utf-8")

    @staticmethod
    def stand_in(task: dict[str, t.Any]) -> dict[str, t.Any]:
        """The module that removes a model has its own tests and a lock of the machine's: here it is when it would be called that counts."""
        if not task["name"].startswith(MODEL):
            return task
        gone = {"path": "{{ stop_before.row.model_folder }}", "state": "absent"}
        return {"name": task["name"], "ansible.builtin.file": gone, "when": task["when"]}

    def left(self) -> set[str] | None:
        return {path.name for path in self.state.iterdir()} if self.state.exists() else None

    def teardown(
        self,
        beside: dict[str, list[dict[str, t.Any]]] | None = None,
        others: t.Sequence[str] = (),
        check: bool = False,
        tasks: tuple[str, ...] = FILES,
        **more: t.Any,
    ) -> str:
        """Runs the tasks; returns what was printed."""
        rows = beside or {}
        record = f"stopped{'-' + more['service'] if more.get('service') else ''}"
        image = {"others": list(others), "left": []}
        hosts = {
            name: {
                "ansible_connection": "local",
                "ansible_python_interpreter": sys.executable,
                "stop_inputs": {"settings": settings(**more)},
                "stop_before": {
                    "row": {
                        "beside": rows.get(name, []),
                        "records": [str(self.state / f"{record}{kind}.json") for kind in ("", ".last")],
                        "model_folder": str(self.folder / f"model-{name}"),
                    }
                },
                "teardown_image": image,
            }
            for name in NODES
        }
        chosen = [self.stand_in(task) for task in REMOVE["tasks"] if task["name"].startswith(tasks)]
        play = {**REMOVE, "hosts": "all", "become": False, "tasks": chosen}
        (self.folder / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False), encoding="utf-8")
        (self.folder / "ansible.cfg").write_text("", encoding="utf-8")
        (self.folder / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}), encoding="utf-8")
        done = subprocess.run(
            [
                *(
                    str(Path(sys.executable).parent / "ansible-playbook"),
                    "-i",
                    str(self.folder / "hosts.json"),
                    str(self.folder / "play.yml"),
                ),
                *("-e", json.dumps({"teardown_state": str(self.state), "teardown_run": str(self.folder / "run")}), "-f", "1"),
                *(["--check"] if check else []),
            ],
            env={**os.environ, "ANSIBLE_CONFIG": str(self.folder / "ansible.cfg"), "ANSIBLE_LOCAL_TEMP": str(self.folder / "tmp")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_only_service_leaves_nothing(node: Node) -> None:
    node.files("kernels", "probes", ".stopped.abc", "failed")
    node.teardown()
    assert node.left() is None and not (node.folder / "run").exists() and (node.folder / "model-spark-1").exists()


@pytest.mark.parametrize("record", ["stopped.json", "stopped.last.json"])
def test_its_own_record_stays(node: Node, record: str) -> None:
    """The second one is what site.yml leaves when the new server is proven."""
    node.files("kernels", record)
    assert "the old service stays stopped" in node.teardown()
    assert node.left() == {record}


def test_what_another_stopped_service_has_stays(node: Node) -> None:
    """stop.yml -e @second.yml, then teardown.yml: no container of the second tells of it, its notes do. (images.json: image_sync rewrote it.)"""
    node.files("kernels", "probes", "images.json", "stopped-small.json", "stopped-small.last.json", "boot-small.json")
    told = node.teardown(others=["small"])
    assert (
        node.left() == {"images.json", "stopped-small.json", "stopped-small.last.json", "boot-small.json"}
        and not (node.folder / "run").exists()
    )
    assert "state (another service has boot-small.json, stopped-small.json, stopped-small.last.json)" in told


def test_the_first_service_stays_when_the_second_goes(node: Node) -> None:
    node.files("kernels", "stopped.json", "boot.json")
    node.teardown(service="small")
    assert node.left() == {"stopped.json", "boot.json"}


def test_images_of_another_service_keep_the_directory(node: Node) -> None:
    node.files("images.json", "kernels")
    node.teardown(others=["small"])
    assert node.left() == {"images.json"}


def test_check_mode_counts_as_gone_what_the_tasks_above_remove(node: Node) -> None:
    node.files("boot.json", "images.json", "kernels")
    told = node.teardown(check=True)
    assert node.left() == {"boot.json", "images.json", "kernels"} and f"(item={node.state})" in told


SERVED = {
    # A moved from m1 to m2: the worker's Ray still has the label of m1.
    "another serves it": ({"spark-2": [server("a", "spark-vllm", "org/m2")], "spark-1": [server("a", "spark-ray", "org/m1")]}, True),
    "another serves a different one": (
        {"spark-2": [server("a", "spark-vllm", "org/m1")], "spark-1": [server("a", "spark-ray", "org/m2")]},
        False,
    ),
    "its server is not in this run": ({"spark-1": [server("a", "spark-ray", "org/m1")]}, True),
    "another on another node": ({"spark-2": [server("a", "spark-vllm", "org/m2")]}, False),
    "nobody": ({}, False),
}


@pytest.mark.parametrize("case", SERVED)
def test_a_model_that_another_service_serves_stays(node: Node, case: str) -> None:
    beside, stays = SERVED[case]
    node.teardown(beside, tasks=MODEL, remove_model=True, service="b")
    assert (node.folder / "model-spark-1").exists() is stays
