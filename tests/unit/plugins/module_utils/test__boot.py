# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the unit of a node does after a boot, on a machine that is played."""

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _boot

HEAD, WORKER = "192.168.200.12", "192.168.200.13"


class Over(Exception):
    """The test has seen enough: the program would go on for ever."""


def gang(head=True, executor="ray", **more):
    address = HEAD if head else WORKER
    containers = {"spark-ray": "ray-1", "spark-vllm": "vllm-1"} if head else {"spark-ray": "ray-1"}
    if executor == "mp":
        containers = {"spark-vllm": "vllm-1"}
    return {
        "node": "spark-1" if head else "spark-2",
        "head": head,
        "address": address,
        "head_address": HEAD,
        "addresses": [HEAD, WORKER],
        "gpus_per_node": 1,
        "executor": executor,
        "ray_port": 6379,
        "mp_port": 29501,
        "url": "http://127.0.0.1:30000",
        "served_model": "tiny",
        "containers": containers,
        "wait": 1800,
        "ready_timeout": 3600,
        **more,
    }


class Machine:
    """A node whose clock runs while it sleeps. ``events`` = {second: what happens then}."""

    def __init__(self, containers, events=None, end=10000.0, **state):
        self.containers = {
            name: {"name": name, "running": running, "definition": made, "exit_code": 0, "id": f"id-{name}", "started_at": "at first"}
            for name, (running, made) in containers.items()
        }
        self.events = dict(events or {})
        self.end = end
        self.clock = 0.0
        self.told: list[str] = []
        self.done: list[str] = []
        self.log = ""
        self.state = {
            "address": True,
            "docker": True,
            "listens": True,
            "answers": True,
            "nodes": {HEAD: "a", WORKER: "b"},
            "reserved": False,
            "partner": {"unit": "u1", "rank": "r1", "ready": True},
            "called": False,
            **state,
        }
        self.docker = self

    # the clock
    def now(self):
        return self.clock

    def sleep(self, seconds):
        self.clock += seconds
        for second in sorted(self.events):
            if second <= self.clock:
                self.events.pop(second)(self)
        if self.clock > self.end:
            raise Over

    # Docker
    def inspect(self, names):
        if not self.state["docker"]:
            raise _boot.DockerError("no daemon")
        return {
            n: {**c, "labels": {_boot.DEFINITION: c["definition"]}, "state": "running" if c["running"] else "exited"}
            for n, c in self.containers.items()
            if n in names
        }

    def start(self, name):
        self.done.append(f"start {name}")
        self.containers[name].update(running=True, started_at=f"at {self.clock:.0f}")
        return 0, "", ""

    def stop(self, name, grace):
        self.done.append(f"stop {name}")
        self.containers[name]["running"] = False
        return 0, "", ""

    def log_text(self, name, **dummy):
        return self.log

    # the rest
    def tell(self, text):
        self.told.append(text)

    def has_address(self, address):
        return self.state["address"]

    def listens(self, address, port):
        return self.state["listens"]

    def empty_tmp(self, name):
        self.done.append(f"empty the /tmp of {name}")

    def call(self, address, port, word):
        assert port == 29501
        partner = self.state["partner"]
        if word == "start":
            self.done.append(f"call {address}")
            return partner and {**partner, "starts": partner["ready"]}
        return partner

    def attend(self, place, seconds, state):
        assert place == (WORKER, 29501, HEAD)
        self.sleep(seconds)
        self.answered = state()
        called, self.state["called"] = self.state["called"] and self.answered["ready"], False
        return called

    def answers(self, url, model, patience=300):
        return self.state["answers"] and any(c["running"] for name, c in self.containers.items() if name.startswith("spark-vllm"))

    def table(self, container, address):
        free = {"GPU": 0.0 if self.state["reserved"] else 1.0}
        return {
            "nodes": [
                {"address": a, "id": i, "alive": True, "resources": {"GPU": 1.0}, "available": free} for a, i in self.state["nodes"].items()
            ]
        }

    # events
    def change(self, **state):
        self.state.update(state)

    def end_of(self, name, code=1, log=""):
        self.containers[name].update(running=False, exit_code=code)
        self.log = log


