# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inputs: what is refused, and that a refusal names the variable, its value and what would be right."""

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _settings
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang


def test_the_reference_job_is_accepted():
    assert _settings.value_problems(gang.settings()) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["spark_model", "spark_image"], []),
        (["spark_modle"], [("spark_modle", "did you mean spark_model?")]),
        (["spark_x"], [("spark_x", "remove it, or prefix your own variables with something else")]),
        (
            ["spark_tensor_paralel", "spark_ai_port"],
            [("spark_ai_port", "spark_api_port"), ("spark_tensor_paralel", "spark_tensor_parallel")],
        ),
        (["spark_wifi_channel_zzzz"], [("spark_wifi_channel_zzzz", "remove it")]),
    ],
)
def test_unknown_inputs(given, expected):
    problems = _settings.unknown_inputs(given, gang.options())
    assert [problem.found for problem in problems] == [f"unknown variable {name}" for name, hint in expected]
    assert all(hint in problem.remedy for problem, (_name, hint) in zip(problems, expected, strict=True))
    assert all(problem.id == "input" for problem in problems)


ACCEPTED = [
    ("model", "gpt2"),
    ("model", "Qwen/Qwen3.5-122B-A10B-FP8"),
    ("image", "127.0.0.1:5000/vllm@sha256:" + "a" * 64),
    ("fabric_subnet", "192.168.200.12/24"),
    ("fabric_subnet", "169.254.0.0/16"),
    ("fabric_subnet", ""),
    ("gid_index", ""),
    ("gid_index", "auto"),
    ("gid_index", "3"),
    ("api_port", 1024),
    ("api_port", 65535),
    ("gpu_memory_utilization", 0.05),
    ("gpu_memory_utilization", 0.90),
    ("ulimits", []),
    ("ulimits", ["memlock:-1:-1", "nofile:65536"]),
    ("env", {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "=enp1s0f1np1", "GLOO_SOCKET_IFNAME": "enp1s0f1np1"}),
]
REFUSED = [
    ("model", "", "a repository such as"),
    ("model", "org/m/x", "a repository such as"),
    ("model", "a/b/c", "a repository such as"),
    ("model", "Qwen/Qwen3 8B", "a repository such as"),
    ("image", "", "an image reference"),
    ("image", "vllm latest", "an image reference"),
    ("image", "-rm", "an image reference"),
    ("fabric_subnet", "192.168.200", "an IPv4 subnet in CIDR form"),
    ("gid_index", "-1", "a number that is right for every RDMA device"),
    ("gid_index", "show", "a number that is right for every RDMA device"),
    ("fabric_subnet", "fd00::/64", "an IPv4 subnet in CIDR form"),
    ("fabric_subnet", "192.168.200.12", "a subnet, not a single address"),
    ("fabric_subnet", "192.168.200.12/32", "a subnet, not a single address"),
    ("api_port", 80, "a port from 1024 to 65535"),
    ("api_port", 65536, "a port from 1024 to 65535"),
    ("ray_port", 0, "a port from 1024 to 65535"),
    ("tensor_parallel", 0, "1 or more"),
    ("pipeline_parallel", 0, "1 or more"),
    ("data_parallel", 0, "1 or more"),
    ("dp_port", 80, "1024 to 65535"),
    ("gpus_per_node", -1, "1 or more"),
    ("ray_num_cpus", 0, "1 or more"),
    ("ready_timeout", 0, "1 or more"),
    ("ray_timeout", 0, "1 or more"),
    ("stop_timeout", 0, "1 or more"),
    ("gpu_memory_utilization", 0.91, "0.05 to 0.90"),
    ("gpu_memory_utilization", 0.0, "0.05 to 0.90"),
    ("gpu_memory_utilization", 80.0, "0.05 to 0.90"),
    ("ulimits", ["memlock=-1"], "entries such as memlock:-1:-1"),
    ("ulimits", ["memlock:unlimited"], "entries such as memlock:-1:-1"),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_accepted(name, value):
    assert _settings.value_problems(gang.settings(**{name: value})) == []


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED)
def test_refused(name, value, expected):
    problems = _settings.value_problems(gang.settings(**{name: value}))
    assert [problem.found for problem in problems] == [f"spark_{name} {value!r}"]
    assert expected in problems[0].expected and problems[0].remedy
    assert (problems[0].id, problems[0].stage) == ("input", "inputs")


