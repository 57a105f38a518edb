#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_info
short_description: Ask the server and Ray on the head how they are, at this moment
version_added: 0.1.0
description:
  - Asks the server's C(/health), C(/v1/models) and C(/metrics) (two samples, for the rates), and Ray's node table through its container.
    No completion is asked for, so the server's own figures are not changed by looking.
  - A server that is not healthy is looked up in its log, for the stage of its start and the first known cause of a failure.
  - Waits for nothing; every question has a limit of a few seconds. What does not answer is a finding, not a failure.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details:
      - This module only reads.
  diff_mode:
    support: N/A
    details:
      - This module does not change anything.
  idempotent:
    support: full
    details:
      - This module never reports a change.
options:
  url:
    description:
      - Where the server listens, seen from this node. Proxies are never used.
    type: str
    default: http://127.0.0.1:30000
  container:
    description:
      - Name of the container that runs the server.
    type: str
    default: spark-vllm
  ray_container:
    description:
      - Name of the Ray container of this node; empty does not ask Ray.
    type: str
    default: spark-ray
  ray_address:
    description:
      - C(host:port) of Ray's head. Empty does not ask Ray.
    type: str
    default: ""
  interval:
    description:
      - Seconds between the two samples of C(/metrics).
    type: float
    default: 1
"""

EXAMPLES = r"""
- name: Look at the server
  dgxspark.serving.serving_info:
    node: "{{ inventory_hostname }}"
    ray_address: 192.168.200.12:6379
  become: true
  register: serving

- name: Show how busy it is
  ansible.builtin.debug:
    var: serving.server.metrics
"""

RETURN = r"""
server:
  description: What was found.
  returned: always
  type: dict
  contains:
    healthy:
      description: Whether C(/health) answered 200.
      type: bool
    health:
      description: What C(/health) answered, in words.
      type: str
    models:
      description: Names that C(/v1/models) lists, without LoRA adapters.
      type: list
      elements: str
    max_model_len:
      description: Longest context that the server accepts, in tokens.
      type: int
    metrics:
      description:
        - Samples with C(at) (seconds), C(running), C(waiting), C(prompt_tokens) and C(generation_tokens). Empty without a healthy vLLM server.
      type: list
      elements: dict
    stage:
      description: Stage of the start from the log of a server that is not healthy, as of M(dgxspark.serving.vllm_ready).
      type: str
    detail:
      description: How far that stage is, such as V(2/5).
      type: str
    loading_seconds:
      description: Seconds since the container was started.
      type: float
    listening:
      description: Whether the log says that the server once was ready.
      type: bool
    cause:
      description: First known cause of a failure in its log; empty when there is none.
      type: str
    ray:
      description: Ray's node table (C(nodes), C(errors), C(ray) the version); V(none) when Ray was not asked.
      type: dict
