# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Takes secrets out of what is kept for somebody else to read: logs, ``docker inspect``, settings.

PRIVATE to the collection. Pure functions. What is removed is named ``REMOVED``, so that a reader sees that something stood there.
"""

from __future__ import annotations

import re
import typing as t

REMOVED = "(removed)"

# In a name written in capitals (an environment variable) anywhere; in others as a word of its own, so that "max_tokens" and "monkey" stay.
_PARTS = ("TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "AUTHORIZATION")
_WORDS = {"token", "secret", "key", "password", "passwd", "passphrase", "credential", "credentials", "authorization", "apikey"}
_HARMLESS = re.compile(r"\d{1,9}|true|false|null|none|", re.IGNORECASE)
_NOTHING = re.compile(r"none|null|", re.IGNORECASE)
_HARMLESS_NAME = re.compile(r"TOKENIZER|(?:^|_)TOKENS(?:_|$)|(?:^|_)KEYS(?:_|$)|(?:^|_)token_", re.IGNORECASE)
SHORTEST = 8  # a shorter value is not looked for elsewhere: it would be found in ordinary words


def secret_name(name: str) -> bool:
    """Whether a value under this name is nobody's business: ``HF_TOKEN``, ``api-key``, ``Authorization``, but not ``max_tokens``."""
    if name.upper() == name and any(part in name for part in _PARTS):
        return True
    if name.endswith(("Error", "Exception", ".py")):
        return False
    words = re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", name)
    return any(word.lower() in _WORDS for word in words)


def _shown(name: str, value: str) -> bool:
    """No value, or a number or a switch under a name that only sounds like a secret (``TOKENIZERS_PARALLELISM=false``)."""
    return bool(_NOTHING.fullmatch(value.strip()) or (_HARMLESS_NAME.search(name) and _HARMLESS.fullmatch(value.strip())))


# name=value, name: value, "name": "value", 'name', 'value', --name value. The value ends with its quote, else at a blank, a comma or a bracket.
_ASSIGNED = re.compile(
    r"(?P<name>(?<![A-Za-z0-9_])[A-Za-z0-9_.-]*(?:token|secret|key|password|passwd|passphrase|credential|authorization)[A-Za-z0-9_.-]*)"
    r"(?P<between>[\"']?(?:\s*[=:]\s*|(?<=[\"']),\s*(?=[\"']))[\[(]?)(?P<scheme>(?:(?:Bearer|Basic|Token)\s+)?)"
    r"(?:(?P<quote>[\"'])(?P<quoted>(?:\\.|(?!(?P=quote)).)*)(?P=quote)|(?P<bare>[^\s,;\"'\])}\[({][^\s,;\"'\])}]*))",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"(?P<name>(?<!\S)[\"']?--?[A-Za-z-]*(?:token|secret|key|password|passphrase)[\"']?,?)(?P<between>\s+)(?P<value>(?!-)[^\s]+)",
    re.IGNORECASE,
)
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REMOVED),
    (re.compile(r"(?i)\b(?P<scheme>bearer|basic)\s+(?=[\w.~+/=-]*[\d._~+/=-])[\w.~+/=-]{8,}"), r"\g<scheme> " + REMOVED),
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"), REMOVED),
    (re.compile(r"\b(?:gh[pousr]|github_pat|glpat|nvapi|sk|xox[abpr])[_-][A-Za-z0-9_-]{16,}"), REMOVED),
    (re.compile(r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b"), REMOVED),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REMOVED),
    (re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"), REMOVED),
)
# Most lines of a log have nothing of it and are not looked at twice.
_HINT = re.compile(
    r"token|secret|key|passw|passphrase|credential|authoriz|bearer|basic|hf_|api_org_|gh[pousr]_|github_pat|glpat|nvapi|sk-|sk_|xox|AKIA|ASIA|eyJ|://[^\s/]*@",
    re.IGNORECASE,
)


def _assigned(found: re.Match[str]) -> str:
    name = found["name"]
    value = found["quoted"] if found["quote"] else found["bare"]
    if not secret_name(name) or _shown(name, value):
        return found[0]
    quote = found["quote"] or ""
    return f"{name}{found['between']}{found['scheme']}{quote}{REMOVED}{quote}"


def _option(found: re.Match[str]) -> str:
    name = found["name"].strip("\"',").lstrip("-")
    if not secret_name(name) or _shown(name, found["value"]):
        return found[0]
    return f"{found['name']}{found['between']}{REMOVED}"


def _line(line: str) -> str:
    if not _HINT.search(line):
        return line
    line = _OPTION.sub(_option, _ASSIGNED.sub(_assigned, line))
    for pattern, instead in _SHAPES[1:]:
        line = pattern.sub(instead, line)
    return line


def text(value: str, known: t.Iterable[str] = ()) -> str:
    """A text without secrets: what looks like one, what stands behind a name that says so, and each of ``known`` wherever it stands."""
    for secret in sorted({word for word in known if len(word) >= SHORTEST}, key=len, reverse=True):
        value = value.replace(secret, REMOVED)
    if "PRIVATE KEY-----" in value:
        pattern, instead = _SHAPES[0]
        value = pattern.sub(instead, value)
    return "".join(_line(line) for line in value.splitlines(keepends=True))


def data(value: t.Any, known: t.Iterable[str] = (), name: str = "") -> t.Any:
    """The same for what JSON can hold; ``NAME=value`` in a list (an environment) and an option's next word are seen, too."""
    known = list(known)
    if isinstance(value, t.Mapping):
        return {str(key): data(item, known, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        result = []
        hide = False
        for item in value:
            word = item if isinstance(item, str) else ""
            result.append(REMOVED if hide and word else data(item, known, name))
            hide = word.startswith("-") and "=" not in word and secret_name(word.lstrip("-"))
        return result
    if name and secret_name(name) and not isinstance(value, bool) and value is not None and not _shown(name, str(value)):
        return REMOVED if str(value) else value
    return _word(value, known) if isinstance(value, str) else value


def _word(value: str, known: t.Iterable[str]) -> str:
    name, separator, given = value.partition("=")
    if separator and re.fullmatch(r"-*[\w.-]+", name) and secret_name(name.lstrip("-")) and given and not _shown(name, given):
        return f"{name}={REMOVED}"
    return text(value, known)


def values(value: t.Any, name: str = "") -> set[str]:
    """The secrets that ``data`` would remove because of their name, to look for them in other texts as well."""
    if isinstance(value, t.Mapping):
        return set().union(*(values(item, str(key)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        found: set[str] = set()
        hide = False
        for item in value:
            word = item if isinstance(item, str) else ""
            found |= {word} if hide and word else values(item, name if secret_name(name) else "")
            hide = word.startswith("-") and "=" not in word and secret_name(word.lstrip("-"))
        return found
    if not isinstance(value, str):
        return set()
    if not name:
        name, separator, value = value.partition("=")
        if not separator or not re.fullmatch(r"-*[\w.-]+", name):
            return set()
    return {value} if secret_name(name.lstrip("-")) and len(value) >= SHORTEST and not _shown(name, value) else set()
