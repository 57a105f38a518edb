# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which way the ranks of a running server really talk: NCCL's own log of each rank, or its TCP connections where there is no NCCL.

PRIVATE to the collection. Pure functions over text. NCCL 2.8 to 2.31 (the same lines; what is before ``NCCL INFO`` is not looked at).

A rank: ``{rank, world, pid, backend: nccl|gloo|..., transport: ib|socket|tcp|unknown, network (NCCL's own word), devices: {name: channels},
interfaces, rails: [interface], version, reason, evidence}``.
"""

from __future__ import annotations

import ipaddress
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

# In a file for each rank: in the server's log NCCL's lines would drown everything else, and Ray joins lines of several ranks that look alike. The
# folder is the volume that all containers of a node share, new for each Ray cluster. INIT and NET speak when connections are made, not for each
# collective, so it costs nothing while serving; being constant, it is no difference between two definitions.
NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p.log"}
NCCL_FILES = "tmp/nccl.*.{pid}.log"
WORKER_FILES = "tmp/ray/session_2*/logs/worker-*-{pid}.out"
RANK_PROCESS = re.compile(r"^(ray::RayWorker(Wrapper|Proc)|VLLM::Worker)")
# Only the sizes above 1 are in it.
_TITLE = re.compile(r"^VLLM::Worker(?=_(?:DP|PP|TP)\d)(?:_DP(?P<data>\d+))?(?:_PP(?P<pipeline>\d+))?(?:_PCP\d+)?(?:_TP(?P<tensor>\d+))?")

_VERSION = re.compile(r"NCCL version (\d[\w.+-]*)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$")
_IB = re.compile(r"NET/IB : Using (?P<devices>.*?); OOB (?P<interface>[^:\s]*):")
_IB_DEVICE = re.compile(r"\[(\d+)\]([^:\s]+):(\d+)/\w+")
_VIRTUAL = re.compile(r"NET/IB : Made virtual device \[(\d+)\] name=(\S+)")
_SOCKET = re.compile(r"NET/Socket : Using (?P<devices>\[.*)$")
_SOCKET_DEVICE = re.compile(r"\[(\d+)\]([^:\s]+):")
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\] \[(?:send|receive)\] via NET/(.+?)/(\d+)")
_OVERRIDE = re.compile(r"Subnet-aware routing: overriding dev (\d+) with dev (\d+)")
_INIT = re.compile(r"comm \S+ rank (\d+) nranks (\d+)")
_WHY_NOT = re.compile(r"(NET/IB : No device found|Failed to open libibverbs\S*|Failed to initialize NET plugin IB)|NCCL WARN (.+?)\s*$")
_WORKER = re.compile(r"world_size=(\d+) rank=(\d+) local_rank=\d+ distributed_init_method=\S+ backend=(\w+)")


def kind_of(network: str) -> str:
    """``ib`` (also of NVIDIA's plugin, ``IBext_v10``), ``socket``, or the name of another plugin; "" for none."""
    if network.startswith("IB"):
        return "ib"
    return "socket" if network in ("Socket", "FastSocket") else network


def parse_nccl(text: str) -> dict[str, t.Any]:
    """{version, network, rank, nranks, interface, devices: {name: channels}, listed, reason} from the INFO log of one rank.

    ``devices`` are those that channels really go over; ``listed`` what NCCL found. An InfiniBand or RoCE device is ``name:port``, a socket the name of
    its interface. ``reason`` is what NCCL says about RDMA that it does not use, or its last warning.
    """
    version, network, interface, reason = "", "", "", ""
    rank, nranks = None, 0
    ib: dict[int, str] = {}
    ports: dict[str, str] = {}
    virtual: dict[int, list[str]] = {}
    sockets: dict[int, str] = {}
    instead: dict[int, int] = {}
    channels: dict[tuple[str, int], int] = {}
    for line in text.splitlines():
        if found := _VERSION.search(line):
            version = found[1]
        elif found := _NETWORK.search(line):
            network = found[1]
        elif found := _IB.search(line):
            interface = found["interface"]
            for index, name, port in _IB_DEVICE.findall(found["devices"]):
                ib[int(index)] = ports[name] = f"{name}:{port}"
        elif found := _VIRTUAL.search(line):
            virtual[int(found[1])] = found[2].split("+")
        elif found := _SOCKET.search(line):
            sockets = {int(index): name for index, name in _SOCKET_DEVICE.findall(found["devices"])}
            interface = interface or next(iter(sockets.values()), "")
        elif found := _CHANNEL.search(line):
            key = (found[1], int(found[2]))
            channels[key] = channels.get(key, 0) + 1
        elif found := _OVERRIDE.search(line):
            instead[int(found[1])] = int(found[2])
        elif (found := _INIT.search(line)) and int(found[2]) >= nranks:
            rank, nranks = int(found[1]), int(found[2])
        elif found := _WHY_NOT.search(line):
            reason = found[1] or found[2]
    devices: dict[str, int] = {}
    for (name, index), count in channels.items():
        index = instead.get(index, index)
        if kind_of(name) == "socket":
            used = [sockets.get(index, f"{name}/{index}")]
        else:
            used = [ports.get(part, part) for part in virtual.get(index) or [ib.get(index, f"{name}/{index}")]]
        for device in used:
            devices[device] = devices.get(device, 0) + count
    networks = sorted({name for name, _index in channels}, key=lambda name: kind_of(name) == "ib")  # the worst of them first
    return {
        "version": version,
        "network": networks[0] if networks else network,
        "rank": rank,
        "nranks": nranks,
        "interface": interface,
        "devices": devices,
        "listed": sorted(ib.values()) if ib else sorted(sockets.values()),
        "reason": reason,
    }


def parse_worker(text: str, title: str = "", maps: str = "", sizes: tuple[int, int] = (1, 1)) -> dict[str, t.Any]:
    """{rank, world, backend} from what vLLM logs in the process of a rank; else what its title and its libraries say (the executor mp logs elsewhere).

    ``sizes``: tensor and pipeline parallel size. Ranks are counted engine by engine, stage by stage.
    """
    if found := _WORKER.search(text):
        return {"world": int(found[1]), "rank": int(found[2]), "backend": found[3]}
    told: dict[str, t.Any] = {}
    if found := _TITLE.search(title):
        data, pipeline, tensor = (int(found[kind] or 0) for kind in ("data", "pipeline", "tensor"))
        told["rank"] = (data * sizes[1] + pipeline) * sizes[0] + tensor
    if "libtorch" in maps:
        told["backend"] = "nccl" if "libnccl" in maps else "gloo"
    return told


# --- TCP connections of a process


def _address(text: str) -> tuple[str, int]:
    """``0CD2A8C0:1F90`` or its IPv6 form, as in /proc/net/tcp (each word in the byte order of the machine: little)."""
    host, _sep, port = text.partition(":")
    raw = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    parsed = ipaddress.ip_address(raw)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed), int(port, 16)


def parse_tcp(text: str, inodes: t.Container[str]) -> list[dict[str, t.Any]]:
    """The established connections of /proc/net/tcp or tcp6 whose inode is among these: [{local, local_port, remote, remote_port}]."""
    result = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10 or fields[3] != "01" or fields[9] not in inodes:
            continue
        (local, local_port), (remote, remote_port) = _address(fields[1]), _address(fields[2])
        result.append({"local": local, "local_port": local_port, "remote": remote, "remote_port": remote_port})
    return result


def outside(connections: t.Iterable[t.Mapping[str, t.Any]], own: t.Container[str], ray: t.Callable[[int], bool]) -> list[dict[str, t.Any]]:
    """Those connections that leave the node and are not Ray's own."""
    return [
        dict(item)
        for item in connections
        if item["remote"] not in own
        and not ipaddress.ip_address(item["remote"]).is_loopback
        and not ray(item["local_port"])
        and not ray(item["remote_port"])
    ]


# --- one rank


def rank_record(
    pid: int,
    nccl: str | None,
    told: t.Mapping[str, t.Any],
    connections: t.Sequence[t.Mapping[str, t.Any]],
    names: t.Mapping[str, str],
    rails: t.Sequence[t.Mapping[str, t.Any]],
) -> dict[str, t.Any]:
    """A rank from NCCL's log of it (None: there is none), what ``parse_worker`` found, and its connections to other nodes.

    ``names``: interface by address of this node; ``rails`` as in the result of nccl_interface_info.
    """
    record: dict[str, t.Any] = {
        "rank": told.get("rank"),
        "world": told.get("world", 0),
        "pid": pid,
        "backend": told.get("backend", "nccl" if nccl is not None else "unknown"),
        "transport": "unknown",
        "network": "",
        "devices": {},
        "interfaces": [],
        "rails": [],
        "version": "",
        "reason": "",
        "evidence": "nothing: no log of NCCL and no connection to another node",
    }
    if nccl is not None:
        found = parse_nccl(nccl)
        if found["nranks"] > 1 and record["rank"] is None:
            record.update(rank=found["rank"], world=found["nranks"])
        by_device = {f"{rail.get('hca')}:{rail.get('hca_port')}": rail["interface"] for rail in rails if rail.get("hca")}
        by_device.update({str(rail["hca"]): rail["interface"] for rail in rails if rail.get("hca")})  # a plugin of NCCL leaves the port out
        record.update(
            backend="nccl",
            network=found["network"],
            version=found["version"],
            reason=found["reason"],
            devices=found["devices"],
            evidence=f"NCCL's log: {sum(found['devices'].values())} channels over {', '.join(found['devices'])}"
            if found["devices"]
            else "NCCL's log: no channel to another node",
        )
        if found["devices"]:
            used = [by_device.get(name, name if kind_of(found["network"]) == "socket" else "") for name in found["devices"]]
            record.update(
                transport=kind_of(found["network"]),
                interfaces=sorted({name for name in used if name}),
                rails=[rail["interface"] for rail in rails if rail["interface"] in used],
            )
        return record
    if connections and record["backend"] != "nccl":  # beside NCCL, Gloo and the store have connections too: they prove nothing
        used = [names.get(str(item["local"]), str(item["local"])) for item in connections]
        others = ", ".join(sorted({str(item["remote"]) for item in connections}))
        record.update(
            transport="tcp",
            interfaces=sorted(set(used)),
            devices={name: used.count(name) for name in sorted(set(used))},
            rails=[rail["interface"] for rail in rails if rail["interface"] in used],
            evidence=f"{len(connections)} TCP connections of the process to {others} that are not Ray's",
        )
    return record


def describe(record: t.Mapping[str, t.Any], rails: int = 0) -> str:
    """``rank 0: nccl over ib, rocep1s0f1:1 and roceP2p1s0f1:1 (2 of 2 rails)``."""
    rank = "a rank" if record["rank"] is None else f"rank {record['rank']}"
    names = " and ".join(record["devices"] if record["transport"] in ("ib", "socket", "tcp") else [record["network"] or "no device"])
    count = f" ({len(record['rails'])} of {rails} rails)" if record["transport"] == "ib" and rails else ""
    return f"{rank}: {record['backend']} over {record['transport']}" + (f", {names}" if names else "") + count


# --- what it means


def verdict(
    ranks: t.Sequence[t.Mapping[str, t.Any]],
    node: str,
    fabric: t.Mapping[str, t.Any],
    expected: int,
    require_rdma: bool,
    prove: bool = True,
    others: t.Sequence[t.Mapping[str, t.Any]] = (),
) -> list[str]:
    """Warnings about the ranks of a node; raises Problem for what must not serve. ``fabric`` is the result of nccl_interface_info, ``expected`` the number
    of ranks of this node, ``others`` the ranks of the other nodes. ``prove``: what is not known does not meet ``require_rdma``."""
    rails = [rail for rail in fabric.get("rails", []) if rail.get("active")]
    hcas = ", ".join(fabric.get("hcas") or [])
    rdma = f"RDMA ({hcas})" if hcas else "RDMA"

    def refuse(ident: str, found: str, wanted: str, remedy: str) -> Problem:
        return Problem(
            ident, node=node, stage="transport", found=found, expected=wanted, remedy=remedy, ranks=[dict(rank) for rank in ranks]
        )

    warnings: list[str] = []
    silent = [rank for rank in ranks if rank["transport"] == "unknown"]
    if len(ranks) < expected or silent:
        found = (
            f"{len(ranks)} of {expected} rank processes" if len(ranks) < expected else f"{describe(silent[0])} ({silent[0]['evidence']})"
        )
        if require_rdma and prove:
            raise refuse(
                "transport-unknown",
                found,
                f"NCCL's log of every rank, which says that it goes over {rdma}",
                "look into 'docker logs' of the rank's container for why NCCL writes no log; or set spark_require_rdma: false",
            )
        warnings.append(f"{node}: the transport of the ranks is not known: {found}")
    for rank in ranks:
        if require_rdma and rank["transport"] not in ("ib", "unknown"):
            raise refuse(
                "rdma-unused",
                describe(rank) + (f" (NCCL says: {rank['reason']})" if rank["reason"] else ""),
                f"every rank over {rdma}, as spark_require_rdma asks",
                "see that /dev/infiniband is there, that spark_ulimits has memlock:-1:-1, that the image has libibverbs with its mlx5 provider, and that "
                "spark_env sets no NCCL_IB_DISABLE, NCCL_NET or NCCL_IB_HCA; or accept TCP with spark_require_rdma: false",
            )
        usable = {rail["interface"] for rail in fabric.get("rails", [])} | {fabric.get("interface")}
        strange = [name for name in rank["interfaces"] if name not in usable]
        if strange and not set(rank["interfaces"]) & usable:
            raise refuse(
                "NET-01",
                f"{describe(rank)}, not by the fabric",
                f"the ranks' traffic on {fabric.get('interface')}",
                "leave NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME out of spark_env: the detected interface is set",
            )
        if strange:
            warnings.append(f"{node}: {describe(rank)}: {', '.join(strange)} is not the fabric")
        if rank["transport"] == "ib" and len(rank["rails"]) < len(rails):
            unused = [f"{rail['hca']} ({rail['interface']})" for rail in rails if rail["interface"] not in rank["rails"]]
            warnings.append(
                f"{node}: {describe(rank, len(rails))}: {', '.join(unused)} carries nothing, about half of the bandwidth (NCL-02)"
            )
    versions = sorted({str(rank["version"]) for rank in [*ranks, *others] if rank["version"]})
    if len(versions) > 1:
        raise refuse(
            "NCL-07",
            f"ranks with different versions of NCCL: {', '.join(versions)}",
            "the same NCCL in every rank",
            "take LD_PRELOAD, VLLM_NCCL_SO_PATH and NCCL paths out of spark_env and out of the nodes' mounts; the image is the same everywhere",
        )
    return warnings
