# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers through the ``docker`` command: state, logs read once, stop and start; and who owns a process.

PRIVATE to the collection. Commands run through a callable ``run(argv, timeout=seconds, data=None) -> (rc, out, err)``.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils._wait import Run, timed_out

NO_SUCH = re.compile(r"no such (object|container)", re.IGNORECASE)
CANNOT_CONNECT = re.compile(
    r"cannot connect to the docker daemon|permission denied|error during connect|is the docker daemon running", re.IGNORECASE
)
ZERO_TIME = "0001-01-01T00:00:00Z"
ENGINE = re.compile(r"::(EngineCore|Worker)(_|\b)")  # how vLLM titles the processes that compute
ENGINE_LOOK = 0.25  # seconds between two looks at them while the container is being stopped
ENGINE_GRACE = 0.5  # seconds for the API server to end after them; it holds no memory of a GPU


Result = tuple[int, str, str]  # code, standard output, standard error


class DockerError(Exception):
    """The docker command does not answer, or refused; the text is what it said."""


def summary(inspected: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The part of one ``docker inspect`` object that decisions need."""
    state = inspected.get("State") or {}
    host = inspected.get("HostConfig") or {}
    config = inspected.get("Config") or {}
    labels = config.get("Labels") or {}
    ports = []
    for target, bindings in sorted(((inspected.get("NetworkSettings") or {}).get("Ports") or {}).items()):
        number, dummy, protocol = str(target).partition("/")
        for binding in bindings or []:
            if str(binding.get("HostPort") or "").isdigit():
                ports.append(
                    {
                        "host_ip": binding.get("HostIp") or "",
                        "host_port": int(binding["HostPort"]),
                        "container_port": int(number),
                        "protocol": protocol or "tcp",
                    }
                )
    requests = host.get("DeviceRequests") or []
    gpu = any(
        any("gpu" in group for group in r.get("Capabilities") or []) or str(r.get("Driver") or "").startswith(("nvidia", "cdi"))
        for r in requests
    )
    started = state.get("StartedAt") or ""
    return {
        "name": str(inspected.get("Name") or "").lstrip("/"),
        "id": inspected.get("Id") or "",
        "image": config.get("Image") or "",
        "state": state.get("Status") or "",
        "running": bool(state.get("Running")) and not state.get("Restarting") and not state.get("Paused"),
        "pid": int(state.get("Pid") or 0),
        "started_at": "" if started == ZERO_TIME else started,
        "finished_at": normal_stamp(state["FinishedAt"]) if state.get("FinishedAt") not in (None, "", ZERO_TIME) else "",
        "exit_code": int(state.get("ExitCode") or 0),
        "oom_killed": bool(state.get("OOMKilled")),
        "error": state.get("Error") or "",
        "restart_count": int(inspected.get("RestartCount") or 0),
        "restart_policy": (host.get("RestartPolicy") or {}).get("Name") or "no",
        "auto_remove": bool(host.get("AutoRemove")),
        "labels": dict(labels),
        "compose_project": labels.get("com.docker.compose.project") or None,
        "ports": ports,
        "network_mode": host.get("NetworkMode") or "",
        "gpu": gpu or host.get("Runtime") == "nvidia",
        "command": [str(word) for word in [inspected.get("Path") or "", *(inspected.get("Args") or [])] if word],
        "args": [str(word) for word in inspected.get("Args") or []],
        "mounts": [
            {"type": str(m.get("Type") or ""), "name": m.get("Name") or "", "target": str(m.get("Destination") or "")}
            for m in inspected.get("Mounts") or []
        ],
    }


class Docker:
    """The few docker commands we need; every one is bounded."""

    def __init__(self, run: Run, command: str = "docker") -> None:
        self.run = run
        self.command = command

    def _call(self, *args: str, timeout: float = 30, data: str | None = None) -> tuple[int, str, str]:
        rc, out, err = self.run([self.command, *args], timeout=timeout, data=data)
        if timed_out(rc):
            raise DockerError(f"docker {args[0]} did not answer within {timeout:.0f} s")
        if rc == 127 and "exec" not in args:
            raise DockerError("the docker command is not there")
        return rc, out, err

    def inspect(self, names: t.Sequence[str]) -> dict[str, dict[str, t.Any]]:
        """What exists of the named containers, by the name or id that was asked for (one command)."""
        wanted = [name for name in dict.fromkeys(names) if name]
        if not wanted:
            return {}
        rc, out, err = self._call("container", "inspect", *wanted)
        if rc != 0 and CANNOT_CONNECT.search(err):
            raise DockerError(err.strip())
        if rc != 0 and not NO_SUCH.search(err):
            raise DockerError(err.strip() or f"docker inspect ended with {rc}")
        try:
            found = [summary(item) for item in json.loads(out or "[]")]
        except ValueError as exc:
            raise DockerError(f"docker inspect did not print JSON: {exc}") from exc
        return {name: item for name in wanted for item in found if item["name"] == name.lstrip("/") or item["id"].startswith(name)}

    def all(self) -> list[dict[str, t.Any]]:
        """Every container of the node, running or not (two commands)."""
        rc, out, err = self._call("ps", "-aq", "--no-trunc")
        if rc != 0:
            raise DockerError(err.strip() or f"docker ps ended with {rc}")
        return list(self.inspect(out.split()).values())

    def log_text(self, name: str, *, since: str = "", tail: int = 0, timestamps: bool = True, timeout: float = 30) -> str:
        """Both streams in the order of time; "" when the container is not there."""
        args = ["logs"]
        if timestamps:
            args.append("--timestamps")
        if since:
            args += ["--since", since]
        if tail:
            args += ["--tail", str(tail)]
        rc, out, err = self._call(*args, name, timeout=timeout)
        if rc != 0:
            return ""
        return merge_streams(out, err) if timestamps else "\n".join(part for part in (out.rstrip("\n"), err.rstrip("\n")) if part)

    def stop(self, name: str, grace: float) -> tuple[int, str, str]:
        """``docker stop``: TERM, then KILL after ``grace`` seconds; the restart policy does not bring it back."""
        return self.stopping([name], lambda: self._call("stop", "-t", str(int(grace)), name, timeout=grace + 60))

    def stopping(self, names: t.Sequence[str], stop: t.Callable[[], Result]) -> Result:
        """What ``stop()`` says, which stops these containers, without waiting for a vLLM server that only waits for its clients to go.

        vLLM ends its engine first and then waits, for as long as it may, for the answers to whoever still holds a connection. Nobody is left
        that could give them (vllm-project/vllm pull request 36964), so the container is killed soon after its engine and workers are gone. One
        that drains (``--shutdown-timeout``) keeps its engine meanwhile.
        """
        begin = time.monotonic()
        seen = {name: begin for name in names if self._engine(name)}
        if not seen:
            return stop()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(stop)
            while seen and not concurrent.futures.wait([stopping], ENGINE_LOOK).done:
                now = time.monotonic()
                for name, last in list(seen.items()):
                    if self._engine(name):
                        seen[name] = now
                    elif now - last >= ENGINE_GRACE:
                        del seen[name]
                        self.run([self.command, "kill", name], timeout=30)
            return stopping.result()

    def _engine(self, name: str) -> bool:
        """Whether a vLLM engine, or a worker of one, runs in this container."""
        rc, out, dummy = self.run([self.command, "top", name], timeout=10)
        return rc == 0 and bool(ENGINE.search(out))

    def start(self, name: str) -> tuple[int, str, str]:
        return self._call("start", name, timeout=120)

    def rename(self, old: str, new: str) -> tuple[int, str, str]:
        return self._call("rename", old, new)

    def remove(self, name: str) -> tuple[int, str, str]:
        """``docker rm``; volumes with a name stay."""
        return self._call("rm", "--force", "--volumes", name, timeout=60)

    def remove_volume(self, name: str) -> tuple[int, str, str]:
        """Refused by Docker while a container has it."""
        return self._call("volume", "rm", name)


STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)) ?")


def normal_stamp(stamp: str) -> str:
    """RFC 3339 with nine digits, so that text order is time order (docker cuts trailing zeros in some versions)."""
    zone = "Z" if stamp.endswith("Z") else stamp[-6:]
    head, dummy, digits = stamp[: -len(zone)].partition(".")
    return f"{head}.{digits[:9]:0<9}{zone}"


def split_stamp(line: str) -> tuple[str, str]:
    """(normal time stamp or "", rest of the line)."""
    found = STAMP.match(line)
    return (normal_stamp(found.group(1)), line[found.end() :]) if found else ("", line)


def _stamped(text: str) -> list[tuple[str, str]]:
    result = []
    last = ""
    for line in text.split("\n"):
        if line:
            stamp, rest = split_stamp(line)
            last = stamp or last
            result.append((last, rest))
    return result


def merge_streams(out: str, err: str) -> str:
    """One text of the two streams of ``docker logs --timestamps``, by time; equal times keep their order."""
    if not err or not out:
        return out or err
    merged = sorted(_stamped(out) + _stamped(err), key=lambda item: item[0])
    return "\n".join(f"{stamp} {rest}" if stamp else rest for stamp, rest in merged) + "\n"


OVERLAP_DIGITS = 20  # "2026-11-30T08:48:44." : lines of the last second are asked for again and left out by count


def unread(text: str, cursor: t.Mapping[str, t.Any] | None) -> tuple[list[tuple[str, str]], dict[str, t.Any]]:
    """The (stamp, line) pairs of ``text`` that were not read before, and the next cursor.

    ``cursor`` = {"since": stamp for the next ``--since``, "seen": {key: count}} or None at the first call. Docker answers ``--since``
    including that moment and may write a line of the other stream a little late, so the last second is asked for again and every line is
    counted: none is read twice, none is lost.
    """
    seen: dict[str, int] = dict((cursor or {}).get("seen") or {})
    since = str((cursor or {}).get("since") or "")
    counts: dict[str, int] = {}
    fresh: list[tuple[str, str]] = []
    newest = since
    for stamp, line in _stamped(text):
        if since and stamp < since:
            continue
        key = f"{stamp}|{len(line)}|{line[:24]}|{line[-24:]}"
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > seen.get(key, 0):
            fresh.append((stamp, line))
        newest = max(newest, stamp)
    base = newest[:OVERLAP_DIGITS] + "0" * 9 + "Z" if len(newest) > OVERLAP_DIGITS and newest.endswith("Z") else newest
    if base < since:
        base = since
    for key, count in seen.items():
        counts[key] = max(count, counts.get(key, 0))
    kept = {key: count for key, count in counts.items() if key.split("|", 1)[0] >= base}
    return fresh, {"since": base, "seen": kept}


CONTAINER_ID = re.compile(r"(?:docker[-/]|/)([0-9a-f]{64})(?:\.scope)?")
UNIT = re.compile(r"/([^/]+\.service)(?=/|$)")


USER_UNIT = re.compile(r"/user@(\d+)\.service/(?:[^/]+/)*?([^/]+\.service)(?=/|$)")


def user_unit_of_cgroup(text: str) -> tuple[int, str] | None:
    """(uid, unit) when a process belongs to a unit of a user's own systemd, and not to a container that such a unit has started."""
    for line in text.splitlines():
        found = USER_UNIT.search(line)
        if found and not CONTAINER_ID.search(line[found.end() :]):
            return int(found[1]), found[2]
    return None


def owner_of_cgroup(text: str) -> tuple[str | None, str | None]:
    """(container id, unit) from the text of /proc/<pid>/cgroup; the innermost of each, None when there is none."""
    ids = CONTAINER_ID.findall(text)
    units = [unit for line in text.splitlines() for unit in UNIT.findall(line.split(":", 2)[-1])]
    return (ids[-1] if ids else None, units[-1] if units else None)


SOCKET_USER = re.compile(r'\("([^"]*)",pid=(\d+)')


def parse_ss(text: str) -> list[dict[str, t.Any]]:
    """``ss -H -t -l -n -p`` -> [{address, port, process, pid}]; a socket of several processes is one entry with the first."""
    result = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        address, dummy, port = fields[3].rpartition(":")
        if not port.isdigit():
            continue
        user = SOCKET_USER.search(line)
        result.append(
            {
                "address": address.split("%")[0].strip("[]") or "*",
                "port": int(port),
                "process": user.group(1) if user else None,
                "pid": int(user.group(2)) if user else None,
            }
        )
    return result


def parse_gpu_processes(text: str) -> list[dict[str, t.Any]]:
    """``nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv,noheader,nounits``."""
    result = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 3 and parts[0].isdigit():
            memory = parts[-1]
            result.append(
                {
                    "pid": int(parts[0]),
                    "name": ",".join(parts[1:-1]),
                    "memory_mib": float(memory) if memory.replace(".", "").isdigit() else None,
                }
            )
    return result


def exit_text(container: t.Mapping[str, t.Any]) -> str:
    """``exited with code 137 (killed: out of memory)``."""
    code = container.get("exit_code")
    hints = {
        137: "killed, as by the out-of-memory killer or docker kill",
        143: "terminated from outside",
        127: "command not found",
        126: "command not executable",
    }
    reason = "killed by the memory limit" if container.get("oom_killed") else hints.get(int(code or 0), "")
    state = container.get("state") or "not running"
    text = f"{state} with code {code}" if state in ("exited", "dead") else f"{state}"
    if reason and state in ("exited", "dead"):
        text += f" ({reason})"
    if container.get("error"):
        text += f": {container['error']}"
    return text
