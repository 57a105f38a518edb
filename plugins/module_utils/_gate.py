# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host gate: every rule that a node, or the nodes compared, must pass before anything is changed.

PRIVATE to the collection. ``RULES`` is the table; ``judge`` evaluates it over the facts of all nodes (``member`` as in ``_plan``) and knows
nothing else. A rule without its facts finds nothing. ``spark_gate`` overrides the severity of a rule by its name.
docs/host-gate.md holds the same table for people.
"""

from __future__ import annotations

import difflib
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _fit, _layers, _memory, _overrides, _plan, _tenants, _topology
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

ERROR, WARN, IGNORE = "error", "warn", "ignore"
GIB = 1 << 30
MAX_CLOCK_SKEW = 60  # seconds; above this, logs of the nodes cannot be put in order and TLS to a hub fails
SHM_NEEDED = 160 << 20  # bytes of /dev/shm that vLLM's queue between its processes takes, whatever the model
LEAKED = 8 * GIB  # of memory that nothing accounts for while nothing uses the GPU
SLOW_STORES = ("vfs", "devicemapper", "aufs")
SYSTEM_USERS = 1000  # logind leaves the shared memory of users below this alone

gib = _memory.gib
Figures = t.Mapping[str, t.Any]
Member = dict[str, t.Any]


class Look(t.NamedTuple):
    """What the rules look at."""

    settings: dict[str, t.Any]
    members: list[Member]
    weights: int = 0  # bytes of the model's weights; 0 when not known
    config: t.Mapping[str, t.Any] | None = None  # the model's config.json
    in_place: bool = False  # everything runs as planned and stays: nothing will be launched


class Rule(t.NamedTuple):
    """One row of the table. ``find`` yields figures for the texts (with ``node`` where a rule of the gang means one), or a whole Problem."""

    name: str
    problem: str  # the row(s) of docs/failure-modes.md
    severity: str
    what: str  # for people: what is looked at
    found: str
    expected: str
    remedy: str
    node: t.Callable[[Look, Member], t.Iterable[Figures | Problem]] | None = None
    gang: t.Callable[[Look], t.Iterable[Figures | Problem]] | None = None
    launch: bool = False  # asked only before a launch: what serves has shown that it can
    stage: str = "preflight"


class Finding(t.NamedTuple):
    """What a rule found, and how much it counts."""

    rule: str
    severity: str
    gang: bool  # about all nodes: told by the head
    problem: Problem

    def as_dict(self) -> dict[str, t.Any]:
        return {"rule": self.rule, "severity": self.severity, **self.problem.as_dict()}


# --- Docker ------------------------------------------------------------------------------------------------------------------------


def _docker(look: Look, member: Member) -> t.Mapping[str, t.Any]:
    """Facts of a Docker that answers; empty else, so that one cause is told once."""
    docker = member["node"]["docker"]
    return docker if docker["installed"] and docker["reachable"] else {}


def docker_missing(look: Look, member: Member) -> t.Iterator[Figures]:
    docker = member["node"]["docker"]
    if not docker["installed"]:
        yield {"error": docker.get("error") or "no docker command"}


def docker_access(look: Look, member: Member) -> t.Iterator[Figures]:
    docker = member["node"]["docker"]
    if docker["installed"] and not docker["reachable"]:
        yield {"error": docker.get("error") or "the Docker daemon does not answer"}


def python_requests(look: Look, member: Member) -> t.Iterator[Figures]:
    if _docker(look, member) and not member["node"].get("python_requests"):
        yield {}


def docker_gpu(look: Look, member: Member) -> t.Iterator[Figures]:
    docker = _docker(look, member)
    if docker and not docker["gpu_capable"]:
        yield {"version": docker.get("version"), "reason": docker.get("gpu_reason")}


def docker_store(look: Look, member: Member) -> t.Iterator[Figures]:
    driver = str(_docker(look, member).get("driver") or "")
    if driver in SLOW_STORES:
        yield {"driver": driver, "root": _docker(look, member).get("root_dir") or "/var/lib/docker"}


def container_name(look: Look, member: Member) -> t.Iterator[Figures]:
    for container in member["node"]["containers"]:
        if container["name"] in _plan.own_names(look.settings) and not _tenants.is_own(container, _plan.LABEL):
            yield {"name": container["name"]}


# --- the GPU and who holds it ------------------------------------------------------------------------------------------------------


def gpu_driver(look: Look, member: Member) -> t.Iterator[Figures]:
    error = str(member["node"]["gpu"].get("error") or "")
    if "mismatch" in error:
        yield {"error": error, "wanted": look.settings["gpus_per_node"]}


def gpu_missing(look: Look, member: Member) -> t.Iterator[Figures | Problem]:
    gpu, wanted = member["node"]["gpu"], look.settings["gpus_per_node"]
    if gpu.get("error"):
        if "mismatch" not in gpu["error"]:
            yield {"found": f"nvidia-smi: {gpu['error']}", "wanted": wanted}
    elif gpu["count"] < wanted:
        yield {"found": f"{gpu['count']} GPUs", "wanted": wanted}


def _refused(look: Look, member: Member, ports: bool) -> t.Iterator[Problem]:
    """Holders of our ports, or of the GPU alone, that may not be stopped."""
    node = member["node"]
    for claim in _plan.node_claims(look.settings, member) if _docker(look, member) else []:
        problem = _tenants.refusal([claim], member["name"])
        if problem is None or bool(claim.get("ports")) != ports:
            continue
        if claim["kind"] == "process" and not claim.get("pid") and node.get("effective_user") not in (None, "root"):
            problem.found += f", which user {node['effective_user']} may not look at"
            problem.remedy = f"let the play use sudo (spark_become: true), so that its owner can be seen; or {problem.remedy}"
        yield problem


def port_held(look: Look, member: Member) -> t.Iterator[Problem]:
    yield from _refused(look, member, True)


def gpu_held(look: Look, member: Member) -> t.Iterator[Problem]:
    yield from _refused(look, member, False)


def network_variables(look: Look, member: Member) -> t.Iterator[Problem]:
    yield from _overrides.node_problems(look.settings["env"], member)


# --- memory ------------------------------------------------------------------------------------------------------------------------


def budget(settings: t.Mapping[str, t.Any], total: int) -> int:
    """Bytes of a node's memory that vLLM asks for: its share, and what it checks for when it starts."""
    return int(total * float(settings["gpu_memory_utilization"]))


