# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ray's node table compared with the plan.

PRIVATE to the collection. C(PROGRAM) runs inside the Ray container with its own Python and prints one JSON object; everything that
decides is a pure function over it.
"""

from __future__ import annotations

import json
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

MARK = "dgxspark-serving-ray:"

# Reads the table straight from the head's GCS (import 0.4 s, the table itself 10 ms with Ray 2.60; joining as a driver with ray.init
# takes seconds). GcsClientOptions.create and GlobalStateAccessor are the same from Ray 2.10 to 2.60; ray.init is the way for any other.
PROGRAM = r"""
import json, os, socket, sys
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
address, limit = sys.argv[1], float(sys.argv[2])
host, port = address.rsplit(":", 1)
answer = {"nodes": [], "via": None, "errors": []}

def say():
    sys.stdout.write("\n%s%s\n" % ("dgxspark-serving-ray:", json.dumps(answer)))
    sys.stdout.flush()
    os._exit(0)

try:
    socket.create_connection((host, int(port)), timeout=min(limit, 3)).close()
except OSError as exc:
    answer["errors"].append("no Ray head answers at %s: %s" % (address, exc))
    answer["via"] = "tcp"
    say()

answer["python"] = ".".join(str(part) for part in sys.version_info[:3])
try:
    import ray
except ImportError as exc:
    answer["errors"].append("no Ray in this container: %s" % exc)
    answer["via"] = "import"
    say()
answer["ray"] = ray.__version__

def text(value):
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

def from_gcs():
    from ray._raylet import GcsClientOptions, GlobalStateAccessor
    from ray.core.generated import gcs_pb2
    options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state = GlobalStateAccessor(options)
    if not state.connect():
        raise RuntimeError("the GCS does not answer")
    free = {}
    for raw in state.get_all_available_resources():
        message = gcs_pb2.AvailableResources.FromString(raw)
        free[message.node_id.hex()] = dict(message.resources_available)
    rows = [row(node, free.get(text(node["NodeID"]))) for node in state.get_node_table()]
    try:
        from ray._raylet import GcsClient
        started = {}
        for key, info in GcsClient(address=address).get_all_node_info(timeout=limit).items():
            started[key.hex()] = info.start_time_ms / 1000.0
        for entry in rows:
            entry["started"] = started.get(entry["id"])
    except Exception as exc:
        answer["errors"].append("start times: %s" % exc)
    try:
        session = state.get_internal_kv(b"session", b"session_name")
        answer["session"] = text(session) if session else None
    except Exception:
        pass
    return rows

def row(node, free):
    return {
        "id": text(node.get("NodeID")),
        "address": node.get("NodeManagerAddress"),
        "hostname": node.get("NodeManagerHostname"),
        "alive": bool(node.get("Alive", node.get("alive"))),
        "resources": dict(node.get("Resources") or {}),
        "available": free,
        "socket": text(node.get("RayletSocketName") or node.get("ObjectStoreSocketName") or ""),
        "death": node.get("DeathReasonMessage") or "",
        "started": None,
    }

def from_driver():
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        free = {}
        try:
            from ray._private.state import available_resources_per_node
            free = available_resources_per_node()
        except Exception as exc:
            answer["errors"].append("available resources: %s" % exc)
        return [row(node, free.get(node.get("NodeID"))) for node in ray.nodes()]
    finally:
        ray.shutdown()

for name, way in (("gcs", from_gcs), ("driver", from_driver)):
    try:
        answer["nodes"] = way()
        answer["via"] = name
        break
    except Exception as exc:
        answer["errors"].append("%s: %s: %s" % (name, type(exc).__name__, exc))
