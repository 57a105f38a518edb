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


def one_try(connection: t.Any) -> None:
    """A node that does not answer is told at once, not after several rounds of ssh's patience. Only ssh has rounds."""
    with contextlib.suppress(AnsibleError, KeyError, AttributeError):
        connection.set_option("reconnection_retries", 0)
