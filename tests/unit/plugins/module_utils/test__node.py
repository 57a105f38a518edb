# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import pathlib

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _node

FIXTURES = pathlib.Path(_node.__file__).resolve().parents[2] / "tests" / "unit" / "fixtures" / "node"
OUTER = "50b28b0b32be98fc1c90d9a148abb18a93a9630ca9b0dc85cc3e40fa67a46f34"
GB10 = "0, NVIDIA GB10, GPU-5ba4c0de-0000-4000-8000-003300804345, 580.126.09, 12.1\n"
HOST_NET = "container_host_network"
PUBLISHED = "container_published"


def text(name):
    return (FIXTURES / name).read_text(encoding="utf-8")


def load(name):
    return json.loads(text(name + ".json"))


def make_host(files=None, commands=None, api=None, programs=("docker", "ss", "nvidia-smi", "systemctl"), **over):
    """A Host over recorded data; api is a dict path -> (status, data) or an exception."""
    files = files or {}
    commands = commands or {}

    def read(path):
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    def listdir(path):
        names = {name[len(path) + 1 :].split("/")[0] for name in files if name.startswith(path + "/")}
        if not names:
            raise FileNotFoundError(path)
        return list(names)

    def run(argv):
        for start, answer in commands.items():
            if " ".join(argv).startswith(start):
                return answer
        return 127, "", f"{argv[0]} is not installed"

    def ask(path):
        if isinstance(api, OSError):
            raise api
        return (api or {}).get(path, (404, {"message": "not found"}))

    values = {
        "run": run,
        "read": read,
        "listdir": listdir,
        "which": lambda name: f"/usr/bin/{name}" if name in programs else None,
        "exists": lambda path: path in files or any(name.startswith(path.rstrip("/") + "/") for name in files),
        "api": ask,
        "stat": lambda path: ("root", "docker", 0o660),
        "disk": lambda path: ("/", 1000, 400),
        "user_of": lambda uid: {0: "root", 1000: "spark"}.get(uid, str(uid)),
        "user": {"name": "spark", "uid": 1000, "gid": 1000, "home": "/home/spark", "groups": ["spark", "sudo"]},
        "effective_user": "root",
    }
    values.update(over)
    return _node.Host(**values)


def docker_api(info="info_containerd", containers=(HOST_NET, PUBLISHED), image=None, **changes):
    api = {"/info": (200, dict(load(info), **changes)), "/version": (200, {"ApiVersion": "1.45", "MinAPIVersion": "1.24"})}
    inspects = [load(name) for name in containers]
    api["/containers/json?all=1"] = (200, [{"Id": item["Id"]} for item in inspects])
    api.update({f"/containers/{item['Id']}/json": (200, item) for item in inspects})
    if image:
        api[f"/images/{image[0]}/json"] = (200, image[1])
    return api


# --- files -------------------------------------------------------------------------------------------------------------------------------------------


def test_dgx_record_takes_the_last_update_and_no_serial_number():
    record = _node.dgx_record(text("dgx-release"))
    assert record == {
        "name": "DGX Spark",
        "pretty": "NVIDIA DGX Spark",
        "platform": "Dell Pro Max with GB10 FCM1253",
        "version": "7.5.0",
        "build_version": "7.2.3",
    }
    assert _node.dgx_record("") is None


def test_os_record():
    assert _node.os_record('PRETTY_NAME="Ubuntu 24.04.4 LTS"\nVERSION_ID="24.04"\nID=ubuntu\n# x=y\n') == {
        "id": "ubuntu",
        "version": "24.04",
        "pretty": "Ubuntu 24.04.4 LTS",
    }


def test_memory_record_is_in_bytes():
    record = _node.memory_record(text("meminfo"), 64)
    assert record == {
        "total": 127535084 * 1024,
        "free": 19000000 * 1024,
        "available": 117440512 * 1024,
        "swap_total": 16777212 * 1024,
        "swap_free": 16777212 * 1024,
        "cma_total": 0,
        "cma_free": 940604 * 1024,
        "shm_total": 64,
        "unaccounted": 0,  # this text has not enough lines to tell
    }


