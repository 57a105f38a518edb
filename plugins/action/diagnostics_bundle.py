# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Writes the bundle on the controller; C(_bundle) decides what is in it."""

from __future__ import annotations

import json
import os
import platform
import time
import typing as t

import yaml
from ansible import __version__ as ansible_version
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

from ansible_collections.dgxspark.serving.plugins.action.failure_diagnosis import kept
from ansible_collections.dgxspark.serving.plugins.module_utils import _bundle

SPEC: dict[str, dict[str, t.Any]] = {
    "directory": {"type": "str", "required": True},
    "keep": {"type": "int", "default": 10},
    "nodes": {"type": "list", "elements": "str", "required": True},
    "message": {"type": "str", "default": ""},
    "documents": {"type": "dict", "default": {}},
}


TOP = os.path.join(os.path.dirname(__file__), "..", "..")


def about(now: float) -> dict[str, str]:
    """Which code has failed, and when."""
    version = "unknown"
    for name, read in (("MANIFEST.json", json.load), ("galaxy.yml", yaml.safe_load)):
        try:
            with open(os.path.join(TOP, name), encoding="utf-8") as stream:
                found = read(stream)
                version = str(found.get("collection_info", found)["version"])
                break
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
            continue
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {"written_at": at, "dgxspark.serving": version, "ansible-core": ansible_version, "python": platform.python_version()}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        result.update(changed=False, path="", files=[], missing=[], removed=[], error="")
        try:
            dummy, arguments = self.validate_argument_spec(argument_spec=SPEC)
            directory = str(arguments["directory"])
            parts = {node: kept(node) for node in arguments["nodes"]}
            result["missing"] = [node for node, files in parts.items() if files is None]
            if not directory or self._task.check_mode:
                return result
            now = time.time()
            files = _bundle.contents(parts, {"about": about(now), **arguments["documents"]}, arguments["message"])
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
            result.update(path=_bundle.publish(directory, stamp, files, now), files=sorted(files), changed=True)
            result["removed"] = _bundle.prune(directory, int(arguments["keep"]))
        except (AnsibleError, OSError, ValueError, TypeError) as exc:
            result["error"] = " ".join(str(exc).split())
        return result