@pytest.mark.parametrize("key", ["HF_TOKEN", "hf_token", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "DB_PASSWORD", "MY_SECRET"])
def test_secrets_do_not_belong_in_the_environment(key):
    problems = _settings.value_problems(gang.settings(env={key: "hf_abcdef"}))
    assert [problem.found for problem in problems] == [f"{key} in spark_env"]
    assert "hf_abcdef" not in problems[0].msg and "spark_hf_token_file" in problems[0].remedy


def test_network_variables_have_a_syntax():
    env = {"GLOO_SOCKET_IFNAME": "^docker0", "NCCL_IB_GID_INDEX": "3"}
    problems = _settings.value_problems(gang.settings(env=env))
    assert [problem.found for problem in problems] == ["GLOO_SOCKET_IFNAME '^docker0' in spark_env", "NCCL_IB_GID_INDEX '3' in spark_env"]


@pytest.mark.parametrize("key", ["TOKENIZERS_PARALLELISM", "VLLM_MAX_TOKENS_PER_EXPERT", "PASSWORDLESS"])
def test_names_that_only_resemble_a_secret_are_taken(key):
    assert _settings.value_problems(gang.settings(env={key: "1"})) == []


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://127.0.0.1:30000"),
        ("127.0.0.1", "http://127.0.0.1:30000"),
        ("10.1.230.180", "http://10.1.230.180:30000"),
        ("fd00::5", "http://[fd00::5]:30000"),
        ("::1", "http://[::1]:30000"),
    ],
)
def test_the_server_is_asked_where_it_listens(host, url):
    assert _settings.resolve(gang.settings(api_host=host))["api_local_url"] == url


@pytest.mark.parametrize(("key", "value"), [("GLOO_SOCKET_IFNAME", "=enp1s0f1np1"), ("TP_SOCKET_IFNAME", "^docker0")])
def test_syntax_of_nccl_is_not_that_of_gloo(key, value):
    problems = _settings.value_problems(gang.settings(env={key: value}))
    assert [problem.found for problem in problems] == [f"{key} {value!r} in spark_env"]


def test_all_wrong_values_are_found():
    problems = _settings.value_problems(gang.settings(api_port=1, ray_port=2, tensor_parallel=0))
    assert [problem.found for problem in problems] == ["spark_api_port 1", "spark_ray_port 2", "spark_tensor_parallel 0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("missing required arguments: spark_image, spark_model", "no value for the variable spark_image, spark_model"),
        (
            "argument 'spark_api_port' is of type str and we were unable to convert to int",
            "variable 'spark_api_port' is of type str and we were unable to convert to int",
        ),
        (
            "containrs. Supported parameters include: units found in 'spark_stop'.",
            "containrs. Supported parameters include: units in 'spark_stop'.",
        ),
    ],
)
def test_plain_words(text, expected):
    assert _settings.plain(text) == expected


@pytest.mark.parametrize(("given", "expected"), [("", gang.MODEL), ("qwen", "qwen")])
def test_the_served_name_is_that_of_the_model_by_default(given, expected):
    values = gang.settings(served_model_name=given)
    assert _settings.resolve(values)["served_model_name"] == expected
    assert values["served_model_name"] == given


@pytest.mark.parametrize(
    ("known", "kept"),
    [
        ({"spark_model": {}}, ["spark_model"]),  # site.yml: not its own, and not a spelling mistake
        ({"spark_model": {}, "spark_benchmark_name": {}}, ["spark_benchmark_nmae", "spark_model"]),  # benchmark.yml: there it is one
    ],
)
def test_inputs_of_the_benchmark_in_the_inventory(known: dict, kept: list) -> None:
    assert sorted(_settings.without_elsewhere({"spark_model": "m", "spark_benchmark_nmae": "x"}, known)) == kept
