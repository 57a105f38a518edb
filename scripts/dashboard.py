# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the Grafana dashboard of the role monitoring, roles/monitoring/files/dashboard.json. --check only compares.

Names of vLLM's metrics: 0.32, with "or" for a name that vLLM before 0.12 had. tests/unit/test_dashboard.py compares all
names with what was exported; what only hardware can answer stands in the last row, with the reason.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "roles" / "monitoring" / "files" / "dashboard.json"
HARDWARE = "Needs hardware: RDMA, GPU, temperatures"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CLUSTER = 'cluster="$cluster"'
MODEL = f'{CLUSTER}, model_name=~"$model"'
NODE = f'{CLUSTER}, node=~"$node"'
RATE = "[$__rate_interval]"


def rate(metric: str, labels: str = MODEL) -> str:
    return f"rate({metric}{{{labels}}}{RATE})"


def quantiles(*metrics: str) -> list[tuple[str, str]]:
    """(query, legend) of three percentiles of a histogram; of several names the first that exists counts."""
    found = " or ".join(f"sum by (le) ({rate(metric + '_bucket')})" for metric in metrics)
    return [(f"histogram_quantile({q}, {found})", name) for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]


def mean(metric: str) -> str:
    return f"sum({rate(metric + '_sum')}) / sum({rate(metric + '_count')})"


KV = f"max(vllm:kv_cache_usage_perc{{{MODEL}}} or vllm:gpu_cache_usage_perc{{{MODEL}}})"
HITS = f"sum({rate('vllm:prefix_cache_hits_total')} or {rate('vllm:gpu_prefix_cache_hits_total')})"
QUERIES = f"sum({rate('vllm:prefix_cache_queries_total')} or {rate('vllm:gpu_prefix_cache_queries_total')})"
TOTAL = f"node_memory_MemTotal_bytes{{{NODE}}}"
NETWORK = f'{NODE}, device!~"lo|docker.*|br-.*|veth.*|virbr.*|tailscale.*"'

