#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_plan
short_description: Compute what every node of the gang has to run, or say why it must not be tried
version_added: 0.1.0
description:
  - A pure function of the inputs and the facts of all nodes, which the role C(preflight) has registered as C(preflight_inputs),
    C(preflight_node) and C(preflight_fabric) on every host of the groups C(ray_head) and C(ray_workers).
  - Runs on the controller; no node is contacted.
  - Applies the rules of the host gate (C(docs/host-gate.md), C(spark_gate)) to all nodes. Everything that is found on any of them is one
    message of one node (that of its first line, the head where it concerns all), errors first. Without an error what remains are warnings of the head.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details: With O(show), the definition of the container against the one that is there.
  idempotent:
    support: full
options:
  image_fingerprint:
    description: Fingerprint of the image that will run; empty takes that of the head.
    type: str
    default: ""
  revision:
    description: Commit of the snapshot that will be served; empty takes the one on the head.
    type: str
    default: ""
  check:
    description: Apply the rules. Off for a second look at facts that were checked before.
    type: bool
    default: true
  launch:
    description: Apply also the rules that are asked only before a launch, although everything runs as planned, because it is going to be stopped and
      launched again. What runs of ours counts neither as a holder nor as used memory.
    type: bool
    default: false
  warn:
    description: Tell also what the detection of the fabric found worth knowing, as warnings of the head.
    type: bool
    default: false
  show:
    description:
      - For check mode, in place of the task that creates it, the name of the container of this node whose definition is shown. Reports V(changed=true) when
        it is not in place.
    type: str
    default: ""
  outline:
    description: For check mode, list what the stages so far would have done.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Compute the plan
  dgxspark.serving.serving_plan:
  register: preflight_planned
"""

RETURN = r"""
plan:
  description:
    - Containers of every node (C(nodes.<name>.containers)), which of them run as planned already (C(in_place)), and what is in
      sync over the gang.
  returned: success
  type: dict
actions:
  description: With O(show), what would be done.
  returned: with O(show)
  type: list
  elements: str
outline:
  description: What a run would do, one sentence for each step, with the name of the node.
  returned: with O(outline)
  type: list
  elements: str
findings:
  description: All findings of all nodes, each with C(rule), C(severity) and what RV(problem) has.
  returned: when a rule of the host gate refuses
  type: list
  elements: dict
problem:
  description: The first thing that is wrong, as C(id), C(node), C(stage), C(found), C(expected) and C(remedy).
  returned: failure
  type: dict
"""
