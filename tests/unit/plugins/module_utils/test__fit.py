# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _fit
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.tests.unit.plugins import gang

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "fit"
REFERENCE = json.loads((FIXTURES / "qwen3.5-122b-a10b-fp8.config.json").read_text(encoding="utf-8"))
INDEX = json.loads((FIXTURES / "qwen3.5-122b-a10b-fp8.index.json").read_text(encoding="utf-8"))
SPARK = 127535084 * 1024

LLAMA = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}
PHI = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16"}
DEEPSEEK = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
GPT_OSS = {
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
GEMMA = {
    "text_config": {
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "num_global_key_value_heads": 4,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
}
NEMOTRON = {
    "num_hidden_layers": 10,
    "hybrid_override_pattern": "MEM*-EMEM*",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}

# name: (config, {kind: layers})
KINDS = {
    "interval": (REFERENCE, {"full": 12, "sliding": 0, "linear": 36}),
    "interval without a list": ({"num_hidden_layers": 48, "full_attention_interval": 4}, {"full": 12, "sliding": 0, "linear": 36}),
    "all full": (LLAMA, {"full": 80, "sliding": 0, "linear": 0}),
    "alternating": (GPT_OSS, {"full": 18, "sliding": 18, "linear": 0}),
    "every sixth": (
        {"num_hidden_layers": 62, "sliding_window": 1024, "sliding_window_pattern": 6},
        {"full": 10, "sliding": 52, "linear": 0},
    ),
    "all sliding": (
        {"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096},
        {"full": 0, "sliding": 32, "linear": 0},
    ),
    "a window of layers that nothing names": ({"num_hidden_layers": 32, "sliding_window": 4096}, {"full": 32, "sliding": 0, "linear": 0}),
    "a pattern in letters": (
        {"num_hidden_layers": 32, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
        {"full": 32, "sliding": 0, "linear": 0},
    ),
    "Gemma 2": ({"model_type": "gemma2", "num_hidden_layers": 26, "sliding_window": 4096}, {"full": 13, "sliding": 13, "linear": 0}),
    "Gemma 3 of text": (
        {"model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6},
        {"full": 4, "sliding": 22, "linear": 0},
    ),
    "Gemma 3 with its layers": (
        {
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 2,
                "sliding_window": 512,
                "layer_types": ["full_attention"] * 2,
            }
        },
        {"full": 2, "sliding": 0, "linear": 0},
    ),
    "window switched off": (
        {"num_hidden_layers": 28, "sliding_window": 4096, "use_sliding_window": False},
        {"full": 28, "sliding": 0, "linear": 0},
    ),
    "window of null": ({"num_hidden_layers": 32, "sliding_window": None}, {"full": 32, "sliding": 0, "linear": 0}),
    "letters": (NEMOTRON, {"full": 2, "sliding": 0, "linear": 4}),
    "flags": ({"num_hidden_layers": 4, "attn_type_list": [0, 0, 0, 1]}, {"full": 1, "sliding": 0, "linear": 3}),
    "shared caches": (
        {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 1},
        {"full": 3, "sliding": 0, "linear": 0},
    ),
}


@pytest.mark.parametrize("case", KINDS)
def test_kinds_of_layers(case):
    config, expected = KINDS[case]
    assert _fit.layer_kinds(_fit.text_config(config)) == expected


# As published for google/gemma-3-12b-it: the pattern, the width of a head and the longest context are in the class alone.
GEMMA_3 = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("kind", ["gemma3_text", None])
def test_what_the_class_of_gemma_3_fills_in(kind):
    text = {key: value for key, value in GEMMA_3["text_config"].items() if key != "model_type"}
    config = {**GEMMA_3, "text_config": {**text, **({"model_type": kind} if kind else {})}}
    assert _fit.layer_kinds(_fit.text_config(config)) == {"full": 8, "sliding": 40, "linear": 0}
    row = _fit.fit(config, 24 << 30, memory=SPARK)
    assert (row["longest_context"], row["kv_growth"]) == (131072, 8 * 2 * 8 * 256 * 2)


# name: (config, tensor parallel, kv dtype, bytes of one token over all layers of one rank that keep every token)
GROWTH = {
    "grouped": (LLAMA, 1, "auto", 327680),
    "grouped, split": (LLAMA, 2, "auto", 163840),
    "grouped, fp8": (LLAMA, 2, "fp8", 81920),
    "grouped, nvfp4": (LLAMA, 2, "nvfp4", 46080),
    "heads are copied when there are more ranks": (LLAMA, 16, "auto", 40960),
    "multi-head": (PHI, 1, "auto", 524288),
    "latent": (DEEPSEEK, 1, "auto", 70272),
    "latent is the same on every rank": (DEEPSEEK, 8, "auto", 70272),
    "latent, fp8": (DEEPSEEK, 8, "fp8_e4m3", 35136),
    "latent, packed": (DEEPSEEK, 1, "fp8_ds_mla", 40016),
    "only the full layers": (GPT_OSS, 1, "auto", 36864),
    "full layers with wider heads": (GEMMA, 1, "auto", 8192),
    "hybrid of the reference": (REFERENCE, 1, "auto", 24576),
    "hybrid of the reference on two Sparks": (REFERENCE, 2, "auto", 12288),
    "hybrid of the reference, fp8": (REFERENCE, 2, "fp8", 6144),
}


@pytest.mark.parametrize("case", GROWTH)
def test_bytes_of_a_token(case):
    config, tensor, dtype, expected = GROWTH[case]
    assert _fit.cost(config, tensor, 1, dtype).per_token == expected


def test_a_stage_of_a_pipeline_holds_its_layers():
    assert _fit.cost(LLAMA, 1, 4).per_token == 327680 / 4
    assert _fit.cost(LLAMA, 1, 3).per_token == 27 * 4096  # the fullest of 27, 27 and 26 layers


def test_a_stage_is_as_full_as_its_own_layers():
    """Of 48 layers every fourth has a cache that grows; 4 stages of 12 have 3 of them each, whatever their place."""
    assert _fit.cost(REFERENCE, 1, 4).per_token == 24576 / 12 * 3
    assert _fit.cost(REFERENCE, 1, 4, dealt="24,8,8,8").per_token == 24576 / 12 * 6
    assert _fit.cost(REFERENCE, 1, 4, dealt="24,24").per_token == 24576 / 12 * 3  # refused elsewhere


def test_the_fullest_stage_decides_about_weights():
    row = _fit.fit(LLAMA, 80 << 30, pipeline_parallel=3, memory=SPARK)
    assert row["weights"] == 27 << 30
    assert _fit.fit(LLAMA, 80 << 30, pipeline_parallel=2, dealt="60,20", memory=SPARK)["weights"] == 60 << 30
    assert _fit.fit(LLAMA, 80 << 30, tensor_parallel=2, pipeline_parallel=2, memory=SPARK)["weights"] == 20 << 30


def test_engines_hold_the_model_each_and_their_requests_add_up():
    one = _fit.fit(LLAMA, 8 << 30, memory=SPARK, max_model_len=8192)
    two = _fit.fit(LLAMA, 8 << 30, data_parallel=2, memory=SPARK, max_model_len=8192)
    assert two["weights"] == one["weights"] and two["requests"] == 2 * one["requests"] and two["data_parallel"] == 2
    assert "1 x 1 x 2" in _fit.table("m", 8 << 30, [{"nodes": 2, "gpus": 1, **two}])
    assert "TP x PP " in _fit.table("m", 8 << 30, [{"nodes": 1, "gpus": 1, **one}])


def test_a_window_is_bounded():
    cost = _fit.cost(GPT_OSS, 1, 1, "auto", 8192)
    assert (cost.windowed, cost.window) == (36864, 128 + 8192)
    assert cost.request(1000) == 1000 * (36864 + 36864)
    assert cost.request(100000) == 100000 * 36864 + 8320 * 36864
    assert _fit.cost(GEMMA, 1, 1, "auto", 0).windowed == 5 * 16 * 512 * 2


def test_state_of_linear_layers():
    # 64 heads of 128 x 128 in float32, and three positions of 12288 channels in bfloat16
    assert _fit.state_bytes(REFERENCE) == 4194304 + 73728
    assert _fit.cost(REFERENCE, 2).fixed == 36 * 4268032 / 2
    # 128 heads of 64 x 128, and three positions of 8192 + 2 x 8 x 128 channels
    assert _fit.state_bytes(NEMOTRON) == (128 * 64 * 128 + 3 * (8192 + 2048)) * 2
    # groups that do not divide by the ranks are copied to each of them
    assert _fit.state_bytes(NEMOTRON, 16) == (128 * 64 * 128 + 3 * (8192 + 2 * 16 * 128)) * 2 / 16
    assert _fit.remarks({**LLAMA, "layer_types": ["linear_attention"] * 80}) == [
        "linear layers of a kind that is not known here: their state is not counted"
    ]
    assert _fit.remarks(REFERENCE) == []


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        ({}, "auto", "bfloat16"),
        ({"torch_dtype": "float32"}, "auto", "float32"),
        ({"text_config": {"dtype": "float16"}}, "auto", "float16"),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, "auto", "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, "auto", "fp8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "auto", "bfloat16"),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, "bfloat16", "bfloat16"),
        ({}, "fp8_e5m2", "fp8"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
            "auto",
            "fp8",
        ),
        ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}}, "bfloat16", "fp8"),
        ({"compression_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {}}}, "auto", "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {}}}}, "auto", "fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}, "auto", "bfloat16"),
        ({"quantization_config": ["odd"]}, "auto", "bfloat16"),
    ],
)
def test_cache_dtype(config, asked, expected):
    assert _fit.cache_dtype(config, asked) == expected


