# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a serving image can do, asked inside the image itself: how it is started, what its answer means, what must not be tried.

PRIVATE to the collection. Pure functions over plain data; ``_probe_program`` is what runs in the container.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _probe_program
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

STAGE = "probe"
LABEL = "dgxspark.serving.probe"
PREFIXES = ("NCCL_", "GLOO_", "TP_", "RAY_", "VLLM_", "UCX_", "HF_", "OMPI_MCA_", "MN_IF_NAME", "MASTER_")
NETWORK = (
    "NCCL_",
    "GLOO_",
    "TP_",
    "UCX_",
    "OMPI_MCA_",
    "MN_IF_NAME",
    "MASTER_",
)  # a foreign value here breaks the traffic between the nodes (NET-07)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY", re.IGNORECASE)
VERSIONS = ("vllm", "ray", "python", "torch", "nccl", "transformers")
KEPT_STAMPS = 16

EXEC_FORMAT = re.compile(r"exec format error|does not match the detected host platform", re.IGNORECASE)
NO_PYTHON = re.compile(r'exec: "?python3"?.*(not found|no such file)|stat .*python3: no such file|python3: no such file', re.IGNORECASE)


class Volume(t.NamedTuple):
    """One entry of the plan's ``volumes``."""

    source: str
    target: str
    read_only: bool


def volumes(entries: t.Iterable[str]) -> list[Volume]:
    """``/host:/inside:ro`` -> Volume. Raises ValueError for what is no such entry."""
    result = []
    for entry in entries:
        source, dummy, rest = str(entry).partition(":")
        target, dummy, mode = rest.partition(":")
        if not source or not target.startswith("/"):
            raise ValueError(f"'{entry}' is not source:target[:mode]")
        result.append(Volume(source, target.rstrip("/") or "/", "ro" in mode.split(",")))
    return result


def on_host(path: str, mounted: t.Iterable[Volume]) -> str | None:
    """Where a path of the container lies on the node; None when it is not below a mounted directory of the node."""
    for volume in mounted:
        if volume.source.startswith("/") and (path == volume.target or path.startswith(volume.target + "/")):
            return volume.source + path[len(volume.target) :]
    return None


def _field(text: str) -> str:
    """A value of ``--mount``, which is read as CSV."""
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text


def docker_argv(image: str, name: str, mounted: t.Iterable[Volume]) -> list[str]:
    """The ``docker`` arguments of one probe: no network, no GPU, nothing writable of the node, and the first to go when memory is short.

    Directories that the servers write to become empty ones in memory. Neither program nor arguments nor environment are in here.
    """
    argv = ["run", "--rm", "--interactive", "--pull", "never", "--name", name, "--label", f"{LABEL}=1", "--network", "none"]
    argv += ["--oom-score-adj", "1000", "--env", "NVIDIA_VISIBLE_DEVICES=void"]
    for volume in mounted:
        if volume.read_only and volume.source.startswith("/"):
            argv += ["--mount", f"type=bind,{_field('source=' + volume.source)},{_field('target=' + volume.target)},readonly"]
        else:
            argv += ["--tmpfs", f"{volume.target}:rw,exec,mode=1777"]
    return [*argv, "--entrypoint", "python3", image, "-c", _probe_program.BOOT]


def program_source() -> str:
    """Text of the program; it is part of the key under which an answer is kept."""
    return inspect.getsource(_probe_program)


def program(request: t.Mapping[str, t.Any]) -> str:
    """What goes to the container's stdin. ``request``: {model, arguments, env, timeout}."""
    return _probe_program.program(program_source(), request)


def model_identity(path: str | None) -> list[t.Any]:
    """Names, sizes and times of the files of a snapshot: a change of one of them makes a kept answer worthless."""
    if not path:
        return []
    names = sorted(os.listdir(path)) if os.path.isdir(path) else [""]
    result: list[t.Any] = []
    for name in names:
        try:
            info = os.stat(os.path.join(path, name) if name else path)
        except OSError:
            result.append([name, None])
            continue
        result.append([name, info.st_size, info.st_mtime_ns, info.st_ino, info.st_mode, info.st_uid])
    return result


