# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the action plugins ask of a connection.

PRIVATE to the collection.
"""

from __future__ import annotations

import contextlib
import typing as t

from ansible.errors import AnsibleError
from ansible.utils.display import Display

display = Display()


def one_try(connection: t.Any) -> None:
    """A node that does not answer is told at once, not after several rounds of ssh's patience. Only ssh has rounds."""
    with contextlib.suppress(AnsibleError, KeyError, AttributeError):
        connection.set_option("reconnection_retries", 0)


def let_go(connection: t.Any) -> bool:
    """Close the connection that ssh keeps for later tasks, so that the next one is new; False where there is no such thing."""
    try:
        connection.reset()
    except Exception as exc:  # pylint: disable=broad-except # whatever a connection plugin raises: the next try finds out
        display.vvv(f"no connection to close: {exc}")
        return False
    return True


# What ssh and Ansible say when it was not the node that failed but a connection of an earlier run, which ssh keeps for minutes (ControlPersist): after
# a reboot of the node, another address or another MTU it hangs until ssh gives it up.
_KEPT = ("Data could not be sent to remote host", "mux_client", "Shared connection to", "Broken pipe")


def let_go_of_kept(connection: t.Any, text: str) -> bool:
    """Whether a failure with this text may be that of a kept connection; that one is let go, so that another try makes a new one."""
    return any(word in text for word in _KEPT) and let_go(connection)
