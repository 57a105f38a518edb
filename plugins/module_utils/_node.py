# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything a decision needs to know about one node, read in one go.

PRIVATE to the collection. Parsers are pure functions over text and decoded JSON; what touches the machine comes in through ``Host``.
Nothing here raises for what a node lacks: a missing tool or a daemon that refuses is itself a fact.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t
import urllib.parse

from ansible_collections.dgxspark.serving.plugins.module_utils import _host, _service
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import user_unit_of_cgroup
from ansible_collections.dgxspark.serving.plugins.module_utils._image import image_record, local_reference
from ansible_collections.dgxspark.serving.plugins.module_utils._tenants import systemctl

CAP_SYS_RESOURCE = 24
UNLIMITED = -1
RUNNERS = ("dockerd", "containerd")
GPU_HOOK = "nvidia-container-runtime-hook"
GPU_CLI = "nvidia-container-cli"
CDI_DIRS = ("/etc/cdi", "/var/run/cdi")
CDI_GPU_KIND = "nvidia.com/gpu"
COMPOSE_LABEL = "com.docker.compose.project"
TOOL_DIRS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

Run = t.Callable[..., tuple[int, str, str]]


@dataclasses.dataclass
class Host:
    """What touches the machine. ``run(argv)`` -> (rc, out, err), rc 127 when the program is not there and 124 when it was too slow;
    ``read`` and ``listdir`` raise OSError; ``api(path)`` asks the Docker daemon and returns (status, decoded JSON), raises OSError;
    ``stat(path)`` -> (owner, group, mode) or None; ``disk(path)`` -> (mount, total, free) of an existing path or None."""

    run: Run
    read: t.Callable[[str], str]
    listdir: t.Callable[[str], list[str]]
    which: t.Callable[[str], str | None]
    exists: t.Callable[[str], bool]
    api: t.Callable[[str], tuple[int, t.Any]]
    stat: t.Callable[[str], tuple[str, str, int] | None]
    disk: t.Callable[[str], tuple[str, int, int] | None]
    user_of: t.Callable[[int], str]
    user: dict[str, t.Any]
    effective_user: str
    docker_socket: str = "/var/run/docker.sock"


def _read(host: Host, path: str) -> str:
    try:
        return host.read(path)
    except OSError:
        return ""


def _listdir(host: Host, path: str) -> list[str]:
    try:
        return sorted(host.listdir(path))
    except OSError:
        return []


# --- text files ------------------------------------------------------------------------------------------------------------------------------------


def parse_keyvalue(text: str) -> dict[str, str]:
    """os-release syntax (shell-like ``KEY="value"``); a repeated key keeps its last value; values may be unquoted (HP boxes)."""
    result: dict[str, str] = {}
    for line in text.splitlines():
        key, sep, value = line.strip().partition("=")
        if sep and not key.startswith("#"):
            result[key.strip()] = value.strip().strip("\"'")
    return result


def os_record(text: str) -> dict[str, str]:
    """id, version and pretty name of /etc/os-release."""
    data = parse_keyvalue(text)
    return {"id": data.get("ID", ""), "version": data.get("VERSION_ID", ""), "pretty": data.get("PRETTY_NAME", "")}


def dgx_record(text: str) -> dict[str, str] | None:
    """What /etc/dgx-release says, without the serial number; None when there is no such file. Updates repeat DGX_OTA_VERSION: the last one counts."""
    data = parse_keyvalue(text)
    if not data:
        return None
    return {
        "name": data.get("DGX_NAME", ""),
        "pretty": data.get("DGX_PRETTY_NAME", ""),
        "platform": data.get("DGX_PLATFORM", ""),
        "version": data.get("DGX_OTA_VERSION") or data.get("DGX_SWBUILD_VERSION", ""),
        "build_version": data.get("DGX_SWBUILD_VERSION", ""),
    }