CAPABLE = "CapEff:\t000001ffffffffff\n"
BARRED = "CapEff:\t0000003ffeffffff\n"  # all but CAP_SYS_RESOURCE
NO_LIMIT = (
    "Max open files            1024                 unlimited            files\n"
    "Max locked memory         unlimited            unlimited            bytes\n"
)


@pytest.mark.parametrize(
    ("sources", "nr_open", "expected"),
    [
        ([("limits", CAPABLE)], "1048576", {"memlock": -1, "nofile": 1048576}),
        ([("limits", BARRED)], "1048576", {"memlock": 8388608, "nofile": 20000}),
        ([("limits", CAPABLE), ("limits", BARRED)], "1048576", {"memlock": 8388608, "nofile": 20000}),
        ([(NO_LIMIT, BARRED)], "1048576", {"memlock": -1, "nofile": -1}),
        ([(NO_LIMIT, BARRED), ("limits", BARRED)], "1048576", {"memlock": 8388608, "nofile": 20000}),
        ([("limits", CAPABLE)], "", {"memlock": -1, "nofile": 20000}),
        ([], "1048576", {"memlock": 0, "nofile": 0}),
    ],
)
def test_limits_record(sources, nr_open, expected):
    given = [(text("limits.txt") if limits == "limits" else limits, status) for limits, status in sources]
    assert _node.limits_record(given, nr_open) == expected


@pytest.mark.parametrize("pid_file", [True, False])
def test_limits_are_those_of_the_daemon(pid_file):
    files = {"/proc/self/limits": NO_LIMIT, "/proc/self/status": BARRED, "/proc/sys/fs/nr_open": "1048576\n"}
    assert _node.collect_limits(make_host(files)) == {"memlock": -1, "nofile": -1}
    files.update(
        {"/proc/90/comm": "dockerd\n", "/proc/90/limits": text("limits.txt"), "/proc/90/status": BARRED, "/proc/1/comm": "systemd\n"}
    )
    if pid_file:
        files["/var/run/docker.pid"] = "90"
    assert _node.collect_limits(make_host(files)) == {"memlock": 8388608, "nofile": 20000}


def test_stale_pid_file_is_not_believed():
    files = {
        "/var/run/docker.pid": "90",
        "/proc/90/comm": "bash\n",
        "/proc/90/limits": text("limits.txt"),
        "/proc/self/limits": NO_LIMIT,
        "/proc/self/status": BARRED,
    }
    assert _node.collect_limits(make_host(files))["memlock"] == -1


# --- GPU ---------------------------------------------------------------------------------------------------------------------------------------------


def test_gpu_of_a_spark():
    commands = {
        "nvidia-smi --query-gpu=": (0, GB10, ""),
        "nvidia-smi --query-compute-apps=": (0, "4242, sglang::scheduler, 96073\n77, /usr/lib/a,b/Xorg, [N/A]\n", ""),
    }
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.126.09  Release Build  (dvs-builder@U22)  Wed Jan  7\n"
    gpu = _node.collect_gpu(make_host({"/proc/driver/nvidia/version": version}, commands))
    assert gpu == {
        "count": 1,
        "driver": "580.126.09",
        "module": "580.126.09",
        "devices": [{"index": 0, "name": "NVIDIA GB10", "uuid": "GPU-5ba4c0de-0000-4000-8000-003300804345", "compute_cap": "12.1"}],
        "processes": [
            {"pid": 4242, "name": "sglang::scheduler", "memory_mib": 96073},
            {"pid": 77, "name": "/usr/lib/a,b/Xorg", "memory_mib": None},
        ],
        "error": None,
    }


