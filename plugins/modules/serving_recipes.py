#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_recipes
short_description: List the recipes and what of them fits on the nodes of the inventory
version_added: 0.1.0
description:
  - Reads the recipes that the collection brings and compares each with the number of nodes in the groups C(ray_head) and C(ray_workers),
    and with
    their memory where it is known (from facts), else with that of a DGX Spark.
  - With O(recipe) shows what one recipe, also a foreign one, becomes here, and which of its fields cannot be honoured.
  - Runs on the controller; no node is contacted.
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
  recipe:
    description: Name of a recipe of the collection, or path of a recipe file on the controller. Empty lists all of the collection.
    type: str
    default: ""
  output:
    description: What is printed.
    type: str
    choices: [table, json, none]
    default: table
"""

EXAMPLES = r"""
- name: What fits here?
  dgxspark.serving.serving_recipes:

- name: What does this recipe become?
  dgxspark.serving.serving_recipes:
    recipe: recipes/minimax-m2.7-nvfp4.yaml
"""

RETURN = r"""
recipes:
  description: One entry for each recipe, with C(name), C(model), C(image), C(nodes), C(per_node_gib) (weights), C(fits) and C(verdict)
    (why not).
  returned: without O(recipe)
  type: list
  elements: dict
recipe:
  description: The recipe as the collection understands it. C(settings) are inputs without prefix, C(errors) fields that would change
    what is served,
    C(warnings) what is left out.
  returned: with O(recipe)
  type: dict
problem:
  description: What is wrong, as C(id), C(node), C(stage), C(found), C(expected) and C(remedy).
  returned: failure
  type: dict
"""
