# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What serves on the gang at this moment: one row for each node, one verdict, a table for people and a document for machines.

PRIVATE to the collection. Pure functions over plain data: facts of ``node_info`` and ``nccl_interface_info``, and what the module
``serving_status`` saw on the head. Metric names: vLLM 0.16 to 0.33 (``vllm:num_requests_running`` and so on, one series for each engine).
"""

from __future__ import annotations

import datetime
import math
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _service, _tenants
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import exit_text, normal_stamp
from ansible_collections.dgxspark.serving.plugins.module_utils._plan import LABEL, RAY, VLLM, cache_dir_of, in_home, repo_folder
from ansible_collections.dgxspark.serving.plugins.module_utils._previous import SUFFIX
from ansible_collections.dgxspark.serving.plugins.module_utils._snapshot import is_plain

OURS = (VLLM, RAY)
METRICS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
}
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>[^\s]+)")

# What the whole gang is, and whether a person has to do something about it.
STATES = {
    "serving": "ok",
    "loading": "busy",
    "ray_only": "busy",
    "old_service": "busy",
    "stopped": "busy",
    "degraded": "bad",
    "not_answering": "bad",
    "failed": "bad",
    "unknown": "bad",
}


# --- metrics


def parse_metrics(text: str) -> dict[str, float]:
    """The four figures of METRICS from the text of /metrics, summed over engines; {} when it is not that of a vLLM."""
    names = {name: key for key, name in METRICS.items()}
    result: dict[str, float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        key = names.get(found["name"]) if found else None
        if not found or key is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            result[key] = result.get(key, 0.0) + value
    return result


def load(samples: t.Sequence[t.Mapping[str, t.Any]]) -> dict[str, t.Any] | None:
    """{running, waiting, tokens_per_second, prompt_tokens_per_second, seconds} from samples ``{at: seconds, ...parse_metrics}``.

    The rates are None with one sample, and when a counter went back (the server was started again in between). None without samples.
    """
    good = [s for s in samples if "running" in s]
    if not good:
        return None
    first, last = good[0], good[-1]
    seconds = float(last["at"]) - float(first["at"])

    def rate(key: str) -> float | None:
        if seconds <= 0 or key not in first or key not in last or last[key] < first[key]:
            return None
        return round((last[key] - first[key]) / seconds, 1)

    return {
        "running": int(last["running"]),
        "waiting": int(last.get("waiting", 0)),
        "tokens_per_second": rate("generation_tokens"),
        "prompt_tokens_per_second": rate("prompt_tokens"),
        "seconds": round(seconds, 2),
    }


# --- one node


def seconds_since(stamp: str, now: float) -> int | None:
    """Seconds from a time stamp of Docker to ``now`` (epoch seconds of the same node); None for what was never started."""
    if not stamp or stamp.startswith("0001-"):
        return None
    try:
        stamp = normal_stamp(stamp)
        moment = datetime.datetime.fromisoformat(stamp[:19] + ("+00:00" if stamp.endswith("Z") else stamp[-6:]))
    except ValueError:
        return None
    return max(0, int(now - moment.timestamp()))


def _container(record: t.Mapping[str, t.Any], now: float) -> dict[str, t.Any]:
    labels = record.get("labels") or {}
    running = bool(record.get("running"))
    return {
        "name": record["name"],
        "role": _service.role_of(record),
        "state": record.get("state") or "",
        "running": running,
        "exit": "" if running else exit_text(record),
        "started_at": record.get("started_at") or "",
        "seconds": seconds_since(str(record.get("started_at") or ""), now) if running else None,
        "image": record.get("image") or "",
        "image_id": record.get("image_id") or "",
        "model": labels.get(f"{LABEL}.model") or "",
        "revision": labels.get(f"{LABEL}.revision") or "",
        "served_model_name": labels.get(f"{LABEL}.served_model_name") or "",
    }


def _image(containers: t.Sequence[t.Mapping[str, t.Any]], image: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The image that runs, else the one of the inventory. ``planned``: whether what runs is the inventory's (None: nothing runs)."""
    present = bool(image.get("present"))
    running = [c for c in containers if c["running"]]
    planned = None
    if running:
        planned = present and all(c["image_id"] == image.get("id") for c in running)
    if planned is False:
        other = next((c for c in running if c["image_id"] != image.get("id")), running[0])
        return {"reference": other["image"], "fingerprint": None, "id": other["image_id"], "present": True, "planned": False}
    return {
        "reference": image.get("reference") or "",
        "fingerprint": image.get("fingerprint") if present else None,
        "id": image.get("id") or "",
        "present": present,
        "planned": planned,
    }


