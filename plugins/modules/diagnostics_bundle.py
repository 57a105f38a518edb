#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: diagnostics_bundle
short_description: Put what is known of a failure into one file on the controller
version_added: 0.1.0
description:
  - Writes one C(tar.gz) with what M(dgxspark.serving.failure_diagnosis) brought from each node (O(dgxspark.serving.failure_diagnosis#module:evidence)), the
    message that the play ends with, and the given documents. A node that brought nothing is named in it.
  - Tokens, passwords and keys are removed from all of it, also from the logs. Hostnames, addresses, paths and the prompts that a log shows stay.
  - The file has the mode 0600, in a directory of mode 0700 when that has to be made. It appears under its name when it is whole, and only the newest
    O(keep) stay.
  - Made for the way back after a failure, so it never fails itself; RV(error) says why there is no bundle.
  - Runs on the controller, once for all nodes.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
attributes:
  check_mode:
    support: full
    details:
      - Nothing is written.
  diff_mode:
    support: none
    details:
      - Its parts are logs.
  idempotent:
    support: none
    details:
      - Each call writes another bundle.
options:
  directory:
    description: Directory on the controller; C(~) is the home of the user who runs Ansible. Empty writes nothing.
    type: str
    required: true
  keep:
    description: How many bundles stay in the directory, this one included; 1 or more.
    type: int
    default: 10
  nodes:
    description: Inventory names of all nodes that should have brought something.
    type: list
    elements: str
    required: true
  message:
    description: What the play ends with.
    type: str
    default: ""
  documents:
    description: What else goes into it, as C(<name>.json) for each key.
    type: dict
    default: {}
"""

EXAMPLES = r"""
- name: Keep what is needed to understand the failure
  dgxspark.serving.diagnostics_bundle:
    directory: ~/.cache/dgxspark-serving/diagnostics
    nodes: "{{ groups['sparks'] }}"
    message: "{{ ansible_failed_result.msg }}"
    documents:
      settings: "{{ preflight_inputs.settings }}"
  run_once: true
"""

RETURN = r"""
path:
  description: The file that was written; empty when none was.
  returned: always
  type: str
files:
  description: What is in it.
  returned: always
  type: list
  elements: str
missing:
  description: Nodes that brought nothing, because they did not answer.
  returned: always
  type: list
  elements: str
removed:
  description: Names of the old bundles that were removed.
  returned: always
  type: list
  elements: str
error:
  description: Why nothing was written; empty when it was, or was not asked for.
  returned: always
  type: str
"""
