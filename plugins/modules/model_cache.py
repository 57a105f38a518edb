#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_cache
short_description: List the models in the Hugging Face cache of a node, and remove some
version_added: 0.1.0
author:
  - dgxspark.serving contributors (!UNKNOWN)
description:
  - Lists every model and revision with its size, and whether it is complete and verified. Nothing is hashed, no hub is asked.
  - Removes what O(prune) names. A revision that O(served) names is never removed. Content that another revision of the model uses stays.
  - With O(rows), which only the action on the controller reads, prints the table of all nodes; the node is not contacted then.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: Says what would be removed and how much that frees.
  diff_mode:
    support: full
    details: The revisions in the cache before and after.
  idempotent:
    support: full
options:
  cache_dir:
    description: C(HF_HOME) on the node; V(~) is the home of the login user, also with become.
    type: str
    default: ~/.cache/huggingface
  prune:
    description:
      - What is removed. C(organisation/name) with all its revisions, C(organisation/name@commit) (seven digits of the commit are
        enough), or V(unused)
        for everything that is neither in O(served) nor in O(keep).
      - What is not in the cache is no error.
    type: list
    elements: str
    default: []
  served:
    description: What runs now, as C(organisation/name@commit); refused when O(prune) names it.
    type: list
    elements: str
    default: []
  keep:
    description: What V(unused) leaves alone, as C(organisation/name@commit) or C(organisation/name@branch).
    type: list
    elements: str
    default: []
  nodes:
    description: Facts of M(dgxspark.serving.node_info) of all nodes. What their containers serve counts as O(served). The node itself
      does not get them.
    type: list
    elements: dict
    default: []
  rows:
    description: Results of this module from all nodes, each with its C(node), to be shown as one table.
    type: list
    elements: dict
  output:
    description: What is printed with O(rows).
    type: str
    choices: [table, json, none]
    default: table
"""

EXAMPLES = r"""
- name: What is there?
  dgxspark.serving.model_cache:
  register: cache

- name: Remove an old revision
  dgxspark.serving.model_cache:
    prune:
      - Qwen/Qwen3.5-122B-A10B-FP8@fb53b9f3bdaa
  become: true
"""

RETURN = r"""
node:
  description: O(node).
  returned: without O(rows)
  type: str
cache_dir:
  description: The resolved cache directory.
  returned: without O(rows)
  type: str
models:
  description:
    - Every model, also one of which only parts of a copy are left, with C(repo_id), C(bytes) on the disk, C(partial) (bytes of
      unfinished downloads and copies) and C(revisions)
      (C(revision), C(refs),
      C(complete), C(verified), C(bytes), C(reason)). After the removal, in check mode before it.
  returned: without O(rows)
  type: list
  elements: dict
removed:
  description: What was removed, in check mode what would be.
  returned: without O(rows)
  type: list
  elements: str
absent:
  description: What O(prune) names and the cache does not have.
  returned: without O(rows)
  type: list
  elements: str
freed:
  description: Bytes that it frees.
  returned: without O(rows)
  type: int
actions:
  description: What was or would be done.
  returned: without O(rows)
  type: list
  elements: str
problem:
  description: The failure as data (C(id), C(node), C(stage), C(found), C(expected), C(remedy)).
  returned: failure
  type: dict
"""

import contextlib
import hashlib
import os
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _models, _snapshot, _transfer
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

RUN_DIR = "/run/dgxspark-serving"
STAMP_DIR: str | None = None  # that of _snapshot
WAIT = 5  # seconds for another run that downloads or copies this model


def argument_spec() -> dict[str, t.Any]:
    """The options."""
    words = {"type": "list", "elements": "str", "default": []}
    return {
        "node": {"type": "str", "default": ""},
        "cache_dir": {"type": "str", "default": "~/.cache/huggingface"},
        "prune": dict(words),
        "served": dict(words),
        "keep": dict(words),
        "nodes": {"type": "list", "elements": "dict", "default": []},
        "rows": {"type": "list", "elements": "dict"},
        "output": {"type": "str", "choices": ["table", "json", "none"], "default": "table"},
    }


@contextlib.contextmanager
def nobody_else(folder: str, node: str, repo: str) -> t.Iterator[None]:
    """Hold the locks under which hf_snapshot and model_sync write this model."""
    key = hashlib.sha256(folder.encode()).hexdigest()[:12]
    with contextlib.ExitStack() as stack:
        for kind in ("hf", "model"):
            path = os.path.join(RUN_DIR, f"{kind}-{key}.lock")
            stack.enter_context(_transfer.exclusive(path, WAIT, node=node, stage=_models.STAGE, what=repo))
        yield


def run(params: dict[str, t.Any], result: dict[str, t.Any], check_mode: bool) -> None:
    """The whole module; fills ``result``."""
    cache = _snapshot.resolve_cache_dir(params["cache_dir"])
    before = _models.scan(cache, STAMP_DIR)
    result.update(cache_dir=cache, models=before, absent=_models.absent(before, params["prune"]))
    for repo, commits in _models.targets(before, params["prune"], params["served"], params["keep"]):
        paths = _models.doomed(cache, repo, commits, STAMP_DIR)
        names = [f"{repo}@{commit}" for commit in commits] or [repo]
        freed = _models.size_of(paths)
        verb = "would remove" if check_mode else "removed"
        result["changed"] = True
        result["removed"] += names
        result["freed"] += freed
        result["actions"] += [f"{verb} {name}" for name in names]
        if not check_mode:
            with nobody_else(_snapshot.repo_dir(cache, repo), params["node"], repo):
                _models.remove(paths)
    after = before if check_mode or not result["changed"] else _models.scan(cache, STAMP_DIR)
    result["models"] = after
    if result["changed"]:
        left = _models.names_of(after)
        gone = set(result["removed"])
        if check_mode:
            left = [name for name in left if name not in gone and name.partition("@")[0] not in gone]
        result["diff"] = {
            **dict.fromkeys(("before_header", "after_header"), f"{params['node']}: {cache}"),
            "before": "".join(f"{name}\n" for name in _models.names_of(before)),
            "after": "".join(f"{name}\n" for name in left),
        }


def main() -> None:
    """Thin: options in, result out."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    result: dict[str, t.Any] = {
        "changed": False,
        "node": module.params["node"],
        "cache_dir": "",
        "models": [],
        "removed": [],
        "freed": 0,
        "actions": [],
    }
    try:
        run(module.params, result, module.check_mode)
    except Problem as exc:
        exc.node = exc.node or module.params["node"]
        module.fail_json(msg=exc.msg, problem=exc.as_dict(), **result)
    except OSError as exc:
        problem = Problem(
            "cache-access",
            node=module.params["node"],
            stage=_models.STAGE,
            found=f"{exc.filename or result['cache_dir']}: {exc.strerror}",
            expected="a cache this module may read and write",
            remedy="run the task with become, and check this path",
        )
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
