# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _redact as r

GONE = r.REMOVED


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "VLLM_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "DBPASSWORD",
        "api-key",
        "api_key",
        "apiKey",
        "Authorization",
        "hf_token",
        "token",
        "X-Api-Key",
        "SSH_PASSPHRASE",
        "MYTOKENX",
    ],
)
def test_names_of_secrets(name):
    assert r.secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_num_batched_tokens", "tokenizer", "skip_tokenizer_init", "monkey", "keyboard", "NCCL_IB_HCA", "keys", ""]
)
def test_names_of_nothing(name):
    assert not r.secret_name(name)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("HF_TOKEN=abcdef ok", f"HF_TOKEN={GONE} ok"),
        ("export HF_TOKEN='a b c' ok", f"export HF_TOKEN='{GONE}' ok"),
        ('{"HF_TOKEN": "abc", "x": 1}', f'{{"HF_TOKEN": "{GONE}", "x": 1}}'),
        ("non-default args: {'api_key': ['sekret12'], 'port': 30000}", None),
        ("args: {'api_key': 'sekret12', 'max_model_len': 1024}", f"args: {{'api_key': '{GONE}', 'max_model_len': 1024}}"),
        ("args: {'hf_token': None, 'port': 1}", "args: {'hf_token': None, 'port': 1}"),
        ("args: {'hf_token': secret1, 'port': 1}", f"args: {{'hf_token': {GONE}, 'port': 1}}"),
        ("Authorization: Bearer abc.def-123 next", f"Authorization: Bearer {GONE} next"),
        ("authorization: Basic dXNlcjpwYXNz", f"authorization: Basic {GONE}"),
        ("'Authorization': 'Bearer abcdefgh1'}", f"'Authorization': '{GONE}'}}"),
        ("sent Bearer abcdefgh12345 there", f"sent Bearer {GONE} there"),
        ("the bearer of this letter is trusted", "the bearer of this letter is trusted"),
        ("used hf_AbCdEfGhIjKlMnOp here", f"used {GONE} here"),
        ("vllm serve --api-key sekret --port 30000", f"vllm serve --api-key {GONE} --port 30000"),
        ("vllm serve --api-key=sekret --port 30000", f"vllm serve --api-key={GONE} --port 30000"),
        ("GET https://user:pw@hub.example/x", f"GET https://{GONE}@hub.example/x"),
        ("password: hunter2", f"password: {GONE}"),
        ("key sk-abcdefghijklmnopqrstuv", f"key {GONE}"),
        ("nvapi-abcdefghijklmnop_qrst", GONE),
        ("a eyJhbGciOiJI.eyJzdWIiOiIx.c2ln b", f"a {GONE} b"),
        ("TOKENIZERS_PARALLELISM=false", "TOKENIZERS_PARALLELISM=false"),
        ("max_num_batched_tokens=2048, tokenizer='/m'", "max_num_batched_tokens=2048, tokenizer='/m'"),
        (
            "prompt_token_ids_len=[5], stop_token_ids=[], 'token_budgets': [1]",
            "prompt_token_ids_len=[5], stop_token_ids=[], 'token_budgets': [1]",
        ),
        ("2026 WARNING authentication_token_setup.py:142 -- off", "2026 WARNING authentication_token_setup.py:142 -- off"),
        ("Avg prompt throughput: 3.0 tokens/s", "Avg prompt throughput: 3.0 tokens/s"),
        ("GPU KV cache size: 65,536 tokens", "GPU KV cache size: 65,536 tokens"),
        ("KeyError: 'model.layers.0'", "KeyError: 'model.layers.0'"),
    ],
)
def test_text(line, expected):
    done = r.text(line)
    if expected is None:
        assert "sekret12" not in done and "30000" in done
    else:
        assert done == expected


def test_text_of_several_lines_keeps_its_lines():
    assert r.text("a\nHF_TOKEN=x\r\nb") == f"a\nHF_TOKEN={GONE}\r\nb"


def test_a_private_key_goes_as_a_whole():
    kind = "OPENSSH PRIVATE KEY-----"
    key = f"-----BEGIN {kind}\nAAAA\nBBBB\n-----END {kind}"
    assert r.text(f"x\n{key}\ny") == f"x\n{GONE}\ny"
    assert r.text(f"x\n{key[:50]}") == f"x\n{GONE}"  # cut off


def test_known_values_go_wherever_they_stand():
    assert r.text("it said s3cr3tvalue and s3cr3tvalue2", ["s3cr3tvalue", "s3cr3tvalue2", "it"]) == f"it said {GONE} and {GONE}"


INSPECT = {
    "Name": "/spark-vllm",
    "Config": {
        "Env": [
            "HF_TOKEN=hf_abc",
            "VLLM_API_KEY=topsecretvalue",
            "NCCL_SOCKET_IFNAME==enp1s0f1np1",
            "TOKENIZERS_PARALLELISM=false",
            "A_KEY=",
        ],
        "Cmd": ["serve", "/models/m", "--api-key", "othersecret", "--port", "30000", "--hf-token=thirdsecret"],
        "Labels": {"dgxspark.serving": "1"},
    },
    "api_key": ["x"],
    "nested": {"password": "pw", "empty_token": "", "token": None, "key": False, "max_tokens": 8},
}


def test_data():
    done = r.data(INSPECT)
    assert done["Config"]["Env"] == [
        f"HF_TOKEN={GONE}",
        f"VLLM_API_KEY={GONE}",
        "NCCL_SOCKET_IFNAME==enp1s0f1np1",
        "TOKENIZERS_PARALLELISM=false",
        "A_KEY=",
    ]
    assert done["Config"]["Cmd"] == ["serve", "/models/m", "--api-key", GONE, "--port", "30000", f"--hf-token={GONE}"]
    assert done["Config"]["Labels"] == INSPECT["Config"]["Labels"]
    assert done["api_key"] == [GONE]
    assert done["nested"] == {"password": GONE, "empty_token": "", "token": None, "key": False, "max_tokens": 8}


def test_values_are_what_data_removes_by_name():
    assert r.values(INSPECT) == {"topsecretvalue", "othersecret", "thirdsecret"}
