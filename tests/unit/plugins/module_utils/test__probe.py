# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The recorded answers of real images, what they mean, and how the container is started."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _image, _probe, _probe_program

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "probe" / "recorded.json").read_text(encoding="utf-8"))
IMAGE = "example/vllm:1"


def bare(env: t.Mapping[str, str] | None = None, planned: t.Iterable[str] = ()) -> dict[str, t.Any]:
    record = {**_image.absent_record(IMAGE), "present": True, "fingerprint": "f" * 64, "env": dict(env or {})}
    return _probe.new_probe(record, planned)


def probed(name: str) -> dict[str, t.Any]:
    return _probe.answer(bare(), _probe.parse_output(RECORDED[name]["out"]))


def problem(name: str, executor: str = "ray", there: bool = False) -> t.Any:
    """What the module says about a recorded run."""
    case = RECORDED[name]
    broken = _probe.run_problem(bare(), case["rc"], case["err"], _probe.parse_output(case["out"]), 2, "spark-2")
    return broken or _probe.problem_of(probed(name), executor, "spark-2", lambda path: there)


# --- recorded -------------------------------------------------------------------------------------------------------------


def test_a_good_image() -> None:
    probe = probed("good")
    assert problem("good") is None
    assert probe["versions"] == {
        "vllm": "0.32.0",
        "ray": "2.60.0",
        "python": "3.11.2",
        "torch": "2.13.0+cpu",
        "nccl": None,
        "transformers": "5.19.0",
        "huggingface_hub": "2.4.0",
    }
    assert probe["platform"] == "UnspecifiedPlatform"  # vLLM without a GPU
    assert probe["imports"] == {"vllm": True, "ray": True}
    assert probe["arguments"] == {"accepted": True, "refused": [], "reason": ""}
    assert (probe["model"]["known"], probe["model"]["by"], probe["model"]["model_type"]) == (True, "vllm", "qwen3")
    assert (probe["files"]["checked"], probe["files"]["missing"]) == (9, [])
    assert probe["complete"]
    assert _probe.warnings(probe, "spark-2") == []


@pytest.mark.parametrize(
    ("name", "ident", "words"),
    [
        ("no_ray", "RAY-02", ("example/vllm:1", "vllm 0.32.0", "no Ray in it", "spark_image")),
        ("no_vllm", "vllm-missing", ("example/vllm:1", "no vLLM in it")),
        ("no_python", "vllm-missing", ("no python3 command",)),
        ("exec_format", "DOC-11", ("exec format error", "example/vllm:1")),
        ("unknown_type", "VLL-03", ("vllm 0.32.0", "transformers 5.19.0", "qwen9_moe", "does not recognize this architecture")),
        ("unknown_architecture", "VLL-03", ("QWenLMHeadModelX", "not supported")),
        ("missing_shard", "MOD-01", ("model-00002-of-00003.safetensors", "link whose target is not there")),
        ("timeout", "probe-stalled", ("after 2 s", "importing vLLM")),
    ],
)
def test_what_is_refused(name: str, ident: str, words: tuple[str, ...]) -> None:
    found = problem(name)
    assert (found.id, found.node, found.stage) == (ident, "spark-2", "probe")
    assert [word for word in words if word not in found.msg] == []


def test_no_ray_is_fine_without_the_ray_executor() -> None:
    assert problem("no_ray", executor="mp") is None


def test_a_link_that_only_dangles_inside() -> None:
    assert problem("missing_shard", there=True).id == "MOD-13"


def test_every_wrong_argument_is_named_with_its_neighbour() -> None:
    found = problem("wrong_flags")
    assert found.id == "vllm-arguments"
    refused = {item["flag"]: item for item in found.details["refused"]}
    assert sorted(refused) == ["--dtype", "--speculative-config", "--tensor-paralel-size", "--tool-call-parser"]
    assert refused["--tensor-paralel-size"]["close"] == "--tensor-parallel-size"
    assert refused["--tool-call-parser"]["close"] == "qwen3_coder"
    assert "0x" not in found.msg
    assert "close to it: --tensor-parallel-size" in found.msg


# --- judgement ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_told_is_no_failure() -> None:
    parts = _probe.parse_output(RECORDED["good"]["out"])
    error = "ImportError: libcuda.so.1: cannot open shared object file"
    parts["vllm"] = {"imported": None, "error": error, "version": None, "seconds": 1}
    del parts["arguments"], parts["model"]
    probe = _probe.answer(bare(), parts)
    assert _probe.problem_of(probe, "ray", "n", lambda path: False) is None
    assert probe["arguments"] == {"accepted": None, "refused": [], "reason": error}
    assert probe["model"] is None
    assert "without a GPU" in _probe.warnings(probe, "n")[0]


def test_a_parser_that_cannot_be_built_is_told_and_no_failure() -> None:
    parts = _probe.parse_output(RECORDED["good"]["out"])
    parts["arguments"] = {"accepted": None, "refused": [], "reason": "ImportError: make_arg_parser is in none of the known places"}
    probe = _probe.answer(bare(), parts)
    assert _probe.problem_of(probe, "ray", "n", lambda path: False) is None
    assert "make_arg_parser" in _probe.warnings(probe, "n")[0]


