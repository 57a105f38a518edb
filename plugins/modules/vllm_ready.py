#!/usr/bin/python

# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_ready
short_description: Wait until a vLLM server really answers, and say at once why it never will
version_added: 0.1.0
description:
  - Follows the start of a vLLM server through its stages (container, ray, placement, weights, compile, kv_cache, graph_capture, api,
    health, model,
    completion), read from the log of its container, until it answers.
  - Ready means that the container runs since one start, C(/health) answers 200, C(/v1/models) lists exactly O(served_model) (and its LoRA adapters), and
    O(completions) real
    completions produced tokens.
  - Every stage has its own limit for the time without progress; O(timeout) ends it all. When a container ends, or the log shows a line
    that is known to be fatal, it
    fails within seconds with the first cause and a remedy.
  - With O(watch=true) it asks nothing and only watches O(container). As one task over all nodes, with O(watch=true) on all but the head, the end
    of a rank on any node ends the wait on the head too, within seconds and with the rank's own cause.
  - Its action plugin runs the module in slices and shows one line at each new stage and every 15 seconds.
author:
  - dgxspark.serving contributors (!UNKNOWN)
extends_documentation_fragment:
  - dgxspark.serving.attributes
  - dgxspark.serving.attributes.node
attributes:
  check_mode:
    support: full
    details:
      - Asks once, does not wait, and returns RV(ready) instead of failing when the server is not there or not ready yet.
  diff_mode:
    support: none
    details:
      - Changes nothing.
  idempotent:
    support: full
    details:
      - Changes nothing; every run asks for new completions.
options:
  url:
    description:
      - Where the server listens, seen from this node. Proxies are never used.
    type: str
    default: http://127.0.0.1:30000
  served_model:
    description:
      - The only model name that C(/v1/models) may list, beside those of its LoRA adapters.
    type: str
    required: true
  container:
    description:
      - Name of the container that runs the server.
    type: str
    default: spark-vllm
  ray_container:
    description:
      - Name of the Ray container of this node, which must keep running too; empty without Ray.
    type: str
    default: ""
  watch:
    description:
      - Watch O(container) for as long as the other nodes of the same task wait for their server. Its action plugin needs it to run at the same
        time as those (C(forks)); alone it looks once.
    type: bool
    default: false
  ranks:
    description:
      - Names of further containers of this node that must keep running.
    type: list
    elements: str
    default: []
  api_key:
    description:
      - Key for C(/v1).
    type: str
  timeout:
    description:
      - Seconds for the whole wait.
    type: float
    default: 3600
  stage_timeouts:
    description:
      - Seconds without progress after which a stage has failed, by stage name. What is not named keeps its default. That of
        C(compile) is two thirds of O(timeout), and at least 2400.
    type: dict
    default: {}
  completions:
    description:
      - How many completions must produce tokens.
    type: int
    default: 2
  engines:
    description:
      - How many data parallel engines there are behind the API. With more than one, each must give a completion.
    type: int
    default: 1
  pause:
    description:
      - Seconds between two completions, used with O(fresh=true).
    type: float
    default: 0.1
  fresh:
    description:
      - Whether the server was launched just now. With V(false), a server that serves already is asked without pauses and its log is not
        read.
    type: bool
    default: false
  prompt:
    description:
      - What to ask.
    type: str
    default: Say hello.
  max_tokens:
    description:
      - Length of an answer in tokens.
    type: int
    default: 32
  deadline:
    description:
      - Seconds for one completion. The first one may compile kernels. A quick question such as C(/health) has at most 10 seconds.
    type: float
    default: 300
  interval:
    description:
      - Seconds between two looks at the containers and the log. Whether the server listens already is asked more often, which costs nothing.
    type: float
    default: 0.5
  slice:
    description:
      - Seconds after which the module returns RV(pending=true) so that the action plugin can show progress. Used by the action plugin
        only.
    type: float
    default: 5
  unreachable_grace:
    description:
      - Seconds for which a node that cannot be reached is tolerated during the wait. Used by the action plugin only.
    type: float
    default: 60
  state:
    description:
      - What an earlier slice returned. Internal, set by the action plugin; without it the module waits in one go.
    type: dict
"""

EXAMPLES = r"""
- name: Wait for the server
  dgxspark.serving.vllm_ready:
    url: http://127.0.0.1:30000
    served_model: qwen3.5-122b
    container: spark-vllm
    ray_container: spark-ray
    fresh: true
    timeout: 3600
    stage_timeouts:
      weights: 1200
