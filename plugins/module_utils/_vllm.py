# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The start of a vLLM server as a state machine over stages, and what its HTTP answers mean.

PRIVATE to the collection. Everything here is a pure function over plain data; the state is a dict that survives JSON, so that a wait can
go on in another process. Times are seconds of the node's monotonic clock.

Log forms: vLLM 0.16 to 0.33 (the same texts; prefixes and file:line differ and are not looked at).
"""

from __future__ import annotations

import datetime
import json
import re
import typing as t

from ansible_collections.dgxspark.serving.plugins.module_utils import _diagnosis, _service
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

State = dict[str, t.Any]

STAGES = ("container", "ray", "placement", "weights", "compile", "kv_cache", "graph_capture", "api", "health", "model", "completion")
ORDER = {name: number for number, name in enumerate(STAGES)}

# Seconds without progress after which a stage has failed. JIT re-tuning after a change was seen to be silent for 36 minutes (compile);
# the bar of
# the graph capture has no line ends, so docker shows it only when it is full.
STAGE_TIMEOUTS: dict[str, float] = {
    "container": 300,
    "ray": 180,
    "placement": 300,
    "weights": 900,
    "compile": 2400,
    "kv_cache": 900,
    "graph_capture": 1800,
    "api": 300,
    "health": 120,
    "model": 60,
    "completion": 900,
}

COMPILE_SHARE = 2 / 3  # of the whole time

# After a fatal line the lines behind it are read for this long, so that the cause is seen and not only its consequence.
FATAL_GRACE = 1.5
TAIL = 30
SHAPES = 300

_COUNT = r"(?P<n>\d+)/(?P<total>\d+)"
MARKERS: tuple[tuple[str, str], ...] = (
    ("container", r"vLLM API server version|\bversion v?(?P<version>\d+\.\d+\.\d\S*)|non-default args|Resolved architecture|Using max "
                  r"model len (?P<max_model_len>\d+)"),
    ("ray", r"Initializing a V1 LLM engine|Connecting to existing Ray cluster|Connected to Ray cluster|Ray is already initialized"),
    ("placement", r"Creating a new placement group|Using the existing placement group|Copying the following environment variables"
                  r"|Waiting for creating a placement group|Env var prefixes to copy|world_size=\d+ rank=\d+|is using nccl|vLLM is using"),
    ("weights", r"Loading (?:safetensors|pt|bin|\w+) ?(?:checkpoint shards|using [\w ]+):\s+\d+% Completed \| " + _COUNT),
    ("weights", r"Starting to load model|Loading weights took (?P<weights_seconds>[\d.]+) seconds|Loading (?:model )?weights|Loading "
                r"safetensors"),
    ("weights", r"Model loading took (?P<weights_gib>[\d.]+) ?(?:GiB|GB)(?: memory)? and (?P<loading_seconds>[\d.]+) seconds"),
    ("compile", r"torch\.compile takes (?P<compile_seconds>[\d.]+) s|for vLLM's torch\.compile|Dynamo bytecode transform time|Compiling "
                r"a graph"
                r"|Warming up model for the compilation|Directly load the compiled graph|Cache the graph"),
    ("kv_cache", r"Available KV cache memory: (?P<kv_cache_gib>[\d.]+) GiB"),
    ("kv_cache", r"(?:GPU|CPU) KV cache size: (?P<kv_cache_tokens>[\d,]+) tokens(?:, Maximum concurrency for [\d,]+ tokens per request: "
                 r"(?P<concurrency>[\d.]+)x)?"),
    ("kv_cache", r"Maximum concurrency for [\d,]+ tokens per request: (?P<concurrency>[\d.]+)x"),
    ("graph_capture", r"Capturing CUDA graphs?[^:]*:\s+\d+%\|[^|]*\| " + _COUNT),
    ("graph_capture", r"Capturing CUDA graph|Graph capturing finished in (?P<graph_seconds>[\d.]+) secs"),
    ("api", r"init engine \(profile.*?took (?P<engine_seconds>[\d.]+)|Supported tasks|Starting vLLM (?:API )?server|Started server process"
            r"|Waiting for application startup|Application startup complete"),
)  # fmt: skip
_MARKERS = tuple((stage, re.compile(pattern)) for stage, pattern in MARKERS)
_LISTENING = re.compile(r"Application startup complete")
_DIGITS = re.compile(r"\d+")
# Said by the ranks themselves: they have their places, and what follows is that they connect.
_CONNECTING = re.compile(
    r"is using nccl|CustomAllreduce is disabled because this process group spans|rank=\d+ local_rank=\d+ distributed_init_method="
)


def new_state(now: float) -> State:
    """A wait that begins now."""
    return {
        "started": now,
        "stage": STAGES[0],
        "since": now,
        "progress_at": now,
        "counter": None,
        "detail": "",
        "stages": [],
        "facts": {},
        "causes": [],
        "lines": 0,
        "fatal_at": None,
        "noise": {},
        "shapes": [],
        "tail": [],
        "listening": False,
        "cursor": None,
        "identity": {},
        "answers": [],
        "errors_in_row": 0,
        "last_http": "",
        "not_before": now,
    }


def enter(state: State, stage: str, now: float) -> State:
    """Go on to a later stage (never back): close the present one with its duration."""
    if ORDER[stage] <= ORDER[state["stage"]]:
        return state
    done = {"stage": state["stage"], "seconds": round(now - state["since"], 2), "detail": describe(state)}
    return dict(
        state,
        stages=[*state["stages"], done],
        stage=stage,
        since=now,
        progress_at=max(now, state["progress_at"]),
        counter=None,
        detail="",
        shapes=[],
        errors_in_row=0,
    )


def describe(state: State) -> str:
    """``2/5``, ``waited 30 s``: how far the present stage is."""
    if state["counter"]:
        return "{}/{}".format(*state["counter"])
    return str(state["detail"])


def _read_marker(state: State, text: str, now: float) -> tuple[State, bool | None]:
    """The state after this line, and whether it is progress: True, False (a counter that stands still), None (nothing known about it)."""
    for stage, pattern in _MARKERS:
        found = pattern.search(text)
        if not found:
            continue
        groups = {key: value for key, value in found.groupdict().items() if value is not None}
        counter = (int(groups.pop("n")), int(groups.pop("total"))) if "n" in groups else None
        facts = {key: _figure(value) for key, value in groups.items()}
        if facts:
            state = dict(state, facts={**state["facts"], **facts})
        later = ORDER[state["stage"]] < ORDER[stage] <= ORDER["api"]
        if later:
            state = enter(state, stage, now)
        if stage != state["stage"] or counter is None:
            return state, True if later else None
        old = state["counter"]
        if old and old[1] == counter[1] and counter[0] <= old[0]:
            return state, False
        return dict(state, counter=list(counter)), True
    return state, None


def _figure(text: str) -> int | float | str:
    plain = text.replace(",", "")
    try:
        return int(plain)
    except ValueError:
        pass
    try:
        return float(plain)
    except ValueError:
        return text


def _advance_line(state: State, line: str, now: float) -> State:
    dummy, text = _diagnosis.clean(line)
    if not text.strip():
        return state
    if _LISTENING.search(text):
        state = dict(state, listening=True)
    state = dict(state, lines=state["lines"] + 1)
    cause = _diagnosis.match(line) or _diagnosis.exception(line)
    if cause:
        causes = [*state["causes"], dict(cause, seen_in=state["stage"], at_line=state["lines"])]
        state = dict(state, causes=causes[:20] + causes[20:][-20:])  # the first ones matter, and the last
        if cause["fatal"] and state["fatal_at"] is None:
            state = dict(state, fatal_at=now)
    state, moved = _read_marker(state, text, now)
    name = _diagnosis.noise(text)
    if name:
        waited = re.search(r"placement group of specs for (\d+) seconds", text)
        if waited:
            state = dict(state, detail=f"waits for free GPUs for {waited.group(1)} s")
        return dict(state, noise={**state["noise"], name: state["noise"].get(name, 0) + 1})
    state = dict(state, tail=[*state["tail"], text.strip()[:300]][-TAIL:])
    if moved is not None:
        return dict(state, progress_at=max(now, state["progress_at"])) if moved else state
    shape = _DIGITS.sub("#", text.strip())[:80]
    if shape in state["shapes"]:
        return state
    return dict(state, shapes=[*state["shapes"], shape][-SHAPES:], progress_at=max(now, state["progress_at"]))


def advance(state: State, lines: t.Iterable[str], now: float) -> State:
    """The state after these new log lines (without docker's time stamps), all read at ``now``; see ``advance_at``."""
    return advance_at(state, ((now, line) for line in lines))


def advance_at(state: State, lines: t.Iterable[tuple[float, str]]) -> State:
    """The state after these new log lines, each with the moment it was written.

    Progress is a stage, a counter that grew, or a line of a form not seen in this stage yet; heartbeats and repeated lines are neither
    progress nor failure. A bar that rewrites its line with carriage returns is read piece by piece.
    """
    for written, line in lines:
        at = max(written, state["since"])  # a line that Ray forwarded late does not turn the clock back
        for piece in line.split("\r"):
            state = _advance_line(state, piece, at)
    return state


def written_at(stamp: str, now: float, wall: float) -> float:
    """A time stamp of docker on the monotonic clock that shows ``now`` while the wall clock shows ``wall`` (epoch seconds)."""
    try:
        moment = datetime.datetime.fromisoformat(stamp[:19] + "+00:00" if stamp.endswith("Z") else stamp[:19] + stamp[-6:]).timestamp()
        return min(now, now - (wall - moment - float("0." + (stamp[20:29].rstrip("Z") or "0"))))
    except ValueError:
        return now


def launched(state: State, moment: float) -> State:
    """The first stage began when the container was started, also when the wait began later."""
    return dict(state, since=min(state["since"], moment)) if state["stage"] == STAGES[0] and not state["stages"] else state


def cause_of(state: State) -> dict[str, t.Any] | None:
    """The first primary cause seen so far."""
    return _diagnosis.best(c for c in state["causes"] if _diagnosis.ended_with(c, c["at_line"], state["lines"]))


def _details(state: State, cause: t.Mapping[str, t.Any] | None, now: float) -> dict[str, t.Any]:
    details: dict[str, t.Any] = {"waited": round(now - state["started"], 1), "stages": stage_list(state, now), "tail": state["tail"][-10:]}
    if cause:
        details["cause"] = {key: cause[key] for key in ("id", "cause", "remedy", "fields", "line")}
        details["others"] = sorted({c["id"] for c in state["causes"]} - {cause["id"]})
    return details


def _tail(state: State) -> str:
    return " | ".join(state["tail"][-3:]) or "the log is empty"


def holder(port: int, listeners: t.Iterable[t.Mapping[str, t.Any]]) -> str:
    """Who has the API port when the server could not bind one: ``port 30000 is held by python3 (pid 4711)``. ``listeners`` as of ``parse_ss``."""
    found = [listener for listener in listeners if listener["port"] == port]
    if not found:
        return f"nothing holds port {port} now, so it was taken for a moment or is another one"
    who = found[0]
    return f"port {port} is held by " + (f"{who['process']} (pid {who['pid']})" if who["pid"] else "a process that cannot be seen")


def died(state: State, node: str, what: str, now: float, log: str = "", killed: bool = False) -> Problem:
    """The server or a rank is gone: ``what`` says which and how (``container spark-vllm exited with code 1``), ``log`` is its own log.

    ``killed`` = from outside: then an exception that is in the log is not why.
    """
    causes = [c for c in (cause_of(state), _diagnosis.best(_diagnosis.scan(log.splitlines()))) if c]
    cause = _diagnosis.best(c for c in causes if not killed or _diagnosis.rank(c) == 0)
    where = describe(state)
    stage = state["stage"] + (f" {where}" if where else "")
    if cause:
        found, remedy, ident = f"{what}: {_diagnosis.sentence(cause)}", cause["remedy"], cause["id"]
    else:
        found, remedy, ident = (
            f"{what}; last lines: {_diagnosis.last_lines(log) or _tail(state)}",
            "read the whole log of that container (docker logs), and dmesg if it was killed",
            "RDY-06",
        )
    return Problem(
        ident, node=node, stage=stage, found=found, expected="the server to go on starting", remedy=remedy, **_details(state, cause, now)
    )


def failed(state: State, node: str, now: float) -> Problem | None:
    """The problem when a fatal line was seen and the grace for its cause is over."""
    if state["fatal_at"] is None or now - state["fatal_at"] < FATAL_GRACE:
        return None
    cause = cause_of(state)
    if cause is None:
        return None
    return Problem(
        cause["id"],
        node=node,
        stage=state["stage"],
        found=_diagnosis.sentence(cause),
        expected="the server to go on starting",
        remedy=cause["remedy"],
        **_details(state, cause, now),
    )


def limits(given: t.Mapping[str, t.Any] | None, timeout: float = 0) -> dict[str, float]:
    """The limit of every stage in seconds; raises ValueError for a stage that does not exist or a limit that is no number.

    Who raises the ``timeout`` of the whole does so for a long compilation: its silence may take the same share of it as by default.
    """
    result = dict(STAGE_TIMEOUTS)
    result["compile"] = max(result["compile"], timeout * COMPILE_SHARE)
    for name, value in (given or {}).items():
        if name not in ORDER:
            raise ValueError(f"stage_timeouts: there is no stage {name!r}; the stages are {', '.join(STAGES)}")
        try:
            result[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"stage_timeouts: {value!r} for {name} is not a number of seconds") from None
    return result


def overdue(state: State, node: str, now: float, timeout: float, stage_limits: t.Mapping[str, float]) -> Problem | None:
    """The problem when the present stage made no progress for too long, or the whole took too long."""
    stage = state["stage"]
    quiet = now - state["progress_at"]
    whole = now - state["started"]
    if whole < timeout and quiet < stage_limits[stage]:
        return None
    cause = cause_of(state)
    far = f" at {describe(state)}" if describe(state) else ""
    if whole >= timeout:
        found = f"not ready after {whole:.0f} s: stage {stage}{far}, for {now - state['since']:.0f} s"
        expected = f"an answering server within {timeout:.0f} s"
        remedy = "raise spark_ready_timeout if it was still making progress"
    else:
        found = f"stage {stage}{far} made no progress for {quiet:.0f} s"
        expected = f"progress at least every {stage_limits[stage]:.0f} s"
        remedy = {
            "graph_capture": "a rank hangs: try --enforce-eager; read the logs of all ranks",
            "compile": "run again if the kernel caches were cold, since what is compiled so far is kept; or raise spark_ready_timeout, of which two thirds "
            "may pass here without a word; else try --enforce-eager",
            "placement": "compare VLLM_HOST_IP with Ray's node addresses, and see the NCCL and Gloo interfaces of every node",
        }.get(stage, "read the logs of all ranks")
    if state["last_http"] and ORDER[stage] >= ORDER["api"]:
        found += f"; the last probe: {state['last_http']}"
    connecting = stage == "placement" and any(_CONNECTING.search(line) for line in state["tail"])
    if cause:
        found, remedy = f"{found}; {_diagnosis.sentence(cause)}", cause["remedy"]
    else:
        found = f"{found}{'; the ranks run and do not connect' if connecting else ''}; last lines: {_tail(state)}"
    if connecting and not cause:
        remedy = (
            "read NCCL's log of each rank (docker exec spark-ray sh -c 'tail -n 20 /tmp/nccl.*.log' on every node): the last line says what it waits for; "
            "another image has another NCCL"
        )
    ident = (
        cause["id"]
        if cause
        else "NCL-07"
        if connecting
        else {"graph_capture": "VLL-05", "completion": "RDY-08", "placement": "RAY-01"}.get(stage, "RDY-01")
    )
    return Problem(ident, node=node, stage=stage, found=found, expected=expected, remedy=remedy, **_details(state, cause, now))


def stage_list(state: State, now: float) -> list[dict[str, t.Any]]:
    """[{stage, seconds, detail}] of the finished stages and the present one."""
    return [*state["stages"], {"stage": state["stage"], "seconds": round(now - state["since"], 2), "detail": describe(state)}]


def progress_line(state: State, node: str, now: float) -> str:
    """``spark-1: weights 2/5 (12 s)``: seconds since the wait began."""
    far = describe(state)
    quiet = now - state["progress_at"]
    silent = f", no news for {quiet:.0f} s" if quiet >= 30 else ""
    return f"{node}: {state['stage']}{' ' + far if far else ''} ({now - state['started']:.0f} s{silent})"


def should_show(shown: t.Mapping[str, t.Any], state: State, now: float, every: float = 15.0) -> bool:
    """Whether a line is due: at a new stage, else every ``every`` seconds. ``shown`` = {stage, at} of the last line."""
    return state["stage"] != shown.get("stage") or now - float(shown.get("at", 0)) >= every


# --- identity of the containers


def identity_change(before: t.Mapping[str, t.Any], container: t.Mapping[str, t.Any]) -> str | None:
    """What says that the container is no more the one that this wait began with (None: it is the same)."""
    if not before:
        return None
    if before["id"] != container["id"]:
        return "was replaced by another container"
    if container["restart_count"] > before["restart_count"]:
        return f"was restarted by Docker ({container['restart_count']} times) after {container['exit_code']}"
    if before["started_at"] != container["started_at"]:
        return f"was started again (at {container['started_at']})"
    return None


def gone(containers: t.Iterable[t.Mapping[str, t.Any]], owner: str = "") -> list[t.Mapping[str, t.Any]]:
    """Those that do not run, the first to end first.

    ``owner`` is the container whose process namespace the others share: its end kills them (137), and Docker may notice theirs first.
    """
    ended = sorted((c for c in containers if not c["running"]), key=lambda c: str(c.get("finished_at") or ""))
    if ended and ended[0].get("exit_code") == 137:
        ended.sort(key=lambda c: c["name"] != owner)
    return ended


def identity(container: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    return {key: container[key] for key in ("id", "started_at", "restart_count")}


# --- HTTP: an answer is {kind: status|refused|reset|timeout|unreachable|broken, status, body, error, seconds}


def body_of(answer: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The JSON object of an answer, {} when it is none."""
    try:
        parsed = json.loads(answer.get("body") or "")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def error_text(answer: t.Mapping[str, t.Any]) -> str:
    """``HTTP 503: …`` or ``connection refused``."""
    if answer["kind"] != "status":
        names = {
            "refused": "connection refused",
            "reset": "connection closed before an answer",
            "timeout": "no answer in time",
            "unreachable": "unreachable",
        }
        text = names.get(answer["kind"], answer["kind"])
        return f"{text} ({answer['error']})" if answer.get("error") and answer["kind"] in ("unreachable", "broken", "timeout") else text
    body = body_of(answer)
    error = body.get("error", body)
    said = error.get("message") if isinstance(error, dict) else error
    said = str(said or answer.get("body") or "").strip()
    return f"HTTP {answer['status']}" + (f": {' '.join(said.split())[:200]}" if said and answer["status"] != 200 else "")


def needs_key(answer: t.Mapping[str, t.Any], node: str, path: str, with_key: bool) -> Problem | None:
    """401 and 403 are no "not yet"."""
    if answer["kind"] != "status" or answer["status"] not in (401, 403):
        return None
    return Problem(
        "RDY-10",
        node=node,
        stage="model",
        found=f"{path} answers HTTP {answer['status']}: the server needs {'another' if with_key else 'a'} key",
        expected="an answer with the given api_key" if with_key else "an answer without a key",
        remedy="take the key out of the image or the configuration that gives it (VLLM_API_KEY, --api-key), and put a gateway that asks for keys in front"
        " (docs/several-models.md)",
    )


def check_models(answer: t.Mapping[str, t.Any], served: str, node: str) -> dict[str, t.Any]:
    """{ready, max_model_len, reason} from /v1/models, whatever adapters it has; raises Problem when another model answers there."""
    if answer["kind"] != "status" or answer["status"] != 200:
        return {"ready": False, "max_model_len": None, "reason": f"/v1/models: {error_text(answer)}"}
    models = _service.base_models(body_of(answer))
    names = [str(m.get("id")) for m in models]
    if names != [served]:
        raise Problem(
            "RDY-07",
            node=node,
            stage="model",
            found=f"/v1/models lists {', '.join(names) or 'nothing'}",
            expected=f"exactly {served}",
            remedy="something else answers on this port, or the served name differs: compare spark_served_model_name, and stop the other "
            "server",
            models=names,
        )
    length = models[0].get("max_model_len")
    return {"ready": True, "max_model_len": length if isinstance(length, int) else None, "reason": ""}


CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def completion_request(path: str, model: str, prompt: str, max_tokens: int) -> dict[str, t.Any]:
    """The body of one small, greedy completion."""
    body: dict[str, t.Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": False}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return body


def completions(asked: int, engines: int) -> int:
    """How many completions prove the server: each of its data parallel engines gives one."""
    return max(asked, engines) if asked and engines > 1 else asked


def engine_header(number: int, engines: int) -> dict[str, str]:
    """What sends the completion with this number to one data parallel engine after the other (vLLM 0.11 and newer; older ones choose)."""
    return {"X-data-parallel-rank": str(number % engines)} if engines > 1 else {}


_NO_CHAT = re.compile(r"chat.?template|does not support chat|not support.*chat completions|chat completions.*not support", re.IGNORECASE)


def check_completion(answer: t.Mapping[str, t.Any], path: str) -> dict[str, t.Any]:
    """{verdict: ok|plain|retry|error|fatal, text, tokens, reason}.

    Judged by tokens, not by text alone: a reasoning model may still be thinking when max_tokens are used up. ``plain`` = this model
    has no chat template: ask /v1/completions. ``retry`` = not yet; ``error`` = it failed, which may pass once or twice; ``fatal`` = it
    will not get better.
    """
    verdict: dict[str, t.Any] = {"verdict": "retry", "text": "", "tokens": 0, "reason": f"{path}: {error_text(answer)}"}
    if answer["kind"] != "status":
        return verdict
    status = answer["status"]
    if status in (400, 404, 405, 422, 501) and path == CHAT and (status in (404, 405, 501) or _NO_CHAT.search(answer.get("body") or "")):
        return dict(verdict, verdict="plain")
    if status == 500 and path == CHAT and _NO_CHAT.search(answer.get("body") or ""):
        return dict(verdict, verdict="plain")
    if status in (429, 503):
        return verdict
    if status >= 500:
        return dict(verdict, verdict="error")
    if status != 200:
        return dict(verdict, verdict="fatal")
    body = body_of(answer)
    choice = (body.get("choices") or [{}])[0]
    choice = choice if isinstance(choice, dict) else {}
    said = choice.get("message")
    message: dict[str, t.Any] = said if isinstance(said, dict) else {}
    text = choice.get("text") or message.get("content") or message.get("reasoning_content") or message.get("reasoning") or ""
    tokens = int((body.get("usage") or {}).get("completion_tokens") or 0)
    if tokens >= 1 or str(text).strip():
        shown = "".join(char for char in str(text) if char.isprintable() or char in "\n\t").strip()
        return {"verdict": "ok", "text": shown, "tokens": tokens, "reason": ""}
    return dict(verdict, verdict="error", reason=f"{path}: HTTP 200 without a single token")


def completion_failed(state: State, node: str, reason: str, now: float) -> Problem:
    """Healthy, and it does not produce tokens."""
    cause = cause_of(state)
    found = f"/health answers 200 but a completion fails: {reason}"
    if cause:
        found = f"{found}; {_diagnosis.sentence(cause)}"
    return Problem(
        cause["id"] if cause else "RDY-08",
        node=node,
        stage="completion",
        found=found,
        expected="completions that produce tokens",
        remedy=cause["remedy"] if cause else "read the logs of all ranks; try --enforce-eager",
        **_details(state, cause, now),
    )
