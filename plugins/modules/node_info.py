#!/usr/bin/python
# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_info
short_description: Collects everything that preflight decides on, in one round trip
version_added: 0.1.0
author: dgxspark.serving contributors (!UNKNOWN)
description:
  - Reads memory, kernel, driver, GPU and its processes, Docker with its image store, runtimes and containers, one image, one model snapshot, free disk
    space, listening ports with their owners, states of systemd units, resource limits, RDMA devices, users and the clock of one node.
  - Never fails for what a node lacks. A missing driver, a Docker daemon that is not installed or refuses the user, or a path that does not exist are
    facts that RV(node.gpu.error), RV(node.docker.error) and RV(node.disks) report; the roles decide what they mean.
  - Environment variables of containers and command lines of processes are not returned, they may hold secrets.
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details: This module only reads.
  diff_mode:
    support: N/A
    details: This module does not change anything.
  idempotent:
    support: full
    details: This module never reports a change. What it returns changes with the node.
options:
  image:
    description:
      - Reference of the container image to look for, as given to C(docker run). Nothing is pulled.
      - Empty means that RV(node.image) is V(null).
    type: str
    default: ""
  model:
    description: Snapshot to look for in a cache of the Hugging Face hub on this node. The hub is not asked and no file is hashed.
    type: dict
    suboptions:
      cache_dir:
        description: The cache (what C(HF_HOME) names). A leading V(~) is the home of the login user, also with become.
        type: str
        required: true
      repo_id:
        description: Repository, such as V(Qwen/Qwen3.5-122B-A10B-FP8).
        type: str
        required: true
      revision:
        description: Branch, tag or commit.
        type: str
        default: main
      exclude:
        description: Patterns of files that are left out. A snapshot that was verified with others does not count as verified.
        type: list
        elements: str
  paths:
    description:
      - Paths whose file system to measure. For one that does not exist yet, its nearest existing parent is measured.
      - A leading V(~) is the home of the login user, also with become.
    type: list
    elements: str
    default: []
  units:
    description: Names of systemd units whose state to read.
    type: list
    elements: str
    default: []
  service:
    description: Name of the service whose boot unit to look at, as in C(spark_service).
    type: str
    default: ""
  fabric:
    description:
      - Options of M(dgxspark.serving.nccl_interface_info) with which to choose the fabric interface, too, in the same round trip. What is wrong with the fabric
        is not told here; RV(fabric) is V(null) then, and that module says why.
    type: dict
  docker_socket:
    description: Socket of the Docker daemon.
    type: path
    default: /var/run/docker.sock
"""

EXAMPLES = r"""
- name: Read the node
  dgxspark.serving.node_info:
    node: "{{ inventory_hostname }}"
    image: hellohal2064/vllm-qwen3.5-gb10:latest
    model:
      cache_dir: ~/.cache/huggingface
      repo_id: Qwen/Qwen3.5-122B-A10B-FP8
    paths: [~/.cache/huggingface, /var/lib/docker]
    units: [ollama.service]
  become: true
  register: spark

- name: Stop early when Docker cannot be used
  ansible.builtin.assert:
    that: spark.node.docker.reachable
    fail_msg: "{{ spark.node.docker.error }}"
