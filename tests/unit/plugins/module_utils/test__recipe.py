# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from ansible_collections.dgxspark.serving.plugins.module_utils import _fit, _plan, _recipe, _settings
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

FOREIGN = Path(__file__).resolve().parents[2] / "fixtures" / "recipes"
OWN = gang.ROOT / "playbooks" / "recipes"
NAMES = sorted(path.stem for path in OWN.glob("*.yml"))
SPARK = 127535084 * 1024


def foreign(name):
    path = FOREIGN / f"{name}.yaml"
    return _recipe.parse(yaml.safe_load(path.read_text(encoding="utf-8")), path.stem)


def own(name):
    return _recipe.parse(yaml.safe_load((OWN / f"{name}.yml").read_text(encoding="utf-8")), name)


# --- those of the collection ---


def test_there_are_enough():
    assert len(NAMES) >= 10 and "qwen3.5-122b-a10b-fp8" in NAMES
    assert {n for name in NAMES for n in own(name)["nodes"]} == {1, 2, 4}


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_can_be_served_as_it_is(name):
    recipe = own(name)
    assert recipe["name"] == name and recipe["description"] and (recipe["weights_gib"] or recipe["memory_gib"])
    assert all(source["url"].startswith("https://") and len(source["date"]) == 10 for source in recipe["source"])
    executors = ("ray", "mp")
    assert recipe["settings"]["executor"] in executors
    for nodes in recipe["nodes"]:
        filled, report = _recipe.apply(recipe, {}, (), asked=True, nodes=nodes, executors=executors, known=dict)
        settings = gang.settings(**{key.removeprefix("spark_"): value for key, value in filled.items()})
        assert _settings.value_problems(settings) == [] and _plan.parallel_problems(settings, nodes) == []
        words = _plan.vllm_arguments({**settings, "served_model_name": settings["model"]})
        assert all(isinstance(word, str) for word in [*settings["vllm_args"], *settings["env"].values()])
        assert words[words.index("--tensor-parallel-size") + 1] == str(nodes)
        assert report["not_honoured"] == [] and report["overridden"] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_fits_on_the_nodes_it_is_for(name):
    recipe = own(name)
    for nodes in recipe["nodes"]:
        row = _recipe.overview({name: recipe}, nodes, SPARK)[0]
        assert row["fits"], row["verdict"]


def test_the_reference_recipe_is_the_reference_inventory():
    inventory = yaml.safe_load((gang.ROOT / "inventory" / "sparks" / "group_vars" / "sparks.yml").read_text(encoding="utf-8"))
    recipe = own("qwen3.5-122b-a10b-fp8")
    assert recipe["settings"] == {key: inventory[f"spark_{key}"] for key in recipe["settings"]}
    assert round(127163011832 / _fit.GIB, 2) == recipe["weights_gib"]


MINE = {
    "description": "x",
    "source": [{"url": "https://x", "date": "2026-01-01"}],
    "nodes": [2],
    "weights_gib": 10,
    "settings": {"image": "a/b:c", "model": "o/m"},
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"colour": "blue"}, "unknown field colour"),
        ({"settings": {"image": "a/b", "model": "o/m", "api_port": 1}}, "settings.api_port"),
        ({"settings": {"image": "a/b"}}, "no settings.model"),
        ({"nodes": []}, "nodes []"),
        ({"nodes": 2}, "nodes 2"),
        ({"source": []}, "no source"),
        ({"source": [{"url": "https://x"}]}, "no source"),
        ({"weights_gib": "big"}, "weights_gib 'big'"),
    ],
)
def test_a_recipe_of_ours_is_checked(change, found):
    with pytest.raises(Problem) as caught:
        _recipe.parse({**MINE, **change}, "mine")
    assert caught.value.id == "recipe-invalid" and caught.value.found.startswith(found) and "the recipe mine" in caught.value.found