def is_idle(look: Look, member: Member) -> bool:
    """Whether nothing of ours and nothing that will be stopped holds memory here: only then the memory of now is that of the launch."""
    return not any(claim["action"] in ("stop", "ours") for claim in _plan.node_claims(look.settings, member))


def _room(look: Look, member: Member, verdict: str) -> t.Iterator[Figures]:
    memory = member["node"].get("memory") or {}
    if not memory.get("available") or not is_idle(look, member):
        return
    need = budget(look.settings, memory["total"])
    if _memory.room(memory, need) == verdict:
        tenants = [f"{p['name']} {p['memory_mib']} MiB" for p in member["node"]["gpu"].get("processes") or [] if p.get("memory_mib")]
        yield {
            "available": gib(memory["available"]),
            "free": gib(memory["free"]),
            "total": gib(memory["total"]),
            "need": gib(need),
            "share": f"{float(look.settings['gpu_memory_utilization']):g}",
            "tenants": f" (on the GPU: {', '.join(tenants)})" if tenants else "",
        }


def memory_available(look: Look, member: Member) -> t.Iterator[Figures]:
    yield from _room(look, member, "short")


def page_cache(look: Look, member: Member) -> t.Iterator[Figures]:
    yield from _room(look, member, "cache")


def memory_leaked(look: Look, member: Member) -> t.Iterator[Figures]:
    memory, gpu = member["node"].get("memory") or {}, member["node"]["gpu"]
    users = any(_tenants.is_running(c) and c.get("gpu") for c in member["node"]["containers"])
    if memory.get("unaccounted", 0) >= LEAKED and not users and not any(map(_tenants.is_gpu_tenant, gpu.get("processes") or [])):
        yield {"leaked": gib(memory["unaccounted"]), "total": gib(memory["total"])}


def swap(look: Look, member: Member) -> t.Iterator[Figures]:
    memory = member["node"].get("memory") or {}
    if memory.get("swap_total"):
        yield {"swap": gib(memory["swap_total"]), "used": gib(memory["swap_total"] - memory["swap_free"])}


def oom_daemon(look: Look, member: Member) -> t.Iterator[Figures]:
    total = (member["node"].get("memory") or {}).get("total") or 0
    left = total - budget(look.settings, total)
    for daemon in member["node"].get("oom_daemons") or []:
        limit = daemon["limit"]
        if limit is None:
            how = "which kills by memory pressure and swap"
        elif limit + total * _fit.RESERVE > left:
            how = f"which kills when less than {gib(limit)} are available; {gib(left)} are left beside vLLM's share"
        else:
            continue
        yield {"name": daemon["name"], "pid": daemon["pid"], "how": how, "unit": _tenants.unit_name(daemon["name"])}


def _memories(look: Look) -> dict[str, int]:
    return {m["name"]: m["node"]["memory"]["total"] for m in look.members if m["node"].get("memory")}


def _smallest(look: Look) -> tuple[str, int]:
    memories = _memories(look)
    return min(memories.items(), key=lambda item: item[1]) if memories else ("", 0)


def memory_uneven(look: Look) -> t.Iterator[Figures]:
    memories = _memories(look)
    if memories:
        small, large = min(memories, key=lambda name: memories[name]), max(memories, key=lambda name: memories[name])
        if memories[large] - memories[small] > _fit.APART * memories[large]:
            yield {"node": small, "small": gib(memories[small]), "large": gib(memories[large]), "other": large}


