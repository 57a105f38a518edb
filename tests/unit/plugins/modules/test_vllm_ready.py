# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
import types

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

from ansible_collections.dgxspark.serving.plugins.module_utils._containers import Docker
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.modules import vllm_ready

MODELS = (200, {"data": [{"id": "tiny", "max_model_len": 1024}]})
ANSWER = (200, {"choices": [{"message": {"content": "hello"}}], "usage": {"completion_tokens": 7}})
GOOD = {"/health": [(200, None)], "/v1/models": [MODELS], "/v1/chat/completions": [ANSWER]}


class Server:
    """A scripted server: per path a list of answers, the last one repeats. An answer: (status, body), "hang", "close" or a callable."""

    def __init__(self, script):
        self.script = {path: list(answers) for path, answers in script.items()}
        self.seen = []
        self.engines = []
        self.done = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.engines.append(self.headers.get("X-data-parallel-rank"))
                outer.seen.append((self.path, self.headers.get("Authorization"), json.loads(body) if body else None))
                answers = outer.script.get(self.path, [(404, None)])
                what = answers.pop(0) if len(answers) > 1 else answers[0]
                if what == "hang":
                    outer.done.wait(20)
                    return
                if what == "close":
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, data = what
                text = b"" if data is None else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.done.set()
        self.server.shutdown()
        self.server.server_close()


class FakeDocker:
    """Answers docker's commands: containers as they change over the calls of inspect, and a log that grows."""

    def __init__(self, containers=None, logs=()):
        self.states = containers or [[container()]]
        self.logs = list(logs)
        self.reads = 0

    sockets = ""

    def __call__(self, argv, timeout=30, data=None):
        if argv[0] == "ss":
            return 0, self.sockets, ""
        if argv[1] == "wait":
            self.waited = (argv[2:], timeout)
            return 0, "", ""
        if argv[1] == "container":
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return 0 if state else 1, json.dumps(state), "" if state else "No such container"
        self.reads += 1
        return 0, "".join(f"2026-11-30T09:00:{n:02d}.000000000Z {line}\n" for n, line in enumerate(self.logs)), ""


def container(name="spark-vllm", running=True, code=0, started="2026-11-30T09:00:00.0Z", ident="a", finished="2026-11-30T09:05:00.0Z"):
    state = {
        "Status": "running" if running else "exited",
        "Running": running,
        "ExitCode": code,
        "StartedAt": started,
        "FinishedAt": finished,
    }
    return {"Id": ident * 64, "Name": f"/{name}", "State": state, "Config": {}, "HostConfig": {}, "RestartCount": 0}


def params(url, **more):
    base = {
        "url": url,
        "served_model": "tiny",
        "container": "spark-vllm",
        "ray_container": "",
        "ranks": [],
        "api_key": None,
        "timeout": 30,
        "stage_timeouts": {},
        "completions": 2,
        "engines": 1,
        "pause": 0,
        "fresh": True,
        "prompt": "hi",
        "max_tokens": 8,
        "deadline": 5,
        "interval": 0.02,
        "node": "spark-1",
    }
    return {**base, **more}


def run(script, docker=None, budget=None, **more):
    with Server(script) as server:
        ready = vllm_ready.Ready(params(server.url, **more), Docker(docker or FakeDocker()))
        done = ready.wait(budget)
        return ready.result(done), server


def problem_of(script, docker=None, **more):
    with pytest.raises(Problem) as caught:
        run(script, docker, **more)
    return caught.value


def test_ready_after_two_completions():
    result, server = run(GOOD, api_key="secret")
    assert result["ready"] and result["answer"] == "hello" and result["completion_tokens"] == 7 and result["max_model_len"] == 1024
    assert [path for path, dummy, dummy2 in server.seen] == ["/health", "/v1/models", "/v1/chat/completions", "/v1/chat/completions"]
    assert [key for dummy, key, dummy2 in server.seen] == [None] + ["Bearer secret"] * 3
    assert "secret" not in json.dumps(result)


