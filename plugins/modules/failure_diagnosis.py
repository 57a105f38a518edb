#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: failure_diagnosis
short_description: Look at the containers of a failed start on one node and keep their logs
version_added: 0.1.0
description:
  - Says which containers of this collection were touched since the run began, which of them ended and with which cause in their own log, and keeps the logs,
    those that NCCL wrote for each rank included.
  - Made for the way back after a failure, so it never fails itself.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: The logs are not worth a diff.
  idempotent:
    support: none
    details: The logs are written again each time.
options:
  containers:
    description: Names of the containers to look at.
    type: list
    elements: str
    default: [spark-vllm, spark-ray]
  known:
    description: Name and id of those that were there when the run began.
    type: dict
    default: {}
  tail:
    description: Lines of each log that are kept.
    type: int
    default: 5000
  directory:
    description: Where the logs are kept, as C(<container>.log) and C(nccl.<host>.<pid>.log).
    type: path
    default: /var/lib/dgxspark-serving/failed
  evidence:
    description:
      - Take what a bundle needs of this node along to the controller, where M(dgxspark.serving.diagnostics_bundle) puts the nodes' parts together.
        That is these logs, those of every Ray worker, C(docker inspect) of the containers and what the kernel said of memory, GPU and network.
      - Secrets are removed on the node, and sizes are bounded (1 MiB for a file, 6 MiB for a node).
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Keep the logs and look for the first cause
  dgxspark.serving.failure_diagnosis:
    known: {}
"""

RETURN = r"""
touched:
  description: Whether a container was created, replaced or removed since the run began.
  returned: always
  type: bool
ended:
  description: The container that ended first, as C(node), C(container), C(time) (RFC 3339) and C(text) (a sentence); empty when all run.
  returned: always
  type: dict
containers:
  description:
    - C(name), C(id), C(state), C(exit_code), C(oom_killed), C(started_at) and C(finished_at) of those that are there, and C(last), the last lines of the log.
  returned: always
  type: list
  elements: dict
kept:
  description: Files that were or would be written.
  returned: always
  type: list
  elements: str
error:
  description: Why it could not look, or could not keep all that it saw; empty when it could.
  returned: always
  type: str
evidence:
  description: Names of the files that were taken along.
  returned: with O(evidence=true)
  type: list
  elements: str
"""

import contextlib
import glob
import json
import os
import re
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _bundle, _diagnosis
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import Docker, DockerError, exit_text
from ansible_collections.dgxspark.serving.plugins.module_utils._previous import SUFFIX
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import bounded

PROC = "/proc"
MOST_OF_A_LOG = 1 << 20  # bytes
KERNEL = re.compile(r"oom|out of memory|killed process|NVRM|Xid|nvidia|mlx5|segfault|hung_task|blocked for more", re.IGNORECASE)
SHOWN = ("name", "id", "state", "exit_code", "oom_killed", "started_at", "finished_at")


def touched(names: t.Iterable[str], known: t.Mapping[str, str], found: t.Mapping[str, t.Mapping[str, t.Any]]) -> bool:
    """Whether one of these containers is not the one (or the absence) of the beginning."""
    return any(known.get(name, "") != (found[name]["id"] if name in found else "") for name in names)


def first_ended(node: str, found: t.Iterable[t.Mapping[str, t.Any]], logs: t.Mapping[str, str]) -> dict[str, str]:
    """The container that ended first, with the cause that its own log names; {} when none ended."""
    ended = sorted((c for c in found if not c["running"] and c["finished_at"]), key=lambda c: str(c["finished_at"]))
    if not ended:
        return {}
    first = ended[0]
    log = logs.get(first["name"], "")
    cause = _diagnosis.best(c for c in _diagnosis.scan(log.splitlines()) if first["exit_code"] != 137 or _diagnosis.rank(c) == 0)
    text = f"{node}: found container {first['name']} {exit_text(first)} at {str(first['finished_at'])[:19]}Z"
    if cause:
        text += f": {_diagnosis.sentence(cause)}. Remedy: {cause['remedy']}"
    else:
        text += f"; its last lines: {_diagnosis.last_lines(log, 3) or 'none'}. Remedy: read its log, and dmesg of {node} if it was killed"
    return {"node": node, "container": first["name"], "time": str(first["finished_at"]), "text": text + "."}


def nccl_logs(found: t.Iterable[t.Mapping[str, t.Any]]) -> dict[str, str]:
    """What NCCL wrote for each rank, by name of the file: they go away with the containers. Of a container that ended they cannot be read any more."""
    logs: dict[str, str] = {}
    for container in found:
        pattern = os.path.join(PROC, str(container["pid"]), "root", "tmp", "nccl.*.log")
        for path in sorted(glob.glob(pattern)) if container["running"] else []:
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as handle:  # one of a rank that ends just now
                logs[os.path.basename(path).removesuffix(".log")] = handle.read(MOST_OF_A_LOG)
    return logs


def write_private(path: str, text: str) -> None:
    """A file for root alone."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as stream:
        stream.write(text)


