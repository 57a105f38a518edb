# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The version of our own service that ran before: which containers are it, and how it answered.

PRIVATE to the collection. Pure functions over ``summary`` of _containers and plain data.
"""

from __future__ import annotations

import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._service import argument, local_url

SUFFIX = "-previous"  # of the name of a container that was set aside
NEXT = "-next"  # of the name of one that is made before its predecessor is stopped, and has not been started
LABEL = "dgxspark.serving"


def api_url(args: t.Sequence[str]) -> str:
    """Where a server with this command line answers on its own node."""
    return local_url(argument(args, "--host", "0.0.0.0"), argument(args, "--port", "8000"))


def kept(container: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What has to be known of a container of ours to start it again and to see that it answers as it did."""
    args = container.get("args") or []
    entry: dict[str, t.Any] = {"id": container["id"], "started_at": container["started_at"], "image": container["image"]}
    if args[:1] == ["serve"]:
        entry["headless"] = "--headless" in args
        entry["served_model_name"] = (container.get("labels") or {}).get(f"{LABEL}.served_model_name", "")
        entry["url"] = api_url(args)
    else:
        entry["address"] = argument(args, "--node-ip-address")
        entry["port"] = int(argument(args, "--port", "0") or 0)
        entry["gpus"] = int(argument(args, "--num-gpus", "1") or 1)
    return entry


def tmp_volumes(container: t.Mapping[str, t.Any]) -> list[str]:
    """The volumes that belong to this container's cluster alone: what is mounted at /tmp."""
    return [str(mount["name"]) for mount in container.get("mounts") or [] if mount["type"] == "volume" and mount["target"] == "/tmp"]
