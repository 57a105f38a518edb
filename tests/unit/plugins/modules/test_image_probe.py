# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole module with a stand-in for docker that plays recorded answers."""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils import _image, _probe, _probe_program
from ansible_collections.dgxspark.serving.plugins.modules import image_probe

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "probe" / "recorded.json").read_text(encoding="utf-8"))
ARCH = _image.docker_architecture(platform.machine())
MODEL = "/models/hub/models--o--m/snapshots/" + "a" * 40

# `run` plays answer.json and keeps what came on stdin; `ps` shows what leftovers.txt names.
DOCKER = """#!{python} -IS
import json, os, sys, time
root, argv = "{root}", sys.argv[1:]
with open(root + "/docker.log", "a") as log: log.write(" ".join(argv).replace("\\n", ";") + "\\n")
def fail(text): sys.stderr.write(text + "\\n"); sys.exit(1)
if os.path.exists(root + "/down"): fail("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
if argv[:2] == ["image", "inspect"]:
    if not os.path.exists(root + "/image.json"): print("[]"); fail("Error: No such image")
    print(open(root + "/image.json").read())
if argv[0] == "ps": print(open(root + "/leftovers.txt").read())
if argv[0] == "run":
    with open(root + "/stdin.txt", "w") as file: file.write(sys.stdin.read())
    answer = json.load(open(root + "/answer.json"))
    sys.stdout.write(answer["out"]); sys.stderr.write(answer["err"]); sys.exit(answer["rc"])
"""


class Bench:
    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.capsys = root, capsys
        # Where a warning goes depends on whether the controller's code was imported in this process: caught at its source.
        self.warnings: list[str] = []
        monkeypatch.setattr(image_probe.AnsibleModule, "warn", lambda _module, warning, **_options: self.warnings.append(str(warning)))
        (root / "bin").mkdir()
        (root / "bin" / "docker").write_text(DOCKER.format(python=sys.executable, root=root))
        (root / "bin" / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(image_probe, "RUN_DIR", str(root / "run"))
        monkeypatch.setattr(image_probe, "STATE_DIR", str(root / "state"))
        (root / "leftovers.txt").write_text("")
        self.snapshot = root / "hub" / MODEL.removeprefix("/models/hub/")
        self.snapshot.mkdir(parents=True)
        (self.snapshot / "config.json").write_text("{}")
        self.image()
        self.answers("good")

    def image(self, arch: str = ARCH, env: t.Sequence[str] = ("NCCL_DEBUG=INFO", "NCCL_SOCKET_IFNAME=eth0"), layer: str = "1") -> None:
        config = {"Env": list(env), "Cmd": ["x"], "Entrypoint": ["/app/entrypoint.sh"]}
        image = {"Id": "sha256:1", "Architecture": arch, "Os": "linux", "RootFS": {"Layers": ["sha256:" + layer * 64]}, "Config": config}
        (self.root / "image.json").write_text(json.dumps([image]))

    def answers(self, name: str, **over: t.Any) -> None:
        (self.root / "answer.json").write_text(json.dumps({**RECORDED[name], **over}))

    def log(self, first: str = "run") -> list[str]:
        path = self.root / "docker.log"
        return [line for line in path.read_text().splitlines() if line.startswith(first)] if path.exists() else []

    def stamps(self) -> list[Path]:
        return sorted((self.root / "state").rglob("*.json"))

    def run(self, check: bool = False, **over: t.Any) -> dict[str, t.Any]:
        args: dict[str, t.Any] = {
            "node": "spark-2",
            "image": "org/a:1",
            "command": ["serve", MODEL, "--port", "30000"],
            "model": MODEL,
            "volumes": ["spark-tmp:/tmp", f"{self.root / 'hub'}:/models/hub:ro", "/var/lib/x:/var/cache/kernels"],
            "env": {"NCCL_SOCKET_IFNAME": "=eth1", "VLLM_HOST_IP": "192.168.200.12"},
            "timeout": 60,
            "_ansible_check_mode": check,
        }
        given = {key: value for key, value in {**args, **over}.items() if value is not None}
        self.warnings.clear()
        with patch_module_args(given), pytest.raises(SystemExit):
            image_probe.main()
        return json.loads(self.capsys.readouterr().out)


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, capsys, monkeypatch)


