# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prints ``N passed, M failed`` for the JUnit reports named on the command line, plus ``--passed``/``--failed`` counted elsewhere."""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ET
from pathlib import Path


def count(report: Path) -> tuple[int, int]:
    """(passed, failed) of one report; errors are failures, skipped tests are neither. No readable report is one failure."""
    try:
        suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314  (written by our own pytest)
    except (OSError, ET.ParseError):
        return 0, 1
    failed = sum(int(suite.get("failures", 0)) + int(suite.get("errors", 0)) for suite in suites)
    total = sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites)
    return max(total - failed, 0), failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passed", type=int, default=0)
    parser.add_argument("--failed", type=int, default=0)
    parser.add_argument("reports", nargs="*", type=Path)
    args = parser.parse_args()
    counts = [count(report) for report in args.reports]
    print(f"{args.passed + sum(c[0] for c in counts)} passed, {args.failed + sum(c[1] for c in counts)} failed")


if __name__ == "__main__":
    main()
