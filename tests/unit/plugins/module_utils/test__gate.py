# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host gate: each rule with facts that pass and facts that do not, and what an override makes of it."""

from __future__ import annotations

import json
import pathlib

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _fit, _gate, _host, _node
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

FIXTURES = pathlib.Path(_gate.__file__).resolve().parents[2] / "tests" / "unit" / "fixtures"
REFERENCE = json.loads((FIXTURES / "fit" / "qwen3.5-122b-a10b-fp8.config.json").read_text(encoding="utf-8"))
WEIGHTS = 127163011832  # of the reference model
LLAMA = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}
MEMINFO = (FIXTURES / "node" / "meminfo").read_text(encoding="utf-8")  # a Spark with kernel 7.0, after a download
SPARK = 127535084 * 1024
GIB = 1 << 30


def told(problems):
    """(id, node) of each problem."""
    return [(problem.id, problem.node) for problem in problems]


def judged(members, weights=0, config=None, in_place=False, **values):
    return _gate.judge(_gate.Look(gang.settings(**values), members, weights, config, in_place))


def short(found):
    return [(finding.rule, finding.severity, finding.problem.node) for finding in found]


# --- every rule, good and bad: (facts or more of both nodes, what is found, words of the message)


def memory(text=MEMINFO, shm=64 << 30, **more):
    """The memory of a node from what its kernel says; ``more`` in GiB."""
    return {"memory": {**_node.memory_record(text, shm), **{key: value * GIB for key, value in more.items()}}}


PLENTY = memory(
    MEMINFO.replace("SwapTotal:      16777212", "SwapTotal:      0").replace("SwapFree:       16777212", "SwapFree:       0"), free=112
)
IDLE_CMA = {**PLENTY, "rdma_devices": ["rocep1s0f1"], "kernel": "7.0.0-1019-nvidia"}
GOOD_CMA = {**memory(free=112, swap_total=0, swap_free=0, cma_total=1, cma_free=0), "rdma_devices": ["rocep1s0f1"]}


def image(user):
    return {"image": {"present": True, "fingerprint": gang.FINGERPRINT, "id": "sha256:1", "user": user}}


IPC = {"remove_ipc": {"active": True, "linger": []}}
OLD = {"running": False, "state": "exited", "gpu": True, "restart_policy": "always"}
EARLYOOM = {"name": "earlyoom", "pid": 812}