@pytest.mark.parametrize(
    "data", [None, [], {}, {"recipe_version": "3", "model": "o/m"}, {"recipe_version": "1", "name": "x", "container": "y"}]
)
def test_what_is_no_recipe(data):
    with pytest.raises(Problem) as caught:
        _recipe.parse(data, "file")
    assert caught.value.id == "recipe-invalid"


SPARKRUN = {"recipe_version": "2", "name": "odd", "model": "o/m", "container": "a/b:c", "runtime": "vllm"}
EUGR = {"recipe_version": "1", "name": "odd", "model": "o/m", "container": "a/b:c", "command": "vllm serve {model}"}


@pytest.mark.parametrize("peer", [SPARKRUN, EUGR])
@pytest.mark.parametrize(
    "change",
    [
        {"env": ["A=B"]},
        {"env": "A=B"},
        {"defaults": ["a"]},
        {"defaults": "port: 1"},
        {"defaults": 5},
        {"min_nodes": "auto"},
        {"min_nodes": [2]},
        {"min_nodes": True},
        {"min_nodes": 2.5},
        {"max_nodes": "many"},
        {"max_nodes": -1},
        {"min_nodes": 100000},
        {"min_nodes": 3, "max_nodes": 2},
        {"cluster_only": True, "max_nodes": 1},
        {"mode": "cluster", "max_nodes": 1},
        {"solo_only": True, "cluster_only": True},
        {"solo_only": True, "min_nodes": 2},
    ],
)
def test_an_odd_recipe_of_others_is_told(peer, change):
    with pytest.raises(Problem) as caught:
        _recipe.parse({**peer, **change}, "file")
    found = caught.value.found
    assert caught.value.id == "recipe-invalid" and all(key in found for key in change) and "the recipe odd" in found


@pytest.mark.parametrize(
    ("change", "nodes"),
    [
        ({}, []),
        ({"min_nodes": "2", "max_nodes": "3"}, [2, 3]),
        ({"min_nodes": None, "max_nodes": 0, "env": None, "defaults": []}, []),
        ({"solo_only": True}, [1]),
        ({"cluster_only": True, "max_nodes": 2}, [2]),
        ({"min_nodes": 63, "max_nodes": 1000}, [63, 64]),
        ({1: "x", "defaults": {1: 2}}, []),
    ],
)
@pytest.mark.parametrize("peer", [SPARKRUN, EUGR])
def test_numbers_of_nodes_of_others(peer, change, nodes):
    assert _recipe.parse({**peer, **change}, "file")["nodes"] == nodes


def test_names_that_yaml_reads_as_numbers():
    recipe = _recipe.parse({**SPARKRUN, "runtime_config": {1: "x", "y": 2}, "defaults": {"max_model_len": "infk"}}, "file")
    assert [text for text in recipe["warnings"] if text.startswith("runtime_config.1 is left out")]
    assert recipe["errors"] == {"--max-model-len": "'infk' has no meaning here"}
    with pytest.raises(Problem, match="settings"):
        _recipe.parse({**MINE, "settings": {**MINE["settings"], 1: 2, "port": 3}}, "mine")


# --- those of others: file: (format, numbers of nodes, settings, what warnings begin with, fields that cannot be left out) ---

