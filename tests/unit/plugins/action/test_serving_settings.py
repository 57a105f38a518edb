# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import types

import pytest
from ansible.parsing.splitter import parse_kv

from ansible_collections.dgxspark.serving.plugins.action import serving_settings
from ansible_collections.dgxspark.serving.plugins.module_utils import _fabric
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import read_hcas
from ansible_collections.dgxspark.serving.tests.unit.plugins import fabric_gang, gang

GIVEN = {"spark_image": gang.IMAGE, "spark_model": gang.MODEL, "spark_fabric_subnet": "192.168.200.0/24"}
HOSTS = ("spark-1", "spark-2")


@pytest.fixture
def run(monkeypatch):
    """run(name, shared, own): what the action answers on a host; ``shared`` are group variables, ``own`` those of one host.

    ``None`` as a value removes a variable. The templar is a stand-in that fills in ``{{ home }}``.
    """
    monkeypatch.setattr(serving_settings.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})

    def template(value):
        return value.replace("{{ home }}", "/home/dgx") if isinstance(value, str) else value

    def run(name="spark-1", shared=None, own=None, extra=(), **arguments):
        hostvars = {}
        for host in HOSTS:
            values = {**GIVEN, "spark_fabric_address": gang.ADDRESSES[host], **(shared or {}), **(own or {}).get(host, {})}
            hostvars[host] = {key: value for key, value in values.items() if value is not None}
        plugin = serving_settings.ActionModule.__new__(serving_settings.ActionModule)
        plugin._task = types.SimpleNamespace(args=arguments)
        plugin._templar = types.SimpleNamespace(template=template)
        plugin._extra = lambda: set(extra)
        plugin._loader = None
        variables = {"groups": {"ray_head": ["spark-1"], "ray_workers": ["spark-2"]}, "hostvars": hostvars, "inventory_hostname": name}
        return plugin.run(None, {**hostvars[name], **variables})

    return run


def test_no_connection_is_made():
    assert serving_settings.ActionModule._requires_connection is False


def test_every_input_has_its_default(run):
    result = run()
    assert not result.get("failed") and result["changed"] is False
    assert set(result["settings"]) == {name.removeprefix("spark_") for name in gang.options()} | {
        "api_local_url",
        "fabric_rails",
        "names",
        "record",
    }
    derived = {"fabric_rails": [], "served_model_name": gang.MODEL, "api_local_url": "http://127.0.0.1:30000"}
    derived["names"] = {"spark-vllm": "spark-vllm", "spark-ray": "spark-ray"}
    derived["record"] = "/var/lib/dgxspark-serving/stopped.json"
    assert result["settings"] == {**gang.settings(model_revision="main"), **derived}


def test_gang_and_peers(run):
    assert run("spark-1")["gang"] == [{"node": "spark-1", "address": "192.168.200.12"}, {"node": "spark-2", "address": "192.168.200.13"}]
    assert run("spark-1")["peers"] == ["192.168.200.13"]
    assert run("spark-2")["peers"] == ["192.168.200.12"]


def test_values_are_templated_and_converted(run):
    settings = run(shared={"spark_model_cache": "{{ home }}/models", "spark_api_port": "8000", "spark_rollback": "no"})["settings"]
    assert (settings["model_cache"], settings["api_port"], settings["rollback"]) == ("/home/dgx/models", 8000, False)


def test_parts_of_a_dictionary_have_their_defaults(run):
    assert run(shared={"spark_stop": {"units": ["ollama"]}})["settings"]["stop"] == {
        "containers": [],
        "units": ["ollama"],
        "compose_projects": [],
        "accept_no_rollback": False,
    }


def test_other_variables_are_left_alone(run):
    assert "sparkling" not in str(run(shared={"sparkling": "water", "ansible_user": "x"})["settings"])


