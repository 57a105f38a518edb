# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import stat

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import service_stop


class Machine:
    """A node with docker, systemd, ss and nvidia-smi: containers {name: dict} and units {name: state} that can be stopped and started."""

    def __init__(self, containers=(), units=(), bare=(), stubborn=(), broken=(), gpu=()):
        self.containers = {
            c["name"]: {"running": True, "policy": "no", "port": None, "labels": {}, "pid": 100 + n, **c} for n, c in enumerate(containers)
        }
        self.units = {name: {"state": "active", "port": port, "pid": 500 + n} for n, (name, port) in enumerate(units)}
        self.bare = list(bare)
        self.stubborn, self.broken, self.gpu = set(stubborn), set(broken), list(gpu)
        self.calls = []
        self.before_stop = lambda name: None

    def _ident(self, name):
        return name.encode().hex().ljust(64, "0")[:64]

    def run(self, argv, timeout=30, data=None):
        self.calls.append(argv)
        handler = {"docker": self._docker, "systemctl": self._systemctl, "ss": self._ss}.get(argv[0])
        if handler:
            return handler(argv[1:])
        if argv[0] == "nvidia-smi":
            return 0, "".join(f"{pid}, python3, 9000\n" for pid in self.gpu), ""
        return 0, "", ""

    def _inspect(self, name):
        c = self.containers[name]
        return {
            "Id": self._ident(name),
            "Name": f"/{name}",
            "Config": {"Image": "old:1", "Labels": c["labels"]},
            "State": {
                "Status": "running" if c["running"] else "exited",
                "Running": c["running"],
                "Pid": c["pid"] if c["running"] else 0,
                "ExitCode": c.get("code", 0),
                "StartedAt": "2026-01-01T00:00:00Z",
            },
            "HostConfig": {"RestartPolicy": {"Name": c["policy"]}, "AutoRemove": c.get("auto_remove", False)},
        }

    def _docker(self, argv):
        if argv[0] == "ps":
            return 0, "\n".join(self._ident(n) for n in self.containers), ""
        if argv[:2] == ["container", "inspect"]:
            found = [self._inspect(n) for n in self.containers for asked in argv[2:] if asked in (n, self._ident(n))]
            return (0 if len(found) == len(argv) - 2 else 1), json.dumps(found), "" if found else "Error: No such container"
        name = argv[-1]
        if argv[0] == "stop":
            self.before_stop(name)
            if name not in self.stubborn:
                self.containers[name]["running"] = False
            return 0, name, ""
        if argv[0] == "start":
            self.containers[name].update(running=name not in self.broken, code=3)
            return 0, name, ""
        if argv[0] == "logs":
            return 0, "it said why\n", ""
        return 1, "", "docker: 'compose' is not a docker command."

    def _systemctl(self, argv):
        if argv[0] == "show":
            names = argv[argv.index("--") + 1 :]
            blocks = []
            for name in names:
                known = self.units.get(name)
                blocks.append(
                    f"Id={name}\nLoadState={'loaded' if known else 'not-found'}\n"
                    f"ActiveState={known['state'] if known else 'inactive'}\nUnitFileState=enabled\n"
                )
            return 0, "\n".join(blocks), ""
        self.units[argv[-1]]["state"] = "inactive" if argv[0] == "stop" else "active"
        return 0, "", ""

    def _ss(self, argv):
        rows = [(c["port"], c["pid"]) for c in self.containers.values() if c["port"] and c["running"]]
        rows += [(u["port"], u["pid"]) for u in self.units.values() if u["port"] and u["state"] == "active"]
        rows += self.bare
        return 0, "".join(f'LISTEN 0 9 127.0.0.1:{port} 0.0.0.0:* users:(("python3",pid={pid},fd=3))\n' for port, pid in rows), ""

    def read(self, path):
        if path.startswith("/proc/") and path.endswith("/cgroup"):
            pid = int(path.split("/")[2])
            for name, c in self.containers.items():
                if c["running"] and c["pid"] == pid:
                    return f"0::/system.slice/docker-{self._ident(name)}.scope\n"
            for name, u in self.units.items():
                if u["state"] == "active" and u["pid"] == pid:
                    return f"0::/system.slice/{name}\n"
            return "0::/user.slice/user@1000.service\n" if pid in [p for dummy, p in self.bare] else ""
        if path == "/proc/meminfo":
            return "MemTotal: 100 kB\nMemAvailable: 50 kB\n"
        if path.startswith(("/proc/", "/etc/")):
            return ""
        return service_stop.read_text(path)