OFF = {"spark-ray": (False, "ray-1"), "spark-vllm": (False, "vllm-1")}
ON = {"spark-ray": (True, "ray-1"), "spark-vllm": (True, "vllm-1")}


def run(machine, **more):
    try:
        return _boot.Gang(gang(**more), machine).run()
    except Over:
        return "goes on"


def test_the_head_waits_for_the_worker_before_it_starts_the_server():
    machine = Machine(OFF, {200: lambda m: m.change(nodes={HEAD: "a", WORKER: "b"})}, end=300, nodes={HEAD: "a"})
    assert run(machine) == "goes on" and machine.told[-1] == "serves"
    assert machine.done == ["empty the /tmp of spark-ray", "start spark-ray", "start spark-vllm"]
    waits = [text for text in machine.told if text.startswith("waits: the gang is not complete")]
    assert waits[1].endswith("192.168.200.13 is not in the cluster; the cluster has 1 GPU instead of 2 (30 of 1800 s)")
    assert machine.told.index(waits[-1]) < machine.told.index("starts spark-vllm (1 of 3)")


def test_a_worker_joins_when_the_head_is_there():
    machine = Machine({"spark-ray": (False, "ray-1")}, {90: lambda m: m.change(listens=True)}, end=200, listens=False)
    assert run(machine, head=False) == "goes on" and machine.told[-1] == "is part of the gang"
    assert machine.done == ["empty the /tmp of spark-ray", "start spark-ray"]
    assert machine.told[0] == "waits: no answer of the head's Ray at 192.168.200.12:6379 (0 of 1800 s)"