REFUSED = {
    "missing": ({"spark_model": None}, "no value for the variable spark_model"),
    "two missing": ({"spark_model": None, "spark_image": None}, "spark_image"),
    "wrong type": ({"spark_api_port": "many"}, "spark_api_port"),
    "not among the choices": ({"spark_executor": "slurm"}, "spark_executor"),
    "unknown": ({"spark_modle": "x"}, "did you mean spark_model?"),
    "unknown inside": ({"spark_stop": {"containrs": ["x"]}}, "containrs"),
    "a value that cannot be meant": ({"spark_tensor_parallel": 0}, "spark_tensor_parallel 0"),
    "a secret": ({"spark_env": {"HF_TOKEN": "hf_abc"}}, "HF_TOKEN in spark_env"),
    "a key": ({"spark_env": {"AWS_SECRET_ACCESS_KEY": "hf_abc"}}, "AWS_SECRET_ACCESS_KEY in spark_env"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(run, case):
    shared, words = REFUSED[case]
    result = run(shared=shared)
    assert set(result) == {"failed", "changed", "msg", "problem"} and result["failed"] and result["changed"] is False
    assert result["problem"]["id"] == "input" and result["problem"]["node"] == "spark-1"
    assert result["msg"].startswith("spark-1: inputs: found ") and words in result["msg"]
    assert "hf_abc" not in str(result)


@pytest.mark.parametrize(
    ("given", "rest"),
    [("prompt=Hello there you", "there you"), ("spark_vllm_args=--enforce-eager --trust-remote-code", "--trust-remote-code"),
     ("recipe=my recipe.yaml", "recipe.yaml")],
)  # fmt: skip
def test_words_that_ansible_cuts_off_are_refused(run, monkeypatch, given, rest):
    monkeypatch.setattr(serving_settings, "load_extra_vars", lambda loader: parse_kv(given))
    told = run()
    assert told["failed"] and f"found '{rest}' on the command line" in told["msg"] and "began" not in told
    monkeypatch.setattr(serving_settings, "load_extra_vars", lambda loader: parse_kv(f"prompt='{given}'"))
    assert not run().get("failed")


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_for_all_is_told_once(run, case):
    result = run("spark-2", shared=REFUSED[case][0])
    assert not result.get("failed") and result["settings"] == {}


def test_what_is_wrong_for_one_host_is_told_by_it(run):
    own = {"spark-2": {"spark_fabric_address": None}}
    assert not run("spark-1", own=own).get("failed")
    assert run("spark-2", own=own)["problem"]["node"] == "spark-2"


def test_addresses_are_named_on_all_nodes_or_on_none(run):
    own = {"spark-2": {"spark_fabric_address": None}}
    told = run("spark-2", own=own)
    assert told["problem"]["id"] == "RAY-09" and "no spark_fabric_address, which spark-1 has" in told["msg"]
    none = run("spark-2", shared={"spark_fabric_address": None, "spark_fabric_subnet": None})
    assert not none.get("failed") and none["settings"]["fabric_address"] == none["settings"]["fabric_subnet"] == ""
    assert none["peers"] == [""]


@pytest.fixture
def find(run, tmp_path):
    """find(name, shape): what the second look answers on a host of a recorded gang whose inventory names no fabric; ``lost`` has no facts."""

    def find(name, shape, lost=(), subnet=""):
        whole = fabric_gang.Gang(shape, tmp_path / name)
        inputs = {"settings": {**gang.settings(fabric_subnet=subnet, fabric_address=""), "fabric_rails": []}, "gang": [], "peers": []}
        hostvars = {}
        for host, (interfaces, sysfs) in whole.seen.items():
            ports = _fabric.survey(_fabric.parse_request({}), interfaces, read_hcas(sysfs))
            hostvars[host] = {"preflight_inputs": inputs, **({} if host in lost else {"preflight_ports": {"ports": ports}})}
        plugin = serving_settings.ActionModule.__new__(serving_settings.ActionModule)
        plugin._task = types.SimpleNamespace(args={"find_fabric": True})
        groups = {"ray_head": whole.names[:1], "ray_workers": whole.names[1:]}
        return plugin.run(None, {"groups": groups, "hostvars": hostvars, "inventory_hostname": name, "preflight_inputs": inputs})

    return find


def test_find_fabric_completes_the_inputs(find):
    result = find("spark-2", "twin_own_subnet")
    settings = result["settings"]
    assert (settings["fabric_subnet"], settings["fabric_rails"]) == ("192.168.200.0/24", ["192.168.201.0/24"])
    assert (settings["fabric_address"], settings["model"], result["topology"]) == ("192.168.200.13", gang.MODEL, "pair")
    assert result["gang"] == [{"node": "spark-1", "address": "192.168.200.12"}, {"node": "spark-2", "address": "192.168.200.13"}]
    assert result["peers"] == ["192.168.200.12"]


def test_find_fabric_takes_the_subnet_that_is_named(find):
    settings = find("spark-2", "two_cables_lan", subnet="192.168.0.0/24")["settings"]
    assert (settings["fabric_subnet"], settings["fabric_address"]) == ("192.168.0.0/24", "192.168.0.189")


def test_find_fabric_fails_on_the_head_only(find):
    result = find("spark-1", "two_cables_lan")
    assert result["failed"] and result["problem"]["id"] == "fabric-subnet" and "spark-2: " in result["msg"]
    assert not find("spark-2", "two_cables_lan").get("failed")


def test_find_fabric_wants_all_nodes(find):
    result = find("spark-1", "one_cable", lost=("spark-2",))
    assert result["failed"] and (result["problem"]["id"], result["problem"]["node"]) == ("gang-incomplete", "spark-2")


def test_the_specification_is_that_of_the_role():
    spec = serving_settings.load_spec()
    assert set(spec) == set(gang.options())
    assert all("description" not in option for option in spec.values())
    assert spec["spark_stop"]["apply_defaults"] is True and spec["spark_stop"]["options"]["units"]["elements"] == "str"


ALSO = {"spark_output": {"type": "str", "choices": ["table", "json"], "default": "table"}, "spark_lines": {"type": "int", "default": 100}}


def test_inputs_of_one_playbook(run):
    settings = run(shared={"spark_lines": "7"}, also=ALSO)["settings"]
    assert (settings["output"], settings["lines"], settings["model"]) == ("table", 7, gang.MODEL)
    assert run(shared={"spark_lines": "7"})["failed"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"spark_output": "yaml"}, "spark_output"),
        ({"spark_lines": "many"}, "spark_lines"),
        ({"spark_ouput": "json"}, "did you mean spark_output?"),
    ],
)
def test_inputs_of_one_playbook_are_checked(run, given, found):
    result = run(shared=given, also=ALSO)
    assert result["failed"] and found in result["msg"]


