# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of the repository itself share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """Every file that is in git or would be added, relative to the top; links and deleted files left out."""
    result = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted(set(filter(None, result.stdout.split("\0"))))
    return [Path(name) for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


@pytest.fixture(autouse=True)
def _no_ansible_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting of the caller's shell must not decide a test."""
    for name in [name for name in os.environ if name.startswith("ANSIBLE_")]:
        monkeypatch.delenv(name)
