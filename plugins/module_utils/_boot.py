# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gang after a boot: what the systemd unit of a node does, and the files that it needs.

PRIVATE to the collection. The module boot_unit puts this file and the few it needs on the node (see _boot_files); there C(main) is what the unit
runs, with the node's own Python and nothing installed. Everything it asks (Docker, HTTP, the clock) comes through C(Node).

What it keeps to: containers are started as they were made, never made anew; a start is tried a few times and never for ever; a server that
ended by itself while its whole gang was there stays down (starting it again could end in the same way and leak unified memory each time).
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import typing as t
import urllib.parse
import uuid

from ansible_collections.dgxspark.serving.plugins.module_utils import _calls, _diagnosis, _ray, _service
from ansible_collections.dgxspark.serving.plugins.module_utils._boot_files import Paths
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import Docker, DockerError, exit_text
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import bounded

DEFINITION = "dgxspark.serving.definition"

# Seconds and numbers of tries.
LOOK = 5.0
SECOND_LOOK = 3.0
SAME_LOOKS = 14  # 70 s: Ray declares a silent node dead well within a minute
RANK_GRACE = 75.0  # a playbook stops the head's server first; this rank then ends by itself, before the playbook takes it away
ATTEMPTS = 3
PROOF = 60.0  # a gang of mp that looks broken is stopped only when it produces no token within this time
GOOD = 3600.0  # after so long of service an earlier failure does not count any more


class Down(Exception):
    """The service stays down; the text is the reason."""


# --- what is asked ---------------------------------------------------------------------------------------------------------------


class Node:
    """This machine: Docker, sockets, HTTP, the clock, and systemd that is told how far it is."""

    def __init__(self) -> None:
        self.docker = Docker(bounded(run_command))
        self.listener: _calls.Listener | None = None

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def tell(self, text: str) -> None:
        """One line for ``systemctl status`` and the journal."""
        say(text)
        notify(f"STATUS={text}")

    def has_address(self, address: str) -> bool:
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                return False
        return True

    def listens(self, address: str, port: int) -> bool:
        try:
            socket.create_connection((address, port), timeout=3).close()
        except OSError:
            return False
        return True

    call = staticmethod(_calls.call)

    def attend(self, place: tuple[str, int, str], seconds: float, state: t.Callable[[], t.Mapping[str, t.Any]]) -> bool:
        """Sleep, and answer the head's unit meanwhile; True when it says that the ranks start now. ``place``: own address, port, the head's address."""
        if self.listener is None:
            self.listener = _calls.Listener(*place)
        return self.listener.attend(seconds, state)

    def table(self, container: str, address: str) -> dict[str, t.Any]:
        """Ray's node table (see _ray)."""
        argv = ["docker", "exec", "-i", container, "python3", "-", address, "20"]
        return _ray.parse(*self.docker.run(argv, timeout=25, data=_ray.PROGRAM))

    def empty_tmp(self, container: str) -> None:
        """What an ended Ray left in its /tmp: sockets of processes that are no more, and the address of a cluster that is gone."""
        rc, out, err = self.docker.run(
            [
                "docker",
                "container",
                "inspect",
                "--format",
                '{{range .Mounts}}{{if eq .Destination "/tmp"}}{{.Source}}{{end}}{{end}}',
                container,
            ],
            timeout=30,
        )
        folder = out.strip()
        if rc or not os.path.isabs(folder) or "/volumes/" not in folder:
            raise Down(f"the /tmp of {container} is not a volume ({folder or err.strip()})")
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)

    def answers(self, url: str, model: str, patience: float = 300) -> bool:
        """Whether the server produces a token now, within so many seconds."""
        body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0})
        # 401: a key protects it, and this program has none. 400 and 404: a model without plain completions.
        return self._http(url, "/health") == 200 and self._http(url, "/v1/completions", body, patience) in (200, 400, 401, 404)

    @staticmethod
    def _http(url: str, path: str, body: str | None = None, patience: float = 10) -> int:
        """The status of one request to this node, without proxies; 0 without an answer."""
        target = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=patience)
        try:
            connection.request("POST" if body else "GET", path, body, {"Content-Type": "application/json"} if body else {})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


