# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import stat
import threading

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _containers
from ansible_collections.dgxspark.serving.plugins.modules import service_stop


class Machine:
    """A node with docker, systemd, ss and nvidia-smi: containers {name: dict} and units {name: state} that can be stopped and started."""

    def __init__(self, containers=(), units=(), bare=(), stubborn=(), broken=(), gpu=(), compose=False, aliases=()):
        self.containers = {
            c["name"]: {"running": True, "policy": "no", "port": None, "labels": {}, "pid": 100 + n, **c, "execs": dict(c.get("execs", {}))}
            for n, c in enumerate(containers)
        }
        self.created, self.signals, self.env_files = [], [], []
        self.units = {name: {"state": "active", "port": port, "pid": 500 + n} for n, (name, port) in enumerate(units)}
        self.bare, self.compose, self.aliases = list(bare), compose, dict(aliases)
        self.stubborn, self.broken, self.gpu = set(stubborn), set(broken), list(gpu)
        self.calls = []
        self.before_stop = lambda name: None

    def _ident(self, name):
        return name.encode().hex().ljust(64, "0")[:64]

    def run(self, argv, timeout=30, data=None):
        self.calls.append(argv)
        self.user = argv[2] if argv[0] == "runuser" else ""
        if self.user:
            argv = argv[argv.index("systemctl") :]
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
            "Path": c.get("command", ["/serve"])[0],
            "Args": c.get("command", ["/serve"])[1:],
            "Config": {"Image": "old:1", "Labels": c["labels"], "Env": ["PATH=/bin", "API_SECRET=hush"]},
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
        if argv[0] == "compose" and self.compose:
            return self._compose(argv[2], argv[3])
        name = argv[-1]
        if argv[0] == "stop":
            self.before_stop(name)
            if name not in self.stubborn:
                self.containers[name].update(running=False, execs={})
                if self.containers[name].get("auto_remove"):
                    del self.containers[name]
            return 0, name, ""
        if argv[0] == "top":
            c = self.containers[argv[1]]
            rows = [(c["pid"], 1), *((pid, parent) for pid, (parent, dummy, dummy2) in c["execs"].items())] if c["running"] else []
            return 0, "PID PPID\n" + "".join(f"{pid} {parent}\n" for pid, parent in rows), ""
        if argv[0] == "exec":
            with open(argv[argv.index("--env-file") + 1], encoding="utf-8") as stream:
                self.env_files.append((stat.S_IMODE(os.fstat(stream.fileno()).st_mode), stream.read()))
            position = next(n for n, word in enumerate(argv) if word in self.containers)
            if argv[position] not in self.broken:
                self.containers[argv[position]]["execs"] = {950: (1, argv[position + 1 :], "")}
            return 0, "", ""
        if argv[0] == "update":
            self.containers[name]["policy"] = argv[1].partition("=")[2]
            return 0, "", ""
        if argv[0] == "start":
            self.containers[name].update(running=name not in self.broken, code=3)
            return 0, name, ""
        if argv[0] == "logs":
            return 0, "it said why\n", ""
        return 1, "", "docker: 'compose' is not a docker command."

    def _compose(self, project, verb):
        """The plugin knows the containers that are there, and no more."""
        for name, c in list(self.containers.items()):
            if c["labels"].get("com.docker.compose.project") == project:
                self._docker([verb, name])
        return 0, "", ""

    def _systemctl(self, argv):
        if argv[0] == "show":
            names = argv[argv.index("--") + 1 :]
            blocks = []
            for name in (self.aliases.get(asked, asked) for asked in names):
                known = self.units.get(self.user + "/" + name if self.user else name)
                blocks.append(
                    f"Id={name}\nLoadState={'loaded' if known else 'not-found'}\n"
                    f"ActiveState={known['state'] if known else 'inactive'}\n"
                    f"UnitFileState={known.get('boot', 'enabled') if known else ''}\n"
                )
            return 0, "\n".join(blocks), ""
        unit = self.units[self.user + "/" + argv[-1] if self.user else argv[-1]]
        if argv[0] in ("enable", "disable"):
            unit["boot"] = argv[0] + "d"
        if argv[0] in ("stop", "start"):
            unit["state"] = "inactive" if argv[0] == "stop" else "active"
        return 0, "", ""

    def api(self, method, path, body):
        self.created.append((method, path, body))
        name = path.partition("name=")[2]
        self.containers[name] = {"name": name, "running": False, "policy": "no", "port": 30000, "labels": {}, "pid": 300, "execs": {}}
        return 201, {"Id": "x"}

    def kill(self, pid, number):
        self.signals.append((pid, int(number)))
        for c in self.containers.values():
            c["execs"].pop(pid, None)

    def _ss(self, argv):
        rows = [(c["port"], c["pid"]) for c in self.containers.values() if c["port"] and c["running"]]
        rows += [(c.get("exec_port"), pid) for c in self.containers.values() for pid in c["execs"] if c.get("exec_port")]
        rows += [(u["port"], u["pid"]) for u in self.units.values() if u["port"] and u["state"] == "active"]
        rows += self.bare
        return 0, "".join(f'LISTEN 0 9 127.0.0.1:{port} 0.0.0.0:* users:(("python3",pid={pid},fd=3))\n' for port, pid in rows), ""

    def read(self, path):
        if path.startswith("/proc/") and path.endswith("/cgroup"):
            pid = int(path.split("/")[2])
            for name, c in self.containers.items():
                if c["running"] and (c["pid"] == pid or pid in c["execs"]):
                    return f"0::/system.slice/docker-{self._ident(name)}.scope\n"
            for name, u in self.units.items():
                if u["state"] == "active" and u["pid"] == pid:
                    own = name.rpartition("/")
                    return (
                        f"0::/user.slice/user-1000.slice/user@1000.service/app.slice/{own[2]}\n" if own[0] else f"0::/system.slice/{name}\n"
                    )
            return "0::/user.slice/user@1000.service\n" if pid in [p for dummy, p in self.bare] else ""
        if path.startswith("/proc/") and path.endswith(("/cmdline", "/environ", "/status")):
            pid, kind = int(path.split("/")[2]), path.split("/")[3]
            for c in self.containers.values():
                if pid in c["execs"]:
                    dummy, argv, env = c["execs"][pid]
                    return {"cmdline": "\0".join(argv) + "\0", "environ": env, "status": "Uid:\t0\t0\nGid:\t0\t0\n"}[kind]
        if path == "/etc/passwd":
            return "root:x:0:0::/root:/bin/sh\nspark:x:1000:1000::/home/spark:/bin/sh\n"
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
        monkeypatch.setattr(
            service_stop.Node.__init__, "__defaults__", (machine.read, machine.kill, machine.api, lambda path: "/sgl-workspace")
        )
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