# rule: [(facts of the worker, settings, found there, words)]
CASES = {
    "docker_store": [
        ({"docker": {"driver": "overlay2"}}, {}, False, ""),
        ({"docker": {"driver": "overlayfs", "store": "containerd"}}, {}, False, ""),
        ({"docker": {"driver": "vfs", "root_dir": "/var/lib/docker"}}, {}, True, "storage driver vfs at /var/lib/docker"),
        ({"docker": {"driver": "vfs", "installed": False}}, {}, False, ""),
    ],
    "memlock": [
        ({"limits": {"memlock": -1, "nofile": 1048576}}, {}, False, ""),
        (
            {"limits": {"memlock": 8388608, "nofile": 20000}},
            {},
            True,
            "spark_ulimits memlock:-1:-1, and a Docker that may give memlock 8388608 at most",
        ),
        ({"limits": {"memlock": 8388608, "nofile": 20000}}, {"ulimits": ["memlock:4096:8388608"]}, False, ""),
        ({"limits": {"memlock": -1, "nofile": 20000}}, {"ulimits": ["nofile:65536"]}, True, "nofile:65536"),
        ({"limits": {"memlock": 0, "nofile": 0}}, {}, False, ""),  # nothing could be read
    ],
    "shm": [
        (memory(shm=60 << 30), {}, False, ""),
        (memory(shm=160 << 20), {}, False, ""),
        (memory(shm=64 << 20), {}, True, "/dev/shm of 64 MiB; expected 160 MiB or more"),
        (memory(shm=0), {}, False, ""),
    ],
    "kernel_cma": [
        (GOOD_CMA, {}, False, ""),
        ({**IDLE_CMA, **memory(free=112, swap_total=0, swap_free=0, cma_free=0)}, {}, False, ""),  # a kernel without CMA: 0 and 0
        (IDLE_CMA, {}, True, "kernel 7.0.0-1019-nvidia with CmaFree 940604 kB above CmaTotal 0 kB"),
        ({**IDLE_CMA, "rdma_devices": []}, {}, False, ""),  # nothing registers memory there
    ],
    "remove_ipc": [
        ({**IPC, **image("")}, {}, False, ""),
        ({**IPC, **image("root")}, {}, False, ""),
        ({**IPC, **image("0:0")}, {}, False, ""),
        ({**IPC, **image("999")}, {}, False, ""),  # a system's user
        (
            {**IPC, **image("1000:1000")},
            {},
            True,
            "an image that runs as user 1000, and RemoveIPC of logind in force: when nvidia logs out",
        ),
        ({**IPC, **image("vllm")}, {}, True, "runs as user vllm"),
        ({"remove_ipc": {"active": True, "linger": ["nvidia"]}, **image("1000")}, {}, False, ""),
        ({"remove_ipc": {"active": True, "linger": ["other"]}, **image("1000")}, {}, True, "user 1000"),
        ({"remove_ipc": {"active": False, "linger": []}, **image("1000")}, {}, False, ""),
    ],
    "memory_available": [
        (PLENTY, {}, False, ""),
        (
            memory(free=30, available=60),
            {},
            True,
            "60.0 GiB of memory available of 121.6 GiB, and a server that asks for 97.3 GiB (spark_gpu",
        ),
        (memory(free=30, available=60), {"gpu_memory_utilization": 0.4}, False, ""),
        # What ollama holds is told where the inventory accepts it beside us.
        (
            {**memory(free=30, available=60), "gpu": {"processes": [{"pid": 9, "name": "ollama", "memory_mib": 40000}]}},
            {"gate": {"gpu_held": "ignore"}},
            True,
            "(on the GPU: ollama 40000 MiB)",
        ),
        # The old service will be stopped: what it holds comes back.
        (
            {**memory(free=10, available=20), "containers": [gang.container("glm-sglang", gpu=True)]},
            {"stop": {"containers": ["glm-sglang"], "units": [], "compose_projects": []}},
            False,
            "",
        ),
        (
            {**memory(free=10, available=20), "containers": [gang.container("spark-vllm", gpu=True, labels={"dgxspark.serving": "1"})]},
            {},
            False,
            "",
        ),
    ],
    "page_cache": [
        (PLENTY, {}, False, ""),
        (memory(), {}, True, "18.1 GiB of memory free and 112.0 GiB available: the page cache holds what vLLM asks for (97.3 GiB)"),
        (memory(available=60), {}, False, ""),  # more than the page cache is missing
    ],
    "memory_leaked": [
        (memory(unaccounted=2), {}, False, ""),
        (memory(unaccounted=30), {}, True, "30.0 GiB of 121.6 GiB of memory that no process and no cache holds"),
        ({**memory(unaccounted=30), "gpu": {"processes": [{"pid": 9, "name": "ollama", "memory_mib": 30000}]}}, {}, False, ""),
        ({**memory(unaccounted=30), "containers": [gang.container("glm-sglang", gpu=True)]}, {}, False, ""),
    ],
    "swap": [
        (PLENTY, {}, False, ""),
        (memory(), {}, True, "16.0 GiB of swap, 0.0 GiB of it used"),
    ],
    "oom_daemon": [
        ({**PLENTY, "oom_daemons": []}, {}, False, ""),
        (
            {**PLENTY, "oom_daemons": [{**EARLYOOM, "limit": _host.earlyoom_limit(["earlyoom", "-m", "2", "-s", "80"], SPARK)}]},
            {},
            False,
            "",
        ),
        ({**PLENTY, "oom_daemons": [{**EARLYOOM, "limit": _host.earlyoom_limit([], SPARK)}]}, {}, False, ""),  # 24 GiB are left
        (
            {**PLENTY, "oom_daemons": [{**EARLYOOM, "limit": _host.earlyoom_limit([], SPARK)}]},
            {"gpu_memory_utilization": 0.88},
            True,
            "earlyoom (pid 812), which kills when less than 12.2 GiB are available; 14.6 GiB are left beside vLLM's share",
        ),
        ({**PLENTY, "oom_daemons": [{"name": "systemd-oomd", "pid": 7, "limit": None}]}, {}, True, "disable --now systemd-oomd.service"),
    ],
    "restart_policy": [
        ({"containers": [gang.container("glm", **OLD)]}, {}, True, "docker update --restart=no glm"),
        ({"containers": [gang.container("glm", **{**OLD, "restart_policy": "unless-stopped"})]}, {}, False, ""),
        ({"containers": [gang.container("web", **{**OLD, "gpu": False})]}, {}, False, ""),
        (
            {"containers": [gang.container("api", **{**OLD, "gpu": False, "ports": [{"host_port": 30000}]})]},
            {},
            True,
            "it takes port 30000 again",
        ),
        ({"containers": [gang.container("glm", **OLD)]}, {"stop": {"containers": ["glm"], "units": [], "compose_projects": []}}, False, ""),
        (
            {"containers": [gang.container("x", compose_project="p", **OLD)]},
            {"stop": {"containers": [], "units": [], "compose_projects": ["p"]}},
            False,
            "",
        ),
        ({"containers": [gang.container("spark-ray-previous", labels={"dgxspark.serving": "1"}, **OLD)]}, {}, False, ""),
    ],
    "autostart": [
        ({"autostart": []}, {}, False, ""),
        (
            {"autostart": [{"unit": "ollama.service", "word": "ollama"}]},
            {},
            True,
            "sudo systemctl disable ollama.service, or name it in spark_stop",
        ),
        (
            {"autostart": [{"unit": "ollama.service", "word": "ollama"}]},
            {"stop": {"containers": [], "units": ["ollama"], "compose_projects": []}},
            False,
            "",
        ),
        (
            {"autostart": [{"unit": "spark/sglang.service", "word": "sglang"}]},
            {},
            True,
            "systemctl --user disable sglang.service, as spark",
        ),
    ],
}
NODE_CASES = [(rule, number) for rule, cases in CASES.items() for number in range(len(cases))]


