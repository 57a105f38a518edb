#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_settings
short_description: Read and check the C(spark_*) inventory variables
version_added: 0.1.0
description:
  - Collects every variable whose name begins with C(spark_), checks it against the specification of the role C(preflight)
    (types, choices, defaults) and for values that cannot be meant. An unknown name is refused with the nearest known one.
  - A recipe (the variable C(recipe), usually from the command line, else C(spark_recipe)) fills in what is not set; docs/recipes.md has
    the order.
  - Runs on the controller; the node is not contacted.
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
  also:
    description:
      - Further inputs that only this playbook reads, by their whole name (C(spark_output)), each with C(type), C(default) and the like
        as in an
        argument specification. They are checked in the same way and returned in RV(settings).
    type: dict
    default: {}
  find_fabric:
    description:
      - Do not read the variables again, but complete C(preflight_inputs) with a fabric that they do not name. It is found by comparing C(preflight_ports) of
        all nodes (RV(dgxspark.serving.nccl_interface_info#module:ports)), as the one subnet that all nodes share on fast ports, or the ring of three
        nodes. Where only the addresses are not named, they are those that the nodes have in the subnet.
      - None or several fail with what each node has, and with the netplan file to write.
    type: bool
    default: false
  any_nodes:
    description: Accept a recipe for another number of nodes than the inventory has, for a playbook that only plans.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Check the inputs
  dgxspark.serving.serving_settings:
  register: preflight_inputs

- name: Check them with an input of this playbook
  dgxspark.serving.serving_settings:
    also:
      spark_lines:
        type: int
        default: 100
  register: logs_inputs
"""

RETURN = r"""
settings:
  description: Every input with its default applied, names without the prefix C(spark_).
  returned: success
  type: dict
  sample:
    api_port: 30000
    model: Qwen/Qwen3.5-122B-A10B-FP8
topology:
  description: With O(find_fabric), V(single), V(pair), V(switch) or V(ring).
  returned: with O(find_fabric)
  type: str
gang:
  description: All nodes of the groups C(ray_head) and C(ray_workers) with their fabric addresses, the head first.
  returned: success
  type: list
  elements: dict
  sample:
    - node: spark-1
      address: 192.168.200.12
peers:
  description: Fabric addresses of the other nodes.
  returned: success
  type: list
  elements: str
recipe:
  description:
    - What came from the recipe, empty without one. C(name), C(path), C(format) (V(own), V(sparkrun) or V(eugr)), C(source),
      C(weights_gib), the inputs
      without prefix that it C(filled), that were C(overridden) by the inventory or the command line, that were C(set_aside) because they
      belong to
      another model, and what was C(not_honoured).
  returned: success
  type: dict
began:
  description: When the inputs were checked, in seconds since 1970 by the controller's clock.
  returned: always
  type: float
problem:
  description: What is wrong, as C(id), C(node), C(stage), C(found), C(expected) and C(remedy).
  returned: failure
  type: dict
"""
