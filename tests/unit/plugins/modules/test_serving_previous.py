# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import serving_previous

SERVE = ["serve", "/models/x", "--served-model-name", "tiny", "--host", "0.0.0.0", "--port", "30000"]
RAY = ["start", "--block", "--node-ip-address=192.168.200.12", "--head", "--port=6379", "--num-gpus=1"]


class Machine:
    """A node's docker: containers by name, that can be stopped, renamed, started and removed, and volumes."""

    def __init__(self, *names, **more):
        self.containers = {}
        self.volumes = set()
        self.calls = []
        self.fails = ()
        self.answers = True
        self.asked, self.more = [], [{"id": "adapter", "parent": "tiny"}]
        for name in names:
            self.launch(name, **more)

    def launch(self, name, ident=None, running=True, label="1", volume="spark-tmp-a", args=None):
        self.containers[name] = {
            "id": (ident or name).encode().hex().ljust(64, "0"),
            "running": running,
            "started": "2026-01-01T00:00:00Z",
            "label": label,
            "volume": volume,
            "args": args or (SERVE if name.startswith("spark-vllm") else RAY),
        }
        self.volumes.add(volume)

    def inspect(self, name):
        c = self.containers[name]
        return {
            "Id": c["id"],
            "Name": f"/{name}",
            "Args": c["args"],
            "Config": {"Image": "x:1", "Labels": {"dgxspark.serving": c["label"], "dgxspark.serving.served_model_name": "tiny"}},
            "State": {"Status": "running" if c["running"] else "exited", "Running": c["running"], "StartedAt": c["started"]},
            "HostConfig": {},
            "Mounts": [
                {"Type": "volume", "Name": c["volume"], "Destination": "/tmp"},
                {"Type": "bind", "Destination": "/models/hub"},
            ],
        }

    def run(self, argv, timeout=30, data=None):
        verb, rest = argv[1], argv[2:]
        if verb == "container":
            found = [self.inspect(name) for name in rest[1:] if name in self.containers]
            return (0 if len(found) == len(rest) - 1 else 1), json.dumps(found), "Error: No such container"
        if verb == "top":
            return 0, "CMD\n/usr/bin/python3 /usr/local/bin/vllm serve\n", ""
        self.calls.append(" ".join(argv[1:]))
        if verb in self.fails:
            return 1, "", "the daemon refuses"
        if verb == "stop":
            self.containers[rest[-1]]["running"] = False
        elif verb == "start":
            self.containers[rest[-1]].update(running=True, started="2026-02-02T00:00:00Z")
        elif verb == "rename":
            self.containers[rest[1]] = self.containers.pop(rest[0])
        elif verb == "rm":
            del self.containers[rest[-1]]
        elif verb == "volume":
            used = rest[-1] in {c["volume"] for c in self.containers.values()}
            if used:
                return 1, "", "volume is in use"
            self.volumes.discard(rest[-1])
        return 0, "", ""

    def ask(self, url):
        self.asked.append(url)
        if not self.answers:
            return 0, ""
        return 200, json.dumps({"data": [{"id": "tiny", "parent": None}, *self.more]})

    @property
    def states(self):
        return {name: "runs" if c["running"] else "stopped" for name, c in sorted(self.containers.items())}


class Exit(Exception):
    pass


@pytest.fixture
def previous(monkeypatch, tmp_path):
    record = tmp_path / "state" / "stopped.json"

    def leave(self, **result):
        raise Exit(result)

    def call(machine, state, check=False, **args):
        monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave)
        monkeypatch.setattr(basic.AnsibleModule, "fail_json", lambda self, **result: leave(self, failed=True, **result))
        monkeypatch.setattr(serving_previous, "bounded", lambda run_command: machine.run)
        monkeypatch.setattr(serving_previous.Previous.__init__, "__defaults__", (machine.ask,))
        given = {"node": "spark-1", "record": str(record), "state": state, **args, "_ansible_check_mode": check}
        with patch_module_args(given), pytest.raises(Exit) as caught:
            serving_previous.main()
        return caught.value.args[0]

    call.record = record
    return call


