# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One prompt to an OpenAI-compatible server and its answer as a stream of server-sent events.

PRIVATE to the collection. Pure functions over plain data.
"""

from __future__ import annotations

import dataclasses
import json
import typing as t

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def request(path: str, model: str, prompt: str, max_tokens: int) -> str:
    """The body of a streamed completion, as JSON."""
    body: dict[str, t.Any] = {"model": model, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return json.dumps(body)


def shown(text: str) -> str:
    """Text for a terminal: no escape sequences of a model's making."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


@dataclasses.dataclass
class Stream:
    """What has come so far. ``feed`` takes bytes as they come and returns the new text; ``tokens`` and ``finish`` come at the end."""

    pending: bytes = b""
    body: bytes = b""
    text: str = ""
    reasoning: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    finish: str = ""
    error: str = ""

    def feed(self, data: bytes) -> str:
        """New text to show: answer and, before it, reasoning. Incomplete lines wait for the rest."""
        self.body = (self.body + data)[:4096]  # an error is one JSON object without events
        *lines, self.pending = (self.pending + data).split(b"\n")
        return "".join(self._event(line.decode("utf-8", "replace").strip()) for line in lines)

    def _event(self, line: str) -> str:
        if not line.startswith("data:") or line == "data: [DONE]":
            return ""
        try:
            event = json.loads(line[5:])
        except ValueError:
            return ""
        if not isinstance(event, dict):
            return ""
        if event.get("error"):
            error = event["error"]
            self.error = str(error.get("message") if isinstance(error, dict) else error)
        usage = event.get("usage") or {}
        self.tokens = int(usage.get("completion_tokens") or self.tokens)
        self.prompt_tokens = int(usage.get("prompt_tokens") or self.prompt_tokens)
        choice = (event.get("choices") or [{}])[0]
        self.finish = str(choice.get("finish_reason") or self.finish)
        delta = choice.get("delta") or {}
        thought = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
        said = str(delta.get("content") or choice.get("text") or "")
        self.reasoning += thought
        self.text += said
        return shown(thought + ("\n\n" if said and self.reasoning and self.text == said else "") + said)

    @property
    def message(self) -> str:
        """What a server that refused said."""
        if self.error:
            return self.error
        text = self.body.decode("utf-8", "replace").strip()
        try:
            found = json.loads(text)
        except ValueError:
            return " ".join(text.split())[:300]
        error = found.get("error", found) if isinstance(found, dict) else found
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def summary(stream: Stream, seconds: float) -> str:
    """``42 tokens in 3.1 s (13.5 tokens/s), prompt 11 tokens``."""
    rate = f" ({stream.tokens / seconds:.1f} tokens/s)" if seconds > 0 and stream.tokens else ""
    cut = "; cut off at the limit (spark_max_tokens)" if stream.finish == "length" else ""
    return f"{stream.tokens} tokens in {seconds:.1f} s{rate}, prompt {stream.prompt_tokens} tokens{cut}"