@pytest.mark.parametrize(
    "call", [lambda: _fit.cache_dtype({}, "int3"), lambda: _fit.fit({}, 1), lambda: _fit.index_bytes({"weight_map": {}})]
)
def test_what_cannot_be_computed(call):
    with pytest.raises(Problem) as caught:
        call()
    assert caught.value.id == "fit-unknown"


@pytest.mark.parametrize(
    "odd",
    [
        {"num_key_value_heads": [4, 8]},
        {"max_position_embeddings": "131072"},
        {"head_dim": {"full": 128}},
        {"sliding_window": "4096"},
        {"full_attention_interval": [4]},
        {"num_attention_heads": [8]},
        {"layer_types": "full_attention"},
        {"layer_types": [{"kind": "full"}]},
        {"attn_type_list": 1},
        {"hybrid_override_pattern": ["M", {}]},
        {"head_dim": -1},
    ],
)
def test_an_entry_of_another_kind_is_told(odd):
    config = {**LLAMA, **odd}
    tensor, pipeline = _fit.split(config, 2)
    with pytest.raises(Problem) as caught:
        _fit.fit({"text_config": config}, 1 << 30, tensor_parallel=tensor, pipeline_parallel=pipeline)
    assert caught.value.id == "fit-unknown" and next(iter(odd)) in caught.value.found


