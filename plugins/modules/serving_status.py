#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_status
short_description: Show in one table what serves on the gang
version_added: 0.1.0
description:
  - Runs twice. Without O(rows) it looks at the node of the task (M(dgxspark.serving.node_info), M(dgxspark.serving.nccl_interface_info)
    and on the head M(dgxspark.serving.serving_info)) and returns RV(row). With O(rows) it puts the rows of all nodes together, prints
    the table or the JSON document, and returns RV(status).
  - Never fails for what it finds. A node that does not answer is a row that says so; a dead one is given up after 4 seconds, a slow one
    after O(limit).
  - Opens connections of its own with a short time-out, so that one that is left over from before a node went down is not waited for.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
attributes:
  check_mode:
    support: full
    details:
      - It only reads. O(file) is written on the controller also in check mode.
  diff_mode:
    support: none
    details:
      - Nothing is changed.
  idempotent:
    support: full
    details:
      - It never reports a change.
options:
  settings:
    description: RV(dgxspark.serving.serving_settings#module:settings), the checked inputs of the node.
    type: dict
    required: true
  rows:
    description: RV(row) of every node, in any order.
    type: list
    elements: dict
  output:
    description: What is printed.
    type: str
    choices: [table, json, none]
    default: table
  file:
    description: Path on the controller of a file to which the JSON document is written as well. Empty writes none.
    type: str
    default: ""
  server:
    description: Ask the server and Ray of the head too. Without, only the node itself is looked at.
    type: bool
    default: true
  limit:
    description: Seconds for everything that is asked of one node.
    type: float
    default: 12
"""

EXAMPLES = r"""
- name: Check the inputs
  dgxspark.serving.serving_settings:
  register: inputs

- name: Look at the node
  dgxspark.serving.serving_status:
    settings: "{{ inputs.settings }}"
  register: look

- name: Show the gang
  dgxspark.serving.serving_status:
    settings: "{{ inputs.settings }}"
    rows: "{{ groups['sparks'] | map('extract', hostvars, ['look', 'row']) }}"
  run_once: true
"""

RETURN = r"""
row:
  description: What is known of this node.
  returned: without O(rows)
  type: dict
status:
  description:
    - The document, with C(state) (V(serving), V(loading), V(degraded), V(not_answering), V(failed), V(ray_only), V(old_service), V(stopped) or
      V(unknown)), C(text), C(model), C(revision), C(endpoint), C(since), C(ray) (C(alive), C(planned)), C(load) (C(running), C(waiting),
      C(tokens_per_second)), C(nodes), C(problems) and C(notes). C(boot) of a node has C(state) (V(on), V(off), V(starting), V(failed), V(idle)) and C(text)
      of the unit for the boot.
  returned: with O(rows)
  type: dict
"""
