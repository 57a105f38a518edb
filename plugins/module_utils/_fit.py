# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What fits: weights, KV cache, context length and concurrent requests from a model's config.json and the size of its weights.

PRIVATE to the collection. Pure functions over plain data. The rules of the KV cache are those of vLLM 0.32
(``vllm/v1/kv_cache_interface.py``):
a sliding layer keeps its window and what is in flight, a linear layer a state of fixed size for each request, a latent (MLA) cache is
the same on
every rank of a tensor parallel group. Blocks, padding and speculative tokens are not counted, so the true need is a little higher.
"""

from __future__ import annotations

import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _layers
from ansible_collections.dgxspark.serving.plugins.module_utils._layers import text_config
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._status import columns

GIB = 1 << 30
SPARK_MEMORY = 127535084 * 1024  # MemTotal of a DGX Spark, bytes; older firmware shows about 2 GiB less
RESERVE = 1 / 20  # of the memory: activations, CUDA graphs, NCCL. 6 GiB on a Spark; reports range from 1.5 to 9
IN_FLIGHT = 8192  # tokens of a batch, where --max-num-batched-tokens is not given
APART = 0.03  # nodes whose memory differs by more than this share are worth a word

# Bytes of one element. fp8 with scales per tensor; nvfp4: half a byte and one scale byte for 16 elements.
DTYPES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "half": 2.0, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625}
# Entries of config.json by what they must be, where they are there at all: a model with another shape (heads of each layer) is not computed.
FIGURES = (
    *(
        "num_attention_heads",
        "n_head",
        "num_key_value_heads",
        "num_global_key_value_heads",
        "hidden_size",
        "n_embd",
        "num_kv_shared_layers",
    ),
    *("head_dim", "attention_head_dim", "v_head_dim", "global_head_dim", "kv_lora_rank", "qk_rope_head_dim", "n_groups"),
    *("max_position_embeddings", "n_positions", "sliding_window", "attention_chunk_size", "full_attention_interval"),
)
LISTS = ("layer_types", "layers_block_type", "attn_type_list")
PACKED_MLA = 656  # bytes of a token and layer in the layouts *_ds_mla: 512 fp8 values, their scales, 64 bf16 values


def number(text: t.Mapping[str, t.Any], *names: str) -> int:
    """The first of these entries that is a number. Raises Problem."""
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise Problem(
        "fit-unknown",
        stage="plan",
        found=f"a config.json without {names[0]}",
        expected="the config.json of a language model as on the Hugging Face hub",
        remedy="give the file of the model itself; what vLLM decides in its own code for this model cannot be computed here",
    )


def quantization(config: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """How the checkpoint is quantised, from where vLLM looks for it; {} when it is not."""
    for found in (config.get("quantization_config"), text_config(config).get("quantization_config"), config.get("compression_config")):
        if found and isinstance(found, dict):
            return found
    return {}


def check(config: t.Mapping[str, t.Any]) -> None:
    """Raises Problem for an entry that is there and is not of the kind that the rules here are about."""
    text = text_config(config)
    figures = [(name, isinstance(text.get(name), (int, float)) and text[name] > 0, "a number above 0") for name in FIGURES]
    lists = [
        (
            name,
            isinstance(text.get(name), list) and all(isinstance(item, (str, int)) for item in text[name]),
            "a list with a word for each layer",
        )
        for name in LISTS
    ]
    letters = [("hybrid_override_pattern", isinstance(text.get("hybrid_override_pattern"), str), "a letter for each layer")]
    for name, good, expected in (*figures, *lists, *letters):
        if text.get(name) and not good:
            raise Problem(
                "fit-unknown",
                stage="plan",
                found=f"a config.json with {name} {text[name]!r:.80}",
                expected=expected,
                remedy="give the file of the model itself; a model whose layers differ in this cannot be computed here",
            )


def layer_kinds(text: t.Mapping[str, t.Any]) -> dict[str, int]:
    """Number of layers with a full, a sliding and a linear cache."""
    found = _layers.kinds(text, number(text, *_layers.LAYERS))
    return {kind: found.count(kind) for kind in ("full", "sliding", "linear")}


def model_dtype(config: t.Mapping[str, t.Any]) -> str:
    """What the model computes in."""
    for part in (text_config(config), config):
        name = str(part.get("dtype") or part.get("torch_dtype") or "").rpartition(".")[2]
        if name in DTYPES:
            return name
    return "bfloat16"


def cache_dtype(config: t.Mapping[str, t.Any], asked: str = "auto") -> str:
    """What ``--kv-cache-dtype`` means for this model; "auto" is what a ModelOpt checkpoint says, else the model's own type. With a scheme for the
    cache in a compressed-tensors checkpoint vLLM takes fp8 whatever was asked. Raises Problem."""
    name = asked.lower()
    quantized = quantization(config)
    method = str(quantized.get("quant_method", ""))
    if method == "compressed-tensors" and quantized.get("kv_cache_scheme") is not None:
        name = "fp8"
    if name == "auto":
        if method.startswith("modelopt"):
            scheme = quantized.get("kv_cache_scheme") or quantized.get("kv_cache_quant_algo")
            bits = scheme.get("num_bits") if isinstance(scheme, dict) else {"fp8": 8, "nvfp4": 4}.get(str(scheme).lower())
            if bits in (4, 8):
                return "fp8" if bits == 8 else "nvfp4"
        return model_dtype(config)
    if name.endswith("_ds_mla"):
        return name
    for known in DTYPES:
        if name == known or name.startswith(known + "_"):  # fp8_e4m3, fp8_inc
            return known
    raise Problem(
        "fit-unknown",
        stage="plan",
        found=f"--kv-cache-dtype {asked}",
        expected="auto, bfloat16, float16, float32, fp8, nvfp4 or a layout *_ds_mla",
        remedy="plan with one of these",
    )


def is_mla(text: t.Mapping[str, t.Any]) -> bool:
    """Whether the layers cache one latent vector instead of keys and values of each head."""
    return bool(text.get("kv_lora_rank"))


def token_bytes(config: t.Mapping[str, t.Any], tensor_parallel: int = 1, kv_dtype: str = "auto") -> dict[str, float]:
    """Bytes of one token in one full and in one sliding layer, on one rank."""
    text = text_config(config)
    dtype = cache_dtype(config, kv_dtype)
    if is_mla(text):
        latent = number(text, "kv_lora_rank") + (text.get("qk_rope_head_dim") or 0)
        size = float(PACKED_MLA) if dtype.endswith("_ds_mla") else latent * DTYPES[dtype]
        return {"full": size, "sliding": size}
    element = DTYPES["fp8"] if dtype.endswith("_ds_mla") else DTYPES[dtype]
    heads = number(text, "num_attention_heads", "n_head")
    kv_heads = text.get("num_key_value_heads") or heads
    width = text.get("head_dim") or text.get("attention_head_dim") or number(text, "hidden_size", "n_embd") // heads
    value = text.get("v_head_dim") or width

    def one(count: int, both: int) -> float:
        return max(1, count // tensor_parallel) * both * element

    sliding = one(kv_heads, width + value)
    wide = text.get("global_head_dim")
    full = one(text.get("num_global_key_value_heads") or kv_heads, 2 * wide) if wide else sliding
    return {"full": full, "sliding": sliding}


def state_bytes(config: t.Mapping[str, t.Any], tensor_parallel: int = 1) -> float:
    """Bytes that one linear layer keeps for one request, on one rank; 0 where this layer is not known here."""
    text = text_config(config)
    plain = DTYPES[model_dtype(config)]
    recurrent = DTYPES.get(str(text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or ""), plain)
    if text.get("linear_num_value_heads"):  # gated delta net
        keys = number(text, "linear_num_key_heads") * number(text, "linear_key_head_dim")
        heads, width = number(text, "linear_num_value_heads"), number(text, "linear_value_head_dim")
        convolution = (2 * keys + heads * width) * (number(text, "linear_conv_kernel_dim") - 1)
        state = heads * width * number(text, "linear_key_head_dim")
    elif text.get("mamba_num_heads"):  # mamba 2
        heads, width = number(text, "mamba_num_heads"), number(text, "mamba_head_dim")
        size, groups = number(text, "ssm_state_size", "mamba_d_state"), text.get("n_groups") or 1
        if groups % tensor_parallel:
            groups = tensor_parallel
        convolution = (heads * width + 2 * groups * size) * (number(text, "conv_kernel", "mamba_d_conv") - 1)
        state = heads * width * size
    else:
        return 0.0
    return (convolution * plain + state * recurrent) / tensor_parallel


def remarks(config: t.Mapping[str, t.Any]) -> list[str]:
    """What the figures leave out for this model."""
    text = text_config(config)
    told = []
    if text.get("index_head_dim") or text.get("compress_ratios"):
        told.append("sparse attention: the indexer's cache and compression are not counted")
    if layer_kinds(text)["linear"] and not state_bytes(config):
        told.append("linear layers of a kind that is not known here: their state is not counted")
    return told


class Cost(t.NamedTuple):
    """What requests need on the fullest rank."""

    per_token: float  # bytes, as long as the context grows
    windowed: float  # bytes of a token, for no more than ``window`` tokens
    window: int
    fixed: float  # bytes of each request

    def request(self, tokens: int) -> float:
        """Bytes of one request with so many tokens."""
        return self.per_token * tokens + self.windowed * min(tokens, self.window) + self.fixed

    def longest(self, space: float) -> int:
        """Tokens of the longest request that fits."""
        left = space - self.fixed
        if left <= 0:
            return 0
        both = self.per_token + self.windowed
        if not both:
            return 1 << 62
        if left < both * self.window:
            return int(left / both)
        left -= self.windowed * self.window
        return int(left / self.per_token) if self.per_token else 1 << 62


def cost(
    config: t.Mapping[str, t.Any],
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    kv_dtype: str = "auto",
    in_flight: int = IN_FLIGHT,
    dealt: str = "",
) -> Cost:
    """The need of one request on the fullest rank: a pipeline stage holds the caches of its own layers.

    ``dealt`` is VLLM_PP_LAYER_PARTITION. No stage has more than the result says, of any kind of layer.
    """
    text = text_config(config)
    found = _layers.kinds(text, number(text, *_layers.LAYERS))
    parts = _layers.partition(dealt, len(found), pipeline_parallel) or _layers.partition("", len(found), pipeline_parallel) or []
    stages = _layers.dealt(found, parts)
    kinds = {kind: max(stage.count(kind) for stage in stages) for kind in ("full", "sliding", "linear")}
    token = token_bytes(config, tensor_parallel, kv_dtype)
    window = int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)
    return Cost(
        per_token=kinds["full"] * token["full"],
        windowed=kinds["sliding"] * token["sliding"],
        window=window + in_flight if kinds["sliding"] else 0,
        fixed=kinds["linear"] * state_bytes(config, tensor_parallel),
    )


def share(config: t.Mapping[str, t.Any] | None, pipeline_parallel: int, dealt: str = "") -> float:
    """The part of the layers that the fullest stage of a pipeline holds."""
    layers = _layers.count(config)
    if not layers:
        return 1 / pipeline_parallel
    return max(_layers.partition(dealt, layers, pipeline_parallel) or _layers.partition("", layers, pipeline_parallel) or [0]) / layers


def index_bytes(index: t.Mapping[str, t.Any]) -> int:
    """Bytes of all weights, from model.safetensors.index.json. Raises Problem."""
    size = (index.get("metadata") or {}).get("total_size")
    if isinstance(size, (int, float)) and size > 0:
        return int(size)
    raise Problem(
        "fit-unknown",
        stage="plan",
        found="an index without metadata.total_size",
        expected="model.safetensors.index.json as on the Hugging Face hub",
        remedy="give the model's own index, or the size in GiB with spark_weights_gib",
    )


def split(config: t.Mapping[str, t.Any] | None, gpus: int) -> tuple[int, int]:
    """Tensor and pipeline parallel size for so many GPUs: all tensor parallel where the heads allow it."""
    heads = text_config(config or {}).get("num_attention_heads") or 0
    heads = heads if isinstance(heads, int) else 0  # what it is instead, ``fit`` tells
    for size in range(gpus, 0, -1):
        if gpus % size == 0 and (not heads or heads % size == 0):
            return size, gpus // size
    return gpus, 1


def fit(
    config: t.Mapping[str, t.Any],
    weights: int,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    data_parallel: int = 1,
    dealt: str = "",
    memory: int = SPARK_MEMORY,
    utilization: float = 0.8,
    max_model_len: int = 0,
    kv_dtype: str = "auto",
    in_flight: int = IN_FLIGHT,
) -> dict[str, t.Any]:
    """What the fullest rank holds and what that leaves: bytes, tokens, requests of all engines together. ``memory`` is the smallest node's, in bytes
    for one GPU. That data parallel engines share their experts is not counted. Raises Problem.
    """
    check(config)
    text = text_config(config)
    limit = text.get("max_position_embeddings") or text.get("n_positions") or 0
    wanted = max_model_len or limit
    each = weights / tensor_parallel * share(config, pipeline_parallel, dealt)
    budget = memory * utilization
    space = max(0.0, budget - each - memory * RESERVE)
    need = cost(config, tensor_parallel, pipeline_parallel, kv_dtype, in_flight, dealt)
    longest = need.longest(space)
    if limit:
        longest = min(longest, max(limit, max_model_len))
    length = min(wanted or longest, longest)
    if each >= budget:
        verdict = "weights do not fit"
    elif space <= 0 or longest < 1:
        verdict = "no room for a KV cache"
    elif wanted > longest:
        verdict = "shorter context"
    else:
        verdict = "fits"
    request = need.request(length)
    return {
        "verdict": verdict,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "data_parallel": data_parallel,
        "weights": int(each),
        "budget": int(budget),
        "reserve": int(memory * RESERVE),
        "kv_space": int(space),
        "kv_dtype": cache_dtype(config, kv_dtype),
        "kv_per_token": int(need.per_token + need.windowed),
        "kv_growth": int(need.per_token),
        "per_request": int(need.fixed),
        "longest_context": longest if verdict in ("fits", "shorter context") else 0,
        "context": length if verdict in ("fits", "shorter context") else 0,
        "requests": int(space / request) * data_parallel if request > 0 and verdict in ("fits", "shorter context") else 0,
    }


# --- the inputs of the collection ------------------------------------------------------------------------------------------


def argument(words: t.Sequence[t.Any], *flags: str) -> str | None:
    """Value of an argument of ``vllm serve`` in a list of words ("" for one without a value), the last one wins; None when it is not
    there."""
    found = None
    for place, word in enumerate(map(str, words)):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in flags:
            following = str(words[place + 1]) if place + 1 < len(words) else ""
            found = value if equals else "" if following.startswith("-") else following
    return found


def options(settings: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What ``fit`` needs of the inputs."""
    words = settings.get("vllm_args") or []
    batch = argument(words, "--max-num-batched-tokens") or ""
    return {
        "utilization": float(settings["gpu_memory_utilization"]),
        "max_model_len": int(settings.get("max_model_len") or 0),
        "kv_dtype": argument(words, "--kv-cache-dtype") or "auto",
        "dealt": str((settings.get("env") or {}).get("VLLM_PP_LAYER_PARTITION") or ""),
        "in_flight": int(batch) if batch.isdigit() else IN_FLIGHT,
    }


