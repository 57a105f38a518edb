# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program itself, in this Python, against stand-ins of vLLM and its friends."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _probe, _probe_program

CLI_ARGS = """
def make_arg_parser(parser):
    from vllm.platforms import current_platform
    if not current_platform.device_type:
        raise RuntimeError("Failed to infer device type")
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    parser.add_argument("--tool-call-parser")
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser

def validate_parsed_serve_args(args):
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise TypeError("Error: --enable-auto-tool-choice requires --tool-call-parser")
"""
FILES = {
    "vllm/__init__.py": "print('a line of vLLM on stdout', flush=True)\n__version__ = '0.17.1'\n",
    "vllm/platforms.py": "class UnspecifiedPlatform:\n    device_type = ''\ncurrent_platform = UnspecifiedPlatform()\n",
    "vllm/plugins.py": "def load_general_plugins(): pass\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "import argparse\nclass FlexibleArgumentParser(argparse.ArgumentParser): pass\n",
    "vllm/tool_parsers.py": "class ToolParserManager:\n    list_registered = staticmethod(lambda: ['hermes', 'qwen3_coder'])\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/serve.py": "raise RuntimeError('only to be read')\n",
    "vllm/transformers_utils/__init__.py": "",
    "vllm/transformers_utils/config.py": """
class Config: architectures, model_type = ["KnownForCausalLM"], "known"
def get_config(model, trust_remote_code, revision=None):
    import json, os
    raw = json.load(open(os.path.join(model, "config.json")))
    if raw["model_type"] == "cuda": raise RuntimeError("No CUDA GPUs are available")
    config = Config()
    config.architectures = raw["architectures"]
    return config
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/models/__init__.py": "",
    "vllm/model_executor/models/registry.py": """
class ModelRegistry:
    get_supported_archs = staticmethod(lambda: {"KnownForCausalLM"})
    @staticmethod
    def _raise_for_unsupported(names): raise ValueError(f"{names} was supported until v0.9. Supported architectures: a, b")
""",
    "transformers/__init__.py": "class OnlyInTransformers: pass\n",
    "ray/__init__.py": "__version__ = '2.48.0'\n",
}


def fake_image(root: Path, changes: t.Mapping[str, str | None] | None = None) -> Path:
    """Stand-ins of the packages of an image; ``changes`` by path, None takes the file away."""
    files: dict[str, str | None] = {**FILES, "vllm/entrypoints/openai/__init__.py": "", "vllm/entrypoints/openai/cli_args.py": CLI_ARGS}
    files.update(changes or {})
    for name, text in files.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return root


def model(root: Path, architecture: str = "KnownForCausalLM", model_type: str = "known", **more: t.Any) -> Path:
    root.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    for number in (1, 2):
        (root / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (root / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture], **more}))
    (root / "tokenizer.json").write_text("{}")
    return root


def run(site: Path, **request: t.Any) -> dict[str, dict[str, t.Any]]:
    """The program in a Python of its own, as the container has it."""
    request.setdefault("timeout", 60)
    env = {"PYTHONPATH": str(site), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", _probe_program.BOOT], input=_probe.program(request), capture_output=True, text=True, env=env, check=False
    )
    assert all(line.startswith(_probe_program.MARK) for line in done.stdout.splitlines())
    return _probe.parse_output(done.stdout)


INIT = "vllm/__init__.py"
CLI = "vllm/entrypoints/openai/cli_args.py"
NEW_PLACE = {CLI: None, "vllm/entrypoints/launchers/cli_args.py": CLI_ARGS}
ODD_PLACE = {
    CLI: None,
    "vllm/odd.py": CLI_ARGS,
    "vllm/entrypoints/cli/serve.py": "def f():\n    from vllm.odd import make_arg_parser, validate_parsed_serve_args\nraise RuntimeError()\n",
}
OLD_PLACE = {"vllm/utils/argparse_utils.py": None, "vllm/utils/__init__.py": FILES["vllm/utils/argparse_utils.py"]}


@pytest.mark.parametrize("changes", [{}, NEW_PLACE, ODD_PLACE, OLD_PLACE], ids=["openai", "launchers", "read from serve.py", "utils"])
def test_the_parser_is_found_wherever_this_vllm_has_it(tmp_path: Path, changes: dict[str, str | None]) -> None:
    site = fake_image(tmp_path / "site", changes)
    parts = run(site, arguments=["/m", "--max-model-len", "1k", "--enable-auto-tool-choice", "--max-modl-len=3"])
    assert parts["vllm"]["platform"] == "UnspecifiedPlatform"
    refused = {item["flag"]: item["close"] for item in parts["arguments"]["refused"]}
    assert refused == {"--max-model-len": "", "--max-modl-len": "--max-model-len"}
    parts = run(site, arguments=["/m", "--enable-auto-tool-choice"])
    assert [item["flag"] for item in parts["arguments"]["refused"]] == ["--enable-auto-tool-choice"]
    parts = run(site, arguments=["/m", "--tool-call-parser", "qwen3_code"])
    assert [(item["flag"], item["close"]) for item in parts["arguments"]["refused"]] == [("--tool-call-parser", "qwen3_coder")]
    assert run(site, arguments=["/m", "--max-model-len", "8"])["arguments"]["accepted"] is True


def test_no_parser_to_find_is_unknown(tmp_path: Path) -> None:
    parts = run(fake_image(tmp_path, {CLI: None}), arguments=["/m"])
    assert parts["arguments"]["accepted"] is None
    assert parts["end"]["code"] == 0


def test_versions_alone_import_nothing(tmp_path: Path) -> None:
    """The files of the model are still looked at."""
    where = model(tmp_path / "m")
    site = fake_image(tmp_path / "site", {INIT: "raise SystemExit('imported')"})
    parts = run(site, scope="versions", model=str(where), arguments=["--wrong"])
    assert list(parts) == ["image", "files", "end"]
    assert parts["files"]["missing"] == [] and parts["image"]["versions"]["python"]
    assert parts["end"]["code"] == 0


@pytest.mark.parametrize(
    ("architecture", "extra", "arguments", "known", "by"),
    [
        ("KnownForCausalLM", {}, [], True, "vllm"),
        ("OnlyInTransformers", {}, [], True, "transformers"),
        ("Own", {"auto_map": {"AutoModel": "x"}}, ["--trust-remote-code"], True, "code of the model"),
        ("Own", {"auto_map": {"AutoModel": "x"}}, [], False, ""),
        ("Gone", {}, [], False, ""),
        ("KnownForCausalLM", {"model_type": "cuda"}, [], None, ""),
    ],
)
def test_model_types(tmp_path: Path, architecture: str, extra: dict[str, t.Any], arguments: list[str], known: bool | None, by: str) -> None:
    where = model(tmp_path / "m", architecture, **extra)
    found = run(fake_image(tmp_path / "site"), model=str(where), arguments=[str(where), *arguments])["model"]
    assert (found["known"], found["by"]) == (known, by)
    if known is False:
        assert found["reason"] == f"ValueError: ['{architecture}'] was supported until v0.9."


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("raise ImportError('libcuda.so.1: cannot open shared object file')", None),
        ("raise RuntimeError('undefined symbol: _ZN3c10')", False),
        ("import nothing_of_the_kind", False),
    ],
)
def test_a_vllm_that_cannot_be_imported(tmp_path: Path, text: str, imported: bool | None) -> None:
    parts = run(fake_image(tmp_path, {INIT: text}))
    assert parts["vllm"]["imported"] is imported
    assert "arguments" not in parts
    assert parts["end"]["code"] == 0


def test_a_library_that_kills_its_process(tmp_path: Path) -> None:
    parts = run(fake_image(tmp_path, {INIT: "import os\nos.kill(os.getpid(), 11)"}))
    assert parts["end"]["signal"] == 11
    assert "image" in parts


def test_an_import_without_end_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    parts = run(fake_image(tmp_path, {INIT: "import time\ntime.sleep(600)"}), timeout=1)
    assert parts["end"]["timeout"] is True
    assert time.monotonic() - started < 300


def test_the_planned_environment_is_there_before_the_import(tmp_path: Path) -> None:
    site = fake_image(tmp_path, {INIT: "import os\n__version__ = os.environ['VLLM_X']"})
    assert run(site, env={"VLLM_X": "7"})["vllm"]["version"] == "7"


def test_the_python_of_the_vllm_command_is_used(tmp_path: Path) -> None:
    """vLLM in an environment of its own, of which only the command is on the path."""
    fake_image(tmp_path / "site")
    python = tmp_path / "venv" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(f"#!{python}\n")
    command.chmod(0o755)
    env = {"PATH": f"{command.parent}:/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", _probe_program.BOOT],
        input=_probe.program({"timeout": 60}),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert _probe.parse_output(done.stdout)["vllm"]["version"] == "0.17.1"


def test_the_working_directory_is_no_place_for_packages(tmp_path: Path) -> None:
    fake_image(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _probe_program.BOOT],
        input=_probe.program({"timeout": 60}),
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        check=False,
        cwd=tmp_path,
    )
    assert _probe.parse_output(done.stdout)["vllm"]["imported"] is False


# --- files ----------------------------------------------------------------------------------------------------------------


def test_a_whole_model(tmp_path: Path) -> None:
    found = _probe_program.files(str(model(tmp_path / "m")))
    assert (found["missing"], found["checked"], found["tokenizer"]) == ([], 5, True)


def broken(change: str, where: Path) -> None:
    """One way to break a model."""
    shard = where / "model-2.safetensors"
    if change == "gone":
        shard.unlink()
    elif change == "dangling":
        shard.unlink()
        shard.symlink_to("../../blobs/none")
    elif change == "short":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif change == "zeros":
        shard.write_bytes(b"\0" * 100)
    elif change == "empty":
        shard.write_bytes(b"")
    elif change == "config":
        (where / "config.json").unlink()
    elif change == "index":
        (where / "model.safetensors.index.json").write_text("{")
    elif change == "link":
        (where / "tokenizer.json").unlink()
        (where / "tokenizer.json").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ("gone", "model-2.safetensors", "not there"),
        ("dangling", "model-2.safetensors", "a link whose target is not there"),
        ("short", "model-2.safetensors", "bytes instead of the"),
        ("zeros", "model-2.safetensors", "not a safetensors file"),
        ("empty", "model-2.safetensors", "not a safetensors file"),
        ("config", "config.json", "not there"),
        ("index", "model.safetensors.index.json", "an index that cannot be read"),
        ("link", "tokenizer.json", "a link whose target is not there"),
    ],
)
def test_a_broken_model(tmp_path: Path, change: str, name: str, reason: str) -> None:
    where = model(tmp_path / "m")
    broken(change, where)
    missing = _probe_program.files(str(where))["missing"]
    assert [item["path"] for item in missing] == [str(where / name)]
    assert reason in missing[0]["reason"]


def test_a_model_without_weights_and_one_that_is_not_there(tmp_path: Path) -> None:
    where = tmp_path / "m"
    where.mkdir()
    (where / "config.json").write_text("{}")
    assert _probe_program.files(str(where))["missing"][0]["reason"] == "no weights at all"
    assert _probe_program.files(str(tmp_path / "none"))["missing"][0]["path"] == str(tmp_path / "none")


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" * 4)
    assert _probe_program.files(str(tmp_path / "m.gguf"))["missing"] == []


@pytest.mark.parametrize(("number", "text"), [(22809, "2.28.9"), (23102, "2.31.2"), (2708, "2.7.8")])
def test_nccl_text(number: int, text: str) -> None:
    assert _probe_program.nccl_text(number) == text