@pytest.mark.parametrize(("rule", "number"), NODE_CASES)
def test_rule_of_a_node(rule, number):
    facts, values, expected, words = CASES[rule][number]
    row = next(row for row in _gate.RULES if row.name == rule)
    members = gang.pair({}, facts)
    found = [finding for finding in judged(members, **values) if finding.rule == rule]
    assert short(found) == ([(rule, row.severity, "spark-2")] if expected else [])
    if not expected:
        return
    (problem,) = [finding.problem for finding in found]
    assert problem.id == row.problem and words in problem.msg
    # the same facts with every override
    gate = values.get("gate", {})
    for level in ("error", "warn"):
        again = judged(members, **{**values, "gate": {**gate, rule: level}})
        assert [finding.severity for finding in again if finding.rule == rule] == [level]
    assert rule not in [finding.rule for finding in judged(members, **{**values, "gate": {**gate, rule: "ignore"}})]
    # and nothing of it once everything runs
    assert rule not in [finding.rule for finding in judged(members, in_place=True, **values)]


def test_every_rule_has_a_bad_case():
    """Here, or in the tables of the older rules below and the tests of the functions that they call."""
    called = {
        "network_variables",
        "fabric_topology",
        "gid_index",
        "attention_heads",
        "pipeline_stages",
        "engine_nodes",
        "service_ports",
        "service_memory",
        "service_unknown",
        "container_name",
        "memory_weights",
        "memory_context",
        "memory_uneven",
    }
    below = {"docker_missing", "docker_access", "python_requests", "docker_gpu", "gpu_driver", "gpu_missing", "port_held", "gpu_held", "architecture",
             "clock_skew", "fabric_mtu", "fabric_rails", "kernel_differs", "driver_differs"}  # fmt: skip
    assert set(CASES) | called | below == set(_gate.NAMES)
    assert all(any(found for _facts, _values, found, _words in cases) for cases in CASES.values())