def _fabric(address: str, found: t.Mapping[str, t.Any] | None, error: str) -> dict[str, t.Any]:
    found = found or {}
    return {
        "address": found.get("address") or address,
        "interface": found.get("interface") or "",
        "rails": int(found.get("rail_count") or 0),
        "rdma": bool(found.get("rdma")),
        "mtu": found.get("mtu"),
        "error": error,
    }


def unreachable_row(name: str, head: bool, address: str, error: str) -> dict[str, t.Any]:
    """The row of a node that gave no answer."""
    return {
        "node": name,
        "role": "head" if head else "worker",
        "reachable": False,
        "error": error,
        "fabric": _fabric(address, None, ""),
        "ray": None,
        "containers": [],
        "others": [],
        "beside": [],
        "records": [],
        "aside": [],
        "model_folder": "",
        "memory": None,
        "image": None,
        "docker_error": "",
        "boot": None,
        "server": None,
    }


def boot_of(found: t.Mapping[str, t.Any]) -> dict[str, t.Any] | None:
    """{state, text} of the unit for the boot: ``off``, ``on``, ``starting``, ``failed`` or, enabled and not running, ``idle``; None: not known."""
    if found.get("state", "unknown") == "unknown":
        return None
    state = {"active": "on", "activating": "starting", "failed": "failed"}.get(found["state"], "idle" if found.get("enabled") else "off")
    return {"state": "off" if state == "on" and not found.get("enabled") else state, "text": str(found.get("text") or "")}


def node_row(
    name: str,
    head: bool,
    address: str,
    settings: t.Mapping[str, t.Any],
    node: t.Mapping[str, t.Any],
    fabric: t.Mapping[str, t.Any] | None = None,
    fabric_error: str = "",
    server: t.Mapping[str, t.Any] | None = None,
) -> dict[str, t.Any]:
    """The row of a node that answered. ``server`` is what the module ``serving_status`` returned (head only)."""
    now = float(node["time"])
    service = str(settings.get("service") or "")
    ours = [c for c in node["containers"] if _tenants.is_own(c, LABEL) and _service.role_of(c)]
    own = [c for c in ours if _service.of(c) == service]
    containers = sorted((_container(c, now) for c in own), key=lambda c: OURS.index(c["role"]))
    claims = _tenants.claims(node, settings["stop"], [settings["api_port"]], LABEL, service)
    others = [
        {"name": c["name"], "kind": c["kind"], "on_port": settings["api_port"] in (c.get("ports") or []), "known": c["action"] == "stop"}
        for c in claims
        if c["action"] != "ours" and (c["action"] == "stop" or c.get("ports"))
    ]
    memory = node["memory"]
    return {
        **unreachable_row(name, head, address, ""),
        "reachable": True,
        "fabric": _fabric(address, fabric, fabric_error),
        "containers": containers,
        "others": others,
        "records": sorted(path for path, entry in (node.get("disks") or {}).items() if entry.get("checked") == path),
        "aside": sorted(
            c["name"] for c in node["containers"] if _tenants.is_own(c, LABEL) and _service.of(c) == service and c["name"].endswith(SUFFIX)
        ),
        "beside": [
            {"service": other, "port": _service.api_port(c), **_container(c, now)} for c in ours if (other := _service.of(c)) != service
        ],
        "model_folder": in_home(settings["model"], dict(node))
        if is_plain(settings["model"])
        else f"{cache_dir_of(dict(settings), dict(node))}/hub/{repo_folder(settings['model'])}",
        "memory": {"total": memory["total"], "available": memory["available"], "used": max(0, memory["total"] - memory["available"])},
        "image": _image(containers, node.get("image") or {}),
        "docker_error": (node.get("docker") or {}).get("error") or "",
        "boot": boot_of(node.get("boot") or {}),
        "server": dict(server) if server else None,
    }


