# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A sweep with vLLM's own load tool: what is measured, the tool's arguments, its result, and how two runs compare.

PRIVATE to the collection. Pure functions over plain data. Option names: ``vllm bench serve`` from 0.10 on; what is left out has the same default
in all of them. Keys of its result: ``<stat>_<metric>_ms`` with metric ttft, tpot, itl, e2el.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _benchmark_program, _redact
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

SCHEMA = 1
STAGE = "benchmark"
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = ("p50", "p90", "p99")
RATES = ("output_throughput", "total_token_throughput", "request_throughput")
LENGTHS = ({"input": 128, "output": 128}, {"input": 1024, "output": 128})  # when nobody gives any
NOISE = 0.03  # a difference below this part is not told as better or worse

_TELLING = re.compile(r"^(VLLM|NCCL|GLOO|TP|UCX|RAY|OMP|TORCH\w*|PYTORCH|CUDA|FLASHINFER|TRITON|HF|TRANSFORMERS|NVIDIA)_", re.IGNORECASE)


# --- what is measured


def points(concurrency: t.Sequence[t.Any], lengths: t.Sequence[t.Mapping[str, t.Any]], requests: int = 0) -> list[dict[str, int]]:
    """One point for each pair of lengths and each concurrency, the cheap ones first. Raises Problem.

    Without a number of requests: four for each client, sixteen at least.
    """
    result = []
    for given in lengths:
        if not isinstance(given, dict) or set(given) != {"input", "output"}:
            raise _input("lengths", given, "entries with input and output, such as {input: 128, output: 128}")
        pair = {key: _whole("lengths", given, given[key]) for key in ("input", "output")}
        for clients in sorted({_whole("concurrency", value, value) for value in concurrency}):
            result.append({**pair, "concurrency": clients, "requests": max(clients, requests or max(16, 4 * clients))})
    if not result:
        raise _input("concurrency" if not concurrency else "lengths", [], "one entry at least")
    unique = {(p["input"], p["output"], p["concurrency"]): p for p in result}
    return list(unique.values())


def _input(name: str, given: t.Any, expected: str) -> Problem:
    return Problem(
        "input", stage="inputs", found=f"spark_benchmark_{name} {given!r}", expected=expected, remedy="correct what you gave with -e"
    )


def _whole(name: str, given: t.Any, value: t.Any) -> int:
    if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
        raise _input(name, given, "whole numbers from 1")
    return int(value)