@pytest.mark.parametrize(
    ("completions", "engines", "asked"),
    [(2, 1, [None, None]), (1, 2, ["0", "1"]), (2, 3, ["0", "1", "2"]), (3, 2, ["0", "1", "0"]), (2, 2, ["0", "1"])],
)
def test_every_engine_gives_an_answer(completions, engines, asked):
    result, server = run(GOOD, completions=completions, engines=engines)
    assert result["ready"] and server.engines[-len(asked) :] == asked and len(server.seen) == 2 + len(asked)


def test_one_engine_without_an_answer_is_not_ready():
    problem = problem_of({**GOOD, "/v1/chat/completions": [ANSWER, (500, {"error": "engine 1"})]}, completions=1, engines=2)
    assert problem.stage == "completion"


def test_proxies_are_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run(GOOD)[0]["ready"]


def test_a_serving_server_is_asked_without_reading_its_log():
    docker = FakeDocker()
    assert run(GOOD, docker, fresh=False)[0]["ready"] and docker.reads == 0


SLOW = {
    "health 503 first": {**GOOD, "/health": [(503, None), (503, None), (200, None)]},
    "health 200 but completion 503 until later": {**GOOD, "/v1/chat/completions": [(503, {"error": "loading"}), (503, None), ANSWER]},
    "closed connections at first": {**GOOD, "/health": ["close", "close", (200, None)]},
    "models not there at first": {**GOOD, "/v1/models": [(503, None), MODELS]},
    "one failed completion": {**GOOD, "/v1/chat/completions": [(500, {"error": "x"}), ANSWER]},
    "a base model": {
        **GOOD,
        "/v1/chat/completions": [(400, {"error": {"message": "you must provide a chat template"}})],
        "/v1/completions": [(200, {"choices": [{"text": "world"}]})],
    },
}


@pytest.mark.parametrize("name", SLOW)
def test_not_yet_is_not_never(name):
    result, dummy = run(SLOW[name])
    assert result["ready"]
    assert result["endpoint"] == ("/v1/completions" if name == "a base model" else "/v1/chat/completions")