@pytest.mark.parametrize(
    ("programs", "answer", "expected"),
    [
        ((), (127, "", ""), "nvidia-smi is not installed"),
        (
            ("nvidia-smi",),
            (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", ""),
            "failed with code 9: NVIDIA-SMI has failed",
        ),
        (("nvidia-smi",), (18, "Failed to initialize NVML: Driver/library version mismatch\n", ""), "reboot this node"),
        (("nvidia-smi",), (0, "No devices were found\n", ""), "nvidia-smi lists no GPU: No devices were found"),
        (("nvidia-smi",), (124, "", ""), "timed out"),
    ],
)
def test_gpu_errors_are_facts(programs, answer, expected):
    gpu = _node.collect_gpu(make_host(commands={"nvidia-smi": answer}, programs=programs))
    assert expected in gpu["error"]
    assert (gpu["count"], gpu["devices"], gpu["processes"]) == (0, [], [])


# --- Docker ------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, ["nvidia.com/gpu=0", "nvidia.com/gpu=all"]),
        (
            "cdiVersion: 0.6.0\nkind: 'nvidia.com/gpu'\ndevices:\n  - name: \"0\"\n    containerEdits:\n      env: []\n",
            ["nvidia.com/gpu=0"],
        ),
        ('{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": "all"}]}', ["nvidia.com/gpu=all"]),
        ("kind: vendor.com/net\ndevices:\n- name: eth\n", ["vendor.com/net=eth"]),
        ("{broken", []),
        ("", []),
    ],
)
def test_parse_cdi(spec, expected):
    assert _node.parse_cdi(text("cdi.yaml") if spec is None else spec) == expected


@pytest.mark.parametrize(
    ("runtimes", "cdi", "hook", "cli", "capable", "reason"),
    [
        (["nvidia", "runc"], [], None, None, True, "runtime nvidia is registered in Docker"),
        (["runc"], ["nvidia.com/gpu=all"], None, None, True, "CDI devices nvidia.com/gpu=all"),
        (["runc"], [], "/usr/bin/nvidia-container-runtime-hook", None, True, "/usr/bin/nvidia-container-runtime-hook is installed"),
        (
            ["runc"],
            ["vendor.com/net=eth"],
            None,
            None,
            False,
            "no runtime nvidia in Docker (here), no nvidia.com/gpu in /etc/cdi or /var/run/cdi, no nvidia-container-runtime-hook",
        ),
        (["runc"], [], None, "/usr/bin/nvidia-container-cli", False, "/usr/bin/nvidia-container-cli alone is not enough"),
    ],
)
def test_gpu_capability(runtimes, cdi, hook, cli, capable, reason):
    found = _node.gpu_capability(runtimes, cdi, hook, cli, "here")
    assert found[0] is capable and reason in found[1]


@pytest.mark.parametrize(
    ("info", "store", "driver"),
    [("info_containerd", "containerd", "overlayfs"), ("info_classic", "classic", "overlay2")],
)
def test_docker_record(info, store, driver):
    docker, image, containers = _node.collect_docker(make_host(api=docker_api(info)))
    assert (docker["installed"], docker["reachable"], docker["error"]) == (True, True, None)
    assert (docker["store"], docker["driver"], docker["root_dir"], docker["api_version"]) == (store, driver, "/var/lib/docker", "1.45")
    assert docker["default_runtime"] == "runc" and "runc" in docker["runtimes"]
    assert docker["gpu_capable"] is False and "no runtime nvidia" in docker["gpu_reason"]
    assert image is None
    assert [item["name"] for item in containers] == ["glm-sglang", "web"]


def test_docker_with_the_hook_only():
    docker = _node.collect_docker(make_host({"/usr/bin/nvidia-container-runtime-hook": ""}, api=docker_api()))[0]
    assert docker["gpu_capable"] and "nvidia-container-runtime-hook" in docker["gpu_reason"]


