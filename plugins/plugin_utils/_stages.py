# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the callback ``stages`` shows, as text.

PRIVATE to the collection. Pure functions over results and names; the callback knows when.
"""

from __future__ import annotations

import typing as t

INDENT = "  "
WIDTH = 9  # of the first word of a line
PREFIX = "dgxspark.serving."
PROBLEM = ("found", "expected", "remedy")
LONG = 200  # characters of a message in the running output; the whole of it comes at the end


def span(seconds: float) -> str:
    """``3.2 s``, ``42 s``, ``3 min 05 s``, ``1 h 02 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def line(word: str, text: str) -> str:
    """``  changed  text``; further lines of the text stand below its first one."""
    first, *rest = text.splitlines() or [""]
    return "\n".join([f"{INDENT}{word:<{WIDTH}}{first}".rstrip(), *(f"{INDENT}{'':<{WIDTH}}{more}".rstrip() for more in rest)])


def task_name(name: str) -> str:
    """``dgxspark.serving.verify : Summary`` -> ``Summary``: the stage above it says the rest. Roles of others keep their name."""
    role, colon, own = name.strip().partition(" : ")
    return own if colon and role.startswith(PREFIX) else name.strip()


def where(name: str, hosts: t.Sequence[str]) -> str:
    """``Ensure the container runs (spark-1, spark-2)``."""
    return f"{name} ({', '.join(sorted(set(hosts)))})"


def brief(text: str) -> str:
    """One line of at most LONG characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= LONG else flat[: LONG - 3].rstrip() + "..."


def reason(result: t.Mapping[str, t.Any]) -> str:
    """Why a task failed, in one line: what was found, or the message, or the last line that the command wrote."""
    problem = result.get("problem")
    if isinstance(problem, dict) and problem.get("found"):
        return brief(f"found {problem['found']}")
    message = str(result.get("msg") or "").strip()
    written = str(result.get("stderr") or result.get("module_stderr") or result.get("stdout") or "").strip()
    if written and message.rstrip(".").lower() in ("", "non-zero return code"):
        message = f"{message} {written.splitlines()[-1]}".strip()
    return brief(message or str(result.get("censored") or result.get("reason") or "no message"))


def problem_lines(problem: t.Mapping[str, t.Any]) -> list[str]:
    """Found, expected and remedy, whole, each on lines of its own, and the row of the catalogue."""
    lines = [line(key, str(problem[key])) for key in PROBLEM if problem.get(key)]
    if problem.get("id"):
        lines.append(line("see", f"{problem['id']} in docs/failure-modes.md"))
    if problem.get("details"):
        lines.append(line("details", f"{', '.join(problem['details'])}: with -v"))
    return lines


def has_problem(result: t.Mapping[str, t.Any]) -> bool:
    """Whether a result is a failure that our own modules have explained."""
    problem = result.get("problem")
    return isinstance(problem, dict) and all(problem.get(key) for key in PROBLEM)


def beside_problem(result: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What a failed result holds beside its problem and what follows from that."""
    known = ("problem", "msg", "failed", "changed", "exception", "invocation")
    return {
        key: value
        for key, value in result.items()
        if key not in known and not key.startswith("_ansible") and value not in (None, "", [], {})
    }


def message(host: str, result: t.Mapping[str, t.Any]) -> str | None:
    """What a debug task says, with the node before it where the text does not name it; None when it shows no text."""
    if "msg" not in result:
        return None
    found = result["msg"]
    if isinstance(found, list) and all(not isinstance(part, (dict, list)) for part in found):
        text = "\n".join(str(part) for part in found)
    elif isinstance(found, (dict, list)):
        return None
    else:
        text = str(found)
    text = text.rstrip("\n")
    return text if "\n" in text or text.startswith(f"{host}:") else f"{host}: {text}"


def closing(seconds: float, changed: int, failed: bool, check: bool) -> str:
    """The end of a stage: ``nothing changed, 3.2 s``."""
    if failed:
        return f"failed after {span(seconds)}"
    what = f"{changed} {'would change' if check else 'changed'}" if changed else f"nothing {'would change' if check else 'changed'}"
    return f"{what}, {span(seconds)}"