# --- the gang


def _one(row: t.Mapping[str, t.Any], name: str) -> dict[str, t.Any] | None:
    return next((c for c in row["containers"] if c.get("role", c["name"]) == name), None)


def _head(rows: t.Sequence[t.Mapping[str, t.Any]]) -> t.Mapping[str, t.Any] | None:
    """The row of the head; None when the run is limited to other nodes."""
    return next((row for row in rows if row["role"] == "head"), None)


def with_ray(rows: t.Sequence[t.Mapping[str, t.Any]], table: t.Mapping[str, t.Any] | None) -> list[dict[str, t.Any]]:
    """The rows with ``ray`` = {container, alive}; ``alive`` is what Ray's head says of the node's fabric address (None: not known)."""
    known = bool(table) and bool((table or {}).get("nodes"))
    alive = {str(n.get("address")) for n in (table or {}).get("nodes") or [] if n.get("alive")}
    result = []
    for row in rows:
        container = _one(row, RAY)
        ray = {
            "container": container["state"] if container else None,
            "alive": row["fabric"]["address"] in alive if known else None,
        }
        result.append({**row, "ray": ray})
    return result


def _ray_total(rows: t.Sequence[t.Mapping[str, t.Any]], table: t.Mapping[str, t.Any] | None) -> dict[str, t.Any]:
    nodes = [n for n in (table or {}).get("nodes") or [] if n.get("alive")]
    planned = {row["fabric"]["address"] for row in rows}
    return {
        "alive": len({str(n.get("address")) for n in nodes} & planned),
        "planned": len(rows),
        "unexpected": sorted({str(n.get("address")) for n in nodes} - planned),
        "version": (table or {}).get("ray"),
    }


def without_ray(rows: t.Sequence[t.Mapping[str, t.Any]]) -> bool:
    """Whether what is there was launched with the executor mp: a server and no Ray, or a rank of its own on a worker."""
    anywhere = any(_one(row, RAY) for row in rows)
    return any(_one(row, VLLM) and (row["role"] == "worker" or not anywhere) for row in rows)


def problems(rows: t.Sequence[t.Mapping[str, t.Any]], ray: t.Mapping[str, t.Any], working: bool) -> list[str]:
    """What is wrong, one sentence each. ``working``: something of ours is meant to run, so that a missing part is wrong."""
    told = []
    needed = VLLM if without_ray(rows) else RAY
    for row in rows:
        name = row["node"]
        if not row["reachable"]:
            told.append(row["error"] if row["error"].startswith(name) else f"{name}: {row['error']}")
            continue
        if row["error"]:
            told.append(f"{name}: {row['error']}")
        if row["docker_error"]:
            told.append(f"{name}: Docker: {row['docker_error']}")
        if row["fabric"]["error"]:
            told.append(f"{name}: fabric: {row['fabric']['error']}")
        for container in row["containers"]:
            if not container["running"]:
                told.append(f"{name}: container {container['name']} {container['exit']}")
        if not working or row["docker_error"]:
            continue
        if not _one(row, needed):
            told.append(f"{name}: container {needed} is not there")
        elif row["ray"]["alive"] is False:
            told.append(f"{name}: {row['fabric']['address']} is not alive in Ray")
        if row["image"] and row["image"]["planned"] is False:
            told.append(f"{name}: runs {row['image']['reference']}, not the inventory's image of this moment")
    told += [f"Ray has {address}, which is not in the inventory" for address in ray["unexpected"]]
    return told