@pytest.mark.parametrize(
    ("exc", "over", "expected"),
    [
        (
            PermissionError(13, "Permission denied"),
            {"effective_user": "spark"},
            "user spark (groups spark, sudo) may not use /var/run/docker.sock (owner root, group docker, mode 0660)",
        ),
        (PermissionError(13, "Permission denied"), {}, "user root may not use /var/run/docker.sock (owner root, group docker, mode 0660)"),
        (FileNotFoundError(2, "No such file"), {}, "/var/run/docker.sock does not exist: the Docker daemon is not running"),
        (FileNotFoundError(2, "No such file"), {"programs": ()}, "Docker is not installed: no docker on PATH, no /var/run/docker.sock"),
        (ConnectionRefusedError(111, "refused"), {}, "the Docker daemon is not running"),
        (TimeoutError("timed out"), {}, "does not answer at /var/run/docker.sock (timed out)"),
        (OSError("no HTTP answer"), {}, "/var/run/docker.sock: no HTTP answer"),
    ],
)
def test_docker_that_cannot_be_used_is_a_fact(exc, over, expected):
    docker, image, containers = _node.collect_docker(make_host(api=exc, **over), "some/image:1")
    assert expected in docker["error"]
    assert docker["reachable"] is False and docker["gpu_capable"] is False and docker["gpu_reason"].startswith("not known: ")
    assert docker["installed"] is (over.get("programs") is None)
    assert image["present"] is False and image["reference"] == "some/image:1"
    assert containers == []


def test_container_records():
    host_net = _node.container_record(load(HOST_NET))
    assert host_net["name"] == "glm-sglang" and host_net["running"] is True and host_net["pid"] == 288
    assert (host_net["network_mode"], host_net["restart_policy"], host_net["restart_count"], host_net["ports"]) == (
        "host",
        "unless-stopped",
        0,
        [],
    )
    assert host_net["started_at"].startswith("2026-11-30T08:57:32") and host_net["state"] == "running"
    web = _node.container_record(load(PUBLISHED))
    assert web["ports"] == [
        {"host_ip": "127.0.0.1", "host_port": 22210, "container_port": 22, "protocol": "tcp"},
        {"host_ip": "127.0.0.1", "host_port": 30000, "container_port": 30000, "protocol": "tcp"},
    ]
    assert web["compose_project"] == "glm"
    assert not any("Env" in key or key == "env" for key in web)


def test_command_lines_of_our_own_containers_only():
    inspect = {"Name": "/x", "Args": ["serve", "--port", "30000"], "Config": {"Labels": {"dgxspark.serving": "1"}}}
    assert _node.container_record(inspect)["arguments"] == ["serve", "--port", "30000"]
    assert _node.container_record({**inspect, "Config": {"Labels": {}}})["arguments"] == []


def test_container_that_vanished_is_left_out():
    api = docker_api()
    api[f"/containers/{load(HOST_NET)['Id']}/json"] = (404, {"message": "No such container"})
    assert [item["name"] for item in _node.collect_docker(make_host(api=api))[2]] == ["web"]


def test_stopped_container_keeps_its_bindings():
    inspect = load(PUBLISHED)
    inspect["NetworkSettings"]["Ports"] = {}
    inspect["State"].update({"Running": False, "Status": "exited", "Pid": 0, "ExitCode": 137, "OOMKilled": True})
    record = _node.container_record(inspect)
    assert [port["host_port"] for port in record["ports"]] == [22210, 30000]
    assert (record["running"], record["exit_code"], record["oom_killed"]) == (False, 137, True)