def test_a_healthy_pair_passes_everything():
    assert judged(gang.pair(PLENTY, PLENTY), WEIGHTS, REFERENCE, max_model_len=16384) == []


def test_facts_that_are_missing_find_nothing():
    bare = {key: gang.node()[key] for key in ("machine", "time", "user", "docker", "gpu", "containers", "python_requests")}
    members = [gang.member("spark-1", bare), gang.member("spark-2", bare)]
    assert judged(members, WEIGHTS, REFERENCE) == []


# --- overrides by name


def test_an_unknown_rule_is_one_error_that_lists_the_known_ones():
    problems = _gate.override_problems({"swop": "ignore", "kernel": "warn", "swap": "ignore"})
    assert [problem.id for problem in problems] == ["input"]
    assert problems[0].found == "unknown rules kernel, swop in spark_gate"
    assert problems[0].expected == f"names of rules: {', '.join(_gate.NAMES)}"
    assert "did you mean swap?" in _gate.override_problems({"swop": "ignore"})[0].remedy


@pytest.mark.parametrize("level", ["ignored", "no", False, None, 1])
def test_a_level_that_is_none(level):
    (problem,) = _gate.override_problems({"swap": level})
    assert problem.found == f"spark_gate swap: {level!r}" and problem.expected == "one of error, warn, ignore"


def test_levels():
    assert _gate.override_problems({"swap": "error", "gpu_held": "warn", "page_cache": "ignore"}) == []
    assert (
        _gate.level("swap", {}) == "warn" and _gate.level("swap", {"swap": "error"}) == "error" and _gate.level("gpu_held", None) == "error"
    )


def test_what_the_launch_needs_to_know():
    member = gang.member(facts=gang.node(**PLENTY))
    assert _gate.launch(gang.settings(), member) == {"need": int(SPARK * 0.8), "short": "error", "cache": "warn"}
    assert _gate.launch(gang.settings(gate={"memory_available": "warn", "page_cache": "ignore"}), member) == {
        "need": int(SPARK * 0.8),
        "short": "warn",
        "cache": "ignore",
    }


# --- one message


def test_everything_of_all_nodes_is_one_message_with_errors_first():
    found = judged(gang.pair({**memory(free=112), "python_requests": None}, {**memory(free=112), "gpu": {"count": 0}}))
    assert short(found) == [
        ("python_requests", "error", "spark-1"),
        ("gpu_missing", "error", "spark-2"),
        ("swap", "warn", "spark-1"),
        ("swap", "warn", "spark-2"),
    ]
    lines = _gate.message(found).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("spark-1: preflight: found no Python package requests; expected ") and lines[0].endswith(
        "(rule python_requests)"
    )
    assert lines[1].startswith("spark-2: preflight: found 0 GPUs; expected ") and lines[1].endswith("(rule gpu_missing)")
    assert lines[2] == "Beside that, as warnings:"
    assert lines[3].startswith("- spark-1, spark-2: preflight: found 16.0 GiB of swap")
    assert _gate.teller(found, ["spark-1", "spark-2"]) == "spark-1"