SERVE = ["python3", "-m", "sglang.launch_server", "--port", "30000"]
IDLE = {
    "name": "old",
    "command": ["sleep", "infinity"],
    "exec_port": 30000,
    "execs": {900: (1, SERVE, "PATH=/bin\0HF_TOKEN=hush2\0HOSTNAME=x\0"), 901: (900, ["python3", "worker"], "")},
}


def test_a_server_that_was_run_with_docker_exec_is_run_again(stop):
    machine = Machine([IDLE])
    result = stop(machine, **NAMED)
    assert machine.signals == [(900, 15)] and changing(machine) == [["docker", "stop", "-t", "2", "old"]]
    assert result["stopped"][0]["commands"] == {"old": ["python3"]} and "hush" not in json.dumps(result)
    assert json.loads(stop.record.read_text())["stopped"][0]["by_hand"]["old"][0]["argv"] == SERVE
    result = stop(machine, state="restored")
    assert not result.get("failed") and machine.containers["old"]["execs"][950][1] == SERVE and "hush" not in json.dumps(result)
    (call,) = [c for c in machine.calls if c[:2] == ["docker", "exec"]]
    assert call[2:7] == ["-d", "--user", "0:0", "--workdir", "/sgl-workspace"] and "hush2" not in " ".join(call)
    assert len([c for c in machine.calls if c[:2] == ["docker", "exec"]]) == 1
    assert machine.env_files == [(0o600, "HF_TOKEN=hush2\n")] and not os.path.exists(call[call.index("--env-file") + 1])


def test_what_does_not_stay_is_not_run_again(stop, monkeypatch):
    """A health check, or a monitor that looks at this very moment."""
    machine = Machine([{**OLD, "execs": {900: (1, ["nvidia-smi"], "")}}])
    read = machine.read
    files = {"/proc/900/stat": "900 (x) S 1 " + "0 " * 17 + "100000 0", "/proc/uptime": "1003.0 1"}
    monkeypatch.setattr(machine, "read", lambda path: files.get(path) or read(path))
    stop(machine, **NAMED)
    assert machine.signals == [] and "by_hand" not in json.loads(stop.record.read_text())["stopped"][0]