def _engines_share(look: Look) -> bool:
    """Whether data parallel engines share the model's experts, which may be nearly all of it."""
    return int(look.settings["data_parallel"]) > 1 and (not look.config or _layers.is_moe(look.config))


def _ranks(look: Look) -> int:
    """Over how many ranks the weights are spread."""
    settings = look.settings
    ranks = int(settings["tensor_parallel"]) * int(settings["pipeline_parallel"])
    return ranks * int(settings["data_parallel"]) if _engines_share(look) else ranks


def _share(look: Look) -> tuple[float, float]:
    """Bytes of weights of one rank, and what vLLM may take for it on the smallest node."""
    settings = look.settings
    return look.weights / _ranks(look), _smallest(look)[1] / int(settings["gpus_per_node"]) * float(settings["gpu_memory_utilization"])


def memory_weights(look: Look) -> t.Iterator[Figures]:
    node, total = _smallest(look)
    each, share = _share(look)
    if look.weights and total and each >= share and not _fit.shrinks(look.settings):
        yield {
            "node": node,
            "name": node,
            "weights": gib(look.weights),
            "ranks": _ranks(look),
            "each": gib(each),
            "share": gib(share),
            "utilization": f"{float(look.settings['gpu_memory_utilization']):g}",
            "memory": gib(total / int(look.settings["gpus_per_node"])),
        }


def memory_context(look: Look) -> t.Iterator[Figures]:
    node, total = _smallest(look)
    each, share = _share(look)
    if not look.weights or not look.config or not total or each >= share or _fit.shrinks(look.settings):
        return
    given = _fit.options(look.settings)
    try:
        result = _fit.fit(
            look.config,
            look.weights,
            tensor_parallel=int(look.settings["tensor_parallel"]),
            pipeline_parallel=int(look.settings["pipeline_parallel"]),
            data_parallel=int(look.settings["data_parallel"]),
            memory=total // int(look.settings["gpus_per_node"]),
            **given,
        )
    except Problem:  # a model that is not known here is no reason to stop
        return
    if result["verdict"] != "fits" and not _engines_share(look):
        yield {
            "node": node,
            "space": gib(result["kv_space"]),
            "wanted": given["max_model_len"] or _fit.text_config(look.config).get("max_position_embeddings"),
            "longest": result["longest_context"],
        }


# --- kernel, limits and what comes back ------------------------------------------------------------------------------------------------


def kernel_cma(look: Look, member: Member) -> t.Iterator[Figures]:
    memory = member["node"].get("memory") or {}
    if memory.get("cma_free", 0) > memory.get("cma_total", 0) and member["node"].get("rdma_devices"):
        yield {"kernel": member["node"].get("kernel", ""), "free": memory["cma_free"] // 1024, "total": memory["cma_total"] // 1024}


def memlock(look: Look, member: Member) -> t.Iterator[Figures]:
    """A limit of a container above what the daemons may give: runc refuses to start it."""
    limits = member["node"].get("limits") or {}
    for entry in look.settings["ulimits"]:
        name, *values = str(entry).split(":")
        hard, allowed = int(values[-1]), limits.get(name)
        if allowed not in (None, 0, -1) and (hard == -1 or hard > allowed):
            yield {"entry": entry, "name": name, "allowed": allowed}


def shm(look: Look, member: Member) -> t.Iterator[Figures]:
    total = (member["node"].get("memory") or {}).get("shm_total") or 0
    if 0 < total < SHM_NEEDED:
        yield {"total": total >> 20, "needed": SHM_NEEDED >> 20}


def remove_ipc(look: Look, member: Member) -> t.Iterator[Figures]:
    """logind removes what belongs to the user that the image runs as, when a user of this number logs out: the end of every Ansible run."""
    state, image = member["node"].get("remove_ipc") or {}, member["node"].get("image") or {}
    user = str(image.get("user") or "").partition(":")[0]
    if not state.get("active") or user in ("", "root") or (user.isdigit() and int(user) < SYSTEM_USERS):
        return
    login = member["node"]["user"]
    names = {user, str(login["name"]) if user == str(login["uid"]) else user}
    if not names & set(state.get("linger") or []):
        yield {"user": user, "login": login["name"] if user in (str(login["uid"]), login["name"]) else "a user of that number"}


def restart_policy(look: Look, member: Member) -> t.Iterator[Figures]:
    """``unless-stopped`` stays down once it was stopped; ``always`` is back with Docker's next start."""
    named = set((look.settings.get("stop") or {}).get("containers") or [])
    projects = set((look.settings.get("stop") or {}).get("compose_projects") or [])
    for container in member["node"]["containers"]:
        mine = _tenants.is_own(container, _plan.LABEL) or container["name"] in named or container.get("compose_project") in projects
        port = look.settings["api_port"]
        wants = container.get("gpu") or any(place.get("host_port") == port for place in container.get("ports") or [])
        if not mine and wants and container.get("restart_policy") == "always" and not _tenants.is_running(container):
            yield {"name": container["name"], "what": "the GPU" if container.get("gpu") else f"port {port}"}


def autostart(look: Look, member: Member) -> t.Iterator[Figures]:
    named = {_tenants.unit_name(name) for name in (look.settings.get("stop") or {}).get("units") or []}
    for entry in member["node"].get("autostart") or []:
        if entry["unit"] not in named:
            user, _slash, unit = entry["unit"].rpartition("/")
            how = f"systemctl --user disable {unit}, as {user}" if user else f"sudo systemctl disable {unit}"
            yield {"unit": entry["unit"], "word": entry["word"], "how": how}


# --- the nodes compared ------------------------------------------------------------------------------------------------------------------


def architecture(look: Look) -> t.Iterator[Figures]:
    if len({m["node"]["machine"] for m in look.members}) > 1:
        yield {"nodes": ", ".join(f"{m['name']} {m['node']['machine']}" for m in look.members)}


def clock_skew(look: Look) -> t.Iterator[Figures]:
    times = {m["name"]: m["node"]["time"] for m in look.members}
    skew = max(times.values()) - min(times.values())
    if skew > MAX_CLOCK_SKEW:
        behind = min(times, key=lambda name: times[name])
        yield {"node": behind, "skew": f"{skew:.0f}", "ahead": max(times, key=lambda name: times[name]), "limit": MAX_CLOCK_SKEW}


def _apart(found: t.Mapping[str, str]) -> t.Iterator[Figures]:
    if len(set(found.values()) - {""}) > 1:
        yield {"nodes": ", ".join(f"{name} {value or 'not known'}" for name, value in found.items())}


def kernel_differs(look: Look) -> t.Iterator[Figures]:
    yield from _apart({m["name"]: str(m["node"].get("kernel") or "") for m in look.members})


def driver_differs(look: Look) -> t.Iterator[Figures]:
    yield from _apart({m["name"]: str(m["node"]["gpu"].get("driver") or "") for m in look.members})


def fabric_mtu(look: Look) -> t.Iterator[Figures]:
    mtus = {m["name"]: m["fabric"]["mtu"] for m in look.members}
    if len(set(mtus.values())) > 1:
        yield {"mtus": ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())}


