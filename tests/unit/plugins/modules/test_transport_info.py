# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole module over a made-up /proc: two containers' processes, one of them a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import transport_info as module

NCCL = (Path(__file__).parents[2] / "fixtures" / "nccl" / "spark_two_rails.log").read_text(encoding="utf-8")
WORKER = "INFO [parallel_state.py:1906] world_size=2 rank=1 local_rank=0 distributed_init_method=tcp://192.168.210.12:46409 backend="
TCP = "header\n   0: 0DD2A8C0:C974 0CD2A8C0:AADB 01 0:0 00:0 0 0 0 7001 1 0 20 4 30 10 -1\n"
FABRIC = {
    "interface": "enp1s0f1np1",
    "hcas": ["rocep1s0f1:1", "roceP2p1s0f1:1"],
    "rails": [
        {"interface": "enp1s0f1np1", "hca": "rocep1s0f1", "hca_port": 1, "active": True},
        {"interface": "enP2p1s0f1np1", "hca": "roceP2p1s0f1", "hca_port": 1, "active": True},
        {"interface": "enp9", "hca": "mlx", "hca_port": 1, "active": False},
    ],
}


class Proc:
    """A tree like /proc. A process: its number, its number in the container, the container's namespace, its title, its files, its sockets."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, pid: int, inside: int, space: str, title: str, files: dict[str, str] | None = None, sockets: tuple[int, ...] = ()
    ) -> None:
        home = self.root / str(pid)
        for folder in ("ns", "fd", "net", "root/tmp/ray/session_2026/logs"):
            (home / folder).mkdir(parents=True)
        (home / "ns" / "pid").symlink_to(f"pid:[{space}]")
        (home / "cmdline").write_text(title.replace(" ", "\0") + "\0")
        (home / "status").write_text(f"Name:\tx\nNSpid:\t{pid}\t{inside}\n")
        (home / "net" / "tcp").write_text(TCP)
        for number, inode in enumerate(sockets):
            (home / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
        for name, text in (files or {}).items():
            (home / "root" / "tmp" / name).write_text(text)


@pytest.fixture
def proc(tmp_path):
    tree = Proc(tmp_path)
    tree.add(100, 1, "41", "ray start")
    tree.add(900, 1, "1", "ray::RayWorkerProc", {"nccl.spark-2.1.log": NCCL})  # of another container: not looked at
    return tree


@pytest.fixture
def run_module(monkeypatch, capsys, proc):
    def run(running=True, docker=(0, ""), **params):
        def run_command(self, argv, **kwargs):
            argv = argv[argv.index("docker" if "docker" in argv else "ip") :]
            if argv[0] == "ip":
                return 0, json.dumps([{"ifname": "enp1s0f1np1", "addr_info": [{"local": "192.168.210.13"}]}]), ""
            found = [
                {
                    "Name": "/spark-ray",
                    "Id": "r",
                    "State": {"Pid": 100, "Running": running, "Status": "running" if running else "exited", "ExitCode": 137},
                }
            ]
            return (docker[0], "[]", docker[1]) if docker[0] else (1, json.dumps(found), "Error: No such container: spark-vllm")

        monkeypatch.setattr(AnsibleModule, "run_command", run_command)
        monkeypatch.setattr(module.Node.__init__, "__defaults__", (str(proc.root),))
        with patch_module_args({"node": "spark-2", "fabric": FABRIC, **params}), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return run


def test_a_rank_with_nccl(run_module, proc):
    proc.add(200, 95, "41", "ray::RayWorkerWrapper.execute_method", {"nccl.spark-2.95.log": NCCL, "nccl.spark-2.7.log": "an ended one"})
    other = {"node": "spark-1", "rank": 1, "transport": "ib", "version": "2.28.9+cuda13.0"}
    result = run_module(require_rdma=True, others=[other], _ansible_check_mode=True)
    assert result["changed"] is False and result["transport"] == "ib" and result["notes"] == []
    assert [(rank["node"], rank["rank"]) for rank in result["ranks"]] == [("spark-2", 0), ("spark-1", 1)]
    assert result["ranks"][0]["devices"] == {"rocep1s0f1:1": 2, "roceP2p1s0f1:1": 2}
    assert result["ranks"][0]["text"] == "rank 0: nccl over ib, rocep1s0f1:1 and roceP2p1s0f1:1 (2 of 2 rails)"


def test_a_process_of_another_name_is_a_rank_when_nccl_says_so(run_module, proc):
    proc.add(200, 95, "41", "python3 worker.py", {"nccl.spark-2.95.log": NCCL})
    proc.add(201, 96, "41", "python3 other.py", {"nccl.spark-2.96.log": "NCCL version 2.28.9+cuda13.0\n"})
    assert [rank["pid"] for rank in run_module()["ranks"]] == [95]


def test_a_rank_with_gloo(run_module, proc):
    proc.add(200, 95, "41", "ray::RayWorkerProc.run", {"ray/session_2026/logs/worker-ab-01000000-95.out": WORKER + "gloo\n"}, (7001, 7002))
    result = run_module(ray_ports=[6379])
    (rank,) = result["ranks"]
    assert (rank["backend"], rank["transport"], rank["devices"], rank["rank"]) == ("gloo", "tcp", {"enp1s0f1np1": 1}, 1)
    assert "192.168.210.12" in rank["evidence"] and result["transport"] == "tcp"
    assert run_module(ray_ports=[43739])["transport"] == "unknown"


def test_tcp_is_refused_where_rdma_is_required(run_module, proc):
    proc.add(200, 95, "41", "ray::RayWorkerProc.run", {"ray/session_2026/logs/worker-ab-01000000-95.out": WORKER + "gloo\n"}, (7001,))
    result = run_module(require_rdma=True)
    assert result["failed"] and result["problem"]["id"] == "rdma-unused"
    assert result["msg"].startswith(
        "spark-2: transport: found rank 1: gloo over tcp, enp1s0f1np1; expected every rank over RDMA (rocep1s0f1:1, "
    )
    assert result["ranks"][0]["transport"] == "tcp"


@pytest.mark.parametrize(
    ("params", "failed"), [({}, False), ({"require_rdma": True}, True), ({"require_rdma": True, "prove": False}, False)]
)
def test_no_rank_at_all(run_module, params, failed):
    result = run_module(**params)
    assert bool(result.get("failed")) is failed and result["ranks"] == []
    text = result["msg"] if failed else result["notes"][0]
    assert "0 of 1 rank processes" in text


def test_a_container_that_ended_after_the_first_answers(run_module):
    """The wait is over by then, and the version before would be forgotten."""
    result = run_module(running=False)
    assert result["problem"]["id"] == "rank-ended" and result["ranks"] == []
    assert result["msg"].startswith("spark-2: transport: found container spark-ray exited with code 137")


def test_docker_does_not_answer(run_module):
    result = run_module(docker=(1, "Cannot connect to the Docker daemon"))
    assert result["problem"]["id"] == "DOC-02" and "Cannot connect" in result["msg"]
