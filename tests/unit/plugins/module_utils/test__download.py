# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the hub says is told apart; the program that downloads reports what went wrong."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import types
import typing as t
from pathlib import Path

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _download

NOW = 1_764_500_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), (" 2.5 ", 2.5), ("", 0.0), ("soon", 0.0), ("Sun, 30 Nov 2025 10:53:30 GMT", 10.0), ("Sun, 30 Nov 2025 10:53:00 GMT", 0.0)],
)
def test_retry_after(value: str, seconds: float) -> None:
    assert _download.retry_after_seconds(value, NOW) == seconds


@pytest.mark.parametrize(
    ("status", "code", "token", "kind", "words"),
    [
        (401, "GatedRepo", False, "hub-401", "no token was given; it is gated"),
        (401, "RepoNotFound", False, "hub-401", "there is no such model"),
        (401, "", True, "hub-401", "the token is not accepted"),
        (403, "GatedRepo", True, "hub-403", "has no access"),
        (451, "", True, "hub-403", "has no access"),
        (404, "RepoNotFound", True, "hub-404", "no org/m ("),
        (404, "RevisionNotFound", True, "hub-404", "no revision v9 of org/m"),
        (404, "EntryNotFound", True, "hub-404", "no such file in org/m"),
        (429, "", False, "hub-429", "come back in 7 s"),
        (500, "", False, "hub-unreachable", "HTTP 500"),
        (418, "", False, "hub-unreachable", "HTTP 418"),
    ],
)
def test_answers_are_told_apart(status: int, code: str, token: bool, kind: str, words: str) -> None:
    headers = {"retry-after": "7"} if status == 429 else {}
    error = _download.classify(status, {**headers, "x-error-code": code}, NOW).data
    assert (error["kind"], error["status"]) == (kind, status)
    fields = _download.problem_fields(error, repo_id="org/m", revision="v9", endpoint="https://hub", token=token)
    assert words in fields["found"] and fields["expected"] and fields["remedy"]


@pytest.mark.parametrize(
    ("path", "allow", "ignore", "keep"),
    [
        ("a.json", [], [], True),
        ("a.json", ["*.json"], [], True),
        ("a.bin", ["*.json"], [], False),
        ("a.json", ["*.json"], ["a*"], False),
        ("original/x.pth", [], ["original/"], False),
        ("original/x.pth", [], ["original/*"], False),
        ("sub/a.json", ["*.json"], [], True),
    ],
)
def test_patterns(path: str, allow: list[str], ignore: list[str], keep: bool) -> None:
    assert _download.wanted(path, allow, ignore) is keep


def test_exact_pattern() -> None:
    import fnmatch

    for path in ("a[1].json", "b*.bin", "c?.x", "plain.json"):
        assert fnmatch.fnmatch(path, _download.exact(path))
    assert not fnmatch.fnmatch("bXX.bin", _download.exact("b*.bin"))


def test_manifest_from_info_and_tree() -> None:
    siblings = [
        {"rfilename": "c.json", "size": 3, "blobId": "a" * 40},
        {"rfilename": "m.safetensors", "size": 9, "blobId": "b" * 40, "lfs": {"sha256": "c" * 64, "size": 9, "pointerSize": 130}},
    ]
    rows = [
        {"path": "c.json", "size": 3, "blob": "a" * 40, "algo": "git-sha1"},
        {"path": "m.safetensors", "size": 9, "blob": "c" * 64, "algo": "sha256"},
    ]
    assert _download.manifest_of({"siblings": siblings}) == rows
    assert _download.manifest_of({"siblings": [{"rfilename": "c.json"}]}) is None
    tree = [
        {"type": "directory", "path": "d", "oid": "0", "size": 0},
        {"type": "file", "path": "c.json", "oid": "a" * 40, "size": 3},
        {"type": "file", "path": "m.safetensors", "oid": "b" * 40, "size": 9, "lfs": {"oid": "c" * 64, "size": 9}},
    ]
    assert _download.manifest_of_tree(tree) == rows


# --- the client ---