PEERS = {
    "sparkrun/pair": (
        "sparkrun",
        [2],
        {
            "image": "ghcr.io/example-org/vllm-gb10:2026.11",
            "model": "example-org/Alpaca-9-120B-FP8",
            "model_revision": "0123456789abcdef0123456789abcdef01234567",
            "served_model_name": "alpaca",
            "api_host": "0.0.0.0",
            "api_port": 8100,
            "executor": "mp",
            "tensor_parallel": 2,
            "gpu_memory_utilization": 0.82,
            "max_model_len": 65536,
            "vllm_args": ["--max-num-seqs", "12", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--trust-remote-code"],
            "env": {"VLLM_USE_DEEP_GEMM": "0"},
        },
        [],
        [],
    ),
    "sparkrun/no_command": (
        "sparkrun",
        [],
        {
            "image": "example-org/vllm-spark:12",
            "model": "example-org/Llama-Tiny-8B",
            "api_port": 8000,
            "executor": "ray",
            "tensor_parallel": 2,
            "max_model_len": 32768,
            "vllm_args": [
                *["--kv-cache-dtype", "fp8", "--trust-remote-code", "--enable-prefix-caching"],
                *["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
            ],
        },
        [],
        [],
    ),
    "sparkrun/hooks": (
        "sparkrun",
        list(range(2, 65)),
        {
            "image": "ghcr.io/example-org/vllm-gb10:latest",
            "model": "example-org/Patchwork-30B",
            "api_port": 8000,
            "executor": "mp",
            "tensor_parallel": 2,
            "vllm_args": ["--chat-template", "repaired.jinja"],
            "env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        },
        [
            "env.NCCL_SOCKET_IFNAME",
            "--chat-template repaired.jinja must be a file in the image",
            "--nnodes",
            "defaults.colour",
            "executor_config.restart_policy",
            "executor_config.shm_size",
            "post_commands",
            "readiness.timeout",
            "runtime_cache.enabled",
            "spare_field",
        ],
        ["mods", "pre_exec"],
    ),
    "sparkrun/other_engine": (
        "sparkrun",
        [],
        {"image": "example-org/sglang-spark:3", "model": "example-org/Otherwise-70B", "executor": "mp"},
        [],
        ["runtime"],
    ),
    "sparkrun/draft": (
        "sparkrun",
        [1],
        {
            "image": "example-org/vllm-spark:12",
            "model": "example-org/Longread-40B-NVFP4",
            "api_port": 8000,
            "executor": "mp",
            "max_model_len": 256000,
            "vllm_args": [
                *["--compilation-config", '{"cudagraph_mode":"FULL_DECODE_ONLY","custom_ops":["all"]}'],
                *["--seed", "{seed}"],
            ],
            "env": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
        },
        [],
        ["env.HF_TOKEN", "env.CACHE", "command", "--speculative-config", "--data-parallel-hybrid-lb", "--api-key"],
    ),
    "eugr/pair_ray": (
        "eugr",
        list(range(2, 65)),
        {
            "image": "example-org/spark-vllm:nightly-20261101",
            "model": "example-org/Alpaca-9-120B-FP8",
            "api_host": "0.0.0.0",
            "api_port": 8000,
            "executor": "ray",
            "tensor_parallel": 2,
            "gpu_memory_utilization": 0.7,
            "max_model_len": 131072,
            "vllm_args": ["--speculative-config", '{"method":"mtp","num_speculative_tokens":2}', "--enable-prefix-caching"],
        },
        [],
        [],
    ),
    "eugr/solo": (
        "eugr",
        [1],
        {
            "image": "vllm-node",
            "model": "example-org/Llama-Tiny-8B",
            "api_port": 8000,
            "executor": "mp",
            "served_model_name": "tiny",
            "max_model_len": 32768,
            "env": {"VLLM_FLOAT32_MATMUL_PRECISION": "high"},
        },
        ["container vllm-node is the name of an image that is built locally", "--served-model-name: further names (small)"],
        [],
    ),
    "eugr/patched": (
        "eugr",
        list(range(2, 65)),
        {
            "image": "vllm-node-fork",
            "model": "example-org/Patchwork-30B",
            "api_port": 8000,
            "executor": "mp",
            "tensor_parallel": 2,
            "vllm_args": ["--chat-template", "repaired.jinja"],
        },
        ["container vllm-node-fork", "--chat-template repaired.jinja", "build_args is left out", "earlyoom is left out"],
        ["mods"],
    ),
    "eugr/two_commands": (
        "eugr",
        [],
        {"image": "example-org/spark-vllm:nightly-20261101", "model": "example-org/Llama-Tiny-8B", "executor": "mp"},
        [],
        ["command"],
    ),
    "eugr/four_nodes": (
        "eugr",
        list(range(2, 65)),
        {
            "image": "example-org/spark-vllm:nightly-20261101",
            "model": "example-org/Giant-500B-NVFP4",
            "model_revision": "89abcdef0123456789abcdef0123456789abcdef",
            "api_port": 8000,
            "executor": "mp",
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "vllm_args": ["--kv-cache-dtype", "fp8", "--max-num-batched-tokens", "4096"],
        },
        ["env.MASTER_ADDR is left out"],
        [],
    ),
}


def test_all_foreign_files_are_looked_at():
    assert sorted(PEERS) == sorted(path.relative_to(FOREIGN).as_posix().removesuffix(".yaml") for path in FOREIGN.rglob("*.yaml"))
    assert [sum(name.startswith(kind) for name in PEERS) for kind in ("sparkrun/", "eugr/")] == [5, 5]


@pytest.mark.parametrize("name", PEERS)
def test_a_foreign_recipe_becomes(name):
    kind, nodes, settings, warnings, errors = PEERS[name]
    recipe = foreign(name)
    assert (recipe["format"], recipe["nodes"], recipe["settings"]) == (kind, nodes, settings)
    assert [text for text, begin in zip(recipe["warnings"], warnings, strict=True) if not text.startswith(begin)] == []
    assert list(recipe["errors"]) == errors
    assert "hf_not_a_real_one" not in str(recipe) and "very-secret" not in str(recipe)


def test_figures_of_sparkrun_become_ours():
    assert foreign("sparkrun/pair")["weights_gib"] == 117.81  # 126.5 GB
    assert foreign("sparkrun/pair")["description"] == "A mixture of experts over two nodes"


# change of sparkrun/pair: (field that is refused, or None; a setting; its value)
CHANGES = {
    "ray in the defaults": ({"defaults": {"distributed_executor_backend": "ray"}, "command": None}, None, "executor", "ray"),
    "the runtime that is Ray": ({"runtime": "vllm-ray"}, None, "executor", "ray"),
    "an engine of another name": ({"runtime": "llama-cpp"}, "runtime", "model", "example-org/Alpaca-9-120B-FP8"),
    "doubled braces": ({"command": "vllm serve {model} --x '{{\"a\":{port}}}'"}, None, "vllm_args", ["--x", '{"a":8100}']),
    "plain braces": ({"command": "vllm serve {model} --x '{\"a\":{port}}'"}, None, "vllm_args", ["--x", '{"a":8100}']),
    "a value that has a placeholder": (
        {"defaults": {"port": 1234, "url": "http://x:{port}"}, "command": "vllm serve {model} --x {url}"},
        None,
        "vllm_args",
        ["--x", "http://x:1234"],
    ),
    "the module's name": (
        {"command": "python3 -m vllm.entrypoints.openai.api_server --model {model} --seed 1"},
        None,
        "vllm_args",
        ["--seed", "1"],
    ),
    "a negative number": ({"command": "vllm serve {model} --seed -1"}, None, "vllm_args", ["--seed", "-1"]),
    "another model": ({"command": "vllm serve o/other"}, "model", "image", "ghcr.io/example-org/vllm-gb10:2026.11"),
    "a path": ({"model": "/models/x", "command": None}, "model", "image", "ghcr.io/example-org/vllm-gb10:2026.11"),
    "one file of a repository": ({"model": "o/m:Q4_K_M", "command": None}, "model", "image", "ghcr.io/example-org/vllm-gb10:2026.11"),
    "a pipe": ({"command": "vllm serve {model} | tee log"}, "command", "model", "example-org/Alpaca-9-120B-FP8"),
    "an open quotation": ({"command": "vllm serve {model} --x '{"}, "command", "model", "example-org/Alpaca-9-120B-FP8"),
    "engines": ({"command": "vllm serve {model} -dp 2 --data-parallel-backend ray"}, None, "data_parallel", 2),
    "engines of a format without a command": ({"command": None, "defaults": {"data_parallel": 2}}, None, "data_parallel", 2),
    "a balancer of somebody else": (
        {"command": "vllm serve {model} -dp 2 --data-parallel-external-lb"},
        "--data-parallel-external-lb",
        "data_parallel",
        2,
    ),
    "an unknown executor": (
        {"command": "vllm serve {model} --distributed-executor-backend uni"},
        "--distributed-executor-backend",
        "executor",
        "mp",
    ),
    "a length of auto": ({"command": "vllm serve {model} --max-model-len auto"}, "--max-model-len", "executor", "mp"),
    "another tokenizer": ({"command": "vllm serve {model} --tokenizer o/t"}, "--tokenizer", "executor", "mp"),
    "a draft by its own flag": (
        {"command": "vllm serve {model} --speculative-config.model o/d"},
        "--speculative-config.model",
        "executor",
        "mp",
    ),
    "an image that is built": ({"build_args": ["--vllm-ref", "x"]}, "build_args", "executor", "mp"),
    "its own builder": ({"builder": "uv-venv"}, "builder", "executor", "mp"),
    "images of machines": ({"containers": [{"image": "x", "host": "y"}]}, "containers", "executor", "mp"),
    "no container at all": ({"executor": "local"}, "executor", "image", "ghcr.io/example-org/vllm-gb10:2026.11"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_one_field_of_sparkrun(case):
    change, refused, setting, value = CHANGES[case]
    data = yaml.safe_load((FOREIGN / "sparkrun" / "pair.yaml").read_text(encoding="utf-8"))
    recipe = _recipe.parse({**data, **change}, "pair")
    assert list(recipe["errors"]) == ([refused] if refused else [])
    assert recipe["settings"][setting] == value


@pytest.mark.parametrize(("text", "expected"), [("4096", 4096), ("32k", 32000), ("32K", 32768), ("1M", 1048576), ("25.6k", 25600)])
def test_tokens(text, expected):
    assert _recipe.tokens(text) == expected


# --- with an inventory ---

ONE = {"spark_image": "mine/image:1", "spark_model": "example-org/Alpaca-9-120B-FP8"}
OTHER = {"spark_image": "mine/image:1", "spark_model": "o/other", "spark_vllm_args": ["--old"], "spark_api_port": 30000}


def apply(recipe, given=None, extra=(), **more):
    return _recipe.apply(recipe, given or {}, extra, **{"asked": True, "nodes": 2, "executors": ("ray", "mp"), "known": dict, **more})


def test_a_recipe_fills_in_what_is_unset():
    recipe = foreign("sparkrun/pair")
    before = copy.deepcopy(recipe)
    filled, report = apply(recipe, {"spark_fabric_subnet": "192.168.200.0/24"})
    assert filled == {"spark_fabric_subnet": "192.168.200.0/24", **{f"spark_{key}": value for key, value in recipe["settings"].items()}}
    assert (report["overridden"], report["set_aside"], report["not_honoured"]) == ([], [], [])
    assert _recipe.advice(report) == [] and recipe == before


def test_the_inventory_wins_for_the_same_model():
    filled, report = apply(foreign("sparkrun/pair"), {**ONE, "spark_env": {"VLLM_USE_DEEP_GEMM": "1", "X": "y"}})
    assert filled["spark_image"] == "mine/image:1" and filled["spark_env"] == {"VLLM_USE_DEEP_GEMM": "1", "X": "y"}
    assert report["overridden"] == ["env", "image"]
    assert _recipe.advice(report) == ["recipe pair: the inventory's spark_env, spark_image win over the recipe's"]
    assert _recipe.advice(apply(foreign("sparkrun/pair"), ONE, asked=False)[1]) == []


def test_environments_are_merged():
    filled, _report = apply(foreign("sparkrun/pair"), {"spark_env": {"X": "y"}})
    assert filled["spark_env"] == {"VLLM_USE_DEEP_GEMM": "0", "X": "y"}


def test_what_belongs_to_another_model_is_set_aside():
    filled, report = apply(foreign("sparkrun/pair"), OTHER)
    assert filled["spark_model"] == "example-org/Alpaca-9-120B-FP8" and "--old" not in filled["spark_vllm_args"]
    assert filled["spark_image"] == "ghcr.io/example-org/vllm-gb10:2026.11" and filled["spark_api_port"] == 30000
    assert report["set_aside"] == ["image", "model", "vllm_args"]
    assert "spark_image, spark_model, spark_vllm_args of the inventory belong to another model" in _recipe.advice(report)[0]


def test_the_command_line_wins_always():
    filled, report = apply(foreign("sparkrun/pair"), OTHER, {"spark_image", "spark_api_port"})
    assert filled["spark_image"] == "mine/image:1" and report["set_aside"] == ["model", "vllm_args"]
    filled, report = apply(foreign("sparkrun/pair"), OTHER, {"spark_model"})
    assert filled["spark_model"] == "o/other" and filled["spark_vllm_args"] == ["--old"] and report["set_aside"] == []


def test_two_models_in_one_inventory():
    with pytest.raises(Problem) as caught:
        apply(foreign("sparkrun/pair"), OTHER, asked=False)
    assert caught.value.id == "recipe-model" and "o/other" in caught.value.found


def test_an_executor_that_is_not_there_yet_is_left_to_the_default():
    assert "spark_executor" not in apply(foreign("sparkrun/pair"), executors=("ray",))[0]


KNOWN = {"small": {"nodes": [1]}, "both": {"nodes": [1, 2]}, "big": {"nodes": [4]}}


@pytest.mark.parametrize(
    ("name", "nodes", "given", "found", "remedy"),
    [
        ("sparkrun/pair", 1, {}, "the recipe pair for 2 nodes, and 1 in the inventory", "recipes for 1 node: both, small"),
        ("sparkrun/pair", 4, {}, "for 2 nodes, and 4", "recipes for 4 nodes: big"),
        ("sparkrun/draft", 3, {}, "for 1 node, and 3", "recipes for 3 nodes: none"),
        ("eugr/pair_ray", 4, {}, "for 2 nodes, and 4", "big"),
        ("eugr/four_nodes", 2, {}, "for 4 nodes, and 2", "both"),
        ("eugr/pair_ray", 4, {"spark_tensor_parallel": "4"}, None, None),
        ("eugr/four_nodes", 4, {}, None, None),
        ("eugr/pair_ray", 1, {"spark_tensor_parallel": 1}, "for 2 or more nodes, and 1", "small"),
    ],
)
def test_another_number_of_nodes_is_refused_with_what_fits(name, nodes, given, found, remedy):
    recipe = {**foreign(name), "errors": {}}
    if found is None:
        apply(recipe, given, nodes=nodes)
        return
    with pytest.raises(Problem) as caught:
        apply(recipe, given, nodes=nodes, known=lambda: KNOWN)
    assert caught.value.id == "recipe-nodes" and found in caught.value.found and remedy in caught.value.remedy


def test_tensor_parallel_follows_the_nodes_where_the_recipe_leaves_it_open():
    for nodes in (1, 2):
        assert apply(own("qwen3.6-27b-nvfp4"), nodes=nodes)[0]["spark_tensor_parallel"] == nodes


def test_fields_that_cannot_be_left_out_are_refused_until_they_are_accepted():
    recipe = foreign("sparkrun/hooks")
    with pytest.raises(Problem) as caught:
        apply(recipe)
    assert caught.value.id == "recipe-field" and "spark_recipe_ignore: [mods, pre_exec]" in caught.value.remedy
    assert "mods (changes files inside the image before the start)" in caught.value.found
    for accepted in (["mods", "pre_exec"], "mods, pre_exec"):
        _filled, report = apply(recipe, {"spark_recipe_ignore": accepted})
        assert report["not_honoured"][-2:] == [f"{field} is left out, as spark_recipe_ignore says" for field in ("mods", "pre_exec")]
        assert len(report["not_honoured"]) == 12


@pytest.mark.parametrize(("command", "nodes", "tensor"), [("-dp 2", 2, 1), ("-dp 2", 4, 2), ("-pp 2 -dp 2", 4, 1), ("-dp 2 -tp 2", 4, 2)])
def test_tensor_parallel_is_what_engines_leave(command, nodes, tensor):
    data = yaml.safe_load((FOREIGN / "sparkrun" / "pair.yaml").read_text(encoding="utf-8"))
    recipe = _recipe.parse({**data, "command": f"vllm serve {{model}} {command}"}, "pair")
    filled, _report = apply({**recipe, "nodes": []}, nodes=nodes)
    assert filled["spark_tensor_parallel"] == tensor and filled["spark_data_parallel"] == 2


def test_an_accepted_group_of_fields():
    recipe = {**foreign("sparkrun/draft"), "nodes": []}
    del recipe["errors"]["command"]
    accepted = ["env", "--speculative-config", "--data-parallel-hybrid-lb", "--api-key"]
    filled, _report = apply(recipe, {"spark_recipe_ignore": accepted}, nodes=1)
    assert "--speculative-config" not in filled["spark_vllm_args"] and filled["spark_env"] == {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}


@pytest.mark.parametrize("name", ["sparkrun/other_engine", "eugr/two_commands"])
def test_what_serves_something_else_cannot_be_accepted(name):
    with pytest.raises(Problem) as caught:
        apply(foreign(name), {"spark_recipe_ignore": ["runtime", "command"]})
    assert caught.value.id == "recipe-field" and "another recipe" in caught.value.remedy


# --- the list ---


def test_overview():
    recipes = {
        "big": {**_recipe.empty("big", "own"), "nodes": [4], "weights_gib": 335.0},
        "fat": {**_recipe.empty("fat", "own"), "nodes": [2], "weights_gib": 190.0},
        "good": {
            **_recipe.empty("good", "own"),
            "nodes": [1, 2],
            "memory_gib": 40.0,
            "settings": {"model": "o/m", "gpu_memory_utilization": 0.5},
        },
    }
    rows = {row["name"]: row for row in _recipe.overview(recipes, 2, SPARK)}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "big": "no: for 4 nodes",
        "fat": "no: 95.0 GiB of 91.2 GiB",
        "good": "yes",
    }
    assert (rows["good"]["per_node_gib"], rows["big"]["per_node_gib"]) == (20.0, 83.8)
    assert _recipe.overview(recipes, 2, SPARK * 2)[1]["fits"] and not _recipe.overview(recipes, 2, SPARK // 3)[2]["fits"]
    text = _recipe.table(list(rows.values()), 2, SPARK, True)
    assert text.startswith("2 nodes, 121.6 GiB of memory each (assumed, as in a DGX Spark).")
    assert text.splitlines()[-3].split() == ["good", "o/m", "1", "or", "2", "20.0", "GiB", "model's", "-", "yes"]
    assert text.splitlines()[-1] == "A recipe for another number of nodes wants an inventory with that many (this one has 2)."
    assert "another number" not in _recipe.table([rows["good"]], 2, SPARK, True)


def test_describe():
    text = _recipe.describe(foreign("eugr/patched"))
    assert text.startswith("Patched (eugr), for 2 or more nodes\n\nspark_image: vllm-node-fork\n")
    assert "spark_vllm_args: --chat-template repaired.jinja\n" in text and "! earlyoom is left out" in text
    assert text.endswith("!! mods: changes files inside the image before the start (spark_recipe_ignore accepts it)")
    assert _recipe.describe(foreign("eugr/two_commands")).endswith("!! command: runs pip install, not vllm serve")
