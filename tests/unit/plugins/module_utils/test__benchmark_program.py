# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

"""The program as it runs in the container, with a tool that a test writes."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _benchmark, _benchmark_program

GOOD = """
import json, os, sys, time
folder = sys.argv[sys.argv.index("--result-dir") + 1]
for done in (1, 2):
    sys.stderr.write(f"\\r 50%|xx | {done}/2 [00:01<00:01]")
    sys.stderr.flush()
    time.sleep(0.3)
print("done", os.environ["HF_HUB_OFFLINE"], os.environ.get("OPENAI_API_KEY"))
json.dump({"completed": 2, "argv": sys.argv[1:]}, open(os.path.join(folder, "result.json"), "w"))
"""


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """measure(source): what the program tells when the tool is that source; nothing of it is left afterwards."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def measure(source: str, limit: float = 20, url: str = "http://127.0.0.1:9", command: list[str] | None = None) -> list[dict]:
        tool = tmp_path / "tool.py"
        tool.write_text(source, encoding="utf-8")
        warm = {"url": url, "model": "m", "input": 3, "output": 64}
        job = {"argv": ["--seed", "7"], "limit": limit, "total": 2, "warm": warm}
        _benchmark_program.measure(job, command or [sys.executable, str(tool)], pause=0.05)
        assert list(scratch.iterdir()) == []
        return _benchmark.told(capsys.readouterr().out)

    return measure


def test_a_point(measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    *progress, end = measure(GOOD)
    assert {"kind": "progress", "done": 1, "total": 2} in progress
    assert (end["kind"], end["rc"], end["late"], end["result"]["completed"]) == ("end", 0, False, 2)
    assert end["result"]["argv"][:3] == ["--seed", "7", "--save-result"]
    assert "done 1 k" in end["tail"]


def test_a_tool_that_fails(measure) -> None:
    (end,) = measure("import nothing_of_this_name")
    assert (end["rc"], end["late"], end["result"]) == (1, False, None)
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in end["tail"]


def test_a_tool_that_does_not_end(measure, tmp_path: Path) -> None:
    """It is ended with what it started, and what it wrote so far does not count."""
    pid = tmp_path / "pid"
    source = f"import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\nopen({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    (end,) = measure(source, limit=1.5)
    assert (end["late"], end["result"]) == (True, None)
    child = int(pid.read_text())
    for dummy in range(50):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split(") ")[1][0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("what the tool started still runs")


def test_no_tool(measure) -> None:
    (end,) = measure("", command=["/nonexistent/vllm"])
    assert (end["rc"], end["result"]) == (127, None)
    assert "No such file" in end["tail"]


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None:
        pass


def test_one_request_goes_before_that_is_not_counted(measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # never asked
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            end = measure(GOOD, url=f"http://127.0.0.1:{server.server_port}")[-1]
        finally:
            server.shutdown()
            thread.join()
        (asked,) = server.asked  # type: ignore[attr-defined]
    assert end["rc"] == 0
    assert asked[0] == "/v1/completions"
    assert (len(asked[1]["prompt"]), asked[1]["max_tokens"], asked[1]["model"]) == (3, 8, "m")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", None),
        (b"  0%|          | 0/16 [00:00<?, ?it/s]\r 25%|##   | 4/16 [00:01<00:03,  3.2it/s]", (4, 16)),
        (b"12/2026 no bar", None),
    ],
)
def test_bar(text: bytes, expected: tuple[int, int] | None) -> None:
    assert _benchmark_program.last_bar(text) == expected


def test_as_text_on_stdin() -> None:
    """As the container gets it: standard library only, one argument."""
    done = subprocess.run(
        [sys.executable, "-I", "-", json.dumps({"step": "look"})],
        input=_benchmark.program_source(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    (told,) = _benchmark.told(done.stdout)
    assert told["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["kind"] == "look"