class Fake(http.server.BaseHTTPRequestHandler):
    """Answers from a list of (status, headers, body) and remembers the requests."""

    answers: list[tuple[int, dict[str, str], bytes]] = []
    seen: list[tuple[str, str, str]] = []

    def log_message(self, *args: t.Any) -> None:
        pass

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path, self.headers.get("Authorization", "")))
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture
def fake() -> t.Iterator[tuple[type[Fake], str]]:
    handler = type("Handler", (Fake,), {"answers": [], "seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


INFO = json.dumps({"sha": "d" * 40, "siblings": [{"rfilename": "c.json", "size": 3, "blobId": "a" * 40}]}).encode()


def client(url: str, token: str = "", retries: int = 3) -> tuple[_download.Hub, list[float]]:
    hub, slept = _download.Hub(url, token, retries=retries, timeout=5), []
    hub.sleep = slept.append  # type: ignore[assignment]
    return hub, slept


def test_snapshot_with_token_and_quoted_revision(fake: tuple[type[Fake], str]) -> None:
    handler, url = fake
    handler.answers[:] = [(200, {}, INFO)]
    commit, rows = client(url, "secret")[0].snapshot("org/m", "refs/pr/1")
    assert commit == "d" * 40 and rows[0]["path"] == "c.json"
    assert handler.seen == [("GET", "/api/models/org/m/revision/refs%2Fpr%2F1?blobs=true", "Bearer secret")]


def test_rate_limit_is_waited_for_and_then_given_up(fake: tuple[type[Fake], str]) -> None:
    handler, url = fake
    handler.answers[:] = [(429, {"Retry-After": "3"}, b""), (429, {"Retry-After": "3"}, b""), (200, {}, INFO)]
    hub, slept = client(url)
    assert hub.snapshot("org/m", "main")[0] == "d" * 40 and slept == [3.0, 3.0]
    handler.answers[:] = [(429, {"Retry-After": "900"}, b"")]
    hub, slept = client(url)
    with pytest.raises(_download.HubError) as info:
        hub.snapshot("org/m", "main")
    assert info.value.data["kind"] == "hub-429" and info.value.data["retry_after"] == 900 and slept == []


@pytest.mark.parametrize("status", [401, 403, 404])
def test_final_answers_are_not_asked_again(fake: tuple[type[Fake], str], status: int) -> None:
    handler, url = fake
    handler.answers[:] = [(status, {}, b"")]
    with pytest.raises(_download.HubError) as info:
        client(url)[0].snapshot("org/m", "main")
    assert info.value.data["kind"] == f"hub-{status}" and len(handler.seen) == 1


@pytest.mark.parametrize("body", [b"<html>login</html>", b'{"no": "sha"}', b"[]"])
def test_something_else_than_a_hub(fake: tuple[type[Fake], str], body: bytes) -> None:
    handler, url = fake
    handler.answers[:] = [(200, {}, body)]
    with pytest.raises(_download.HubError) as info:
        client(url)[0].snapshot("org/m", "main")
    assert info.value.data["kind"] == "hub-unreachable"


def test_nobody_there() -> None:
    hub, slept = client("http://127.0.0.1:1", retries=2)
    with pytest.raises(_download.HubError) as info:
        hub.snapshot("org/m", "main")
    assert info.value.data["kind"] == "hub-unreachable" and "refused" in info.value.data["message"] and slept == [1.0, 2.0]


def test_the_token_does_not_follow_to_another_host(fake: tuple[type[Fake], str]) -> None:
    handler, url = fake
    other = url.replace("127.0.0.1", "localhost")
    handler.answers[:] = [(307, {"Location": f"{other}/x"}, b""), (200, {}, INFO)]
    client(url, "secret")[0].snapshot("org/m", "main")
    assert [item[2] for item in handler.seen] == ["Bearer secret", ""]
    handler.seen.clear()
    handler.answers[:] = [(307, {"Location": "/api/models/org/renamed"}, b""), (200, {}, INFO)]
    client(url, "secret")[0].snapshot("org/m", "main")
    assert [item[2] for item in handler.seen] == ["Bearer secret", "Bearer secret"]


def test_access_check_does_not_follow_the_redirect(fake: tuple[type[Fake], str]) -> None:
    handler, url = fake
    handler.answers[:] = [(302, {"Location": "http://192.0.2.1/cdn"}, b"")]
    client(url, "s")[0].check_access("org/m", "d" * 40, "a b.safetensors")
    assert handler.seen == [("HEAD", f"/org/m/resolve/{'d' * 40}/a%20b.safetensors", "Bearer s")]


def test_a_hub_without_blob_ids_is_asked_for_its_tree(fake: tuple[type[Fake], str]) -> None:
    handler, url = fake
    page = json.dumps([{"type": "file", "path": "c.json", "oid": "a" * 40, "size": 3}]).encode()
    info = json.dumps({"sha": "d" * 40, "siblings": [{"rfilename": "c.json"}]}).encode()
    handler.answers[:] = [
        (200, {}, info),
        (200, {"Link": f'<{url}/next>; rel="next"'}, page),
        (200, {}, page.replace(b"c.json", b"d.json")),
    ]
    assert [row["path"] for row in client(url)[0].snapshot("org/m", "main")[1]] == ["c.json", "d.json"]


# --- the program ---


class Response:
    def __init__(self, status: int, **headers: str) -> None:
        self.status_code = status
        self.headers = {key.replace("_", "-"): value for key, value in headers.items()}


class HfHubHTTPError(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__("http")
        self.response = response


class ConnectError(Exception):
    pass


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (HfHubHTTPError(Response(401, x_error_code="GatedRepo")), "hub-401"),
        (chained(FileNotFoundError("not in the cache"), HfHubHTTPError(Response(429, retry_after="5"))), "hub-429"),
        (chained(RuntimeError("x"), OSError(28, "No space left on device")), "disk-model"),
        (chained(FileNotFoundError("cache"), ConnectError("no route")), "hub-unreachable"),
        (ValueError("odd"), "hub-download"),
    ],
)
def test_exceptions_of_the_library(exc: Exception, kind: str) -> None:
    assert _download.classify_exception(exc)["kind"] == kind


def test_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[t.Any] = []
    library = types.ModuleType("huggingface_hub")
    library.__version__ = "9.9"  # type: ignore[attr-defined]
    library.snapshot_download = lambda *args, **kwargs: calls.append((args, kwargs)) or "/x"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    (tmp_path / "job.json").write_text(json.dumps({"repo_id": "org/m", "commit": "d" * 40, "paths": ["a[1].json"], "workers": 3}))
    assert _download.main(["x", str(tmp_path / "job.json")]) == 0
    assert json.loads((tmp_path / "result.json").read_text()) == {"ok": True, "version": "9.9", "path": "/x"}
    assert calls == [(("org/m",), {"revision": "d" * 40, "allow_patterns": ["a[[]1].json"], "max_workers": 3})]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert _download.main(["x", str(tmp_path / "job.json")]) == 1
    assert json.loads((tmp_path / "result.json").read_text())["error"]["kind"] == "hub-no-library"
