# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run of the benchmark as one HTML page: no other file, no script, light and dark, wide and narrow.

PRIVATE to the collection. Pure functions.
"""

from __future__ import annotations

import html
import shlex
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _benchmark
from ansible_collections.dgxspark.serving.plugins.plugin_utils import _report_charts

NARROW = "\N{NO-BREAK SPACE}"
STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1c2530; --soft: #5a6673; --rule: #dfe3e8; --good: #0f7f4f; --bad: #b3261e;
  --note: #fff6e0; @LIGHT@ }
@media (prefers-color-scheme: dark) { :root { --page: #11161c; --card: #1a2129; --ink: #e6ebf0; --soft: #9ba7b4; --rule: #303a45; --good: #5bd6a0;
  --bad: #ff8a80; --note: #33290f; @DARK@ } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 12px; }
p { margin: 4px 0; }
.soft, figcaption, th { color: var(--soft); }
.soft { overflow-wrap: anywhere; }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; overflow-wrap: anywhere; }
.note { background: var(--note); border-radius: 8px; padding: 8px 14px; margin: 14px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(240px, 100%), 1fr)); gap: 12px; margin-top: 20px; }
.tile, figure, .table { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 26px; line-height: 1.2; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile b small { font-size: 14px; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 10px; }
figure h3 { margin: 0 0 4px; font-size: 14px; font-weight: 600; }
figure h3 span { font-weight: 400; color: var(--soft); }
figure > svg { display: block; width: 100%; height: auto; }
figcaption { font-size: 13px; display: flex; flex-wrap: wrap; gap: 2px 14px; }
.key { display: inline-flex; align-items: center; gap: 6px; white-space: nowrap; }
.key svg { width: 26px; height: 14px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.tick, .axis { fill: var(--soft); font-size: 12px; }
polyline { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.earlier polyline { stroke-dasharray: 5 4; stroke-width: 1.6; }
.earlier { opacity: .65; }
.plain { stroke: var(--soft); fill: var(--soft); }
.earlier circle, .earlier rect, .earlier path { fill: var(--card); stroke-width: 1.4; }
@SERIES@
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 500; font-size: 13px; }
th.above { text-align: left; border-bottom: 0; padding-bottom: 0; color: var(--ink); }
th.above, .first { padding-left: 16px; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
td small { display: block; color: var(--soft); font-size: 12px; line-height: 1.3; }
td small.better { color: var(--good); }
td small.worse { color: var(--bad); }
.left { table-layout: fixed; }
.left th, .left td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.left th { width: 190px; }
.failed { text-align: left; color: var(--bad); white-space: normal; }
@media (max-width: 560px) { main { padding: 18px 12px 40px; } .left th { width: 104px; } th, td { padding: 6px 8px; } .tile b { font-size: 22px; } }
@media print { body { background: #fff; } figure, .tile, .table { break-inside: avoid; } }
"""

# Heading, and the figures below it with theirs.
COLUMNS = (
    ("Output", (("output_throughput", "tokens/s"), ("request_throughput", "requests/s"))),
    ("TTFT ms", (("p50_ttft_ms", "p50"), ("p90_ttft_ms", "p90"), ("p99_ttft_ms", "p99"))),
    ("ITL ms", (("p50_itl_ms", "p50"), ("p90_itl_ms", "p90"), ("p99_itl_ms", "p99"))),
    ("TPOT ms", (("p50_tpot_ms", "p50"), ("p90_tpot_ms", "p90"), ("p99_tpot_ms", "p99"))),
    ("Latency ms", (("p50_e2el_ms", "p50"), ("p99_e2el_ms", "p99"))),
)


def _e(value: t.Any) -> str:
    return html.escape(str(value))


def style() -> str:
    """The style sheet with the colours of the charts."""
    light = " ".join(f"--c{n}: {c};" for n, c in enumerate(_report_charts.COLOURS))
    dark = " ".join(f"--c{n}: {c};" for n, c in enumerate(_report_charts.DARK_COLOURS))
    series = "\n".join(f".c{n} {{ stroke: var(--c{n}); fill: var(--c{n}); }}" for n in range(len(_report_charts.COLOURS)))
    return STYLE.replace("@LIGHT@", light).replace("@DARK@", dark).replace("@SERIES@", series)


def day(stamp: str) -> str:
    """``2026-11-30T19:15:00+00:00`` -> ``2026-11-30 19:15 UTC``."""
    return f"{stamp[:10]} {stamp[11:16]} UTC"