"""

RETURN = r"""
ready:
  description: Whether the server answers. Only in check mode it can be false without a failure.
  returned: always
  type: bool
reason:
  description: Why it is not ready.
  returned: when not ready
  type: str
stages:
  description: What the start went through, in order.
  returned: always
  type: list
  elements: dict
  contains:
    stage:
      description: Name of the stage.
      type: str
    seconds:
      description: How long it took.
      type: float
    detail:
      description: How far it came, such as V(5/5).
      type: str
model:
  description: The served name.
  returned: when ready
  type: str
max_model_len:
  description: Longest context that the server accepts, in tokens.
  returned: when ready
  type: int
answer:
  description: Text of the last completion.
  returned: when ready
  type: str
completion_tokens:
  description: Tokens of the last completion.
  returned: when ready
  type: int
answered_at:
  description: When the first completion had come, in seconds since 1970 by the node's clock.
  returned: when ready
  type: float
endpoint:
  description: The path that answered.
  returned: when ready
  type: str
elapsed:
  description: Seconds of the whole wait.
  returned: always
  type: float
facts:
  description: Figures from the log, such as C(kv_cache_tokens), C(weights_gib), C(engine_seconds).
  returned: always
  type: dict
pending:
  description: Whether the wait goes on. Seen by the action plugin only.
  returned: with O(state)
  type: bool
problem:
  description: Id, node, stage, found, expected and remedy of a failure.
  returned: failure
  type: dict
