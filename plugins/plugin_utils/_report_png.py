# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The charts of a benchmark as one PNG, where the controller's Python has matplotlib.

PRIVATE to the collection.
"""

from __future__ import annotations

import importlib
import os
import typing as t

from ansible_collections.dgxspark.serving.plugins.plugin_utils import _report_charts

MISSING = "no PNG: this controller's Python has no matplotlib (pip install matplotlib); the HTML report has the same charts"
COLUMNS = 3
MARKS = {"circle": "o", "square": "s", "triangle": "^"}


def draw(charts: t.Sequence[_report_charts.Chart], title: str, path: str) -> str:
    """Write the file; "" when it is there, else why it is not."""
    if not charts:
        return "no PNG: nothing was measured"
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError:
        return MISSING
    try:
        _draw(module.Figure, charts, title, path)
    except Exception as exc:  # pylint: disable=broad-except # of another package, whatever its version raises: the PNG is an extra
        return f"no PNG: {type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
    return ""


def _draw(factory: t.Any, charts: t.Sequence[_report_charts.Chart], title: str, path: str) -> None:
    rows = -(-len(charts) // COLUMNS)
    # A figure of its own, not pyplot's: no state, no display, and nothing is left open.
    figure = factory(figsize=(5 * COLUMNS, 3.6 * rows + 0.6), dpi=80, layout="constrained")
    figure.suptitle(title, fontsize=14)
    grid = figure.subplots(rows, COLUMNS, squeeze=False)
    for number in range(rows * COLUMNS):
        axes = grid[number // COLUMNS][number % COLUMNS]
        if number >= len(charts):
            axes.set_axis_off()
            continue
        _axes(axes, charts[number])
    figure.savefig(f"{path}.tmp", format="png")
    os.replace(f"{path}.tmp", path)


def _axes(axes: t.Any, chart: _report_charts.Chart) -> None:
    xs = chart.xs
    for line in sorted(chart.lines, key=lambda entry: not entry.earlier):
        colour = _report_charts.COLOURS[line.colour]
        shape = MARKS[_report_charts.SHAPES[line.colour % len(_report_charts.SHAPES)]]
        look: dict[str, t.Any] = {"color": colour, "marker": shape, "label": line.name}
        if line.earlier:
            look.update(linestyle="--", alpha=0.5, markerfacecolor="white", linewidth=1.2, label=None)
        axes.plot([_report_charts.place(x, xs) for x in line.values], list(line.values.values()), **look)
    if any(line.earlier for line in chart.lines):
        axes.plot([], [], linestyle="--", marker="o", markerfacecolor="white", color="grey", label="earlier run")
    axes.set_title(f"{chart.title} ({chart.group})" if chart.group else chart.title, fontsize=10)
    axes.set_ylabel(chart.unit)
    axes.set_xlabel("concurrent requests")
    axes.set_xticks([_report_charts.place(x, xs) for x in xs], [str(x) for x in xs])
    axes.set_xlim(-0.06, 1.06)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