@pytest.mark.parametrize(
    ("host_config", "env", "expected"),
    [
        ({"DeviceRequests": [{"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]]}]}, [], True),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"], "Capabilities": None}]}, [], True),
        ({"Runtime": "nvidia"}, ["NVIDIA_VISIBLE_DEVICES=all"], True),
        ({"Runtime": "nvidia"}, ["NVIDIA_VISIBLE_DEVICES=void"], False),
        ({"Runtime": "nvidia"}, [], False),
        ({"Devices": [{"PathOnHost": "/dev/nvidia0"}]}, [], True),
        ({"Runtime": "runc", "DeviceRequests": None, "Devices": [{"PathOnHost": "/dev/infiniband"}]}, [], False),
    ],
)
def test_uses_gpu(host_config, env, expected):
    assert _node.uses_gpu(host_config, env) is expected


def test_image_by_digest_and_absent():
    inspect = {"Id": "sha256:1", "RootFS": {"Layers": ["sha256:2"]}, "Architecture": "arm64", "Os": "linux", "Config": {"Env": ["A=b"]}}
    reference = "registry:5000/a/b@sha256:" + "0" * 64
    found = _node.collect_docker(make_host(api=docker_api(image=(reference, inspect))), reference)[1]
    assert found["present"] and found["architecture"] == "arm64" and found["env"] == {"A": "b"} and len(found["fingerprint"]) == 64
    assert _node.collect_docker(make_host(api=docker_api()), "a/b:1")[1]["present"] is False


# --- ports -------------------------------------------------------------------------------------------------------------------------------------------


def test_parse_ss():
    rows = _node.parse_ss(text("ss.txt"))
    assert [(row["address"], row["port"], row["pid"], row["process"]) for row in rows] == [
        ("0.0.0.0", 22, 108, "sshd"),
        ("127.0.0.11", 41983, None, None),
        ("127.0.0.1", 39665, 110, "containerd"),
        ("127.0.0.1", 30000, 313, "httpd"),
        ("127.0.0.1", 22210, 6964, "docker-proxy"),
        ("127.0.0.53", 53, 77, "systemd-resolve"),
        ("*", 80, 12, "nginx"),
        ("::", 22, 108, "sshd"),
    ]
    assert rows[6]["pids"] == [12, 11]


INNER = "97dbcf3caa2b41dc2c11b2e94ae4e3e680cf130a22394f1af982944fcc2cdb6f"


@pytest.mark.parametrize(
    ("cgroup", "container", "unit"),
    [
        ("0::/system.slice/ssh.service\n", None, "ssh.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/ollama.service\n", None, "ollama.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None, None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope\n", None, None),
        (f"0::/system.slice/docker-{INNER}.scope\n", INNER, None),
        (f"9:name=systemd:/docker/{INNER}\n0::/docker/{INNER}\n", INNER, None),
        # a node that is a container itself: its own id is in every path
        (f"9:name=systemd:/docker/{OUTER}/system.slice/ssh.service\n0::/docker/{OUTER}/system.slice/ssh.service\n", None, "ssh.service"),
        (f"0::/docker/{OUTER}/system.slice/docker-{INNER}.scope\n", INNER, None),
        (f"0::/docker/{OUTER}/init.scope\n", None, None),
        ("13:hugetlb:/\n1:name=systemd:/system.slice/nginx.service\n", None, "nginx.service"),
    ],
)
def test_cgroup_owner(cgroup, container, unit):
    assert _node.cgroup_container(cgroup, [INNER]) == container
    if container is None:
        assert _node.cgroup_unit(cgroup) == unit


def test_listeners_have_owners():
    files = {
        "/proc/108/status": "Name:\tsshd\nUid:\t0\t0\t0\t0\n",
        "/proc/108/cgroup": f"0::/docker/{OUTER}/system.slice/ssh.service\n",
        "/proc/313/status": "Name:\thttpd\nUid:\t1000\t1000\t1000\t1000\n",
        "/proc/313/cgroup": f"0::/docker/{OUTER}/docker/{load(HOST_NET)['Id']}\n",
        "/proc/6964/status": "Uid:\t0\t0\t0\t0\n",
        "/proc/6964/cgroup": "0::/system.slice/docker.service\n",
    }
    host = make_host(files, {"ss -tlnpH": (0, text("ss.txt"), "")})
    listeners, problem = _node.collect_listeners(host, [_node.container_record(load(name)) for name in (HOST_NET, PUBLISHED)])
    owners = {(row["address"], row["port"]): (row["user"], row["container"], row["unit"]) for row in listeners}
    assert problem is None
    assert owners[("0.0.0.0", 22)] == ("root", None, "ssh.service")
    assert owners[("127.0.0.1", 30000)] == ("spark", "glm-sglang", None)
    assert owners[("127.0.0.1", 22210)] == ("root", "web", None)
    assert owners[("127.0.0.1", 39665)] == (None, None, None)  # the process ended in between