"""

import time
import typing as t
import urllib.error
import urllib.request

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _diagnosis, _ray, _service, _status, _vllm
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import Docker, DockerError, normal_stamp, unread
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import Run, bounded

QUICK = 2.0  # seconds for one answer over HTTP
RAY = 3.0
TAIL = 4000  # lines of a log: a start writes some hundred


def get(url: str, path: str) -> dict[str, t.Any]:
    """One GET without proxies: {kind: status|refused|timeout|broken, status, body, error}."""
    answer: dict[str, t.Any] = {"kind": "broken", "status": 0, "body": "", "error": ""}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + path, timeout=QUICK) as response:
            answer.update(kind="status", status=response.status, body=response.read(4 << 20).decode("utf-8", "replace"))
    except urllib.error.HTTPError as exc:
        answer.update(kind="status", status=exc.code, body=exc.read(4096).decode("utf-8", "replace"))
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", exc)
        kinds = {ConnectionRefusedError: "refused", ConnectionResetError: "reset", TimeoutError: "timeout"}
        kind = next((name for cls, name in kinds.items() if isinstance(reason, cls)), "broken")
        answer.update(kind=kind, error=f"within {QUICK:.0f} s" if kind == "timeout" else str(reason))
    return answer


class Look:
    """One look; what it sees is judged in module_utils."""

    def __init__(self, params: dict[str, t.Any], run: Run, ask: t.Callable[[str, str], dict[str, t.Any]] = get) -> None:
        self.p = params
        self.run = run
        self.ask = ask
        self.docker = Docker(run)
        self.now: t.Callable[[], float] = time.monotonic
        self.sleep: t.Callable[[float], None] = time.sleep

    def sample(self) -> dict[str, t.Any]:
        at = self.now()
        answer = self.ask(self.p["url"], "/metrics")
        return {"at": round(at, 3), **(_status.parse_metrics(answer["body"]) if answer["status"] == 200 else {})}

    def all(self) -> dict[str, t.Any]:
        """Everything; the question to Ray fills the time between the two samples."""
        containers = self.containers()
        server = containers.get(self.p["container"])
        found: dict[str, t.Any] = {"healthy": False, "health": "", "models": [], "max_model_len": None, "metrics": [], "ray": None}
        if server and server["running"]:
            answer = self.ask(self.p["url"], "/health")
            found.update(healthy=answer["kind"] == "status" and answer["status"] == 200, health=_vllm.error_text(answer))
        if found["healthy"]:
            found["metrics"].append(self.sample())
            found.update(self.models())
        elif server:
            found.update(self.start(server))
        if self.p["ray_address"] and (containers.get(self.p["ray_container"]) or {}).get("running"):
            found["ray"] = self.ray()
        if found["metrics"]:
            left = found["metrics"][0]["at"] + self.p["interval"] - self.now()
            self.sleep(max(0.0, left))
            found["metrics"].append(self.sample())
        return found

    def containers(self) -> dict[str, dict[str, t.Any]]:
        try:
            return self.docker.inspect([self.p["container"], self.p["ray_container"]])
        except DockerError:
            return {}

    def models(self) -> dict[str, t.Any]:
        models = _service.base_models(_vllm.body_of(self.ask(self.p["url"], "/v1/models")))
        length = models[0].get("max_model_len") if models else None
        return {"models": [str(m.get("id")) for m in models], "max_model_len": length if isinstance(length, int) else None}

    def start(self, server: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        """How far the start of a server is, and why it goes no further, from the log of this start."""
        now, wall = self.now(), time.time()
        started = normal_stamp(server["started_at"]) if server["started_at"] else ""
        state = _vllm.new_state(now)
        try:
            text = self.docker.log_text(self.p["container"], since=started, tail=TAIL, timeout=5)
        except DockerError:
            text = ""
        moment = _vllm.written_at(started, now, wall)
        lines, dummy = unread(text, None)
        state = _vllm.advance_at(_vllm.launched(state, moment), ((_vllm.written_at(stamp, now, wall), line) for stamp, line in lines))
        fatal = state["fatal_at"] is not None or not server["running"]
        cause = _vllm.cause_of(state) if fatal else None
        if cause is None and not server["running"]:
            cause = _diagnosis.best(_diagnosis.scan(line for dummy, line in lines))
        return {
            "stage": state["stage"],
            "detail": _vllm.describe(state),
            "loading_seconds": round(now - moment, 1),
            "listening": bool(state["listening"]),
            "cause": _diagnosis.sentence(cause),
        }

    def ray(self) -> dict[str, t.Any]:
        argv = ["docker", "exec", "-i", self.p["ray_container"], "python3", "-", self.p["ray_address"], f"{RAY:.0f}"]
        rc, out, err = self.run(argv, timeout=RAY + 1, data=_ray.PROGRAM)
        table = _ray.parse(rc, out, err)
        keys = ("address", "alive", "hostname", "death")
        nodes = [{key: node.get(key) for key in keys} for node in table.get("nodes") or []]
        return {"nodes": nodes, "errors": table.get("errors") or [], "ray": table.get("ray")}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "container": {"type": "str", "default": "spark-vllm"},
            "ray_container": {"type": "str", "default": "spark-ray"},
            "ray_address": {"type": "str", "default": ""},
            "interval": {"type": "float", "default": 1},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, server=Look(module.params, bounded(module.run_command)).all())


if __name__ == "__main__":
    main()