def fabric_topology(look: Look) -> t.Iterator[Problem]:
    yield from _topology.problems(look.members)


def fabric_rails(look: Look) -> t.Iterator[Problem]:
    yield from _plan.rail_problems(look.members)


def gid_index(look: Look) -> t.Iterator[Problem]:
    problem = _topology.gid(look.settings.get("gid_index") or "", look.members)[2]
    if problem:
        yield problem


def attention_heads(look: Look) -> t.Iterator[Problem]:
    problem = _plan.heads_problem(look.settings, dict(look.config) if look.config else None)
    if problem:
        yield problem


def pipeline_stages(look: Look) -> t.Iterator[Problem]:
    problem = _plan.layers_problem(look.settings, dict(look.config) if look.config else None)
    if problem:
        yield problem


def engine_nodes(look: Look) -> t.Iterator[Problem]:
    problem = _plan.engines_problem(look.settings, dict(look.config) if look.config else None)
    if problem:
        yield problem


def service_ports(look: Look) -> t.Iterator[Problem]:
    yield from _plan.service_ports(look.settings, look.members)


def service_memory(look: Look) -> t.Iterator[Problem]:
    yield from _plan.service_memory(look.settings, look.members)


def service_unknown(look: Look) -> t.Iterator[Figures]:
    yield from _plan.service_unknown(look.settings, look.members)


