# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import pathlib

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _vllm
from ansible_collections.dgxspark.serving.plugins.module_utils._containers import split_stamp
from ansible_collections.dgxspark.serving.plugins.module_utils._problem import Problem

LIFE = pathlib.Path(__file__).parents[2] / "fixtures/life"


def log(name):
    return [split_stamp(line)[1] for line in (LIFE / name).read_text().splitlines() if not line.startswith("# ")]


def ok(body):
    return {"kind": "status", "status": 200, "body": json.dumps(body), "error": "", "seconds": 0.1}


def status(code, text=""):
    return {"kind": "status", "status": code, "body": text, "error": "", "seconds": 0.1}


@pytest.mark.parametrize(
    ("name", "stages", "facts"),
    [
        (
            "vllm_0.32_ray_ok.log",
            ["container", "ray", "placement", "weights", "kv_cache", "api"],
            {"version": "0.32.0", "kv_cache_tokens": 2097152, "concurrency": 2048.0, "max_model_len": 1024},
        ),
        (
            "vllm_0.17_cuda_ok.log",
            ["container", "ray", "placement", "weights 39/39", "compile", "kv_cache", "graph_capture 51/51", "api"],
            {
                "version": "0.17.1",
                "kv_cache_tokens": 1234567,
                "kv_cache_gib": 30.11,
                "weights_gib": 59.2,
                "weights_seconds": 720.55,
                "engine_seconds": 184.2,
                "concurrency": 75.35,
                "graph_seconds": 74,
            },
        ),
    ],
)
def test_stages_of_whole_logs(name, stages, facts):
    state = _vllm.advance(_vllm.new_state(0), log(name), 10)
    assert [f"{s['stage']} {s['detail']}".strip() for s in _vllm.stage_list(state, 10)] == stages
    assert {key: state["facts"].get(key) for key in facts} == facts
    assert state["listening"] and state["fatal_at"] is None
    assert _vllm.failed(state, "spark-1", 99) is None


def test_stage_durations_come_from_the_times_of_the_log():
    state = _vllm.new_state(1000)
    pairs = [split_stamp(line) for line in (LIFE / "vllm_0.17_cuda_ok.log").read_text().splitlines() if not line.startswith("# ")]
    wall = 1772359200.0 + 1000  # 2026-03-01T10:16:40Z
    state = _vllm.launched(state, _vllm.written_at("2026-03-01T10:00:00.000000000Z", 1000, wall))
    state = _vllm.advance_at(state, [(_vllm.written_at(stamp, 1000, wall), line) for stamp, line in pairs])
    assert {s["stage"]: s["seconds"] for s in state["stages"]} == {
        "container": 20.0,
        "ray": 1.2,
        "placement": 38.8,
        "weights": 760.0,
        "compile": 100.0,
        "kv_cache": 70.0,
        "graph_capture": 6.0,
    }
    assert state["progress_at"] == 1000


def test_state_survives_json_and_reading_in_pieces():
    lines = log("vllm_0.32_ray_ok.log")
    whole = _vllm.advance(_vllm.new_state(0), lines, 5)
    state = _vllm.new_state(0)
    for start in range(0, len(lines), 7):
        state = json.loads(json.dumps(_vllm.advance(state, lines[start : start + 7], 5)))
    assert state == json.loads(json.dumps(whole))


def test_a_bar_that_rewrites_its_line_is_read_piece_by_piece():
    state = _vllm.advance(
        _vllm.new_state(0),
        [
            "Capturing CUDA graphs (decode, FULL):   0%|    | 0/35\rCapturing CUDA graphs (decode, FULL):  20%|##  | 7/35 [00:01<00:05,  "
            "5.0it/s]"
        ],
        3,
    )
    assert (state["stage"], state["counter"]) == ("graph_capture", [7, 35])