def upgrade(previous, machine, **args):
    """Make room and launch another version."""
    result = previous(machine, "kept", keep=True, ask=True, **args)
    for name in args.get("containers", ["spark-vllm", "spark-ray"]):
        machine.launch(name, ident=f"new-{name}", volume="spark-tmp-b")
    return result


def test_an_upgrade_that_is_proven_forgets_the_previous_version(previous):
    machine = Machine("spark-vllm", "spark-ray", "bystander")
    before = machine.states
    result = previous(machine, "kept", check=True, keep=True, ask=True)
    assert result["changed"] and result["actions"] == ["set container spark-vllm aside", "set container spark-ray aside"]
    assert machine.states == before and machine.asked == [] and not previous.record.exists()

    result = upgrade(previous, machine)
    assert machine.calls[:4] == [
        "stop -t 60 spark-vllm",
        "rename spark-vllm spark-vllm-previous",
        "stop -t 60 spark-ray",
        "rename spark-ray spark-ray-previous",
    ]
    assert machine.asked == ["http://127.0.0.1:30000/health", "http://127.0.0.1:30000/v1/models"]
    own = json.loads(previous.record.read_text())["own"]
    assert result["kept"] and result["own"] == own
    assert own["spark-vllm"]["url"] == "http://127.0.0.1:30000" and own["spark-vllm"]["served_model_name"] == "tiny"
    assert (own["spark-ray"]["address"], own["spark-ray"]["port"], own["spark-ray"]["gpus"]) == ("192.168.200.12", 6379, 1)

    assert previous(machine, "forgotten")["changed"]
    assert machine.states == {"bystander": "runs", "spark-ray": "runs", "spark-vllm": "runs"}
    assert machine.volumes == {"spark-tmp-a", "spark-tmp-b"}  # the bystander has it, so Docker keeps it
    assert not previous.record.exists()
    assert not previous(machine, "forgotten")["changed"]


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "broken"])
def test_what_was_made_beforehand_starts_as_soon_as_there_is_room(previous, answers):
    machine = Machine("spark-vllm", "spark-ray", "bystander")
    machine.answers = answers
    machine.launch("spark-vllm-next", running=False)
    assert (
        previous(machine, "kept", check=True, keep=True, ask=True, launch=True, containers=["spark-vllm"])["actions"][-1]
        == "start container spark-vllm"
    )
    assert machine.states["spark-vllm-next"] == "stopped" and machine.calls == []
    result = previous(machine, "kept", keep=True, ask=True, launch=True, containers=["spark-vllm"])
    assert result["launched"] == ["spark-vllm"] and result["kept"] is answers
    away = ["rename spark-vllm spark-vllm-previous"] if answers else ["rm --force --volumes spark-vllm"]
    assert [call for call in machine.calls if not call.startswith("volume")] == [
        "stop -t 60 spark-vllm", *away, "rename spark-vllm-next spark-vllm", "start spark-vllm",
    ]  # fmt: skip
    assert machine.states["spark-vllm"] == "runs" and "spark-vllm-next" not in machine.states
    assert machine.containers["spark-vllm"]["id"] == b"spark-vllm-next".hex().ljust(64, "0")


def test_what_was_made_beforehand_waits_until_it_is_launched(previous):
    """Between the stop and the start memory is freed."""
    machine = Machine("spark-vllm", "spark-ray")
    machine.launch("spark-vllm-next", running=False)
    result = previous(machine, "kept", keep=True, ask=True, containers=["spark-vllm"])
    assert result["launched"] == [] and machine.states == {
        "spark-ray": "runs", "spark-vllm-next": "stopped", "spark-vllm-previous": "stopped",
    }  # fmt: skip
    result = previous(machine, "launched", containers=["spark-vllm"])
    assert result["launched"] == ["spark-vllm"] and machine.states == {
        "spark-ray": "runs",
        "spark-vllm": "runs",
        "spark-vllm-previous": "stopped",
    }
    assert not previous(machine, "launched", containers=["spark-vllm"])["changed"]


