# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Shows the progress of the module of the same name."""

from __future__ import annotations

from ansible_collections.dgxspark.serving.plugins.plugin_utils.progress import ProgressAction


class ActionModule(ProgressAction):
    """A line for each node every few seconds on a terminal, every 30 s elsewhere."""