# --- the table -----------------------------------------------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    Rule(
        name="docker_missing",
        problem="docker-missing",
        severity=ERROR,
        what="Docker is installed",
        found="{error}",
        expected="Docker Engine on the node",
        remedy="install Docker (DGX OS ships it: apt-get install docker-ce)",
        node=docker_missing,
    ),
    Rule(
        name="docker_access",
        problem="DOC-02",
        severity=ERROR,
        what="The play's user may talk to Docker, and Docker answers",
        found="{error}",
        expected="a Docker daemon that the play's user may talk to",
        remedy="let the play use sudo (spark_become: true), or add the user to the group docker and log in again; start Docker if it is down",
        node=docker_access,
    ),
    Rule(
        name="python_requests",
        problem="DOC-05",
        severity=ERROR,
        what="The node's Python has the package requests",
        found="no Python package requests",
        expected="python3-requests, which community.docker needs",
        remedy="apt-get install python3-requests",
        node=python_requests,
    ),
    Rule(
        name="docker_gpu",
        problem="DOC-01",
        severity=ERROR,
        what="Docker can give a GPU to a container: a runtime, a CDI specification or the hook",
        found="Docker {version} that cannot give a GPU to a container ({reason})",
        expected="an nvidia runtime or a CDI specification",
        remedy="install nvidia-container-toolkit, then: nvidia-ctk runtime configure --runtime=docker && systemctl restart docker",
        node=docker_gpu,
    ),
    Rule(
        name="docker_store",
        problem="docker-store",
        severity=WARN,
        what="Docker's storage driver shares layers",
        found="Docker's storage driver {driver} at {root}, which keeps a whole copy of the image for each layer or is no longer maintained",
        expected="overlay2 or the containerd store",
        remedy="set the storage driver overlay2 in /etc/docker/daemon.json, on a file system that can carry it (ext4, xfs)",
        node=docker_store,
        launch=True,
    ),
    Rule(
        name="gpu_driver",
        problem="HST-03",
        severity=ERROR,
        what="The loaded kernel module and the driver's libraries have one version",
        found="nvidia-smi: {error}",
        expected="{wanted} GPU",
        remedy="reboot the node after a driver update; if it stays, reinstall the driver",
        node=gpu_driver,
    ),
    Rule(
        name="gpu_missing",
        problem="gpu-missing",
        severity=ERROR,
        what="nvidia-smi lists as many GPUs as spark_gpus_per_node",
        found="{found}",
        expected="spark_gpus_per_node {wanted}, each of them in nvidia-smi",
        remedy="correct spark_gpus_per_node, or look at nvidia-smi on the node; reboot the node after a driver update",
        node=gpu_missing,
    ),
    Rule(
        name="container_name",
        problem="name-taken",
        severity=ERROR,
        what="No container of another maker has one of our names",
        found="a container {name} that this collection did not make",
        expected="this name to be free",
        remedy="docker rename {name} old-{name}, or remove it",
        node=container_name,
    ),
    Rule(
        name="port_held",
        problem="port-held",
        severity=ERROR,
        what="The ports of the API, of Ray and of the ranks are free, or held by what may be stopped",
        found="who holds it",
        expected="the port to be free, or held by something that spark_stop names",
        remedy="name it in spark_stop if it may be stopped, stop it by hand, or choose another port",
        node=port_held,
    ),
    Rule(
        name="gpu_held",
        problem="gpu-held",
        severity=ERROR,
        what="No process or container that may not be stopped holds the GPU (MEM-07)",
        found="who holds it",
        expected="the GPU and its memory to be free, or held by something that spark_stop names",
        remedy="name it in spark_stop if it may be stopped, or stop it by hand",
        node=gpu_held,
    ),
    Rule(
        name="network_variables",
        problem="input",
        severity=ERROR,
        what="Interfaces and devices that spark_env names exist on the node and can be used",
        found="the variable and its value",
        expected="names of this node",
        remedy="leave the variable out: the detected names are set on each node; or set spark_fabric_interface of the node",
        node=network_variables,
    ),
    Rule(
        name="memlock",
        problem="NCL-04",
        severity=ERROR,
        what="Docker may give the containers the limits of spark_ulimits",
        found="spark_ulimits {entry}, and a Docker that may give {name} {allowed} at most",
        expected="a limit that the host allows, or a Docker that may raise it",
        remedy="set LimitMEMLOCK=infinity (LimitNOFILE for nofile) for docker.service and containerd.service and restart them, or lower the entry "
        "in spark_ulimits",
        node=memlock,
        launch=True,
    ),
    Rule(
        name="shm",
        problem="RAY-15",
        severity=ERROR,
        what="/dev/shm holds at least the queue between vLLM's processes",
        found="/dev/shm of {total} MiB",
        expected="{needed} MiB or more: the containers use the host's, and vLLM's queue takes that for any model",
        remedy="mount -o remount,size=50% /dev/shm, and correct its line in /etc/fstab",
        node=shm,
        launch=True,
    ),
    Rule(
        name="kernel_cma",
        problem="HST-02",
        severity=ERROR,
        what="The kernel's free CMA memory is not above its total (kernels 7.0.0-1019 and -31 with KHO), where there is RDMA",
        found="kernel {kernel} with CmaFree {free} kB above CmaTotal {total} kB: memory is parked where RDMA cannot register it",
        expected="CmaFree no larger than CmaTotal in /proc/meminfo",
        remedy="boot with kho=off on the kernel's command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub), or boot an older kernel",
        node=kernel_cma,
        launch=True,
    ),
    Rule(
        name="remove_ipc",
        problem="remove-ipc",
        severity=ERROR,
        what="logind does not remove the shared memory of the user that the image runs as (RemoveIPC, with the host's IPC)",
        found="an image that runs as user {user}, and RemoveIPC of logind in force: when {login} logs out, the ranks lose their shared memory",
        expected="RemoveIPC=no, an image that runs as root, or a user that lingers",
        remedy="write [Login] and RemoveIPC=no to /etc/systemd/logind.conf.d/50-ipc.conf and restart systemd-logind; or loginctl enable-linger for "
        "that user",
        node=remove_ipc,
        launch=True,
    ),
    Rule(
        name="memory_available",
        problem="memory-short",
        severity=ERROR,
        what="The memory that is available now holds vLLM's share, where nothing that will be stopped uses it. Asked again right before the launch",
        found="{available} of memory available of {total}, and a server that asks for {need} (spark_gpu_memory_utilization {share}){tenants}",
        expected="as much available memory as vLLM asks for",
        remedy="stop what holds it (ps -eo rss,pid,args --sort=-rss), lower spark_gpu_memory_utilization, or reboot the node if nothing holds it",
        node=memory_available,
        launch=True,
    ),
    Rule(
        name="page_cache",
        problem="MEM-01",
        severity=WARN,
        what="The memory that is free without the page cache holds vLLM's share. warn: the page cache is dropped right before the launch; error: "
        "refused; ignore: left alone",
        found="{free} of memory free and {available} available: the page cache holds what vLLM asks for ({need})",
        expected="free memory, because builds of vLLM count the page cache as used",
        remedy="nothing: it is dropped right before the launch (sync; echo 3 > /proc/sys/vm/drop_caches)",
        node=page_cache,
        launch=True,
    ),
    Rule(
        name="memory_leaked",
        problem="memory-leaked",
        severity=WARN,
        what="No more than 8 GiB of memory are taken by nothing that the kernel can name, while nothing uses the GPU",
        found="{leaked} of {total} of memory that no process and no cache holds, while nothing uses the GPU: what an earlier failure leaked",
        expected="memory that comes back when its process ends",
        remedy="reboot the node if the launch lacks memory; nothing is launched again by itself after a memory failure, each try can leak more",
        node=memory_leaked,
        launch=True,
    ),
    Rule(
        name="swap",
        problem="MEM-04",
        severity=WARN,
        what="There is no swap",
        found="{swap} of swap, {used} of it used",
        expected="none: with swap, a node that runs out of memory stands still for minutes and stops answering, instead of failing at once",
        remedy="sudo swapoff -a, and comment its line in /etc/fstab out",
        node=swap,
        launch=True,
    ),
    Rule(
        name="oom_daemon",
        problem="oom-daemon",
        severity=WARN,
        what="No daemon kills the server while it loads (earlyoom with a limit that the load reaches, systemd-oomd)",
        found="{name} (pid {pid}), {how}",
        expected="nothing that kills a rank while it loads",
        remedy="earlyoom: -m 2 and --avoid for vllm and ray; else sudo systemctl disable --now {unit}",
        node=oom_daemon,
        launch=True,
    ),
    Rule(
        name="restart_policy",
        problem="STP-02",
        severity=WARN,
        what="No stopped container that wants the GPU or the API port comes back with Docker's next start",
        found="container {name}, stopped and with the restart policy always: with the next start of Docker it takes {what} again",
        expected="nothing that takes the GPU or the port back by itself",
        remedy="docker update --restart=no {name}, or name it in spark_stop",
        node=restart_policy,
        launch=True,
    ),
    Rule(
        name="autostart",
        problem="STP-02",
        severity=WARN,
        what="No unit that starts a model is enabled for the boot, but for those in spark_stop",
        found="unit {unit}, enabled for the boot, with {word} in its commands: it takes the GPU or its memory at the next boot",
        expected="no other server that starts by itself",
        remedy="{how}, or name it in spark_stop",
        node=autostart,
        launch=True,
    ),
    Rule(
        name="architecture",
        problem="DOC-11",
        severity=ERROR,
        what="All nodes have one architecture",
        found="nodes of different architectures: {nodes}",
        expected="one architecture",
        remedy="take the odd node out of the inventory",
        gang=architecture,
    ),
    Rule(
        name="clock_skew",
        problem="clock-skew",
        severity=ERROR,
        what="The clocks of the nodes are within 60 s of each other",
        found="a clock {skew} s behind that of {ahead}",
        expected="clocks within {limit} s of each other",
        remedy="timedatectl set-ntp true on the nodes, or set the clock by hand",
        gang=clock_skew,
    ),
    Rule(
        name="fabric_mtu",
        problem="NET-12",
        severity=ERROR,
        what="The fabric has one MTU on all nodes",
        found="fabric MTUs {mtus}",
        expected="the same MTU on every node",
        remedy="set one MTU (9000 if the switch passes it) in the netplan of each node",
        gang=fabric_mtu,
    ),
    Rule(
        name="fabric_topology",
        problem="NCL-05",
        severity=ERROR,
        what="The cables make a pair, a switch or a ring of three",
        found="which nodes share nothing",
        expected="a pair, a switch, or a ring of three",
        remedy="as the message says for the topology that was found",
        gang=fabric_topology,
    ),
    Rule(
        name="fabric_rails",
        problem="NCL-02",
        severity=ERROR,
        what="Each rail is in a subnet that another node has too",
        found="a rail that leads nowhere",
        expected="rails in the same subnets on every node",
        remedy="give the same port of every node an address in the same subnet, or name the devices to use in spark_fabric_hcas",
        gang=fabric_rails,
    ),
    Rule(
        name="gid_index",
        problem="NCL-01",
        severity=ERROR,
        what="A number in spark_gid_index is right for every RDMA device of every node",
        found="the indexes of the nodes",
        expected="one value that is right everywhere",
        remedy="leave spark_gid_index empty",
        gang=gid_index,
    ),
    Rule(
        name="attention_heads",
        problem="VLL-04",
        severity=ERROR,
        what="The tensor parallel size divides the model's attention heads",
        found="spark_tensor_parallel and the model's heads",
        expected="a size that divides the heads",
        remedy="choose another spark_tensor_parallel (and number of nodes), or use spark_pipeline_parallel for the rest",
        gang=attention_heads,
        stage="model",
    ),
    Rule(
        name="pipeline_stages",
        problem="pp-layers",
        severity=ERROR,
        what="Every stage of a pipeline has a layer",
        found="spark_pipeline_parallel and the model's layers",
        expected="at most as many stages as layers",
        remedy="choose a smaller spark_pipeline_parallel, with spark_tensor_parallel or spark_data_parallel for the rest",
        gang=pipeline_stages,
        stage="model",
    ),
    Rule(
        name="engine_nodes",
        problem="dp-nodes",
        severity=ERROR,
        what="Without Ray, data parallel engines of a model without experts fit on one node each",
        found="spark_executor mp, and engines over several nodes",
        expected="spark_executor ray, or engines that fit on one node each",
        remedy="set spark_executor: ray, or lower spark_tensor_parallel x spark_pipeline_parallel to spark_gpus_per_node",
        gang=engine_nodes,
        stage="model",
    ),
    Rule(
        name="service_ports",
        problem="service-ports",
        severity=ERROR,
        what="No port is used twice, by this service or by another one of ours (spark_service)",
        found="a port that this service uses twice, or another service uses too",
        expected="ports of its own for each service",
        remedy="set spark_api_port and spark_port_offset",
        gang=service_ports,
    ),
    Rule(
        name="service_memory",
        problem="service-memory",
        severity=ERROR,
        what="All services of a node together take at most 0.90 of its memory",
        found="the shares of the services",
        expected="at most 0.90 together",
        remedy="lower spark_gpu_memory_utilization, or stop the other service",
        gang=service_memory,
    ),
    Rule(
        name="service_unknown",
        problem="service-memory",
        severity=WARN,
        what="The share of the memory of every other service on these nodes is known",
        found="{title} on {nodes}, whose server is on a node that is not in this inventory: its share of the memory is not counted",
        expected="services whose nodes are all in the inventory",
        remedy="count it yourself: spark_gpu_memory_utilization of all services together at most 0.90",
        gang=service_unknown,
        launch=True,
    ),
    Rule(
        name="memory_weights",
        problem="MEM-03",
        severity=ERROR,
        what="The weights of one rank are smaller than vLLM's share of the smallest node's memory",
        found="weights of {weights} over {ranks} ranks, {each} each, and {share} that vLLM may take of {name} "
        "(spark_gpu_memory_utilization {utilization} of {memory})",
        expected="weights that fit, with room for the KV cache",
        remedy="more nodes, a smaller quantisation of the model, or a higher spark_gpu_memory_utilization (at most 0.90); playbooks/plan.yml "
        "computes it",
        gang=memory_weights,
        stage="memory",
    ),
    Rule(
        name="memory_context",
        problem="MEM-03",
        severity=WARN,
        what="Weights, KV cache of one request, graphs and reserve fit on the smallest node (the estimate of playbooks/plan.yml)",
        found="an estimate that leaves {space} for the KV cache, and one request of {wanted} tokens may not fit (longest context about {longest})",
        expected="room for at least one request",
        remedy="set spark_max_model_len, or --kv-cache-dtype fp8",
        gang=memory_context,
        launch=True,
        stage="memory",
    ),
    Rule(
        name="memory_uneven",
        problem="MEM-06",
        severity=WARN,
        what="The nodes have the same memory, within 3 %",
        found="{small} of memory, and {large} on {other}; the smallest decides what fits",
        expected="nodes with the same memory",
        remedy="close what differs (a desktop session, another kernel), or plan for the smallest node",
        gang=memory_uneven,
        launch=True,
        stage="memory",
    ),
    Rule(
        name="kernel_differs",
        problem="nodes-differ",
        severity=WARN,
        what="All nodes run the same kernel",
        found="different kernels: {nodes}",
        expected="one kernel",
        remedy="bring all nodes to the same DGX OS update and reboot them",
        gang=kernel_differs,
        launch=True,
    ),
    Rule(
        name="driver_differs",
        problem="nodes-differ",
        severity=WARN,
        what="All nodes have the same GPU driver",
        found="different GPU drivers: {nodes}",
        expected="one driver",
        remedy="bring all nodes to the same DGX OS update and reboot them",
        gang=driver_differs,
        launch=True,
    ),
)

