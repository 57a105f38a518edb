# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The charts of a benchmark as data, and one of them as SVG: the HTML report and the PNG show the same.

PRIVATE to the collection. Pure functions.
"""

from __future__ import annotations

import dataclasses
import html
import math
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _benchmark

# Distinct for the colour-blind, dark enough for paper; the report has a second set for a dark screen.
COLOURS = ("#0b62b8", "#c2410c", "#0f7f5f", "#8b3fa8", "#8a6100", "#b3265e")
DARK_COLOURS = ("#6cb4ff", "#ff9d5c", "#4fd1a5", "#cf9bf0", "#e5c04b", "#ff8fb3")
PERCENTILES = (("p50", "median"), ("p90", "p90"), ("p99", "p99"))
METRICS = (("ttft", "Time to first token"), ("itl", "Inter-token latency"), ("tpot", "Time per output token"))


@dataclasses.dataclass
class Line:
    """One line: its name, its colour's number, y by x, and whether it is the earlier run's."""

    name: str
    colour: int
    values: dict[int, float]
    earlier: bool = False


@dataclasses.dataclass
class Chart:
    """One chart over the number of concurrent requests."""

    title: str
    unit: str
    lines: list[Line]
    group: str = ""  # heading of the section that it stands in

    @property
    def xs(self) -> list[int]:
        """Every x that a line has."""
        return sorted({x for line in self.lines for x in line.values})


def _lines(name: str, colour: int, figure: str, pair: tuple[int, int], now: t.Any, before: t.Any) -> list[Line]:
    """The line of one figure at one pair of lengths, and the same of the earlier run below it."""
    result = []
    for found, earlier in ((before, True), (now, False)):
        values = {key[2]: got[figure] for key, got in sorted(found.items()) if key[:2] == pair and figure in got}
        if values:
            result.append(Line(name, colour, values, earlier))
    return result


def pairs(run: t.Mapping[str, t.Any]) -> list[tuple[int, int]]:
    """The lengths of a run, in their order."""
    return list(dict.fromkeys(_benchmark.key(point)[:2] for point in run["points"]))


def pair_name(pair: tuple[int, int]) -> str:
    """``128 in, 64 out``."""
    return f"{pair[0]} in, {pair[1]} out"


def charts(run: t.Mapping[str, t.Any], earlier: t.Mapping[str, t.Any] | None) -> list[Chart]:
    """Throughput and latency with one line for each pair of lengths, then for each pair the percentiles."""
    now, before = _benchmark.measured(run), _benchmark.measured(earlier)
    whole = (
        ("output_throughput", "Output throughput", "tokens/s"),
        ("request_throughput", "Requests", "requests/s"),
        ("p50_e2el_ms", "Latency of a request, median", "ms"),
    )
    result = []
    for figure, title, unit in whole:
        lines = [
            line
            for number, pair in enumerate(pairs(run))
            for line in _lines(pair_name(pair), number % len(COLOURS), figure, pair, now, before)
        ]
        result.append(Chart(title, unit, lines))
    for pair in pairs(run):
        for metric, title in METRICS:
            lines = [
                line
                for number, (stat, name) in enumerate(PERCENTILES)
                for line in _lines(name, number, f"{stat}_{metric}_ms", pair, now, before)
            ]
            result.append(Chart(title, "ms", lines, f"{pair[0]} tokens in, {pair[1]} tokens out"))
    return [chart for chart in result if chart.lines]


# --- scales


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to the first one that is not below ``top``."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * (1 - 1e-9))
    return [round(step * number, 12) for number in range(math.ceil(top / step - 1e-9) + 1)]


def tick_text(value: float, top: float) -> str:
    """``0`` ``0.25`` ``250``; with a large ``top`` of the scale all in thousands: ``5k`` ``10k``."""
    if top >= 10_000 and value:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def place(x: int, xs: t.Sequence[int]) -> float:
    """0 to 1: concurrency on a scale of its logarithm; the middle when there is only one."""
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    return 0.5 if high == low else (math.log2(x) - low) / (high - low)


def shown_xs(xs: t.Sequence[int], width: float, least: float = 26) -> list[int]:
    """Those that get a label: all, unless two of them were closer than ``least``; the last one always."""
    kept = [xs[-1]]
    for x in reversed(xs[:-1]):
        if (place(kept[-1], xs) - place(x, xs)) * width >= least:
            kept.append(x)
    return kept[::-1]


# --- SVG

WIDTH, HEIGHT = 420, 262
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 14, 40
SHAPES = ("circle", "square", "triangle")


def marker(shape: str, x: float, y: float, size: float = 4) -> str:
    """A mark, so that lines differ without their colour."""
    if shape == "square":
        return f'<rect x="{x - size + 0.4:.1f}" y="{y - size + 0.4:.1f}" width="{2 * size - 0.8:.1f}" height="{2 * size - 0.8:.1f}"/>'
    if shape == "triangle":
        return f'<path d="M{x:.1f} {y - size:.1f}L{x + size:.1f} {y + size * 0.8:.1f}L{x - size:.1f} {y + size * 0.8:.1f}Z"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'


def svg(chart: Chart) -> str:
    """The chart as one element; colours come from the page (classes c0, c1, ...), the earlier run is dashed and hollow."""
    xs = chart.xs
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    scale = ticks(max(value for line in chart.lines for value in line.values.values()))

    def at(x: int, value: float) -> tuple[float, float]:
        inner = 10  # so that the first and last mark stand clear of the frame
        return LEFT + inner + place(x, xs) * (wide - 2 * inner), TOP + high * (1 - value / scale[-1])

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(chart.title)} over concurrent requests">']
    for value in scale:
        y = at(xs[0], value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick_text(value, scale[-1])}</text>')
    for x in shown_xs(xs, wide):
        parts.append(f'<text class="tick" x="{at(x, 0)[0]:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{x}</text>')
    middle = LEFT + wide / 2
    parts.append(f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - 5}" text-anchor="middle">concurrent requests</text>')
    for line in sorted(chart.lines, key=lambda entry: not entry.earlier):
        spots = [at(x, value) for x, value in line.values.items()]
        kind = f"c{line.colour}" + (" earlier" if line.earlier else "")
        parts.append(f'<g class="{kind}">')
        if len(spots) > 1:
            parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in spots)}"/>')
        for (left, top), (clients, value) in zip(spots, line.values.items(), strict=True):
            name = f"{line.name}{', earlier run' if line.earlier else ''}: {_benchmark.number(value)} {chart.unit} at {clients}"
            shape = marker(SHAPES[line.colour % len(SHAPES)], left, top)
            parts.append(shape.replace("/>", f"><title>{html.escape(name)}</title></{shape[1:].split()[0]}>", 1))
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def legend(chart: Chart) -> str:
    """Names of the lines, below the chart."""
    entries = []
    for line in chart.lines:
        if line.earlier:
            continue
        sample = f'<g class="c{line.colour}"><polyline points="1,7 25,7"/>{marker(SHAPES[line.colour % len(SHAPES)], 13, 7)}</g>'
        entries.append(f'<span class="key"><svg viewBox="0 0 26 14">{sample}</svg>{html.escape(line.name)}</span>')
    if any(line.earlier for line in chart.lines):
        sample = '<g class="plain earlier"><polyline points="1,7 25,7"/><circle cx="13" cy="7" r="4"/></g>'
        entries.append(f'<span class="key"><svg viewBox="0 0 26 14">{sample}</svg>earlier run</span>')
    return "".join(entries)