NEVER = {
    "needs a key": ({**GOOD, "/v1/models": [(401, {"error": "Unauthorized"})]}, {}, "RDY-10", "needs a key"),
    "another model": ({**GOOD, "/v1/models": [(200, {"data": [{"id": "glm-4.7"}]})]}, {}, "RDY-07", "lists glm-4.7"),
    "empty completions": (
        {**GOOD, "/v1/chat/completions": [(200, {"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 0}})]},
        {},
        "RDY-08",
        "without a single token",
    ),
    "completions fail": (
        {**GOOD, "/v1/chat/completions": [(500, {"error": {"message": "EngineCore encountered an issue"}})]},
        {},
        "RDY-08",
        "/health answers 200 but a completion fails",
    ),
    "a completion that never ends": ({**GOOD, "/v1/chat/completions": ["hang"]}, {"deadline": 0.3}, "RDY-08", "no answer in time"),
    "health never answers": (
        {**GOOD, "/health": ["hang"]},
        {"deadline": 0.1, "stage_timeouts": {"health": 0.2}},
        "RDY-01",
        "/health: no answer in time",
    ),
    "the whole takes too long": ({**GOOD, "/health": [(503, None)]}, {"timeout": 0.2}, "RDY-01", "not ready after"),
}


@pytest.mark.parametrize("name", NEVER)
def test_never(name):
    script, more, ident, words = NEVER[name]
    problem = problem_of(script, **more)
    assert problem.id == ident and words in problem.found and problem.node == "spark-1"


def test_nothing_listens_yet_is_refused_and_the_stage_of_the_log_counts():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ready = vllm_ready.Ready(
        params(f"http://127.0.0.1:{port}"), Docker(FakeDocker(logs=["Loading safetensors checkpoint shards:  40% Completed | 2/5 [x]"]))
    )
    assert ready.wait(0) is False
    assert ready.result(False)["reason"] == "/health: connection refused"
    assert ready.state["stage"] == "weights" and ready.state["counter"] == [2, 5]


def test_what_begins_to_listen_is_noticed_before_the_next_look(monkeypatch):
    docker, slept = FakeDocker(), []
    refused = {"kind": "refused", "status": 0, "body": "", "error": "", "seconds": 0.0}
    with Server(GOOD) as server:
        ready = vllm_ready.Ready(
            params(server.url, interval=60.0), Docker(docker), lambda *a: refused if len(slept) < 3 else vllm_ready.request(*a)
        )
        clock = [ready.now()]
        ready.now = lambda: clock[0]

        def sleep(seconds):
            slept.append(seconds)
            clock[0] += seconds

        # the module's own name for time, not time.sleep itself: threads of other tests may still be sleeping
        monkeypatch.setattr(vllm_ready, "time", types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic, time=time.time))
        assert ready.wait(None) is True
    assert sum(slept) < 2 and docker.reads == 2, "only the looks before and after it began to listen read the log"


def test_slices_carry_on_and_read_no_line_twice():
    script = {**GOOD, "/health": [(503, None)] * 3 + [(200, None)]}
    docker = FakeDocker(logs=["Starting to load model x", "something happens", "INFO:     Application startup complete."])
    with Server(script) as server:
        state, slices = None, 0
        while True:
            ready = vllm_ready.Ready(params(server.url), Docker(docker), state=json.loads(json.dumps(state)))
            done = ready.wait(0)
            slices += 1
            if done:
                break
            state = ready.state
    assert slices > 2 and ready.state["lines"] == 3 and len(ready.state["answers"]) == 2


def test_exited_container_fails_at_once_with_its_cause():
    docker = FakeDocker([[container(running=False, code=2)]], logs=["usage: vllm", "vllm: error: unrecognized arguments: --no-such-flag"])
    problem = problem_of({}, docker)
    assert problem.id == "VLL-03" and "container spark-vllm exited with code 2" in problem.found and "--no-such-flag" in problem.found


def test_who_has_the_port_that_the_server_could_not_bind():
    docker = FakeDocker([[container(running=False, code=1)]], logs=["OSError: [Errno 98] Address already in use"])
    with Server({}) as server:
        port = int(server.url.rpartition(":")[2])
        docker.sockets = f'LISTEN 0 5 0.0.0.0:{port} 0.0.0.0:* users:(("python3",pid=4711,fd=3))\n'
        with pytest.raises(Problem) as caught:
            vllm_ready.Ready(params(server.url), Docker(docker)).wait(None)
    assert caught.value.id == "VLL-07" and caught.value.found.endswith(f"; port {port} is held by python3 (pid 4711)")


def test_missing_container():
    assert "container spark-vllm is not there" in problem_of({}, FakeDocker([[]])).found


def test_replaced_container():
    docker = FakeDocker([[container()], [container(ident="b")]])
    assert "was replaced by another container" in problem_of({**GOOD, "/health": [(503, None)]}, docker).found


def test_the_ray_container_that_died_first_is_named():
    dead = [
        container(running=False, code=137, finished="2026-11-30T09:05:01.0Z"),
        container("spark-ray", running=False, code=137, finished="2026-11-30T09:05:00.0Z"),
    ]
    problem = problem_of({}, FakeDocker([dead]), ray_container="spark-ray")
    assert problem.found.startswith("container spark-ray exited with code 137") and "(and spark-vllm with it)" in problem.found


def test_a_container_that_dies_during_a_completion_ends_the_wait():
    docker = FakeDocker([[container()], [container(running=False, code=1)]])
    problem = problem_of({**GOOD, "/v1/chat/completions": ["hang"]}, docker, deadline=20)
    assert "container spark-vllm exited with code 1" in problem.found


def test_fatal_line_ends_the_wait_with_the_first_cause(monkeypatch):
    monkeypatch.setattr(vllm_ready._vllm, "FATAL_GRACE", 0.05)
    docker = FakeDocker(logs=["ValueError: No available memory for the cache blocks. Try", "EngineCore failed to start."])
    problem = problem_of({**GOOD, "/health": [(503, None)]}, docker)
    assert problem.id == "MEM-03"


@pytest.mark.parametrize(("what", "kind"), [("hang", "timeout"), ("close", "reset"), ((204, None), "status")])
def test_request_tells_failures_apart(what, kind):
    with Server({"/x": [what]}) as server:
        assert vllm_ready.request(server.url, "/x", total=0.2)["kind"] == kind


def test_request_bounds_a_server_that_trickles():
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def trickle():
        peer = listener.accept()[0]
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not stop.wait(0.02):
            try:
                peer.sendall(b"x")
            except OSError:
                return

    threading.Thread(target=trickle, daemon=True).start()
    started = time.monotonic()
    answer = vllm_ready.request(f"http://127.0.0.1:{listener.getsockname()[1]}", "/x", total=0.3)
    stop.set()
    listener.close()
    assert answer["kind"] == "timeout" and time.monotonic() - started < 10


class Exit(Exception):
    pass


def module(monkeypatch, args, docker, check=False):
    def leave(self, **result):
        raise Exit(result)

    monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave)
    monkeypatch.setattr(basic.AnsibleModule, "fail_json", lambda self, **result: leave(self, failed=True, **result))
    monkeypatch.setattr(vllm_ready, "bounded", lambda run_command: docker)
    with patch_module_args({**args, "_ansible_check_mode": check}), pytest.raises(Exit) as caught:
        vllm_ready.main()
    return caught.value.args[0]


def test_check_mode_answers_without_waiting_and_without_failing(monkeypatch):
    with Server(GOOD) as server:
        args = {"url": server.url, "served_model": "tiny"}
        assert module(monkeypatch, args, FakeDocker(), check=True)["ready"] is True
        result = module(monkeypatch, args, FakeDocker([[]]), check=True)
    assert result["ready"] is False and not result.get("failed") and not result["changed"]
    assert "container spark-vllm is not there" in result["reason"]


def test_module_fails_with_a_problem(monkeypatch):
    result = module(monkeypatch, {"served_model": "tiny", "node": "spark-1"}, FakeDocker([[]]))
    assert (
        result["failed"]
        and result["problem"]["node"] == "spark-1"
        and result["msg"].startswith("spark-1: container: found container spark-vllm is not there")
    )


def test_a_slice_that_is_not_ready_is_pending(monkeypatch):
    with Server({**GOOD, "/health": [(503, None)]}) as server:
        result = module(monkeypatch, {"url": server.url, "served_model": "tiny", "node": "spark-1", "slice": 0, "state": {}}, FakeDocker())
    assert result["pending"] and result["state"]["stage"] == "health" and result["line"].startswith("spark-1: health (")


def test_unknown_stage_is_named(monkeypatch):
    result = module(monkeypatch, {"served_model": "tiny", "stage_timeouts": {"x": 1}}, FakeDocker())
    assert result["failed"] and "there is no stage 'x'" in result["msg"]


def test_watching_asks_nothing_and_waits_with_docker():
    docker = FakeDocker()
    with Server(GOOD) as server:
        ready = vllm_ready.Ready(params(server.url, watch=True), Docker(docker))
        assert ready.watch(20) is False and docker.waited == (["spark-vllm"], 20)
        assert server.seen == []


def test_a_watched_container_that_ends():
    docker = FakeDocker([[container()], [container(running=False, code=1)]], ["ValueError: broken flag"])
    with pytest.raises(Problem) as caught:
        vllm_ready.Ready(params("http://127.0.0.1:9", node="spark-2", watch=True), Docker(docker)).watch(20)
    assert "spark-2: container: found container spark-vllm exited with code 1" in caught.value.msg and "broken flag" in caught.value.msg


def test_a_watch_that_nobody_ends_ends_itself():
    ready = vllm_ready.Ready(params("http://127.0.0.1:9", timeout=0, watch=True), Docker(FakeDocker()))
    time.sleep(0.01)
    assert ready.watch(20) is True