def _failure(container: t.Mapping[str, t.Any], server: t.Mapping[str, t.Any]) -> str:
    cause = server.get("cause")
    return f"container {VLLM} {container['exit']}" + (f": {cause}" if cause else "")


def verdict(rows: t.Sequence[t.Mapping[str, t.Any]], wrong: t.Sequence[str]) -> tuple[str, str]:
    """(state, one sentence) of the gang; ``wrong`` are the problems."""
    head = _head(rows)
    if head is None:
        return "unknown", "the head is not in this run"
    if not head["reachable"]:
        return "unknown", f"the head {head['node']} does not answer"
    if head["docker_error"]:
        return "unknown", f"Docker on the head {head['node']} does not answer"
    server, container = head["server"] or {}, _one(head, VLLM)
    if container and not container["running"]:
        return "failed", _failure(container, server)
    ranks = [(row["node"], _one(row, VLLM)) for row in rows if row["role"] == "worker"]
    ended = next(((name, rank) for name, rank in ranks if rank and not rank["running"]), None)
    if container and ended:  # vLLM's own /health does not notice: it answers 200 until the next request fails
        return "failed", f"the server's rank on {ended[0]}, container {VLLM}, {ended[1]['exit']}"
    if container and not head["server"]:
        return "unknown", f"the server on {head['node']} could not be asked"
    if container:
        return _running(server, wrong)
    left = [name for name, rank in ranks if rank and rank["running"]]
    if left:
        return "failed", f"the head has no container {VLLM}; its ranks on {', '.join(left)} wait for it"
    holders = [o for o in head["others"] if o["on_port"]] or head["others"]
    if holders:
        names = ", ".join(f"{o['kind'].replace('_', ' ')} {o['name']}" for o in holders)
        return "old_service", f"{names} {'holds the API port' if holders[0]['on_port'] else 'runs'}; nothing of ours serves"
    if any((_one(row, RAY) or {}).get("running") for row in rows):
        return "ray_only", "Ray runs, no server does"
    return "stopped", "nothing runs and the API port is free"


def _running(server: t.Mapping[str, t.Any], wrong: t.Sequence[str]) -> tuple[str, str]:
    """The verdict about a server whose container runs."""
    if server.get("healthy"):
        return ("degraded", "it answers, but not all is well") if wrong else ("serving", "it answers")
    where = " ".join(part for part in (server.get("stage") or "container", server.get("detail") or "") if part)
    seconds = server.get("loading_seconds")
    if server.get("listening"):
        now = server.get("cause") or (f"/health: {server['health']}" if server.get("health") else "it is ending")
        return "not_answering", f"the server was ready; now {now}"
    if server.get("cause"):
        return "failed", f"at stage {where}: {server['cause']}"
    return "loading", f"stage {where}" + (f", for {duration(seconds)}" if seconds is not None else "")


def beside(rows: t.Sequence[t.Mapping[str, t.Any]]) -> list[dict[str, t.Any]]:
    """The other services on these nodes: {service, model, port, nodes: {node: running}, seconds}. Whether they answer is for their own status."""
    found: dict[str, dict[str, t.Any]] = {}
    for row in rows:
        for container in row.get("beside") or []:
            empty: dict[str, t.Any] = {"service": container["service"], "model": "", "port": None, "nodes": {}, "seconds": None}
            other = found.setdefault(container["service"], empty)
            other["nodes"][row["node"]] = other["nodes"].get(row["node"], True) and container["running"]
            other["model"] = other["model"] or container["served_model_name"]
            other["port"] = other["port"] or container["port"]
            if container["port"]:
                other["seconds"] = container["seconds"]
    return [found[name] for name in sorted(found)]


