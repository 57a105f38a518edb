# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the links of the gang do, measured with the usual tools, each figure beside the one that is expected.

PRIVATE to the collection. Pure functions over plain data. Expected figures: public measurements on pairs of DGX Sparks (docs/fabric.md names them).
"""

from __future__ import annotations

import ipaddress
import json
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._netif import Interface, Network, are_twins, is_fast, not_a_fabric, pci_order
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._rdma import Hca, hca_of
from ansible_collections.dgxspark.serving.plugins.module_utils._status import columns

STAGE = "fabric test"
PORT = 29951  # of the server of one measurement
STREAMS = 8
MTU = 9000
GBITS = 90.0  # of one rail: ib_write_bw 92 to 112, iperf3 96 to 107
SHARE = 0.85  # of a slower port's own speed
GATHER = {1: 11.0, 2: 18.0}  # GB/s of NCCL all_gather over one rail and over both: 98 Gb/s is 12.2; 18 to 24
OK, LOW, FAILED, NOT_RUN, NO_FIGURE = "ok", "LOW", "FAILED", "not run", "no figure"
DEGRADED = 20.0  # Gb/s; below it a port that should do 100 is in the known state after a warm reboot


def _rank(found: t.Any, address: str, subnet: str) -> tuple[bool, bool, bool]:
    """Order of an interface's addresses: the node's fabric address, one in its subnet, any other, link-local last."""
    inside = bool(subnet) and ipaddress.IPv4Address(found.address) in Network(subnet, strict=False)
    return found.address != address, not inside, bool(found.link_local)


def links(interfaces: t.Sequence[Interface], hcas: t.Sequence[Hca], address: str, subnet: str) -> list[dict[str, t.Any]]:
    """One row for each interface that could carry a fabric. ``rail`` is 1 for the one with the address (or one in the subnet), 2 for its other half when
    that has an address.
    """
    able = [item for item in interfaces if not not_a_fabric(item)]
    first = next((item for item in able if address and any(addr.address == address for addr in item.addresses)), None)
    if first is None and subnet:
        net = Network(subnet, strict=False)
        first = next((item for item in able if any(ipaddress.IPv4Address(addr.address) in net for addr in item.addresses)), None)
    rows = []
    for item in sorted(able, key=lambda item: (item is not first, not (first and are_twins(first, item)), pci_order(item))):
        hca = hca_of(item, hcas)
        twin = first is not None and are_twins(first, item)
        routable = [addr for addr in item.addresses if not addr.link_local]
        rows.append(
            {
                "interface": item.name,
                "addresses": [str(addr) for addr in sorted(item.addresses, key=lambda addr: _rank(addr, address, subnet))],
                "mtu": item.mtu,
                "speed": item.speed or 0,
                "up": item.up,
                "carrier": item.carrier,
                "fast": is_fast(item, hca is not None),
                "rdma": f"{hca.name}:{hca.port}" if hca else "",
                "rdma_state": hca.state if hca else "",
                "rail": 1 if item is first else 2 if twin and routable else 0,
            }
        )
    return rows


def pairs(looks: t.Sequence[t.Mapping[str, t.Any]]) -> tuple[list[dict[str, t.Any]], list[dict[str, t.Any]]]:
    """What is measured, one after the other: each node to the next one, the last to the first, over each rail that both have. And rows for what cannot be.

    ``looks``: ``node``, ``links`` and ``tools`` of each node, or ``error``.
    """
    plan: list[dict[str, t.Any]] = []
    rows = [row("look", look["node"], "", "", NOT_RUN, str(look["error"])) for look in looks if look.get("error")]
    able = [look for look in looks if not look.get("error")]
    for index, source in enumerate(able):
        target = able[(index + 1) % len(able)]
        if target is source:
            rows.append(row("ping", source["node"], "", "", NOT_RUN, "no other node answers"))
            break
        for rail in (1, 2):
            ends = [next((link for link in look["links"] if link["rail"] == rail), None) for look in (source, target)]
            if ends[0] and ends[1]:
                plan.append(_pair(rail, source, target, ends[0], ends[1]))
            elif rail == 1 or ends[0] or ends[1]:
                missing = sorted(look["node"] for look, end in zip((source, target), ends, strict=True) if not end)
                rows.append(row("ping", source["node"], target["node"], f"rail {rail}", NOT_RUN, f"no address on {', '.join(missing)}"))
    return plan, rows


def _pair(
    rail: int, source: t.Mapping[str, t.Any], target: t.Mapping[str, t.Any], one: t.Mapping[str, t.Any], other: t.Mapping[str, t.Any]
) -> dict[str, t.Any]:
    found: dict[str, t.Any] = {
        "rail": rail,
        "source": source["node"],
        "target": target["node"],
        "interface": one["interface"],
        "address": one["addresses"][0].partition("/")[0],
        "peer": other["addresses"][0].partition("/")[0],
        "mtu": min(one["mtu"], other["mtu"]),
        "tool": "",
        "why": "",
        "expected": expected_gbits(one, other),
    }
    rdma = [end["rdma"] if end["rdma_state"] == "ACTIVE" else "" for end in (one, other)]
    for tool, usable in (("ib_write_bw", all(rdma)), ("iperf3", True)):
        without = [look["node"] for look in (source, target) if not look["tools"].get(tool)]
        if usable and not without:
            found.update(tool=tool, source_in=source["tools"][tool], target_in=target["tools"][tool], devices=rdma)
            return found
        if usable:
            found["why"] += f"{'; ' if found['why'] else ''}{tool} is neither on {' nor on '.join(without)} nor in the serving image there"
    return found


def expected_gbits(one: t.Mapping[str, t.Any], other: t.Mapping[str, t.Any]) -> float:
    """Gb/s that a rail should do; 0 where there is no figure for such ports (virtual ones)."""
    if not (one["fast"] and other["fast"]):
        return 0.0
    speed = min(one["speed"], other["speed"]) / 1000
    return round(min(GBITS, SHARE * speed), 1) if speed else GBITS


# --- commands ------------------------------------------------------------------------------------------------------------------------------


def inside(where: str, image: str, name: str, rdma: bool) -> list[str]:
    """What comes before a tool's own words: nothing on the node, ``docker run`` in the serving image."""
    if where != "image":
        return []
    argv = ["docker", "run", "--rm", f"--name={name}", "--network=host", "--ulimit=memlock=-1:-1"]
    if rdma:
        argv += ["--device=/dev/infiniband", "--cap-add=IPC_LOCK"]
    return [*argv, "--pull=never", f"--entrypoint={'ib_write_bw' if rdma else 'iperf3'}", image]


