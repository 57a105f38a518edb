# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The serving pair, looked at from outside."""

from __future__ import annotations

import json
import typing as t

import pytest
import spark
from testinfra.host import Host

# Not ansible://sparks: testinfra hands the inventory's ssh arguments, which name a file beside it, to ssh as they stand.
testinfra_hosts = [f"ssh://{node}?ssh_config={spark.LAB}/.ssh/config" for node in spark.NODES]


def container(host: Host, name: str) -> dict[str, t.Any]:
    with host.sudo():
        return json.loads(host.check_output("docker container inspect %s", name))[0]


def environment(found: dict[str, t.Any]) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in found["Config"]["Env"])


def name_of(host: Host) -> str:
    return str(host.backend.get_hostname())


@pytest.fixture
def address(host: Host) -> str:
    return spark.NODES[name_of(host)]


@pytest.fixture
def ours(host: Host) -> list[dict[str, t.Any]]:
    """The containers of the collection that this node has to run."""
    names = ["spark-ray", "spark-vllm"] if name_of(host) == spark.HEAD else ["spark-ray"]
    return [container(host, name) for name in names]


def test_ray_lists_the_fabric_addresses(host: Host) -> None:
    """Although the default route of the head is another network and its own name resolves to 127.0.1.1."""
    if name_of(host) == spark.HEAD:
        assert "enP7s7" in host.check_output("ip -4 route show default")
        assert host.check_output("getent ahostsv4 spark-1").startswith("127.0.1.1")
    assert spark.ray_nodes() == [[address, 1.0] for address in spark.NODES.values()]


def test_the_old_service_is_stopped(host: Host) -> None:
    old = container(host, spark.OLD)
    assert old["State"]["Status"] == "exited"
    with host.sudo():
        assert host.file(f"{spark.STATE}/stopped.last.json").exists
        assert not host.file(f"{spark.STATE}/stopped.json").exists


def test_exactly_the_planned_containers(host: Host) -> None:
    expected = ["glm-sglang", "spark-ray"] + (["spark-vllm"] if name_of(host) == spark.HEAD else [])
    assert spark.containers(name_of(host)) == expected


def test_containers_are_restricted(ours: list[dict[str, t.Any]]) -> None:
    for found in ours:
        config = found["HostConfig"]
        assert found["State"]["Running"]
        assert config["Privileged"] is False
        assert config["RestartPolicy"]["Name"] == "no"
        assert found["RestartCount"] == 0
        assert [cap.removeprefix("CAP_") for cap in config["CapAdd"]] == ["IPC_LOCK"]
        assert config["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
        assert config["NetworkMode"] == "host"
        assert config["IpcMode"] == "host"


def test_entrypoints_are_ours(ours: list[dict[str, t.Any]]) -> None:
    """That of the image only complains."""
    assert [found["Config"]["Entrypoint"] for found in ours] == [["ray"], ["vllm"]][: len(ours)]
    assert "start" in ours[0]["Config"]["Cmd"]


def test_the_server_shares_the_world_of_its_ray(host: Host, ours: list[dict[str, t.Any]]) -> None:
    if name_of(host) != spark.HEAD:
        assert len(ours) == 1
        return
    ray, server = ours
    assert server["HostConfig"]["PidMode"] == f"container:{ray['Id']}"
    tmp = [[m["Name"] for m in found["Mounts"] if m["Destination"] == "/tmp"] for found in ours]
    assert tmp[0] == tmp[1] and tmp[0][0].startswith("spark-tmp-")


def test_the_model_is_mounted_read_only(ours: list[dict[str, t.Any]]) -> None:
    for found in ours:
        (mount,) = [m for m in found["Mounts"] if m["Destination"] == "/models/hub"]
        assert mount["Source"] == "/home/spark/.cache/huggingface/hub"
        assert mount["RW"] is False


def test_environment(host: Host, ours: list[dict[str, t.Any]], address: str) -> None:
    both = {
        "VLLM_HOST_IP": address,
        "MASTER_ADDR": spark.NODES[spark.HEAD],
        "RAY_NODE_IP_ADDRESS": address,
        "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "TP_SOCKET_IFNAME": "enp1s0f1np1",
        "UCX_NET_DEVICES": "enp1s0f1np1",
        "OMPI_MCA_btl_tcp_if_include": "enp1s0f1np1",
        "NCCL_IB_DISABLE": "1",
        "RAY_memory_monitor_refresh_ms": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": "/models/hub",
        "NO_PROXY": ",".join(["localhost", "127.0.0.1", *spark.NODES.values()]),
        "no_proxy": ",".join(["localhost", "127.0.0.1", *spark.NODES.values()]),
    }
    for found in ours:
        env = environment(found)
        assert {key: env.get(key) for key in both} == both
        assert int(env["VLLM_ENGINE_READY_TIMEOUT_S"]) > spark.settings()["spark_ready_timeout"]
        assert [key for key, value in env.items() if value == ""] == []
        assert [key for key, value in env.items() if "eth0" in value] == []
        assert [key for key in env if key in ("NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "HF_TOKEN", "VLLM_API_KEY")] == []
    servers = [environment(found).get("RAY_ADDRESS") for found in ours]
    assert servers == [None, f"{spark.NODES[spark.HEAD]}:6379"][: len(ours)]


def test_the_image_has_something_to_leak(host: Host) -> None:
    """What the test above looks for is baked into the image of the lab."""
    with host.sudo():
        baked = json.loads(host.check_output("docker image inspect %s", spark.settings()["spark_image"]))[0]["Config"]["Env"]
    assert any("eth0" in entry for entry in baked)


def test_both_nodes_hold_the_same_image_and_model() -> None:
    tree = (
        "cd /home/spark/.cache/huggingface/hub/models--sparklab--tiny-qwen3 && find . -type f -path '*/blobs/*' -exec sha256sum {} + | sort"
    )
    assert spark.shell("spark-1", tree) == spark.shell("spark-2", tree)
    layers = ["docker", "image", "inspect", "-f", "{{json .RootFS.Layers}}", spark.settings()["spark_image"]]
    assert spark.on("spark-1", *layers) == spark.on("spark-2", *layers)


def test_the_cache_belongs_to_the_user(host: Host) -> None:
    found = host.check_output("find /home/spark/.cache ! -user spark")
    assert found == ""


def test_no_server_of_the_copies_is_left(host: Host) -> None:
    with host.sudo():
        units = host.check_output("systemctl list-units --all --plain --no-legend 'dgxspark*'").splitlines()
        assert [unit.split()[0] for unit in units] == ["dgxspark-serving.service"]  # for the next boot, and nothing of a copy
        assert host.run("find /run/dgxspark-serving -type f ! -name '*.lock'").stdout == ""  # after a boot there is no such directory


def test_ports_are_only_where_they_are_needed(host: Host) -> None:
    with host.sudo():
        listening = host.check_output("ss -Htln")
    assert (":30000 " in listening) is (name_of(host) == spark.HEAD)


def test_the_api_serves_exactly_the_model() -> None:
    models = [entry["id"] for entry in spark.call("/v1/models")["data"]]
    assert models == ["sparklab/tiny-qwen3"]


def test_the_api_answers() -> None:
    spark.answers()


def test_the_second_run_changes_nothing() -> None:
    before = spark.identities()
    run = spark.site()
    assert run.rc == 0
    assert run.changed == 0
    assert spark.identities() == before
    spark.answers()


def test_check_mode_changes_nothing() -> None:
    before = spark.everything()
    run = spark.site("--check", "--diff")
    assert run.rc == 0
    assert run.changed == 0
    assert spark.everything() == before