@pytest.mark.parametrize(
    ("head", "worker", "expected"),
    [
        ({}, {"gpu": {"count": 0}}, "spark-2"),
        ({"gpu": {"count": 0}}, {"gpu": {"count": 0}}, "spark-1"),
        ({}, {"time": 1.0}, "spark-1"),  # a clock is about both
        ({}, {"gpu": {"count": 0}, "time": 1.0}, "spark-2"),
        ({"limits": {"memlock": 1}}, {"limits": {"memlock": 1}, "gpu": {"count": 0}}, "spark-2"),  # whose line is the first
    ],
)
def test_who_tells_it(head, worker, expected):
    assert _gate.teller(judged(gang.pair(head, worker)), ["spark-1", "spark-2"]) == expected


def test_an_override_lets_a_tenant_stay():
    tenant = {"gpu": {"processes": [{"pid": 9, "name": "ollama", "memory_mib": 4000}]}}
    assert short(judged(gang.pair({}, tenant))) == [("gpu_held", "error", "spark-2")]
    assert short(judged(gang.pair({}, tenant), gate={"gpu_held": "warn"})) == [("gpu_held", "warn", "spark-2")]
    assert judged(gang.pair({}, tenant), gate={"gpu_held": "ignore"}) == []


# --- the model against the memory of the smallest node


def fits(weights, config=None, head=None, worker=None, **values):
    total = {"total": SPARK}
    return judged(gang.pair({"memory": head or total}, {"memory": worker or total}), weights, config, **values)


def test_gate_lets_the_reference_through():
    assert fits(WEIGHTS, REFERENCE, max_model_len=16384) == []


@pytest.mark.parametrize(
    ("settings", "weights", "refused"),
    [
        ({}, 250 * GIB, True),
        ({"gpu_memory_utilization": 0.45}, WEIGHTS, True),
        ({"vllm_args": ["--quantization", "fp8"]}, 250 * GIB, False),
        ({"vllm_args": ["--cpu-offload-gb=20"]}, 250 * GIB, False),
        ({"env": {"VLLM_PLE_CPU_OFFLOAD": "1"}}, 250 * GIB, False),
        ({}, 0, False),
        ({}, 190 * GIB, False),
    ],
)
def test_gate_refuses_only_weights_that_cannot_fit(settings, weights, refused):
    found = fits(weights, **settings)
    assert short(found) == ([("memory_weights", "error", "spark-1")] if refused else [])
    if refused:
        problem = found[0].problem
        assert (problem.id, problem.stage) == ("MEM-03", "memory")
        assert "over 2 ranks" in problem.found and "spark_gpu_memory_utilization" in problem.remedy


def test_gate_warns_of_a_context_that_may_not_fit():
    (finding,) = fits(WEIGHTS, REFERENCE, gpu_memory_utilization=0.56)
    assert (finding.rule, finding.severity, finding.problem.id) == ("memory_context", "warn", "MEM-03")
    # the figures of playbooks/plan.yml
    plan = _fit.fit(REFERENCE, WEIGHTS, tensor_parallel=2, memory=SPARK, utilization=0.56)
    assert f"leaves {_fit.text_of(plan['kv_space'])} for the KV cache" in finding.problem.found
    assert "262144 tokens" in finding.problem.found and f"about {plan['longest_context']})" in finding.problem.found
    assert "--kv-cache-dtype fp8" in finding.problem.remedy
    for more in ({"max_model_len": 16384}, {"vllm_args": ["--quantization", "fp8"]}):
        assert fits(WEIGHTS, REFERENCE, gpu_memory_utilization=0.56, **more) == []


def test_gate_says_nothing_of_a_model_it_does_not_know():
    assert fits(10**9, {"model_type": "new"}) == []
    assert judged(gang.pair(), 10**12) == []