def inspected(docker: Docker, names: t.Sequence[str]) -> list[dict[str, t.Any]]:
    """All that ``docker inspect`` says of these containers and of those that are set aside."""
    dummy, out, dummy2 = docker.run([docker.command, "container", "inspect", *names, *(name + SUFFIX for name in names)], timeout=30)
    try:
        return list(json.loads(out or "[]"))
    except ValueError:
        return []


def changed_at(path: str) -> float:
    """When a file was written last; 0 for one that is gone by now."""
    try:
        return os.path.getmtime(path)
    except OSError:
        return 0


def logs_of_ranks(raw: t.Iterable[t.Mapping[str, t.Any]], names: t.Sequence[str]) -> t.Iterator[tuple[str, str]]:
    """What Ray's workers (the ranks among them), its daemons and NCCL wrote into the containers' /tmp, the newest first. It is a volume: they can be
    read after the end of a container, too."""
    own = {f"/{name}" for name in names}
    sources = {
        str(m.get("Source") or "") for c in raw if c.get("Name") in own for m in c.get("Mounts") or [] if m.get("Destination") == "/tmp"
    }
    for source in sorted(source for source in sources if source):
        paths = glob.glob(os.path.join(glob.escape(source), "ray", "session_*", "logs", "*"))
        paths = [path for path in paths if os.path.isfile(path) and not os.path.islink(os.path.dirname(os.path.dirname(path)))]
        for path in sorted(paths, key=changed_at, reverse=True):
            yield f"ray/{os.path.basename(path)}", ends_of(path)
        for path in sorted(glob.glob(os.path.join(glob.escape(source), "nccl.*.log"))):
            yield os.path.basename(path), ends_of(path)


def ends_of(path: str) -> str:
    """The text of a file; of a long one its beginning and its end."""
    half = _bundle.MOST_OF_A_FILE // 2
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            data = handle.read(2 * half)
            if size > 2 * half:
                handle.seek(-half, os.SEEK_END)
                data = data[:half] + b"\n... %d bytes left out ...\n" % (size - 2 * half) + handle.read(half)
    except OSError as exc:
        return f"(cannot be read: {exc})\n"
    return data.decode("utf-8", "replace")


def kernel(docker: Docker) -> str:
    """What the kernel said that can end a rank."""
    rc, out, dummy = docker.run(["dmesg", "--ctime"], timeout=10)
    return "".join(f"{line}\n" for line in out.splitlines() if KERNEL.search(line)) if rc == 0 else ""


def evidence(params: dict[str, t.Any], docker: Docker, logs: t.Mapping[str, str]) -> dict[str, str]:
    """Name and text of what the bundle holds of this node."""
    raw = inspected(docker, params["containers"])
    files = {f"{name}.log": text for name, text in logs.items()}
    files["kernel.txt"] = kernel(docker)
    for name, text in logs_of_ranks(raw, params["containers"]):
        files.setdefault(name, text)
    return _bundle.evidence(files.items(), raw)


def look(params: dict[str, t.Any], docker: Docker, result: dict[str, t.Any]) -> dict[str, str]:
    """Fills ``result``; returns the logs by container."""
    names = params["containers"]
    found = docker.inspect(names)
    result["touched"] = touched(names, params["known"], found)
    result["containers"] = [{key: found[name][key] for key in SHOWN} for name in names if name in found]
    logs = {name: docker.log_text(name, tail=params["tail"]) for name in names if name in found}
    for container in result["containers"]:
        container["last"] = _diagnosis.last_lines(logs[container["name"]], 3)
    plain = {name: docker.log_text(name, tail=200, timestamps=False) for name in logs if not found[name]["running"]}
    result["ended"] = first_ended(params["node"], found.values(), plain)
    return {**logs, **nccl_logs(found.values())}


def keep(logs: t.Mapping[str, str], directory: str, check_mode: bool, result: dict[str, t.Any]) -> None:
    """Writes each log for itself: with a full disk a short one may still find room. What was not written is not in ``kept``."""
    for name, text in logs.items():
        path = os.path.join(directory, f"{name}.log")
        try:
            if not check_mode:
                write_private(path, text)
        except OSError as exc:
            result["error"] = result["error"] or str(exc)
        else:
            result["kept"].append(path)
            result["changed"] = True


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "containers": {"type": "list", "elements": "str", "default": ["spark-vllm", "spark-ray"]},
            "known": {"type": "dict", "default": {}},
            "tail": {"type": "int", "default": 5000},
            "directory": {"type": "path", "default": "/var/lib/dgxspark-serving/failed"},
            "evidence": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    result: dict[str, t.Any] = {"changed": False, "touched": False, "ended": {}, "containers": [], "kept": [], "error": ""}
    try:
        docker = Docker(bounded(module.run_command))
        logs = look(module.params, docker, result)
    except (DockerError, OSError) as exc:
        module.exit_json(**{**result, "error": str(exc)})
    if module.params["evidence"]:  # before anything is written here: a full disk is a likely cause, and this goes to the controller
        try:
            result["evidence"] = evidence(module.params, docker, logs)
        except (DockerError, OSError) as exc:
            result["error"] = str(exc)
    keep(logs, module.params["directory"], module.check_mode, result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
