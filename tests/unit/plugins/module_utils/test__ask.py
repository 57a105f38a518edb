# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _ask


def event(delta=None, finish=None, usage=None, **more):
    body = {"choices": [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage, **more}
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


# The form of a streamed chat of vLLM 0.32: role first, then text, usage in an event without choices, then [DONE].
CHAT = (
    event({"role": "assistant", "content": ""})
    + event({"content": "Grüße"})
    + event({"content": " 42"}, "stop")
    + event(usage={"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23})
    + b"data: [DONE]\n\n"
)


def test_the_request():
    chat = json.loads(_ask.request(_ask.CHAT, "m", 'a "b"', 9))
    assert chat["messages"] == [{"role": "user", "content": 'a "b"'}] and chat["stream_options"] == {"include_usage": True}
    plain = json.loads(_ask.request(_ask.PLAIN, "m", "p", 9))
    assert plain["prompt"] == "p" and "messages" not in plain and plain["max_tokens"] == 9


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_in_pieces(size):
    """Pieces end anywhere, also within a character."""
    stream = _ask.Stream()
    shown = "".join(stream.feed(CHAT[at : at + size]) for at in range(0, len(CHAT), size))
    assert shown == stream.text == "Grüße 42"
    assert (stream.tokens, stream.prompt_tokens, stream.finish) == (3, 20, "stop")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_apart(field):
    stream = _ask.Stream()
    assert stream.feed(event({field: "Hm."}) + event({"content": "4"}) + event({"content": "2"})) == "Hm.\n\n42"
    assert (stream.reasoning, stream.text) == ("Hm.", "42")


def test_plain_completions():
    stream = _ask.Stream()
    assert stream.feed(b'data: {"choices": [{"text": "abc", "finish_reason": "length"}]}\n') == "abc"
    assert "spark_max_tokens" in _ask.summary(stream, 1.0)


def test_no_escape_sequences_on_the_terminal():
    stream = _ask.Stream()
    assert stream.feed(event({"content": "a\x1b[2Jb\nc\td\x07"})) == "a[2Jb\nc\td"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": {"message": "The model `x` does not exist.", "code": 404}}', "The model `x` does not exist."),
        (b'{"detail": "no"}', "{'detail': 'no'}"),
        (b"Bad  Gateway", "Bad Gateway"),
        (b'data: {"error": {"message": "engine is dead"}}\n', "engine is dead"),
        (b"data: {broken\ndata: 7\n", "data: {broken data: 7"),
        (b"", ""),
    ],
)
def test_what_a_server_that_refused_said(body, expected):
    stream = _ask.Stream()
    assert stream.feed(body) == ""
    assert stream.message == expected


def test_summary():
    stream = _ask.Stream()
    stream.feed(CHAT)
    assert _ask.summary(stream, 1.5) == "3 tokens in 1.5 s (2.0 tokens/s), prompt 20 tokens"
    assert _ask.summary(_ask.Stream(), 0.0) == "0 tokens in 0.0 s, prompt 0 tokens"
