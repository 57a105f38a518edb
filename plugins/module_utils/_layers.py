# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The layers of a model from its config.json, and how a pipeline deals them out.

PRIVATE to the collection. Pure functions over plain data.
"""

from __future__ import annotations

import typing as t

FULL = ("full_attention", "attention", "global_attention")
SLIDING = ("sliding_attention", "chunked_attention", "local_attention")
LINEAR = ("linear_attention", "mamba", "conv")
PATTERN = {"*": "full", "M": "linear"}  # hybrid_override_pattern; "-" and "E" are feed-forward layers, without a cache
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
# What Transformers fills in where config.json leaves it out: for these it is more than a default, the published files leave it to the class.
CLASSES: dict[str, dict[str, t.Any]] = {
    "gemma2": {"sliding_window_pattern": 2, "head_dim": 256},
    "gemma3_text": {
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
}
CLASSES["gemma3"] = CLASSES["gemma3_text"]
UNIFORM = ("mistral", "mixtral", "phi3", "starcoder2")  # one window for all layers, and no list that says so
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")


def text_config(config: t.Mapping[str, t.Any]) -> t.Mapping[str, t.Any]:
    """The language model's part of config.json (multimodal models nest it), with what its class fills in."""
    found = next((config[key] for key in ("text_config", "llm_config", "language_config") if isinstance(config.get(key), dict)), config)
    filled = CLASSES.get(str(found.get("model_type") or config.get("model_type") or ""), {})
    return {**filled, **found}


def count(config: t.Mapping[str, t.Any] | None) -> int:
    """Number of layers; 0 when config.json does not say it."""
    text = text_config(config or {})
    for name in LAYERS:
        if isinstance(text.get(name), int) and text[name] > 0:
            return int(text[name])
    return 0


def is_moe(config: t.Mapping[str, t.Any] | None) -> bool:
    """Whether the model is a mixture of experts."""
    text = text_config(config or {})
    return any(isinstance(text.get(name), int) and text[name] > 0 for name in EXPERTS)


def kinds(text: t.Mapping[str, t.Any], total: int) -> list[str]:
    """What each layer keeps for a request, in order: ``full``, ``sliding``, ``linear``, or "" for nothing of its own."""
    named = text.get("layer_types") or text.get("layers_block_type")
    pattern = text.get("hybrid_override_pattern")
    flags = text.get("attn_type_list")
    interval = text.get("full_attention_interval")
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    if named:
        own = len(named) - (text.get("num_kv_shared_layers") or 0)
        known = {**dict.fromkeys(FULL, "full"), **dict.fromkeys(SLIDING, "sliding"), **dict.fromkeys(LINEAR, "linear")}
        return [known.get(name, "") if place < own else "" for place, name in enumerate(named)]
    if pattern:
        return [PATTERN.get(letter, "") for letter in pattern]
    if flags:
        return ["full" if flag == 1 else "linear" for flag in flags]
    if interval:
        return ["full" if place % interval == 0 else "linear" for place in range(1, total + 1)]
    every = text.get("sliding_window_pattern")
    if window and isinstance(every, int) and every > 0:
        return ["full" if place % every == 0 else "sliding" for place in range(1, total + 1)]
    # Which layers have the window is in the model's code then: all full is the need that is never too small.
    return ["sliding" if window and text.get("model_type") in UNIFORM else "full"] * total


def partition(given: str, layers: int, stages: int) -> list[int] | None:
    """The layers of each stage: as VLLM_PP_LAYER_PARTITION says, else as vLLM deals them out; None when ``given`` is not a way to do it.

    What is left over goes to the stages before the last, which has the output as well.
    """
    if given:
        try:
            parts = [int(part) for part in given.split(",")]
        except ValueError:
            return None
        return parts if len(parts) == stages and sum(parts) == layers and min(parts) > 0 else None
    parts = [layers // stages] * stages
    for place in range(2, layers % stages + 2):
        parts[-place] += 1
    return parts


def dealt(items: t.Sequence[str], parts: t.Sequence[int]) -> list[list[str]]:
    """``items`` cut into pieces of these lengths."""
    pieces, begin = [], 0
    for size in parts:
        pieces.append(list(items[begin : begin + size]))
        begin += size
    return pieces
