# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM platform plugin of the lab: the CPU platform, placed by Ray as if each node had one GPU.

STUB for the missing GPU. Ranks on two nodes do not share memory, so the all-reduce must go over Gloo on the fabric.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms.cpu import CpuPlatform


class SparklabCommunicator(CpuCommunicator):
    @staticmethod
    def _all_group_ranks_share_shm_group_name(*_args, **_kwargs) -> bool:
        return False


class SparklabPlatform(CpuPlatform):
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "sparklab_platform.SparklabCommunicator"
