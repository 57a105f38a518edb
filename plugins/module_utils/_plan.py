# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of one serving gang: what every node has to run, and why it must not be tried.

PRIVATE to the collection. Pure functions over plain data: ``settings`` (the ``spark_*`` inputs without their prefix),
and one ``member`` for each node: ``{name, head: bool, address, node: node_info, fabric: nccl_interface_info}``.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import math
import os
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import (
    _fabric_path,
    _layers,
    _service,
    _tenants,
    _topology,
    _transport,
)
from ansible_collections.dgxspark.serving.plugins.module_utils._image import local_reference
from ansible_collections.dgxspark.serving.plugins.module_utils._previous import NEXT, SUFFIX
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._snapshot import is_plain

LABEL = "dgxspark.serving"
RAY, VLLM = _service.RAY, _service.VLLM  # the roles; the names have that of the service behind it
TMP_VOLUME = "spark-tmp"  # and a suffix for each Ray cluster: the previous one keeps its own until the new one is proven
MODELS = "/models/hub"
PLAIN_MODEL = "/models/plain"
KERNELS = "/var/cache/kernels"
STATE = _service.STATE
CONFIG = "/etc/vllm"  # VLLM_CONFIG_ROOT, where vLLM looks for its file of variables that the ranks do not take from the head
RECORD = _service.record()  # of service_stop: what has been stopped for a server that is not proven yet

# Seconds. Above any limit of ours, and fixed, so that another spark_ready_timeout does not replace the containers (RDY-01).
ENGINE_READY_TIMEOUT = "86400"

# Ray's own ports, pinned so that they can be checked before the start and never collide (RAY-06). Offsets are ours.
RAY_PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "runtime-env-agent-port": 6382,
    "dashboard-agent-grpc-port": 6383,
    "dashboard-agent-listen-port": 6384,
    "metrics-export-port": 6385,
}
RAY_WORKER_PORTS = (20002, 20999)
# Bytes, and share of a node's memory, that must be available beside an old service for Ray to be started before that is stopped. Ray's own processes
# take 0.6 GiB on the lab's head; more than a tenth is left so that no OOM daemon (earlyoom's own default is a tenth) takes the old service for it.
RAY_ROOM = 4 << 30
RAY_ROOM_SHARE = 0.15
SYSTEM_PORT = 45000  # one of those that Linux gives to who asks for any (32768 to 60999)

# Arguments of "vllm serve" for what stands in front of a server; with them nothing here could ask it. All --ssl-* are such, too.
IN_FRONT = ("--api-key", "--uds")

# Arguments of "vllm serve" that place the ranks of the executor mp.
MP_FLAGS = ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless")
# Those that place data parallel engines. The modes with a balancer of somebody else are left out: one endpoint is what is proven.
DP_FLAGS = (
    *(
        "--data-parallel-size",
        "-dp",
        "--data-parallel-size-local",
        "-dpl",
        "--data-parallel-rank",
        "-dpn",
        "--data-parallel-start-rank",
        "-dpr",
    ),
    *("--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp", "--data-parallel-backend", "-dpb"),
    *("--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-multi-port-external-lb"),
)


def own_names(settings: dict[str, t.Any]) -> tuple[str, ...]:
    """The names of the containers of this service, also of those that are set aside or not started yet."""
    names = [_service.own(role, settings["service"]) for role in (RAY, VLLM)]
    return tuple(name + ending for ending in ("", SUFFIX, NEXT) for name in names)