class Exit(Exception):
    pass


@pytest.fixture
def stop(monkeypatch, tmp_path):
    record = tmp_path / "state" / "stopped.json"

    def leave(self, **result):
        raise Exit(result)

    def call(machine, check=False, **args):
        monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave)
        monkeypatch.setattr(basic.AnsibleModule, "fail_json", lambda self, **result: leave(self, failed=True, **result))
        monkeypatch.setattr(service_stop, "bounded", lambda run_command: machine.run)
        monkeypatch.setattr(service_stop.Node.__init__, "__defaults__", (machine.read,))
        monkeypatch.setattr(service_stop, "clock", lambda total, interval: iter([0.0, 1.0, 2.0]))
        with (
            patch_module_args(
                {"node": "spark-1", "record": str(record), "timeout": 5, **args, "_ansible_check_mode": check, "_ansible_diff": True}
            ),
            pytest.raises(Exit) as caught,
        ):
            service_stop.main()
        return caught.value.args[0]

    call.record = record
    return call


OLD = {"name": "old", "policy": "unless-stopped", "port": 30000}
NAMED = {"containers": ["old", "nosuch"], "ports": [30000]}


def changing(machine):
    return [c for c in machine.calls if c[:2] in (["docker", "stop"], ["docker", "start"], ["systemctl", "stop"], ["systemctl", "start"])]


def test_stop_four_times(stop):
    """Check mode, real, check mode again, real again."""
    machine = Machine([OLD, {"name": "bystander"}])
    result = stop(machine, check=True, **NAMED)
    assert (
        result["changed"]
        and result["actions"] == ["stop container old (127.0.0.1:30000)"]
        and changing(machine) == []
        and not stop.record.exists()
    )
    assert result["diff"] == {"before": "container old: running\n", "after": "container old: stopped\n"}
    result = stop(machine, **NAMED)
    assert result["changed"] and changing(machine) == [["docker", "stop", "-t", "5", "old"]]
    assert not machine.containers["old"]["running"] and machine.containers["bystander"]["running"]
    entry = json.loads(stop.record.read_text())["stopped"][0]
    assert (
        entry["ports"] == [{"address": "127.0.0.1", "port": 30000}]
        and entry["restart_policy"] == {"old": "unless-stopped"}
        and entry["memory_before"] == 51200
    )
    assert stat.S_IMODE(os.stat(stop.record).st_mode) == 0o600
    for check in (True, False):
        again = stop(machine, check=check, **NAMED)
        assert not again["changed"] and again["actions"] == [] and again["record"]["stopped"][0]["name"] == "old"


def test_the_record_is_written_before_the_stop(stop):
    machine = Machine([OLD])
    seen = []
    machine.before_stop = lambda name: seen.append(json.loads(stop.record.read_text())["stopped"][0]["name"])
    stop(machine, **NAMED)
    assert seen == ["old"]


def test_units_and_compose_without_the_plugin(stop):
    machine = Machine([{"name": "glm-api-1", "labels": {"com.docker.compose.project": "glm"}, "port": 30001}], [("ollama.service", 30000)])
    result = stop(machine, units=["ollama", "nope"], compose_projects=["glm"], ports=[30000, 30001])
    assert [(i["kind"], i["name"]) for i in result["stopped"]] == [("unit", "ollama.service"), ("compose_project", "glm")]
    assert changing(machine) == [["systemctl", "stop", "--", "ollama.service"], ["docker", "stop", "-t", "5", "glm-api-1"]]
    assert result["stopped"][0]["enabled"] == "enabled"
    stop(machine, state="restored")
    assert machine.units["ollama.service"]["state"] == "active" and machine.containers["glm-api-1"]["running"]


