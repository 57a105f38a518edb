# Copyright (c) 2026 dgxspark.serving contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""One shape for every failure of this collection: node, stage, found, expected, remedy.

PRIVATE to the collection.
"""

from __future__ import annotations

import typing as t


class Problem(Exception):
    """A refusal or a failure that a user can act on.

    ``id`` is the row of docs/failure-modes.md (``NET-12``) or a short name of our own (``port-held``).
    ``node`` is the inventory name of the node where it was found ("" when it is not about one node).
    """

    def __init__(
        self,
        id: str,  # noqa: A002  # pylint: disable=redefined-builtin
        *,
        found: str,
        expected: str,
        remedy: str,
        node: str = "",
        stage: str = "",
        **details: t.Any,
    ) -> None:
        super().__init__(id)
        self.id = id
        self.node = node
        self.stage = stage
        self.found = found
        self.expected = expected
        self.remedy = remedy
        self.details = details

    @property
    def msg(self) -> str:
        """The sentence a user reads: ``spark-2: found … Expected … Remedy: …``."""
        where = ": ".join(part for part in (self.node, self.stage) if part)
        text = f"found {self.found}; expected {self.expected}. Remedy: {self.remedy}"
        return f"{where}: {text}" if where else text

    def __str__(self) -> str:
        return self.msg

    def as_dict(self) -> dict[str, t.Any]:
        """The ``problem`` that modules return beside ``msg``."""
        result: dict[str, t.Any] = {
            "id": self.id,
            "node": self.node,
            "stage": self.stage,
            "found": self.found,
            "expected": self.expected,
            "remedy": self.remedy,
        }
        if self.details:
            result["details"] = self.details
        return result
