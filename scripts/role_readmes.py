# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes roles/*/README.md from meta/argument_specs.yml, so that documentation and enforcement cannot differ. --check only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

ROLES = Path(__file__).resolve().parent.parent / "roles"


def plain(text: str | list[str]) -> str:
    text = " ".join(text) if isinstance(text, list) else text
    return re.sub(r"[COV]\(([^)]*)\)", r"`\1`", text)


def rows(options: dict, prefix: str = "") -> list[str]:
    result = []
    for name, spec in options.items():
        kind = spec["type"] + (f" of {spec['elements']}" if "elements" in spec else "")
        if "choices" in spec:
            kind += ": " + ", ".join(map(str, spec["choices"]))
        default = "**required**" if spec.get("required") else f"`{spec['default']!r}`" if "default" in spec else "from the plan"
        result.append(f"| `{prefix}{name}` | {kind} | {default} | {plain(spec['description'])} |")
        result += rows(spec.get("options", {}), f"{prefix}{name}.")
    return result


def readme(role: Path) -> str:
    main = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]["main"]
    lines = [f"# {role.name}", "", main["short_description"] + ".", "", *[plain(line) + "\n" for line in main["description"]]]
    if main.get("options"):
        lines += ["| variable | type | default | meaning |", "|---|---|---|---|", *rows(main["options"]), ""]
    lines += ["Written by `scripts/role_readmes` from `meta/argument_specs.yml`.", ""]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    stale = []
    for role in sorted(path.parent.parent for path in ROLES.glob("*/meta/argument_specs.yml")):
        target, text = role / "README.md", readme(role)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            stale.append(target.relative_to(ROLES.parent))
            if "--check" not in argv:
                target.write_text(text, encoding="utf-8")
    if "--check" in argv and stale:
        print(f"stale: {', '.join(map(str, stale))}; run scripts/role_readmes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
