#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_fit
short_description: Compute what of a model fits on how many nodes
version_added: 0.1.0
description:
  - From the model's C(config.json) and the size of its weights computes the weights of each node, the KV cache of one token, the longest
    context and
    the number of concurrent requests, and prints a table with one line for each number of nodes. The same arithmetic warns in the role
    C(preflight).
  - Knows multi-head, grouped-query and latent attention, sliding windows, and hybrids with linear layers (gated delta net, Mamba 2).
  - Files and arguments come first. Without them the snapshot in the head's cache is read, and when it is not there the hub is asked by
    the head.
  - It is an estimate; blocks, padding, draft tokens and the vision encoder are not counted, and C(reserve) stands for activations and
    graphs.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: Nothing is changed.
  idempotent:
    support: full
options:
  settings:
    description: RV(dgxspark.serving.serving_settings#module:settings), the checked inputs.
    type: dict
    required: true
  config:
    description: Path on the controller of the model's C(config.json), or of the directory it is in. Empty asks the head.
    type: str
    default: ""
  index:
    description: Path on the controller of C(model.safetensors.index.json). Empty looks beside O(config).
    type: str
    default: ""
  weights_gib:
    description: Size of all weights in GiB, where no index says it.
    type: float
    default: 0
  nodes:
    description: Numbers of nodes to plan for. Empty means 1, 2, 4 and that of the inventory.
    type: list
    elements: int
    default: []
  memory:
    description: Memory of the smallest node in bytes. 0 takes it from facts, else that of a DGX Spark.
    type: int
    default: 0
  output:
    description: What is printed.
    type: str
    choices: [table, json, none]
    default: table
"""

EXAMPLES = r"""
- name: Check the inputs
  dgxspark.serving.serving_settings:
  register: inputs

- name: What fits?
  dgxspark.serving.serving_fit:
    settings: "{{ inputs.settings }}"
    config: ~/models/config.json
    weights_gib: 118.4
"""

RETURN = r"""
plan:
  description:
    - C(weights) and C(memory) in bytes, C(remarks), and C(rows), one for each number of nodes. A row has C(verdict), C(weights),
      C(kv_space) and
      C(kv_growth) (bytes for each GPU; the last for one token), C(longest_context) and C(context) in tokens, and C(requests) of that
      C(context).
  returned: success
  type: dict
problem:
  description: What is wrong, as C(id), C(node), C(stage), C(found), C(expected) and C(remedy).
  returned: failure
  type: dict
"""