say()
"""


def parse(rc: int, out: str, err: str) -> dict[str, t.Any]:
    """The JSON object of PROGRAM; what went wrong instead is one entry of ``errors``."""
    for line in reversed((out or "").splitlines()):
        if line.startswith(MARK):
            try:
                return dict(json.loads(line[len(MARK) :]))
            except ValueError:
                break
    text = " ".join((err or out or "").split())[-300:]
    reason = "Ray's head did not answer in time" if rc in (124, 137) else f"the probe ended with {rc}: {text}"
    return {"nodes": [], "via": None, "errors": [reason], "probe_rc": rc}


SESSION = re.compile(r"/(session_[^/]+)/")


def session_of(node: t.Mapping[str, t.Any]) -> str:
    """The name of the session that a node belongs to, from the path of its socket ("" when unknown)."""
    found = SESSION.search(str(node.get("socket") or ""))
    return found.group(1) if found else ""


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else round(float(value), 3)


def cluster_state(table: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Compare Ray's table with the plan.

    ``plan`` = {nodes: [addresses], gpus: total (0 = gpus_per_node x nodes), gpus_per_node, require_idle}. Returns {ready, missing,
    unexpected, duplicates, gpus, gpus_free, reasons, nodes: [{address, hostname, gpus, gpus_free, started}], dead: {address: reason},
    newest: newest start (epoch seconds) or None}. ``unexpected`` are alive nodes that are not planned:
    strangers, or our node under another address.
    """
    planned = list(plan.get("nodes") or [])
    per_node = float(plan.get("gpus_per_node") or 0)
    wanted = float(plan.get("gpus") or per_node * len(planned))
    alive = [node for node in table.get("nodes") or [] if node.get("alive")]
    addresses = [str(node.get("address")) for node in alive]
    reasons: list[str] = [str(e) for e in table.get("errors") or []] if not alive else []
    missing = [address for address in planned if address not in addresses]
    unexpected = sorted({address for address in addresses if address not in planned})
    duplicates = sorted({address for address in addresses if addresses.count(address) > 1})
    dead = {
        str(n.get("address")): str(n.get("death") or "it left")
        for n in table.get("nodes") or []
        if not n.get("alive") and str(n.get("address")) in missing
    }
    for address in missing:
        reasons.append(f"{address} is not in the cluster" + (f" (it was: {dead[address]})" if address in dead else ""))
    for address in unexpected:
        reasons.append(f"{address} is in the cluster and not in the plan")
    for address in duplicates:
        reasons.append(f"{address} is there {addresses.count(address)} times (an earlier start that Ray has not given up yet)")
    rows = []
    for node in alive:
        total = float((node.get("resources") or {}).get("GPU", 0))
        free = node.get("available")
        left = total if free is None else float(free.get("GPU", 0))
        rows.append(
            {
                "address": str(node["address"]),
                "hostname": node.get("hostname"),
                "gpus": _number(total),
                "gpus_free": _number(left),
                "started": node.get("started"),
            }
        )
        if per_node and str(node["address"]) in planned and total != per_node:
            reasons.append(f"{node['address']} offers {_number(total)} GPU instead of {_number(per_node)}")
        if plan.get("require_idle") and left < total:
            reasons.append(f"{_number(total - left)} GPU of {node['address']} is reserved")
    gpus = sum(float(r["gpus"]) for r in rows)
    if alive and gpus != wanted:
        reasons.append(f"the cluster has {_number(gpus)} GPU instead of {_number(wanted)}")
    sessions = {session_of(node) for node in alive} - {""}
    if table.get("session"):
        sessions.add(str(table["session"]))
    if len(sessions) > 1:
        reasons.append(f"nodes of different Ray sessions ({', '.join(sorted(sessions))})")
    started = [float(r["started"]) for r in rows if r["started"]]
    return {
        "ready": bool(alive) and not reasons,
        "missing": missing,
        "unexpected": unexpected,
        "duplicates": duplicates,
        "gpus": _number(gpus),
        "gpus_free": _number(sum(float(r["gpus_free"]) for r in rows)),
        "reasons": reasons,
        "nodes": sorted(rows, key=lambda r: str(r["address"])),
        "dead": dead,
        "newest": max(started) if len(started) == len(rows) and rows else None,
    }


def is_stable(state: t.Mapping[str, t.Any], settle: float, now: float) -> bool:
    """Whether a ready cluster has been so for ``settle`` seconds by Ray's own record; then there is no need to look twice.

    ``now`` is the head's clock (epoch seconds); the start of a node is taken by the head too.
    """
    return bool(state["ready"]) and (settle <= 0 or (state["newest"] is not None and now - float(state["newest"]) >= settle))


def is_hopeless(state: t.Mapping[str, t.Any], table: t.Mapping[str, t.Any]) -> bool:
    """What waiting does not mend: a stranger, another number of GPUs on a planned node, no Ray in the image."""
    wrong_gpus = any(" GPU instead of " in reason and " offers " in reason for reason in state["reasons"])
    return bool(state["unexpected"]) or wrong_gpus or table.get("via") == "import"


def problem(state: t.Mapping[str, t.Any], table: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any], node: str, waited: float) -> Problem:
    """The most telling problem of a cluster that is not ready."""
    planned = list(plan.get("nodes") or [])
    expected = f"exactly {', '.join(planned)} alive in Ray, {plan.get('gpus') or len(planned) * (plan.get('gpus_per_node') or 0)} GPU"
    found = "; ".join(state["reasons"]) or "no node"
    details = {"missing": state["missing"], "unexpected": state["unexpected"], "nodes": state["nodes"], "waited": round(waited, 1)}
    if table.get("via") == "import":
        return Problem(
            "RAY-02", node=node, stage="ray", found=found, expected="an image with Ray", remedy="choose an image with Ray", **details
        )
    if state["unexpected"] and state["missing"]:
        remedy = (
            f"if {', '.join(state['unexpected'])} is one of our nodes, it registered under the wrong address: give `ray start` "
            "--node-ip-address and the "
            "container VLLM_HOST_IP of its fabric address and recreate it (--tags ray); otherwise a foreign node joined this head"
        )
        return Problem("RAY-01", node=node, stage="ray", found=found, expected=expected, remedy=remedy, **details)
    if state["unexpected"]:
        remedy = f"stop Ray on {', '.join(state['unexpected'])}, or give this cluster another port (spark_ray_port)"
        return Problem("RAY-05", node=node, stage="ray", found=found, expected=expected, remedy=remedy, **details)
    waiting = f" after {waited:.0f} s" if waited >= 1 else ""
    if not state["nodes"]:
        remedy = "see the log of the Ray container on the head"
        return Problem(
            "RAY-13", node=node, stage="ray", found=f"no Ray cluster{waiting}: {found}", expected=expected, remedy=remedy, **details
        )
    if state["missing"]:
        remedy = f"see the log of the Ray container on {', '.join(state['missing'])}, and that it reaches the head's port over the fabric"
        return Problem("RAY-13", node=node, stage="ray", found=f"{found}{waiting}", expected=expected, remedy=remedy, **details)
    if any("is reserved" in reason for reason in state["reasons"]):
        remedy = (
            "a server still holds it, or one that ended uncleanly did not give it back: stop the server, or recreate "
            "the Ray containers (--tags ray)"
        )
        return Problem("RAY-12", node=node, stage="ray", found=f"{found}{waiting}", expected="every GPU free", remedy=remedy, **details)
    remedy = "recreate the Ray containers of all nodes (--tags ray)"
    return Problem("RAY-07", node=node, stage="ray", found=f"{found}{waiting}", expected=expected, remedy=remedy, **details)
