#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_targets
short_description: List what Prometheus can scrape on the nodes
version_added: 0.1.0
description:
  - Runs on the controller over the groups C(ray_head) and C(ray_workers). The server on the head and the node exporter of every node are always targets,
    Ray and the GPU exporter where something listens.
  - A target's address is the variable C(monitoring_address) of the host, else C(ansible_host), else its name.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
attributes:
  check_mode:
    support: full
    details:
      - It only computes.
  diff_mode:
    support: N/A
    details:
      - Nothing is changed.
  idempotent:
    support: full
    details:
      - It never reports a change.
options:
  facts:
    description: RV(dgxspark.serving.node_info#module:node) of the nodes that answered.
    type: list
    elements: dict
    default: []
  vllm_port:
    description: Port of the API server.
    type: int
    required: true
  ray_port:
    description: Port to which Ray exports its metrics.
    type: int
    required: true
  node_port:
    description: Port of the node exporter.
    type: int
    required: true
  gpu_port:
    description: Port of NVIDIA's dcgm-exporter.
    type: int
    required: true
"""

EXAMPLES = r"""
- name: List what there is to scrape
  dgxspark.serving.serving_targets:
    facts: "{{ groups['sparks'] | map('extract', hostvars, ['look', 'node']) | select('defined') }}"
    vllm_port: 30000
    ray_port: 6385
    node_port: 9100
    gpu_port: 9400
  run_once: true
"""

RETURN = r"""
targets:
  description: Each with C(job), C(node), C(role) and C(target) (C(host:port)).
  returned: always
  type: list
  elements: dict
silent:
  description: Targets for which nothing listens now.
  returned: always
  type: list
  elements: str
"""
