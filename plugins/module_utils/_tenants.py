# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds a port or the GPU of a node, and what may be done about it.

PRIVATE to the collection. Pure: works on the plain data that M(dgxspark.serving.node_info) returns.
"""

from __future__ import annotations

import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _service
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

OWN_LABEL = "dgxspark.serving"
OWN_UNIT_PREFIX = "dgxspark-serving"

# A GPU process below this is a desktop or a monitor, not a model (a GB10 shows Xorg with 18 MiB, gnome-shell with 6 MiB).
GPU_TENANT_MIB = 512
DESKTOP_PROCESSES = ("Xorg", "Xwayland", "gnome-shell", "gdm", "kwin", "plasmashell", "mutter", "nvidia-persistenced")

BESIDE = "beside"  # held by another service of ours: nothing to stop and nothing to refuse, see _service

ACTIVE_UNIT_STATES = ("active", "activating", "reloading", "deactivating")


def unit_name(name: str) -> str:
    """``ollama`` and ``ollama.service`` are the same unit."""
    known = (".service", ".socket", ".target", ".timer", ".scope", ".slice", ".mount", ".path")
    return name if name.endswith(known) else name + ".service"


def units_by_user(names: t.Iterable[str]) -> dict[str, list[str]]:
    """Full unit names by whose systemd has them: "" the machine's, else the user of ``user/unit``."""
    result: dict[str, list[str]] = {}
    for name in names:
        user, dummy, unit = unit_name(name).rpartition("/")
        result.setdefault(user, []).append(unit)
    return result


def systemctl(user: str) -> list[str]:
    """The command to talk to the machine's systemd, or as root to that of a user, whether or not that user is logged in (it lingers)."""
    if not user:
        return ["systemctl"]
    return ["runuser", "-u", user, "--", "sh", "-c", 'XDG_RUNTIME_DIR=/run/user/$(id -u) exec systemctl --user "$@"', "systemctl"]


def is_running(container: t.Mapping[str, t.Any]) -> bool:
    """A container that is paused or in a restart loop holds its ports and its memory too."""
    return bool(container.get("running")) or container.get("state") in ("running", "restarting", "paused", "removing")


is_own = _service.is_ours


def _short(address: t.Any) -> str:
    text = str(address or "*")
    return "*" if text in ("0.0.0.0", "::", "[::]", "*") else text


def where(address: t.Any, port: t.Any) -> str:
    """``127.0.0.1:30000``, ``[::1]:30000``, ``*:30000`` for any address."""
    text = _short(address)
    return f"[{text}]:{port}" if ":" in text and not text.startswith("[") else f"{text}:{port}"


