"""A table of text, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Column headings, with units, and rows of text. ``chosen`` are the rows that a budget chose, by number."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    chosen: Sequence[int] = ()