def server_argv(pair: t.Mapping[str, t.Any], seconds: int, image: str, name: str) -> list[str]:
    """The server of a measurement; it ends after one."""
    before = inside(pair["target_in"], image, name, pair["tool"] == "ib_write_bw")
    if pair["tool"] == "iperf3":
        return [*(before or ["iperf3"]), "-s", "-1", "-B", pair["peer"], "-p", str(PORT)]
    return [*(before or ["ib_write_bw"]), *_ib(pair["devices"][1], seconds)]


def client_argv(pair: t.Mapping[str, t.Any], seconds: int, image: str, name: str) -> list[str]:
    """The client."""
    before = inside(pair["source_in"], image, name, pair["tool"] == "ib_write_bw")
    if pair["tool"] == "iperf3":
        words = ["-c", pair["peer"], "-B", pair["address"], "-p", str(PORT), "-t", str(seconds), "-P", str(STREAMS), "-J"]
        return [*(before or ["iperf3"]), *words]
    return [*(before or ["ib_write_bw"]), *_ib(pair["devices"][0], seconds), pair["peer"]]


def _ib(device: str, seconds: int) -> list[str]:
    """``-R`` connects through rdma_cm, which finds the GID of the address by itself."""
    name, dummy, port = device.partition(":")
    return ["-R", "-F", "-d", name, "-i", port, "-q", "4", "-D", str(seconds), "-p", str(PORT), "--report_gbits"]


# --- results -------------------------------------------------------------------------------------------------------------------------------


def row(what: str, source: str, target: str, over: str, verdict: str, detail: str = "", **more: t.Any) -> dict[str, t.Any]:
    """One line of the second table."""
    found = {"what": what, "from": source, "to": target, "over": over, "measured": "", "expected": "", "verdict": verdict, "detail": detail}
    return {**found, **more}


def _over(pair: t.Mapping[str, t.Any]) -> str:
    return f"rail {pair['rail']} {pair['interface']}"