# (kind, title, unit, width, [(query, legend)], description)
ROWS: list[tuple[str, list[tuple[str, str, str, int, list[tuple[str, str]], str]]]] = [
    (
        "Service",
        [
            ("stat", "Answers /metrics", "bool_yes_no", 4, [(f'min(up{{job="vllm", {CLUSTER}}})', "vLLM")], ""),
            ("stat", "Requests running", "short", 4, [(f"sum(vllm:num_requests_running{{{MODEL}}})", "running")], ""),
            ("stat", "Requests waiting", "short", 4, [(f"sum(vllm:num_requests_waiting{{{MODEL}}})", "waiting")], ""),
            ("stat", "Output tokens per second", "short", 4, [(f"sum({rate('vllm:generation_tokens_total')})", "tokens/s")], ""),
            ("stat", "KV cache used", "percentunit", 4, [(KV, "used")], "At 100 % requests wait or are preempted."),
            (
                "stat",
                "Requests finished",
                "short",
                4,
                [(f"sum(increase(vllm:request_success_total{{{MODEL}}}[$__range]))", "finished")],
                "In the time that is shown.",
            ),
        ],
    ),
    (
        "Requests and latency",
        [
            (
                "timeseries",
                "Requests",
                "short",
                8,
                [
                    (f"sum(vllm:num_requests_running{{{MODEL}}})", "running"),
                    (f"sum(vllm:num_requests_waiting{{{MODEL}}})", "waiting"),
                ],
                "",
            ),
            (
                "timeseries",
                "Tokens per second",
                "short",
                8,
                [(f"sum({rate('vllm:generation_tokens_total')})", "output"), (f"sum({rate('vllm:prompt_tokens_total')})", "prompts")],
                "",
            ),
            (
                "timeseries",
                "Requests per second by end",
                "reqps",
                8,
                [(f"sum by (finished_reason) ({rate('vllm:request_success_total')})", "{{finished_reason}}")],
                "",
            ),
            ("timeseries", "Time to first token", "s", 8, quantiles("vllm:time_to_first_token_seconds"), ""),
            (
                "timeseries",
                "Inter-token latency",
                "s",
                8,
                quantiles("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
                "Between two outputs of a request. The second name is that of vLLM before 0.11.",
            ),
            ("timeseries", "Latency of a request", "s", 8, quantiles("vllm:e2e_request_latency_seconds"), ""),
            (
                "timeseries",
                "Where the time goes, mean of a request",
                "s",
                8,
                [
                    (mean("vllm:request_queue_time_seconds"), "waiting"),
                    (mean("vllm:request_prefill_time_seconds"), "prefill"),
                    (mean("vllm:request_decode_time_seconds"), "decode"),
                ],
                "",
            ),
            ("timeseries", "Prompt length", "short", 8, quantiles("vllm:request_prompt_tokens"), "Tokens."),
            ("timeseries", "Answer length", "short", 8, quantiles("vllm:request_generation_tokens"), "Tokens."),
            (
                "timeseries",
                "KV cache used and prefix cache hits",
                "percentunit",
                8,
                [(KV, "KV cache used"), (f"{HITS} / {QUERIES}", "prompt tokens from the prefix cache")],
                "The second name in each query is that of vLLM before 0.12.",
            ),
            (
                "timeseries",
                "Preemptions",
                "short",
                8,
                [(f"sum({rate('vllm:num_preemptions_total')})", "per second")],
                "Requests that were thrown out of the KV cache and computed again: above 0 the cache is too small for the load.",
            ),
            (
                "timeseries",
                "HTTP answers",
                "reqps",
                8,
                [(f'sum by (status) (rate(http_requests_total{{job="vllm", {CLUSTER}}}{RATE}))', "{{status}}")],
                "",
            ),
        ],
    ),
    (
        "Ray (only from an image that has ray[default])",
        [
            (
                "timeseries",
                "GPUs of Ray",
                "short",
                8,
                [(f'sum by (State) (ray_resources{{{CLUSTER}, Name="GPU"}})', "{{State}}")],
                "While a model is served all are USED.",
            ),
            (
                "timeseries",
                "Actors",
                "short",
                8,
                [(f'sum by (State) (ray_actors{{{CLUSTER}, Source="gcs"}})', "{{State}}")],
                "One for each rank.",
            ),
            (
                "timeseries",
                "Object store",
                "bytes",
                8,
                [(f"sum by (Location) (ray_object_store_memory{{{CLUSTER}}})", "{{Location}}")],
                "",
            ),
            ("timeseries", "CPU as Ray sees it", "percent", 8, [(f"ray_node_cpu_utilization{{{NODE}}}", "{{node}}")], ""),
            (
                "timeseries",
                "Memory as Ray sees it",
                "percentunit",
                8,
                [(f"ray_node_mem_used{{{NODE}}} / ray_node_mem_total{{{NODE}}}", "{{node}}")],
                "",
            ),
            (
                "timeseries",
                "Memory of Ray's processes",
                "bytes",
                8,
                [(f"sum by (node, Component) (ray_component_uss_bytes{{{NODE}}})", "{{node}} {{Component}}")],
                "Of their own, not shared.",
            ),
        ],
    ),
    (
        "Nodes",
        [
            ("stat", "Exporters that answer", "short", 4, [(f"sum by (job) (up{{{NODE}}})", "{{job}}")], ""),
            (
                "timeseries",
                "CPU",
                "percentunit",
                10,
                [(f'1 - avg by (node) (rate(node_cpu_seconds_total{{{NODE}, mode="idle"}}{RATE}))', "{{node}}")],
                "",
            ),
            ("timeseries", "Load", "short", 10, [(f"node_load1{{{NODE}}}", "{{node}}")], ""),
            (
                "timeseries",
                "Memory used",
                "percentunit",
                8,
                [(f"1 - node_memory_MemAvailable_bytes{{{NODE}}} / {TOTAL}", "{{node}}")],
                "Unified memory: that of the GPU is in it. Above 97 % a node may stop answering.",
            ),
            (
                "timeseries",
                "Swap used",
                "bytes",
                8,
                [(f"node_memory_SwapTotal_bytes{{{NODE}}} - node_memory_SwapFree_bytes{{{NODE}}}", "{{node}}")],
                "",
            ),
            (
                "timeseries",
                "Disk free",
                "percentunit",
                8,
                [
                    (
                        f'min by (node, mountpoint) (node_filesystem_avail_bytes{{{NODE}, fstype=~"ext.*|xfs|btrfs|zfs"}}'
                        f' / node_filesystem_size_bytes{{{NODE}, fstype=~"ext.*|xfs|btrfs|zfs"}})',
                        "{{node}} {{mountpoint}}",
                    )
                ],
                "",
            ),
            (
                "timeseries",
                "Network received",
                "Bps",
                12,
                [(f"rate(node_network_receive_bytes_total{{{NETWORK}}}{RATE})", "{{node}} {{device}}")],
                "What the kernel sees. RDMA goes past it: see the last row.",
            ),
            (
                "timeseries",
                "Network sent",
                "Bps",
                12,
                [(f"rate(node_network_transmit_bytes_total{{{NETWORK}}}{RATE})", "{{node}} {{device}}")],
                "",
            ),
        ],
    ),
    (
        HARDWARE,
        [
            (
                "timeseries",
                "RDMA received",
                "Bps",
                12,
                [(f"rate(node_infiniband_port_data_received_bytes_total{{{NODE}}}{RATE})", "{{node}} {{device}}")],
                "The ranks' traffic. Needs RDMA devices, which the node exporter reads from /sys/class/infiniband.",
            ),
            (
                "timeseries",
                "RDMA sent",
                "Bps",
                12,
                [(f"rate(node_infiniband_port_data_transmitted_bytes_total{{{NODE}}}{RATE})", "{{node}} {{device}}")],
                "The ranks' traffic. Needs RDMA devices, which the node exporter reads from /sys/class/infiniband.",
            ),
            (
                "timeseries",
                "GPU busy",
                "percent",
                6,
                [(f"DCGM_FI_DEV_GPU_UTIL{{{NODE}}}", "{{node}}")],
                "Needs NVIDIA's dcgm-exporter on the node, and a GPU.",
            ),
            (
                "timeseries",
                "GPU power",
                "watt",
                6,
                [(f"DCGM_FI_DEV_POWER_USAGE{{{NODE}}}", "{{node}}")],
                "Needs NVIDIA's dcgm-exporter on the node, and a GPU.",
            ),
            (
                "timeseries",
                "GPU temperature",
                "celsius",
                6,
                [(f"DCGM_FI_DEV_GPU_TEMP{{{NODE}}}", "{{node}}")],
                "Needs NVIDIA's dcgm-exporter on the node, and a GPU.",
            ),
            (
                "timeseries",
                "Temperatures of the board",
                "celsius",
                6,
                [(f"max by (node, type) (node_thermal_zone_temp{{{NODE}}})", "{{node}} {{type}}")],
                "Needs sensors, which containers and virtual machines do not have.",
            ),
        ],
    ),
]


def panel(number: int, kind: str, title: str, unit: str, place: dict[str, int], queries: list[tuple[str, str]], text: str) -> dict:
    defaults: dict = {"unit": unit, "min": 0}
    options: dict = {}
    if kind == "timeseries":
        defaults["custom"] = {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never", "spanNulls": False}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    else:
        options = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    if unit == "bool_yes_no":
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": "red", "value": None}, {"color": "green", "value": 1}]}
    return {
        "id": number,
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": expr, "legendFormat": legend, "editorMode": "code", "range": True}
            for n, (expr, legend) in enumerate(queries)
        ],
    }


def variable(name: str, label: str, query: str, several: bool) -> dict:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        **({"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}} if several else {}),
    }


def dashboard() -> dict:
    panels: list[dict] = []
    y = 0
    for title, entries in ROWS:
        row = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({**row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        x = high = 0
        for kind, name, unit, wide, queries, text in entries:
            if x + wide > 24:
                x, y = 0, y + high
                high = 0
            tall = 4 if title == "Service" else 8
            panels.append(panel(len(panels) + 1, kind, name, unit, {"x": x, "y": y, "w": wide, "h": tall}, queries, text))
            x, high = x + wide, max(high, tall)
        y += high
    return {
        "uid": "dgxspark-serving",
        "title": "DGX Spark serving",
        "description": "vLLM, Ray and nodes of dgxspark.serving",
        "tags": ["dgxspark", "vllm"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "refresh": 1},
                variable("cluster", "Cluster", 'label_values(up{job="vllm"}, cluster)', False),
                variable("model", "Model", 'label_values(vllm:num_requests_running{cluster="$cluster"}, model_name)', True),
                variable("node", "Node", 'label_values(up{cluster="$cluster"}, node)', True),
            ]
        },
        "panels": panels,
    }


def main() -> int:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == text:
        return 0
    print("roles/monitoring/files/dashboard.json is not what scripts/dashboard.py writes: run it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