STAYS_DOWN = {
    "no worker comes": (
        Machine(OFF, nodes={HEAD: "a"}),
        {},
        "the gang is not complete: 192.168.200.13 is not in the cluster; the cluster has 1 GPU instead of 2, for 1800 s",
    ),
    "no head comes": (
        Machine({"spark-ray": (False, "ray-1")}, listens=False),
        {"head": False},
        "no answer of the head's Ray at 192.168.200.12:6379, for 1800 s",
    ),
    "no cable": (Machine(OFF, address=False), {"wait": 60}, "no interface has 192.168.200.12, for 60 s"),
    "Docker is down": (Machine(OFF, docker=False), {}, "Docker does not answer, for 300 s"),
    "a stranger in Ray": (
        Machine(OFF, nodes={HEAD: "a", WORKER: "b", "192.168.200.99": "c"}),
        {"wait": 60},
        "192.168.200.99 is in the cluster and not in the plan",
    ),
    "the GPU is taken": (Machine(OFF, reserved=True), {"wait": 60}, "1 GPU of 192.168.200.12 is reserved"),
    "the server ends while it loads": (
        Machine(
            OFF,
            {20: lambda m: m.end_of("spark-vllm", 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")},
            answers=False,
        ),
        {},
        "spark-vllm exited with code 1: ",
    ),
    "the server hangs": (Machine(OFF, answers=False), {"ready_timeout": 600}, "spark-vllm gives no answer, for 600 s"),
    "the server ends and its gang is whole": (
        Machine(ON, {100: lambda m: m.end_of("spark-vllm", 1)}),
        {},
        "spark-vllm exited with code 1. It is not started again",
    ),
    "Ray of the head ends": (Machine(ON, {100: lambda m: m.end_of("spark-ray", 137)}), {}, "spark-ray exited with code 137"),
}


@pytest.mark.parametrize("name", STAYS_DOWN)
def test_stays_down_with_the_reason(name):
    machine, more, reason = STAYS_DOWN[name]
    assert run(machine, **more) == 1
    assert machine.told[-1].startswith("down: ") and reason in machine.told[-1]
    assert machine.done.count("start spark-vllm") <= 1
    assert (machine.done[-1:] == ["stop spark-vllm"]) == (name == "the server hangs"), "what hangs must not keep the memory"


def test_a_worker_that_lost_power_comes_back_and_the_server_is_started_again():
    def power_cut(machine):
        machine.end_of("spark-vllm", 1)
        machine.change(nodes={HEAD: "a"})

    machine = Machine(ON, {100: power_cut, 300: lambda m: m.change(nodes={HEAD: "a", WORKER: "c"})}, end=400)
    assert run(machine) == "goes on" and machine.told[-1] == "serves"
    assert machine.done == ["start spark-vllm"], "Ray of the head goes on, only the server is started"


def test_ray_that_has_not_missed_the_worker_yet_is_asked_again():
    machine = Machine(
        ON,
        {
            100: lambda m: m.end_of("spark-vllm"),
            140: lambda m: m.change(nodes={HEAD: "a"}),
            300: lambda m: m.change(nodes={HEAD: "a", WORKER: "c"}),
        },
        end=400,
    )
    assert run(machine) == "goes on" and machine.done == ["start spark-vllm"]


def test_a_head_that_lost_power_is_joined_again():
    machine = Machine({"spark-ray": (True, "ray-1")}, {100: lambda m: m.end_of("spark-ray")}, end=200)
    assert run(machine, head=False) == "goes on"
    assert machine.done == ["empty the /tmp of spark-ray", "start spark-ray"]


def test_never_a_loop():
    events = {second: (lambda m: m.end_of("spark-ray")) for second in range(100, 2000, 100)}
    machine = Machine({"spark-ray": (True, "ray-1")}, events)
    assert run(machine, head=False) == 1 and machine.done.count("start spark-ray") == 3
    assert "was started 3 times" in machine.told[-1]


@pytest.mark.parametrize(
    "containers, missing",
    [({}, "spark-ray, spark-vllm"), ({**OFF, "spark-vllm": (False, "vllm-2")}, "spark-vllm")],
    ids=["a playbook removed them", "another definition"],
)
def test_what_is_not_ours_to_start_is_left_alone(containers, missing):
    machine = Machine(containers, end=100)
    assert run(machine) == "goes on" and machine.done == []
    assert machine.told == [f"stands by: no {missing} of this definition on this node"]


def test_containers_that_a_playbook_replaces_are_no_failure():
    def gone(machine):
        machine.containers.clear()

    machine = Machine(ON, {100: lambda m: m.end_of("spark-vllm", 143), 102: gone}, end=200)
    assert run(machine) == "goes on" and machine.done == []
    assert machine.told[-1].startswith("stands by: ")


def test_what_serves_already_is_only_watched():
    machine = Machine(ON, end=500, reserved=True)
    assert run(machine) == "goes on" and machine.done == [] and machine.told == ["serves"]


def test_mp_starts_its_rank_and_does_not_ask_ray():
    machine = Machine({"spark-vllm": (False, "vllm-1")}, end=100, nodes={}, called=True)
    assert run(machine, executor="mp", head=False) == "goes on" and machine.done == ["start spark-vllm"]


def test_a_server_that_a_playbook_launched_meanwhile_is_not_stopped():
    def launched(machine):
        machine.containers["spark-vllm"].update(definition="vllm-2")

    machine = Machine(OFF, {300: launched}, answers=False)
    assert run(machine, ready_timeout=600) == 1 and "stop spark-vllm" not in machine.done


def test_ray_that_a_playbook_launched_meanwhile_keeps_its_sockets():
    def launched(machine):
        machine.containers["spark-ray"]["running"] = True
        machine.change(listens=True)

    machine = Machine({"spark-ray": (False, "ray-1")}, {90: launched}, end=200, listens=False)
    assert run(machine, head=False) == "goes on" and machine.done == []


def test_a_restart_of_docker_is_waited_for():
    machine = Machine(ON, {100: lambda m: m.change(docker=False), 120: lambda m: m.change(docker=True)}, end=300)
    assert run(machine) == "goes on" and machine.told[-1] == "serves"


RANK_OFF, RANK_ON = {"spark-vllm": (False, "vllm-1")}, {"spark-vllm": (True, "vllm-1")}


def test_a_rank_of_mp_starts_when_the_heads_unit_says_so():
    machine = Machine(RANK_OFF, {900: lambda m: m.change(called=True)}, end=1000)
    assert run(machine, executor="mp", head=False) == "goes on" and machine.done == ["start spark-vllm"]
    assert "waits: no word from the head's unit at 192.168.200.12 (30 of 1800 s)" in machine.told
    assert machine.answered["ready"] and machine.answered["rank"].startswith("id-spark-vllm at 90")


def test_the_ranks_of_mp_start_at_the_same_time():
    """A rank gives up after some minutes without the others."""
    machine = Machine(RANK_OFF, {200: lambda m: m.change(partner={"unit": "u1", "rank": "", "ready": True})}, end=300, partner=None)
    assert run(machine, executor="mp") == "goes on" and machine.told[-1] == "serves"
    assert machine.done == [f"call {WORKER}", "start spark-vllm"]
    assert "waits: no rank is ready on 192.168.200.13 (30 of 1800 s)" in machine.told


@pytest.mark.parametrize("partner", [None, {"unit": "u1", "rank": "", "ready": False}], ids=["not there", "its unit is not ready"])
def test_a_head_of_mp_without_its_partner_stays_down(partner):
    machine = Machine(RANK_OFF, partner=partner)
    assert run(machine, executor="mp") == 1 and machine.done == []
    assert machine.told[-1] == "down: no rank is ready on 192.168.200.13, for 1800 s"


REBOOTED = {"unit": "u2", "rank": "", "ready": True}
HANGS = {"answers": False}


@pytest.mark.parametrize("seen", [None, REBOOTED], ids=["was away", "was back before it was missed"])
def test_a_partner_of_mp_that_alone_was_rebooted(seen):
    """The head's server hangs then, and would hang for ever."""
    events = {
        100: lambda m: m.change(partner=seen, **HANGS),
        300: lambda m: m.change(partner=REBOOTED, answers=True),
    }
    machine = Machine(RANK_ON, events, end=600)
    assert run(machine, executor="mp") == "goes on" and machine.told[-1] == "serves"
    assert machine.done == ["stop spark-vllm", f"call {WORKER}", "start spark-vllm"]


def test_a_partner_of_mp_that_is_lost_right_after_the_server_has_answered():
    """Before the head's unit looks for the first time: away by its first look, and for good."""
    machine = Machine(RANK_ON, {1: lambda m: m.change(partner=None, **HANGS)}, end=1900)
    assert run(machine, executor="mp") == 1 and machine.done == ["stop spark-vllm"]
    assert "spark-vllm gives no answer since the rank left on 192.168.200.13 (away): stops it" in machine.told
    assert machine.told[-1] == "down: no rank is ready on 192.168.200.13, for 1800 s"


def test_a_partner_of_mp_that_was_rebooted_before_the_heads_unit_was_there():
    """A playbook starts the unit when the server answers; by then the rank it answered with may be gone."""
    machine = Machine(
        RANK_ON, {30: lambda m: m.change(partner=REBOOTED, **HANGS), 60: lambda m: m.change(answers=True)}, end=300, partner=None
    )
    assert run(machine, executor="mp") == "goes on" and machine.told[-1] == "serves"
    assert "spark-vllm gives no answer since the rank left on 192.168.200.13 (not started): stops it" in machine.told
    assert machine.done == ["stop spark-vllm", f"call {WORKER}", "start spark-vllm"]


def test_a_head_of_mp_that_alone_was_rebooted():
    """The rank on the worker may run on, and is of no use."""
    machine = Machine(RANK_ON, {100: lambda m: m.change(called=True)}, end=300)
    assert run(machine, executor="mp", head=False) == "goes on" and machine.told[-1] == "is part of the gang"
    assert machine.done == ["stop spark-vllm", "start spark-vllm"]


def test_a_rank_of_mp_that_ended_without_its_head_joins_the_next_gang():
    machine = Machine(RANK_ON, {100: lambda m: m.end_of("spark-vllm"), 400: lambda m: m.change(called=True)}, end=600)
    assert run(machine, executor="mp", head=False) == "goes on" and machine.done == ["start spark-vllm"]


def test_a_rank_of_mp_that_ended_by_itself_ends_the_gang():
    """Nobody else would: the others go on waiting for it, and hold their memory."""
    machine = Machine(RANK_ON, {100: lambda m: m.change(partner={"unit": "u1", "rank": "", "ready": False}, **HANGS)})
    assert run(machine, executor="mp") == 1 and machine.done == ["stop spark-vllm"]
    assert machine.told[-1].startswith("down: the rank on 192.168.200.13 (ended). It is not started again by itself")


@pytest.mark.parametrize(
    "partner",
    [None, {"unit": "u1", "rank": "", "ready": False}, {"unit": "u2", "rank": "r1", "ready": True}],
    ids=["no word of its unit", "Docker does not tell it", "its unit was started anew"],
)
def test_a_server_of_mp_that_answers_is_never_stopped(partner):
    machine = Machine(RANK_ON, {100: lambda m: m.change(partner=partner)}, end=2000)
    assert run(machine, executor="mp") == "goes on" and machine.done == [] and machine.told == ["serves"]


def test_a_server_of_mp_that_ended_by_itself_stays_down():
    """Its partner's rank ends in consequence."""

    def ends(machine):
        machine.end_of("spark-vllm")
        machine.change(partner={"unit": "u1", "rank": "", "ready": True})

    machine = Machine(RANK_ON, {100: ends})
    assert run(machine, executor="mp") == 1 and machine.done == []
    assert "spark-vllm exited with code 1. It is not started again by itself" in machine.told[-1]


def test_a_server_of_mp_that_ended_with_its_partners_node_is_started_again():
    def power_cut(machine):
        machine.end_of("spark-vllm")
        machine.change(partner=None)

    machine = Machine(RANK_ON, {100: power_cut, 300: lambda m: m.change(partner=REBOOTED)}, end=600)
    assert run(machine, executor="mp") == "goes on"
    assert machine.done == [f"call {WORKER}", "start spark-vllm"]


def test_a_rank_of_mp_that_a_playbook_stops_is_no_failure():
    machine = Machine(
        {"spark-vllm": (True, "vllm-1")}, {100: lambda m: m.end_of("spark-vllm"), 130: lambda m: m.containers.clear()}, end=300
    )
    assert run(machine, executor="mp", head=False) == "goes on" and machine.told[-1].startswith("stands by")


@pytest.mark.parametrize(
    "code, log, reason",
    [
        (137, "", "spark-vllm exited with code 137"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "spark-vllm exited with code 1: "),
    ],
    ids=["killed", "out of memory"],
)
def test_a_rank_of_mp_that_ended_by_itself_stays_down(code, log, reason):
    events = {100: lambda m: m.end_of("spark-vllm", code, log), 150: lambda m: m.change(called=True)}
    machine = Machine(RANK_ON, events, end=600)
    assert run(machine, executor="mp", head=False) == 1 and reason in machine.told[-1]
    assert machine.done == []
    assert machine.answered["rank"] == "" and not machine.answered["ready"], "the head is told for as long as the unit is there"


def test_a_second_service_starts_its_own_containers():
    own = {"spark-ray-chat": "ray-1", "spark-vllm-chat": "vllm-1"}
    machine = Machine({**OFF, **{name: (False, made) for name, made in own.items()}}, end=300, nodes={HEAD: "a", WORKER: "b"})
    assert run(machine, service="chat", containers=own) == "goes on" and machine.told[-1] == "serves"
    assert machine.done == ["empty the /tmp of spark-ray-chat", "start spark-ray-chat", "start spark-vllm-chat"]
