# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several services on the same nodes: what each has of its own, and what one may not take from another.

PRIVATE to the collection. Pure functions over plain data, also part of the program of the boot unit. A service is known by a short name; the
name of the one service that most people have is "", and adds nothing anywhere.
"""

from __future__ import annotations

import re
import typing as t

RAY, VLLM = "spark-ray", "spark-vllm"
ROLES = (VLLM, RAY)  # the roles that a container can have, by which plans and records know it, whatever its service
LABEL = "dgxspark.serving"
STATE = "/var/lib/dgxspark-serving"
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,18}[a-z0-9])?")
STEP = 100  # an offset is a multiple of it, so that the ports of two services never meet
MOST = 1100  # the ports of Ray's workers stay below those that the system gives away
SHARE = 0.90  # of a node's memory for all services together


def ending(service: str) -> str:
    """What the names of a service end with."""
    return f"-{service}" if service else ""


def own(role: str, service: str = "") -> str:
    """The name of the container of this role."""
    return role + ending(service)


def record(service: str = "") -> str:
    """The file in which the service writes down what it stopped."""
    return f"{STATE}/stopped{ending(service)}.json"


def is_name(text: str) -> bool:
    """Whether a service can be called so: no container of it is then taken for one of another service that is set aside, or made for an upgrade."""
    return not text or (bool(NAME.fullmatch(text)) and "previous" not in text and text.split("-")[-1] != "next")


def is_ours(container: t.Mapping[str, t.Any], label: str = LABEL) -> bool:
    """Whether this collection made the container (any value of the label but empty, "0" or "false")."""
    return str((container.get("labels") or {}).get(label, "")).lower() not in ("", "0", "false")


def of(container: t.Mapping[str, t.Any]) -> str:
    """The service that a container of ours belongs to."""
    return str((container.get("labels") or {}).get(f"{LABEL}.service", ""))


def role_of(container: t.Mapping[str, t.Any]) -> str:
    """Its role; "" for a container of another name (one that was set aside has none)."""
    name = str(container.get("name", "")).lstrip("/")
    return next((role for role in ROLES if name == own(role, of(container))), "")


def title(service: str) -> str:
    """How a person reads it."""
    return f"service {service}" if service else "the service without a name"


# --- what a service holds


def argument(args: t.Sequence[str], name: str, default: str = "") -> str:
    """The value of ``--name value`` or ``--name=value`` in the command line of a container of ours."""
    for number, word in enumerate(args):
        if word == name and number + 1 < len(args):
            return str(args[number + 1])
        if str(word).startswith(f"{name}="):
            return str(word).split("=", 1)[1]
    return default


def place(host: str, port: int | str) -> str:
    """``host:port`` as a URL has it, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def local_url(host: str, port: int | str) -> str:
    """Where a server that binds this address answers on its own node."""
    return f"http://{place('127.0.0.1' if host in ('0.0.0.0', '::', 'localhost', '') else host, port)}"


def base_models(listed: t.Any) -> list[dict[str, t.Any]]:
    """The models of an answer of /v1/models without their LoRA adapters, of which each names its model as ``parent``."""
    data = listed.get("data") if isinstance(listed, dict) else None
    return [model for model in data if isinstance(model, dict) and not model.get("parent")] if isinstance(data, list) else []


def ports(role: str, arguments: t.Sequence[str]) -> list[tuple[int, int]]:
    """The ports that a container with this command line uses on its node, as (first, last)."""
    found: list[tuple[int, int]] = []
    if role == RAY:
        for word in arguments:
            port = re.fullmatch(r"--(?:port|[a-z-]*-port)=(\d+)", str(word))
            if port and not str(word).startswith(("--min-", "--max-")):
                found.append((int(port[1]), int(port[1])))
        first, last = argument(arguments, "--min-worker-port"), argument(arguments, "--max-worker-port")
        if first.isdigit() and last.isdigit():
            found.append((int(first), int(last)))
        return found
    flags = [] if "--headless" in arguments else ["--port"]
    if argument(arguments, "--node-rank"):  # on the head vLLM's, on the others that of the unit for the boot
        flags.append("--master-port")
    if argument(arguments, "--node-rank") == "0":
        flags.append("--data-parallel-rpc-port")
    for flag in flags:
        number = argument(arguments, flag)
        if number.isdigit():
            found.append((int(number), int(number)))
    return found


def api_port(container: t.Mapping[str, t.Any]) -> int | None:
    """The port at which this container's server answers; None when it has none."""
    arguments = container.get("arguments") or []
    number = argument(arguments, "--port") if role_of(container) == VLLM and "--headless" not in arguments else ""
    return int(number) if number.isdigit() else None


def beside(members: t.Sequence[t.Mapping[str, t.Any]], service: str) -> dict[str, dict[str, t.Any]]:
    """The other services on these nodes by name: {nodes: {node: [(first, last) of a port]}, share (None: not known), model, port, running}.

    Also one that does not run at the moment: its containers come back, after a boot at the latest. What was set aside does not count.
    """
    found: dict[str, dict[str, t.Any]] = {}
    for member in members:
        for container in member["node"].get("containers") or []:
            name, role = of(container), role_of(container)
            if not is_ours(container) or name == service or not role:
                continue
            other = found.setdefault(name, {"nodes": {}, "share": None, "model": "", "port": None, "running": True})
            arguments = container.get("arguments") or []
            other["nodes"].setdefault(member["name"], []).extend(ports(role, arguments))
            other["running"] = other["running"] and bool(container.get("running"))
            if role == VLLM:
                share = argument(arguments, "--gpu-memory-utilization")
                other["share"] = float(share) if re.fullmatch(r"\d*\.?\d+", share) else other["share"]
                other["model"] = (container.get("labels") or {}).get(f"{LABEL}.served_model_name", "") or other["model"]
                other["port"] = other["port"] or api_port(container)
    return found


def meet(mine: t.Iterable[tuple[int, int]], theirs: t.Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of ``mine`` lies in ``theirs``."""
    other = list(theirs)
    return sorted({one for one in mine if any(one[0] <= last and first <= one[1] for first, last in other)})


def spans(found: t.Iterable[tuple[int, int]]) -> str:
    """``30000, 6379, 20002 to 20999``."""
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in found)