@pytest.mark.parametrize(
    ("config", "engines", "refused"),
    [
        (LLAMA, 1, False),  # 140 GiB over two ranks
        (LLAMA, 2, True),  # over one rank each
        (REFERENCE, 2, False),  # experts are shared: not known how much is on each
        (None, 2, False),
    ],
)
def test_engines_that_do_not_share_hold_all_weights_each(config, engines, refused):
    found = fits(140 << 30, config, tensor_parallel=2 // engines, data_parallel=engines, max_model_len=4096)
    assert [finding.rule for finding in found if finding.severity == "error"] == (["memory_weights"] if refused else [])


def test_the_smallest_node_decides():
    found = fits(WEIGHTS, REFERENCE, {"total": 121 * GIB}, {"total": 60 * GIB})
    assert short(found) == [("memory_weights", "error", "spark-2"), ("memory_uneven", "warn", "spark-2")]
    assert found[1].problem.found == "60.0 GiB of memory, and 121.0 GiB on spark-1; the smallest decides what fits"
    assert fits(10**9, None, {"total": 121 * GIB}, {"total": 119 * GIB}) == []


# --- the nodes compared: versions


@pytest.mark.parametrize(
    ("head", "worker", "expected"),
    [
        ({"kernel": "6.17.0-1014-nvidia"}, {"kernel": "6.17.0-1014-nvidia"}, []),
        (
            {"kernel": "6.17.0-1014-nvidia"},
            {"kernel": "7.0.0-1019-nvidia"},
            [("kernel_differs", "different kernels: spark-1 6.17.0-1014-nvidia, spark-2 7.0.0-1019-nvidia")],
        ),
        ({"kernel": "6.17.0-1014-nvidia"}, {}, []),
        ({"gpu": {"driver": "580.126.09"}}, {"gpu": {"driver": "580.142"}}, [("driver_differs", "spark-1 580.126.09, spark-2 580.142")]),
    ],
)
def test_versions(head, worker, expected):
    found = judged(gang.pair(head, worker))
    assert short(found) == [(rule, "warn", "") for rule, _words in expected]
    assert all(
        words in finding.problem.found and finding.problem.id == "nodes-differ"
        for finding, (_rule, words) in zip(found, expected, strict=True)
    )


# --- one node

NODE_RULES = {
    "everything is there": ({}, [], ""),
    "no docker": (
        {"docker": {"installed": False, "reachable": False, "error": "no docker command in PATH"}},
        ["docker-missing"],
        "no docker command in PATH",
    ),
    "the socket is not for this user": (
        {"docker": {"reachable": False, "error": "permission denied: /var/run/docker.sock"}},
        ["DOC-02"],
        "permission denied: /var/run/docker.sock",
    ),
    "the daemon is silent": ({"docker": {"reachable": False}}, ["DOC-02"], "does not answer"),
    "no requests": ({"python_requests": None}, ["DOC-05"], "apt-get install python3-requests"),
    "no GPU runtime": (
        {"docker": {"gpu_capable": False, "gpu_reason": "runtimes runc; no CDI specification"}},
        ["DOC-01"],
        "Docker 28.5.1 that cannot give a GPU to a container (runtimes runc; no CDI specification)",
    ),
    "driver and library differ": (
        {"gpu": {"count": 0, "error": "Failed to initialize NVML: Driver/library version mismatch"}},
        ["HST-03"],
        "reboot the node after a driver update",
    ),
    "nvidia-smi fails": ({"gpu": {"count": 0, "error": "No devices were found"}}, ["gpu-missing"], "nvidia-smi: No devices were found"),
    "fewer GPUs than planned": ({"gpu": {"count": 0}}, ["gpu-missing"], "0 GPUs"),
    "more GPUs than planned": ({"gpu": {"count": 2}}, [], ""),
    "two things at once": (
        {"python_requests": None, "docker": {"gpu_capable": False, "gpu_reason": "no runtime"}},
        ["DOC-05", "DOC-01"],
        "python3-requests",
    ),
    "a process on the API port": ({"listeners": [gang.listener(30000)]}, ["port-held"], "process python3 (pid 4711, user dgx) on *:30000"),
    "the same on loopback": ({"listeners": [gang.listener(30000, address="127.0.0.1")]}, ["port-held"], "127.0.0.1:30000"),
    "a process on Ray's port": ({"listeners": [gang.listener(6379, process="redis-server")]}, ["port-held"], "redis-server"),
    "a process on a port that Ray's parts get": ({"listeners": [gang.listener(6381)]}, ["port-held"], "*:6381"),
    "a process that the user of the play may not look at": (
        {"listeners": [gang.listener(30000, pid=None, process=None, user=None)], "effective_user": "dgx"},
        ["port-held"],
        "which user dgx may not look at; expected port 30000 to be free, or held by something that spark_stop names. "
        "Remedy: let the play use sudo (spark_become: true)",
    ),
    "the same without a user to blame": (
        {"listeners": [gang.listener(30000, pid=None, process=None, user=None)], "effective_user": "root"},
        ["port-held"],
        "process unknown process on *:30000; expected",
    ),
    "a process on another port": ({"listeners": [gang.listener(8080)]}, [], ""),
    "a model of somebody on the GPU": (
        {"gpu": {"processes": [{"pid": 9, "name": "ollama", "memory_mib": 40000}]}},
        ["gpu-held"],
        "uses the GPU (40000 MiB)",
    ),
    "the desktop on the GPU": ({"gpu": {"processes": [{"pid": 9, "name": "/usr/lib/xorg/Xorg", "memory_mib": 18}]}}, [], ""),
}


@pytest.mark.parametrize("name", ["spark-ray", "spark-vllm", "spark-vllm-previous", "spark-vllm-next"])
@pytest.mark.parametrize("state", ["running", "exited"])
def test_a_container_of_our_name_that_is_not_ours(name, state):
    """It would be removed to make room: never without asking."""
    found = {"name": name, "id": "f" * 64, "image": "x", "state": state, "running": state == "running", "labels": {}, "ports": [], "pid": 0}
    problems = gang.node_problems(gang.settings(), gang.member(facts=gang.node(containers=[found])))
    assert told(problems) == [("name-taken", "spark-1")]
    assert f"docker rename {name}" in problems[0].remedy
    own = {**found, "labels": {"dgxspark.serving": "1"}}
    assert gang.node_problems(gang.settings(), gang.member(facts=gang.node(containers=[own]))) == []


def test_an_override_that_this_node_cannot_follow():
    rows = [{"interface": "enp1s0f0np0", "up": True, "carrier": True, "addresses": ["192.168.200.13/24"], "hca": None}]
    member = gang.member("spark-2", choice=gang.fabric("192.168.200.13", candidates=rows))
    problems = gang.node_problems(gang.settings(env={"GLOO_SOCKET_IFNAME": "enp1s0f1np1"}), member)
    assert told(problems) == [("input", "spark-2")]


@pytest.mark.parametrize("case", NODE_RULES)
def test_node(case):
    facts, expected, words = NODE_RULES[case]
    problems = gang.node_problems(gang.settings(), gang.member(facts=gang.node(**facts)))
    assert told(problems) == [(name, "spark-1") for name in expected]
    assert all(problem.stage == "preflight" and problem.expected and problem.remedy for problem in problems)
    assert not problems or words in problems[0].msg


@pytest.mark.parametrize(
    ("name", "port", "refused"),
    [
        ("spark-1", 30000, True),
        ("spark-1", 6379, True),
        ("spark-1", 6380, True),
        ("spark-2", 30000, True),  # the old service runs on all nodes
        ("spark-2", 6379, False),  # the control store is the head's
        ("spark-2", 6385, True),
    ],
)
def test_ports_of_head_and_worker(name, port, refused):
    facts = gang.node(listeners=[gang.listener(port)])
    assert bool(gang.node_problems(gang.settings(), gang.member(name, facts))) is refused


def test_ports_of_ray_are_not_needed_without_ray():
    facts = gang.node(listeners=[gang.listener(6379), gang.listener(6381)])
    assert gang.node_problems(gang.settings(executor="mp"), gang.member(facts=facts)) == []
    taken = gang.node(listeners=[gang.listener(29501)])
    assert "29501" in gang.node_problems(gang.settings(executor="mp"), gang.member(facts=taken))[0].msg
    assert gang.node_problems(gang.settings(executor="mp"), gang.member("spark-2", taken)) == []
    assert gang.node_problems(gang.settings(), gang.member(facts=taken)) == []


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"containers": ["glm-sglang"]}, []),
        ({"containers": ["another"]}, ["port-held"]),
        ({}, ["port-held"]),
    ],
)
def test_what_may_be_stopped_is_no_problem(stop, expected):
    facts = gang.node(containers=[gang.container("glm-sglang")], listeners=[gang.listener(30000, container="glm-sglang")])
    values = gang.settings(stop={"containers": [], "units": [], "compose_projects": [], **stop})
    assert [problem.id for problem in gang.node_problems(values, gang.member(facts=facts))] == expected