def test_a_stranger_on_the_port_is_refused_before_anything_is_stopped(stop):
    machine = Machine([{**OLD, "port": 30001}], bare=[(30000, 4711)])
    result = stop(machine, containers=["old"], ports=[30000, 30001])
    assert (
        result["failed"]
        and result["problem"]["id"] == "port-held"
        and "process python3 (pid 4711, unit user@1000.service) on 127.0.0.1:30000" in result["msg"]
    )
    assert changing(machine) == [] and not stop.record.exists() and not result["changed"]


def test_our_own_server_on_the_port_is_fine(stop):
    machine = Machine([{"name": "spark-vllm", "port": 30000, "labels": {"dgxspark.serving": "1"}}])
    result = stop(machine, containers=["old", "spark-vllm"], ports=[30000])
    assert not result.get("failed") and not result["changed"] and machine.containers["spark-vllm"]["running"]


def test_one_that_does_not_stop(stop):
    result = stop(Machine([OLD], stubborn=["old"]), **NAMED)
    assert result["failed"] and result["problem"]["id"] == "stop-failed" and "container old still runs, or came back" in result["msg"]
    assert stop.record.exists()


def test_one_that_removes_itself_is_warned_about(stop):
    result = stop(Machine([{**OLD, "auto_remove": True}]), **NAMED)
    assert "cannot be brought back" in result["warnings_list"][0]


def test_a_gpu_process_that_survives(stop, monkeypatch):
    machine = Machine([OLD], gpu=[100])
    read = machine.read
    monkeypatch.setattr(machine, "read", lambda path: "0::/docker/" + machine._ident("old") if path == "/proc/100/cgroup" else read(path))
    result = stop(machine, **NAMED)
    assert result["problem"]["id"] == "gpu-held" and "pid 100" in result["msg"]


def test_restore_four_times(stop):
    machine = Machine([OLD])
    stop(machine, **NAMED)
    machine.calls.clear()
    result = stop(machine, check=True, state="restored")
    assert result["changed"] and changing(machine) == [] and stop.record.exists()
    result = stop(machine, state="restored")
    assert (
        result["changed"]
        and result["actions"] == ["start container old"]
        and machine.containers["old"]["running"]
        and not stop.record.exists()
    )
    for check in (True, False):
        assert not stop(machine, check=check, state="restored")["changed"]


def test_one_that_does_not_come_back_says_why_and_keeps_the_record(stop):
    machine = Machine([OLD], broken=["old"])
    stop(machine, **NAMED)
    result = stop(machine, state="restored")
    assert result["problem"]["id"] == "restore-failed" and "container old exited with code 3; last lines: it said why" in result["msg"]
    assert stop.record.exists()


def test_one_that_runs_but_does_not_listen(stop):
    machine = Machine([OLD])
    stop(machine, **NAMED)
    machine.containers["old"]["port"] = None
    result = stop(machine, state="restored", start_timeout=7)
    assert "nothing listens on 127.0.0.1:30000 after 7 s" in result["msg"]


def test_forgotten(stop):
    machine = Machine([OLD])
    stop(machine, **NAMED)
    assert stop(machine, check=True, state="forgotten")["changed"] and stop.record.exists()
    assert stop(machine, state="forgotten")["changed"]
    assert not stop.record.exists() and (stop.record.parent / "stopped.last.json").exists()
    assert not stop(machine, state="forgotten")["changed"]


def test_a_broken_record_is_not_overwritten(stop):
    stop.record.parent.mkdir()
    stop.record.write_text("{broken")
    result = stop(Machine([OLD]), **NAMED)
    assert result["problem"]["id"] == "record-unreadable" and stop.record.read_text() == "{broken"
