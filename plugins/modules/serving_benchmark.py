#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_benchmark
short_description: Measure the served model with vLLM's own load tool
version_added: 0.1.0
description:
  - Runs C(vllm bench serve) inside the server's container, with random prompts and the tokenizer of the served model, so that nothing is downloaded, for
    every combination of lengths and concurrency, one after the other. Each has a limit in time.
  - Keeps the run as one JSON document with everything that the figures depend on, in a directory of the controller, beside one HTML report that needs
    no other file and, where the controller's Python has matplotlib, one PNG with the same charts. Compares with an earlier run.
  - Nothing is changed on the nodes. What the tool writes is removed with it.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details:
      - Looks at the server and tells what would be measured.
  diff_mode:
    support: none
    details:
      - What is written is new each time.
  idempotent:
    support: none
    details:
      - Every run measures again and writes files of its own on the controller.
options:
  step:
    description:
      - V(all) is the whole and what a playbook asks for. The others are parts of it on the head. V(look) reads how the server was started, V(measure) runs one
        point.
    type: str
    choices: [all, look, measure]
    default: all
  settings:
    description: RV(dgxspark.serving.serving_settings#module:settings) with the inputs of the benchmark. For O(step=all).
    type: dict
    default: {}
  rows:
    description: RV(dgxspark.serving.serving_status#module:row) of every node. For O(step=all).
    type: list
    elements: dict
    default: []
  facts:
    description: RV(dgxspark.serving.node_info#module:node) of the nodes that answered; a part is kept in the document. For O(step=all).
    type: list
    elements: dict
    default: []
  container:
    description: Container of the server.
    type: str
    default: spark-vllm
  url:
    description: Where the server listens, seen from the node.
    type: str
    default: http://127.0.0.1:30000
  job:
    description: What the tool is to do. For O(step=measure), set by the action plugin.
    type: dict
    default: {}
  progress:
    description: Name under which the progress is written to C(/run/dgxspark-serving). Set by the action plugin.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Measure
  dgxspark.serving.serving_benchmark:
    node: "{{ inventory_hostname }}"
    settings: "{{ inputs.settings }}"
    rows: "{{ groups['sparks'] | map('extract', hostvars, ['look', 'row']) }}"
"""

RETURN = r"""
run:
  description:
    - The document, with C(id), C(name), C(date), C(complete), C(config) and C(points); each point with C(input), C(output), C(concurrency), C(requests),
      C(argv) and the tool's own C(result).
  returned: with O(step=all), when a point was measured
  type: dict
file:
  description: Path of the document on the controller.
  returned: with O(step=all), when a point was measured
  type: str
report:
  description: Path of the HTML report.
  returned: with O(step=all), when a point was measured
  type: str
plot:
  description: Path of the PNG; empty when it was not drawn.
  returned: with O(step=all), when a point was measured
  type: str
would:
  description: What would be run.
  returned: with O(step=all) in check mode
  type: list
  elements: str
server:
  description: How the server was started, as C(command), C(env) (without secrets), C(image), C(image_id), C(digests), C(versions) and C(started_at).
  returned: with O(step=look)
  type: dict
end:
  description: What the tool said last, as C(rc), C(late), C(result), C(seconds) and C(tail). V(none) when it said nothing.
  returned: with O(step=measure)
  type: dict
problem:
  description: What is wrong, as C(id), C(node), C(stage), C(found), C(expected) and C(remedy).
  returned: failure
  type: dict
"""

import json
import os
import threading
import typing as t
import urllib.request

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _benchmark, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import Run, bounded

RUN_DIR = "/run/dgxspark-serving"
GRACE = 60  # seconds that the bound around the container gives the one inside


def alive(url: str) -> bool:
    """Whether /health answers 200."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def read_text(path: str) -> str:
    """A file as text, "" when it is not there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


class Benchmark:
    """One execution on the head."""

    def __init__(self, params: dict[str, t.Any], run: Run, folder: str, health: t.Callable[[str], bool] = alive) -> None:
        self.params = params
        self.run = run
        self.folder = folder
        self.health = health

    def _docker(self, *words: str) -> t.Any:
        """What ``docker`` prints as JSON; {} when it fails."""
        rc, out, dummy = self.run(["docker", *words], timeout=20)
        try:
            found = json.loads(out) if rc == 0 else []
        except ValueError:
            found = []
        return found[0] if found else {}

    def _exec(self, job: dict[str, t.Any]) -> list[str]:
        return ["docker", "exec", "--interactive", self.params["container"], "python3", "-u", "-", json.dumps(job)]

    def look(self) -> dict[str, t.Any]:
        """How the server was started."""
        container = self._docker("container", "inspect", self.params["container"])
        config = container.get("Config") or {}
        image = self._docker("image", "inspect", container["Image"]) if container.get("Image") else {}
        rc, out, err = self.run(self._exec({"step": "look"}), timeout=60, data=_benchmark.program_source())
        told = _benchmark.told(out)
        return {
            "server": {
                "command": [str(word) for word in [*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])]],
                "env": _benchmark.public_env(config.get("Env") or []),
                "image": config.get("Image") or "",
                "image_id": container.get("Image") or "",
                "digests": image.get("RepoDigests") or [],
                "started_at": (container.get("State") or {}).get("StartedAt") or "",
                "versions": told[-1]["versions"] if told else {},
                "error": "" if told else " ".join((err or out).split())[-300:] or f"docker exec ended with {rc}",
            }
        }

    def measure(self, progress: _transfer.Progress) -> dict[str, t.Any]:
        """One point. The tool's lines go through a file, so that a thread can read them while it runs."""
        job = {"step": "measure", **self.params["job"]}
        out, err = os.path.join(self.folder, "benchmark.out"), os.path.join(self.folder, "benchmark.err")
        done = threading.Event()
        thread = threading.Thread(target=self._follow, args=(out, job, progress, done), daemon=True)
        thread.start()
        try:
            script = ["sh", "-c", 'out=$1; err=$2; shift 2; exec "$@" >"$out" 2>"$err"', "sh", out, err]
            rc, dummy, said = self.run([*script, *self._exec(job)], timeout=float(job["limit"]) + GRACE, data=_benchmark.program_source())
        finally:
            done.set()
            thread.join(5)
        ends = [line for line in _benchmark.told(read_text(out)) if line["kind"] == "end"]
        end = {name: value for name, value in ends[-1].items() if name != "kind"} if ends else None
        words = read_text(err).strip() or said.strip() or f"docker exec ended with {rc}"
        return {"end": end, "said": words[-2000:], "healthy": self.health(self.params["url"])}

    @staticmethod
    def _follow(path: str, job: t.Mapping[str, t.Any], progress: _transfer.Progress, done: threading.Event) -> None:
        progress(job["what"], 0, job["total"], "requests")
        while not done.wait(1):
            told = [line for line in _benchmark.told(read_text(path)) if line["kind"] == "progress"]
            if told:
                progress(job["what"], told[-1]["done"], told[-1]["total"], "requests")


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "step": {"type": "str", "choices": ["all", "look", "measure"], "default": "all"},
            "settings": {"type": "dict", "default": {}},
            "rows": {"type": "list", "elements": "dict", "default": []},
            "facts": {"type": "list", "elements": "dict", "default": []},
            "container": {"type": "str", "default": "spark-vllm"},
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "job": {"type": "dict", "default": {}},
            "progress": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    step = module.params["step"]
    if step == "all" or (step == "measure" and module.check_mode):
        module.fail_json(msg=f"step {step} is the action plugin's", changed=False)
    benchmark = Benchmark(module.params, bounded(module.run_command), module.tmpdir)
    if step == "look":
        module.exit_json(changed=False, **benchmark.look())
    name = module.params["progress"]
    fresh = bool(name) and not os.path.isdir(RUN_DIR)
    if fresh:
        os.makedirs(RUN_DIR, mode=0o755, exist_ok=True)
    progress = _transfer.Progress(os.path.join(RUN_DIR, f"progress-{name}") if name else "")
    try:
        result = benchmark.measure(progress)
    finally:
        progress.close()
        if fresh and not os.listdir(RUN_DIR):
            os.rmdir(RUN_DIR)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