@pytest.mark.parametrize("empty", [None, 0, False, []])
def test_an_entry_without_a_value_is_none(empty):
    names = {name: empty for name in (*_fit.FIGURES, *_fit.LISTS) if name not in LLAMA}
    assert _fit.fit({**LLAMA, **names, "hidden_size": 8192}, 1 << 30) == _fit.fit(LLAMA, 1 << 30)


def test_the_reference_agrees_with_the_published_sizes():
    """39 files of 127163011832 bytes, 118.4 GiB; 59.2 GiB on each of two Sparks; one of two KV heads on each."""
    weights = _fit.index_bytes(INDEX)
    assert weights == 127163011832 and _fit.text_of(weights) == "118.4 GiB"
    row = _fit.fit(REFERENCE, weights, tensor_parallel=2, memory=SPARK, utilization=0.8, max_model_len=16384)
    assert row["weights"] == 63581505916 and _fit.text_of(row["weights"]) == "59.2 GiB"
    assert (row["verdict"], row["kv_growth"], row["per_request"]) == ("fits", 12288, 76824576)
    # 0.8 of 130595926016 bytes, less the weights, less a twentieth
    assert row["kv_space"] == 34365438596
    # the room is for more than the model's own limit; one request of 16384 tokens takes 278151168 bytes
    assert (row["longest_context"], row["context"], row["requests"]) == (262144, 16384, 123)


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({"tensor_parallel": 1}, "weights do not fit"),
        ({"tensor_parallel": 2, "utilization": 0.5}, "no room for a KV cache"),
        ({"tensor_parallel": 2, "max_model_len": 4_000_000}, "shorter context"),
        ({"tensor_parallel": 1, "pipeline_parallel": 2}, "fits"),
        ({"tensor_parallel": 2}, "fits"),
    ],
)
def test_verdicts(more, verdict):
    row = _fit.fit(REFERENCE, 127163011832, memory=SPARK, **more)
    assert row["verdict"] == verdict
    assert (row["requests"] > 0) == (row["context"] > 0) == (verdict in ("fits", "shorter context"))