def lengths(given: t.Sequence[t.Mapping[str, t.Any]], limit: int | None) -> list[t.Mapping[str, t.Any]]:
    """The lengths that were given, else those of ours that the server's context holds (at least one: a fourth of it, in halves)."""
    if given:
        return list(given)
    fitting = [pair for pair in LENGTHS if not limit or pair["input"] + pair["output"] <= limit]
    return list(fitting) or [{"input": max(1, (limit or 8) // 8), "output": max(1, (limit or 8) // 8)}]


def too_long(wanted: t.Iterable[t.Mapping[str, int]], limit: int | None) -> Problem | None:
    """What the server's context cannot hold; None when all fits, or the limit is not known."""
    over = [f"{p['input']}+{p['output']}" for p in wanted if limit and p["input"] + p["output"] > limit]
    if not over:
        return None
    return Problem(
        "benchmark-length",
        stage=STAGE,
        found=f"spark_benchmark_lengths {', '.join(dict.fromkeys(over))} tokens",
        expected=f"at most {limit} tokens of input and output together, the server's context",
        remedy="give shorter lengths, or serve with a larger spark_max_model_len",
    )


def not_serving(status: t.Mapping[str, t.Any]) -> Problem | None:
    """Why there is nothing to measure; None when the server answers."""
    if status["state"] in ("serving", "degraded"):
        return None
    return Problem(
        "benchmark-no-server",
        stage=STAGE,
        found=f"{str(status['state']).replace('_', ' ')}: {status['text']}",
        expected="a server of this collection that answers",
        remedy="site.yml starts it, status.yml shows how far it is",
    )


# --- the tool


def program_source() -> str:
    """Text of the program that runs in the container."""
    return inspect.getsource(_benchmark_program)


def flag(command: t.Sequence[str], *names: str) -> str:
    """Value of an option in a command line, as ``--x y`` or ``--x=y``; "" when it is not given."""
    value = ""
    for number, word in enumerate(command):
        for name in names:
            if word == name and number + 1 < len(command):
                value = command[number + 1]
            elif word.startswith(f"{name}="):
                value = word.partition("=")[2]
    return value


def model_path(command: t.Sequence[str]) -> str:
    """What ``vllm serve`` was given as the model."""
    words = list(command)
    if "serve" in words[:-1]:
        following = words[words.index("serve") + 1]
        if not following.startswith("-"):
            return following
    return flag(words, "--model")


def arguments(point: t.Mapping[str, int], server: t.Mapping[str, t.Any], seed: int) -> list[str]:
    """Options of ``vllm bench serve`` for one point. ``server``: {url, model (served name), command}.

    The seed differs from point to point and from run to run: with the same one the prompts were the same, and answered from the prefix cache.
    """
    command = list(server["command"])
    argv = ["--base-url", str(server["url"]), "--model", str(server["model"])]
    tokenizer = flag(command, "--tokenizer") or model_path(command)
    argv += ["--tokenizer", tokenizer] if tokenizer else []
    mode = flag(command, "--tokenizer-mode")
    argv += ["--tokenizer-mode", mode] if mode else []
    argv += ["--trust-remote-code"] if "--trust-remote-code" in command else []
    argv += ["--dataset-name", "random", "--random-input-len", str(point["input"]), "--random-output-len", str(point["output"])]
    argv += ["--num-prompts", str(point["requests"]), "--max-concurrency", str(point["concurrency"]), "--seed", str(seed)]
    argv += ["--ignore-eos", "--temperature", "0", "--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,90,99"]
    return argv


def told(text: str) -> list[dict[str, t.Any]]:
    """What the program in the container told, line by line; other lines are left out."""
    result = []
    for line in text.splitlines():
        if line.startswith(_benchmark_program.MARK):
            try:
                data = json.loads(line[len(_benchmark_program.MARK) :])
            except ValueError:
                continue
            if isinstance(data, dict) and "kind" in data:
                result.append(data)
    return result


_MISSING = re.compile(r"(?:ModuleNotFoundError|ImportError): (.+)")
_NO_TOOL = re.compile(r"(invalid choice: '?(?:bench|serve)'?|unrecognized arguments: .+|No such command.*)")
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Refused)\b.*")


def _last_words(text: str) -> str:
    """The line of the tool's output that says what went wrong: the last one that names an error, else the last."""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    return (named or lines or ["it said nothing"])[-1][:300]


def failure(end: t.Mapping[str, t.Any] | None, point: t.Mapping[str, int], limit: float, said: str = "") -> Problem | None:
    """What is wrong with the end of one point; None when it was measured. ``end`` is what the program told last (None: nothing)."""
    where = f"{point['input']}+{point['output']} tokens, {point['concurrency']} at a time"
    if end is None:
        return _failed(f"{where}: no answer of the tool ({_last_words(said)})", "see logs.yml: the container may have ended")
    tail = str(end.get("tail") or "")
    if end.get("late"):
        remedy = "raise spark_benchmark_timeout, or give fewer requests or shorter lengths"
        return _failed(f"{where}: not done after {limit:g} s, ended", remedy)
    found = _MISSING.search(tail) if end.get("rc") else None
    tool = found or (_NO_TOOL.search(tail) if end.get("rc") else None)
    if tool or end.get("rc") == 127:
        return Problem(
            "benchmark-tool",
            stage=STAGE,
            found=f"vllm bench serve of the serving image does not run: {tool.group(1)[:200] if tool else _last_words(tail)}",
            expected="an image with vLLM 0.10 or newer and what its load tool imports",
            remedy="serve from an image that has it (vLLM's extra 'bench')",
        )
    result = end.get("result")
    if end.get("rc") or not isinstance(result, dict):
        return _failed(f"{where}: the tool ended with code {end.get('rc')}: {_last_words(tail)}", "see logs.yml for what the server says")
    if not result.get("completed"):
        return _failed(f"{where}: none of {point['requests']} requests was answered: {_last_words(tail)}", "see status.yml and logs.yml")
    return None


def _failed(found: str, remedy: str) -> Problem:
    return Problem("benchmark-failed", stage=STAGE, found=found, expected="every point of the sweep measured", remedy=remedy)


# --- results


def figures(result: t.Mapping[str, t.Any]) -> dict[str, float]:
    """The figures of one point from the tool's result: rates, percentiles in milliseconds, counts. What it did not tell is left out."""
    found: dict[str, float] = {}
    names = [*RATES, "duration", "completed", *(f"{stat}_{metric}_ms" for metric in METRICS for stat in ("mean", *PERCENTILES))]
    for name in names:
        value = result.get(name)
        if name.startswith("p50_") and value is None:
            value = result.get(name.replace("p50_", "median_"))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
            found[name] = value
    if "completed" in found:
        failed = result.get("failed")
        found["failed"] = failed if isinstance(failed, int) else int(result.get("num_prompts") or found["completed"]) - found["completed"]
    return found


def kept(result: t.Any) -> dict[str, t.Any] | None:
    """The tool's result without what it lists for every single request."""
    return {name: value for name, value in result.items() if not isinstance(value, list)} if isinstance(result, dict) else None


def key(point: t.Mapping[str, t.Any]) -> tuple[int, int, int]:
    """What makes two points of two runs the same one."""
    return int(point["input"]), int(point["output"]), int(point["concurrency"])


def measured(run: t.Mapping[str, t.Any] | None) -> dict[tuple[int, int, int], dict[str, float]]:
    """Figures of every point of a run that was measured, by ``key``."""
    return {
        key(p): figures(p["result"]) for p in (run or {}).get("points", []) if isinstance(p.get("result"), dict) and not p.get("problem")
    }


def change(now: float | None, before: float | None) -> float | None:
    """Part by which a figure grew (0.1 is ten percent more); None when there is nothing to compare."""
    if now is None or not before:
        return None
    return now / before - 1


def better(name: str, part: float | None) -> str:
    """``better``, ``worse`` or "" (too small, or nothing to compare) for a figure: rates should grow, times should shrink."""
    if part is None or abs(part) < NOISE:
        return ""
    return "better" if (part > 0) == (name in RATES) else "worse"


# --- the document


def public_command(command: t.Sequence[str]) -> list[str]:
    """A command line without secrets."""
    words = list(command)
    return list(_redact.data(words, _redact.values(words)))


def public_env(entries: t.Iterable[str]) -> dict[str, str]:
    """Variables of a container that say how it serves, without secrets."""
    pairs = [entry.partition("=") for entry in entries]
    return {name: _redact.text(value) for name, _sep, value in sorted(pairs) if _TELLING.match(name) and not _redact.secret_name(name)}


def slug(text: str) -> str:
    """A part of a file name: ``Qwen/Qwen3.5-122B`` -> ``qwen3.5-122b``."""
    return re.sub(r"[^a-z0-9.]+", "-", text.rstrip("/").rpartition("/")[2].lower()).strip("-.") or "model"


def run_id(stamp: str, model: str, name: str = "") -> str:
    """Name of a run's files: ``20261130T191500Z-tiny-qwen3`` or, with a name, ``...-tiny-qwen3-before``. Sorts by time."""
    moment = re.sub(r"[-:]", "", stamp).partition("+")[0].partition(".")[0].rstrip("Z") + "Z"
    return "-".join([moment, slug(model), *([slug(name)] if name else [])])


def node_facts(row: t.Mapping[str, t.Any], facts: t.Mapping[str, t.Any] | None) -> dict[str, t.Any]:
    """What is kept of a node: the row of ``serving_status`` and the facts of ``node_info``."""
    facts = facts or {}
    gpu = facts.get("gpu") or {}
    system = facts.get("os") or {}
    dgx = facts.get("dgx") or {}
    return {
        "node": row["node"],
        "role": row["role"],
        "reachable": row["reachable"],
        "fabric": {k: row["fabric"].get(k) for k in ("address", "interface", "rails", "rdma", "mtu")},
        "memory": (row.get("memory") or {}).get("total"),
        "machine": facts.get("machine"),
        "kernel": facts.get("kernel"),
        "system": dgx.get("pretty") or system.get("pretty"),
        "gpus": [device.get("name") for device in gpu.get("devices") or []],
        "driver": gpu.get("driver") or None,
        "docker": (facts.get("docker") or {}).get("version") or None,
    }


def configuration(
    status: t.Mapping[str, t.Any],
    settings: t.Mapping[str, t.Any],
    look: t.Mapping[str, t.Any],
    rows: t.Sequence[t.Mapping[str, t.Any]],
    facts: t.Sequence[t.Mapping[str, t.Any]],
) -> dict[str, t.Any]:
    """Everything that the figures depend on and that can be seen."""
    head = next(row for row in rows if row["role"] == "head")
    image = head.get("image") or {}
    known = {node.get("name"): node for node in facts}
    return {
        "model": status["model"],
        "revision": status["revision"],
        "served_model_name": status["served_model_name"],
        "max_model_len": status["max_model_len"],
        "image": {
            "reference": look.get("image") or image.get("reference"),
            "fingerprint": image.get("fingerprint"),
            "id": look.get("image_id") or image.get("id"),
            "digests": look.get("digests") or [],
        },
        "versions": {**look.get("versions", {})},
        "executor": settings.get("executor"),
        "command": public_command(look.get("command") or []),
        "environment": look.get("env") or {},
        "started_at": look.get("started_at"),
        "nodes": [node_facts(row, known.get(row["node"])) for row in rows],
    }


def flatten(value: t.Any, name: str = "") -> dict[str, str]:
    """Nested data as ``a.b`` -> text, to compare two of them."""
    if isinstance(value, dict):
        result: dict[str, str] = {}
        for part in value:
            result.update(flatten(value[part], f"{name}.{part}" if name else str(part)))
        return result
    if isinstance(value, list) and value and all(isinstance(item, dict) and "node" in item for item in value):
        result = {}
        for item in value:
            result.update(flatten({k: v for k, v in item.items() if k != "node"}, f"{name}.{item['node']}"))
        return result
    if isinstance(value, list):
        return {name: " ".join(str(item) for item in value)}
    return {name: "" if value is None else str(value)}


# When, and what follows from it: not a difference between two configurations.
_ALWAYS_NEW = ("started_at",)


def differences(now: t.Mapping[str, t.Any], before: t.Mapping[str, t.Any]) -> list[tuple[str, str, str]]:
    """(name, before, now) of every part of the configuration that changed between two runs."""
    left, right = flatten(before), flatten(now)
    names = [name for name in dict.fromkeys([*right, *left]) if name not in _ALWAYS_NEW]
    return [(name, left.get(name, ""), right.get(name, "")) for name in names if left.get(name, "") != right.get(name, "")]


def is_run(document: t.Any) -> bool:
    """Whether a JSON document is a run that this version understands."""
    return isinstance(document, dict) and document.get("schema") == SCHEMA and isinstance(document.get("points"), list) and "id" in document


def previous(runs: t.Sequence[t.Mapping[str, t.Any]], model: str, wanted: str, before: str) -> t.Mapping[str, t.Any] | None:
    """The run to compare with: the one whose id or name is ``wanted`` (the newest of that name), else the newest complete one of the same model.

    ``wanted`` "none" compares with nothing; ``before`` is the date of this run. Raises Problem.
    """
    if wanted == "none":
        return None
    if not wanted:
        earlier = [r for r in runs if r.get("complete") and (r.get("config") or {}).get("model") == model and str(r.get("date")) < before]
        return max(earlier, key=lambda r: str(r["date"]), default=None)
    named = [r for r in runs if wanted in (r["id"], r.get("name"))]
    if named:
        return max(named, key=lambda r: str(r.get("date")))
    there = ", ".join(sorted(str(r["id"]) for r in runs)[-5:]) or "none"
    raise Problem(
        "benchmark-previous",
        stage=STAGE,
        found=f"spark_benchmark_compare {wanted!r}",
        expected=f"the id or the name of a run in spark_benchmark_dir (the newest: {there})",
        remedy="correct it; without it the newest run of the same model is taken, with 'none' no other",
    )


# --- for people


def number(value: float | None) -> str:
    """Three significant digits, no exponent: ``0.0123`` ``1.23`` ``12.3`` ``123`` ``12 345``."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}".replace(",", " ")
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1 or value == 0:
        return f"{value:.2f}"
    return f"{value:.3f}"


def percent(part: float | None) -> str:
    """``+12 %``, ``-3.1 %``; "" for None."""
    if part is None:
        return ""
    return f"{100 * part:+.0f} %" if abs(part) >= 0.1 else f"{100 * part:+.1f} %"


HEADINGS = ("INPUT", "OUTPUT", "CLIENTS", "TOKENS/S", "CHANGE", "REQUESTS/S", "TTFT ms p50", "p99", "ITL ms p50", "p99", "LATENCY ms p50")


def table(run: t.Mapping[str, t.Any], earlier: t.Mapping[str, t.Any] | None) -> list[list[str]]:
    """Lines of cells for the terminal; CHANGE is that of the tokens per second against the earlier run."""
    lines = [list(HEADINGS)]
    now, before = measured(run), measured(earlier)
    for point in run["points"]:
        words = [str(part) for part in key(point)]
        found = now.get(key(point))
        if found is None:
            lines.append([*words, "failed", *[""] * (len(HEADINGS) - 4)])
            continue
        grown = percent(change(found.get("output_throughput"), before.get(key(point), {}).get("output_throughput")))
        shown = ("request_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "p50_e2el_ms")
        lines.append([*words, number(found.get("output_throughput")), grown, *(number(found.get(name)) for name in shown)])
    return lines