def delta(name: str, now: float | None, before: float | None) -> str:
    """The change against the earlier run, coloured when it is more than noise."""
    part = _benchmark.change(now, before)
    if part is None:
        return ""
    verdict = _benchmark.better(name, part)
    return f"<small{f' class={verdict}' if verdict else ''}>{_benchmark.percent(part)}</small>"


def best(found: t.Mapping[t.Any, t.Mapping[str, float]], figure: str, least: bool) -> tuple[t.Any, float] | None:
    """(point, value) of the largest or the least of a figure."""
    values = [(key, got[figure]) for key, got in found.items() if figure in got]
    if not values:
        return None
    return (min if least else max)(values, key=lambda entry: entry[1])


def tiles(run: t.Mapping[str, t.Any], earlier: t.Mapping[str, t.Any] | None) -> str:
    """The figures that people ask for first."""
    now, before = _benchmark.measured(run), _benchmark.measured(earlier)
    wanted = (
        ("output_throughput", "Most output tokens per second", "tokens/s", False),
        ("p50_ttft_ms", "Shortest median time to first token", "ms", True),
        ("p50_itl_ms", "Shortest median inter-token latency", "ms", True),
        ("p50_e2el_ms", "Shortest median latency", "ms", True),
    )
    parts = []
    for figure, title, unit, least in wanted:
        found = best(now, figure, least)
        if found is None:
            continue
        key, value = found
        part = _benchmark.change(value, before.get(key, {}).get(figure))
        grown = f"<br>{_benchmark.percent(part).replace(' ', NARROW)} against the earlier run" if part is not None else ""
        parts.append(
            f'<div class="tile"><span class="soft">{title}</span><b>{_benchmark.number(value)} <small>{unit}</small></b>'
            f'<span class="soft">{key[0]} in, {key[1]} out, {key[2]} at a time{grown}</span></div>'
        )
    return f'<div class="tiles">{"".join(parts)}</div>' if parts else ""


def figure(chart: _report_charts.Chart) -> str:
    """One chart with its title and legend."""
    return (
        f"<figure><h3>{_e(chart.title)} <span>{_e(chart.unit)}</span></h3>{_report_charts.svg(chart)}"
        f"<figcaption>{_report_charts.legend(chart)}</figcaption></figure>"
    )


def plots(run: t.Mapping[str, t.Any], earlier: t.Mapping[str, t.Any] | None) -> str:
    """All charts, those of one pair of lengths together."""
    groups: dict[str, list[_report_charts.Chart]] = {}
    for chart in _report_charts.charts(run, earlier):
        groups.setdefault(chart.group or "Throughput and latency", []).append(chart)
    return "".join(f'<h2>{_e(name)}</h2><div class="charts">{"".join(map(figure, members))}</div>' for name, members in groups.items())