def test_heartbeats_and_repeated_lines_are_no_progress():
    state = _vllm.advance(_vllm.new_state(0), ["Capturing CUDA graphs (decode, FULL):  20%|##  | 2/10"], 10)
    for second in range(20, 200, 20):
        state = _vllm.advance(
            state,
            ["Capturing CUDA graphs (decode, FULL):  20%|##  | 2/10", "No available shared memory broadcast block found in 60 seconds"],
            second,
        )
    assert state["progress_at"] == 10 and state["noise"] == {"RDY-03": 9} and state["fatal_at"] is None
    problem = _vllm.overdue(state, "spark-1", 120, 3600, {**_vllm.STAGE_TIMEOUTS, "graph_capture": 100})
    assert (
        problem.id == "VLL-05"
        and "stage graph_capture at 2/10 made no progress for 110 s" in problem.found
        and "enforce-eager" in problem.remedy
    )
    assert _vllm.overdue(state, "spark-1", 109, 3600, {**_vllm.STAGE_TIMEOUTS, "graph_capture": 100}) is None


def test_broadcast_heartbeats_then_ready():
    state = _vllm.advance(
        _vllm.new_state(0),
        ["No available shared memory broadcast block found in 60 seconds"] * 10 + ["INFO:     Application startup complete."],
        1,
    )
    assert state["stage"] == "api" and state["listening"]


def test_new_lines_of_any_kind_are_progress_once():
    state = _vllm.advance(_vllm.new_state(0), ["flashinfer.jit: building module 1"], 50)
    assert state["progress_at"] == 50
    assert _vllm.advance(state, ["flashinfer.jit: building module 2"], 90)["progress_at"] == 50
    assert _vllm.advance(state, ["autotuning moe"], 90)["progress_at"] == 90


@pytest.mark.parametrize(
    ("line", "problem_id", "words"),
    [
        ("Creating a new placement group.", "RAY-01", "VLLM_HOST_IP"),
        # Where NCCL was seen to hang at its start (row NCL-07): the ranks have their places by then.
        ("(RayWorkerWrapper pid=300) INFO [pynccl.py:111] vLLM is using nccl==2.28.9", "NCL-07", "/tmp/nccl.*.log"),
        ("CustomAllreduce is disabled because this process group spans across nodes.", "NCL-07", "another NCCL"),
        ("world_size=2 rank=1 local_rank=0 distributed_init_method=tcp://192.168.200.12:4 backend=nccl", "NCL-07", "on every node"),
    ],
)
def test_ranks_that_do_not_connect_are_no_missing_place(line, problem_id, words):
    state = _vllm.advance(_vllm.new_state(0), ["Creating a new placement group.", line], 10)
    problem = _vllm.overdue(state, "spark-1", 400, 3600, _vllm.STAGE_TIMEOUTS)
    assert problem.id == problem_id and words in problem.remedy and line[-30:] in problem.found


def test_total_limit_tells_the_stage():
    state = _vllm.advance(_vllm.new_state(0), ["Loading safetensors checkpoint shards:  51% Completed | 20/39 [06:00<05:00]"], 3599)
    problem = _vllm.overdue(state, "spark-1", 3600, 3600, _vllm.STAGE_TIMEOUTS)
    assert "not ready after 3600 s: stage weights at 20/39" in problem.found


def test_stages_never_go_back():
    state = _vllm.advance(_vllm.new_state(0), ["GPU KV cache size: 10 tokens", "Starting to load model drafter..."], 1)
    assert state["stage"] == "kv_cache"


def test_fatal_line_waits_for_its_cause_and_takes_the_first():
    state = _vllm.advance(_vllm.new_state(0), log("vllm_0.17_cuda_ok.log")[:10], 1)
    state = _vllm.advance(
        state,
        [
            "(EngineCore_DP0 pid=9) ERROR 03-01 10:00:00 [core.py:1] ValueError: Free memory on device cuda:0 "
            "(60.5/121.69 GiB) on startup is less than desired GPU memory utilization (0.8, 97.35 GiB).",
            "ERROR 03-01 10:00:00 [core.py:1] EngineCore failed to start.",
        ],
        2,
    )
    assert _vllm.failed(state, "spark-1", 2.5) is None
    problem = _vllm.failed(state, "spark-1", 4)
    assert (
        problem.id == "MEM-01"
        and problem.stage == "weights"
        and "only 60.5 of 121.69 GiB are free" in problem.found
        and problem.details["cause"]["fields"]["needed_gib"] == "97.35"
    )