"""

RETURN = r"""
fabric:
  description: The choice as RV(dgxspark.serving.nccl_interface_info#module:fabric) has it; V(null) where O(fabric) is not given or none can be made.
  returned: always
  type: dict
node:
  description: The facts. Sizes are bytes.
  returned: always
  type: dict
  contains:
    name:
      description: Inventory name, from O(node).
      type: str
      returned: always
    hostname:
      description: Host name as the kernel has it.
      type: str
      returned: always
    machine:
      description: Architecture.
      type: str
      returned: always
      sample: aarch64
    kernel:
      description: Release of the running kernel.
      type: str
      returned: always
      sample: 6.17.0-1014-nvidia
    os:
      description: Keys C(id), C(version) and C(pretty) of C(/etc/os-release).
      type: dict
      returned: always
    dgx:
      description: Keys C(name), C(pretty), C(platform), C(version) and C(build_version) of C(/etc/dgx-release), V(null) where there is none.
      type: dict
      returned: always
    python:
      description: Version of the Python that ran the module.
      type: str
      returned: always
      sample: 3.12.3
    python_requests:
      description: Version of the Python package requests, which community.docker needs; V(null) when it is not installed.
      type: str
      returned: always
    user:
      description: The login user (who called sudo, else the current user) with C(name), C(uid), C(gid), C(home) and C(groups).
      type: dict
      returned: always
    effective_user:
      description: The user the module ran as.
      type: str
      returned: always
    time:
      description: Clock of the node, seconds since 1970.
      type: float
      returned: always
    memory:
      description:
        - Keys C(total), C(free), C(available), C(swap_total), C(swap_free), C(cma_total), C(cma_free), C(shm_total), and C(unaccounted), what no
          counter of the kernel names (a driver has it).
      type: dict
      returned: always
    limits:
      description: Hard limits that a container may get, C(memlock) in bytes and C(nofile); V(-1) is unlimited.
      type: dict
      returned: always
    oom_daemons:
      description:
        - Daemons that kill when memory is short, as C(name), C(pid) and C(limit), the bytes of available memory below which it kills (V(null) when
          it goes by other signs).
      type: list
      elements: dict
      returned: always
    remove_ipc:
      description:
        - As C(active), whether logind removes a user's shared memory with the last session (C(RemoveIPC)). As C(linger), the users that never
          fully log out.
      type: dict
      returned: always
    autostart:
      description: Units enabled for the boot that start a model or take the GPU, as C(unit) and the C(word) of their commands that says so.
      type: list
      elements: dict
      returned: always
    gpu:
      description:
        - C(count), C(driver), C(module) (version of the loaded kernel module), C(devices) (C(index), C(name), C(uuid), C(compute_cap)), C(processes)
          (C(pid), C(name), C(memory_mib), C(user), C(container), C(unit)) and C(error).
      type: dict
      returned: always
      contains:
        error:
          description: Why no GPU can be used; V(null) when all is well.
          type: str
          returned: always
    docker:
      description:
        - C(installed), C(reachable), C(error), C(version), C(api_version), C(store) (V(containerd) or V(classic)), C(driver), C(root_dir), C(runtimes),
          C(default_runtime), C(cdi_devices), C(architecture), C(gpu_capable) and C(gpu_reason).
      type: dict
      returned: always
      contains:
        error:
          description: Why Docker cannot be used; names user, socket, owner, group and mode where permission is the reason.
          type: str
          returned: always
        gpu_capable:
          description: Whether C(docker run --gpus all) can work.
          type: bool
          returned: always
        gpu_reason:
          description: What was found that makes it work, or what is missing.
          type: str
          returned: always
    image:
      description: The image of O(image) with C(present), C(id), C(fingerprint), C(layers), C(architecture), C(size), C(env) and more.
      type: dict
      returned: always
    containers:
      description:
        - All containers, running or not. Each with C(name), C(id), C(image), C(image_id), C(state), C(running), C(pid), C(started_at), C(finished_at),
          C(exit_code), C(oom_killed), C(error), C(restart_count), C(restart_policy), C(labels), C(ports) (C(host_ip), C(host_port), C(container_port),
          C(protocol)), C(network_mode), C(gpu), C(privileged), C(compose_project) and C(arguments) (of those that this collection made).
      type: list
      elements: dict
      returned: always
    disks:
      description: For each of O(paths) the C(mount) point, C(total) and C(free) bytes and the existing path that was C(checked).
      type: dict
      returned: always
    listeners:
      description:
        - Listening TCP sockets with C(address), C(port), C(pid), C(pids), C(process), C(user), C(container) (name) and C(unit).
      type: list
      elements: dict
      returned: always
    listeners_error:
      description: Why RV(node.listeners) is empty although it should not be; V(null) when the list could be read.
      type: str
      returned: always
    rdma_devices:
      description: Names in C(/sys/class/infiniband).
      type: list
      elements: str
      returned: always
    infiniband_dev:
      description: Whether C(/dev/infiniband) exists.
      type: bool
      returned: always
    unit_states:
      description: State of each of O(units), such as V(active), V(inactive), V(failed), V(not-found) or V(unknown).
      type: dict
      returned: always
    boot:
      description:
        - The unit for the boot (see M(dgxspark.serving.boot_unit)), as C(files), a digest of its files, C(enabled), C(state) and C(text), how far it says
          that it is.
      type: dict
      returned: always
    snapshot:
      description: State of the snapshot of O(model); V(null) without O(model) or when the cache does not exist.
      type: dict
      returned: always
"""

import grp
import importlib.util
import os
import platform
import pwd
import re
import shutil
import stat
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils._boot_files import Paths, state_of
from ansible_collections.dgxspark.serving.plugins.module_utils._docker_api import DockerApi
from ansible_collections.dgxspark.serving.plugins.module_utils._fabric import parse_request
from ansible_collections.dgxspark.serving.plugins.module_utils._fabric_look import Ports
from ansible_collections.dgxspark.serving.plugins.module_utils._node import Host, collect
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._snapshot import local_state, model_config

COMMAND_TIMEOUT = 15


def login_user() -> dict[str, t.Any]:
    """Who logged in: the user that called sudo, else the current one."""
    uid = os.environ.get("SUDO_UID", "")
    number = int(uid) if uid.isdigit() else os.getuid()
    try:
        entry = pwd.getpwuid(number)
    except KeyError:
        return {"name": str(number), "uid": number, "gid": os.getgid(), "home": os.environ.get("HOME", "/"), "groups": []}
    groups = []
    for gid in os.getgrouplist(entry.pw_name, entry.pw_gid):
        try:
            groups.append(grp.getgrgid(gid).gr_name)
        except KeyError:
            groups.append(str(gid))
    return {"name": entry.pw_name, "uid": number, "gid": entry.pw_gid, "home": entry.pw_dir, "groups": sorted(groups)}


def user_name(uid: int) -> str:
    """Name of a user, the number when it has none here (a user of a container)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def requests_version() -> str | None:
    """Version of requests for this interpreter, read from its files: importing it would take longer than everything else."""
    spec = importlib.util.find_spec("requests")
    if spec is None or not spec.origin:
        return None
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "__version__.py"), encoding="utf-8") as handle:
            found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", handle.read())
    except OSError:
        found = None
    return found.group(1) if found else "unknown"