class _Claims:
    """Collects one claim per holder; a holder of two ports is one claim with two ``ports``."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str], dict[str, t.Any]] = {}

    def add(self, kind: str, name: str, action: str, reason: str, **found: t.Any) -> None:
        key = (kind, name if kind != "process" else f"{name}/{found.get('pid')}/{found.get('port')}")
        claim = self._claims.get(key)
        if claim is None:
            claim = {
                "kind": kind,
                "name": name,
                "pid": None,
                "port": None,
                "address": None,
                "user": None,
                "container": None,
                "unit": None,
                "process": None,
                "ports": [],
                "where": [],
                "containers": [],
                "reason": "",
                "action": action,
            }
            self._claims[key] = claim
        for field in ("pid", "port", "address", "user", "container", "unit", "process"):
            if claim[field] is None and found.get(field) is not None:
                claim[field] = found[field]
        if found.get("port") is not None:
            place = where(found.get("address"), found["port"])
            if found["port"] not in claim["ports"]:
                claim["ports"].append(found["port"])
            if place not in claim["where"]:
                claim["where"].append(place)
        if found.get("container") and found["container"] not in claim["containers"]:
            claim["containers"].append(found["container"])
        if reason and reason not in claim["reason"]:
            claim["reason"] = f"{claim['reason']}; {reason}" if claim["reason"] else reason

    def result(self) -> list[dict[str, t.Any]]:
        order = {"refuse": 0, "stop": 1, "ours": 2}
        told = [claim for claim in self._claims.values() if claim["action"] != BESIDE]
        return sorted(told, key=lambda c: (order[c["action"]], c["kind"], c["name"], c["port"] or 0))


class _Allowed:
    def __init__(self, stop: t.Mapping[str, t.Any] | None, service: str = "") -> None:
        self.service = service
        stop = stop or {}
        self.containers = {str(name).lstrip("/") for name in stop.get("containers") or []}
        self.units = {unit_name(str(name)) for name in stop.get("units") or []}
        self.projects = {str(name) for name in stop.get("compose_projects") or []}


def _verdict(container: t.Mapping[str, t.Any], allowed: _Allowed, own_label: str) -> tuple[str, str, str]:
    """(kind, name, action) of the holder that a container stands for."""
    name = str(container.get("name", "")).lstrip("/")
    project = container.get("compose_project")
    if is_own(container, own_label):
        return "container", name, "ours" if _service.of(container) == allowed.service else BESIDE
    if name in allowed.containers:
        return "container", name, "stop"
    if project and project in allowed.projects:
        return "compose_project", str(project), "stop"
    return "container", name, "refuse"


def _container_of(listener: t.Mapping[str, t.Any], containers: list[dict[str, t.Any]]) -> dict[str, t.Any] | None:
    """The running container that a listening socket belongs to: by name or id, by its main process, or by a published port."""
    known = listener.get("container")
    for container in containers:
        if known and (known in (container.get("name"), container.get("id")) or str(container.get("id", "")).startswith(str(known))):
            return container
    for container in containers:
        if listener.get("pid") and listener.get("pid") == container.get("pid"):
            return container
    if listener.get("process") in (None, "", "docker-proxy", "rootlesskit"):
        for container in containers:
            if any(int(p.get("host_port") or 0) == listener.get("port") for p in container.get("ports") or []):
                return container
    return None


def _claim_ports(
    node: t.Mapping[str, t.Any], running: list[dict[str, t.Any]], ports: set[int], allowed: _Allowed, label: str, out: _Claims
) -> None:
    for container in running:
        for published in container.get("ports") or []:
            port = int(published.get("host_port") or 0)
            if port in ports and str(published.get("protocol") or "tcp") == "tcp":
                kind, name, action = _verdict(container, allowed, label)
                out.add(
                    kind, name, action, f"publishes port {port}",
                    port=port, address=published.get("host_ip"), container=container.get("name"), pid=container.get("pid") or None,
                )  # fmt: skip
    for listener in node.get("listeners") or []:
        port = int(listener.get("port") or 0)
        if port not in ports:
            continue
        found = {key: listener.get(key) for key in ("pid", "port", "address", "user", "process", "unit")}
        reason = f"listens on {where(listener.get('address'), port)}"
        owner = _container_of(listener, running)
        unit = listener.get("unit")
        if owner is not None:
            kind, name, action = _verdict(owner, allowed, label)
            out.add(kind, name, action, reason, container=owner.get("name"), **found)
        elif unit and unit_name(unit) in allowed.units:
            out.add("unit", unit_name(unit), "stop", reason, **found)
        elif unit and unit.startswith(OWN_UNIT_PREFIX):
            out.add("unit", unit, "ours", reason, **found)
        elif unit and unit.endswith(".service") and not unit.startswith(("user@", "docker.", "containerd.", "ssh")):
            out.add("unit", unit, "refuse", reason, **found)
        else:
            out.add("process", str(listener.get("process") or "unknown process"), "refuse", reason, **found)


def is_gpu_tenant(process: t.Mapping[str, t.Any]) -> bool:
    """A process that holds enough of the unified memory to matter; the desktop of a Spark does not."""
    name = str(process.get("name") or "").split()[0].rsplit("/", 1)[-1] if process.get("name") else ""
    if name.startswith(DESKTOP_PROCESSES):
        return False
    memory = process.get("memory_mib")
    return memory is None or float(memory) >= GPU_TENANT_MIB


def _claim_gpu(node: t.Mapping[str, t.Any], running: list[dict[str, t.Any]], allowed: _Allowed, label: str, out: _Claims) -> None:
    owners_known = False
    for container in running:
        if container.get("gpu"):
            kind, name, action = _verdict(container, allowed, label)
            owners_known = owners_known or action != "refuse"
            out.add(kind, name, action, "was given the GPU", container=container.get("name"), pid=container.get("pid") or None)
    owners_known = owners_known or any(c["action"] != "refuse" for c in out.result())
    for process in (node.get("gpu") or {}).get("processes") or []:
        if not is_gpu_tenant(process):
            continue
        memory = process.get("memory_mib")
        reason = f"uses the GPU ({int(memory)} MiB)" if memory is not None else "uses the GPU"
        found = {"pid": process.get("pid"), "user": process.get("user"), "process": process.get("name"), "unit": process.get("unit")}
        owner = _container_of({"container": process.get("container"), "pid": process.get("pid"), "process": "-"}, running)
        unit = process.get("unit")
        if owner is not None:
            kind, name, action = _verdict(owner, allowed, label)
            out.add(kind, name, action, reason, container=owner.get("name"), **found)
        elif unit and unit_name(unit) in allowed.units:
            out.add("unit", unit_name(unit), "stop", reason, **found)
        elif unit and unit.endswith(".service") and not unit.startswith(("user@", "docker.", "containerd.", "ssh")):
            out.add("unit", unit, "refuse", reason, **found)
        elif not owners_known or process.get("user"):
            # Its owner is known: then its control group was read, and no container and no unit matched. Else it is taken for a part of what is
            # stopped or ours.
            out.add("process", str(process.get("name") or "unknown process"), "refuse", reason, **found)


def claims(
    node: t.Mapping[str, t.Any],
    stop: t.Mapping[str, t.Any] | None,
    ports: t.Iterable[int],
    own_label: str = OWN_LABEL,
    service: str = "",
) -> list[dict[str, t.Any]]:
    """What runs on this node and stands in our way, one entry per holder, refusals first. What belongs to another service than ``service`` is not in it.

    ``node`` is RV(node) of node_info; ``stop`` = {containers, units, compose_projects} is what the inventory lets us stop;
    ``ports`` are the TCP ports that we need. An entry: {kind: container|unit|compose_project|process, name, pid, port, address,
    user, container, unit, process, ports, where, containers, reason, action: stop|ours|refuse}. Everything that is named in
    ``stop`` and runs is listed, also when it holds nothing of ours; what is named and does not run, or does not exist, is not.
    """
    allowed = _Allowed(stop, service)
    running = [c for c in node.get("containers") or [] if is_running(c)]
    out = _Claims()
    _claim_ports(node, running, {int(p) for p in ports}, allowed, own_label, out)
    for container in running:
        kind, name, action = _verdict(container, allowed, own_label)
        if action == "stop":
            out.add(kind, name, action, "is named in spark_stop", container=container.get("name"), pid=container.get("pid") or None)
    for unit, state in sorted((node.get("unit_states") or {}).items()):
        if unit_name(unit) in allowed.units and state in ACTIVE_UNIT_STATES:
            out.add("unit", unit_name(unit), "stop", "is named in spark_stop", unit=unit_name(unit))
    _claim_gpu(node, running, allowed, own_label, out)
    return out.result()


def to_stop(found: t.Iterable[t.Mapping[str, t.Any]]) -> dict[str, list[str]]:
    """The claims that are to be stopped, in the shape of ``spark_stop``."""
    keys = {"container": "containers", "unit": "units", "compose_project": "compose_projects"}
    result: dict[str, list[str]] = {key: [] for key in keys.values()}
    for claim in found:
        if claim["action"] == "stop":
            result[keys[claim["kind"]]].append(claim["name"])
    return result


def describe(claim: t.Mapping[str, t.Any]) -> str:
    """``container old-vllm (process python3, pid 4711, user root) on 127.0.0.1:30000``."""
    labels = {"compose_project": "compose project", "container": "container", "unit": "unit", "process": "process"}
    details = []
    if claim["kind"] != "process" and claim.get("process"):
        details.append(f"process {claim['process']}")
    if claim["kind"] == "compose_project" and claim.get("containers"):
        details.append("containers " + ", ".join(claim["containers"]))
    if claim.get("pid"):
        details.append(f"pid {claim['pid']}")
    if claim.get("user"):
        details.append(f"user {claim['user']}")
    if claim["kind"] == "process" and claim.get("unit"):
        details.append(f"unit {claim['unit']}")
    text = f"{labels[claim['kind']]} {claim['name']}"
    if details:
        text += f" ({', '.join(details)})"
    if claim.get("where"):
        return f"{text} on {', '.join(claim['where'])}"
    return f"{text}, which {claim['reason']}" if claim.get("reason") else text


def _remedy(refused: list[t.Mapping[str, t.Any]]) -> str:
    keys = {"container": "containers", "unit": "units", "compose_project": "compose_projects"}
    named = [f"{keys[c['kind']]}: [{c['name']}]" for c in refused if c["kind"] in keys]
    parts = []
    if named:
        parts.append(f"add it to spark_stop ({'; '.join(dict.fromkeys(named))}) if it may be stopped")
    bare = [c for c in refused if c["kind"] == "process"]
    if bare:
        pids = " ".join(str(c["pid"]) for c in bare if c.get("pid"))
        parts.append(f"stop it by hand{f' (sudo kill {pids})' if pids else ''}")
    elif named:
        parts.append("stop it by hand")
    if any(c.get("ports") for c in refused):
        parts.append("choose another port")
    return ", or ".join(parts)


def refusal(found: t.Iterable[t.Mapping[str, t.Any]], node_name: str = "", stage: str = "preflight") -> Problem | None:
    """The problem to raise when something that we may not stop stands in the way, else None."""
    refused = [claim for claim in found if claim["action"] == "refuse"]
    if not refused:
        return None
    by_port = [claim for claim in refused if claim.get("ports")]
    shown = by_port or refused
    ports = sorted({port for claim in by_port for port in claim["ports"]})
    if by_port:
        expected = f"port {', '.join(str(p) for p in ports)} to be free, or held by something that spark_stop names"
    else:
        expected = "the GPU and its memory to be free, or held by something that spark_stop names"
    return Problem(
        "port-held" if by_port else "gpu-held",
        node=node_name,
        stage=stage,
        found="; ".join(describe(claim) for claim in shown),
        expected=expected,
        remedy=_remedy(shown),
        claims=[dict(claim) for claim in refused],
    )


# --- what was stopped, written down so that it can be brought back

RECORD_VERSION = 1


def stop_plan(node: t.Mapping[str, t.Any], stop: t.Mapping[str, t.Any], own_label: str = OWN_LABEL) -> list[dict[str, t.Any]]:
    """What of ``stop`` runs on the node, in the order to stop it: units (they may hold containers), compose projects, containers.

    Each: {kind, name, containers: [names], restart_policy, auto_remove, enabled, ports: [{address, port}]} as it is before the stop.
    A container of ours is never in it.
    """
    allowed = _Allowed(stop)
    running = [c for c in node.get("containers") or [] if is_running(c) and not is_own(c, own_label)]
    items: list[dict[str, t.Any]] = []
    for unit, state in sorted((node.get("unit_states") or {}).items()):
        if unit_name(unit) in allowed.units and state in ACTIVE_UNIT_STATES:
            ports = [
                _place(entry)
                for entry in node.get("listeners") or []
                if entry.get("unit") == unit_name(unit) and not entry.get("container")
            ]
            enabled = (node.get("unit_enabled") or {}).get(unit, "")
            items.append({"kind": "unit", "name": unit_name(unit), "containers": [], "enabled": enabled, "ports": ports})
    for project in sorted(allowed.projects):
        members = [c for c in running if c.get("compose_project") == project]
        if members:
            names = [str(c["name"]) for c in sorted(members, key=_age, reverse=True)]
            ports = [place for c in members for place in ports_of(c, node)]
            items.append({"kind": "compose_project", "name": project, "containers": names, "ports": ports, **_policies(members)})
    for container in running:
        if container["name"] in allowed.containers and container.get("compose_project") not in allowed.projects:
            item = {"kind": "container", "name": container["name"], "containers": [container["name"]], "ports": ports_of(container, node)}
            items.append({**item, **_policies([container])})
    return items


def _age(container: t.Mapping[str, t.Any]) -> str:
    return str(container.get("started_at") or "")


def _policies(containers: list[t.Mapping[str, t.Any]]) -> dict[str, t.Any]:
    return {
        "restart_policy": {str(c["name"]): c.get("restart_policy") or "no" for c in containers},
        "auto_remove": any(c.get("auto_remove") for c in containers),
        "image": {str(c["name"]): c.get("image") for c in containers},
    }


def _place(entry: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    return {"address": _short(entry.get("address", entry.get("host_ip"))), "port": int(entry.get("port", entry.get("host_port") or 0))}


def ports_of(container: t.Mapping[str, t.Any], node: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """Where a container answers on this node: its published ports and what it listens on in the host's network."""
    places = [_place(p) for p in container.get("ports") or [] if p.get("host_port") and (p.get("protocol") or "tcp") == "tcp"]
    places += [
        _place(entry) for entry in node.get("listeners") or [] if entry.get("container") in (container.get("name"), container.get("id"))
    ]
    return [place for number, place in enumerate(places) if place not in places[:number]]


