"""Limits that a caller states in numbers."""

from __future__ import annotations

import math
from numbers import Real

from ...errors import SelectionError


def positive_limit(name: str, limit: object) -> float:
    """``limit`` as a float; numpy's numbers are numbers too, ``True`` is none.

    Raises SelectionError unless it is finite and above 0.
    """
    number = math.nan
    if isinstance(limit, Real) and not isinstance(limit, bool):
        try:
            number = float(limit)
        except OverflowError:
            number = math.inf
    if not 0 < number < math.inf:
        shown = number if math.isinf(number) else repr(limit)[:80]
        raise SelectionError(f"{name}: expected a positive number, got {shown}")
    return number