@pytest.mark.parametrize("state", ["restored", "forgotten"])
def test_what_was_made_and_never_started_goes(previous, state):
    machine = Machine("spark-vllm", "spark-ray")
    previous(machine, "kept", keep=True, containers=[])
    machine.launch("spark-vllm-next", running=False)
    result = previous(machine, state)
    assert machine.states == {"spark-ray": "runs", "spark-vllm": "runs"} and result["actions"][0] == "remove container spark-vllm-next"
    assert state == "forgotten" or result["intact"]


def test_a_launch_that_docker_refuses_keeps_the_version_before(previous):
    machine = Machine("spark-vllm", "spark-ray")
    machine.launch("spark-vllm-next", running=False)
    machine.fails = ("start",)
    result = previous(machine, "kept", keep=True, ask=True, launch=True, containers=["spark-vllm"])
    assert (
        result["problem"]["id"] == "launch-failed"
        and "spark-1: vllm: found docker would not start container spark-vllm: the daemon refuses" in result["msg"]
    )
    machine.fails = ()
    assert previous(machine, "restored")["own"]["spark-vllm"] and machine.states == {"spark-ray": "runs", "spark-vllm-previous": "stopped"}


def test_an_upgrade_that_fails_gives_the_previous_version_back(previous):
    machine = Machine("spark-vllm", "spark-ray")
    upgrade(previous, machine)
    result = previous(machine, "restored")
    assert machine.states == {"spark-ray-previous": "stopped", "spark-vllm-previous": "stopped"} and machine.volumes == {"spark-tmp-a"}
    assert result["intact"] is False
    for name in ("spark-ray", "spark-vllm"):
        machine.calls.clear()
        previous(machine, "started", containers=[name], restart=True)
        assert machine.calls == [f"rename {name}-previous {name}", f"start {name}"]
    assert machine.states == {"spark-ray": "runs", "spark-vllm": "runs"}
    assert machine.containers["spark-ray"]["id"] == result["own"]["spark-ray"]["id"]
    again = previous(machine, "restored")
    assert not again["changed"] and machine.states == {"spark-ray": "runs", "spark-vllm": "runs"}
    assert previous(machine, "forgotten")["changed"] and not previous.record.exists()


def test_ray_that_stays_under_another_server_is_a_part_of_the_previous_version(previous):
    machine = Machine("spark-vllm", "spark-ray")
    result = upgrade(previous, machine, containers=["spark-vllm"])
    assert set(result["own"]) == {"spark-vllm", "spark-ray"}
    previous(machine, "restored")
    assert machine.states == {"spark-ray": "runs", "spark-vllm-previous": "stopped"}
    machine.calls.clear()
    previous(machine, "started", containers=["spark-ray"], restart=True)
    assert machine.calls == ["stop -t 60 spark-ray", "start spark-ray"]


def test_a_failure_before_the_stop_finds_it_intact(previous):
    machine = Machine("spark-vllm", "spark-ray")
    machine.fails = ("stop",)
    result = previous(machine, "kept", keep=True)
    assert result["failed"] and result["kept"] and "stop container spark-vllm: the daemon refuses" in result["msg"]
    assert previous.record.exists()
    result = previous(machine, "restored")
    assert result["intact"] and not result["changed"]


@pytest.mark.parametrize("why", ["not to be kept", "no answer", "another model"])
def test_what_is_nothing_to_come_back_to_is_removed(previous, why):
    machine = Machine("spark-vllm", "spark-ray")
    machine.answers = why != "no answer"
    if why == "another model":
        machine.ask = lambda url: (200, json.dumps({"data": [{"id": "stranger"}]}))
    result = previous(machine, "kept", keep=why != "not to be kept", ask=True)
    assert not result["kept"] and machine.states == {} and machine.volumes == set() and not previous.record.exists()


def test_a_version_that_was_never_proven_does_not_take_the_place_of_the_one_before(previous):
    """Interrupted after the launch, then run again with other settings."""
    machine = Machine("spark-vllm", "spark-ray")
    first = upgrade(previous, machine)["own"]
    result = upgrade(previous, machine)
    assert result["own"] == first and set(machine.containers) == {"spark-vllm", "spark-ray", "spark-vllm-previous", "spark-ray-previous"}
    previous(machine, "restored")
    assert {name: c["id"] for name, c in machine.containers.items()} == {f"{name}-previous": entry["id"] for name, entry in first.items()}