"""

import http.client
import json
import socket
import threading
import time
import typing as t
import urllib.parse

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.dgxspark.serving.plugins.module_utils import _vllm
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import (
    Docker,
    DockerError,
    exit_text,
    normal_stamp,
    parse_ss,
    unread,
)
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem
from ansible_collections.dgxspark.serving.plugins.module_utils._wait import bounded

CONNECT = 3.0
QUICK = 10.0
BEFORE = 3.0  # while the log does not say yet that it listens
ERRORS_IN_ROW = 4
PROBE = 0.25  # seconds between two cheap questions while nothing listens yet
SLICE_MIN = 10.0  # a slice costs a new process on the node: a new stage alone ends it only when it has lasted this long


def request(
    url: str,
    path: str,
    body: dict[str, t.Any] | None = None,
    key: str | None = None,
    total: float = QUICK,
    more: dict[str, str] | None = None,
) -> dict[str, t.Any]:
    """One HTTP request without proxies: {kind: status|refused|reset|timeout|unreachable|broken, status, body, error, seconds}.

    ``total`` seconds bound the whole exchange, also with a server that sends one byte now and then.
    """
    started = time.monotonic()
    answer: dict[str, t.Any] = {"kind": "broken", "status": 0, "body": "", "error": "", "seconds": 0.0}
    target = urllib.parse.urlsplit(url)
    scheme = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    over = threading.Event()
    connection = scheme(target.hostname or "", target.port, timeout=min(CONNECT, total))

    def cut() -> None:
        over.set()
        try:
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    timer = threading.Timer(total, cut)
    timer.daemon = True
    timer.start()
    try:
        connection.connect()
        connection.sock.settimeout(total)
        headers = {"Accept": "application/json", "Connection": "close", **(more or {})}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(
            "GET" if body is None else "POST", target.path.rstrip("/") + path, None if body is None else json.dumps(body), headers
        )
        response = connection.getresponse()
        answer["status"] = response.status
        answer["body"] = response.read(4 << 20).decode("utf-8", "replace")
        answer["kind"] = "timeout" if over.is_set() else "status"
    except ConnectionRefusedError:
        answer["kind"] = "refused"
    except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected, http.client.IncompleteRead) as exc:
        answer.update(kind="timeout" if over.is_set() else "reset", error=str(exc))
    except TimeoutError:
        answer.update(kind="timeout", error=f"within {total:.0f} s")
    except (OSError, http.client.HTTPException, ValueError) as exc:
        answer.update(kind="timeout" if over.is_set() else ("unreachable" if isinstance(exc, OSError) else "broken"), error=str(exc))
    finally:
        timer.cancel()
        connection.close()
    answer["seconds"] = round(time.monotonic() - started, 3)
    return answer


class _Background:
    """A request that runs while the containers are watched."""

    def __init__(self, call: t.Callable[[], dict[str, t.Any]]) -> None:
        self.answer: dict[str, t.Any] | None = None
        self._thread = threading.Thread(target=self._go, args=(call,), daemon=True)
        self._thread.start()

    def _go(self, call: t.Callable[[], dict[str, t.Any]]) -> None:
        self.answer = call()

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return self.answer is not None


class Ready:
    """Looks at the containers, the log and the HTTP side; what it sees is judged in module_utils."""

    def __init__(
        self,
        params: dict[str, t.Any],
        docker: Docker,
        ask: t.Callable[..., dict[str, t.Any]] = request,
        state: dict[str, t.Any] | None = None,
    ) -> None:
        self.p = params
        self.docker = docker
        self.ask = ask
        self.wanted = _vllm.completions(params["completions"], params["engines"])
        self.now = time.monotonic
        self.state = state or _vllm.new_state(self.now())
        self.limits = _vllm.limits(params["stage_timeouts"], params["timeout"])
        self.endpoint = self.state.get("endpoint") or _vllm.CHAT
        self.model: dict[str, t.Any] = {"max_model_len": self.state.get("max_model_len")}
        self.reason = ""
        self._looked = 0.0

    # -- containers and log

    def look_at_containers(self) -> None:
        """Raise when a container of ours is gone, ended, or is not the one of before."""
        names = [self.p["container"], self.p["ray_container"], *self.p["ranks"]]
        try:
            found = self.docker.inspect(names)
        except DockerError as exc:
            raise Problem(
                "DOC-02",
                node=self.p["node"],
                stage=self.state["stage"],
                found=f"docker: {exc}",
                expected="an answer of docker",
                remedy="see systemctl status docker",
            ) from exc
        identity = dict(self.state["identity"])
        for name in [n for n in names if n]:
            if name not in found:
                raise _vllm.died(self.state, self.p["node"], f"container {name} is not there", self.now())
        ended = _vllm.gone(found.values(), self.p["ray_container"])
        if ended:
            first, others = ended[0], [c["name"] for c in ended[1:]]
            self._lost(first, exit_text(first) + (f" (and {', '.join(others)} with it)" if others else ""), found)
        for name, container in found.items():
            changed = _vllm.identity_change(identity.get(name, {}), container)
            if changed:
                self._lost(container, changed, found)
            identity[name] = _vllm.identity(container)
        self.state = dict(self.state, identity=identity)
        self._server = found[self.p["container"]]

    def _lost(self, container: t.Mapping[str, t.Any], how: str, found: dict[str, dict[str, t.Any]]) -> t.NoReturn:
        """Raise with the cause from what the server said last and from the lost container's own log."""
        self.read_log(found[self.p["container"]])
        log = "" if container["name"] == self.p["container"] else self.docker.log_text(container["name"], tail=200, timestamps=False)
        killed = container["exit_code"] in (137, 143)
        problem = _vllm.died(self.state, self.p["node"], f"container {container['name']} {how}", self.now(), log, killed)
        if problem.id == "VLL-07":  # vLLM does not say which port
            dummy, out, dummy2 = self.docker.run(["ss", "-H", "-t", "-l", "-n", "-p"], timeout=10)
            problem.found += "; " + _vllm.holder(urllib.parse.urlsplit(self.p["url"]).port or 80, parse_ss(out))
        raise problem

    def read_log(self, container: dict[str, t.Any]) -> None:
        """Read what is new in the server's log."""
        cursor = self.state["cursor"]
        since = (cursor or {}).get("since") or container["started_at"]
        lines, cursor = unread(self.docker.log_text(self.p["container"], since=since), cursor)
        now, wall = self.now(), time.time()
        state = _vllm.launched(self.state, _vllm.written_at(normal_stamp(container["started_at"]), now, wall))
        self.state = dict(_vllm.advance_at(state, ((_vllm.written_at(stamp, now, wall), line) for stamp, line in lines)), cursor=cursor)

    # -- HTTP

    def http(self, path: str, body: dict[str, t.Any] | None = None, total: float = QUICK) -> dict[str, t.Any]:
        answer = self.ask(self.p["url"], path, body, self.p["api_key"] if path.startswith("/v1") else None, total)
        self.state = dict(self.state, last_http=f"{path}: {_vllm.error_text(answer)}")
        problem = _vllm.needs_key(answer, self.p["node"], path, bool(self.p["api_key"]))
        if problem:
            raise problem
        return answer

    def enter(self, stage: str) -> None:
        self.state = _vllm.enter(self.state, stage, self.now())

    def healthy(self) -> bool:
        known = self.state["listening"] or _vllm.ORDER[self.state["stage"]] >= _vllm.ORDER["health"]
        answer = self.http("/health", total=min(QUICK if known else BEFORE, self.p["deadline"]))
        # Docker's proxy of a published port accepts and closes while nothing listens behind it: that is no sign of life either.
        if answer["kind"] in ("refused", "unreachable") or (answer["kind"] == "reset" and not known):
            self.reason = self.state["last_http"]
            return False
        self.enter("health")
        if answer["kind"] != "status" or answer["status"] != 200:
            self.reason = self.state["last_http"]
            return False
        self.enter("model")
        return True

    def models(self) -> bool:
        answer = self.http("/v1/models", total=min(QUICK, self.p["deadline"]))
        self.model = _vllm.check_models(answer, self.p["served_model"], self.p["node"])
        self.reason = self.model["reason"]
        if self.model["ready"]:
            self.enter("completion")
            self.state = dict(self.state, max_model_len=self.model["max_model_len"], detail=f"{len(self.state['answers'])}/{self.wanted}")
        return bool(self.model["ready"])

    def complete(self, watch: bool) -> bool:
        """Ask for one completion; True when it produced tokens. The containers are watched meanwhile."""
        body = _vllm.completion_request(self.endpoint, self.p["served_model"], self.p["prompt"], self.p["max_tokens"])
        left = self.p["timeout"] - (self.now() - self.state["started"])
        more = _vllm.engine_header(len(self.state["answers"]), self.p["engines"])
        arguments = (self.p["url"], self.endpoint, body, self.p["api_key"], max(1.0, min(self.p["deadline"], left)))
        call = _Background(lambda: self.ask(*arguments, more) if more else self.ask(*arguments))
        while not call.wait(1.0):
            if watch:
                self.look_at_containers()
        answer = call.answer or {}
        problem = _vllm.needs_key(answer, self.p["node"], self.endpoint, bool(self.p["api_key"]))
        if problem:
            raise problem
        verdict = _vllm.check_completion(answer, self.endpoint)
        self.reason = verdict["reason"]
        self.state = dict(self.state, last_http=f"{self.endpoint}: {_vllm.error_text(answer)}")
        if verdict["verdict"] == "plain":
            self.endpoint = _vllm.PLAIN
            self.state = dict(self.state, endpoint=self.endpoint)
            return self.complete(watch)
        if verdict["verdict"] == "ok":
            answers = [
                *self.state["answers"],
                {"text": verdict["text"], "tokens": verdict["tokens"], "seconds": answer["seconds"], "at": round(time.time(), 2)},
            ]
            now = self.now()
            self.state = dict(self.state, answers=answers, errors_in_row=0, progress_at=now, detail=f"{len(answers)}/{self.wanted}")
            return True
        errors = self.state["errors_in_row"] + (1 if verdict["verdict"] == "error" else 0)
        self.state = dict(self.state, errors_in_row=errors)
        hung = answer["kind"] == "timeout" and answer["seconds"] >= self.p["deadline"]
        if verdict["verdict"] == "fatal" or errors >= ERRORS_IN_ROW or hung:
            self.look_at_containers()
            self.read_log(self._server)
            raise _vllm.completion_failed(self.state, self.p["node"], verdict["reason"], self.now())
        return False

    # -- the loop

    def serving(self, wanted: int, pause: float, until: float) -> bool:
        """Go through health, model and completions as far as they are ready now; False when something is not ready yet."""
        if not self.healthy() or not self.models():
            return False
        while len(self.state["answers"]) < wanted:
            wait = float(self.state["not_before"]) - self.now()
            if wait > 0:
                if wait > SLICE_MIN and self.now() + wait > until:
                    return False
                time.sleep(wait)
            if not self.complete(watch=True):
                return False
            self.state = dict(self.state, not_before=self.now() + pause)
        return True

    def step(self, until: float) -> bool:
        """One look at everything; True when ready."""
        self.look_at_containers()
        if self.p["fresh"] or self.state["cursor"] is not None or self._looked:
            self.read_log(self._server)
        problem = _vllm.failed(self.state, self.p["node"], self.now())
        if problem:
            raise problem
        self._looked = self.now()
        if self.serving(self.wanted, self.p["pause"] if self.p["fresh"] else 0.0, until):
            return True
        problem = _vllm.overdue(self.state, self.p["node"], self.now(), self.p["timeout"], self.limits)
        if problem:
            raise problem
        return False

    def watch(self, budget: float | None) -> bool:
        """Raise when the container ends; False when the budget is over, True when nobody can be waiting any more. Docker waits for us, so this
        costs nothing meanwhile.
        """
        self.look_at_containers()
        if self.now() - self.state["started"] > self.p["timeout"]:
            return True
        if budget:
            self.docker.run([self.docker.command, "wait", self.p["container"]], timeout=budget)
            self.look_at_containers()
        return False

    def wait(self, budget: float | None) -> bool:
        """Wait; False when the budget (seconds; None = no slices) is over before the server is ready."""
        begin = self.now()
        until = begin + budget if budget is not None else float("inf")
        first_stage = self.state["stage"]
        while True:
            if self.step(until):
                return True
            if self.now() + self.p["interval"] > until:
                return False
            if budget is not None and self.state["stage"] != first_stage and self.now() - begin >= min(SLICE_MIN, budget):
                return False  # a new stage is worth a line
            self.pause(self.now() + self.p["interval"])

    def pause(self, until: float) -> None:
        """Wait for the next look; end early when something begins to listen.

        A look at the containers and the log costs CPU that the start itself needs, a refused connection costs nothing.
        """
        waiting = _vllm.ORDER[self.state["stage"]] < _vllm.ORDER["health"]
        while self.now() < until:
            left = until - self.now()
            time.sleep(max(0.0, min(PROBE, left) if waiting else left))
            if waiting and self.healthy():
                return

    def result(self, ready: bool) -> dict[str, t.Any]:
        now = self.now()
        result: dict[str, t.Any] = {
            "ready": ready,
            "stages": _vllm.stage_list(self.state, now),
            "elapsed": round(now - self.state["started"], 2),
            "facts": self.state["facts"],
        }
        if ready:
            last = self.state["answers"][-1] if self.state["answers"] else {"text": "", "tokens": 0}
            result.update(
                model=self.p["served_model"],
                max_model_len=self.model.get("max_model_len"),
                answer=last["text"],
                completion_tokens=last["tokens"],
                answered_at=self.state["answers"][0]["at"] if self.state["answers"] else 0.0,
                endpoint=self.endpoint,
                containers=self.state["identity"],
            )
        else:
            result["reason"] = self.reason or f"stage {self.state['stage']}"
        return result