def test_one_run_with_docker_exec_that_ends_at_once_is_not_waited_for(stop):
    machine = Machine([IDLE], broken=["old"])
    stop(machine, **NAMED)
    machine.broken = {"old"}
    machine.containers["old"]["keep"] = True
    original, machine.broken = machine._docker, {"old"}
    machine._docker = lambda argv: (
        (machine.containers["old"].update(running=True), (0, "", ""))[1] if argv[0] == "start" else original(argv)
    )
    result = stop(machine, state="restored")
    assert "what was run in container old with docker exec ended at once" in result["msg"] and stop.record.exists()


def test_one_that_cannot_be_started_again_is_refused_before_anything_is_stopped(stop):
    machine = Machine([{**IDLE, "name": "first", "exec_port": 30001}, {**IDLE, "execs": {910: (1, [""], "")}}])
    named = {"containers": ["first", "old"], "ports": [30000]}
    result = stop(machine, **named)
    assert result["problem"]["id"] == "stop-for-good" and "process 910 in container old" in result["msg"] and changing(machine) == []
    assert "hush" not in json.dumps(result) and not result["changed"]
    result = stop(machine, accept_no_rollback=True, **named)
    assert not result.get("failed") and "cannot be brought back" in result["warnings_list"][0]
    told = stop(machine, state="restored")["msg"]  # at once: nothing will ever listen
    assert "process 910 in container old, which its own command did not start: start it by hand" in told and "nothing listens" not in told


def test_one_that_removes_itself_is_made_again(stop):
    machine = Machine([{**OLD, "auto_remove": True}])
    result = stop(machine, **NAMED)
    assert "old" not in machine.containers and "hush" not in json.dumps(result) and not result["warnings_list"]
    result = stop(machine, state="restored")
    assert machine.containers["old"]["running"] and "hush" not in json.dumps(result)
    ((method, path, body),) = machine.created
    assert (method, path) == ("POST", "/containers/create?name=old")
    assert body["Image"] == "old:1" and body["Env"] == ["PATH=/bin", "API_SECRET=hush"] and body["HostConfig"]["AutoRemove"]


def test_a_unit_of_a_user(stop):
    machine = Machine(units=[("spark/sglang.service", 30000)])
    named = {"units": ["spark/sglang"], "ports": [30000]}
    result = stop(machine, units=["sglang"], ports=[30000])
    assert result["problem"]["id"] == "port-held" and "units: [spark/sglang.service]" in result["msg"]
    result = stop(machine, **named)
    (call,) = [c for c in machine.calls if "stop" in c]
    assert call[:3] == ["runuser", "-u", "spark"] and call[-4:] == ["systemctl", "stop", "--", "sglang.service"]
    assert result["stopped"][0]["ports"] == [{"address": "127.0.0.1", "port": 30000}]
    stop(machine, state="restored")
    assert machine.units["spark/sglang.service"]["state"] == "active"


def test_the_old_service_does_not_start_at_the_next_boot_once_the_new_one_is_proven(stop):
    machine = Machine([{**OLD, "policy": "always"}, {"name": "second", "policy": "unless-stopped"}], [("ollama.service", 11434)])
    named = {"containers": ["old", "second"], "units": ["ollama"], "ports": [30000]}
    stop(machine, **named)
    assert machine.containers["old"]["policy"] == "always"  # until then a node that boots has its old service
    told = stop(machine, check=True, state="forgotten")["actions"]
    assert told[1:] == ["disable unit ollama.service", "set the restart policy of container old to no, it was always"]
    stop(machine, state="forgotten")
    assert [machine.containers[name]["policy"] for name in ("old", "second")] == ["no", "unless-stopped"]
    assert ["systemctl", "disable", "--", "ollama.service"] in machine.calls
    stop(machine, state="restored", record=str(stop.record.parent / "stopped.last.json"))
    assert machine.containers["old"]["policy"] == "always" and ["systemctl", "enable", "--", "ollama.service"] in machine.calls


def test_a_compose_project_with_a_server_that_waits_for_its_clients(stop, monkeypatch):
    """vLLM without its engine, while somebody waits for an answer: compose would wait for it until the time is over."""
    monkeypatch.setattr(_containers, "ENGINE_LOOK", 0.01)
    monkeypatch.setattr(_containers, "ENGINE_GRACE", 0.1)
    member = {"labels": {"com.docker.compose.project": "glm"}}
    machine = Machine([{"name": "glm-api-1", "port": 30001, **member}, {"name": "glm-ui-1", **member}], compose=True)
    ended, docker = threading.Event(), machine.run

    def run(argv, timeout=30, data=None):
        if argv[1:] == ["top", "glm-api-1"]:
            return 0, "CMD\n/usr/bin/python3 /usr/local/bin/vllm serve\n" + ("" if machine.stopping else "VLLM::EngineCore\n"), ""
        if argv[1] == "kill":
            ended.set()
        if argv[1:2] + argv[4:5] == ["compose", "stop"]:
            machine.stopping = True
            assert ended.wait(20), "compose was left to wait"
        return docker(argv, timeout, data)

    machine.stopping, machine.run = False, run
    result = stop(machine, compose_projects=["glm"], ports=[30001])
    assert [i["name"] for i in result["stopped"]] == ["glm"] and not machine.containers["glm-api-1"]["running"]
    assert [call for call in machine.calls if call[1] == "kill"] == [["docker", "kill", "glm-api-1"]]