def test_recorded_placement_wait_fails_after_30_seconds():
    state = _vllm.advance(_vllm.new_state(0), log("vllm_0.32_gpu_reserved.log"), 60)
    problem = _vllm.failed(state, "spark-1", 62)
    assert (problem.id, problem.stage) == ("RAY-01", "placement")
    assert _vllm.progress_line(state, "spark-1", 60) == "spark-1: placement waits for free GPUs for 30 s (60 s)"


def test_killed_from_outside_is_not_blamed_on_an_old_traceback():
    state = _vllm.advance(_vllm.new_state(0), log("vllm_0.32_ray_killed.log"), 30)
    problem = _vllm.died(state, "spark-1", "container spark-ray exited with code 137", 30, "", killed=True)
    assert problem.id == "RDY-06" and "AttributeError" not in problem.msg.partition("last lines")[0]
    assert "container spark-ray exited with code 137" in problem.found


def test_died_prefers_a_known_cause_of_the_other_log():
    problem = _vllm.died(
        _vllm.new_state(0),
        "spark-1",
        "container spark-ray exited with code 1",
        3,
        "ValueError: Ray component x is trying to use a port number 52365 that is used by other components.",
    )
    assert problem.id == "RAY-06" and "52365" in problem.found and "spark_port_offset" in problem.remedy


def test_progress_line_and_when_it_is_due():
    state = _vllm.advance(_vllm.new_state(0), ["Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:00<00:00]"], 10)
    assert _vllm.progress_line(state, "spark-1", 12) == "spark-1: weights 2/5 (12 s)"
    assert _vllm.progress_line(state, "spark-1", 52) == "spark-1: weights 2/5 (52 s, no news for 42 s)"
    assert _vllm.should_show({"stage": "placement", "at": 0}, state, 1)
    assert not _vllm.should_show({"stage": "weights", "at": 0}, state, 14)
    assert _vllm.should_show({"stage": "weights", "at": 0}, state, 15)


def test_a_long_compilation_has_what_spark_ready_timeout_gives():
    """The remedies name what a user can set: no role and no variable has a limit for one stage."""
    assert [_vllm.limits(None, total)["compile"] for total in (60, 3600, 7200)] == [2400, 2400, 4800]
    assert _vllm.limits({"compile": 5}, 7200)["compile"] == 5
    assert {**_vllm.limits(None, 7200), "compile": 2400} == _vllm.STAGE_TIMEOUTS
    state = _vllm.advance(_vllm.new_state(0), ["Dynamo bytecode transform time: 4.2 s"], 10)
    problem = _vllm.overdue(state, "spark-1", 2411, 3600, _vllm.limits(None, 3600))
    assert "stage compile" in problem.found and "run again" in problem.remedy and "raise spark_ready_timeout" in problem.remedy
    assert _vllm.overdue(state, "spark-1", 2411, 7200, _vllm.limits(None, 7200)) is None


def test_limits():
    assert _vllm.limits({"weights": "1200"})["weights"] == 1200.0 and _vllm.limits(None) == _vllm.STAGE_TIMEOUTS
    with pytest.raises(ValueError, match="there is no stage 'loading'"):
        _vllm.limits({"loading": 1})
    with pytest.raises(ValueError, match="'soon' for weights"):
        _vllm.limits({"weights": "soon"})
    assert set(_vllm.STAGE_TIMEOUTS) == set(_vllm.STAGES)


SAME = {"id": "a", "started_at": "1", "restart_count": 0, "exit_code": 1}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, SAME, None),
        (SAME, SAME, None),
        (SAME, {**SAME, "id": "b"}, "was replaced by another container"),
        (SAME, {**SAME, "restart_count": 1}, "was restarted by Docker (1 times) after 1"),
        (SAME, {**SAME, "started_at": "2"}, "was started again (at 2)"),
    ],
)
def test_identity(before, after, expected):
    assert _vllm.identity_change(before, after) == expected