def digest(value: t.Any) -> str:
    """sha256 over canonical JSON: the identity of a container definition."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def repo_folder(repo_id: str) -> str:
    """``org/name`` as the Hugging Face cache names it."""
    return "models--" + repo_id.replace("/", "--")


def snapshot_path(settings: dict[str, t.Any], revision: str) -> str:
    """The model inside the containers."""
    if is_plain(settings["model"]):
        name = os.path.basename(settings["model"].rstrip("/"))
        return f"{PLAIN_MODEL}/{name}" if name.lower().endswith(".gguf") else PLAIN_MODEL
    return f"{MODELS}/{repo_folder(settings['model'])}/snapshots/{revision}"


# --- rules ---------------------------------------------------------------------------------------------------------------


def input_problems(settings: dict[str, t.Any], members: list[dict[str, t.Any]]) -> list[Problem]:
    """What is wrong with the inventory itself, before any node is asked."""
    problems: list[Problem] = []
    heads = [m["name"] for m in members if m["head"]]
    if len(heads) != 1:
        problems.append(
            Problem(
                "input", found=f"{len(heads)} hosts in the group ray_head", expected="exactly one", remedy="correct the inventory's groups"
            )
        )
    seen: dict[str, str] = {}
    for member in members:
        address = member["address"]
        try:
            parsed = ipaddress.IPv4Address(address)
        except ValueError:
            problems.append(
                Problem(
                    "RAY-09",
                    node=member["name"],
                    found=f"spark_fabric_address {address!r}",
                    expected="the node's own IPv4 address on the fabric, without a prefix length",
                    remedy="set spark_fabric_address for this host, for example 192.168.200.12",
                )
            )
            continue
        subnet = settings.get("fabric_subnet")
        if subnet and parsed not in ipaddress.ip_network(subnet, strict=False):
            problems.append(
                Problem(
                    "RAY-09",
                    node=member["name"],
                    found=f"spark_fabric_address {address}",
                    expected=f"an address inside spark_fabric_subnet {subnet}",
                    remedy="correct one of the two in the inventory",
                )
            )
        if address in seen:
            problems.append(
                Problem(
                    "RAY-10",
                    node=member["name"],
                    found=f"spark_fabric_address {address}, which {seen[address]} has too",
                    expected="a different address on every node",
                    remedy="correct spark_fabric_address of one of them",
                )
            )
        seen[address] = member["name"]
    problems += parallel_problems(settings, len(members))
    return problems


def parallel_problems(settings: dict[str, t.Any], nodes: int) -> list[Problem]:
    """Tensor × pipeline × data parallel size must be the number of GPUs of the inventory (RAY-03); whole engines on a node or whole nodes in an engine."""
    each = settings["gpus_per_node"]
    gpus = nodes * each
    engine = settings["tensor_parallel"] * settings["pipeline_parallel"]
    wanted = engine * settings["data_parallel"]
    sizes = f"spark_tensor_parallel {settings['tensor_parallel']} x spark_pipeline_parallel {settings['pipeline_parallel']}"
    sizes += f" x spark_data_parallel {settings['data_parallel']}" if settings["data_parallel"] > 1 else ""
    if wanted != gpus:
        return [
            Problem(
                "RAY-03",
                found=f"{sizes} = {wanted} ranks",
                expected=f"{gpus} ranks, one for each GPU of the inventory ({nodes} nodes x spark_gpus_per_node {each})",
                remedy="set spark_tensor_parallel so that the product is the number of GPUs, or correct the inventory's hosts",
            )
        ]
    if settings["data_parallel"] > 1 and engine % each and each % engine:
        return [
            Problem(
                "RAY-03",
                found=f"{sizes}, engines of {engine} GPUs on nodes with {each}",
                expected="engines that divide a node, or that take whole nodes",
                remedy="choose spark_tensor_parallel x spark_pipeline_parallel as a divisor or a multiple of spark_gpus_per_node",
            )
        ]
    return []


def spans_nodes(settings: dict[str, t.Any]) -> bool:
    """Whether one engine has ranks on several nodes."""
    return bool(settings["tensor_parallel"] * settings["pipeline_parallel"] > settings["gpus_per_node"])


def layers_problem(settings: dict[str, t.Any], config: dict[str, t.Any] | None) -> Problem | None:
    """Every stage of a pipeline needs a layer, and VLLM_PP_LAYER_PARTITION must deal out exactly the model's (pp-layers)."""
    stages = settings["pipeline_parallel"]
    layers = _layers.count(config)
    given = str(settings["env"].get("VLLM_PP_LAYER_PARTITION") or "")
    if stages == 1 or not layers:
        return None
    told = f"spark_pipeline_parallel {stages}"
    if given and _layers.partition(given, layers, stages) is None:
        return Problem(
            "pp-layers",
            stage="model",
            found=f"{told} and VLLM_PP_LAYER_PARTITION {given} in spark_env for a model with {layers} layers ({settings['model']})",
            expected=f"{stages} numbers, one for each stage, whose sum is {layers}",
            remedy="correct it, or leave it out: vLLM then deals the layers out evenly",
        )
    if stages > layers:
        return Problem(
            "pp-layers",
            stage="model",
            found=f"{told} and a model with {layers} layers ({settings['model']})",
            expected=f"at most {layers} stages, each with a layer",
            remedy="choose a smaller spark_pipeline_parallel, with spark_tensor_parallel or spark_data_parallel for the rest",
        )
    return None


def engines_problem(settings: dict[str, t.Any], config: dict[str, t.Any] | None) -> Problem | None:
    """Engines over several nodes without Ray: in vLLM 0.32 those of a model without experts all look for the head's address and hang (dp-nodes)."""
    if settings["data_parallel"] == 1 or settings["executor"] != "mp" or not spans_nodes(settings):
        return None
    if not config or _layers.is_moe(config):
        return None
    return Problem(
        "dp-nodes",
        stage="model",
        found=f"spark_executor mp with spark_data_parallel {settings['data_parallel']}, engines over several nodes, "
        f"and a model without experts ({settings['model']})",
        expected="spark_executor ray, or engines that fit on one node each",
        remedy="set spark_executor: ray, or lower spark_tensor_parallel x spark_pipeline_parallel to spark_gpus_per_node",
    )


def heads_problem(settings: dict[str, t.Any], config: dict[str, t.Any] | None) -> Problem | None:
    """The tensor parallel size must divide the model's attention heads (VLL-04). ``config`` is config.json, where some models have a number for
    each layer; what is no number tells nothing.
    """
    text = (config or {}).get("text_config") or config or {}
    told = text.get("num_attention_heads") if isinstance(text, dict) else None
    layers = [n for n in (told if isinstance(told, list) else [told]) if isinstance(n, int) and n > 0]
    heads = math.gcd(*layers)
    size = settings["tensor_parallel"]
    if heads % size == 0:
        return None
    allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    return Problem(
        "VLL-04",
        stage="model",
        found=f"spark_tensor_parallel {size} and a model with {' or '.join(map(str, sorted(set(layers))))} attention heads ({settings['model']})",
        expected=f"a size that divides the heads: {allowed}",
        remedy="choose another spark_tensor_parallel (and number of nodes), or use spark_pipeline_parallel for the rest",
    )


def ray_ports(settings: dict[str, t.Any], head: bool) -> list[int]:
    """The ports of Ray's own services on a node."""
    if settings["executor"] != "ray":
        return []
    return [*([settings["ray_port"]] if head else []), *ray_node_ports(settings).values()]


def ray_node_ports(settings: dict[str, t.Any]) -> dict[str, int]:
    """RAY_PORTS of this service."""
    return {name: port + settings["port_offset"] for name, port in RAY_PORTS.items()}


def ray_worker_ports(settings: dict[str, t.Any]) -> tuple[int, int]:
    """RAY_WORKER_PORTS of this service: as many for each, so ten times the offset."""
    first, last = RAY_WORKER_PORTS
    return first + 10 * settings["port_offset"], last + 10 * settings["port_offset"]


def open_ports(settings: dict[str, t.Any], head: bool) -> list[int]:
    """What the other nodes must reach there: the services of the executor, and one of those that Gloo, NCCL and vLLM get from the system."""
    if settings["executor"] == "mp":
        # on the head vLLM's, on the others that of the unit for the boot (see _calls)
        return [*(mp_ports(settings, head) or [settings["mp_port"]]), SYSTEM_PORT]
    return [*ray_ports(settings, head), *ray_worker_ports(settings), SYSTEM_PORT]


