# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs the module, and keeps what it brings for the bundle out of the result: in the controller's own temporary directory of this run."""

from __future__ import annotations

import json
import os
import tempfile
import typing as t

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

from ansible_collections.dgxspark.serving.plugins.plugin_utils._connection import one_try


def folder() -> str:
    """Where the nodes' parts of this run wait for M(dgxspark.serving.diagnostics_bundle). Ansible removes it with the run."""
    return os.path.join(str(C.DEFAULT_LOCAL_TMP), "diagnostics")


def keep(node: str, files: t.Mapping[str, str]) -> None:
    """The part of one node, whole or not at all, for the user alone."""
    os.makedirs(folder(), mode=0o700, exist_ok=True)
    handle, path = tempfile.mkstemp(prefix=".", dir=folder())
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as stream:
        json.dump(dict(files), stream)
    os.replace(path, os.path.join(folder(), node.replace(os.sep, "_")))


def kept(node: str) -> dict[str, str] | None:
    """The part of one node; None when there is none."""
    try:
        with open(os.path.join(folder(), node.replace(os.sep, "_")), encoding="utf-8") as stream:
            return dict(json.load(stream))
    except (OSError, ValueError):
        return None


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        # A node that is gone must not keep the others from coming back: one try, no rounds of ssh's patience.
        one_try(self._connection)
        try:
            result = self._execute_module(task_vars=task_vars)
        except AnsibleConnectionFailure as exc:
            # An unreachable host would end the rescue on all hosts (any_errors_fatal): whoever reads this sees that ``touched`` is missing.
            return {"changed": False, "error": f"no SSH connection: {' '.join(str(exc.message).split())[:300]}"}
        files = result.pop("evidence", None)
        if isinstance(files, dict):
            result["evidence"] = sorted(files)
            try:
                keep(str((task_vars or {}).get("inventory_hostname", "")), files)
            except OSError as exc:
                result["warnings"] = [*result.get("warnings", []), f"the evidence for the diagnostics bundle could not be kept: {exc}"]
        return result