NAMES = tuple(rule.name for rule in RULES)
LEVELS = (ERROR, WARN, IGNORE)


# --- how it is used --------------------------------------------------------------------------------------------------------------------------


def override_problems(given: t.Mapping[str, t.Any]) -> list[Problem]:
    """What is wrong with ``spark_gate`` itself."""
    problems = []
    unknown = sorted(str(name) for name in given if name not in NAMES)
    if unknown:
        close = difflib.get_close_matches(unknown[0], NAMES, n=1)
        problems.append(
            Problem(
                "input",
                stage="inputs",
                found=f"unknown rule{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} in spark_gate",
                expected=f"names of rules: {', '.join(NAMES)}",
                remedy=f"did you mean {close[0]}?" if close else "correct the name; docs/host-gate.md explains the rules",
            )
        )
    for name, level in given.items():
        if name in NAMES and level not in LEVELS:
            problems.append(
                Problem(
                    "input",
                    stage="inputs",
                    found=f"spark_gate {name}: {level!r}",
                    expected=f"one of {', '.join(LEVELS)}",
                    remedy="correct it in the inventory's group_vars or host_vars",
                )
            )
    return problems


def level(rule: Rule | str, given: t.Mapping[str, t.Any] | None) -> str:
    """What a rule counts: its own severity, or that of ``spark_gate``."""
    row = next(r for r in RULES if r.name == rule) if isinstance(rule, str) else rule
    return str((given or {}).get(row.name, row.severity))