def mp_ports(settings: dict[str, t.Any], head: bool) -> list[int]:
    """The ports at which the ranks of the executor mp meet on a node."""
    if settings["executor"] != "mp" or not head:
        return []
    return [settings["mp_port"], *([settings["dp_port"]] if settings["data_parallel"] > 1 else [])]


def node_claims(settings: dict[str, t.Any], member: dict[str, t.Any]) -> list[dict[str, t.Any]]:
    """Who holds what we need on this node; see ``_tenants.claims``."""
    ports = [settings["api_port"]] if member["head"] else []
    ports += ray_ports(settings, member["head"])
    ports += mp_ports(settings, member["head"])
    # The old service listens on both nodes, so the API port is looked at on workers too.
    if settings["api_port"] not in ports:
        ports.append(settings["api_port"])
    return _tenants.claims(member["node"], settings["stop"], ports, LABEL, settings["service"])


def port_spans(settings: dict[str, t.Any], head: bool) -> list[tuple[int, int]]:
    """The ports that this service uses on a node, as (first, last)."""
    single = [*([settings["api_port"]] if head else []), *ray_ports(settings, head), *mp_ports(settings, head)]
    if settings["executor"] == "mp" and not head:  # that of the unit for the boot
        single.append(settings["mp_port"])
    return [*((port, port) for port in single), *([ray_worker_ports(settings)] if settings["executor"] == "ray" else [])]


def free_offset(settings: dict[str, t.Any], members: list[dict[str, t.Any]], others: dict[str, dict[str, t.Any]]) -> int | None:
    """The first offset with which nothing but the API port can meet another service."""
    base = {name: settings[name] - settings["port_offset"] for name in ("ray_port", "mp_port", "dp_port")}
    for offset in range(0, _service.MOST + 1, _service.STEP):
        moved = {**settings, **{name: port + offset for name, port in base.items()}, "port_offset": offset}
        apart = {(settings["api_port"],) * 2}
        if not any(
            _service.meet(set(port_spans(moved, m["head"])) - apart, other["nodes"].get(m["name"], []))
            for m in members
            for other in others.values()
        ):
            return offset
    return None


def named_ports(settings: dict[str, t.Any]) -> dict[str, tuple[int, int]]:
    """What each port of this service on the head is called, with (first, last)."""
    single = {"spark_api_port": settings["api_port"]}
    if settings["executor"] == "mp":
        single["spark_mp_port"] = settings["mp_port"]
        if settings["data_parallel"] > 1:
            single["spark_dp_port"] = settings["dp_port"]
        return {name: (port, port) for name, port in single.items()}
    single["spark_ray_port"] = settings["ray_port"]
    single |= {f"Ray's {name}": port for name, port in ray_node_ports(settings).items()}
    return {**{name: (port, port) for name, port in single.items()}, "Ray's ports for workers": ray_worker_ports(settings)}


def own_ports(settings: dict[str, t.Any], head: str) -> t.Iterator[Problem]:
    """A port that this service would use twice: the old service would be stopped for a start that cannot succeed (service-ports)."""
    named = list(named_ports(settings).items())
    for place, (name, span) in enumerate(named):
        for other, taken in named[place + 1 :]:
            if span[0] <= taken[1] and taken[0] <= span[1]:
                yield Problem(
                    "service-ports",
                    node=head,
                    stage="preflight",
                    found=f"port {_service.spans([span])} for both {name} and {other}",
                    expected="a port of its own for each",
                    remedy=f"set another {name}" + (f" or {other}" if other.startswith("spark_") else ""),
                )


def service_ports(settings: dict[str, t.Any], members: list[dict[str, t.Any]]) -> t.Iterator[Problem]:
    """The ports that this service uses twice, or that another one of ours uses on the same nodes (service-ports)."""
    for member in members:
        if member["head"]:
            yield from own_ports(settings, member["name"])
    others = _service.beside(members, settings["service"])
    for name, other in others.items():
        for member in members:
            both = _service.meet(port_spans(settings, member["head"]), other["nodes"].get(member["name"], []))
            if not both:
                continue
            offset = free_offset(settings, members, others)
            api = (settings["api_port"],) * 2 in both
            remedies = [f"another spark_api_port than {settings['api_port']}"] if api else []
            if [span for span in both if not api or span != (settings["api_port"],) * 2]:
                remedies.append(f"spark_port_offset: {offset}" if offset is not None else "other ports")
            yield Problem(
                "service-ports",
                node=member["name"],
                stage="preflight",
                found=f"port {_service.spans(both)} of {_service.title(settings['service'])}, which {_service.title(name)} uses too",
                expected="ports of its own for each service",
                remedy=f"set {' and '.join(remedies)} for {_service.title(settings['service'])}",
            )
            break


def service_memory(settings: dict[str, t.Any], members: list[dict[str, t.Any]]) -> t.Iterator[Problem]:
    """The memory that the services of a node take together (service-memory)."""
    others = _service.beside(members, settings["service"])
    share = float(settings["gpu_memory_utilization"])
    for member in members:
        here = {name: other["share"] for name, other in others.items() if member["name"] in other["nodes"] and other["share"] is not None}
        left = round(_service.SHARE - sum(here.values()), 4)
        if here and share > left:
            told = ", ".join(f"{value:g} of {_service.title(name)}" for name, value in here.items())
            yield Problem(
                "service-memory",
                node=member["name"],
                stage="preflight",
                found=f"spark_gpu_memory_utilization {share:g} beside {told}, {share + sum(here.values()):.2f} together",
                expected=f"at most {_service.SHARE:.2f} of the memory for all services of a node",
                remedy=(f"lower it to {left:g} or less" if left >= 0.05 else "lower that of the other")
                + f", or stop the other (playbooks/stop.yml with its variables, spark_service: {next(iter(here), '') or chr(39) * 2})",
            )
            return