def shrinks(settings: t.Mapping[str, t.Any]) -> bool:
    """Whether the server may hold less in memory than the files have: weights that are quantised while they load, or kept elsewhere."""
    words = settings.get("vllm_args") or []
    flags = any(argument(words, flag) is not None for flag in ("--quantization", "-q", "--cpu-offload-gb", "--language-model-only"))
    return flags or any("OFFLOAD" in str(key).upper() for key in settings.get("env") or {})


def text_of(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / GIB:.1f} GiB"


# --- what a person reads ---------------------------------------------------------------------------------------------------


def table(name: str, weights: int, rows: t.Sequence[t.Mapping[str, t.Any]], told: t.Sequence[str] = ()) -> str:
    """The plan: one line for each number of nodes. Each row is a result of ``fit`` and ``nodes``."""
    several = any(row["data_parallel"] > 1 for row in rows)
    sizes = "TP x PP x DP" if several else "TP x PP"
    lines = [["NODES", sizes, "WEIGHTS/NODE", "FOR KV/NODE", "KV/TOKEN", "LONGEST CONTEXT", "REQUESTS", ""]]
    for row in rows:
        able = row["context"] > 0
        lines.append(
            [
                str(row["nodes"]),
                f"{row['tensor_parallel']} x {row['pipeline_parallel']}" + (f" x {row['data_parallel']}" if several else ""),
                text_of(row["weights"] * row["gpus"]),
                text_of(row["kv_space"] * row["gpus"]) if able else "-",
                f"{(row['kv_growth'] or row['kv_per_token']) / 1024:.1f} KiB",
                str(row["longest_context"]) if able else "-",
                f"{row['requests']} of {row['context']} tokens" if able else "-",
                row["verdict"],
            ]
        )
    first = rows[0]
    head = (
        f"{name}: weights {text_of(weights)}, KV cache {first['kv_dtype']}, "
        f"{text_of(first['budget'])} for vLLM on each GPU, of it {text_of(first['reserve'])} kept for activations and graphs"
    )
    return "\n".join([head, "", *columns(lines), *[f"! {line}" for line in told]])
