# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inputs of the collection: inventory variables ``spark_*`` against the specification in roles/preflight.

PRIVATE to the collection. Pure functions over plain data.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _gate, _overrides, _service
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

PREFIX = "spark_"
# Inputs of one playbook that may stand in the inventory, too: the other playbooks leave them alone.
ELSEWHERE = "spark_benchmark_"
REMEDY = "correct it in the inventory's group_vars or host_vars"


def without_elsewhere(given: dict[str, t.Any], known: t.Iterable[str]) -> dict[str, t.Any]:
    """The inputs without those of another playbook; all of them in that playbook itself, where a wrong name of them must be found."""
    if any(name.startswith(ELSEWHERE) for name in known):
        return given
    return {name: value for name, value in given.items() if not name.startswith(ELSEWHERE)}


def unknown_inputs(given: t.Iterable[str], known: t.Iterable[str]) -> list[Problem]:
    """One problem for each ``spark_*`` variable that nothing reads: most often a spelling mistake."""
    known = sorted(known)
    problems = []
    for name in sorted(set(given) - set(known)):
        close = difflib.get_close_matches(name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in known], n=1)
        hint = f"did you mean {PREFIX}{close[0]}?" if close else "remove it, or prefix your own variables with something else"
        problems.append(
            Problem("input", stage="inputs", found=f"unknown variable {name}", expected="only documented spark_ variables", remedy=hint)
        )
    return problems


def value_problems(settings: dict[str, t.Any]) -> list[Problem]:
    """Values of the right type that cannot be meant. ``settings`` has names without the prefix."""
    problems: list[Problem] = []

    def refuse(name: str, expected: str, remedy: str = REMEDY) -> None:
        problems.append(Problem("input", stage="inputs", found=f"{PREFIX}{name} {settings[name]!r}", expected=expected, remedy=remedy))

    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?|~?(/[^/\0:]+)+/?", settings["model"]):
        refuse("model", "a repository such as Qwen/Qwen3.5-122B-A10B-FP8, or the absolute path of a directory or GGUF file")
    if not re.fullmatch(r"[a-zA-Z0-9][\w./:@-]*", settings["image"]):
        refuse("image", "an image reference such as name:tag or name@sha256:...")
    try:
        if settings["fabric_subnet"] and ipaddress.IPv4Network(settings["fabric_subnet"], strict=False).prefixlen == 32:
            refuse("fabric_subnet", "a subnet, not a single address, such as 192.168.200.0/24")
    except ValueError:
        refuse("fabric_subnet", "an IPv4 subnet in CIDR form, such as 192.168.200.0/24, or nothing to have it found")
    if settings["gid_index"] not in ("", "auto") and not re.fullmatch(r"\d{1,3}", settings["gid_index"]):
        refuse("gid_index", "nothing (NCCL finds it), auto, or a number that is right for every RDMA device of every node")
    for name in ("api_port", "ray_port", "mp_port", "dp_port"):
        if not 1024 <= settings[name] <= 65535:
            refuse(name, "a port from 1024 to 65535")
    if not _service.is_name(settings["service"]):
        refuse("service", "at most 20 small letters, digits and hyphens, without the word previous, and not next at the end")
    if settings["port_offset"] % _service.STEP or not 0 <= settings["port_offset"] <= _service.MOST:
        refuse("port_offset", f"a multiple of {_service.STEP} from 0 to {_service.MOST}")
    for name in (
        "tensor_parallel",
        "pipeline_parallel",
        "data_parallel",
        "gpus_per_node",
        "ray_num_cpus",
        "ready_timeout",
        "ray_timeout",
        "stop_timeout",
        "boot_wait",
        "diagnostics_keep",
    ):
        if settings[name] < 1:
            refuse(name, "1 or more")
    if not 0.05 <= settings["gpu_memory_utilization"] <= 0.90:
        refuse("gpu_memory_utilization", "0.05 to 0.90 (more pushes a unified-memory node over the edge, MEM-04)", "set 0.80 to 0.87")
    for limit in settings["ulimits"]:
        if not re.fullmatch(r"[a-z]+:-?\d+(:-?\d+)?", limit):
            refuse("ulimits", "entries such as memlock:-1:-1 or nofile:65536:65536")
            break
    for key in settings["env"]:
        if re.search(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)_KEY)$", str(key).upper()):
            refuse_secret = Problem(
                "input",
                stage="inputs",
                found=f"{key} in spark_env",
                expected="no secrets there: the environment is visible in docker inspect",
                remedy="use spark_hf_token_file for a hub token",
            )
            problems.append(refuse_secret)
    problems += _overrides.form_problems(settings["env"])
    problems += _gate.override_problems(settings["gate"])
    return problems


def plain(text: str) -> str:
    """Messages of Ansible's own validator, which calls every input a parameter or argument, in the words of an inventory."""
    return (
        text.replace("missing required arguments: ", "no value for the variable ")
        .replace("argument '", "variable '")
        .replace(" found in 'spark_", " in 'spark_")
    )


def resolve(settings: dict[str, t.Any]) -> dict[str, t.Any]:
    """Fills what depends on another input."""
    # What is in a directory is named by it, not by its whole path.
    model = settings["model"].rstrip("/").rpartition("/")[2] if settings["model"].startswith(("/", "~")) else settings["model"]
    service = settings["service"]
    return {
        "fabric_rails": [],  # subnets of further rails: filled in where the fabric is found
        **settings,
        **{name: settings[name] + settings["port_offset"] for name in ("ray_port", "mp_port", "dp_port")},
        "served_model_name": settings["served_model_name"] or model,
        "api_local_url": _service.local_url(settings["api_host"], settings["api_port"]),
        "names": {role: _service.own(role, service) for role in _service.ROLES},
        "record": _service.record(service),
    }
