#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_previous
short_description: Set our running version aside for an upgrade, and give it back
version_added: 0.1.0
description:
  - An upgrade stops the containers of this collection that serve now and gives them another name (C(spark-vllm-previous)) instead of
    removing them, until the new ones are proven. Their image and their volume for C(/tmp) are kept by that.
  - What was set aside is written to O(record) before anything is stopped, so that an interrupted run loses nothing. A version that is
    written down is never overwritten by one that was launched after it and is not proven.
  - The new container can be made before the old one is stopped, under a name of its own (C(spark-vllm-next)). Then nothing but its start lies
    between the end of the one and the beginning of the other.
  - Only containers with the label of this collection are touched.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details:
      - Says what it would do; the server is not asked.
  diff_mode:
    support: none
    details:
      - RV(actions) says it.
  idempotent:
    support: full
    details:
      - V(started) with O(restart=true) always starts again.
options:
  state:
    description:
      - V(kept) makes room for new O(containers). The present ones are set aside with O(keep=true), else removed.
      - V(restored) removes what runs under our names or waits to be started, and is not the version that is written down, and looks whether that is
        still there. It does not start it, because the order over the nodes matters.
      - V(started) gives O(containers) that were set aside their names back, and starts them.
      - V(launched) gives O(containers) that were made beforehand their names, and starts them.
      - V(removed) removes O(containers), with the volume of their cluster.
      - V(forgotten) removes what was set aside, with its volume, because the new version is proven (or the old one serves again). What was made
        beforehand and not started goes, too.
    type: str
    choices: [kept, launched, restored, started, removed, forgotten]
    required: true
  containers:
    description:
      - Containers, by the names that they have without O(service), in the order to stop or start them.
    type: list
    elements: str
    default: [spark-vllm, spark-ray]
  keep:
    description:
      - With O(state=kept), whether what runs is a version to come back to.
    type: bool
    default: false
  ask:
    description:
      - With O(state=kept) and O(keep=true), keep it only if its server answers on C(/health) and lists its model. For the node of the server.
    type: bool
    default: false
  launch:
    description:
      - With O(state=kept), start those of O(containers) that were made beforehand as soon as there is room for them.
    type: bool
    default: false
  restart:
    description:
      - With O(state=started), stop a container that runs first.
    type: bool
    default: false
  tmp_volume:
    description:
      - With O(state=kept), the volume of the Ray cluster that is to be launched. When what is written down holds it (the same settings again after an
        upgrade that was cut off or could not be rolled back), that is removed, because a new cluster needs a fresh one.
    type: str
    default: ""
  timeout:
    description:
      - Seconds that a container has to end by itself before it is killed.
    type: int
    default: 60
  record:
    description:
      - Where to write down what was set aside. The same file as that of M(dgxspark.serving.service_stop).
    type: path
    default: /var/lib/dgxspark-serving/stopped.json
  service:
    description:
      - Name of the service, as in C(spark_service). It ends the names of its containers, and that of O(record) as long as that is the default.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Make room for another version of the server
  dgxspark.serving.serving_previous:
    state: kept
    keep: true
    ask: true
    containers: [spark-vllm]

- name: Put the server that was made as spark-vllm-next in the place of the one that runs
  dgxspark.serving.serving_previous:
    state: kept
    keep: true
    ask: true
    launch: true
    containers: [spark-vllm]

- name: Make room for the previous version
  dgxspark.serving.serving_previous:
    state: restored

- name: The new one is proven
  dgxspark.serving.serving_previous:
    state: forgotten
"""

RETURN = r"""
actions:
  description: What was or would be done, in sentences.
  returned: always
  type: list
  elements: str
began:
  description: When the first running container was told to stop, in seconds since 1970 by the node's clock.
  returned: with O(state=kept), when one was stopped
  type: float
kept:
  description: Whether a previous version is written down on this node now.
  returned: always
  type: bool
launched:
  description: Names of the containers that were made beforehand and run now.
  returned: always
  type: list
  elements: str
own:
  description: The previous version on this node, by container name (C(id), C(started_at), and how it is reached).
  returned: always
  type: dict
intact:
  description: With O(state=restored), whether none of its containers was stopped meanwhile.
  returned: always
  type: bool
problem:
  description: Id, node, stage, found, expected and remedy of a failure.
  returned: failure
  type: dict
"""

import json
import time
import typing as t
import urllib.error
import urllib.request

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _previous, _record, _service, _tenants
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import Docker, DockerError
from ansible_collections.dgxspark.serving.plugins.module_utils._previous import NEXT, SUFFIX
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import bounded, timed_out

ANSWER = 10.0  # seconds; a busy server is slow, a dead one refuses at once
NAMES = _service.ROLES


def get(url: str) -> tuple[int, str]:
    """Status (0: no answer) and body of one GET without proxies."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=ANSWER) as answer:
            return answer.status, answer.read(1 << 20).decode("utf-8", "replace")
    except urllib.error.HTTPError as exc:
        return exc.code, ""
    except (OSError, ValueError):
        return 0, ""