def memory_record(meminfo: str, shm_total: int) -> dict[str, int]:
    """Bytes from /proc/meminfo (which counts in KiB); 0 for a line that the kernel does not have."""
    kib = {m.group(1): int(m.group(2)) for m in re.finditer(r"^(\S+):\s+(\d+)", meminfo, re.M)}
    names = {
        "total": "MemTotal",
        "free": "MemFree",
        "available": "MemAvailable",
        "swap_total": "SwapTotal",
        "swap_free": "SwapFree",
        "cma_total": "CmaTotal",
        "cma_free": "CmaFree",
    }
    result = {key: kib.get(name, 0) * 1024 for key, name in names.items()}
    result["shm_total"] = shm_total
    result["unaccounted"] = _host.unaccounted(meminfo)
    return result


def _hard_limit(limits: str, name: str) -> int | None:
    match = re.search(rf"^{name}\s+\S+\s+(\S+)", limits, re.M)
    if not match:
        return None
    return UNLIMITED if match.group(1) == "unlimited" else int(match.group(1))


def can_raise_limits(status: str) -> bool:
    """Whether CapEff in a /proc/<pid>/status holds CAP_SYS_RESOURCE: only then may runc raise a hard limit (setrlimit(2))."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.M)
    return bool(match and int(match.group(1), 16) >> CAP_SYS_RESOURCE & 1)


def limits_record(sources: t.Sequence[tuple[str, str]], nr_open: str) -> dict[str, int]:
    """Highest hard limits that a container may get; -1 = unlimited.

    ``sources`` are the (limits, status) texts of the daemons that start containers. With CAP_SYS_RESOURCE memlock may become unlimited and nofile may rise
    to fs.nr_open (the kernel refuses more); without it the lowest hard limit of these processes is the end.
    """
    raisable = bool(sources) and all(can_raise_limits(status) for limits, status in sources)
    result: dict[str, int] = {}
    for key, name in (("memlock", "Max locked memory"), ("nofile", "Max open files")):
        found = [value for value in (_hard_limit(limits, name) for limits, status in sources) if value is not None]
        finite = [value for value in found if value != UNLIMITED]
        result[key] = min(finite) if finite else (UNLIMITED if found else 0)
    if raisable:
        result["memlock"] = UNLIMITED
        if nr_open.strip().isdigit():
            result["nofile"] = max(result["nofile"], int(nr_open))
    return result


def daemon_pids(host: Host) -> dict[str, int]:
    """Process ids of dockerd and containerd (runc is started by the latter's shim) and of what kills when memory is short, by their names:
    one look at /proc for all of them."""
    pids: dict[str, int] = {}
    text = _read(host, "/var/run/docker.pid").strip()
    if text.isdigit() and _read(host, f"/proc/{text}/comm").strip() == "dockerd":
        pids["dockerd"] = int(text)
    for entry in _listdir(host, "/proc"):
        if entry.isdigit():
            comm = _read(host, f"/proc/{entry}/comm").strip()
            if comm in RUNNERS or comm in _host.OOM_DAEMONS:
                pids.setdefault(comm, int(entry))
    return pids


def collect_limits(host: Host, daemons: t.Mapping[str, int] | None = None) -> dict[str, int]:
    """``limits`` of the node; our own process stands in when no daemon runs."""
    found = daemon_pids(host) if daemons is None else daemons
    names: list[t.Any] = [pid for name, pid in found.items() if name in RUNNERS] or ["self"]
    sources = [(_read(host, f"/proc/{name}/limits"), _read(host, f"/proc/{name}/status")) for name in names]
    return limits_record([source for source in sources if source[0]], _read(host, "/proc/sys/fs/nr_open"))


# --- GPU ---------------------------------------------------------------------------------------------------------------------------------------------

GPU_QUERY = "index,name,uuid,driver_version,compute_cap"
APPS_QUERY = "pid,process_name,used_memory"


def parse_gpus(text: str) -> tuple[list[dict[str, t.Any]], str]:
    """Devices and driver version from ``nvidia-smi --query-gpu=index,name,uuid,driver_version,compute_cap --format=csv,noheader``."""
    devices: list[dict[str, t.Any]] = []
    driver = ""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 5 or not fields[0].isdigit():
            continue
        uuid, version, capability = fields[-3:]
        devices.append({"index": int(fields[0]), "name": ",".join(fields[1:-3]).strip(), "uuid": uuid, "compute_cap": capability})
        driver = driver or version
    return devices, driver


def parse_gpu_processes(text: str) -> list[dict[str, t.Any]]:
    """Processes from ``nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv,noheader,nounits``; memory None where it says [N/A]."""
    result: list[dict[str, t.Any]] = []
    for line in text.splitlines():
        pid, sep, rest = line.partition(",")
        name, sep2, memory = rest.rpartition(",")
        if sep and sep2 and pid.strip().isdigit():
            memory = memory.strip()
            result.append({"pid": int(pid), "name": name.strip(), "memory_mib": int(memory) if memory.isdigit() else None})
    return result


def _tail(text: str) -> str:
    return " ".join(text.split())[:400]


def collect_gpu(host: Host) -> dict[str, t.Any]:
    """``gpu`` of the node. A driver that is missing or broken is ``error``, never an exception (HST-03, shape N of the node shapes)."""
    module = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _read(host, "/proc/driver/nvidia/version"))
    result: dict[str, t.Any] = {
        "count": 0,
        "driver": "",
        "module": module.group(1) if module else "",
        "devices": [],
        "processes": [],
        "error": None,
    }
    if not host.which("nvidia-smi"):
        result["error"] = "nvidia-smi is not installed (no NVIDIA driver on this node)"
        return result
    rc, out, err = host.run(["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"])
    if rc == 124:
        result["error"] = "nvidia-smi does not answer (timed out): the driver hangs"
        return result
    devices, result["driver"] = parse_gpus(out)
    if rc != 0 or not devices:
        text = _tail(f"{out} {err}") or "no output"
        hint = " (user space was updated, the kernel module was not: reboot this node)" if "version mismatch" in text.lower() else ""
        result["error"] = f"nvidia-smi failed with code {rc}: {text}{hint}" if rc else f"nvidia-smi lists no GPU: {text}"
        return result
    result["devices"], result["count"] = devices, len(devices)
    rc, out, err = host.run(["nvidia-smi", f"--query-compute-apps={APPS_QUERY}", "--format=csv,noheader,nounits"])
    result["processes"] = parse_gpu_processes(out) if rc == 0 else []
    return result


# --- Docker ------------------------------------------------------------------------------------------------------------------------------------------


def parse_cdi(text: str) -> list[str]:
    """Device names (``nvidia.com/gpu=0``) of one CDI specification, JSON or the YAML that nvidia-ctk writes; [] for other kinds and broken files."""
    if text.lstrip().startswith("{"):
        try:
            spec = json.loads(text)
            kind, names = str(spec.get("kind", "")), [str(dev.get("name", "")) for dev in spec.get("devices") or []]
        except (ValueError, AttributeError):
            return []
    else:
        found = re.search(r"^kind:\s*[\"']?([^\"'\s]+)", text, re.M)
        kind = found.group(1) if found else ""
        names = []
        block = re.search(r"^devices:[^\n]*\n((?:[ \t-][^\n]*\n?|\n)*)", text, re.M)
        first = re.search(r"^( *)- ", block.group(1), re.M) if block else None
        if block and first:
            dash = first.group(1)
            names = re.findall(rf"^{dash}(?:- |  )name:\s*[\"']?([^\"'\s]+)", block.group(1), re.M)
    return [f"{kind}={name}" for name in names if name] if kind else []


def collect_cdi(host: Host, dirs: t.Iterable[str]) -> list[str]:
    """All devices of the CDI directories, in order, once each."""
    devices: dict[str, None] = {}
    for folder in dirs:
        for name in _listdir(host, folder):
            if name.endswith((".yaml", ".yml", ".json")):
                devices.update(dict.fromkeys(parse_cdi(_read(host, f"{folder}/{name}"))))
    return list(devices)


def image_store(info: t.Mapping[str, t.Any]) -> str:
    """``containerd`` or ``classic``, from DriverStatus of GET /info (dockerd writes driver-type io.containerd.snapshotter.v1 for the former)."""
    for row in info.get("DriverStatus") or []:
        if len(row) > 1 and "io.containerd.snapshotter" in str(row[1]):
            return "containerd"
    return "classic"


def gpu_capability(
    runtimes: t.Iterable[str], cdi_devices: t.Iterable[str], hook: str | None, cli: str | None, where: str
) -> tuple[bool, str]:
    """Whether ``docker run --gpus all`` can work, and why (DOC-01).

    dockerd offers the nvidia device driver when nvidia-container-runtime-hook is on its PATH at start; nvidia-container-cli alone is not enough.
    ``where`` describes the daemon for the message.
    """
    cdi = [name for name in cdi_devices if name.startswith(CDI_GPU_KIND + "=")]
    found = []
    if "nvidia" in set(runtimes):
        found.append("runtime nvidia is registered in Docker")
    if cdi:
        found.append(f"CDI devices {', '.join(cdi)}")
    if hook:
        found.append(f"{hook} is installed")
    if found:
        return True, "; ".join(found)
    missing = f"no runtime nvidia in Docker ({where}), no {CDI_GPU_KIND} in {' or '.join(CDI_DIRS)}, no {GPU_HOOK} on PATH"
    return False, missing + (f" ({cli} alone is not enough)" if cli else "")


def _which(host: Host, name: str) -> str | None:
    return host.which(name) or next((f"{folder}/{name}" for folder in TOOL_DIRS if host.exists(f"{folder}/{name}")), None)


def docker_error(exc: OSError, host: Host, installed: bool) -> str:
    """One sentence that says who may not, or what is not there (DOC-02: user, socket, its owner, group and mode)."""
    socket = host.docker_socket
    if isinstance(exc, PermissionError):
        owner, group, mode = host.stat(socket) or ("?", "?", 0)
        groups = ", ".join(host.user.get("groups") or []) if host.effective_user == host.user.get("name") else ""
        who = f"user {host.effective_user}" + (f" (groups {groups})" if groups else "")
        return f"{who} may not use {socket} (owner {owner}, group {group}, mode {mode:04o})"
    if isinstance(exc, FileNotFoundError):
        if not installed:
            return f"Docker is not installed: no docker on PATH, no {socket}"
        return f"{socket} does not exist: the Docker daemon is not running"
    if isinstance(exc, ConnectionRefusedError):
        return f"nobody answers at {socket}: the Docker daemon is not running"
    if isinstance(exc, TimeoutError):
        return f"the Docker daemon does not answer at {socket} (timed out)"
    return f"{socket}: {exc}"


def port_bindings(inspect: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """Published ports: what the running container has, else what it was created with."""
    live = (inspect.get("NetworkSettings") or {}).get("Ports") or {}
    if not any(live.values()):
        live = (inspect.get("HostConfig") or {}).get("PortBindings") or {}
    result = []
    for target, bindings in sorted(live.items()):
        port, _sep, protocol = target.partition("/")
        for binding in bindings or []:
            result.append(
                {
                    "host_ip": binding.get("HostIp") or "",
                    "host_port": int(binding.get("HostPort") or 0),
                    "container_port": int(port),
                    "protocol": protocol or "tcp",
                }
            )
    return result


def uses_gpu(host_config: t.Mapping[str, t.Any], env: t.Iterable[str] = ()) -> bool:
    """Whether a container was given a GPU: a device request, the nvidia runtime with visible devices, or a /dev/nvidia* device."""
    for request in host_config.get("DeviceRequests") or []:
        wanted = [cap for group in request.get("Capabilities") or [] for cap in group]
        ids = [str(item) for item in request.get("DeviceIDs") or []]
        if "gpu" in wanted or request.get("Driver") == "nvidia" or any(item.startswith(CDI_GPU_KIND) for item in ids):
            return True
    if host_config.get("Runtime") == "nvidia":
        visible = next((item.partition("=")[2] for item in env if item.startswith("NVIDIA_VISIBLE_DEVICES=")), "")
        return visible not in ("", "void", "none")
    return any(str(device.get("PathOnHost", "")).startswith("/dev/nvidia") for device in host_config.get("Devices") or [])


def container_record(inspect: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """One element of ``containers`` from GET /containers/<id>/json. The environment stays out: it may hold secrets."""
    state = inspect.get("State") or {}
    config = inspect.get("Config") or {}
    host_config = inspect.get("HostConfig") or {}
    labels = config.get("Labels") or {}
    return {
        "name": str(inspect.get("Name", "")).lstrip("/"),
        "id": str(inspect.get("Id", "")),
        "image": str(config.get("Image", "")),
        "image_id": str(inspect.get("Image", "")),
        "state": str(state.get("Status", "")),
        "running": bool(state.get("Running")),
        "pid": int(state.get("Pid") or 0),
        "started_at": str(state.get("StartedAt", "")),
        "finished_at": str(state.get("FinishedAt", "")),
        "exit_code": int(state.get("ExitCode") or 0),
        "oom_killed": bool(state.get("OOMKilled")),
        "error": str(state.get("Error") or ""),
        "restart_count": int(inspect.get("RestartCount") or 0),
        "restart_policy": str((host_config.get("RestartPolicy") or {}).get("Name") or "no"),
        "labels": labels,
        "ports": port_bindings(inspect),
        "network_mode": str(host_config.get("NetworkMode", "")),
        "gpu": uses_gpu(host_config, config.get("Env") or []),
        "privileged": bool(host_config.get("Privileged")),
        "compose_project": labels.get(COMPOSE_LABEL),
        # of our own only, where no secret can be among them
        "arguments": [str(word) for word in inspect.get("Args") or []] if _service.is_ours({"labels": labels}) else [],
    }


def _collect_containers(host: Host) -> list[dict[str, t.Any]]:
    status, listing = host.api("/containers/json?all=1")
    result = []
    for entry in listing if status == 200 and isinstance(listing, list) else []:
        status, inspect = host.api(f"/containers/{entry['Id']}/json")
        if status == 200:  # 404: it was removed in between
            result.append(container_record(inspect))
    return sorted(result, key=lambda item: item["name"])


def _collect_image(host: Host, reference: str) -> dict[str, t.Any]:
    inspect = None
    for name in dict.fromkeys((local_reference(reference), reference)):  # an image given by digest runs under a tag of ours
        status, found = host.api(f"/images/{urllib.parse.quote(name, safe='/:@')}/json")
        if status == 200 and isinstance(found, dict):
            inspect = found
            break
    return image_record(inspect, reference)


def collect_docker(host: Host, image: str = "") -> tuple[dict[str, t.Any], dict[str, t.Any] | None, list[dict[str, t.Any]]]:
    """``docker``, ``image`` and ``containers`` of the node over the daemon's socket. Nothing of it fails: ``error`` says why it is not reachable."""
    installed = _which(host, "docker") is not None
    cdi = collect_cdi(host, CDI_DIRS)
    docker: dict[str, t.Any] = {
        "installed": installed,
        "reachable": False,
        "error": None,
        "version": "",
        "api_version": "",
        "store": "",
        "driver": "",
        "root_dir": "",
        "runtimes": [],
        "default_runtime": "",
        "cdi_devices": cdi,
        "architecture": "",
        "gpu_capable": False,
        "gpu_reason": "",
    }
    try:
        status, info = host.api("/info")
        if status != 200 or not isinstance(info, dict):
            raise OSError(f"GET /info answered {status}: {_tail(str(info))}")
        version = host.api("/version")[1]
        containers = _collect_containers(host)
        record = _collect_image(host, image) if image else None
    except (OSError, ValueError) as exc:
        docker["error"] = docker_error(exc if isinstance(exc, OSError) else OSError(str(exc)), host, installed)
        docker["gpu_reason"] = f"not known: {docker['error']}"
        return docker, (image_record(None, image) if image else None), []
    docker.update(
        reachable=True,
        version=str(info.get("ServerVersion", "")),
        api_version=str((version or {}).get("ApiVersion", "")),
        store=image_store(info),
        driver=str(info.get("Driver", "")),
        root_dir=str(info.get("DockerRootDir", "")),
        runtimes=sorted(info.get("Runtimes") or {}),
        default_runtime=str(info.get("DefaultRuntime", "")),
        architecture=str(info.get("Architecture", "")),
    )
    if not installed:
        docker["error"] = f"the docker command is not on PATH, only {host.docker_socket} answers"
    where = f"version {docker['version']}, root {docker['root_dir']}, runtimes {', '.join(docker['runtimes'])}"
    capable, reason = gpu_capability(docker["runtimes"], cdi, _which(host, GPU_HOOK), _which(host, GPU_CLI), where)
    docker["gpu_capable"], docker["gpu_reason"] = capable, reason
    return docker, record, containers


# --- ports and their owners ----------------------------------------------------------------------------------------------------------------------------


def parse_ss(text: str) -> list[dict[str, t.Any]]:
    """Sockets from ``ss -tlnpH``: address, port, pid and process (None when ss may not see the owner) and all ``pids`` that share the socket."""
    result = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 5:
            continue
        address, _sep, port = fields[3].rpartition(":")
        if not port.isdigit():
            continue
        owners = re.findall(r'\("((?:[^"\\]|\\.)*)",pid=(\d+)', line)
        pids = list(dict.fromkeys(int(pid) for name, pid in owners))
        result.append(
            {
                "address": address.partition("%")[0].strip("[]") or "*",
                "port": int(port),
                "pid": pids[0] if pids else None,
                "process": owners[0][0] if owners else None,
                "pids": pids,
            }
        )
    return result


def cgroup_container(cgroup: str, ids: t.Iterable[str]) -> str | None:
    """The container id, one of ``ids``, that a /proc/<pid>/cgroup belongs to; the innermost when several match.

    Only known ids count: a node that is itself a container shows its outer container's id in every path.
    """
    known = set(ids)
    for found in reversed(re.findall(r"[0-9a-f]{64}", cgroup)):
        if found in known:
            return found
    return None


def cgroup_unit(cgroup: str) -> str | None:
    """The innermost systemd service of a /proc/<pid>/cgroup (v1 name=systemd or v2 line); None for sessions, scopes and plain cgroups."""
    for line in cgroup.splitlines():
        _number, _sep, rest = line.partition(":")
        controllers, _sep, path = rest.partition(":")
        if controllers in ("", "name=systemd"):
            services = [part for part in path.split("/") if part.endswith(".service") and not part.startswith("user@")]
            if services:
                return services[-1]
    return None


def _published_by(port: int, address: str, containers: t.Iterable[t.Mapping[str, t.Any]]) -> str | None:
    """Name of the running container that publishes this TCP port; an exact host address wins over any-address."""
    names: dict[bool, str] = {}
    for container in containers:
        for binding in container["ports"] if container["running"] else []:
            if binding["host_port"] == port and binding["protocol"] == "tcp":
                names.setdefault(binding["host_ip"] == address, container["name"])
    return names.get(True) or names.get(False)


def owner_of(host: Host, pid: int | None, containers: t.Sequence[t.Mapping[str, t.Any]]) -> dict[str, str | None]:
    """user, container (name) and unit of a process; all None when it is gone or not visible."""
    owner: dict[str, str | None] = {"user": None, "container": None, "unit": None}
    if not pid:
        return owner
    uid = re.search(r"^Uid:\s+\d+\s+(\d+)", _read(host, f"/proc/{pid}/status"), re.M)
    owner["user"] = host.user_of(int(uid.group(1))) if uid else None
    cgroup = _read(host, f"/proc/{pid}/cgroup")
    names = {container["id"]: container["name"] for container in containers}
    found = cgroup_container(cgroup, names)
    if found:
        owner["container"] = names[found]
        return owner
    owner["container"] = next((container["name"] for container in containers if container["running"] and container["pid"] == pid), None)
    if owner["container"] is None:
        own = user_unit_of_cgroup(cgroup)
        owner["unit"] = f"{host.user_of(own[0])}/{own[1]}" if own else cgroup_unit(cgroup)
    return owner


def collect_listeners(host: Host, containers: t.Sequence[t.Mapping[str, t.Any]]) -> tuple[list[dict[str, t.Any]], str | None]:
    """TCP sockets that listen, each with its owner, and why the list may be incomplete (None when it is complete)."""
    rc, out, err = host.run(["ss", "-tlnpH"])
    if rc != 0:
        return [], f"ss failed with code {rc}: {_tail(err or out)}"
    listeners = parse_ss(out)
    for item in listeners:
        item.update(owner_of(host, item["pid"], containers))
        if item["container"] is None and item["process"] in (None, "docker-proxy", "rootlesskit"):
            name = _published_by(item["port"], item["address"], containers)
            if name:
                item.update(container=name, unit=None)
    return listeners, None


# --- the rest --------------------------------------------------------------------------------------------------------------------------------------------


UNIT_PROPERTIES = "Id,LoadState,ActiveState,StatusText"


def parse_unit(block: str) -> tuple[str, str]:
    """State and status line of one unit from ``systemctl show`` with ``UNIT_PROPERTIES``; one that does not exist is ``not-found``."""
    data = dict(line.partition("=")[::2] for line in block.splitlines())  # nothing is quoted here
    if "Id" not in data:
        return "unknown", ""
    missing = data.get("LoadState") == "not-found" and data.get("ActiveState") != "active"
    return "not-found" if missing else data.get("ActiveState", "unknown"), data.get("StatusText", "")


def collect_units(host: Host, units: t.Sequence[str]) -> dict[str, tuple[str, str]]:
    """State and status line: one systemctl call for each systemd that is asked; the keys are the names as they were asked for."""
    result = dict.fromkeys(units, ("unknown", ""))
    for user in dict.fromkeys(unit.rpartition("/")[0] for unit in units):
        asked = [unit for unit in units if unit.rpartition("/")[0] == user]
        names = [unit.rpartition("/")[2] for unit in asked]
        rc, out, _err = host.run([*systemctl(user), "show", "--no-pager", f"--property={UNIT_PROPERTIES}", "--", *names])
        blocks = re.split(r"\n\s*\n", out.strip()) if rc == 0 else []
        if len(blocks) == len(asked):
            result.update({unit: parse_unit(block) for unit, block in zip(asked, blocks, strict=True)})
    return result


def expand_home(path: str, home: str) -> str:
    """``~`` and ``~/x`` for the login user (become changes HOME to root's)."""
    return home + path[1:] if path == "~" or path.startswith("~/") else path


def collect_disks(host: Host, paths: t.Iterable[str]) -> dict[str, dict[str, t.Any]]:
    """Mount point, total and free bytes of each path; for a path that does not exist those of its nearest existing parent, named in ``checked``."""
    result: dict[str, dict[str, t.Any]] = {}
    for path in paths:
        place = expand_home(path, str(host.user.get("home") or ""))
        while place not in ("", "/") and not host.exists(place):
            place = place.rstrip("/").rpartition("/")[0] or "/"
        found = host.disk(place or "/")
        mount, total, free = found or ("", 0, 0)
        result[path] = {"mount": mount, "total": total, "free": free, "checked": place or "/"}
    return result


def collect(host: Host, *, image: str = "", paths: t.Sequence[str] = (), units: t.Sequence[str] = ()) -> dict[str, t.Any]:
    """All facts that come from files, sockets and commands; the module adds what only the running interpreter knows (names, clock, Python)."""
    docker, record, containers = collect_docker(host, image)
    gpu = collect_gpu(host)
    for process in gpu["processes"]:
        process.update(owner_of(host, process["pid"], containers))
    listeners, problem = collect_listeners(host, containers)
    shm = host.disk("/dev/shm")
    daemons = daemon_pids(host)
    memory = memory_record(_read(host, "/proc/meminfo"), shm[1] if shm else 0)
    home, user = str(host.user.get("home") or ""), str(host.user.get("name") or "")
    found = collect_units(host, units)
    return {
        "os": os_record(_read(host, "/etc/os-release")),
        "dgx": dgx_record(_read(host, "/etc/dgx-release")),
        "user": host.user,
        "memory": memory,
        "limits": collect_limits(host, daemons),
        "oom_daemons": _host.oom_daemons(daemons, host.read, memory["total"]),
        "remove_ipc": _host.remove_ipc(host.read, host.listdir),
        "autostart": _host.autostart(host.read, host.listdir, home, user),
        "gpu": gpu,
        "docker": docker,
        "image": record,
        "containers": containers,
        "disks": collect_disks(host, paths),
        "listeners": listeners,
        "listeners_error": problem,
        "rdma_devices": _listdir(host, "/sys/class/infiniband"),
        "infiniband_dev": host.exists("/dev/infiniband"),
        "unit_states": {unit: state for unit, (state, _text) in found.items()},
        "unit_texts": {unit: text for unit, (_state, text) in found.items()},
    }