def beside_lines(found: t.Sequence[t.Mapping[str, t.Any]]) -> list[str]:
    """``Beside it: service chat (org/model, port 30001) runs on spark-1, spark-2 for 3 h``."""
    lines = []
    for other in found:
        up = [node for node, running in other["nodes"].items() if running]
        down = [node for node, running in other["nodes"].items() if not running]
        what = ", ".join([other["model"] or "its server is on another node", *([f"port {other['port']}"] if other["port"] else [])])
        since = f" for {duration(other['seconds'])}" if other["seconds"] is not None else ""
        states = ([f"runs on {', '.join(up)}{since}"] if up else []) + ([f"ENDED on {', '.join(down)}"] if down else [])
        lines.append(f"Beside it: {_service.title(other['service'])} ({what}) {', '.join(states)}")
    return lines


# What the unit for the boot says when there is nothing to say about it.
QUIET = ("serves", "is part of the gang", "stands by")


def boot_notes(rows: t.Sequence[t.Mapping[str, t.Any]], healthy: bool) -> list[str]:
    """What a person should know of the units for the boot."""
    units = [(row["node"], row["boot"]) for row in rows if row["boot"]]
    told = []
    for name, unit in units:
        if unit["state"] == "failed":
            told.append(f"{name}: the unit for the boot has failed: {unit['text'] or 'see systemctl status dgxspark-serving there'}")
        elif unit["state"] in ("on", "starting") and not healthy and unit["text"] and not unit["text"].startswith(QUIET):
            told.append(f"{name}: after the boot: {unit['text']}")
    without = [name for name, unit in units if unit["state"] == "off"]
    if without and len(without) < len(units):
        told.append(f"{', '.join(without)}: no unit for the boot, so nothing starts there after a power cut (site.yml --tags boot)")
    return told