def record_of(params: t.Mapping[str, t.Any]) -> str:
    """The record of this service, unless another one is named."""
    return _service.record(params["service"]) if params["record"] == _service.record() else str(params["record"])


class Previous:
    """The containers of ours on one node."""

    def __init__(
        self,
        params: dict[str, t.Any],
        docker: Docker,
        check_mode: bool,
        result: dict[str, t.Any],
        ask: t.Callable[[str], tuple[int, str]] = get,
    ) -> None:
        self.p = params
        self.docker = docker
        self.check_mode = check_mode
        self.result = result
        self.ask = ask
        self.path = record_of(params)
        self.stage = "rollback" if params["state"] in ("restored", "started") else "stop"
        self.record = _record.load(self.path, params["node"], self.stage) or {"stopped": []}
        self.own: dict[str, dict[str, t.Any]] = dict(self.record.get("own") or {})
        self.names = {role: _service.own(role, params["service"]) for role in NAMES}
        self.found = docker.inspect([name + ending for name in self.names.values() for ending in ("", SUFFIX, NEXT)])
        self.tell()

    def tell(self) -> None:
        self.result.update(own=self.own, kept=bool(self.own))

    def act(self, text: str) -> bool:
        """Note an action; whether it is really to be done."""
        self.result["actions"].append(text)
        self.result["changed"] = True
        return not self.check_mode

    def must(self, answer: tuple[int, str, str], what: str, ident: str = "stop-failed") -> None:
        rc, dummy, err = answer
        if rc:
            said = "it did not end in time" if timed_out(rc) else " ".join(err.split())[-300:] or f"code {rc}"
            raise Problem(
                ident,
                node=self.p["node"],
                stage=self.stage,
                found=f"docker would not {what}: {said}",
                expected=f"docker to {what}",
                remedy="see what 'journalctl -u docker' says on this node, and run again; what was stopped is written down and comes back when a run fails",
            )

    def ours(self, role: str, ending: str = "") -> dict[str, t.Any] | None:
        container = self.found.get(self.names[role] + ending)
        return container if container and _tenants.is_own(container) else None

    # -- kept

    def answers(self, container: t.Mapping[str, t.Any]) -> bool:
        """Whether this server can be come back to: it answers, with its own model."""
        entry = _previous.kept(container)
        if self.ask(entry["url"] + "/health")[0] != 200:
            return False
        status, body = self.ask(entry["url"] + "/v1/models")
        try:
            names = [str(model.get("id")) for model in _service.base_models(json.loads(body))]
        except ValueError:
            return False
        return status == 200 and names == [entry["served_model_name"]]

    def again(self) -> bool:
        """Whether what is written down is of the very cluster that is to be launched."""
        ids = {entry["id"] for entry in self.own.values()}
        return any(c["id"] in ids and self.p["tmp_volume"] in _previous.tmp_volumes(c) for c in self.found.values())

    def keep(self) -> None:
        if self.p["tmp_volume"] and self.again():
            self.forget()
        present = {name: self.ours(name) for name in NAMES}
        wanted = self.p["keep"] and not self.own and any(present.values())  # else what runs was launched after it and is not proven
        server = present["spark-vllm"]
        if wanted and self.p["ask"] and not self.check_mode:
            wanted = bool(server and server["running"] and self.answers(server))
        if wanted:
            self.own = {name: _previous.kept(c) for name, c in present.items() if c}
            if not self.check_mode:
                self.record = {**self.record, "node": self.p["node"], "own": self.own}
                _record.save(self.path, self.record)
            self.tell()
        for role in self.p["containers"]:
            container = present.get(role)
            if container is None:
                continue
            name = self.names[role]
            if container["running"] and not self.check_mode:
                self.result.setdefault("began", round(time.time(), 2))
            if self.own.get(role, {}).get("id") == container["id"]:
                if self.act(f"set container {name} aside"):
                    self.set_aside(role, container)
            elif self.act(f"remove container {name}"):
                self.remove(name, container)
        if self.p["launch"]:
            self.launch()

    def launch(self) -> None:
        """Start what was made beforehand, under its real name."""
        self.stage = "vllm"
        for role in self.p["containers"]:
            name = self.names[role]
            if not self.ours(role, NEXT):
                continue
            if self.act(f"start container {name}"):
                self.must(self.docker.rename(name + NEXT, name), f"rename container {name}{NEXT} to {name}", "launch-failed")
                self.must(self.docker.start(name), f"start container {name}", "launch-failed")
            self.result["launched"].append(name)

    def unmake(self) -> None:
        """Remove what was made beforehand and never started."""
        for role, name in self.names.items():
            if self.ours(role, NEXT) and self.act(f"remove container {name}{NEXT}"):
                self.must(self.docker.remove(name + NEXT), f"remove container {name}{NEXT}")

    def set_aside(self, role: str, container: t.Mapping[str, t.Any]) -> None:
        name = self.names[role]
        self.must(self.docker.stop(name, self.p["timeout"]), f"stop container {name}")
        left = self.ours(role, SUFFIX)
        if left and left["id"] != container["id"]:
            self.remove(name + SUFFIX, left)
        self.must(self.docker.rename(name, name + SUFFIX), f"rename container {name} to {name}{SUFFIX}")

    def remove(self, name: str, container: t.Mapping[str, t.Any]) -> None:
        if container["running"]:
            self.must(self.docker.stop(name, self.p["timeout"]), f"stop container {name}")
        self.must(self.docker.remove(name), f"remove container {name}")
        for volume in _previous.tmp_volumes(container):
            self.docker.remove_volume(volume)  # the last container of a cluster takes it along; Docker refuses before that

    # -- restored

    def restore(self) -> None:
        self.unmake()
        for role, name in self.names.items():
            container = self.ours(role)
            if container and container["id"] != self.own.get(role, {}).get("id") and self.act(f"remove container {name}"):
                self.remove(name, container)
        missing = []
        intact = True
        for role, entry in self.own.items():
            here, aside = self.ours(role), self.ours(role, SUFFIX)
            if here and here["id"] == entry["id"]:
                intact = intact and here["running"] and here["started_at"] == entry["started_at"]
            elif aside and aside["id"] == entry["id"]:
                intact = False
            else:
                missing.append(self.names[role])
        self.result["intact"] = intact
        if missing:
            raise Problem(
                "restore-failed",
                node=self.p["node"],
                stage=self.stage,
                found=f"the previous version's container {', '.join(missing)} is gone",
                expected="it to be there, stopped, until the new one is proven",
                remedy="run the playbook with the settings of the previous version",
            )

    # -- started, forgotten

    def start(self) -> None:
        for role in self.p["containers"]:
            name = self.names[role]
            aside, container = self.ours(role, SUFFIX), self.ours(role)
            back = container is None and aside is not None
            container = container or aside
            if container is None:
                raise Problem(
                    "restore-failed",
                    node=self.p["node"],
                    stage=self.stage,
                    found=f"no container {name}",
                    expected="the previous version's container",
                    remedy="run the playbook with the settings of the previous version",
                )
            if container["running"] and not self.p["restart"]:
                continue
            if self.act(f"start container {name}"):
                # The name last, so that whoever watches our containers never sees one that is down.
                if back:
                    self.must(self.docker.rename(name + SUFFIX, name), f"rename container {name}{SUFFIX}", "restore-failed")
                elif container["running"]:
                    self.must(self.docker.stop(name, self.p["timeout"]), f"stop container {name}")
                self.must(self.docker.start(name), f"start container {name}", "restore-failed")

    def clear(self) -> None:
        for role in self.p["containers"]:
            name, container = self.names[role], self.ours(role)
            if container and self.act(f"remove container {name}"):
                self.remove(name, container)

    def tidy(self) -> None:
        self.unmake()
        self.forget()

    def forget(self) -> None:
        for role, name in self.names.items():
            container = self.ours(role, SUFFIX)
            if container and self.act(f"remove container {name}{SUFFIX}"):
                self.remove(name + SUFFIX, container)
        if self.own:
            self.own = {}
            if self.act("forget the previous version"):
                _record.save(self.path, {key: value for key, value in self.record.items() if key != "own"})
        self.tell()


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["kept", "launched", "restored", "started", "removed", "forgotten"], "required": True},
            "containers": {"type": "list", "elements": "str", "default": list(NAMES)},
            "keep": {"type": "bool", "default": False},
            "ask": {"type": "bool", "default": False},
            "launch": {"type": "bool", "default": False},
            "restart": {"type": "bool", "default": False},
            "tmp_volume": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 60},
            "record": {"type": "path", "default": "/var/lib/dgxspark-serving/stopped.json"},
            "service": {"type": "str", "default": ""},
            "node": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    result: dict[str, t.Any] = {"changed": False, "actions": [], "kept": False, "own": {}, "intact": False, "launched": []}

    def fail(problem: Problem) -> None:
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **result)

    try:
        previous = Previous(params, Docker(bounded(module.run_command)), module.check_mode, result)
        {
            "kept": previous.keep,
            "launched": previous.launch,
            "restored": previous.restore,
            "started": previous.start,
            "removed": previous.clear,
            "forgotten": previous.tidy,
        }[params["state"]]()
    except Problem as exc:
        fail(exc)
    except DockerError as exc:
        fail(_record.no_docker(exc, params["node"], "stop"))
    except OSError as exc:
        fail(_record.unwritable(exc, record_of(params), params["node"], "stop"))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