def results(run: t.Mapping[str, t.Any], earlier: t.Mapping[str, t.Any] | None) -> str:
    """Every figure of every point."""
    now, before = _benchmark.measured(run), _benchmark.measured(earlier)
    above = "".join(f'<th colspan="{len(figures)}" class="above">{_e(name)}</th>' for name, figures in COLUMNS)
    figures = [entry for _heading, entries in COLUMNS for entry in entries]
    first = {name for name, _title in (entries[0] for _heading, entries in COLUMNS)}
    head = "".join(f"<th>{name}</th>" for name in ("in", "out", "at a time", "requests"))
    head += "".join(f"<th{' class=first' if name in first else ''}>{_e(title)}</th>" for name, title in figures)
    lines = []
    for point in run["points"]:
        key = _benchmark.key(point)
        cells = "".join(f"<td>{part}</td>" for part in key)
        found = now.get(key)
        if found is None:
            lines.append(
                f'<tr>{cells}<td class="failed" colspan="{len(figures) + 1}">{_e(point.get("problem") or "not measured")}</td></tr>'
            )
            continue
        lost = f"<small class=worse>{int(found['failed'])} failed</small>" if found.get("failed") else ""
        cells += f"<td>{point['requests']}{lost}</td>"
        for name, _title in figures:
            grown = delta(name, found.get(name), before.get(key, {}).get(name))
            cells += f"<td{' class=first' if name in first else ''}>{_benchmark.number(found.get(name))}{grown}</td>"
        lines.append(f"<tr>{cells}</tr>")
    times = "TTFT: time to first token; ITL: gap between two outputs; TPOT: time per token after the first, of one request."
    against = f" Below each figure: the change against {_e(earlier['id'])}." if earlier else ""
    return (
        f'<h2>All figures</h2><p class="soft">{times}{against}</p>'
        f'<div class="table"><table><thead><tr><th colspan="4" class="above"></th>{above}</tr><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def pairs_table(rows: t.Iterable[tuple[str, str]]) -> str:
    """Names and values; values are HTML already."""
    lines = "".join(f"<tr><th>{_e(name)}</th><td>{value}</td></tr>" for name, value in rows if value)
    return f'<div class="table"><table class="left">{lines}</table></div>'


def _node(node: t.Mapping[str, t.Any]) -> str:
    fabric = node.get("fabric") or {}
    over = f"{fabric.get('rails') or 0} {'RDMA' if fabric.get('rdma') else 'TCP'}"
    memory = f"{node['memory'] / 2**30:.1f} GiB" if node.get("memory") else ""
    gpus = ", ".join(str(name) for name in node.get("gpus") or [])
    driver = f"driver {node['driver']}" if node.get("driver") else ""
    docker = f"Docker {node['docker']}" if node.get("docker") else ""
    rail = f"{fabric.get('address')} on {fabric.get('interface')} ({over}, MTU {fabric.get('mtu')})" if fabric.get("interface") else ""
    parts = [node["role"], rail, gpus, driver, memory, node.get("machine"), node.get("system"), node.get("kernel"), docker]
    return f"{_e(node['node'])}: {_e(', '.join(str(part) for part in parts if part))}"


def configuration(run: t.Mapping[str, t.Any], earlier: t.Mapping[str, t.Any] | None) -> str:
    """What was measured, and what of it changed since the earlier run."""
    config = run["config"]
    image = config.get("image") or {}
    first = next((point for point in run["points"] if point.get("argv")), None)
    rows = [
        ("Model", f"{_e(config['model'])} @ {_e(config.get('revision') or '?')}"),
        ("Served as", _e(config.get("served_model_name") or "")),
        ("Longest context", f"{config['max_model_len']} tokens" if config.get("max_model_len") else ""),
        (
            "Image",
            f"{_e(image.get('reference') or '?')}<br><code>{_e(', '.join(image.get('digests') or []) or image.get('id') or '')}</code>",
        ),
        ("Fingerprint", f"<code>{_e(image['fingerprint'])}</code>" if image.get("fingerprint") else ""),
        ("Versions", _e(", ".join(f"{name} {version}" for name, version in (config.get("versions") or {}).items()))),
        ("Nodes", "<br>".join(_node(node) for node in config.get("nodes") or [])),
        ("Executor", _e(config.get("executor") or "")),
        ("Server", f"<code>{_e(shlex.join(config.get('command') or []))}</code>"),
        ("Server since", _e(config.get("started_at") or "")),
        ("Environment", f"<code>{_e(' '.join(f'{k}={v}' for k, v in (config.get('environment') or {}).items()))}</code>"),
        ("Load", f"<code>{_e(shlex.join(['vllm', 'bench', 'serve', *first['argv']]))}</code>" if first else ""),
    ]
    text = f"<h2>What was measured</h2>{pairs_table(rows)}"
    if earlier:
        changed = _benchmark.differences(config, earlier["config"])
        lines = [
            (name, f"<code>{_e(before or 'nothing')}</code><br>now <code>{_e(now or 'nothing')}</code>") for name, before, now in changed
        ]
        text += f"<h2>What changed since {_e(earlier['id'])}</h2>"
        text += pairs_table(lines) if lines else '<p class="soft">Nothing of the configuration.</p>'
    return text


def page(run: t.Mapping[str, t.Any], earlier: t.Mapping[str, t.Any] | None) -> str:
    """The whole report."""
    config = run["config"]
    title = f"{config['model']}{': ' + run['name'] if run.get('name') else ''}"
    nodes = len(config.get("nodes") or [])
    line = (
        f"{day(run['date'])} · {nodes} node{'s' if nodes != 1 else ''} · vLLM {config.get('versions', {}).get('vllm', '?')} · {run['id']}"
    )
    against = f'<p class="soft">Compared with {_e(earlier["id"])} ({day(earlier["date"])})</p>' if earlier else ""
    notes = "".join(f'<p class="note">{_e(note)}</p>' for note in run.get("notes") or [])
    if not run.get("complete"):
        notes += '<p class="note">Not complete: the sweep ended early.</p>'
    body = "".join([tiles(run, earlier), plots(run, earlier), results(run, earlier), configuration(run, earlier)])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Benchmark of {_e(title)}</title><style>{style()}</style></head>\n"
        f'<body><main><h1>{_e(title)}</h1><p class="soft">{_e(line)}</p>{against}{notes}\n{body}\n</main></body></html>\n'
    )