def service_unknown(settings: dict[str, t.Any], members: list[dict[str, t.Any]]) -> t.Iterator[dict[str, str]]:
    """Other services on these nodes of whose memory nothing is known here."""
    for name, other in _service.beside(members, settings["service"]).items():
        if other["share"] is None:
            yield {"title": _service.title(name), "nodes": ", ".join(other["nodes"])}


def rail_problems(members: list[dict[str, t.Any]]) -> list[Problem]:
    """Rails are joined by their subnets: one whose subnet no other node has leads nowhere, and NCCL hangs on it (NCL-02)."""
    if len(members) < 2:
        return []
    subnets = {
        m["name"]: {str(rail["subnet"]) for rail in m["fabric"].get("rails", []) if rail.get("active") and rail.get("subnet")}
        for m in members
    }
    problems = []
    for name, own in subnets.items():
        others = set().union(*(value for other, value in subnets.items() if other != name))
        alone = sorted(own - others)
        if alone:
            problems.append(
                Problem(
                    "NCL-02",
                    node=name,
                    stage="preflight",
                    found=f"a rail in {', '.join(alone)}, where no other node has one (theirs: {', '.join(sorted(others)) or 'none'})",
                    expected="rails in the same subnets on every node",
                    remedy="give the same port of every node an address in the same subnet, or name the devices to use in spark_fabric_hcas",
                )
            )
    return problems