def _problem(rule: Rule, figures: Figures | Problem, node: str) -> Problem:
    if isinstance(figures, Problem):
        figures.node = figures.node or node
        return figures
    texts = {key: getattr(rule, key).format(**figures) for key in ("found", "expected", "remedy")}
    return Problem(rule.problem, node=str(figures.get("node") or node), stage=rule.stage, **texts)


def settings_of(settings: dict[str, t.Any], member: Member) -> dict[str, t.Any]:
    """The inputs of one node, where the inventory gives it some of its own."""
    return member.get("settings") or settings


def judge(look: Look) -> list[Finding]:
    """Every finding of every rule that counts: errors first, then in the order of the table and of the nodes.

    A rule of a node goes by the inputs of that node, a rule of the gang by those of the head. So every host comes to the same end.
    """
    found: list[Finding] = []
    head = next((m for m in look.members if m["head"]), look.members[0])
    for rule in RULES:
        if rule.launch and look.in_place:
            continue
        for member in look.members if rule.node else [head]:
            own = look._replace(settings=settings_of(look.settings, member))
            severity = level(rule, own.settings.get("gate"))
            if severity == IGNORE:
                continue
            figures = rule.node(own, member) if rule.node else rule.gang(own) if rule.gang else ()
            where = member["name"] if rule.node else ""
            found += [Finding(rule.name, severity, rule.node is None, _problem(rule, each, where)) for each in figures]
    return sorted(found, key=lambda finding: LEVELS.index(finding.severity))