def ping_row(pair: t.Mapping[str, t.Any], rc: int, out: str, err: str) -> dict[str, t.Any]:
    """``ping`` with full-size packets that must not be fragmented."""
    base = ("ping", pair["source"], pair["target"], _over(pair))
    sent = re.search(r"(\d+) packets transmitted, (\d+) received", out)
    expected = f"no loss at MTU {MTU}"
    if not sent:
        return row(*base, FAILED, " ".join((err or out).split())[:200] or f"ping ended with code {rc}", expected=expected)
    times = re.search(r"= [\d.]+/([\d.]+)/", out)
    measured = f"{sent[2]}/{sent[1]} at MTU {pair['mtu']}" + (f", {float(times[1]):.2f} ms" if times else "")
    if sent[1] != sent[2]:
        return row(
            *base,
            FAILED,
            "full-size packets are lost: compare the MTU of both ends and of the switch",
            measured=measured,
            expected=expected,
        )
    if pair["mtu"] < MTU:
        return row(*base, LOW, f"playbooks/fabric.yml sets MTU {MTU}", measured=measured, expected=expected)
    return row(*base, OK, measured=measured, expected=expected)


def iperf_gbits(out: str) -> tuple[float, str]:
    """Gb/s that arrived, and the error that iperf3 names."""
    try:
        data = json.loads(out)
        if data.get("error"):
            return 0.0, str(data["error"])
        return float(data["end"]["sum_received"]["bits_per_second"]) / 1e9, ""
    except (ValueError, LookupError, TypeError, AttributeError):
        return 0.0, "iperf3 gave no result"


def perftest_gbits(out: str) -> tuple[float, str]:
    """The average of ib_write_bw with --report_gbits: #bytes, #iterations, peak, average, message rate."""
    for line in reversed(out.splitlines()):
        words = line.split()
        if len(words) >= 5 and words[0].isdigit() and words[1].isdigit():
            try:
                return float(words[3]), ""
            except ValueError:
                break
    return 0.0, "ib_write_bw gave no result"


def rate_row(pair: t.Mapping[str, t.Any], rc: int, out: str, err: str) -> dict[str, t.Any]:
    """Throughput of one rail, in one direction."""
    base = (pair["tool"], pair["source"], pair["target"], _over(pair))
    gbits, error = (iperf_gbits if pair["tool"] == "iperf3" else perftest_gbits)(out)
    if rc == 124:
        error = "it did not end in time"
    if rc or error:
        return row(
            *base, FAILED, " ".join(f"{error or err or f'ended with code {rc}'}".split())[:200], expected=_figure(pair["expected"], "Gb/s")
        )
    found = {"measured": f"{gbits:.1f} Gb/s", "expected": _figure(pair["expected"], "Gb/s")}
    if not pair["expected"]:
        return row(*base, NO_FIGURE, "not a port of 25 Gb/s or more", **found)
    if gbits >= pair["expected"]:
        return row(*base, OK, **found)
    if gbits < DEGRADED:
        detail = "the known state after a warm reboot (NCL-06): switch both nodes off, wait, and on again"
    elif pair["mtu"] < MTU:
        detail = f"MTU {pair['mtu']}: playbooks/fabric.yml sets {MTU}"
    else:
        detail = "look for other traffic, then at the cable and 'dmesg' (power, link width)"
    return row(*base, LOW, detail, **found)


def _figure(value: float, unit: str) -> str:
    return f">= {value:g} {unit}" if value else "-"


def gather_row(answers: t.Sequence[t.Mapping[str, t.Any]], rails: int) -> dict[str, t.Any]:
    """NCCL all_gather over all nodes. ``answers``: of each node ``node`` and ``skip`` (why not), ``error``, or ``gbytes`` (bus bandwidth)."""
    base = ("all_gather", "all", "all", f"{rails} rail{'' if rails == 1 else 's'}")
    expected = _figure(GATHER[2 if rails > 1 else 1], "GB/s")
    for kind, verdict in (("skip", NOT_RUN), ("error", FAILED)):
        said = [f"{answer['node']}: {answer[kind]}" for answer in answers if answer.get(kind)]
        if said:
            return row(*base, verdict, "; ".join(said), expected=expected)
    gbytes = min(float(answer["gbytes"]) for answer in answers)
    found = {"measured": f"{gbytes:.1f} GB/s", "expected": expected}
    if gbytes >= GATHER[2 if rails > 1 else 1]:
        return row(*base, OK, **found)
    return row(*base, LOW, "compare with the rails above; site.yml shows which transport NCCL takes", **found)


# --- tables --------------------------------------------------------------------------------------------------------------------------------


