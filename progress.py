"""How a long job tells what it has done."""

from __future__ import annotations

from collections.abc import Callable

# (stage, done, total): a stage counts its parts, and ends with done == total, where total may be 1 for the whole.
Progress = Callable[[str, int, int], None]


def silent(_stage: str, _done: int, _total: int) -> None:
    """Reports nothing."""
