# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.modules import failure_diagnosis as module


def container(name, ident="a", running=True, code=0, finished="2026-11-30T09:05:00.5Z"):
    """As ``docker inspect`` prints it."""
    state = {
        "Status": "running" if running else "exited",
        "Running": running,
        "ExitCode": code,
        "StartedAt": "2026-11-30T09:00:00Z",
        "FinishedAt": "0001-01-01T00:00:00Z" if running else finished,
    }
    return {"Id": ident * 64, "Name": f"/{name}", "State": state, "Config": {}, "HostConfig": {}, "RestartCount": 0}


FLAG = "vllm: error: unrecognized arguments: --no-such-flag"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(containers, logs, check=..., **arguments): the result of the whole module; ``containers`` None: Docker does not answer."""

    def run(containers, logs=None, check=False, **arguments):
        def docker(self, argv, **dummy):
            if "dmesg" in argv:
                return 0, "[Mon] Out of memory: Killed process 7 (ray::Worker)\n[Mon] usb 1-1: new device\n", ""
            command = argv[argv.index("docker") + 1 :]
            if containers is None:
                return 1, "", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
            if command[0] == "container":
                found = [item for item in containers if item["Name"].lstrip("/") in command[2:]]
                return (0 if len(found) == len(command) - 2 else 1), json.dumps(found), "No such container: x"
            lines = (logs or {}).get(command[-1], [])
            stamp = "2026-11-30T09:01:00.000000000Z " if "--timestamps" in command else ""
            return 0, "".join(f"{stamp}{line}\n" for line in lines), ""

        monkeypatch.setattr(module.AnsibleModule, "run_command", docker)
        given = {"node": "spark-1", "directory": str(tmp_path / "failed"), **arguments, "_ansible_check_mode": check}
        with patch_module_args(given), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return run


KNOWN = {"spark-vllm": "a" * 64, "spark-ray": "a" * 64}


@pytest.mark.parametrize(
    ("containers", "known", "expected"),
    [
        ([], {}, False),
        ([container("spark-vllm"), container("spark-ray")], KNOWN, False),
        ([container("spark-vllm", "b"), container("spark-ray")], KNOWN, True),
        ([container("spark-ray")], KNOWN, True),
        ([container("spark-ray")], {}, True),
        ([container("other")], {}, False),
    ],
)
def test_touched(run, containers, known, expected):
    assert run(containers, known=known)["touched"] is expected


def test_nothing_ended(run):
    result = run([container("spark-vllm"), container("spark-ray")])
    assert result["ended"] == {} and [item["name"] for item in result["containers"]] == ["spark-vllm", "spark-ray"]


def test_the_cause_stands_in_the_log_of_what_ended(run):
    result = run([container("spark-vllm", running=False, code=2), container("spark-ray")], {"spark-vllm": ["start", FLAG]})
    assert (result["ended"]["node"], result["ended"]["container"]) == ("spark-1", "spark-vllm")
    assert result["ended"]["time"].startswith("2026-11-30T09:05:00.5")
    assert result["ended"]["text"].startswith("spark-1: found container spark-vllm ")
    assert (
        "this vLLM does not accept its command line" in result["ended"]["text"]
        and "Remedy: correct spark_vllm_args" in result["ended"]["text"]
    )


def test_what_ended_first_is_the_cause(run):
    both = [
        container("spark-vllm", running=False, code=1, finished="2026-11-30T09:05:02Z"),
        container("spark-ray", running=False, code=137, finished="2026-11-30T09:05:01Z"),
    ]
    result = run(both, {"spark-vllm": [FLAG], "spark-ray": ["ray runtime started"]})
    assert result["ended"]["container"] == "spark-ray" and "ray runtime started" in result["ended"]["text"]


def test_killed_from_outside_is_not_blamed_on_an_unknown_exception(run):
    killed = [container("spark-vllm", running=False, code=137)]
    text = run(killed, {"spark-vllm": ["RuntimeError: survived"]})["ended"]["text"]
    assert "its last lines: RuntimeError: survived" in text and "dmesg of spark-1" in text


def test_logs_are_kept_for_root_alone(run, tmp_path):
    result = run([container("spark-vllm", running=False, code=2)], {"spark-vllm": ["a", FLAG]})
    path = tmp_path / "failed" / "spark-vllm.log"
    assert result["changed"] and result["kept"] == [str(path)]
    assert FLAG in path.read_text() and path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_what_nccl_wrote_is_kept_too(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PROC", str(tmp_path / "proc"))
    for pid, name in ((7, "nccl.spark-1.95.log"), (7, "other.log"), (8, "nccl.spark-1.1.log")):
        folder = tmp_path / "proc" / str(pid) / "root" / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("NCCL WARN something\n")
    ray, ended = container("spark-ray"), container("spark-vllm", running=False, code=1)
    ray["State"]["Pid"], ended["State"]["Pid"] = 7, 8
    result = run([ray, ended])
    kept = tmp_path / "failed" / "nccl.spark-1.95.log"
    assert str(kept) in result["kept"] and len(result["kept"]) == 3 and result["error"] == ""
    assert kept.read_text() == "NCCL WARN something\n" and kept.stat().st_mode & 0o777 == 0o600


def test_check_mode_keeps_nothing(run, tmp_path):
    result = run([container("spark-vllm")], check=True)
    assert result["changed"] and result["kept"] and not (tmp_path / "failed").exists()


def test_it_never_fails_itself(run, tmp_path):
    result = run(None)
    assert not result.get("failed") and "Cannot connect to the Docker daemon" in result["error"] and not result["touched"]
    (tmp_path / "failed").write_text("a file where a directory should be")
    result = run([container("spark-vllm")])
    assert not result.get("failed") and result["error"]


def test_evidence_of_a_node(run, tmp_path):
    """Also of containers that ended: what ranks and Ray workers wrote lies in the volume."""
    volume = tmp_path / "volume"
    logs = volume / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    (volume / "ray" / "session_latest").symlink_to("session_1")
    (logs / "worker-1.out").write_text("rank 1: hf_AbCdEfGhIjKlMn\n")
    (logs / "raylet.err").write_text("a raylet\n")
    (volume / "nccl.spark-1.9.log").write_text("NCCL INFO NET/IB\n")
    ray = container("spark-ray", running=False, code=137)
    ray["Mounts"] = [{"Source": str(volume), "Destination": "/tmp"}, {"Source": str(tmp_path), "Destination": "/models"}]
    ray["Config"] = {"Env": ["MY_SECRET=a-long-value"]}
    result = run([ray], {"spark-ray": ["it has a-long-value"]}, evidence=True)
    found = result["evidence"]
    assert sorted(found) == ["inspect.json", "kernel.txt", "nccl.spark-1.9.log", "ray/raylet.err", "ray/worker-1.out", "spark-ray.log"]
    assert found["ray/worker-1.out"] == "rank 1: (removed)\n"
    assert "a-long-value" not in json.dumps(found) and "it has (removed)" in found["spark-ray.log"]
    assert json.loads(found["inspect.json"])[0]["Name"] == "/spark-ray"
    assert found["kernel.txt"] == "[Mon] Out of memory: Killed process 7 (ray::Worker)\n"


def test_a_full_disk_does_not_cost_the_evidence(run, tmp_path, monkeypatch):
    """What was not written is not said to be kept; the rest is written all the same."""
    write = module.write_private

    def full(path, text):
        if path.endswith("spark-vllm.log"):
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(module, "write_private", full)
    both = [container("spark-vllm", running=False, code=2), container("spark-ray")]
    result = run(both, {"spark-vllm": [FLAG], "spark-ray": ["a raylet"]}, evidence=True)
    assert sorted(result["evidence"]) == ["inspect.json", "kernel.txt", "spark-ray.log", "spark-vllm.log"] and FLAG in str(
        result["evidence"]
    )
    assert result["kept"] == [str(tmp_path / "failed" / "spark-ray.log")] and result["changed"]
    assert "No space left on device" in result["error"] and result["ended"]["container"] == "spark-vllm"
    monkeypatch.setattr(module, "write_private", lambda path, text: full("spark-vllm.log", text))
    result = run(both, evidence=True)
    assert result["kept"] == [] and not result["changed"] and result["error"].count("No space left") == 1 and result["evidence"]


def test_evidence_that_fails_does_not_cost_the_logs(run, tmp_path, monkeypatch):
    def broken(*dummy):
        raise OSError("gone")

    monkeypatch.setattr(module, "evidence", broken)
    result = run([container("spark-ray")], evidence=True)
    assert result["kept"] == [str(tmp_path / "failed" / "spark-ray.log")] and result["error"] == "gone" and "evidence" not in result


def test_a_file_that_vanishes_while_it_is_looked_at(run, tmp_path, monkeypatch):
    """Ray removes and renames its logs as it ends."""
    monkeypatch.setattr(module, "PROC", str(tmp_path / "proc"))
    logs = tmp_path / "volume" / "ray" / "session_1" / "logs"
    tmp = tmp_path / "proc" / "7" / "root" / "tmp"
    for folder in (logs, tmp):
        folder.mkdir(parents=True)
    (logs / "raylet.err").write_text("a raylet\n")
    (tmp / "nccl.spark-1.9.log").write_text("NCCL INFO NET/IB\n")
    found = module.glob.glob
    monkeypatch.setattr(module.glob, "glob", lambda pattern: [*found(pattern), pattern.replace("*", "gone")])
    monkeypatch.setattr(module.os.path, "isfile", lambda path: True)
    ray = container("spark-ray")
    ray["State"]["Pid"], ray["Mounts"] = 7, [{"Source": str(tmp_path / "volume"), "Destination": "/tmp"}]
    result = run([ray], evidence=True)
    assert result["error"] == "" and result["evidence"]["ray/raylet.err"] == "a raylet\n"
    assert result["evidence"]["nccl.spark-1.9.log"] == "NCCL INFO NET/IB\n"


def test_no_evidence_unless_asked(run):
    assert "evidence" not in run([container("spark-ray")])
    assert "evidence" not in run(None, evidence=True)  # Docker does not answer


def test_the_ends_of_a_long_file(tmp_path):
    path = tmp_path / "log"
    path.write_text("begin\n" + "x" * 3_000_000 + "\nend\n")
    text = module.ends_of(str(path))
    assert text.startswith("begin") and text.endswith("end\n") and "bytes left out" in text and len(text) < 1_200_000
    assert "cannot be read" in module.ends_of(str(tmp_path / "none"))
