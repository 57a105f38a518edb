# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Layers and how a pipeline deals them out."""

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _layers

# What vllm.distributed.utils.get_pp_indices of vLLM 0.32 gives.
DEALT = [
    (8, 2, [4, 4]),
    (7, 2, [4, 3]),
    (61, 2, [31, 30]),
    (10, 4, [2, 3, 3, 2]),
    (11, 4, [3, 3, 3, 2]),
    (9, 4, [2, 2, 3, 2]),
    (48, 5, [9, 10, 10, 10, 9]),
    (2, 2, [1, 1]),
    (80, 3, [27, 27, 26]),
]


@pytest.mark.parametrize(("layers", "stages", "expected"), DEALT)
def test_layers_are_dealt_out_as_vllm_does(layers, stages, expected):
    assert _layers.partition("", layers, stages) == expected


@pytest.mark.parametrize(
    ("given", "expected"), [("5,3", [5, 3]), ("8", None), ("4,5", None), ("8,0", None), ("a,b", None), ("4;4", None), ("9,-1", None)]
)
def test_a_partition_of_the_inventory(given, expected):
    assert _layers.partition(given, 8, 2) == expected


@pytest.mark.parametrize(
    ("config", "layers", "moe"),
    [
        ({"num_hidden_layers": 28}, 28, False),
        ({"n_layer": 12}, 12, False),
        ({"text_config": {"num_hidden_layers": 48, "num_experts": 256}, "num_hidden_layers": 2}, 48, True),
        ({"num_hidden_layers": 61, "n_routed_experts": 256}, 61, True),
        ({"num_hidden_layers": 32, "num_local_experts": 8}, 32, True),
        ({"num_hidden_layers": 32, "num_experts": 0}, 32, False),
        ({}, 0, False),
        (None, 0, False),
    ],
)
def test_shape_of_a_model(config, layers, moe):
    assert (_layers.count(config), _layers.is_moe(config)) == (layers, moe)


def test_kinds_keep_their_order():
    assert _layers.kinds({"full_attention_interval": 4}, 5) == ["linear", "linear", "linear", "full", "linear"]
    assert _layers.kinds({"hybrid_override_pattern": "M-*E"}, 4) == ["linear", "", "full", ""]
    assert _layers.kinds({"layer_types": ["full_attention", "sliding_attention"], "num_kv_shared_layers": 1}, 2) == ["full", ""]
    assert _layers.dealt(["a", "b", "c"], [2, 1]) == [["a", "b"], ["c"]]