# --- recipes ---

BARE = {"spark_image": None, "spark_model": None}
RECIPE = """
source: [{url: https://example.org, date: 2026-11-01}]
nodes: [2]
weights_gib: 10
settings:
  image: example-org/image:7
  model: example-org/model
  vllm_args: [--seed, "1"]
"""


def test_a_recipe_of_the_collection_by_its_name(run):
    result = run(shared={**BARE, "recipe": "qwen3.5-122b-a10b-fp8"})
    settings = result["settings"]
    assert (settings["model"], settings["tensor_parallel"], settings["max_model_len"]) == (gang.MODEL, 2, 16384)
    assert settings["served_model_name"] == gang.MODEL and settings["vllm_args"][:1] == ["--trust-remote-code"]
    assert result["recipe"]["name"] == "qwen3.5-122b-a10b-fp8" and result["recipe"]["weights_gib"] == 118.43
    assert result["recipe"]["path"].endswith("/playbooks/recipes/qwen3.5-122b-a10b-fp8.yml")
    assert run("spark-2", shared={**BARE, "recipe": "qwen3.5-122b-a10b-fp8"})["settings"]["model"] == gang.MODEL


def test_without_a_recipe_nothing_is_said_of_one(run):
    assert run()["recipe"] == {} and "warnings" not in run()


