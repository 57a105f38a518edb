# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM platform plugin of the lab: the CPU platform, placed by Ray as if each node had one GPU.

STUB for the missing GPU. The communicator is named, not imported: importing it here would be circular.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class SparklabPlatform(CpuPlatform):
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "sparklab_communicator.SparklabCommunicator"