def document(rows: t.Sequence[t.Mapping[str, t.Any]], settings: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Everything that is known, for machines; ``table`` makes it readable. The head is the first row, if it is in this run."""
    head = _head(rows)
    found = (head or {}).get("server") or {}
    rows = with_ray(rows, found.get("ray"))
    ray = _ray_total(rows, found.get("ray"))
    server = _one(head, VLLM) if head else None
    working = any(row["containers"] for row in rows)
    wrong = problems(rows, ray, working)
    if head and server and found.get("healthy") and found.get("models") and found["models"] != [server["served_model_name"]]:
        wrong.append(f"{head['node']}: /v1/models lists {', '.join(found['models'])}, expected {server['served_model_name']}")
    state, text = verdict(rows, wrong)
    notes = []
    if server and server["model"] and server["model"] != settings["model"]:
        notes.append(f"the inventory says {settings['model']} now: site.yml would replace the server")
    if any(row["aside"] for row in rows):
        notes.append(
            "the version before is kept, stopped, until the new one is proven: if no site.yml runs now, one was cut off; run it again"
        )
    elif head and server is None and any(row["records"] for row in rows):
        notes.append("an old service was stopped here and is written down (teardown.yml -e spark_restore_old=true starts it)")
    notes += boot_notes(rows, bool(found.get("healthy")))
    return {
        "state": state,
        "text": text,
        "endpoint": f"http://{_service.place(settings['endpoint_host'], settings['api_port'])}/v1",
        "model": server["model"] if server else None,
        "revision": server["revision"] if server else None,
        "served_model_name": server["served_model_name"] if server else None,
        "max_model_len": found.get("max_model_len"),
        "since": server["started_at"] if server and server["running"] else None,
        "seconds": server["seconds"] if server else None,
        "ray": ray,
        "load": load(found.get("metrics") or []) if found.get("healthy") else None,
        "stage": None if found.get("healthy") or not found else {k: found.get(k) for k in ("stage", "detail", "loading_seconds")},
        "nodes": [{key: value for key, value in row.items() if key not in ("server", "model_folder", "aside")} for row in rows],
        "services": beside(rows),
        "problems": wrong,
        "notes": notes,
    }


# --- for people


def duration(seconds: float | None) -> str:
    """``42 s``, ``12 min``, ``3 h 05 min``, ``12 d 4 h``; ``-`` for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def memory(found: t.Mapping[str, t.Any] | None) -> str:
    """``61.2/119.7 GiB`` used of total."""
    if not found:
        return "-"
    return f"{found['used'] / 2**30:.1f}/{found['total'] / 2**30:.1f} GiB"


def _rails(fabric: t.Mapping[str, t.Any]) -> str:
    if fabric["error"]:
        return "error"
    if not fabric["interface"]:
        return "-"
    return f"{fabric['rails']} RDMA" if fabric["rdma"] else f"{fabric['rails']} TCP"


def _ray_cell(ray: t.Mapping[str, t.Any]) -> str:
    if ray["alive"] is not None and ray["container"] in (None, "running"):
        return "alive" if ray["alive"] else "dead"
    return {None: "-", "running": "up"}.get(ray["container"], str(ray["container"]))


def _containers_cell(row: t.Mapping[str, t.Any]) -> str:
    if not row["reachable"]:
        return "NO ANSWER"
    if row["docker_error"]:
        return "NO DOCKER"
    cells = [c["name"] if c["running"] else f"{c['name']} {c['state'].upper()}" for c in row["containers"]]
    cells += [f"({o['name']})" for o in row["others"]]
    return " ".join(cells) or "-"


def _image_cell(image: t.Mapping[str, t.Any] | None) -> str:
    if not image:
        return "-"
    if image["planned"] is False:
        return "another"
    return str(image["fingerprint"])[:12] if image["fingerprint"] else "not there"


def _cells(row: t.Mapping[str, t.Any]) -> list[str]:
    running = [c["seconds"] for c in row["containers"] if c["running"] and c["seconds"] is not None]
    return [
        row["node"],
        row["role"],
        row["fabric"]["address"],
        _rails(row["fabric"]),
        _ray_cell(row["ray"]),
        _containers_cell(row),
        duration(running[0] if running else None),
        memory(row["memory"]),
        _image_cell(row["image"]),
        row["boot"]["state"].upper() if row["boot"] and row["boot"]["state"] == "failed" else (row["boot"] or {}).get("state", "-"),
    ]


HEADINGS = ["NODE", "ROLE", "FABRIC", "RAILS", "RAY", "CONTAINERS", "SINCE", "MEMORY USED", "IMAGE", "BOOT"]


def columns(lines: t.Sequence[t.Sequence[str]]) -> list[str]:
    """Left-aligned columns, two spaces apart."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def headline(found: t.Mapping[str, t.Any]) -> str:
    """``SERVING  it answers``."""
    return f"{found['state'].upper().replace('_', ' ')}: {found['text']}"


def model_lines(found: t.Mapping[str, t.Any]) -> list[str]:
    """What is served, and how busy it is."""
    lines = []
    if found["model"]:
        name = f" as {found['served_model_name']}" if found["served_model_name"] not in ("", None, found["model"]) else ""
        lines.append(f"Model     {found['model']} @ {str(found['revision'] or '?')[:12]}{name}")
        lines.append(f"Endpoint  {found['endpoint']}")
    busy = found["load"]
    if busy:
        rates = ["-" if busy[key] is None else f"{busy[key]:g}" for key in ("tokens_per_second", "prompt_tokens_per_second")]
        lines.append(f"Requests  {busy['running']} running, {busy['waiting']} waiting; {rates[0]} tokens/s (prompts {rates[1]} tokens/s)")
    if any(row["ray"]["container"] for row in found["nodes"]) or found["ray"]["alive"]:
        lines.append(f"Ray       alive {found['ray']['alive']}/{found['ray']['planned']}")
    return lines


def table(found: t.Mapping[str, t.Any]) -> str:
    """The document for a person: verdict, model, one line for each node, what is wrong."""
    lines = [headline(found), *model_lines(found), ""]
    lines += columns([HEADINGS, *(_cells(row) for row in found["nodes"])])
    lines += ["", *beside_lines(found["services"])] if found["services"] else []
    if found["problems"] or found["notes"]:
        lines += ["", *(f"! {text}" for text in found["problems"]), *(f"  {text}" for text in found["notes"])]
    return "\n".join(lines)
