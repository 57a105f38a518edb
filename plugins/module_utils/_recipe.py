# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Recipes: the data of one model. Ours, and those of sparkrun (version 2) and of eugr/spark-vllm-docker (version 1) as they are.

PRIVATE to the collection. Pure functions over plain data: a recipe comes in as the dictionary that its YAML file holds. A foreign one is
mapped to
inputs of ours; each of its fields that cannot be honoured is named, as a warning, or as an error where leaving it out would change what
is served.
"""

from __future__ import annotations

import json
import re
import shlex
import string
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _fit
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._status import columns

PREFIX = "spark_"
MOST_NODES = 64

# Inputs that belong to one model: when -e recipe=... asks for another model than the inventory names, the inventory's are about that one.
BOUND = (
    "image",
    "model",
    "model_revision",
    "model_exclude",
    "served_model_name",
    "executor",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "gpu_memory_utilization",
    "max_model_len",
    "vllm_args",
    "env",
)
OWN_KEYS = {"name", "description", "source", "nodes", "weights_gib", "memory_gib", "settings", "notes"}

# --- fields of the foreign formats: what becomes of each that is not mapped ---

INFORMATION = {  # says something about the recipe, nothing about the service
    "name",
    "description",
    "metadata",
    "benchmark",
    "recipe_version",
    "sparkrun_version",
    "runtime_version",
    "capabilities",
    "unsupported_capabilities",
    "maintainer",
}
SPARKRUN_MAPPED = {
    "model",
    "model_revision",
    "runtime",
    "container",
    "mode",
    "min_nodes",
    "max_nodes",
    "solo_only",
    "cluster_only",
    "defaults",
    "env",
    "command",
    "executor",
}
SPARKRUN_REFUSED = {
    "mods": "changes files inside the image before the start",
    "pre_exec": "runs commands inside the containers before the start",
    "build_args": "builds another image than the one that is named",
    "containers": "gives each machine an image of its own; the collection serves one image on all nodes",
    "include": "takes further settings from another file",
    "overrides": "changes settings of another file",
    "distribution_config": "distributes further models or images",
    "cluster_config": "describes another place for the model",
}
SPARKRUN_LEFT = {
    "executor_config": "containers are defined by the collection (docs/design.md)",
    "runtime_cache": "compiled kernels are always kept, per image",
    "runtime_config": "not part of the server's command",
    "readiness": "the collection's own proof of readiness is used",
    "scheduler": "the nodes are those of the inventory",
    "layout": "the nodes are those of the inventory",
    "post_exec": "nothing is run after the start",
    "post_commands": "nothing is run after the start",
    "stop_after_post": "nothing is run after the start",
    "builder_config": "nothing is built",
}
# (pull_image: an image that is not on the head is always pulled)
EUGR_MAPPED = {"model", "container", "pull_image", "cluster_only", "solo_only", "defaults", "env", "command"}
FINAL = ("runtime", "command", "model")  # without these there is nothing to serve: spark_recipe_ignore does not help
BUILDERS = ("", "docker-pull", "eugr")  # these take the named image as it is, as long as build_args does not ask for another
RAY_RUNTIMES = ("vllm-ray", "eugr-vllm")
MP_RUNTIMES = ("", "vllm", "vllm-distributed")

# --- arguments of vllm serve ---

SETTING = {
    "--model": "model",
    "--served-model-name": "served_model_name",
    "--revision": "model_revision",
    "--host": "api_host",
    "--port": "api_port",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--pipeline-parallel-size": "pipeline_parallel",
    "-pp": "pipeline_parallel",
    "--data-parallel-size": "data_parallel",
    "-dp": "data_parallel",
    "--distributed-executor-backend": "executor",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--max-model-len": "max_model_len",
}
OURS = (
    *("--nnodes", "--node-rank", "-n", "-r", "--master-addr", "--master-port", "--headless", "--download-dir"),
    *("--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp"),
    *("--data-parallel-backend", "-dpb", "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr"),
)
BALANCED = ("--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-multi-port-external-lb")
SECRETS = ("--api-key", "--hf-token")
FILES = ("--chat-template", "--reasoning-parser-plugin", "--tool-parser-plugin")
# Somebody else's interfaces and addresses, and what the collection sets on every node itself.
SITE_ENV = re.compile(
    r"NCCL_(SOCKET_IFNAME|IB_HCA|IB_GID_INDEX|IB_DISABLE|NET)|GLOO_SOCKET_IFNAME|TP_SOCKET_IFNAME|UCX_NET_DEVICES|OMPI_MCA_\w+|MN_IF_NAME"
    r"|VLLM_HOST_IP|MASTER_ADDR|MASTER_PORT|NODE_IP|RAY_(NODE_IP_ADDRESS|OVERRIDE_NODE_IP_ADDRESS|ADDRESS)"
    r"|HF_HOME|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE"
)
SECRET_ENV = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|API_KEY)$")
NAMED = {
    "tensor_parallel": "-tp",
    "pipeline_parallel": "-pp",
    "data_parallel": "--data-parallel-size",
}  # defaults of a recipe without a command
SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def refuse(found: str, expected: str, remedy: str, ident: str = "recipe-invalid") -> Problem:
    """A Problem of this stage."""
    return Problem(ident, stage="recipe", found=found, expected=expected, remedy=remedy)


def empty(name: str, kind: str) -> dict[str, t.Any]:
    """A recipe without content. ``errors`` are fields that cannot be left out (field: reason), ``warnings`` sentences."""
    return {
        "name": name,
        "format": kind,
        "description": "",
        "source": [],
        "notes": "",
        "nodes": [],
        "weights_gib": None,
        "memory_gib": None,
        "settings": {},
        "warnings": [],
        "errors": {},
    }


def kind_of(data: t.Any) -> str:
    """V(own), V(sparkrun), V(eugr), or "" for none of them."""
    if not isinstance(data, dict):
        return ""
    if isinstance(data.get("settings"), dict):
        return "own"
    version = str(data.get("recipe_version", ""))
    if version.partition(".")[0] == "1":
        return "eugr"
    if version.partition(".")[0] == "2" or (not version and "model" in data and {"runtime", "container"} & set(data)):
        return "sparkrun"
    if not version and {"name", "container", "command"} <= set(data):
        return "eugr"
    return ""


def parse(data: t.Any, name: str) -> dict[str, t.Any]:
    """A recipe of any of the three formats. Raises Problem."""
    kind = kind_of(data)
    data = {str(key): value for key, value in data.items()} if kind else data  # YAML reads a bare 1 or yes as another type
    if kind == "own":
        return own(data, name)
    if kind == "sparkrun":
        return sparkrun(data, name)
    if kind == "eugr":
        return eugr(data, name)
    raise refuse(
        f"{name}, which is no recipe in a known format",
        "a recipe of this collection (settings), of sparkrun (recipe_version 2, model) or of spark-vllm-docker (recipe_version 1, "
        "container, command)",
        "see docs/recipes.md for the fields",
    )


# --- ours ---


def own(data: dict[str, t.Any], name: str) -> dict[str, t.Any]:
    """A recipe in our own form. Raises Problem."""

    def wrong(found: str, expected: str) -> Problem:
        return refuse(f"{found} in the recipe {name}", expected, "see docs/recipes.md for the fields")

    unknown = sorted(set(data) - OWN_KEYS)
    if unknown:
        raise wrong(f"unknown field {unknown[0]}", f"only {', '.join(sorted(OWN_KEYS))}")
    recipe = empty(str(data.get("name") or name), "own")
    settings = data["settings"]
    odd = sorted(map(str, set(settings) - set(BOUND)))
    if odd:
        raise wrong(f"settings.{odd[0]}", f"only inputs that belong to the model: {', '.join(BOUND)}")
    for needed in ("image", "model"):
        if not settings.get(needed):
            raise wrong(f"no settings.{needed}", "image and model")
    nodes = data.get("nodes")
    if not isinstance(nodes, list) or not nodes or not all(isinstance(n, int) and n > 0 for n in nodes):
        raise wrong(f"nodes {nodes!r}", "a list of numbers of Sparks, such as [1, 2]")
    sources = data.get("source")
    if not isinstance(sources, list) or not all(isinstance(s, dict) and s.get("url") and s.get("date") for s in sources) or not sources:
        raise wrong("no source", "a list of sources, each with url and date")
    for size in ("weights_gib", "memory_gib"):
        value = data.get(size)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
            raise wrong(f"{size} {value!r}", "a size in GiB")
    recipe.update({key: data[key] for key in data if key != "name"})
    recipe["source"] = [{key: str(value) for key, value in source.items()} for source in sources]
    return recipe


# --- foreign formats ---


def fill(template: str, values: t.Mapping[str, t.Any], doubled: bool) -> str:
    """A command with its placeholders filled in. ``doubled``: the template escapes a brace by doubling it (Python's format).

    A name without a value stays as it is. Raises ValueError for a template that cannot be read.
    """
    if doubled:
        parts = []
        for literal, field, _spec, _conversion in string.Formatter().parse(template):
            parts.append(literal)
            if field is not None:
                parts.append(plain(values[field]) if field in values else "{" + field + "}")
        return "".join(parts)
    for _round in range(3):  # a value may hold a placeholder itself
        filled = re.sub(r"\{(\w+)\}", lambda found: plain(values[found[1]]) if found[1] in values else found[0], template)
        if filled == template:
            break
        template = filled
    return template


def plain(value: t.Any) -> str:
    """A value of YAML as a word of a command."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def command_words(recipe: dict[str, t.Any], command: str, values: t.Mapping[str, t.Any], doubled: bool) -> list[str]:
    """The words of a recipe's command after its placeholders are filled in, from ``vllm serve`` on; notes what cannot be honoured."""
    joined = re.sub(r"\\[ \t]*\n", " ", command).strip().rstrip("\\")
    try:
        filled = fill(joined, values, doubled)
    except ValueError:
        filled = fill(joined, values, False)
    lines = [line for line in filled.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    try:
        words = shlex.split(filled, comments=True)
        if len(lines) > 1 and not unfinished(lines[0]):
            recipe["errors"]["command"] = "has more than one command"
    except ValueError as exc:
        recipe["errors"]["command"] = f"cannot be read as a shell reads it ({exc})"
        return []
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        key, _equals, value = words.pop(0).partition("=")
        environment(recipe, {key: value})
    if words[:1] == ["exec"]:
        del words[0]
    if words[:2] == ["vllm", "serve"]:
        del words[:2]
    elif len(words) > 2 and words[0].startswith("python") and words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
        del words[:3]
    else:
        recipe["errors"]["command"] = f"runs {' '.join(words[:2]) or 'nothing'}, not vllm serve"
        return []
    for word in words:
        open_ = re.search(r"\{[A-Za-z_]\w*\}", word)
        if open_:
            recipe["errors"]["command"] = f"has the placeholder {open_[0]} without a value"
        elif word in ("&&", "||", ";", "|", "&") or re.match(r"\$[({\w]", word):
            recipe["errors"]["command"] = f"is more than one call of vllm serve ({word})"
    return words


def unfinished(line: str) -> bool:
    """Whether a quotation that begins in this line goes on in the next."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def groups(words: t.Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Words before the first flag, and each flag with the words after it. ``--a=b`` and ``--a_b`` become what vLLM means."""
    first: list[str] = []
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                head, dot, tail = name.partition(".")  # --compilation-config.cudagraph_mode: what follows the dot is a key
                name = head.replace("_", "-") + dot + tail
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            first.append(word)
    return first, found


def tokens(text: str) -> int:
    """``--max-model-len``: a number, or one with k, m, g (thousands) or K, M, G (1024s). Raises ValueError."""
    if text[-1:] in SUFFIX:
        return int(float(text[:-1]) * SUFFIX[text[-1]])
    return int(text)


def arguments(recipe: dict[str, t.Any], words: t.Sequence[str]) -> None:
    """Maps arguments of ``vllm serve`` to settings; what has no setting goes to vllm_args as it is."""
    settings, warnings, errors = recipe["settings"], recipe["warnings"], recipe["errors"]
    first, found = groups(words)
    if first:
        model(recipe, first[0])
    extra: list[str] = []
    for flag, values in found:
        value = values[0] if values else ""
        if flag in SETTING:
            take(recipe, flag, value)
            if flag == "--served-model-name" and len(values) > 1:
                warnings.append(f"{flag}: further names ({', '.join(values[1:])}) are left out, one is served")
        elif flag in SECRETS:
            errors[flag] = "is a secret on a command line"
        elif flag in OURS:
            warnings.append(f"{flag} is left out: the collection sets it")
        elif flag in BALANCED:
            errors[flag] = "wants one API for each engine; the collection serves one endpoint"
        elif flag == "--tokenizer" and value not in (settings.get("model"), ""):
            errors[flag] = f"{value} is a second repository; the collection brings one model to the nodes"
        else:
            second = drafter(flag, value, settings.get("model")) if flag.partition(".")[0] in ("--speculative-config", "-sc") else ""
            if second:
                errors[flag] = f"{second} is a second model; the collection brings one model to the nodes"
                continue
            if flag in FILES and value and not value.startswith("/") and not value.lstrip().startswith("{"):
                warnings.append(f"{flag} {value} must be a file in the image, where vllm is started")
            extra += [flag, *values]
    if extra:
        settings["vllm_args"] = extra


def drafter(flag: str, value: str, served: str | None) -> str:
    """The model of a speculative configuration when it is not the served one."""
    if flag.endswith(".model"):
        name = value
    else:
        try:
            parsed = json.loads(value)
        except ValueError:
            return ""
        name = str(parsed.get("model") or "") if isinstance(parsed, dict) else ""
    return "" if name == served else name


def take(recipe: dict[str, t.Any], flag: str, value: str) -> None:
    """One argument that has a setting of its own."""
    settings, errors = recipe["settings"], recipe["errors"]
    name = SETTING[flag]
    try:
        if name == "model":
            model(recipe, value)
        elif name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "api_port"):
            settings[name] = int(value)
        elif name == "gpu_memory_utilization":
            settings[name] = float(value)
        elif name == "max_model_len":
            settings[name] = tokens(value)
            if settings[name] < 1:
                raise ValueError
        elif name == "executor" and value not in ("ray", "mp"):
            errors[flag] = f"{value}: only ray and mp span nodes"
        else:
            settings[name] = value
    except (ValueError, OverflowError):  # infk
        settings.pop(name, None)
        errors[flag] = f"{value!r} has no meaning here"


def model(recipe: dict[str, t.Any], name: t.Any) -> None:
    """The model: a repository of the hub, not a path and not one file of a repository."""
    name = str(name or "")
    if recipe["settings"].get("model") not in (None, name) and name:
        recipe["errors"]["model"] = f"is {recipe['settings']['model']}, and the command serves {name}"
    elif name.startswith(("/", "~", ".")):
        recipe["errors"]["model"] = f"{name} is a path; the collection serves repositories of the hub"
    elif ":" in name or name.upper().endswith("GGUF"):
        recipe["errors"]["model"] = f"{name} is a GGUF file, which is not served with vLLM here"
    elif name:
        recipe["settings"]["model"] = name


def environment(recipe: dict[str, t.Any], env: t.Mapping[t.Any, t.Any]) -> None:
    """Environment: everything but what is about somebody else's machine."""
    for key, value in env.items():
        key, value = str(key), plain(value)
        if SECRET_ENV.search(key.upper()):
            recipe["errors"][f"env.{key}"] = "is a secret; use spark_hf_token_file for a hub token"
        elif SITE_ENV.fullmatch(key):
            recipe["warnings"].append(f"env.{key} is left out: the collection sets it for each node")
        elif "$" in value:
            recipe["errors"][f"env.{key}"] = "refers to a variable of another machine's shell"
        else:
            recipe["settings"].setdefault("env", {})[key] = value


def span(recipe: dict[str, t.Any], low: int, high: int | None) -> None:
    """Numbers of nodes from a lowest and a highest."""
    recipe["nodes"] = [] if low <= 1 and high is None else list(range(low, (high or MOST_NODES) + 1))


def sizes(recipe: dict[str, t.Any], metadata: t.Any) -> None:
    """sparkrun's figure for the weights, in GB, as memory of the weights."""
    value = metadata.get("model_vram") if isinstance(metadata, dict) else None
    if isinstance(value, (int, float)) and value > 0:
        recipe["weights_gib"] = round(value * 1e9 / _fit.GIB, 2)


def image(recipe: dict[str, t.Any], data: dict[str, t.Any]) -> None:
    """The image, and whether it can be had from a registry at all."""
    name = str(data.get("container") or "")
    if not name:
        recipe["warnings"].append("container is missing: set spark_image")
        return
    recipe["settings"]["image"] = name
    if "/" not in name:
        recipe["warnings"].append(f"container {name} is the name of an image that is built locally: it must be on the head already")


def sparkrun(data: dict[str, t.Any], name: str) -> dict[str, t.Any]:
    """A recipe of sparkrun, version 2. Raises Problem."""
    recipe = empty(str(data.get("name") or name), "sparkrun")
    metadata = data.get("metadata") or {}
    recipe["description"] = str(data.get("description") or (metadata.get("description") if isinstance(metadata, dict) else "") or "")
    sizes(recipe, metadata)
    defaults = entries(recipe, data, "defaults")
    image(recipe, data)
    model(recipe, data.get("model"))
    if data.get("model_revision"):
        recipe["settings"]["model_revision"] = str(data["model_revision"])
    runtime = str(data.get("runtime") or "")
    if runtime not in RAY_RUNTIMES + MP_RUNTIMES:
        recipe["errors"]["runtime"] = f"{runtime} is not vLLM"
    backend = "ray" if runtime in RAY_RUNTIMES or str(defaults.get("distributed_executor_backend", "")) == "ray" else "mp"
    environment(recipe, entries(recipe, data, "env"))
    values = {**defaults, "model": data.get("model", "")}
    if recipe["errors"].get("runtime"):
        pass  # another engine's command says nothing to vLLM
    elif data.get("command"):
        command = str(data["command"])
        arguments(recipe, command_words(recipe, command, values, "{{" in command))
        for key in sorted(set(defaults) - set(re.findall(r"\{(\w+)\}", command + json.dumps(defaults, default=str)))):
            recipe["warnings"].append(f"defaults.{key} is used by no placeholder of the command, also in sparkrun")
    else:
        words: list[str] = []
        for key, value in defaults.items():
            flag = NAMED.get(key, "--" + str(key).replace("_", "-"))
            if isinstance(value, bool):
                words += [flag] if value else []
            elif value is not None:
                words += [flag, plain(value)]
        arguments(recipe, words)
    nodes_of_peer(recipe, data)
    recipe["settings"].setdefault("executor", backend)
    for key in sorted(set(data) - SPARKRUN_MAPPED - INFORMATION):
        leave(recipe, key, data[key])
    if str(data.get("executor") or "docker") != "docker":
        recipe["errors"]["executor"] = f"{data['executor']}: only containers of Docker are run"
    return recipe


def leave(recipe: dict[str, t.Any], key: str, value: t.Any) -> None:
    """A field of sparkrun that has no counterpart."""
    if value in (None, "", [], {}, False):
        return
    if key == "builder":
        if str(value) not in BUILDERS:
            recipe["errors"]["builder"] = f"{value}: builds another image than the one that is named"
    elif key in SPARKRUN_REFUSED:
        if key == "build_args" and "/" not in str(recipe["settings"].get("image", "/")):
            recipe["warnings"].append("build_args is left out: nothing is built")
        else:
            recipe["errors"][key] = SPARKRUN_REFUSED[key]
    elif key in SPARKRUN_LEFT:
        names = [f"{key}.{part}" for part in sorted(map(str, value))] if isinstance(value, dict) else [key]
        recipe["warnings"] += [f"{name} is left out: {SPARKRUN_LEFT[key]}" for name in names]
    else:
        recipe["warnings"].append(f"{key} is left out: not known here")


def eugr(data: dict[str, t.Any], name: str) -> dict[str, t.Any]:
    """A recipe of eugr/spark-vllm-docker, version 1. Raises Problem."""
    recipe = empty(str(data.get("name") or name), "eugr")
    recipe["description"] = " ".join(str(data.get("description") or "").split())
    missing = [key for key in ("name", "container", "command") if not data.get(key)]
    if missing:
        raise refuse(f"no {missing[0]} in the recipe {name}", "name, container and command", "complete the file; see docs/recipes.md")
    image(recipe, data)
    model(recipe, data.get("model"))
    environment(recipe, entries(recipe, data, "env"))
    defaults = entries(recipe, data, "defaults")
    command = str(data["command"])
    arguments(recipe, command_words(recipe, command, {"model": data.get("model") or "", **defaults}, True))
    nodes_of_peer(recipe, data)
    recipe["settings"].setdefault("executor", "mp")  # their launcher's default since July 2026; --ray is an option of its command line
    for key in sorted(set(data) - EUGR_MAPPED - INFORMATION):
        if data[key] in (None, "", [], {}, False):
            continue
        if key in ("mods", "build_args"):
            leave(recipe, key, data[key])
        else:
            recipe["warnings"].append(f"{key} is left out: not known here")
    return recipe


def entries(recipe: t.Mapping[str, t.Any], data: t.Mapping[str, t.Any], key: str) -> dict[str, t.Any]:
    """A field of names and values. Raises Problem."""
    value = data.get(key)
    if value in (None, "", [], {}):
        return {}
    if not isinstance(value, dict):
        raise refuse(
            f"{key} {value!r:.80} in the recipe {recipe['name']}",
            "names with a value each (NAME: value)",
            "see docs/recipes.md for the fields",
        )
    return {str(name): part for name, part in value.items()}


def limit(recipe: t.Mapping[str, t.Any], data: t.Mapping[str, t.Any], key: str) -> int | None:
    """A number of nodes, None where there is none. Raises Problem."""
    value = data.get(key)
    if value in (None, "", 0):
        return None
    try:
        number = 0 if isinstance(value, (bool, float)) else int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise refuse(f"{key} {value!r:.80} in the recipe {recipe['name']}", "a number of nodes", "see docs/recipes.md for the fields")
    return number


def nodes_of_peer(recipe: dict[str, t.Any], data: t.Mapping[str, t.Any]) -> None:
    """Numbers of nodes of a foreign recipe: what it says, else what its parallelism needs (a Spark has one GPU). Raises Problem."""
    low, high = limit(recipe, data, "min_nodes") or 1, limit(recipe, data, "max_nodes")
    mode = str(data.get("mode") or "auto")
    solo, cluster = bool(data.get("solo_only") or mode == "solo"), bool(data.get("cluster_only") or mode == "cluster")
    said = [f"{key} {data[key]!r:.80}" for key in ("min_nodes", "max_nodes", "mode", "solo_only", "cluster_only") if data.get(key)]
    if solo:
        high = min(high or 1, 1)
    if cluster:
        low = max(low, 2)
    if (high or MOST_NODES) < low:  # an empty list of numbers would mean any
        raise refuse(f"{', '.join(said)} in the recipe {recipe['name']}", "a number of nodes that all of them allow", "correct the recipe")
    span(recipe, low, min(high, MOST_NODES) if high else None)


# --- a recipe and the inventory ---


def apply(
    recipe: dict[str, t.Any],
    given: t.Mapping[str, t.Any],
    extra: t.Collection[str],
    *,
    asked: bool,
    nodes: int,
    executors: t.Collection[str],
    known: t.Callable[[], t.Mapping[str, t.Mapping[str, t.Any]]],
    any_nodes: bool = False,
) -> tuple[dict[str, t.Any], dict[str, t.Any]]:
    """The inputs with what the recipe fills in, and a report of what came from where.

    ``given``: inputs that are set (whole names), ``extra``: those of them from the command line, ``asked``: the recipe itself is from the
    command line (else from the inventory), ``nodes``: of the inventory, ``known``: reads our own recipes, for the advice, ``any_nodes``: let
    a recipe for another number of nodes through. Raises Problem.
    """
    name = recipe["name"]
    ignored = given.get(f"{PREFIX}recipe_ignore") or []
    ignored = [part.strip() for part in ignored.split(",")] if isinstance(ignored, str) else [str(part) for part in ignored]
    refused = {
        field: why
        for field, why in recipe["errors"].items()
        if field in FINAL or not any(field == part or field.startswith(f"{part}.") for part in ignored)
    }
    if refused:
        raise refuse(
            f"fields of the recipe {name} that cannot be honoured: " + "; ".join(f"{field} ({why})" for field, why in refused.items()),
            "only fields that can be left out without changing what is served",
            "serve this model with another recipe"
            if any(field in FINAL for field in refused)
            else f"change the recipe, or accept that it is left out: spark_recipe_ignore: [{', '.join(refused)}]",
            "recipe-field",
        )
    settings = dict(recipe["settings"])
    if settings.get("executor") and settings["executor"] not in executors:
        del settings["executor"]
    result = dict(given)
    other = given.get(f"{PREFIX}model") not in (None, settings.get("model")) and f"{PREFIX}model" not in extra
    if other and not asked:
        raise refuse(
            f"spark_recipe {name} for {settings.get('model')}, and spark_model {given[f'{PREFIX}model']}",
            "one model",
            "remove spark_model and what belongs to it (spark_image, spark_vllm_args ...) from the inventory, or spark_recipe",
            "recipe-model",
        )
    aside = [bound for bound in BOUND if other and f"{PREFIX}{bound}" in given and f"{PREFIX}{bound}" not in extra]
    for bound in aside:
        del result[f"{PREFIX}{bound}"]
    overridden, filled = [], []
    for key, value in settings.items():
        variable = f"{PREFIX}{key}"
        if variable not in result:
            result[variable] = value
            filled.append(key)
        else:
            if key == "env" and isinstance(result[variable], dict):
                result[variable] = {**value, **result[variable]}
            if result[variable] != value:
                overridden.append(key)
    if f"{PREFIX}tensor_parallel" not in result:
        gpus = nodes * whole(result.get(f"{PREFIX}gpus_per_node"), 1)
        rest = whole(result.get(f"{PREFIX}pipeline_parallel"), 1) * whole(result.get(f"{PREFIX}data_parallel"), 1)
        result[f"{PREFIX}tensor_parallel"] = max(1, gpus // rest)
        filled.append("tensor_parallel")
    if not any_nodes:
        check_nodes(recipe, result, nodes, known)
    report = {
        "name": name,
        "format": recipe["format"],
        "source": recipe["source"],
        "weights_gib": recipe["weights_gib"],
        "filled": sorted(filled),
        "overridden": sorted(overridden),
        "asked": asked,
        "beside": sorted(key for key in overridden if key in BOUND and f"{PREFIX}{key}" not in extra),
        "set_aside": sorted(aside),
        "not_honoured": [
            *recipe["warnings"],
            *[f"{field} is left out, as spark_recipe_ignore says" for field in recipe["errors"] if field not in refused],
        ],
    }
    return result, report


def whole(value: t.Any, default: int) -> int:
    """An input that should be a number; what is none is told later, by its own check."""
    try:
        return max(1, int(value))
    except (TypeError, ValueError):
        return default


def numbers(nodes: t.Sequence[int]) -> str:
    """``1 or 2``, ``2 or more``."""
    if not nodes:
        return "any number of"
    if nodes[-1] == MOST_NODES:
        return f"{nodes[0]} or more"
    return " or ".join(str(n) for n in nodes)


def noun(nodes: t.Sequence[int]) -> str:
    """``1 node``, ``1 or 2 nodes``."""
    return f"{numbers(nodes)} {'node' if list(nodes) == [1] else 'nodes'}"


def check_nodes(
    recipe: t.Mapping[str, t.Any], result: t.Mapping[str, t.Any], nodes: int, known: t.Callable[[], t.Mapping[str, t.Any]]
) -> None:
    """The recipe's number of nodes against that of the inventory. Raises Problem."""
    ranks = whole(result.get(f"{PREFIX}tensor_parallel"), 1) * whole(result.get(f"{PREFIX}pipeline_parallel"), 1)
    ranks *= whole(result.get(f"{PREFIX}data_parallel"), 1)
    needed = -(-ranks // whole(result.get(f"{PREFIX}gpus_per_node"), 1))
    allowed = recipe["nodes"]
    if (not allowed or nodes in allowed) and needed == nodes:
        return
    text = noun(allowed if nodes not in allowed and allowed else [needed])
    fitting = [name for name, other in sorted(known().items()) if nodes in other["nodes"]]
    raise refuse(
        f"the recipe {recipe['name']} for {text}, and {nodes} in the inventory",
        f"an inventory with {text} (groups ray_head and ray_workers)",
        f"recipes for {noun([nodes])}: {', '.join(fitting) or 'none'}; playbooks/recipes.yml lists them",
        "recipe-nodes",
    )


def advice(report: t.Mapping[str, t.Any]) -> list[str]:
    """What a person should know of the recipe that was used, as warnings."""
    told = [f"recipe {report['name']}: {text}" for text in report["not_honoured"]]
    if report["asked"] and report["beside"]:
        told.append(
            f"recipe {report['name']}: the inventory's {', '.join(PREFIX + name for name in report['beside'])} win over the recipe's"
        )
    if report["set_aside"]:
        names = ", ".join(f"{PREFIX}{name}" for name in report["set_aside"])
        told.append(
            f"recipe {report['name']}: {names} of the inventory belong to another model and are not used; give them with -e to keep them"
        )
    return told


# --- the list ---


def overview(recipes: t.Mapping[str, t.Mapping[str, t.Any]], nodes: int, memory: int, gpus_per_node: int = 1) -> list[dict[str, t.Any]]:
    """One row for each recipe: what it needs, and whether it fits on so many nodes with so much memory (bytes, of the smallest)."""
    rows = []
    for name, recipe in sorted(recipes.items()):
        settings = recipe["settings"]
        size = recipe["weights_gib"] or recipe["memory_gib"]
        count = nodes if nodes in recipe["nodes"] else min(recipe["nodes"])
        share = float(settings.get("gpu_memory_utilization") or 0.8)
        each = size / (count * gpus_per_node) * _fit.GIB if size else None
        room = memory / gpus_per_node * share - memory / gpus_per_node * _fit.RESERVE
        if nodes not in recipe["nodes"]:
            verdict = f"no: for {noun(recipe['nodes'])}"
        elif each is not None and each >= room:
            verdict = f"no: {_fit.text_of(each)} of {_fit.text_of(room)}"
        else:
            verdict = "yes"
        rows.append(
            {
                "name": name,
                "description": recipe["description"],
                "model": settings.get("model"),
                "image": settings.get("image"),
                "nodes": list(recipe["nodes"]),
                "executor": settings.get("executor"),
                "weights_gib": recipe["weights_gib"],
                "memory_gib": recipe["memory_gib"],
                "per_node_gib": round(each * gpus_per_node / _fit.GIB, 1) if each is not None else None,
                "max_model_len": settings.get("max_model_len"),
                "source": recipe["source"],
                "fits": verdict == "yes",
                "verdict": verdict,
            }
        )
    return rows


def table(rows: t.Sequence[t.Mapping[str, t.Any]], nodes: int, memory: int, assumed: bool) -> str:
    """The list as a person reads it."""
    lines = [["RECIPE", "MODEL", "NODES", "PER NODE", "CONTEXT", "EXECUTOR", "FITS"]]
    for row in rows:
        lines.append(
            [
                row["name"],
                str(row["model"]),
                numbers(row["nodes"]),
                f"{row['per_node_gib']} GiB" if row["per_node_gib"] else "?",
                str(row["max_model_len"] or "model's"),
                str(row["executor"] or "-"),
                row["verdict"],
            ]
        )
    what = "assumed, as in a DGX Spark" if assumed else "the smallest"
    note = f"\n\nA recipe for another number of nodes wants an inventory with that many (this one has {nodes})."
    note = note if any(nodes not in row["nodes"] for row in rows) else ""
    return f"{noun([nodes])}, {_fit.text_of(memory)} of memory each ({what}). PER NODE: the weights.\n\n" + "\n".join(columns(lines)) + note


def describe(recipe: t.Mapping[str, t.Any]) -> str:
    """What a recipe becomes here, as a person reads it."""
    lines = [f"{recipe['name']} ({recipe['format']}), for {noun(recipe['nodes']) if recipe['nodes'] else 'any number of nodes'}"]
    if recipe["description"]:
        lines.append(recipe["description"])
    lines.append("")
    for key, value in recipe["settings"].items():
        shown = (
            " ".join(shlex.quote(str(word)) for word in value)
            if isinstance(value, list)
            else json.dumps(value)
            if isinstance(value, dict)
            else value
        )
        lines.append(f"spark_{key}: {shown}")
    lines += [f"! {text}" for text in recipe["warnings"]]
    lines += [
        f"!! {field}: {why}{'' if field in FINAL else ' (spark_recipe_ignore accepts it)'}" for field, why in recipe["errors"].items()
    ]
    return "\n".join(lines)