def test_a_previous_version_that_somebody_removed(previous):
    machine = Machine("spark-vllm", "spark-ray")
    upgrade(previous, machine)
    del machine.containers["spark-vllm-previous"]
    result = previous(machine, "restored")
    assert result["problem"]["id"] == "restore-failed" and "the previous version's container spark-vllm is gone" in result["msg"]
    assert machine.states == {"spark-ray-previous": "stopped"}


def test_what_is_not_ours_is_left_alone(previous):
    machine = Machine("spark-vllm", "spark-ray-previous", "spark-vllm-next", label="")
    for state in ("kept", "launched", "restored", "removed", "forgotten"):
        assert not previous(machine, state)["changed"]
    assert machine.states == {"spark-ray-previous": "runs", "spark-vllm": "runs", "spark-vllm-next": "runs"}


def test_the_record_of_an_old_service_stays(previous):
    previous.record.parent.mkdir()
    previous.record.write_text(json.dumps({"stopped": [{"kind": "container", "name": "old"}]}))
    machine = Machine("spark-vllm", "spark-ray")
    upgrade(previous, machine)
    assert previous(machine, "forgotten")["changed"]
    record = json.loads(previous.record.read_text())
    assert record["stopped"] == [{"kind": "container", "name": "old"}] and "own" not in record


def test_removed(previous):
    machine = Machine("spark-vllm", "spark-ray")
    assert previous(machine, "removed", containers=["spark-ray"])["changed"]
    assert machine.states == {"spark-vllm": "runs"} and machine.volumes == {"spark-tmp-a"}
    previous(machine, "removed")
    assert machine.states == {} and machine.volumes == set()


def test_the_same_settings_again_after_an_upgrade_that_was_cut_off_get_a_fresh_volume(previous):
    """Back to the inventory of before: what is written down is of the very cluster that is launched, and holds its volume."""
    machine = Machine("spark-ray", "spark-vllm")
    upgrade(previous, machine)
    assert "spark-tmp-a" in machine.volumes
    for name in ("spark-vllm", "spark-ray"):
        result = previous(machine, "kept", containers=[name], tmp_volume="spark-tmp-a")
    assert machine.states == {} and machine.volumes == set() and result["own"] == {} and not previous.record.exists()


def test_another_service_is_left_alone(previous):
    """The same roles under other names: an upgrade of one, its way back and its stop never touch the other."""
    machine = Machine("spark-vllm", "spark-ray", "spark-vllm-chat", "spark-ray-chat")
    chat = previous.record.with_name("stopped-chat.json")
    result = previous(machine, "kept", keep=True, ask=True, service="chat", record=str(chat))
    assert result["actions"] == ["set container spark-vllm-chat aside", "set container spark-ray-chat aside"]
    assert set(json.loads(chat.read_text())["own"]) == {"spark-vllm", "spark-ray"}
    assert {"spark-vllm", "spark-ray", "spark-vllm-chat-previous", "spark-ray-chat-previous"} == set(machine.states)
    assert previous(machine, "restored", service="chat", record=str(chat))["own"] == result["own"]
    previous(machine, "started", service="chat", record=str(chat), containers=["spark-ray"])
    assert machine.states["spark-ray-chat"] == "runs" and machine.states["spark-ray"] == "runs"
    previous(machine, "removed")
    assert set(machine.states) == {"spark-ray-chat", "spark-vllm-chat-previous"}


def test_the_record_of_a_service():
    given = {"record": "/var/lib/dgxspark-serving/stopped.json", "service": "chat"}
    assert serving_previous.record_of(given) == "/var/lib/dgxspark-serving/stopped-chat.json"
    assert serving_previous.record_of({**given, "service": ""}) == given["record"]
    assert serving_previous.record_of({**given, "record": "/x.json"}) == "/x.json"