def run_command(argv: t.Sequence[str], data: str | None = None, binary_data: bool = True) -> tuple[int, str, str]:
    """As AnsibleModule.run_command."""
    del binary_data
    try:
        done = subprocess.run(list(argv), input=data, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        return 127, "", f"{argv[0]}: command not found"
    return done.returncode, done.stdout, done.stderr


def say(text: str) -> None:
    """A line for the journal."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def notify(text: str) -> None:
    """sd_notify(3) without a library."""
    target = os.environ.get("NOTIFY_SOCKET", "")
    if not target:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect("\0" + target[1:] if target.startswith("@") else target)
            sock.sendall(text.encode())
        except OSError:
            pass


# --- the gang --------------------------------------------------------------------------------------------------------------------


class Gang:
    """One node's part in bringing the gang up and watching it."""

    def __init__(self, gang: t.Mapping[str, t.Any], node: t.Any) -> None:
        self.gang = gang
        self.node = node
        service = str(gang.get("service") or "")
        self.ray, self.vllm = _service.own(_service.RAY, service), _service.own(_service.VLLM, service)
        self.unit = Paths(service).unit_name
        self.own = [name for name in (self.ray, self.vllm) if name in gang["containers"]]
        self.starts: dict[str, int] = {}
        self.members: frozenset[tuple[str, str]] = frozenset()
        # Executor mp: the units talk to each other.
        self.mp = gang["executor"] != "ray"
        self.this_start = uuid.uuid4().hex
        self.partners = _calls.Partners([a for a in gang["addresses"] if a != gang["address"]], SAME_LOOKS)
        self.ready = False  # a worker's: its rank runs, or may be started when the head says so
        self.told_to_start = False

    def run(self) -> int:
        """Until the service stays down for a reason (then 1)."""
        try:
            self.until(self.docker_answers, 300, lambda: "Docker does not answer")
            self.until(
                lambda: self.node.has_address(self.gang["address"]), self.gang["wait"], lambda: f"no interface has {self.gang['address']}"
            )
            while True:
                try:
                    self.bring_up()
                    self.watch()
                except DockerError as exc:  # Docker is restarted, or slow under load
                    self.node.tell(f"waits: {exc}")
                    self.node.sleep(LOOK)
                    self.until(self.docker_answers, 300, lambda: "Docker does not answer")
        except Down as reason:
            self.node.tell(f"down: {reason}")
            return 1

    # -- looking

    def docker_answers(self) -> bool:
        try:
            self.node.docker.inspect(self.own)
        except DockerError:
            return False
        return True

    def containers(self) -> dict[str, dict[str, t.Any]]:
        """Our containers that are there, made as this gang says. One of another making is not ours to start."""
        found = self.node.docker.inspect(self.own)
        return {n: c for n, c in found.items() if c["labels"].get(DEFINITION) == self.gang["containers"][n]}

    def ended(self, name: str, container: t.Mapping[str, t.Any]) -> str:
        """Why a container is not running, with the cause that its log tells."""
        cause = _diagnosis.best(_diagnosis.scan(self.node.docker.log_text(name, tail=400, timestamps=False).splitlines()))
        why = f": {_diagnosis.sentence(cause)}. Remedy: {cause['remedy']}" if cause else ""
        return f"{name} {exit_text(container)}{why}"

    def still_there(self, name: str) -> None:
        found = self.node.docker.inspect([name]).get(name)
        if found is not None and not found["running"]:
            raise Down(self.ended(name, found))

    def table(self) -> dict[str, t.Any]:
        return dict(self.node.table(self.ray, f"{self.gang['head_address']}:{self.gang['ray_port']}"))

    # -- waiting

    def until(self, done: t.Callable[[], bool], limit: float, what: t.Callable[[], str]) -> None:
        """Wait until ``done``; Down after ``limit`` seconds. ``what`` says what is missing."""
        begin = self.node.now()
        told = -1e9
        while not done():
            waited = self.node.now() - begin
            if waited >= limit:
                raise Down(f"{what()}, for {waited:.0f} s")
            if waited - told >= 30:
                self.node.tell(f"waits: {what()} ({waited:.0f} of {limit:.0f} s)")
                told = waited
            self.pause(2.0)

    def pause(self, seconds: float) -> None:
        """Sleep; a worker of mp answers the head's unit meanwhile."""
        if not self.mp or self.gang["head"]:
            self.node.sleep(seconds)
        elif self.node.attend((self.gang["address"], self.gang["mp_port"], self.gang["head_address"]), seconds, self.own_state):
            self.told_to_start = True

    def own_state(self) -> dict[str, t.Any]:
        """What a worker of mp answers."""
        try:
            rank = self.containers().get(self.vllm)
        except DockerError:
            rank = None
        running = bool(rank and rank["running"])
        return {
            "unit": self.this_start,
            "rank": f"{rank['id']} {rank['started_at']}" if rank and running else "",
            "ready": rank is not None and (running or self.ready),
        }

    def stand_by(self) -> dict[str, dict[str, t.Any]]:
        """Our containers, all of them. Without them (taken away by a playbook, never launched) it waits: that is no failure."""
        told = ""
        while True:
            found = self.containers()
            missing = ", ".join(name for name in self.own if name not in found)
            if not missing:
                return found
            if told != missing:
                self.node.tell(f"stands by: no {missing} of this definition on this node")
                told = missing
            self.pause(LOOK)

    # -- starting

    def start(self, name: str) -> None:
        count = self.starts[name] = self.starts.get(name, 0) + 1
        if count > ATTEMPTS:
            raise Down(f"{name} was started {ATTEMPTS} times; see journalctl -u {self.unit} and docker logs {name}")
        self.node.tell(f"starts {name} ({count} of {ATTEMPTS})")
        rc, dummy, err = self.node.docker.start(name)
        if rc:
            raise Down(f"docker start {name}: {err.strip()}")

    def bring_up(self) -> None:
        found = self.stand_by()
        if self.ray in self.own:
            self.bring_up_ray(found[self.ray])
        if self.vllm in self.own:
            self.bring_up_server(self.stand_by()[self.vllm])
        if self.mp and self.gang["head"]:
            self.partners.look(self.ask_partners())  # now, while the ranks are those that answered: one may be lost before the next look
        self.node.tell("serves" if self.gang["head"] else "is part of the gang")

    def bring_up_ray(self, ray: t.Mapping[str, t.Any]) -> None:
        head, port = self.gang["head_address"], self.gang["ray_port"]
        if not self.gang["head"]:
            self.until(lambda: self.node.listens(head, port), self.gang["wait"], lambda: f"no answer of the head's Ray at {head}:{port}")
            ray = self.stand_by()[self.ray]  # a playbook may have launched another one meanwhile
        if not ray["running"]:
            self.node.empty_tmp(self.ray)
            self.start(self.ray)
        if not self.gang["head"]:
            self.node.sleep(SECOND_LOOK)
            self.still_there(self.ray)
            return
        missing = ["Ray does not answer yet"]

        def complete() -> bool:
            self.still_there(self.ray)
            table = self.table()
            server = self.node.docker.inspect([self.vllm]).get(self.vllm)
            idle = server is None or not server["running"]
            plan = {"nodes": self.gang["addresses"], "gpus_per_node": self.gang["gpus_per_node"], "require_idle": idle}
            state = _ray.cluster_state(table, plan)
            missing[:] = state["reasons"] or missing
            self.members = members_of(table)
            return bool(state["ready"])

        self.until(complete, self.gang["wait"], lambda: "the gang is not complete: " + "; ".join(missing))

    def bring_up_server(self, server: t.Mapping[str, t.Any]) -> None:
        if self.mp and not server["running"]:  # a rank waits for the others for some minutes only: all start at the same time
            server = self.gather()
        if self.told_to_start and server["running"]:  # what is left of a gang whose head was started anew
            self.node.tell("the head starts the gang anew: stops this rank")
            self.node.docker.stop(self.vllm, 60)
            server = self.stand_by()[self.vllm]
        self.told_to_start = False
        if not server["running"]:
            self.start(self.vllm)
        if not self.gang["head"]:  # a headless rank has no port to ask
            return

        def answers() -> bool:
            self.still_there(self.vllm)
            return bool(self.node.answers(self.gang["url"], self.gang["served_model"]))

        try:
            self.until(answers, self.gang["ready_timeout"], lambda: f"{self.vllm} gives no answer")
        except Down:
            if self.containers().get(self.vllm, {}).get("running"):  # not one that a playbook has launched meanwhile
                self.node.docker.stop(self.vllm, 60)  # what hangs must not keep the memory
            raise

    def gather(self) -> dict[str, t.Any]:
        """Executor mp: until all ranks may be started, or a playbook has started this one."""
        missing: list[str] = []

        def taken() -> bool:
            server = self.containers().get(self.vllm)
            return server is None or bool(server["running"])

        def all_start() -> bool:
            missing[:] = [a for a in self.partners.addresses if not (self.node.call(a, self.gang["mp_port"], "state") or {}).get("ready")]
            if not missing:
                missing[:] = [
                    a for a in self.partners.addresses if not (self.node.call(a, self.gang["mp_port"], "start") or {}).get("starts")
                ]
            return not missing

        if self.gang["head"]:
            self.partners.forget()
            self.until(lambda: taken() or all_start(), self.gang["wait"], lambda: f"no rank is ready on {', '.join(missing)}")
        else:
            self.ready = True
            head = self.gang["head_address"]
            self.until(lambda: self.told_to_start or taken(), self.gang["wait"], lambda: f"no word from the head's unit at {head}")
            self.ready = False
        return self.stand_by()[self.vllm]

    # -- watching

    def watch(self) -> None:
        """Returns when the gang has to be brought up again; Down when the service stays down."""
        began = self.node.now()
        while True:
            self.pause(LOOK)
            if self.told_to_start:
                return
            lost = self.lost()
            if lost:  # while a playbook replaces containers, one is seen ended before it is gone: look again
                self.pause(SECOND_LOOK)
                lost = self.lost()
            if self.node.now() - began >= GOOD:
                self.starts.clear()
            if not lost:
                if len(self.containers()) < len(self.own):
                    return  # a playbook took them away or made others: stand by
                if self.mp and self.gang["head"] and self.partners_left():
                    return
                continue
            if self.ray in lost and self.gang["head"]:
                raise Down(self.ended(self.ray, lost[self.ray]))
            if self.ray in lost:
                self.node.tell(f"{self.ray} {exit_text(lost[self.ray])}: joins again when the head's Ray answers")
                return
            reason = self.ended(self.vllm, lost[self.vllm])
            if self.mp and not self.gang["head"]:
                if not self.ended_by_itself(lost[self.vllm]):
                    self.node.tell(f"{reason}: waits for the head's unit")
                    return
                self.pause(RANK_GRACE)  # the head hears meanwhile that the rank has ended, and not that the node is silent
                if self.vllm not in self.lost():
                    return
                raise Down(f"{reason}. It is not started again by itself: playbooks/restart.yml does")
            if self.same_gang():
                raise Down(f"{reason}. It is not started again by itself: playbooks/restart.yml does")
            if self.vllm in self.lost():
                self.node.tell(f"{self.vllm} ended when a node left: waits for its return ({reason})")
            return

    def lost(self) -> dict[str, dict[str, t.Any]]:
        return {name: c for name, c in self.containers().items() if not c["running"]}

    def same_gang(self) -> bool:
        """Whether the very same Ray nodes are alive as when the server was started, also a while later: Ray takes its time to miss one."""
        for dummy in range(SAME_LOOKS):
            if self.vllm not in self.lost():
                return False  # a playbook has started it, or taken it away
            if self.mp:
                if any(how != "ended" for how in self.partners.look(self.ask_partners()).values()):
                    return False
            elif members_of(self.table()) != self.members:
                return False
            self.node.sleep(LOOK)
        return True

    def ask_partners(self) -> dict[str, dict[str, t.Any] | None]:
        return {address: self.node.call(address, self.gang["mp_port"], "state") for address in self.partners.addresses}

    def partners_left(self) -> bool:
        """Executor mp, on the head: whether the gang has to be brought up again because a node left. vLLM itself goes on waiting for its rank."""
        left = self.partners.look(self.ask_partners())
        if not left:
            return False
        self.node.sleep(SECOND_LOOK)
        left = self.partners.look(self.ask_partners())
        if not left or self.node.answers(self.gang["url"], self.gang["served_model"], PROOF):
            self.partners.forget()
            return False
        if not self.containers().get(self.vllm, {}).get("running"):
            return True  # a playbook was quicker
        text = ", ".join(f"{address} ({how})" for address, how in sorted(left.items()))
        self.node.tell(f"{self.vllm} gives no answer since the rank left on {text}: stops it")
        self.node.docker.stop(self.vllm, 60)
        if "ended" in left.values():
            raise Down(f"the rank on {text}. It is not started again by itself: playbooks/restart.yml does")
        return True

    def ended_by_itself(self, container: t.Mapping[str, t.Any]) -> bool:
        """Whether a worker's rank ended for a reason of its own, and not because the head's rank had left it."""
        cause = _diagnosis.best(_diagnosis.scan(self.node.docker.log_text(self.vllm, tail=400, timestamps=False).splitlines()))
        return int(container.get("exit_code") or 0) >= 128 or (cause is not None and _diagnosis.rank(cause) == 0)


def members_of(table: t.Mapping[str, t.Any]) -> frozenset[tuple[str, str]]:
    """(address, Ray's id) of the nodes alive: another id is another start of that node."""
    return frozenset((str(n.get("address")), str(n.get("id"))) for n in table.get("nodes") or [] if n.get("alive"))


def main(path: str) -> int:
    """What the unit runs."""
    notify("READY=1")  # started; how far it is stands in the status
    try:
        with open(path, encoding="utf-8") as handle:
            gang = json.load(handle)
    except (OSError, ValueError) as exc:
        say(f"down: {path}: {exc}")
        return 1
    try:
        return Gang(gang, Node()).run()
    except DockerError as exc:
        say(f"down: {exc}")
        notify(f"STATUS=down: {exc}")
        return 1
