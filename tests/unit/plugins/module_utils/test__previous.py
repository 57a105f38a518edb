# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest

from ansible_collections.dgxspark.serving.plugins.module_utils import _previous


@pytest.mark.parametrize(
    ("args", "url"),
    [
        (["serve", "/m", "--host", "0.0.0.0", "--port", "30000"], "http://127.0.0.1:30000"),
        (["serve", "/m", "--host=192.168.200.12", "--port=8080"], "http://192.168.200.12:8080"),
        (["serve", "/m", "--host", "fd00::5", "--port", "30000"], "http://[fd00::5]:30000"),
        (["serve", "/m", "--host", "::", "--port", "30000"], "http://127.0.0.1:30000"),
        (["serve", "/m"], "http://127.0.0.1:8000"),
        (["serve", "/m", "--port"], "http://127.0.0.1:8000"),
    ],
)
def test_where_a_server_answers(args, url):
    assert _previous.api_url(args) == url


def test_what_is_kept_of_a_container():
    base = {"id": "a", "started_at": "t", "image": "x:1", "labels": {"dgxspark.serving.served_model_name": "tiny"}}
    server = _previous.kept({**base, "args": ["serve", "/m", "--port", "30000", "--headless"]})
    assert (server["served_model_name"], server["url"], server["headless"]) == ("tiny", "http://127.0.0.1:30000", True)
    worker = _previous.kept(
        {**base, "args": ["start", "--address=192.168.200.12:6379", "--node-ip-address=192.168.200.13", "--num-gpus=2"]}
    )
    assert (worker["address"], worker["port"], worker["gpus"]) == ("192.168.200.13", 0, 2)
