# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of the systemd unit that brings the gang back after a boot, and whether they are in place.

PRIVATE to the collection. The program of the unit is this collection's own code (C(SOURCES)), copied to the node; see _boot.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _service

PACKAGE = "ansible_collections/dgxspark/serving/plugins/module_utils"
SOURCES = ("_boot", "_boot_files", "_calls", "_containers", "_diagnosis", "_problem", "_ray", "_service", "_wait")

DEFINITION = "dgxspark.serving.definition"


class Paths:
    """Where the unit of one service is; each has files of its own, so that one can be removed beside another."""

    def __init__(self, service: str = "") -> None:
        ending = _service.ending(service)
        self.unit_name = f"dgxspark-serving{ending}.service"
        self.unit = f"/etc/systemd/system/{self.unit_name}"
        self.wants = f"/etc/systemd/system/multi-user.target.wants/{self.unit_name}"
        self.program = f"/usr/local/lib/dgxspark-serving{ending}"
        self.gang = f"{_service.STATE}/boot{ending}.json"


UNIT_NAME = Paths().unit_name
UNIT_PATH = Paths().unit
WANTS_PATH = Paths().wants
PROGRAM_DIR = Paths().program
GANG_PATH = Paths().gang


def unit_text(paths: Paths) -> str:
    """The unit file."""
    return f"""\
# Written by dgxspark.serving (spark_boot). What it starts is in {paths.gang}.
[Unit]
Description=dgxspark.serving: this node's part of the served model
Wants=network-online.target
After=network-online.target docker.service
ConditionPathExists={paths.gang}

[Service]
Type=notify
NotifyAccess=main
Environment=PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
ExecStart=/usr/bin/python3 {paths.program}/boot.py {paths.gang}
# The containers are Docker's: ending this unit leaves them as they are.
KillMode=process
Restart=no

[Install]
WantedBy=multi-user.target
"""


UNIT = unit_text(Paths())


def launcher(paths: Paths) -> str:
    """The file that the unit runs."""
    return f"""\
# Written by dgxspark.serving: what {paths.unit_name} runs.
import sys

from ansible_collections.dgxspark.serving.plugins.module_utils import _boot

sys.exit(_boot.main(sys.argv[1]))
"""


def sources() -> dict[str, str]:
    """{module name: source text} of what the unit runs, from wherever this module itself was loaded (files, or Ansible's archive)."""
    found = {}
    for name in SOURCES:
        module = importlib.import_module(f"{PACKAGE.replace('/', '.')}.{name}")
        loader: t.Any = module.__spec__.loader if module.__spec__ else None
        text = loader.get_source(module.__name__)
        found[name] = text.decode() if isinstance(text, bytes) else str(text)  # Ansible's own loader gives bytes
    return found


def digest(content: t.Mapping[str, str]) -> str:
    """One digest over paths and contents."""
    total = hashlib.sha256()
    for path in sorted(content):
        total.update(path.encode() + b"\0" + content[path].encode() + b"\0")
    return total.hexdigest()


def program(texts: t.Mapping[str, str], service: str = "") -> dict[str, str]:
    """{path: content} of the unit and its program; the same on every node."""
    paths = Paths(service)
    result = {paths.unit: unit_text(paths), f"{paths.program}/boot.py": launcher(paths)}
    for name, text in texts.items():
        result[f"{paths.program}/{PACKAGE}/{name}.py"] = text
    return result


def gang_text(gang: t.Mapping[str, t.Any]) -> str:
    """Content of ``GANG_PATH``."""
    return json.dumps(gang, indent=2, sort_keys=True) + "\n"


def gang_of(settings: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], name: str) -> dict[str, t.Any]:
    """What the unit of one node has to know: plain data, no secret."""
    node = plan["nodes"][name]
    return {
        "node": name,
        "head": node["head"],
        "address": node["address"],
        "head_address": plan["head_address"],
        "addresses": list(plan["addresses"]),
        "gpus_per_node": settings["gpus_per_node"],
        "executor": settings["executor"],
        "ray_port": settings["ray_port"],
        "mp_port": settings["mp_port"],
        "url": settings["api_local_url"],
        "served_model": settings["served_model_name"],
        **({"service": settings["service"]} if settings["service"] else {}),
        "containers": {
            _service.own(role, settings["service"]): container["labels"][DEFINITION] for role, container in node["containers"].items()
        },
        "wait": settings["boot_wait"],
        "ready_timeout": settings["ready_timeout"],
    }


def boot_plan(
    settings: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], name: str, node: t.Mapping[str, t.Any], texts: t.Mapping[str, str]
) -> dict[str, t.Any]:
    """{wanted, gang, in_place, present} for one node; ``node`` = the facts of node_info."""
    found = node.get("boot") or {}
    gang = gang_of(settings, plan, name)
    return {
        "wanted": bool(settings["boot"]),
        "gang": gang,
        "in_place": (
            found.get("files") == digest({**program(texts, settings["service"]), Paths(settings["service"]).gang: gang_text(gang)})
            and bool(found.get("enabled"))
            and found.get("state") == "active"
        ),
        "present": bool(found.get("enabled")) or found.get("state") in ("active", "activating", "failed"),
    }


def state_of(read: t.Callable[[str], str], islink: t.Callable[[str], bool], unit_state: str, service: str = "") -> dict[str, t.Any]:
    """{files, enabled, state}: the digest of the files as they are on this node (a missing file counts as empty), and the unit."""

    def content(path: str) -> str:
        try:
            return read(path)
        except OSError:
            return ""

    return {
        "files": digest({path: content(path) for path in (*program(dict.fromkeys(SOURCES, ""), service), Paths(service).gang)}),
        "enabled": islink(Paths(service).wants),
        "state": unit_state,
    }