def _link_cells(node: str, link: t.Mapping[str, t.Any]) -> list[str]:
    return [
        node,
        link["interface"],
        str(link["rail"] or "-"),
        " ".join(link["addresses"]) or "-",
        str(link["mtu"]),
        str(link["speed"] or "-"),
        "yes" if link["carrier"] else "no" if link["up"] else "down",
        f"{link['rdma']} {link['rdma_state']}" if link["rdma"] else "-",
    ]


def table(looks: t.Sequence[t.Mapping[str, t.Any]], rows: t.Sequence[t.Mapping[str, t.Any]]) -> str:
    """Both tables for a person."""
    cells = [_link_cells(look["node"], link) for look in looks for link in look.get("links") or []]
    lines = columns([["NODE", "INTERFACE", "RAIL", "ADDRESS", "MTU", "Mb/s", "CABLE", "RDMA"], *cells])
    silent = [look["node"] for look in looks if not look.get("error") and not any(link["rdma"] for link in look["links"])]
    if silent:
        lines.append(f"no RDMA device on {', '.join(silent)}")
    heads = ["TEST", "FROM", "TO", "OVER", "MEASURED", "EXPECTED", "RESULT"]
    keys = ("what", "from", "to", "over", "measured", "expected")
    results = [
        [*(str(item[key]) or "-" for key in keys), f"{item['verdict']}{': ' if item['detail'] else ''}{item['detail']}"] for item in rows
    ]
    return "\n".join([*lines, "", *columns([heads, *results])])


def verdict(rows: t.Sequence[t.Mapping[str, t.Any]]) -> Problem | None:
    """The first figure that is below what is expected, with how many others; None when there is none. What could not be run is no failure."""
    bad = [item for item in rows if item["verdict"] in (FAILED, LOW)]
    if not bad:
        return None
    first = bad[0]
    more = f" (and {len(bad) - 1} more, see the table)" if len(bad) > 1 else ""
    return Problem(
        "fabric-slow",
        node=first["from"] if first["from"] != "all" else "",
        stage=STAGE,
        found=f"{first['what']} to {first['to']} over {first['over']}: {first['measured'] or 'no result'}{more}",
        expected=first["expected"] or "a result",
        remedy=first["detail"],
    )


GATHER_PROGRAM = r"""
import json, os, sys, time
def end(**answer):
    print("RESULT " + json.dumps(answer), flush=True)
    os._exit(0)
try:
    import torch
    import torch.distributed as dist
except Exception as exc:
    end(skip="the image has no PyTorch (%s)" % exc)
if not torch.cuda.is_available():
    end(skip="PyTorch of the image sees no GPU")
try:
    import datetime
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60))
    world, size = dist.get_world_size(), 256 * 1024 * 1024
    part = torch.ones(size // world, dtype=torch.uint8, device="cuda")
    whole = torch.empty(size // world * world, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        dist.all_gather_into_tensor(whole, part)
    torch.cuda.synchronize()
    dist.barrier()
    start, rounds = time.perf_counter(), 20
    for _ in range(rounds):
        dist.all_gather_into_tensor(whole, part)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / rounds
    end(gbytes=whole.numel() / seconds / 1e9 * (world - 1) / world)
except Exception as exc:
    end(error=" ".join(str(exc).split())[-300:])
"""


def gather_argv(
    image: str, name: str, rank: int, ranks: int, head: str, env: t.Mapping[str, str], rdma: bool, memlock: t.Sequence[str]
) -> list[str]:
    """``docker run`` of one rank; the program comes on standard input."""
    argv = ["docker", "run", "--rm", "-i", f"--name={name}", "--network=host", "--ipc=host", "--gpus=all", "--pull=never"]
    if rdma:
        argv += ["--device=/dev/infiniband", "--cap-add=IPC_LOCK"]
    argv += [f"--ulimit={limit}" for limit in memlock]
    values = {**env, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": head, "MASTER_PORT": str(PORT)}
    for key, value in sorted(values.items()):
        argv += ["-e", f"{key}={value}"]
    return [*argv, "--entrypoint=python3", image, "-"]


def gather_answer(node: str, rc: int, out: str, err: str) -> dict[str, t.Any]:
    """What a rank said."""
    for line in reversed(out.splitlines()):
        if line.startswith("RESULT "):
            return {"node": node, **json.loads(line.removeprefix("RESULT "))}
    said = "it did not end in time" if rc in (124, 137) else " ".join((err or out).split())[-300:] or f"ended with code {rc}"
    return {"node": node, "error": said}