def merge_record(record: t.Mapping[str, t.Any] | None, item: t.Mapping[str, t.Any], **facts: t.Any) -> dict[str, t.Any]:
    """The record with one more item; what was written before an interruption stays, of a known item only news is taken.

    Ports are kept from the first time: on the second try the service may be half down.
    """
    result = {"version": RECORD_VERSION, "stopped": [], **(record or {}), **facts}
    entries = [dict(entry) for entry in result["stopped"]]
    for entry in entries:
        if (entry["kind"], entry["name"]) == (item["kind"], item["name"]):
            ports = [*entry.get("ports", []), *[place for place in item.get("ports", []) if place not in entry.get("ports", [])]]
            containers = list(dict.fromkeys([*entry.get("containers", []), *item.get("containers", [])]))
            policies = {**item.get("restart_policy", {}), **entry.get("restart_policy", {})}
            entry.update({**item, **entry, "ports": ports, "containers": containers, "restart_policy": policies})
            break
    else:
        entries.append(dict(item))
    return {**result, "stopped": entries}


def remembered(last: t.Mapping[str, t.Any] | None, record: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The record of all that was stopped and is not to come back by itself: ``last``, with the items of ``record`` added.

    What runs now is the better description of a known item. But that it was to start at boot is known from the first time only, since that was
    taken from it then.
    """
    entries = {(entry["kind"], entry["name"]): dict(entry) for entry in (last or {}).get("stopped", [])}
    for item in record["stopped"]:
        earlier = entries.pop((item["kind"], item["name"]), {})
        entry = entries[(item["kind"], item["name"])] = dict(item)
        always = {name: policy for name, policy in earlier.get("restart_policy", {}).items() if policy == "always"}
        if always:
            entry["restart_policy"] = {**item.get("restart_policy", {}), **always}
        if earlier.get("enabled") == "enabled":
            entry["enabled"] = "enabled"
    facts = {key: value for key, value in record.items() if key != "own"}
    return {**facts, "stopped": list(entries.values())}


def not_listening(places: t.Iterable[t.Mapping[str, t.Any]], listeners: t.Iterable[t.Mapping[str, t.Any]]) -> list[str]:
    """The recorded places where nothing listens (yet), as text. A listener on any address serves every recorded address."""
    open_at = {(_short(entry.get("address")), int(entry["port"])) for entry in listeners}
    return [where(p["address"], p["port"]) for p in places if (p["address"], p["port"]) not in open_at and ("*", p["port"]) not in open_at]


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """``systemctl show -p Id,LoadState,ActiveState,UnitFileState`` of several units -> {id: {property: value}} of those that exist."""
    result = {}
    for block in text.strip().split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if values.get("Id") and values.get("LoadState") not in ("not-found", "masked", None):
            result[values["Id"]] = values
    return result
