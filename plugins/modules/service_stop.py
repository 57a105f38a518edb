#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service_stop
short_description: Stop the services that were named, prove that they are gone, and bring them back
version_added: 0.1.0
description:
  - Stops the named containers, compose projects and systemd units that run on a node, each with the tool that it belongs to, waits
    until they are gone, and proves that
    O(ports) are free on every address and that their GPU processes ended.
  - What is not named is never stopped. When something else holds one of O(ports), it fails before it stops anything.
  - Everything that is needed to start it again is written to O(record) before each stop, so that an interrupted run loses nothing.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details:
      - Says what would be stopped or started; whether it then really ends in time cannot be known.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  state:
    description:
      - V(stopped) stops what runs of the named services.
      - V(restored) starts again what O(record) names, waits until it listens as it did before, and removes the record.
      - V(forgotten) adds the record to C(stopped.last.json) beside it, because the new service is proven, and sees to it that the old one does not
        start at the next boot (a container with the restart policy C(always), an enabled unit). V(restored) puts that back.
    type: str
    choices: [stopped, restored, forgotten]
    default: stopped
  containers:
    description:
      - Names of containers. One that does not exist or does not run is fine.
    type: list
    elements: str
    default: []
  units:
    description:
      - Names of systemd units, with or without C(.service); C(user/name) for one of a user's own systemd. They are stopped; V(forgotten) also
        disables those that were enabled.
    type: list
    elements: str
    default: []
  compose_projects:
    description:
      - Names of compose projects.
    type: list
    elements: str
    default: []
  ports:
    description:
      - TCP ports that must be free on every address afterwards. A port that a container of this collection holds counts as free.
    type: list
    elements: int
    default: []
  accept_no_rollback:
    description:
      - Stop also what cannot be started again. Without it such a service is refused before anything is stopped.
    type: bool
    default: false
  timeout:
    description:
      - Seconds that a service has to end by itself before it is killed.
    type: int
    default: 60
  start_timeout:
    description:
      - With O(state=restored), seconds until what was started must listen again. A model that has to be loaded may need many minutes.
    type: int
    default: 900
  record:
    description:
      - Where to write down what was stopped. Kept readable for root only.
    type: path
    default: /var/lib/dgxspark-serving/stopped.json
  service:
    description:
      - Name of the service, as in C(spark_service). It ends the name of O(record) as long as that is the default. Another
        service is nothing to stop and nothing to refuse.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Stop the old service
  dgxspark.serving.service_stop:
    containers: [sglang_node]
    units: [ollama]
    ports: [30000]

- name: Bring it back
  dgxspark.serving.service_stop:
    state: restored

- name: Forget it, the new one is proven
  dgxspark.serving.service_stop:
    state: forgotten
"""

RETURN = r"""
actions:
  description: What was or would be done, in sentences.
  returned: always
  type: list
  elements: str
stopped:
  description: What was or would be stopped.
  returned: with O(state=stopped)
  type: list
  elements: dict
began:
  description: When the first of it was told to stop, in seconds since 1970 by the node's clock.
  returned: with O(state=stopped), when something was stopped
  type: float
restored:
  description: What was or would be started again.
  returned: with O(state=restored)
  type: list
  elements: dict
record:
  description: The record as it is now; V(none) when there is none.
  returned: always
  type: dict
memory:
  description: Available memory in bytes.
  returned: always
  type: dict
  contains:
    before:
      description: Before the module did anything.
      type: int
    after:
      description: When it was done.
      type: int
warnings_list:
  description: What is worth knowing, such as data that a container takes along that removes itself.
  returned: always
  type: list
  elements: str
elapsed:
  description: Seconds of the whole run.
  returned: always
  type: float
problem:
  description: Id, node, stage, found, expected and remedy of a failure.
  returned: failure
  type: dict
