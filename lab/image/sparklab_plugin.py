# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Entry point of the lab's platform plugin. Apart from the platform itself: importing that one here would be circular."""

from __future__ import annotations


def register() -> str:
    return "sparklab_platform.SparklabPlatform"