def test_main_process_without_a_known_cgroup():
    record = _node.container_record(load(HOST_NET))
    host = make_host({"/proc/288/cgroup": "0::/\n", "/proc/288/status": "Uid:\t0\t0\t0\t0\n"})
    assert _node.owner_of(host, 288, [record])["container"] == "glm-sglang"


def test_listeners_error_is_a_fact():
    assert _node.collect_listeners(make_host(), []) == ([], "ss failed with code 127: ss is not installed")


# --- the rest ----------------------------------------------------------------------------------------------------------------------------------------

SYSTEMCTL = """Id=docker.service
LoadState=loaded
ActiveState=active
StatusText=

Id=nothere.service
LoadState=not-found
ActiveState=inactive
StatusText=

Id=ssh.service
LoadState=loaded
ActiveState=failed
StatusText=down: a=1, see 'docker logs spark-vllm'
"""

NOTHING = ("unknown", "")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            (0, SYSTEMCTL, ""),
            {"docker": ("active", ""), "nothere": ("not-found", ""), "ssh.service": ("failed", "down: a=1, see 'docker logs spark-vllm'")},
        ),
        ((1, "", "System has not been booted with systemd"), {"docker": NOTHING, "nothere": NOTHING, "ssh.service": NOTHING}),
    ],
)
def test_units(answer, expected):
    assert _node.collect_units(make_host(commands={"systemctl show": answer}), ["docker", "nothere", "ssh.service"]) == expected


@pytest.mark.parametrize(
    ("path", "checked"),
    [
        ("/data/models/hub", "/data/models"),
        ("/data/models/", "/data/models/"),
        ("~/.cache/huggingface", "/home/spark"),
        ("/none/at/all", "/"),
    ],
)
def test_disks(path, checked):
    host = make_host({"/data/models/x": "", "/home/spark/y": ""})
    assert _node.collect_disks(host, [path]) == {path: {"mount": "/", "total": 1000, "free": 400, "checked": checked}}


def test_collect_on_a_bare_machine():
    """No Docker, no driver, no ss: everything is there as a fact."""
    facts = _node.collect(make_host(api=FileNotFoundError(2, "x"), programs=()), image="a/b:1", paths=["/x"], units=["u"])
    assert "Docker is not installed" in facts["docker"]["error"]
    assert "nvidia-smi is not installed" in facts["gpu"]["error"]
    assert facts["containers"] == [] and facts["listeners"] == [] and facts["listeners_error"]
    assert facts["unit_states"] == {"u": "unknown"} and facts["dgx"] is None
    assert facts["rdma_devices"] == [] and facts["infiniband_dev"] is False


def test_gpu_processes_have_owners():
    pid_file = {"/proc/4242/cgroup": f"0::/docker/{load(HOST_NET)['Id']}\n", "/proc/4242/status": "Uid:\t0\t0\t0\t0\n"}
    commands = {"nvidia-smi --query-gpu=": (0, GB10, ""), "nvidia-smi --query-compute-apps=": (0, "4242, sglang::scheduler, 96073\n", "")}
    process = _node.collect(make_host(pid_file, commands, docker_api()))["gpu"]["processes"][0]
    assert (process["container"], process["user"], process["unit"]) == ("glm-sglang", "root", None)
