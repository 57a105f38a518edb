# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The head may be the machine that runs the playbook, without ssh."""

from __future__ import annotations

from ansible.playbook.play_context import PlayContext
from ansible.plugins.loader import connection_loader

from ansible_collections.dgxspark.serving.plugins.plugin_utils._connection import one_try


def connection(name):
    return connection_loader.get(name, PlayContext(), "/dev/null")


def test_ssh_tries_once():
    ssh = connection("ssh")
    ssh.set_options()
    one_try(ssh)
    assert ssh.get_option("reconnection_retries") == 0


def test_a_connection_without_rounds_stays_as_it_is():
    one_try(connection("local"))