def test_a_good_image_is_asked_once(bench: Bench) -> None:
    result = bench.run()
    assert (result["changed"], result["cached"], result.get("failed")) == (False, False, None)
    assert result["probe"]["versions"]["vllm"] == "0.32.0"
    assert result["probe"]["entrypoint"] == ["/app/entrypoint.sh"]
    assert result["probe"]["inherited"] == {"NCCL_DEBUG": "INFO"}
    assert any("NCCL_DEBUG=INFO" in warning for warning in bench.warnings)
    first = list(bench.warnings)
    again = bench.run()
    assert (again["changed"], again["cached"]) == (False, True)
    assert again["probe"] == result["probe"]
    assert bench.warnings == first
    assert len(bench.log()) == 1
    assert [stat.S_IMODE(path.stat().st_mode) for path in (bench.stamps()[0].parent, *bench.stamps())] == [0o700, 0o600]


def test_nothing_is_in_the_arguments_of_docker_but_mounts(bench: Bench) -> None:
    bench.run(env={"HF_TOKEN": "hf_secret"})
    line = bench.log()[0]
    assert f"type=bind,source={bench.root / 'hub'},target=/models/hub,readonly" in line
    assert "hf_secret" not in line
    assert "30000" not in line
    program = (bench.root / "stdin.txt").read_text()
    assert "hf_secret" in program
    assert "--port" in program
    assert '\\"serve\\"' not in program.rsplit("run(", 1)[1]


@pytest.mark.parametrize(
    "change",
    [
        {"command": ["serve", MODEL]},
        {"env": {}},
        {"force": True},
        {"executor": "mp"},
        {"scope": "versions"},
        {"layer": "2"},
        {"file": True},
    ],
)
def test_what_makes_a_kept_answer_worthless(bench: Bench, change: dict[str, t.Any]) -> None:
    bench.run()
    if "layer" in change:
        bench.image(layer=change.pop("layer"))
    if change.pop("file", False):
        (bench.snapshot / "config.json").write_text("{ }")
    assert bench.run(**change)["cached"] is False
    assert len(bench.log()) == 2


@pytest.mark.parametrize(("commands", "executor", "ident"), [
    ({"vllm": "/usr/bin/vllm", "ray": "/usr/bin/ray"}, "ray", ""),
    ({"vllm": "/usr/bin/vllm", "ray": None}, "ray", "RAY-02"),
    ({"vllm": "/usr/bin/vllm", "ray": None}, "mp", ""),
    ({"vllm": None, "ray": None}, "mp", "vllm-missing"),
])  # fmt: skip
def test_versions_of_a_worker(bench: Bench, commands: dict[str, t.Any], executor: str, ident: str) -> None:
    """A second instead of a start of vLLM: what the gang is compared by. Nothing is said about what was not asked."""
    versions = {"vllm": "0.32.0", "ray": "2.60.0", "python": "3.11.2", "nccl": "2.28.9"}
    parts = [
        {"part": "image", "seconds": 0.1, "versions": versions, "commands": commands},
        {"part": "end", "code": 0, "timeout": False, "signal": 0},
    ]
    bench.answers("good", out="".join(f"{_probe_program.MARK}{json.dumps(part)}\n" for part in parts))
    result = bench.run(scope="versions", command=[], model="", executor=executor, env={"NCCL_SOCKET_IFNAME": "=e", "NCCL_DEBUG": "x"})
    assert result.get("problem", {}).get("id", "") == ident
    assert result["probe"]["versions"]["nccl"] == "2.28.9"
    assert bench.warnings == []
    assert '\\"scope\\": \\"versions\\"' in (bench.root / "stdin.txt").read_text()


def test_a_bad_answer_is_not_kept(bench: Bench) -> None:
    bench.answers("unknown_type")
    first = bench.run()
    assert (first["failed"], first["problem"]["id"], first["problem"]["node"]) == (True, "VLL-03", "spark-2")
    assert first["probe"]["model"]["model_type"] == "qwen9_moe"
    assert bench.stamps() == []
    bench.answers("good")
    assert "failed" not in bench.run()


def test_old_answers_go(bench: Bench) -> None:
    for number in range(_probe.KEPT_STAMPS + 2):
        bench.run(command=["serve", MODEL, "--port", str(number)])
    assert len(bench.stamps()) == _probe.KEPT_STAMPS