def test_a_longest_context_is_what_just_fits():
    for config in (LLAMA, GPT_OSS, DEEPSEEK, REFERENCE):
        need = _fit.cost(config)
        for space in (10**8, 10**9, 10**10):
            longest = need.longest(space)
            assert (longest == 0 or need.request(longest) <= space) and need.request(longest + 1) > space
    assert _fit.cost(REFERENCE).longest(1000) == 0


@pytest.mark.parametrize(("gpus", "expected"), [(1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (4, (4, 1)), (6, (2, 3))])
def test_split(gpus, expected):
    assert _fit.split(REFERENCE, gpus) == expected


def test_arguments():
    words = ["--kv-cache-dtype", "fp8", "--max_num_batched_tokens=4096", "--enforce-eager", "--kv-cache-dtype", "auto"]
    assert _fit.argument(words, "--kv-cache-dtype") == "auto"
    assert _fit.argument(words, "--enforce-eager") == "" and _fit.argument(words, "--seed") is None
    expected = {"utilization": 0.8, "max_model_len": 0, "kv_dtype": "auto", "in_flight": 4096, "dealt": ""}
    assert _fit.options(gang.settings(vllm_args=words)) == expected
    assert _fit.options(gang.settings(env={"VLLM_PP_LAYER_PARTITION": "1,2"}))["dealt"] == "1,2"


def test_table():
    rows = [
        {"nodes": n, "gpus": 1, **_fit.fit(REFERENCE, 127163011832, tensor_parallel=n, memory=SPARK, max_model_len=16384)} for n in (1, 2)
    ]
    head, empty, heading, one, two, remark = _fit.table("Qwen", 127163011832, rows, ["something"]).splitlines()
    assert head.startswith("Qwen: weights 118.4 GiB, KV cache bfloat16, 97.3 GiB for vLLM") and empty == ""
    assert heading.split("  ")[0] == "NODES" and remark == "! something"
    assert one.split() == ["1", "1", "x", "1", "118.4", "GiB", "-", "24.0", "KiB", "-", "-", "weights", "do", "not", "fit"]
    assert two.split()[4:] == ["59.2", "GiB", "32.0", "GiB", "12.0", "KiB", "262144", "123", "of", "16384", "tokens", "fits"]