@pytest.mark.parametrize(
    ("change", "ident", "word"),
    [
        ({"end": {"timeout": False, "signal": 11, "code": None}}, "vllm-missing", "signal 11"),
        ({"end": {"timeout": False, "signal": 0, "code": 1}, "error": {"error": "OSError: x"}}, "probe-failed", "OSError: x"),
        ({"end": None}, "probe-failed", "the last line"),
    ],
)
def test_ends(change: dict[str, t.Any], ident: str, word: str) -> None:
    parts = {**_probe.parse_output(RECORDED["good"]["out"]), **change}
    parts = {name: part for name, part in parts.items() if part}
    found = _probe.run_problem(bare(), 1, "noise\nthe last line\n", parts, 300, "n")
    assert found is not None
    assert found.id == ident
    assert word in found.msg


def test_a_run_that_docker_had_to_be_ended_for_is_a_stall() -> None:
    found = _probe.run_problem(bare(), 124, "", {}, 300, "n")
    assert found is not None
    assert found.id == "probe-stalled"


def test_a_command_that_is_not_on_the_path() -> None:
    probe = {**probed("good"), "commands": {"vllm": "/usr/bin/vllm", "ray": None}}
    found = _probe.image_problem(probe, "ray", "n")
    assert found is not None
    assert (found.id, "no ray command" in found.msg) == ("RAY-02", True)
    found = _probe.image_problem({**probe, "commands": {"vllm": None, "ray": "/x"}}, "ray", "n")
    assert found is not None
    assert (found.id, "no vllm command" in found.msg) == ("vllm-missing", True)


def test_baked_environment() -> None:
    env = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_secret", "RAY_X": "1", "PATH": "/bin", "VLLM_API_KEY": "k"}
    probe = bare(env, ["NCCL_SOCKET_IFNAME"])
    assert probe["environment"] == {
        "HF_TOKEN": "(hidden)",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RAY_X": "1",
        "VLLM_API_KEY": "(hidden)",
    }
    assert sorted(probe["inherited"]) == ["HF_TOKEN", "NCCL_DEBUG", "RAY_X", "VLLM_API_KEY"]
    assert [text.split("; ")[0] for text in _probe.warnings(probe, "a")] == [f"a: the image {IMAGE} sets NCCL_DEBUG=INFO"]


def probe_with(**versions: str | None) -> dict[str, t.Any]:
    return {"versions": {"vllm": "1", "ray": "2.48.0", "python": "3.12.3", "nccl": None, **versions}}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (probe_with(), ()),
        (probe_with(nccl="2.28.9"), ()),  # not known on the first: nothing to compare
        ({}, ()),  # skipped
        (probe_with(python="3.12.11"), ("python 3.12.11", "python 3.12.3 on a")),
        (probe_with(ray="2.60.0", python="3.12.11"), ("ray 2.60.0, python 3.12.11", "ray 2.48.0, python 3.12.3 on a")),
    ],
)
def test_compare(other: dict[str, t.Any], words: tuple[str, ...]) -> None:
    found = _probe.compare({"a": probe_with(), "b": other})
    assert (found is not None) == bool(words)
    if found:
        assert (found.id, found.node) == ("RAY-04", "b")
        assert [word for word in words if word not in found.msg] == []


# --- how it is started ----------------------------------------------------------------------------------------------------


def test_docker_argv() -> None:
    mounted = _probe.volumes(["spark-tmp:/tmp", "/home/u/a,b/hub:/models/hub:ro", "/var/k:/var/cache/kernels"])
    argv = _probe.docker_argv(IMAGE, "spark-probe-1", mounted)
    text = " ".join(argv)
    assert "--rm" in argv
    assert "--network none" in text
    assert "--pull never" in text
    assert "NVIDIA_VISIBLE_DEVICES=void" in argv
    assert "--gpus" not in text
    assert 'type=bind,"source=/home/u/a,b/hub",target=/models/hub,readonly' in argv
    assert [argv[i + 1].split(":")[0] for i, word in enumerate(argv) if word == "--tmpfs"] == ["/tmp", "/var/cache/kernels"]
    assert "/var/k" not in text
    assert argv[-5:] == ["--entrypoint", "python3", IMAGE, "-c", _probe_program.BOOT]


def test_volumes_that_are_none() -> None:
    with pytest.raises(ValueError, match="is not source:target"):
        _probe.volumes(["/only"])


def test_on_host() -> None:
    mounted = _probe.volumes(["/home/u/hub:/models/hub:ro", "spark-tmp:/tmp"])
    assert _probe.on_host("/models/hub/m/s", mounted) == "/home/u/hub/m/s"
    assert _probe.on_host("/models/hubs/m", mounted) is None
    assert _probe.on_host("/tmp/x", mounted) is None


def test_the_key_follows_the_files_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("abc")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to("../blob")
    first = _probe.model_identity(str(snapshot))
    assert _probe.model_identity(str(snapshot)) == first
    (tmp_path / "blob").write_text("abcd")
    second = _probe.model_identity(str(snapshot))
    (tmp_path / "blob").unlink()
    third = _probe.model_identity(str(snapshot))
    keys = {_probe.key({"files": files}, "source") for files in (first, second, third)}
    assert len(keys) == 3
    assert _probe.key({"files": first}, "other source") not in keys