def test_a_broken_stamp_is_asked_again(bench: Bench) -> None:
    bench.run()
    bench.stamps()[0].write_text("{")
    assert bench.run()["cached"] is False


@pytest.mark.parametrize(
    ("name", "ident"),
    [
        ("no_ray", "RAY-02"),
        ("no_vllm", "vllm-missing"),
        ("exec_format", "DOC-11"),
        ("missing_shard", "MOD-01"),
        ("wrong_flags", "vllm-arguments"),
        ("timeout", "probe-stalled"),
    ],
)
def test_refused(bench: Bench, name: str, ident: str) -> None:
    bench.answers(name)
    result = bench.run()
    assert result["problem"]["id"] == ident
    assert result["msg"].startswith("spark-2: probe: found ")
    assert result["changed"] is False


def test_the_container_of_a_broken_run_is_removed(bench: Bench) -> None:
    bench.answers("timeout", rc=124, out="")
    assert bench.run()["problem"]["id"] == "probe-stalled"
    name = bench.log()[0].split("--name ")[1].split()[0]
    assert bench.log("rm") == [f"rm --force {name}"]


def test_leftovers_of_killed_runs_are_removed_first(bench: Bench) -> None:
    (bench.root / "leftovers.txt").write_text("abc\ndef\n")
    bench.run()
    assert bench.log("rm") == ["rm --force abc def"]
    assert bench.log("ps") == ["ps --all --quiet --no-trunc --filter label=dgxspark.serving.probe"]


def test_check_mode_asks_and_keeps_nothing(bench: Bench) -> None:
    result = bench.run(check=True)
    assert result["probe"]["complete"] is True
    assert bench.stamps() == []
    bench.answers("no_ray")
    assert bench.run(check=True)["problem"]["id"] == "RAY-02"


def test_check_mode_before_the_first_run(bench: Bench) -> None:
    (bench.root / "image.json").unlink()
    result = bench.run(check=True)
    assert (result["skipped"], result["probe"]) == (True, {})
    assert "org/a:1" in result["skip_reason"]
    assert bench.run()["problem"]["id"] == "image-missing"


def test_check_mode_without_the_model(bench: Bench) -> None:
    volumes = [f"{bench.root / 'none'}:/models/hub:ro"]
    assert "failed" not in bench.run(check=True, volumes=volumes)
    assert str(bench.root / "none") not in bench.log()[0]
    assert '\\"model\\": \\"\\"' in (bench.root / "stdin.txt").read_text()
    assert bench.run(volumes=volumes)["problem"]["id"] == "MOD-01"
    assert not (bench.root / "none").exists()


def test_a_link_that_only_dangles_inside(bench: Bench) -> None:
    text = RECORDED["missing_shard"]["out"].replace("/models/hub/models--sparklab--tiny-qwen3/snapshots/" + "a" * 40, MODEL)
    (bench.snapshot / "model-00002-of-00003.safetensors").write_text("there")
    bench.answers("missing_shard", out=text)
    assert bench.run()["problem"]["id"] == "MOD-13"


def test_other_platform_and_no_docker(bench: Bench) -> None:
    bench.image(arch="s390x")
    assert bench.run()["problem"]["id"] == "DOC-11"
    assert bench.log() == []
    (bench.root / "down").touch()
    assert bench.run()["problem"]["id"] == "docker-down"


def test_inputs(bench: Bench) -> None:
    assert bench.run(image="a b")["problem"]["id"] == "image-unknown"
    assert bench.run(volumes=["x"])["problem"]["id"] == "input"
    assert bench.run(image=None)["failed"] is True


def test_compare(bench: Bench) -> None:
    same = bench.run()["probe"]
    other = {**same, "versions": {**same["versions"], "ray": "2.48.0"}}
    assert "failed" not in bench.run(image=None, probes={"spark-1": same, "spark-2": same, "spark-3": {}})
    result = bench.run(image=None, probes={"spark-1": same, "spark-2": other})
    assert (result["problem"]["id"], result["problem"]["node"]) == ("RAY-04", "spark-2")
    assert "ray 2.48.0, but ray 2.60.0 on spark-1" in result["msg"]
    assert len(bench.log()) == 1
