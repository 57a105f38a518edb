# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""All-reduce of the lab's ranks: they are on two nodes and share no memory, so it must go over Gloo on the fabric."""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class SparklabCommunicator(CpuCommunicator):
    @staticmethod
    def _all_group_ranks_share_shm_group_name(*_args, **_kwargs) -> bool:
        return False
