# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of rules in docs/host-gate.md, from the rules themselves (plugins/module_utils/_gate.py)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "playbooks" / "collections"))

from ansible_collections.dgxspark.serving.plugins.module_utils import _gate  # noqa: E402

PAGE = ROOT / "docs" / "host-gate.md"
BEGIN, END = "<!-- rules: written by scripts/host_gate -->\n", "<!-- /rules -->\n"


def cell(text: str) -> str:
    """Text in a table: figures that the message fills in are named, bars are escaped."""
    return re.sub(r"\{(\w+)\}", r"<\1>", text).replace("|", "\\|").replace("<", "&lt;")


def table() -> str:
    """One row for each rule, in the order in which they are told."""
    lines = ["| Rule | Severity | What must be so | Looks at | Remedy | Problem |", "|---|---|---|---|---|---|"]
    for rule in _gate.RULES:
        where = "all nodes" if rule.gang else "each node"
        when = ", before a launch" if rule.launch else ""
        cells = [f"`{rule.name}`", rule.severity, cell(rule.what), where + when, cell(rule.remedy), rule.problem]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table of now."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + table() + text[end:]


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    if page(text) == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"stale: {PAGE.relative_to(ROOT)}; run scripts/host_gate", file=sys.stderr)
        return 1
    PAGE.write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