def key(values: t.Mapping[str, t.Any], source: str) -> str:
    """sha256 over everything that an answer depends on."""
    text = json.dumps({**values, "program": source}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# --- answer --------------------------------------------------------------------------------------------------------------


def parse_output(text: str) -> dict[str, dict[str, t.Any]]:
    """The parts that the program told, by name; other lines are left out."""
    parts: dict[str, dict[str, t.Any]] = {}
    for line in text.splitlines():
        if line.startswith(_probe_program.MARK):
            try:
                data = json.loads(line[len(_probe_program.MARK) :])
                parts[str(data.pop("part"))] = data
            except (ValueError, KeyError, AttributeError):
                continue
    return parts


def baked(env: t.Mapping[str, str], planned: t.Iterable[str]) -> dict[str, dict[str, str]]:
    """{baked: what of our prefixes the image sets, inherited: that part of it that the plan does not set}. Secrets are hidden."""
    ours = set(planned)
    found = {name: "(hidden)" if SECRET.search(name) else value for name, value in sorted(env.items()) if name.startswith(PREFIXES)}
    return {"baked": found, "inherited": {name: value for name, value in found.items() if name not in ours}}


def new_probe(image: t.Mapping[str, t.Any], planned_env: t.Mapping[str, str] | t.Iterable[str]) -> dict[str, t.Any]:
    """What ``docker image inspect`` alone tells; the rest is unknown (None)."""
    environment = baked(image["env"], planned_env)
    return {
        "image": image["reference"],
        "fingerprint": image["fingerprint"],
        "entrypoint": image["entrypoint"],
        "cmd": image["cmd"],
        "environment": environment["baked"],
        "inherited": environment["inherited"],
        "ring": isinstance(planned_env, t.Mapping) and planned_env.get("NCCL_IB_SUBNET_AWARE_ROUTING") == "1",
        "versions": dict.fromkeys((*VERSIONS, "huggingface_hub")),
        "commands": {"vllm": None, "ray": None},
        "imports": {"vllm": None, "ray": None},
        "errors": {},
        "platform": "",
        "files": None,
        "model": None,
        "arguments": {"accepted": None, "refused": [], "reason": "not asked"},
        "complete": False,
        "seconds": {},
    }


def answer(probe: t.Mapping[str, t.Any], parts: t.Mapping[str, t.Mapping[str, t.Any]]) -> dict[str, t.Any]:
    """``probe`` with what the program told."""
    image = parts.get("image", {})
    result: dict[str, t.Any] = {**probe, "versions": {**probe["versions"], **image.get("versions", {})}}
    result["commands"] = {**probe["commands"], **image.get("commands", {})}
    result["imports"] = {name: parts.get(name, {}).get("imported") for name in ("vllm", "ray")}
    result["errors"] = {name: parts[name]["error"] for name in ("vllm", "ray", "error") if parts.get(name, {}).get("error")}
    for name in ("vllm", "ray"):
        result["versions"][name] = result["versions"].get(name) or parts.get(name, {}).get("version")
    result["platform"] = parts.get("vllm", {}).get("platform") or ""
    for name in ("files", "model", "arguments"):
        if name in parts:
            result[name] = {key: value for key, value in parts[name].items() if key != "seconds"}
        elif name == "arguments":
            reason = parts.get("vllm", {}).get("error") or "the probe ended before"
            result[name] = {"accepted": None, "refused": [], "reason": reason}
    end = parts.get("end", {})
    result["complete"] = end.get("code") == 0
    result["seconds"] = {name: part["seconds"] for name, part in parts.items() if "seconds" in part and name != "end"}
    result["seconds"]["total"] = end.get("seconds", 0.0)
    return result


# NCCL versions that are known to go wrong between nodes (NCL-07), and why.
BAD_NCCL = {"2.30.4": "it may hang at the start (NVLS, NVIDIA/nccl#2167)"}
RING_NCCL = (2, 30)  # the first that knows NCCL_IB_SUBNET_AWARE_ROUTING; NVIDIA has a fork of an older one that does


def nccl_warnings(version: str | None, ring: bool) -> list[str]:
    """What an image's NCCL is known to do (NCL-07), and one that cannot do what a ring of nodes needs (NCL-05)."""
    told = [f"NCCL {version}: {BAD_NCCL[version]}; another image is safer"] if version in BAD_NCCL else []
    numbers = tuple(int(part) for part in re.findall(r"\d+", version or "")[:2])
    if numbers and numbers < RING_NCCL and ring:
        told.append(
            f"NCCL {version}: a ring without a switch needs 2.30 or newer, or NVIDIA's fork for rings; the ranks may not find each other"
        )
    return told


def warnings(probe: t.Mapping[str, t.Any], node: str) -> list[str]:
    """Network variables of the image that nothing overrides (NET-07), what its NCCL is known for, and what could not be told without a GPU."""
    where = f"{node}: " if node else ""
    left = ", ".join(f"{name}={value}" for name, value in probe["inherited"].items() if name.startswith(NETWORK))
    told = [f"{where}the image {probe['image']} sets {left}; set it in spark_env if it does not fit this gang"] if left else []
    told += [f"{where}{text}" for text in nccl_warnings(probe["versions"].get("nccl"), probe.get("ring", False))]
    if probe["complete"] and probe["imports"]["vllm"] is None:
        told.append(f"{where}vLLM of {probe['image']} cannot be imported without a GPU, so arguments and model type are not checked")
    elif probe["complete"] and probe["arguments"]["accepted"] is None:
        told.append(f"{where}the arguments of vllm serve could not be checked: {probe['arguments']['reason']}")
    return told


# --- problems ------------------------------------------------------------------------------------------------------------


def run_problem(probe: t.Mapping[str, t.Any], rc: int, err: str, parts: t.Mapping[str, t.Any], timeout: int, node: str) -> Problem | None:
    """Why the program could not run to its end; None when it did. ``rc`` is that of ``docker run`` (124, 137: not even it ended)."""
    image = probe["image"]
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    last = lines[-1][:300] if lines else f"exit code {rc}"
    end = parts.get("end")

    def problem(ident: str, found: str, expected: str, remedy: str) -> Problem:
        return Problem(ident, node=node, stage=STAGE, found=found, expected=expected, remedy=remedy)

    if end and end["code"] == 0:
        return None
    if not parts and EXEC_FORMAT.search(err):
        return problem(
            "DOC-11",
            f"python3 of {image} cannot be executed on this node ({last})",
            "an image built for this node's platform",
            "choose an image built for linux/arm64 (a DGX Spark), and copy it again",
        )
    if not parts and NO_PYTHON.search(err):
        return problem("vllm-missing", f"{image} has no python3 command", "an image with vLLM", "choose an image that has vLLM in it")
    if (end and end["timeout"]) or rc in (124, 137):
        where = {"image": "importing vLLM", "files": "importing vLLM", "vllm": "importing Ray", "ray": "building the parser"}
        last_part = next((name for name in ("ray", "vllm", "files", "image") if name in parts), "")
        found = f"the probe of {image} was not done after {timeout} s ({where.get(last_part, 'starting the container')})"
        remedy = "look at the load and the disk of this node, or give it more time (timeout)"
        return problem("probe-stalled", found, "an answer", remedy)
    if end and end["signal"]:
        found = f"Python of {image} was killed by signal {end['signal']} while it imported vLLM ({last})"
        return problem(
            "vllm-missing", found, "a vLLM that can be imported", "choose another image, or look at the free memory of this node"
        )
    reason = parts.get("error", {}).get("error") or last
    return problem("probe-failed", f"the probe of {image} ended early: {reason}", "an answer", "try 'docker run' with this image by hand")


def _versions(probe: t.Mapping[str, t.Any], names: t.Sequence[str] = ("vllm", "transformers")) -> str:
    return ", ".join(f"{name} {probe['versions'].get(name) or 'unknown'}" for name in names)


def image_problem(probe: t.Mapping[str, t.Any], executor: str, node: str) -> Problem | None:
    """What the image lacks: vLLM, or Ray for the Ray executor (RAY-02)."""
    image = probe["image"]
    if probe["imports"]["vllm"] is False or not probe["commands"]["vllm"]:
        broken = f"a vLLM that cannot be imported ({probe['errors'].get('vllm')})" if probe["versions"].get("vllm") else "no vLLM in it"
        return Problem(
            "vllm-missing",
            node=node,
            stage=STAGE,
            found=f"{image} with {broken if probe['imports']['vllm'] is False else 'no vllm command'}",
            expected="an image with a working vLLM",
            remedy="choose an image that has vLLM in it (spark_image)",
        )
    if executor == "ray" and (probe["imports"]["ray"] is False or not probe["commands"]["ray"]):
        broken = f"a Ray that cannot be imported ({probe['errors'].get('ray')})" if probe["versions"].get("ray") else "no Ray in it"
        lacks = "no ray command" if probe["imports"]["ray"] else broken
        return Problem(
            "RAY-02",
            node=node,
            stage=STAGE,
            found=f"{image} ({_versions(probe, ('vllm', 'python'))}) with {lacks}",
            expected="Ray in the image, because spark_executor is ray",
            remedy="choose an image with Ray (spark_image), build one from it with 'pip install ray', or set spark_executor: mp where it is offered",
        )
    return None


def first_sentence(text: str) -> str:
    """The part of an exception's text that says what is wrong, without the advice that follows it."""
    return text.split(". ", 1)[0].rstrip(".")


def model_problem(probe: t.Mapping[str, t.Any], node: str, there: t.Callable[[str], bool]) -> Problem | None:
    """A model that is not whole inside the container (MOD-01, MOD-13) or not known to the image (VLL-03).

    ``there(path)`` tells whether that path of the container exists on the node outside of it.
    """
    files, model = probe["files"], probe["model"]
    if files and files["missing"]:
        first = files["missing"][0]
        more = f", and {len(files['missing']) - 1} more" if len(files["missing"]) > 1 else ""
        outside = "link whose target" in first["reason"] and there(first["path"])
        return Problem(
            "MOD-13" if outside else "MOD-01",
            node=node,
            stage=STAGE,
            found=f"inside the container {first['path']}: {first['reason']}{more}",
            expected="config, tokenizer and every shard of the index readable where the engine opens them",
            remedy="mount the whole hub cache, not one snapshot: the links lead out of it"
            if outside
            else "run the stages model and sync again (--tags model,sync); look at the rights of the cache directory",
            missing=[item["path"] for item in files["missing"]],
        )
    if model and model["known"] is False:
        kind = f"model type {model['model_type'] or 'unknown'} ({', '.join(model['architectures']) or 'no architecture'})"
        return Problem(
            "VLL-03",
            node=node,
            stage=STAGE,
            found=f"{probe['image']} ({_versions(probe)}) that cannot load {kind}: {first_sentence(model['reason'])}",
            expected="an image whose vLLM and transformers know the model",
            remedy="choose a newer image (spark_image), or --trust-remote-code in spark_vllm_args if the model brings its own code",
        )
    return None


def arguments_problem(probe: t.Mapping[str, t.Any], node: str) -> Problem | None:
    """Arguments that this vLLM's own parser refuses."""
    refused = probe["arguments"]["refused"]
    if probe["arguments"]["accepted"] is not False or not refused:
        return None
    told = []
    for item in refused:
        close = f"; close to it: {item['close']}" if item["close"] else ""
        told.append(f"{item['flag']} ({item['reason']}{close})" if item["flag"] else item["reason"] + close)
    return Problem(
        "vllm-arguments",
        node=node,
        stage=STAGE,
        found=f"{len(refused)} argument{'s' if len(refused) > 1 else ''} that vllm serve of {probe['image']} "
        f"(vllm {probe['versions'].get('vllm') or 'unknown'}) refuses: {', '.join(told)}",
        expected="only arguments that this vLLM takes",
        remedy="correct spark_vllm_args (or the spark_ variable behind the argument), or choose an image with another vLLM",
        refused=refused,
    )


def problem_of(probe: t.Mapping[str, t.Any], executor: str, node: str, there: t.Callable[[str], bool]) -> Problem | None:
    """The first reason why this node must not be asked to serve with this image; None when there is none."""
    return image_problem(probe, executor, node) or model_problem(probe, node, there) or arguments_problem(probe, node)


def compare(probes: t.Mapping[str, t.Mapping[str, t.Any]]) -> Problem | None:
    """RAY-04: the same versions on every node. The first node is the measure; a version that is not known anywhere is not compared."""
    nodes = [name for name, probe in probes.items() if probe.get("versions")]
    for name in nodes[1:]:
        first, other = probes[nodes[0]]["versions"], probes[name]["versions"]
        differ = [key for key in VERSIONS if first.get(key) and other.get(key) and first[key] != other[key]]
        if differ:
            shown = [", ".join(f"{key} {versions[key]}" for key in differ) for versions in (other, first)]
            return Problem(
                "RAY-04",
                node=name,
                stage=STAGE,
                found=f"{shown[0]}, but {shown[1]} on {nodes[0]}",
                expected="the same versions in the image of every node",
                remedy="copy the head's image again (--tags sync)",
            )
    return None
