#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_logs
short_description: Show the logs of the containers of a node, each line with the name of the node
version_added: 0.1.0
description:
  - Prints the last lines of the containers in the order of time, and with O(follow=true) what comes after them, for a bounded time.
  - A node that does not answer, and a container that is not there, are said and are no failure.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
attributes:
  check_mode:
    support: full
    details:
      - It only reads.
  diff_mode:
    support: none
    details:
      - Nothing is changed.
  idempotent:
    support: full
    details:
      - It never reports a change.
options:
  containers:
    description: Names of the containers.
    type: list
    elements: str
    default: [spark-vllm, spark-ray]
  lines:
    description: How many of the last lines of each container.
    type: int
    default: 100
  follow:
    description: Go on with new lines as they come.
    type: bool
    default: false
  seconds:
    description: For how long, with O(follow=true).
    type: float
    default: 60
"""

EXAMPLES = r"""
- name: Show what both nodes say for five minutes
  dgxspark.serving.serving_logs:
    lines: 20
    follow: true
    seconds: 300
  become: true
"""

RETURN = r"""
lines:
  description: How many lines were printed.
  returned: always
  type: int
"""