def test_our_own_server_holds_its_port():
    own = gang.container("spark-vllm", labels={"dgxspark.serving": "1"}, gpu=True)
    facts = gang.node(containers=[own], listeners=[gang.listener(30000, container="spark-vllm")])
    assert gang.node_problems(gang.settings(), gang.member(facts=facts)) == []


# --- the nodes compared


def rails(*subnets, **more):
    return [{"interface": f"if{n}", "subnet": subnet, "active": True, **more} for n, subnet in enumerate(subnets)]


GANG_RULES = {
    "alike": ({}, {}, []),
    "architectures": ({}, {"node": gang.node(machine="x86_64")}, [("DOC-11", "", "spark-1 aarch64, spark-2 x86_64")]),
    "clocks a minute apart": ({}, {"node": gang.node(time=1_700_000_060.0)}, []),
    "clocks further apart": (
        {},
        {"node": gang.node(time=1_700_000_061.0)},
        [("clock-skew", "spark-1", "a clock 61 s behind that of spark-2; expected clocks within 60 s")],
    ),
    "MTU": ({}, {"fabric": gang.fabric("192.168.200.13", mtu=1500)}, [("NET-12", "", "spark-1 9000, spark-2 1500")]),
    "a rail that leads nowhere": (
        {"fabric": gang.fabric("192.168.200.12", rails=rails("192.168.200.0/24", "192.168.201.0/24"))},
        {"fabric": gang.fabric("192.168.200.13", rails=rails("192.168.200.0/24", "192.168.202.0/24"))},
        [("NCL-02", "spark-1", "a rail in 192.168.201.0/24"), ("NCL-02", "spark-2", "a rail in 192.168.202.0/24")],
    ),
    "a rail without a cable": (
        {"fabric": gang.fabric("192.168.200.12", rails=rails("192.168.200.0/24") + rails("192.168.201.0/24", active=False))},
        {},
        [],
    ),
    "a rail without an address": (
        {"fabric": gang.fabric("192.168.200.12", rails=[*rails("192.168.200.0/24"), {"interface": "x", "subnet": None, "active": True}])},
        {},
        [],
    ),
}


@pytest.mark.parametrize("case", GANG_RULES)
def test_gang(case):
    head, worker, expected = GANG_RULES[case]
    members = [{**gang.member("spark-1"), **head}, {**gang.member("spark-2"), **worker}]
    problems = gang.gang_problems(members)
    assert told(problems) == [(name, node) for name, node, words in expected]
    assert all(words in problem.msg for problem, (_name, _node, words) in zip(problems, expected, strict=True))


def test_one_node_alone_has_no_rails_to_compare():
    assert gang.gang_problems([gang.member()]) == []