def test_a_recipe_file_relative_to_the_inventory(run, tmp_path, monkeypatch):
    (tmp_path / "mine.yml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir("/")
    shared = {**BARE, "spark_recipe": "./mine.yml", "inventory_dir": str(tmp_path)}
    result = run(shared=shared)
    assert result["settings"]["image"] == "example-org/image:7" and result["settings"]["tensor_parallel"] == 2
    assert result["settings"]["recipe"] == "./mine.yml"


def test_the_command_line_wins_over_the_inventorys_recipe(run, tmp_path):
    (tmp_path / "mine.yml").write_text(RECIPE, encoding="utf-8")
    shared = {**BARE, "spark_recipe": "qwen3.5-122b-a10b-fp8", "recipe": str(tmp_path / "mine.yml"), "spark_image": "a/b:c"}
    settings = run(shared=shared, extra={"recipe", "spark_image"})["settings"]
    assert (settings["model"], settings["image"], settings["vllm_args"]) == ("example-org/model", "a/b:c", ["--seed", "1"])


def test_what_a_recipe_changes_is_told_once(run):
    shared = {"recipe": "minimax-m2.7-nvfp4"}
    told = run("spark-1", shared=shared)["warnings"]
    assert len(told) == 1 and "spark_image, spark_model of the inventory belong to another model" in told[0]
    assert "warnings" not in run("spark-2", shared=shared)
    assert run("spark-2", shared=shared)["settings"]["model"] == "nvidia/MiniMax-M2.7-NVFP4"


WRONG_RECIPE = {
    "unknown name": ({**BARE, "recipe": "qwen3.5-122b-a10b"}, "recipe-unknown", "did you mean qwen3.5-122b-a10b-fp8?"),
    "no such file": ({**BARE, "recipe": "some/where.yaml"}, "recipe-unknown", "no file some/where.yaml"),
    "not YAML": ({**BARE, "recipe": "FILE", "text": "a: [b"}, "recipe-invalid", "cannot be read"),
    "not a recipe": ({**BARE, "recipe": "FILE", "text": "- a\n"}, "recipe-invalid", "no recipe in a known format"),
    "for another number of nodes": (
        {**BARE, "recipe": "gpt-oss-120b"},
        "recipe-nodes",
        "recipes for 2 nodes: llama-3.3-70b-bf16, minimax-m2.7-nvfp4",
    ),
    "for another model": ({"spark_recipe": "minimax-m2.7-nvfp4"}, "recipe-model", "nvidia/MiniMax-M2.7-NVFP4"),
}


@pytest.mark.parametrize("case", WRONG_RECIPE)
def test_a_recipe_that_cannot_be_used(run, tmp_path, case):
    shared, ident, words = WRONG_RECIPE[case]
    shared = dict(shared)
    if "text" in shared:
        (tmp_path / "x.yml").write_text(shared.pop("text"), encoding="utf-8")
        shared["recipe"] = str(tmp_path / "x.yml")
    result = run(shared=shared)
    assert result["failed"] and (result["problem"]["id"], result["problem"]["stage"]) == (ident, "recipe")
    assert words in result["msg"] and result["msg"].startswith("spark-1: recipe: found ")
    assert not run("spark-2", shared=shared).get("failed")


def test_a_recipe_for_another_number_of_nodes_can_be_planned(run):
    result = run(shared={**BARE, "recipe": "gpt-oss-120b"}, any_nodes=True)
    assert result["settings"]["model"] == "openai/gpt-oss-120b" and result["recipe"]["name"] == "gpt-oss-120b"


def test_variables_from_the_command_line(monkeypatch):
    plugin = serving_settings.ActionModule.__new__(serving_settings.ActionModule)
    plugin._loader = "loader"
    monkeypatch.setattr(serving_settings, "load_extra_vars", lambda loader: {"recipe": "x", "spark_image": loader})
    assert plugin._extra() == {"recipe", "spark_image"}