def test_a_compose_project_comes_back_whole(stop):
    """Compose starts what is there; what was run by hand, what removed itself and the restart policy are ours to bring back."""
    member = {"labels": {"com.docker.compose.project": "glm"}}
    machine = Machine(
        [{**IDLE, **member, "policy": "always"}, {"name": "once", "port": 30001, "auto_remove": True, **member}],
        compose=True,
    )
    stop(machine, compose_projects=["glm"], ports=[30000, 30001])
    assert not machine.containers["old"]["running"] and "once" not in machine.containers
    stop(machine, state="forgotten")
    assert machine.containers["old"]["policy"] == "no"
    machine.api = lambda method, path, body: (machine.containers.update(once={**ONCE}), (201, {}))[1]
    result = stop(machine, state="restored", record=str(stop.record.parent / "stopped.last.json"))
    assert not result.get("failed"), result["msg"]
    assert machine.containers["old"]["policy"] == "always" and machine.containers["old"]["execs"][950][1] == SERVE
    assert machine.containers["once"]["running"] and ["docker", "compose", "-p", "glm", "start"] in machine.calls


ONCE = {"name": "once", "running": False, "policy": "no", "port": 30001, "labels": {}, "pid": 300, "execs": {}}


def test_what_was_stopped_long_ago_is_not_forgotten_for_what_is_stopped_now(stop):
    last = stop.record.parent / "stopped.last.json"
    machine = Machine([{**OLD, "policy": "always"}, {"name": "second", "port": 30002}], [("ollama.service", 11434)])
    stop(machine, containers=["old"], units=["ollama"])
    stop(machine, state="forgotten")
    stop(machine, containers=["second"])
    stop(machine, state="forgotten")
    assert [entry["name"] for entry in json.loads(last.read_text())["stopped"]] == ["ollama.service", "old", "second"]
    # Started by hand and stopped again: what it was before we changed it is still known, and where it answers now.
    machine.containers["old"].update(running=True, port=30005)
    machine.units["ollama.service"]["state"] = "active"
    stop(machine, containers=["old"], units=["ollama"])
    stop(machine, state="forgotten")
    entries = {entry["name"]: entry for entry in json.loads(last.read_text())["stopped"]}
    assert (entries["old"]["restart_policy"], entries["ollama.service"]["enabled"]) == ({"old": "always"}, "enabled")
    assert [place["port"] for place in entries["old"]["ports"]] == [30005]
    assert not stop(machine, state="restored", record=str(last)).get("failed")
    assert machine.containers["old"]["policy"] == "always" and machine.units["ollama.service"]["boot"] == "enabled"
    assert machine.containers["second"]["running"] and not last.exists()


def test_a_broken_last_record_is_kept_and_no_reason_to_fail(stop):
    """The new server is proven by then: a failure would take it away again."""
    last = stop.record.parent / "stopped.last.json"
    machine = Machine([{**OLD, "policy": "always"}])
    stop(machine, **NAMED)
    last.write_text("{broken")
    assert "stopped.last.json" in stop(machine, check=True, state="forgotten")["warnings_list"][0] and last.read_text() == "{broken"
    result = stop(machine, state="forgotten")
    assert not result.get("failed") and "stopped.last.json.broken" in result["warnings_list"][0]
    assert (last.parent / "stopped.last.json.broken").read_text() == "{broken"
    assert [entry["name"] for entry in json.loads(last.read_text())["stopped"]] == ["old"]


def test_a_unit_that_is_named_by_an_alias(stop):
    """systemd answers with the unit's own name, and enables and disables nothing by an alias."""
    machine = Machine(units=[("sglang.service", 30000)], aliases={"llm.service": "sglang.service"})
    result = stop(machine, units=["llm"], ports=[30000])
    assert [item["name"] for item in result["stopped"]] == ["sglang.service"] and result["stopped"][0]["ports"]
    assert machine.units["sglang.service"]["state"] == "inactive"
    stop(machine, state="restored")
    assert machine.units["sglang.service"]["state"] == "active"


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