def fabric_warnings(members: list[dict[str, t.Any]], settings: dict[str, t.Any] | None = None) -> list[str]:
    """What detection found worth knowing, each with its node; rails that only some nodes have; variables that differ between nodes."""
    told = [f"{m['name']}: {text}" for m in members for text in m["fabric"].get("warnings", [])]
    rails = {m["name"]: m["fabric"].get("rail_count", 0) for m in members}
    if len(set(rails.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rails.items())
        told.append(f"nodes with different numbers of rails ({counts}): NCCL uses what both ends have")
    told += _topology.warnings(members)
    if settings:
        kept = carry_over(settings, members)
        if kept:
            told.append(f"{', '.join(kept)} differ between the nodes: vLLM is told not to give the ranks those of the head")
        note = _topology.gid(settings.get("gid_index") or "", members)[1]
        told += [note] if note else []
    return told


# --- containers ------------------------------------------------------------------------------------------------------------


def environment(settings: dict[str, t.Any], member: dict[str, t.Any], members: list[dict[str, t.Any]]) -> dict[str, str]:
    """Everything explicit on every node, so that nothing baked into an image leaks through (NET-07). Never an empty string."""
    head = next(m for m in members if m["head"])
    addresses = [m["address"] for m in members]
    env: dict[str, str] = {
        **member["fabric"]["env"],
        **_topology.environment(members),
        "NCCL_IB_GID_INDEX": _topology.gid(settings.get("gid_index") or "", members)[0],
        "VLLM_HOST_IP": member["address"],
        "MASTER_ADDR": head["address"],
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_num_prestart_python_workers": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_CACHE": MODELS,
        "VLLM_ENGINE_READY_TIMEOUT_S": ENGINE_READY_TIMEOUT,
        **_transport.NCCL_LOG,
        "VLLM_CACHE_ROOT": f"{KERNELS}/vllm",
        "TRITON_CACHE_DIR": f"{KERNELS}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{KERNELS}/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{KERNELS}/flashinfer",
        "NO_PROXY": ",".join(["localhost", "127.0.0.1", *addresses]),
        "no_proxy": ",".join(["localhost", "127.0.0.1", *addresses]),
    }
    if settings["executor"] == "ray":
        env["RAY_NODE_IP_ADDRESS"] = member["address"]
    env.update({key: str(value) for key, value in settings["env"].items()})
    return {key: value for key, value in sorted(env.items()) if value != ""}


NETWORK = ("NCCL_", "GLOO_", "TP_", "UCX_", "OMPI_MCA_")
NETWORK_NAMES = {"MN_IF_NAME", "VLLM_HOST_IP", "MASTER_ADDR", "RAY_NODE_IP_ADDRESS"}


def fabric_environment(settings: dict[str, t.Any], member: dict[str, t.Any], members: list[dict[str, t.Any]]) -> dict[str, str]:
    """The part of a node's environment that says where its traffic goes."""
    env = environment(settings, member, members)
    where = {name: value for name, value in env.items() if name.startswith(NETWORK) or name in NETWORK_NAMES}
    return {name: value for name, value in where.items() if not name.startswith("NCCL_DEBUG")}


def carry_over(settings: dict[str, t.Any], members: list[dict[str, t.Any]]) -> list[str]:
    """Variables that every rank must keep from its own node although vLLM on Ray would copy the head's; [] when none differ or there is no Ray."""
    return _topology.carry_over([environment(settings, member, members) for member in members]) if settings["executor"] == "ray" else []


def carry_over_file(names: list[str]) -> dict[str, str]:
    """{path, content} of vLLM's list of such variables on the head; {} when it is not needed. Another content is another path, so another definition."""
    if not names:
        return {}
    return {"path": f"{STATE}/ray_env_{digest(names)[:12]}.json", "content": json.dumps(names) + "\n"}


def models_mount(settings: dict[str, t.Any], node: dict[str, t.Any], cache_dir: str) -> str:
    """The volume that holds the model. Of a cache the whole hub, because the links of a snapshot lead out of it (MOD-13)."""
    if not is_plain(settings["model"]):
        return f"{cache_dir}/hub:{MODELS}:ro"
    path = in_home(settings["model"].rstrip("/"), node)
    return f"{os.path.dirname(path) if path.lower().endswith('.gguf') else path}:{PLAIN_MODEL}:ro"


def container_base(
    settings: dict[str, t.Any], member: dict[str, t.Any], members: list[dict[str, t.Any]], cache_dir: str, tmp_volume: str = ""
) -> dict[str, t.Any]:
    """What all containers have in common (design: host network and IPC, not privileged, restart policy "no").

    ``tmp_volume`` is the volume that the two containers of one Ray cluster share; without it /tmp is the container's own.
    """
    node = member["node"]
    fingerprint = (member.get("image_fingerprint") or (node.get("image") or {}).get("fingerprint") or "unknown")[:12]
    return {
        "image": local_reference(settings["image"]),
        "env": environment(settings, member, members),
        "volumes": [
            *([f"{tmp_volume}:/tmp"] if tmp_volume else []),
            models_mount(settings, node, cache_dir),
            f"{STATE}/kernels/{fingerprint}:{KERNELS}",
        ],
        "network_mode": "host",
        "ipc_mode": "host",
        "devices": ["/dev/infiniband:/dev/infiniband:rwm"] if node.get("infiniband_dev") else [],
        "capabilities": ["IPC_LOCK"],
        "ulimits": [str(limit) for limit in settings["ulimits"]],
        "restart_policy": "no",
        "stop_timeout": 60,
    }


def finish(definition: dict[str, t.Any], settings: dict[str, t.Any], revision: str, role: str, extra: str = "") -> dict[str, t.Any]:
    """Adds the labels; the definition's digest decides whether a running container is the planned one."""
    labels = {
        LABEL: "1",
        **({f"{LABEL}.service": settings["service"]} if settings["service"] else {}),
        f"{LABEL}.role": role,
        f"{LABEL}.model": settings["model"],
        f"{LABEL}.revision": revision,
        f"{LABEL}.served_model_name": settings["served_model_name"],
        f"{LABEL}.definition": digest([definition, extra]),
    }
    return {**definition, "labels": labels}


def ray_container(
    settings: dict[str, t.Any],
    member: dict[str, t.Any],
    members: list[dict[str, t.Any]],
    cache_dir: str,
    image_fingerprint: str,
    tmp_volume: str = TMP_VOLUME,
) -> dict[str, t.Any]:
    """``spark-ray`` of one node. The same whatever model is served, so that another model does not replace Ray."""
    head = next(m for m in members if m["head"])
    command = ["start", "--block", f"--node-ip-address={member['address']}"]
    if member["head"]:
        command += ["--head", f"--port={settings['ray_port']}", "--include-dashboard=false"]
    else:
        command += [f"--address={head['address']}:{settings['ray_port']}"]
    command += [
        f"--num-gpus={settings['gpus_per_node']}",
        f"--num-cpus={settings['ray_num_cpus']}",
        f"--object-store-memory={settings['ray_object_store_memory']}",
        "--disable-usage-stats",
        *[f"--{name}={port}" for name, port in ray_node_ports(settings).items()],
        f"--min-worker-port={ray_worker_ports(settings)[0]}",
        f"--max-worker-port={ray_worker_ports(settings)[1]}",
    ]
    definition = {
        "name": _service.own(RAY, settings["service"]),
        "entrypoint": ["ray"],
        "command": command,
        **container_base(settings, member, members, cache_dir, tmp_volume),
    }
    return finish(definition, settings, "", "head" if member["head"] else "worker", image_fingerprint)


def vllm_container(
    settings: dict[str, t.Any],
    member: dict[str, t.Any],
    members: list[dict[str, t.Any]],
    cache_dir: str,
    image_fingerprint: str,
    revision: str,
    tmp_volume: str = TMP_VOLUME,
) -> dict[str, t.Any]:
    """``spark-vllm`` on the head: the API server and engine core; the ranks run inside ``spark-ray`` of each node."""
    command = ["serve", snapshot_path(settings, revision), *vllm_arguments(settings)]
    base = container_base(settings, member, members, cache_dir, tmp_volume)
    # Explicit, or vLLM would start a Ray of its own (RAY-03). Only here: "ray start" must not see it.
    base["env"]["RAY_ADDRESS"] = f"{member['address']}:{settings['ray_port']}"
    if settings["data_parallel"] > 1:
        spread = spans_nodes(settings)  # vLLM's word for an engine over several nodes; else it wants all of its GPUs on one
        base["env"].setdefault("VLLM_RAY_DP_PACK_STRATEGY", "span" if spread else "strict")
        engines = 1 if spread else settings["gpus_per_node"] // (settings["tensor_parallel"] * settings["pipeline_parallel"])
        command += ["--data-parallel-size", str(settings["data_parallel"]), "--data-parallel-size-local", str(engines)]
        command += ["--data-parallel-backend", "ray", "--data-parallel-address", member["address"]]
    own = carry_over_file(carry_over(settings, members))
    if own:
        root = base["env"].setdefault("VLLM_CONFIG_ROOT", CONFIG)
        base["volumes"] = [*base["volumes"], f"{own['path']}:{root}/ray_non_carry_over_env_vars.json:ro"]
    names = {role: _service.own(role, settings["service"]) for role in (VLLM, RAY)}
    definition = {"name": names[VLLM], "entrypoint": ["vllm"], "command": command, **base, "pid_mode": f"container:{names[RAY]}"}
    # the path of a plain model does not say what is there
    extra = image_fingerprint + (revision if is_plain(settings["model"]) else "")
    return finish(definition, settings, revision, "server", extra)


def rank_container(
    settings: dict[str, t.Any],
    member: dict[str, t.Any],
    members: list[dict[str, t.Any]],
    cache_dir: str,
    image_fingerprint: str,
    revision: str,
) -> dict[str, t.Any]:
    """``spark-vllm`` of one node for the executor ``mp``: its ranks, and on the head the API server too. No Ray."""
    head = next(m for m in members if m["head"])
    ranks = [head["name"], *(m["name"] for m in members if not m["head"])]
    arguments = vllm_arguments(settings)
    command = ["serve", snapshot_path(settings, revision), *(arguments if member["head"] else headless(arguments))]
    command += ["--nnodes", str(len(members)), "--node-rank", str(ranks.index(member["name"]))]
    command += ["--master-addr", head["address"], "--master-port", str(settings["mp_port"])]
    if settings["data_parallel"] > 1:  # which engines are on which node, vLLM derives from the node's rank
        command += ["--data-parallel-size", str(settings["data_parallel"])]
        command += ["--data-parallel-address", head["address"], "--data-parallel-rpc-port", str(settings["dp_port"])]
    command += [] if member["head"] else ["--headless"]
    name = _service.own(VLLM, settings["service"])
    definition = {"name": name, "entrypoint": ["vllm"], "command": command, **container_base(settings, member, members, cache_dir)}
    extra = image_fingerprint + (revision if is_plain(settings["model"]) else "")
    return finish(definition, settings, revision, "server" if member["head"] else "rank", extra)


def vllm_arguments(settings: dict[str, t.Any]) -> list[str]:
    """Arguments of ``vllm serve`` that we decide, then those of ``spark_vllm_args``. One of ours repeated there is refused."""
    ours: list[tuple[str, t.Any]] = [
        ("--served-model-name", settings["served_model_name"]),
        ("--host", settings["api_host"]),
        ("--port", settings["api_port"]),
        ("--tensor-parallel-size", settings["tensor_parallel"]),
        ("--pipeline-parallel-size", settings["pipeline_parallel"] if settings["pipeline_parallel"] > 1 else None),
        ("--distributed-executor-backend", settings["executor"]),
        ("--gpu-memory-utilization", settings["gpu_memory_utilization"]),
        ("--max-model-len", settings["max_model_len"] or None),
    ]
    arguments: list[str] = []
    for flag, value in ours:
        if value is not None:
            arguments += [flag, str(value)]
    reserved = {flag for flag, _value in ours} | {"--model", "-tp", "-pp", *MP_FLAGS, *DP_FLAGS}
    for extra in settings["vllm_args"]:
        given = str(extra).split("=", 1)[0]
        flag = given.replace("_", "-") if given.startswith("--") else given  # vLLM takes both spellings
        if flag in IN_FRONT or flag.startswith("--ssl-"):
            raise Problem(
                "input",
                found=f"{given} in spark_vllm_args",
                expected="a server that answers this run over HTTP without a key (an argument is visible to everybody on the node, too)",
                remedy="leave it out, and put a gateway that asks for keys or speaks TLS in front (docs/several-models.md)",
            )
        if flag == "--hf-token":
            raise Problem(
                "input",
                found=f"{given} in spark_vllm_args",
                expected="no secrets there: arguments are visible in docker inspect and to everybody on the node",
                remedy="use spark_hf_token_file for a hub token; the server itself loads from the disk and needs none",
            )
        if flag in reserved:
            raise Problem(
                "input",
                found=f"{given} in spark_vllm_args",
                expected="only arguments that have no variable of their own",
                remedy=f"use the variable instead ({variable_for(flag)})",
            )
        arguments.append(str(extra))
    return arguments


def headless(arguments: t.Sequence[str]) -> list[str]:
    """Those arguments that a node without an API may have: vLLM refuses a number of API servers there."""
    kept: list[str] = []
    value = False
    for word in arguments:
        flag = word.partition("=")[0].replace("_", "-")
        if not value and flag not in ("--api-server-count", "-asc"):
            kept.append(word)
        value = not value and flag in ("--api-server-count", "-asc") and "=" not in word
    return kept


def variable_for(flag: str) -> str:
    """The inventory variable behind an argument of ``vllm serve`` that we set ourselves."""
    return {
        "--served-model-name": "spark_served_model_name",
        "--host": "spark_api_host",
        "--port": "spark_api_port",
        "--tensor-parallel-size": "spark_tensor_parallel",
        "-tp": "spark_tensor_parallel",
        "--pipeline-parallel-size": "spark_pipeline_parallel",
        "-pp": "spark_pipeline_parallel",
        "--distributed-executor-backend": "spark_executor",
        "--gpu-memory-utilization": "spark_gpu_memory_utilization",
        "--max-model-len": "spark_max_model_len",
        "--model": "spark_model",
        "--master-port": "spark_mp_port",
        **dict.fromkeys(("--data-parallel-size", "-dp"), "spark_data_parallel"),
        **dict.fromkeys(("--data-parallel-rpc-port", "-dpp"), "spark_dp_port"),
        **dict.fromkeys(("--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa"), "spark_data_parallel"),
        **dict.fromkeys(("--data-parallel-backend", "-dpb"), "spark_data_parallel, and spark_executor"),
        **dict.fromkeys(
            ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--headless"), "spark_executor, and the inventory's hosts"
        ),
    }.get(flag, "none: not supported yet")


def running_as_planned(node: dict[str, t.Any], definition: dict[str, t.Any]) -> bool:
    """True if the node runs exactly this container: same definition, same image, running (a paused one does not)."""
    for container in node["containers"]:
        if container["name"] == definition["name"]:
            runs = container["running"] and container.get("state", "running") == "running"
            return bool(runs) and container["labels"].get(f"{LABEL}.definition") == definition["labels"][f"{LABEL}.definition"]
    return False


def own_containers(settings: dict[str, t.Any], node: dict[str, t.Any]) -> dict[str, dict[str, t.Any]]:
    """The containers of this service on a node by their role, whoever made them; not those that are set aside."""
    roles = {_service.own(role, settings["service"]): role for role in (RAY, VLLM)}
    return {roles[c["name"]]: c for c in node["containers"] if c["name"] in roles}


def running_version(settings: dict[str, t.Any], members: list[dict[str, t.Any]]) -> str:
    """The executor of a version of ours that runs on the whole gang ("" when none does, or only a part of one)."""
    runs = {
        m["name"]: {role for role, c in own_containers(settings, m["node"]).items() if c["running"] and _tenants.is_own(c, LABEL)}
        for m in members
    }
    if all(runs[m["name"]] == ({RAY, VLLM} if m["head"] else {RAY}) for m in members):
        return "ray"
    return "mp" if all(names == {VLLM} for names in runs.values()) else ""


def has_record(node: dict[str, t.Any], service: str = "") -> bool:
    """Whether an earlier run stopped a service here and never came to the point where its own server was proven."""
    path = _service.record(service)
    return bool(node.get("disks", {}).get(path, {}).get("checked") == path)


def container_diff(node: dict[str, t.Any], definition: dict[str, t.Any]) -> dict[str, t.Any]:
    """Check mode: what creating this container would mean. {changed, actions, before, after}; before/after are what ``--diff`` shows."""
    present = next((c for c in node["containers"] if c["name"] == definition["name"]), None)
    before = {key: present.get(key) for key in ("name", "id", "image", "state", "labels")} if present else {}
    if present and running_as_planned(node, definition):
        return {"changed": False, "actions": [], "before": before, "after": before}
    verb = "would replace" if present else "would create"
    what = f"{verb} container {definition['name']}: {' '.join([*definition['entrypoint'], *definition['command']])}"
    after = {**definition, "privileged": False}
    if any("/kernels/unknown:" in volume for volume in definition["volumes"]):  # the image is not there yet
        after["volumes"] = [volume.replace("/unknown:", "/(fingerprint of the image):") for volume in definition["volumes"]]
        after["labels"] = {**definition["labels"], f"{LABEL}.definition": "(known with the image)"}
    return {"changed": True, "actions": [what], "before": before, "after": after}


# Results that the stages register, in their order: what each did, or in check mode would do.
RESULTS = (
    "image_sync_head",
    "model_download_snapshot",
    "image_sync_worker",
    "model_sync_result",
    "stop_service_result",
    "ray_cluster_planned",
    "vllm_server_memory",
    "vllm_server_planned",
    "boot_active",
)


def outline(names: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> list[str]:
    """What the stages of a check-mode run would do, as sentences with their node."""
    told = []
    for result in RESULTS:
        for name in names:
            found = hostvars[name].get(result) or {}
            told += [f"{name}: {text if text.startswith('would ') else 'would ' + text}" for text in found.get("actions", [])]
    return told


def later_facts(found: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What the stages after preflight learned of this node: its image and its snapshot now."""
    facts: dict[str, t.Any] = {}
    for name in ("image_sync_head", "image_sync_worker"):
        image = (found.get(name) or {}).get("image")
        if image:
            facts["image"] = image
    for name in ("model_download_snapshot", "model_sync_result"):
        result = found.get(name) or {}
        if result.get("snapshot"):
            verified = bool(result["snapshot"].get("verified"))
            facts["snapshot"] = {**result["snapshot"], "complete": verified, "manifest_digest": result.get("manifest_digest")}
    if "content" in (found.get("model_download_config") or {}) and "snapshot" in facts:
        facts["snapshot"]["config"] = json.loads(base64.b64decode(found["model_download_config"]["content"]))
    return facts


def members(groups: t.Mapping[str, t.Any], hostvars: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """The nodes of the inventory with the facts that preflight registered; the head first. All or none: a plan over a part of
    the gang would be wrong."""
    result: list[dict[str, t.Any]] = []
    for group in ("ray_head", "ray_workers"):
        for name in groups.get(group, []):
            found = hostvars[name]
            if "preflight_node" not in found or "node" not in found["preflight_node"] or "fabric" not in found.get("preflight_fabric", {}):
                raise Problem(
                    "gang-incomplete",
                    node=name,
                    stage="preflight",
                    found="no facts of this node in this run",
                    expected="the whole gang in one run",
                    remedy="run without --limit; the groups ray_head and ray_workers always go together",
                )
            result.append(
                {
                    "name": name,
                    "head": group == "ray_head",
                    "address": found["preflight_inputs"]["settings"]["fabric_address"],
                    "settings": found["preflight_inputs"]["settings"],
                    "node": {**found["preflight_node"]["node"], **later_facts(found)},
                    "fabric": found["preflight_fabric"]["fabric"],
                }
            )
    return result


# --- the whole ---------------------------------------------------------------------------------------------------------------


def cache_dir_of(settings: dict[str, t.Any], node: dict[str, t.Any]) -> str:
    """``spark_model_cache`` on this node."""
    return in_home(settings["model_cache"], node)


def in_home(path: str, node: dict[str, t.Any]) -> str:
    """A path on this node; ``~`` is the login user's home there, never the controller's (MOD-07)."""
    if path == "~" or path.startswith("~/"):
        return node["user"]["home"] + path[1:]
    return path


def gang_state(settings: dict[str, t.Any], members: list[dict[str, t.Any]]) -> dict[str, t.Any]:
    """What is already in place over all nodes: the facts by which later stages skip what is done."""
    images = {m["name"]: m["node"].get("image") or {} for m in members}
    prints = {name: image.get("fingerprint") if image.get("present") else None for name, image in images.items()}
    snapshots = {m["name"]: m["node"].get("snapshot") or {} for m in members}
    head = next(m for m in members if m["head"])
    digests = {s.get("manifest_digest") if s.get("complete") and s.get("verified") else None for s in snapshots.values()}
    return {
        "image_fingerprint": prints[head["name"]] or "",
        "image_in_sync": len(set(prints.values())) == 1 and None not in prints.values(),
        "image_missing": [name for name, value in prints.items() if value is None or value != prints[head["name"]]],
        "revision": snapshots[head["name"]].get("revision") or "",
        "snapshot_on_head": bool(snapshots[head["name"]].get("complete") and snapshots[head["name"]].get("verified")),
        "snapshot_in_sync": len(digests) == 1 and None not in digests,
    }


def gang_containers(
    settings: dict[str, t.Any], members: list[dict[str, t.Any]], image_fingerprint: str, revision: str
) -> dict[str, dict[str, t.Any]]:
    """The definitions of all containers, by node and name."""
    cache = {m["name"]: cache_dir_of(settings, m["node"]) for m in members}
    if settings["executor"] == "mp":
        return {m["name"]: {VLLM: rank_container(settings, m, members, cache[m["name"]], image_fingerprint, revision)} for m in members}
    # The name of the volume says which cluster it belongs to, so that two versions never share one.
    clusters = [ray_container(settings, m, members, cache[m["name"]], image_fingerprint)["labels"][f"{LABEL}.definition"] for m in members]
    volume = f"{TMP_VOLUME}{_service.ending(settings['service'])}-{digest(clusters)[:12]}"
    result: dict[str, dict[str, t.Any]] = {}
    for member in members:
        arguments = (settings, member, members, cache[member["name"]], image_fingerprint)
        result[member["name"]] = {RAY: ray_container(*arguments, volume)}
        if member["head"]:
            result[member["name"]][VLLM] = vllm_container(*arguments, revision, volume)
    return result


def ray_beside(settings: dict[str, t.Any], members: list[dict[str, t.Any]]) -> bool:
    """Whether Ray can be started, and proven, while an old service still serves: it takes no port and little memory of the nodes."""
    if settings["executor"] != "ray":
        return False
    for member in members:
        node = member["node"]
        memory = node.get("memory") or {}
        if int(memory.get("available") or 0) < max(RAY_ROOM, RAY_ROOM_SHARE * int(memory.get("total") or 0)):
            return False
        spans = [span for span in port_spans(settings, member["head"]) if span != (settings["api_port"],) * 2]
        held = [int(entry.get("port") or 0) for entry in node.get("listeners") or []]
        if node.get("listeners_error") or any(first <= port <= last for first, last in spans for port in held):
            return False
    return True


def serving_plan(
    settings: dict[str, t.Any], members: list[dict[str, t.Any]], image_fingerprint: str = "", revision: str = ""
) -> dict[str, t.Any]:
    """The containers of every node and what of it already runs. ``image_fingerprint`` and ``revision`` come from the
    stages before; without them (a first look, check mode) those of the nodes are taken."""
    state = gang_state(settings, members)
    image_fingerprint = image_fingerprint or state["image_fingerprint"] or "unknown"
    revision = revision or state["revision"] or settings["model_revision"]
    head = next(m for m in members if m["head"])
    ray = settings["executor"] == "ray"
    members = [{**m, "image_fingerprint": image_fingerprint} for m in members]
    planned = gang_containers(settings, members, image_fingerprint, revision)
    nodes: dict[str, t.Any] = {}
    for member in members:
        containers = planned[member["name"]]
        own = own_containers(settings, member["node"])
        present = {role: role in own for role in (RAY, VLLM)}
        nodes[member["name"]] = {
            "address": member["address"],
            "head": member["head"],
            "cache_dir": cache_dir_of(settings, member["node"]),
            "containers": containers,
            "in_place": {name: running_as_planned(member["node"], d) for name, d in containers.items()},
            "present": present,
            "extra": [name for name, there in present.items() if there and name not in containers],
            "claims": node_claims(settings, member),
            "known": {c["name"]: c["id"] for c in own.values()},
        }
    nothing_extra = not any(n["extra"] for n in nodes.values())
    ray_in_place = not ray or (nothing_extra and all(n["in_place"][RAY] for n in nodes.values()))
    record_left = any(has_record(m["node"], settings["service"]) for m in members)
    stop_needed = any(c["action"] == "stop" for n in nodes.values() for c in n["claims"])
    nothing_ours = not record_left and not any(any(n["present"].values()) for n in nodes.values())
    return {
        **state,
        "image_fingerprint": image_fingerprint,
        "revision": revision,
        "head": head["name"],
        "head_address": head["address"],
        "addresses": [m["address"] for m in members],
        "ray_ports": ray_ports(settings, head=True),
        "ray_worker_ports": list(ray_worker_ports(settings)),
        "beside": {name: sorted(other["nodes"]) for name, other in _service.beside(members, settings["service"]).items()},
        "paths": _fabric_path.paths(members, {m["name"]: [22, *open_ports(settings, m["head"])] for m in members}),
        "gpus": len(members) * settings["gpus_per_node"],
        # Engines of a model without experts have nothing to say to each other.
        "ranks_talk": spans_nodes(settings)
        or (settings["data_parallel"] > 1 and _layers.is_moe((head["node"].get("snapshot") or {}).get("config"))),
        "nodes": nodes,
        "fabric": {
            "topology": _topology.topology(members),
            "env": {m["name"]: fabric_environment(settings, m, members) for m in members},
            "carry_over": carry_over_file(carry_over(settings, members)),
        },
        "tmp_volume": planned[head["name"]][RAY]["volumes"][0].split(":")[0] if ray else "",
        "ray_in_place": ray_in_place,
        "server_in_place": ray_in_place and nothing_extra and all(all(n["in_place"].values()) for n in nodes.values()),
        "server_present": nodes[head["name"]]["present"][VLLM],
        "record_left": record_left,
        # Made for an upgrade whose run was interrupted before it stopped anything.
        "made_left": any(
            c["name"] == _service.own(VLLM, settings["service"]) + NEXT and _tenants.is_own(c, LABEL)
            for m in members
            for c in m["node"]["containers"]
        ),
        # What runs can be come back to: it is whole, and no earlier run left something older to come back to.
        "previous": "" if record_left else running_version(settings, members),
        "stop_needed": stop_needed,
        "ray_beside": stop_needed and nothing_ours and ray_beside(settings, members),
    }
