# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
from copied_image import empty_worker, registry, usual, whole

__all__ = ["empty_worker", "registry", "usual", "whole"]