def errors(found: t.Iterable[Finding]) -> list[Finding]:
    """Those that end the run."""
    return [finding for finding in found if finding.severity == ERROR]


def lines(found: t.Iterable[Finding]) -> list[str]:
    """One line for each finding, with the name of its rule; what several nodes have in common is one line."""
    nodes: dict[tuple[str, str, str, str], list[str]] = {}
    firsts: list[Finding] = []
    for finding in found:
        problem = finding.problem
        key = (finding.rule, problem.found, problem.expected, problem.remedy)
        if key not in nodes:
            firsts.append(finding)
        nodes.setdefault(key, []).append(problem.node)
    told = []
    for finding in firsts:
        problem = finding.problem
        named = [name for name in nodes[(finding.rule, problem.found, problem.expected, problem.remedy)] if name]
        where = ": ".join(part for part in (", ".join(named), problem.stage) if part)
        told.append(f"{where}: found {problem.found}; expected {problem.expected}. Remedy: {problem.remedy} (rule {finding.rule})")
    return told


def message(found: t.Sequence[Finding]) -> str:
    """All findings in one text: errors first, then the warnings as a short list."""
    wrong = errors(found)
    told = lines(wrong)
    warnings = lines(finding for finding in found if finding.severity == WARN)
    if warnings:
        told += ["Beside that, as warnings:", *[f"- {line}" for line in warnings]]
    return "\n".join(told)


def teller(found: t.Sequence[Finding], names: t.Sequence[str]) -> str:
    """The one node that fails with the message: that of its first line, or the head (the first of ``names``) where it is about all of them."""
    first = errors(found)[0]
    return names[0] if first.gang or first.problem.node not in names else first.problem.node


def launch(settings: dict[str, t.Any], member: Member) -> dict[str, t.Any]:
    """What memory_room needs of the plan for one node: bytes that vLLM asks for, and what to do about them."""
    own = settings_of(settings, member)
    given = own.get("gate") or {}
    total = (member["node"].get("memory") or {}).get("total") or 0
    return {"need": budget(own, total), "short": level("memory_available", given), "cache": level("page_cache", given)}