def read_file(path: str) -> str:
    """Text of a small file; undecodable bytes are replaced."""
    with open(path, encoding="utf-8", errors="replace") as handle:
        return handle.read()


def stat_names(path: str) -> tuple[str, str, int] | None:
    """Owner, group and permission bits."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return user_name(found.st_uid), group, stat.S_IMODE(found.st_mode)


def disk_usage(path: str) -> tuple[str, int, int] | None:
    """Mount point, total and free bytes (free for ordinary users) of an existing path."""
    try:
        usage = os.statvfs(path)
    except OSError:
        return None
    mount = os.path.realpath(path)
    while not os.path.ismount(mount):
        mount = os.path.dirname(mount)
    return mount, usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize


def build_host(module: AnsibleModule) -> Host:
    """The real machine behind the interface of _node."""

    def run(argv: list[str]) -> tuple[int, str, str]:
        if not shutil.which(argv[0]):
            return 127, "", f"{argv[0]} is not installed"
        rc, out, err = module.run_command(["timeout", str(COMMAND_TIMEOUT), *argv], environ_update={"LC_ALL": "C"}, handle_exceptions=False)
        return rc, out, err

    return Host(
        run=run,
        read=read_file,
        listdir=os.listdir,
        which=shutil.which,
        exists=os.path.exists,
        api=DockerApi(module.params["docker_socket"]).get,
        stat=stat_names,
        disk=disk_usage,
        user_of=user_name,
        user=login_user(),
        effective_user=user_name(os.geteuid()),
        docker_socket=module.params["docker_socket"],
    )


def chosen(run: t.Callable[[list[str]], tuple[int, str, str]], options: dict[str, t.Any] | None, node: str) -> dict[str, t.Any] | None:
    """The fabric interface, or nothing where it was not asked for or cannot be chosen."""
    if not options:
        return None
    try:
        return Ports(lambda argv: run(list(argv)), node, options.get("sysfs_path") or "/sys").choose(
            parse_request({"node": node, **options})
        )
    except Problem:
        return None


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "node": {"type": "str", "default": ""},
            "image": {"type": "str", "default": ""},
            "model": {
                "type": "dict",
                "options": {
                    "cache_dir": {"type": "str", "required": True},
                    "repo_id": {"type": "str", "required": True},
                    "revision": {"type": "str", "default": "main"},
                    "exclude": {"type": "list", "elements": "str"},
                },
            },
            "paths": {"type": "list", "elements": "str", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "service": {"type": "str", "default": ""},
            "fabric": {"type": "dict"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    host = build_host(module)
    kernel = os.uname()
    unit = Paths(params["service"]).unit_name
    node: dict[str, t.Any] = {
        "name": params["node"],
        "hostname": kernel.nodename,
        "machine": kernel.machine,
        "kernel": kernel.release,
        "python": platform.python_version(),
        "python_requests": requests_version(),
        "effective_user": host.effective_user,
        "snapshot": None,
    }
    node.update(collect(host, image=params["image"], paths=params["paths"], units=[*params["units"], unit]))
    boot = state_of(read_file, os.path.islink, node["unit_states"].pop(unit, "unknown"), params["service"])
    node["boot"] = {**boot, "text": node.pop("unit_texts")[unit]}
    model = params["model"]
    if model:
        patterns = None if model["exclude"] is None else {"allow": [], "ignore": sorted(model["exclude"])}
        node["snapshot"] = local_state(model["cache_dir"], model["repo_id"], model["revision"], patterns=patterns)
        if node["snapshot"] and node["snapshot"]["path"]:
            node["snapshot"]["config"] = model_config(node["snapshot"]["path"])
    node["time"] = time.time()
    module.exit_json(changed=False, node=node, fabric=chosen(host.run, params["fabric"], params["node"]))


if __name__ == "__main__":
    main()