def check(ready: Ready) -> dict[str, t.Any]:
    """Check mode: the present state, without waiting and without a failure."""
    try:
        ready.look_at_containers()
        return ready.result(ready.serving(min(1, ready.p["completions"]), 0.0, 0.0))
    except Problem as problem:
        ready.reason = problem.msg
        return dict(ready.result(False), problem=problem.as_dict())


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "served_model": {"type": "str", "required": True},
            "container": {"type": "str", "default": "spark-vllm"},
            "ray_container": {"type": "str", "default": ""},
            "watch": {"type": "bool", "default": False},
            "ranks": {"type": "list", "elements": "str", "default": []},
            "api_key": {"type": "str", "no_log": True},
            "timeout": {"type": "float", "default": 3600},
            "stage_timeouts": {"type": "dict", "default": {}},
            "completions": {"type": "int", "default": 2},
            "engines": {"type": "int", "default": 1},
            "pause": {"type": "float", "default": 0.1},
            "fresh": {"type": "bool", "default": False},
            "prompt": {"type": "str", "default": "Say hello."},
            "max_tokens": {"type": "int", "default": 32, "no_log": False},
            "deadline": {"type": "float", "default": 300},
            "interval": {"type": "float", "default": 0.5},
            "slice": {"type": "float", "default": 5},
            "unreachable_grace": {"type": "float", "default": 60},
            "state": {"type": "dict"},
            "node": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    state = module.params["state"]
    sliced = state is not None
    result: dict[str, t.Any] = {"changed": False, "ready": False, "stages": [], "elapsed": 0.0, "facts": {}}
    try:
        ready = Ready(module.params, Docker(bounded(module.run_command)), state=state or None)
    except ValueError as exc:
        module.fail_json(msg=str(exc), **result)
    if module.check_mode:
        result.update(check(ready))
        module.exit_json(**result)
    try:
        wait = ready.watch if module.params["watch"] else ready.wait
        done = wait(module.params["slice"] if sliced else None)
        result.update(ready.result(done))
    except Problem as problem:
        result.update(ready.result(False))
        module.fail_json(msg=problem.msg, problem=problem.as_dict(), **result)
    except DockerError as exc:
        module.fail_json(msg=f"docker: {exc}", **result)
    if sliced and not done:
        result.update(
            pending=True, state=ready.state, line=_vllm.progress_line(ready.state, module.params["node"], ready.now()), now=ready.now()
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