@pytest.mark.parametrize(("code", "names"), [(137, ["ray", "vllm"]), (1, ["vllm", "ray"])])
def test_the_first_to_end_is_named_first(code, names):
    vllm = {"name": "vllm", "running": False, "finished_at": "1", "exit_code": code}
    ray = {"name": "ray", "running": False, "finished_at": "2", "exit_code": 137}
    up = {"name": "x", "running": True, "finished_at": "", "exit_code": 0}
    assert [c["name"] for c in _vllm.gone([up, ray, vllm], "ray")] == names


@pytest.mark.parametrize(
    ("answer", "path", "verdict", "text"),
    [
        (ok({"choices": [{"message": {"content": "hello"}}], "usage": {"completion_tokens": 3}}), _vllm.CHAT, "ok", "hello"),
        (
            ok({"choices": [{"message": {"content": None, "reasoning_content": "hm"}}], "usage": {"completion_tokens": 32}}),
            _vllm.CHAT,
            "ok",
            "hm",
        ),
        (ok({"choices": [{"message": {"content": None}}], "usage": {"completion_tokens": 1}}), _vllm.CHAT, "ok", ""),
        (ok({"choices": [{"text": " world"}]}), _vllm.PLAIN, "ok", "world"),
        (ok({"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 0}}), _vllm.CHAT, "error", ""),
        (ok([]), _vllm.CHAT, "error", ""),
        (
            status(400, '{"error": {"message": "default chat template is no longer allowed, so you must provide a chat template"}}'),
            _vllm.CHAT,
            "plain",
            "",
        ),
        (status(404), _vllm.CHAT, "plain", ""),
        (status(400, "max_tokens too large"), _vllm.CHAT, "fatal", ""),
        (status(404), _vllm.PLAIN, "fatal", ""),
        (status(503), _vllm.CHAT, "retry", ""),
        (status(500, "EngineDeadError"), _vllm.CHAT, "error", ""),
        ({"kind": "timeout", "status": 0, "body": "", "error": "", "seconds": 5}, _vllm.CHAT, "retry", ""),
    ],
)
def test_completions_are_judged_by_tokens(answer, path, verdict, text):
    found = _vllm.check_completion(answer, path)
    assert (found["verdict"], found["text"]) == (verdict, text)


def test_holder():
    sockets = [
        {"address": "*", "port": 30000, "process": "nginx", "pid": 7},
        {"address": "*", "port": 6379, "process": None, "pid": None},
    ]
    assert _vllm.holder(30000, sockets) == "port 30000 is held by nginx (pid 7)"
    assert _vllm.holder(6379, sockets) == "port 6379 is held by a process that cannot be seen"
    assert _vllm.holder(1, sockets).startswith("nothing holds port 1 now")


def test_models():
    assert _vllm.check_models(ok({"data": [{"id": "m", "max_model_len": 1024}]}), "m", "n") == {
        "ready": True,
        "max_model_len": 1024,
        "reason": "",
    }
    adapters = [{"id": "m", "max_model_len": 1024, "parent": None}, {"id": "sql", "parent": "m"}, {"id": "chat", "parent": "m"}]
    assert _vllm.check_models(ok({"data": adapters}), "m", "n")["max_model_len"] == 1024
    assert _vllm.check_models(status(503, "loading"), "m", "n")["reason"] == "/v1/models: HTTP 503: loading"
    for body, listed in (
        ({"data": [{"id": "glm"}]}, "glm"),
        ({"data": [{"id": "m"}, {"id": "x"}]}, "m, x"),
        ({"data": [{"id": "glm"}, {"id": "m", "parent": "glm"}]}, "glm"),
        ({"data": []}, "nothing"),
        ([], "nothing"),
    ):
        with pytest.raises(Problem) as caught:
            _vllm.check_models(ok(body), "m", "spark-1")
        assert caught.value.id == "RDY-07" and caught.value.found == f"/v1/models lists {listed}"


@pytest.mark.parametrize(("code", "with_key", "words"), [(401, False, "needs a key"), (403, True, "needs another key")])
def test_a_key_is_no_not_yet(code, with_key, words):
    problem = _vllm.needs_key(status(code), "spark-1", "/v1/models", with_key)
    assert problem.id == "RDY-10" and words in problem.found
    assert _vllm.needs_key(status(503), "spark-1", "/v1/models", with_key) is None