"""

import json
import os
import re
import signal
import tempfile
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _comeback, _containers, _diagnosis, _record, _service, _tenants
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import Docker, DockerError
from ansible_collections.dgxspark.serving.plugins.module_utils._docker_api import SOCKET, DockerApi
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._record import read_text
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import Run, bounded, clock, timed_out

SETTLED = 10.0  # seconds that a process must have lived to be taken for a service


class Node:
    """What runs and listens on this node now, in the shape of node_info (only what is needed here)."""

    def __init__(
        self,
        run: Run,
        read: t.Callable[[str], str] = read_text,
        kill: t.Callable[[int, int], None] = os.kill,
        api: t.Callable[..., tuple[int, t.Any]] = DockerApi(SOCKET).call,
        link: t.Callable[[str], str] = os.readlink,
    ) -> None:
        self.run = run
        self.read = read
        self.kill = kill
        self.api = api
        self.link = link
        self.docker = Docker(run)

    def observe(self, units: t.Sequence[str], all_containers: bool = True) -> dict[str, t.Any]:
        containers = self._containers() if all_containers else []
        by_id = {c["id"]: c["name"] for c in containers}
        listeners = []
        for entry in self.listeners():
            owner, unit = self.owner(entry["pid"])
            listeners.append(
                {
                    **entry,
                    "container": by_id.get(owner or ""),
                    "unit": None if by_id.get(owner or "") else unit,
                    "user": self.user(entry["pid"]),
                }
            )
        shown = self.units(units)
        return {
            "containers": containers,
            "listeners": listeners,
            "unit_states": {name: values.get("ActiveState", "") for name, values in shown.items()},
            "unit_enabled": {name: values.get("UnitFileState", "") for name, values in shown.items()},
        }

    def _containers(self) -> list[dict[str, t.Any]]:
        try:
            return self.docker.all()
        except DockerError as exc:
            if "is not there" in str(exc):
                return []
            raise

    def listeners(self) -> list[dict[str, t.Any]]:
        dummy, out, dummy2 = self.run(["ss", "-H", "-t", "-l", "-n", "-p"], timeout=10)
        return _containers.parse_ss(out)

    def owner(self, pid: int | None) -> tuple[str | None, str | None]:
        if not pid:
            return None, None
        text = self.read(f"/proc/{pid}/cgroup")
        own = _containers.user_unit_of_cgroup(text)
        return (None, f"{self.user_name(str(own[0]))}/{own[1]}") if own else _containers.owner_of_cgroup(text)

    def user(self, pid: int | None) -> str | None:
        found = re.search(r"^Uid:\s+(\d+)", self.read(f"/proc/{pid}/status"), re.MULTILINE) if pid else None
        return self.user_name(found.group(1)) if found else None

    def user_name(self, uid: str) -> str:
        for line in self.read("/etc/passwd").splitlines():
            fields = line.split(":")
            if len(fields) > 2 and fields[2] == uid:
                return fields[0]
        return uid

    def units(self, names: t.Sequence[str]) -> dict[str, dict[str, str]]:
        """The named units that exist, by name; ``user/unit`` is one of a user's own systemd."""
        result: dict[str, dict[str, str]] = {}
        for user, wanted in _tenants.units_by_user(names).items():
            argv = [*_tenants.systemctl(user), "show", "-p", "Id,LoadState,ActiveState,UnitFileState", "--", *wanted]
            out = self.run(argv, timeout=15)[1]
            result.update({f"{user}/{name}" if user else name: values for name, values in _tenants.parse_units(out).items()})
        return result

    @staticmethod
    def systemctl(unit: str, verb: str) -> list[str]:
        """The command that does this to a unit."""
        user, names = next(iter(_tenants.units_by_user([unit]).items()))
        return [*_tenants.systemctl(user), verb, "--", *names]

    def gpu_pids(self, items: t.Sequence[t.Mapping[str, t.Any]], containers: t.Sequence[t.Mapping[str, t.Any]]) -> dict[int, str]:
        """The GPU processes that belong to what will be stopped: {pid: name}."""
        rc, out, dummy = self.run(
            ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"], timeout=20
        )
        if rc != 0 or not items:
            return {}
        names = {name for item in items for name in item["containers"]}
        ids = {c["id"] for c in containers if c["name"] in names}
        units = {item["name"] for item in items if item["kind"] == "unit"}
        result = {}
        for process in _containers.parse_gpu_processes(out):
            container, unit = self.owner(process["pid"])
            if container in ids or unit in units:
                result[process["pid"]] = process["name"]
        return result

    def by_hand(self, container: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
        """What was started in a container with ``docker exec``, so that it can be started again: {argv, user, cwd, env, pid} of each."""
        roots = self.left_by_hand(container)
        config = (self.raw(container["name"]).get("Config") or {}) if roots else {}
        own = [str(word) for word in config.get("Env") or []]
        entries = []
        for pid in roots:
            # Docker's health check and a monitor's question are run in the same way; they do not stay.
            if (
                self.argv(pid) == _comeback.health_check(config)
                or _comeback.age(self.read(f"/proc/{pid}/stat"), self.read("/proc/uptime")) < SETTLED
            ):
                continue
            ids = [re.search(rf"^{key}:\s+(\d+)", self.read(f"/proc/{pid}/status"), re.MULTILINE) for key in ("Uid", "Gid")]
            try:
                cwd = self.link(f"/proc/{pid}/cwd")
            except OSError:
                cwd = "/"
            user = ":".join(found[1] for found in ids if found)
            env = _comeback.environment(self.read(f"/proc/{pid}/environ"), own)
            entries.append({"pid": pid, "argv": self.argv(pid), "user": user or "0", "cwd": cwd, "env": env})
        return entries

    def left_by_hand(self, container: t.Mapping[str, t.Any]) -> list[int]:
        """The processes of a container that its own command did not start."""
        rc, out, dummy = self.run(["docker", "top", container["name"], "-eo", "pid,ppid"], timeout=20)
        parents = _comeback.parse_top(out) if rc == 0 else {}
        return _comeback.started_by_hand(parents, container["pid"], _comeback.idle(container.get("command") or []), self.argv)

    def argv(self, pid: int) -> list[str]:
        return self.read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")

    def raw(self, name: str) -> dict[str, t.Any]:
        """All that ``docker inspect`` says of one container; {} when it is not there."""
        rc, out, dummy = self.run(["docker", "container", "inspect", name], timeout=30)
        return dict(json.loads(out)[0]) if rc == 0 else {}

    def memory(self) -> int:
        """MemAvailable in bytes (0 when it is not known)."""
        found = re.search(r"^MemAvailable:\s+(\d+) kB", self.read("/proc/meminfo"), re.MULTILINE)
        return int(found.group(1)) * 1024 if found else 0


def stage_of(params: dict[str, t.Any]) -> str:
    return "stop" if params["state"] == "stopped" else "restore"


class Service:
    def __init__(self, params: dict[str, t.Any], node: Node, check_mode: bool, result: dict[str, t.Any]) -> None:
        self.p = params
        self.node = node
        self.check_mode = check_mode
        self.result = result
        self.stage = stage_of(params)
        self.record = _record.load(params["record"], params["node"], self.stage, node.read)
        result["record"] = _comeback.public_record(self.record)

    # -- the record

    def save(self, record: dict[str, t.Any]) -> None:
        self.record = record
        self.result["record"] = _comeback.public_record(record)
        if not self.check_mode:
            _record.save(self.p["record"], record)

    def problem(self, ident: str, found: str, expected: str, remedy: str, **details: t.Any) -> Problem:
        return Problem(
            ident,
            node=self.p["node"],
            stage=self.stage,
            found=found,
            expected=expected,
            remedy=remedy,
            **details,
        )

    # -- stopped

    def _look(self) -> tuple[dict[str, t.Any], dict[str, list[str]]]:
        """What the node has now, and what may be stopped of it: a unit also by systemd's own name for it, where it was given by an alias."""
        seen = self.node.observe(self.p["units"])
        wanted = {key: list(self.p[key]) for key in ("containers", "units", "compose_projects")}
        wanted["units"] += seen["unit_states"]
        return seen, wanted

    def stop(self) -> None:
        seen, wanted = self._look()
        refused = _tenants.refusal(
            [c for c in _tenants.claims(seen, wanted, self.p["ports"], service=self.p["service"]) if c["ports"]], self.p["node"], "stop"
        )
        if refused:
            raise refused
        items = _tenants.stop_plan(seen, wanted)
        self.result["diff"] = _diff(items, "running", "stopped")
        for item in items:
            self._way_back(item, {c["name"]: c for c in seen["containers"]})
        self.result["stopped"] = [_comeback.public(item) for item in items]
        if not items:
            return
        self.result["changed"] = True
        pids = self.node.gpu_pids(items, seen["containers"])
        if not self.check_mode:
            self.result["began"] = round(time.time(), 2)
        for item in items:
            self._stop_one(item)
        if not self.check_mode:
            self._prove(items, pids)
            if self.record:
                self.save({**self.record, "memory_after": self.node.memory()})

    def _way_back(self, item: dict[str, t.Any], containers: t.Mapping[str, t.Mapping[str, t.Any]]) -> None:
        """Add to an entry what "start" alone would not bring back; refused when that cannot be known."""
        lost = []
        for name in item["containers"]:
            container = containers[name]
            entries = self.node.by_hand(container)
            lost += [f"process {e['pid']} in container {name}, which its own command did not start" for e in entries if not e["argv"][0]]
            if any(e["argv"][0] for e in entries):
                item.setdefault("by_hand", {})[name] = [e for e in entries if e["argv"][0]]
            if container["auto_remove"]:
                item.setdefault("definitions", {})[name] = _comeback.definition(self.node.raw(name))
                for place in _comeback.nameless_volumes(self.node.raw(name)):
                    self.result["warnings_list"].append(
                        f"container {name} removes itself when it stops (--rm), and what it has in {place} with it"
                    )
        if lost and not self.p["accept_no_rollback"]:
            raise self.problem(
                "stop-for-good",
                f"{', '.join(lost)}, and whose command cannot be read",
                "a service that can be started again when the new one fails",
                "let the play use sudo (spark_become: true), or set accept_no_rollback: true in spark_stop",
            )
        if lost:
            item["lost"] = lost
        for text in lost:
            self.result["warnings_list"].append(f"{text}: it cannot be brought back")

    def _end_by_hand(self, entries: t.Sequence[t.Mapping[str, t.Any]]) -> None:
        """TERM what was started by hand, and wait: an idle main process ends without telling it."""
        for entry in entries:
            try:
                self.node.kill(entry["pid"], signal.SIGTERM)
            except OSError:  # it ended meanwhile
                continue
        for dummy in clock(self.p["timeout"], 0.3):
            if not any(self.node.argv(entry["pid"])[0] for entry in entries):
                return

    def _stop_one(self, item: dict[str, t.Any]) -> None:
        places = ", ".join(_tenants.where(p["address"], p["port"]) for p in item["ports"])
        self.result["actions"].append(f"stop {item['kind'].replace('_', ' ')} {item['name']}{f' ({places})' if places else ''}")
        if self.check_mode:
            return
        entry = {**item, "stopped_at": round(time.time(), 1), "memory_before": self.node.memory()}
        before = (self.record or {}).get("memory_before") or entry["memory_before"]
        self.save(_tenants.merge_record(self.record, entry, node=self.p["node"], memory_before=before))
        grace = self.p["timeout"]
        if item["kind"] == "unit":
            rc, dummy, err = self.node.run(self.node.systemctl(item["name"], "stop"), timeout=grace + 60)
        elif item["kind"] == "compose_project" and self._compose(
            "stop", item["name"], "-t", str(grace), timeout=grace + 60, members=item["containers"]
        ):
            return
        else:
            rc, err = 0, ""
            for name in item["containers"]:
                by_hand = item.get("by_hand", {}).get(name, [])
                self._end_by_hand(by_hand)
                rc, dummy, err = self.node.docker.stop(name, 2 if by_hand else grace)
                if rc and _containers.NO_SUCH.search(err):
                    rc = 0
                if rc:
                    break
        if rc:
            what = f"{item['kind'].replace('_', ' ')} {item['name']}"
            said = "it did not end in time" if timed_out(rc) else " ".join(err.split())[-300:] or f"code {rc}"
            raise self.problem(
                "stop-failed", f"{what} would not stop: {said}", f"it to end within {grace} s", "stop it by hand and run again", rc=rc
            )

    def _compose(self, verb: str, project: str, *args: str, timeout: float, members: t.Sequence[str] = ()) -> bool:
        """``docker compose`` where it is there; False: the containers of the project have to be handled one by one."""
        rc, dummy, dummy2 = self.node.docker.stopping(
            members, lambda: self.node.run(["docker", "compose", "-p", project, verb, *args], timeout=timeout)
        )
        return rc == 0

    def _prove(self, items: list[dict[str, t.Any]], pids: dict[int, str]) -> None:
        """Wait until nothing of it runs, the ports are free on every address and its GPU processes ended."""
        left: list[dict[str, t.Any]] = []
        held: list[dict[str, t.Any]] = []
        alive: dict[int, str] = {}
        for dummy in clock(self.p["timeout"] + 15, 0.3):
            seen, wanted = self._look()
            left = _tenants.stop_plan(seen, wanted)
            for item in left:  # a member that compose left running, or that came up meanwhile
                for name in item["containers"]:
                    self.node.docker.stop(name, self.p["timeout"])
            held = [
                c for c in _tenants.claims(seen, wanted, self.p["ports"], service=self.p["service"]) if c["ports"] and c["action"] != "ours"
            ]
            alive = {pid: name for pid, name in pids.items() if self.node.read(f"/proc/{pid}/cgroup")}
            if not left and not held and not alive:
                return
        if left:
            names = ", ".join(f"{i['kind'].replace('_', ' ')} {i['name']}" for i in left)
            raise self.problem(
                "stop-failed",
                f"{names} still runs, or came back",
                "it to stay stopped",
                "find what starts it again (a unit, a cron job, another tool) and name that in spark_stop",
            )
        if held:
            text = "; ".join(_tenants.describe(c) for c in held)
            raise self.problem(
                "port-held",
                f"still {text}",
                "the ports to be free on every address",
                "stop it by hand, or name it in spark_stop",
                claims=held,
            )
        names = ", ".join(f"{name} (pid {pid})" for pid, name in alive.items())
        raise self.problem(
            "gpu-held",
            f"GPU process {names} still runs",
            "it to end with its service",
            "end it by hand; a reboot frees what a dead process leaked",
        )

    # -- restored

    def restore(self) -> None:
        record = self.record
        items = list(reversed((record or {}).get("stopped", [])))
        self.result["restored"] = [_comeback.public(item) for item in items]
        self.result["diff"] = _diff(items, "stopped", "running")
        if record is None or not items:
            return
        self.result["changed"] = True
        problems = []
        for item in items:
            self.result["actions"].append(f"start {item['kind'].replace('_', ' ')} {item['name']}")
            if self.check_mode:
                continue
            try:
                self._start_one(item)
            except Problem as problem:
                problems.append(problem)
        if not self.check_mode:
            for item in items:
                if not any(p.details.get("item") == item["name"] for p in problems):
                    try:
                        self._await(item)
                    except Problem as problem:
                        problems.append(problem)
            if problems:
                others = "; ".join(p.found for p in problems[1:])
                first = problems[0]
                raise self.problem(
                    first.id, first.found + (f"; also {others}" if others else ""), first.expected, first.remedy, **first.details
                )
        self.save({**record, "stopped": []})
        self._nothing_left()

    def _nothing_left(self) -> None:
        """The record as it is: gone, unless our own previous version is still in it (serving_previous)."""
        if not (self.record or {}).get("own"):
            self.record = self.result["record"] = None

    def _start_one(self, item: dict[str, t.Any]) -> None:
        if item["kind"] == "unit":
            if item.get("enabled") == "enabled":
                self._boot(item, self.node.systemctl(item["name"], "enable"))
            rc, dummy, err = self.node.run(self.node.systemctl(item["name"], "start"), timeout=self.p["start_timeout"])
        else:
            if item["kind"] == "compose_project":
                self._compose("start", item["name"], timeout=120)  # in its own order; what is left to do is that of any container
            rc, err = 0, ""
            for name in reversed(item["containers"]):
                self._create_again(item, name)
                if item.get("restart_policy", {}).get(name) == "always":
                    self._boot(item, ["docker", "update", "--restart=always", name])
                rc, dummy, err = self.node.docker.start(name)  # Docker says yes to one that runs
                rc, err = (rc, err) if rc else self._by_hand_again(item, name)
                if rc:
                    break
        if rc:
            raise self._not_back(item, " ".join(err.split())[-300:] or f"code {rc}")

    def _create_again(self, item: dict[str, t.Any], name: str) -> None:
        """Make a container again that removed itself."""
        body = (item.get("definitions") or {}).get(name)
        if not body or self.node.docker.inspect([name]):
            return
        status, answer = self.node.api("POST", f"/containers/create?name={name}", body)
        if status != 201:
            said = answer.get("message") if isinstance(answer, dict) else answer
            raise self._not_back(item, f"Docker would not make container {name} again: {said}")

    def _by_hand_again(self, item: dict[str, t.Any], name: str) -> tuple[int, str]:
        """Run again what had been run with ``docker exec``. The environment goes through a file that is there for this moment."""
        entries = (item.get("by_hand") or {}).get(name, [])
        if entries and self.node.left_by_hand(self.node.docker.inspect([name])[name]):
            return 0, ""  # a second try to restore finds it running
        for entry in entries:
            handle, path = tempfile.mkstemp(prefix=".env.", dir=os.path.dirname(self.p["record"]))
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    stream.writelines(f"{key}={value}\n" for key, value in entry["env"].items())
                rc, dummy, err = self.node.run(_comeback.exec_argv(name, entry, path), timeout=60)
            finally:
                os.unlink(path)
            if rc:
                return rc, err
        return 0, ""

    def _await(self, item: dict[str, t.Any]) -> None:
        """Wait until it listens as it did; a container or unit that ended meanwhile fails at once."""
        if item.get("lost"):
            raise self._not_back(item, f"{', '.join(item['lost'])}: start it by hand")
        missing: list[str] = []
        for looks, dummy in enumerate(clock(self.p["start_timeout"], 0.5), 1):
            found = self.node.docker.inspect(item["containers"]) if item["containers"] else {}
            for name in item["containers"]:
                container = found.get(name)
                if container is None or not container["running"]:
                    text = "is not there" if container is None else _containers.exit_text(container)
                    raise self._not_back(item, f"container {name} {text}")
                if (item.get("by_hand") or {}).get(name) and not self.node.left_by_hand(container):
                    raise self._not_back(item, f"what was run in container {name} with docker exec ended at once")
            if item["kind"] == "unit":
                state = self.node.units([item["name"]]).get(item["name"], {}).get("ActiveState", "not there")
                if state not in _tenants.ACTIVE_UNIT_STATES:
                    raise self._not_back(item, f"the unit is {state}")
            missing = _tenants.not_listening(item.get("ports", []), self.node.listeners())
            if not missing and (item.get("ports") or looks >= 3):
                return
        raise self._not_back(item, f"nothing listens on {', '.join(missing)} after {self.p['start_timeout']} s")

    def _not_back(self, item: dict[str, t.Any], why: str) -> Problem:
        if item["kind"] == "unit":
            unit = item["name"].rpartition("/")
            which = ["_SYSTEMD_USER_UNIT=" + unit[2]] if unit[0] else ["-u", unit[2]]
            log = self.node.run(["journalctl", *which, "-n", "20", "--no-pager", "-o", "cat"], timeout=15)[1]
        else:
            log = "\n".join(self.node.docker.log_text(name, tail=20, timestamps=False) for name in item["containers"])
        tail = _diagnosis.last_lines(log)
        found = f"{item['kind'].replace('_', ' ')} {item['name']} did not come back: {why}" + (f"; last lines: {tail}" if tail else "")
        return self.problem(
            "restore-failed",
            found,
            "it to run and listen as it did before it was stopped",
            "start it by hand; the record is kept",
            item=item["name"],
        )

    # -- forgotten

    def _not_at_boot(self) -> None:
        """The old service must not take the GPU back at the next boot; the record says how it was, and restoring puts it back."""
        for item in (self.record or {})["stopped"]:
            for name, policy in item.get("restart_policy", {}).items():
                if policy == "always" and self._act(f"set the restart policy of container {name} to no, it was always"):
                    self._boot(item, ["docker", "update", "--restart=no", name])
            if item["kind"] == "unit" and item.get("enabled") == "enabled" and self._act(f"disable unit {item['name']}"):
                self._boot(item, self.node.systemctl(item["name"], "disable"))

    def _act(self, text: str) -> bool:
        self.result["actions"].append(text)
        return not self.check_mode

    def _boot(self, item: t.Mapping[str, t.Any], argv: list[str]) -> None:
        rc, dummy, err = self.node.run(argv, timeout=60)
        if rc and not _containers.NO_SUCH.search(err):
            self.result["warnings_list"].append(
                f"{item['kind']} {item['name']} will start at the next boot: {' '.join(err.split())[-200:]}"
            )

    def _earlier(self, last: str) -> dict[str, t.Any] | None:
        """What was forgotten before. One that cannot be read is kept beside it: the new service is proven, and must not end for a note."""
        try:
            return _record.load(last, self.p["node"], self.stage, self.node.read)
        except Problem as problem:
            self.result["warnings_list"].append(f"{problem.found}; it is kept as {last}.broken, and what it named must be started by hand")
            if not self.check_mode:
                os.replace(last, f"{last}.broken")
        return None

    def forget(self) -> None:
        if self.record is None or not self.record["stopped"]:
            return
        last = re.sub(r"(\.json)?$", r".last.json", self.p["record"], count=1)
        earlier = self._earlier(last)
        self.result["changed"] = True
        self.result["actions"].append(f"keep the record of what was stopped as {last}")
        self.result["diff"] = {"before": f"{self.p['record']}\n", "after": f"{last}\n"}
        self._not_at_boot()
        if not self.check_mode:
            _record.save(last, _tenants.remembered(earlier, self.record))
        self.save({**self.record, "stopped": []})
        self._nothing_left()


def _diff(items: t.Sequence[t.Mapping[str, t.Any]], before: str, after: str) -> dict[str, str]:
    def text(state: str) -> str:
        return "".join(f"{item['kind']} {item['name']}: {state}\n" for item in items)

    return {"before": text(before), "after": text(after)}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["stopped", "restored", "forgotten"], "default": "stopped"},
            "containers": {"type": "list", "elements": "str", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "compose_projects": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "accept_no_rollback": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 60},
            "start_timeout": {"type": "int", "default": 900},
            "record": {"type": "path", "default": "/var/lib/dgxspark-serving/stopped.json"},
            "service": {"type": "str", "default": ""},
            "node": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    if module.params["record"] == _service.record():
        module.params["record"] = _service.record(module.params["service"])
    started = time.monotonic()
    node = Node(bounded(module.run_command))
    memory = node.memory()
    result: dict[str, t.Any] = {
        "changed": False,
        "actions": [],
        "warnings_list": [],
        "record": None,
        "memory": {"before": memory, "after": memory},
    }

    def fail(problem: Problem) -> None:
        result["elapsed"] = round(time.monotonic() - started, 2)
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **result)

    try:
        service = Service(module.params, node, module.check_mode, result)
        {"stopped": service.stop, "restored": service.restore, "forgotten": service.forget}[module.params["state"]]()
    except Problem as exc:
        fail(exc)
    except DockerError as exc:
        fail(_record.no_docker(exc, module.params["node"], stage_of(module.params)))
    except OSError as exc:
        fail(_record.unwritable(exc, module.params["record"], module.params["node"], stage_of(module.params)))
    result["memory"]["after"] = node.memory()
    result["elapsed"] = round(time.monotonic() - started, 2)
    for warning in result["warnings_list"]:
        module.warn(warning)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
