# Copyright (c) 2026 dgxspark.serving contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Runs the module hf_snapshot and shows how far it is."""

from __future__ import annotations

from ansible_collections.dgxspark.serving.plugins.plugin_utils._progress import ProgressAction


class ActionModule(ProgressAction):
    pass
