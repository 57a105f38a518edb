#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_ask
short_description: Ask the served model one question and show the answer as it comes
version_added: 0.1.0
description:
  - Runs C(curl) on the head, so that it works from wherever Ansible reaches the head, and prints the answer several times a second.
  - The prompt travels in a file that only the login user may read, never in a command line.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
attributes:
  check_mode:
    support: full
    details:
      - Says that it would ask.
  diff_mode:
    support: none
    details:
      - Nothing is changed.
  idempotent:
    support: none
    details:
      - Every run asks again, and reports no change.
options:
  prompt:
    description: The question.
    type: str
    required: true
  model:
    description: Served name of the model.
    type: str
    required: true
  url:
    description: Where the server listens, seen from the node.
    type: str
    default: http://127.0.0.1:30000
  max_tokens:
    description: Length of the answer in tokens, at most.
    type: int
    default: 512
  timeout:
    description: Seconds for the whole answer.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: Ask
  dgxspark.serving.serving_ask:
    prompt: Why is the sky blue?
    model: Qwen/Qwen3.5-122B-A10B-FP8
"""

RETURN = r"""
answer:
  description: The answer.
  returned: success
  type: str
reasoning:
  description: What a reasoning model thought before it.
  returned: success
  type: str
tokens:
  description: Tokens of answer and reasoning.
  returned: success
  type: int
elapsed:
  description: Seconds from the question to the end of the answer.
  returned: success
  type: float
problem:
  description: What is wrong, as C(id), C(node), C(stage), C(found), C(expected) and C(remedy).
  returned: failure
  type: dict
"""
