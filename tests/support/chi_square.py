"""Pearson's chi-square test of what was drawn against exact probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from math import sqrt

# Cells that are expected to be rarer are counted together.
_FEWEST_EXPECTED = 5.0
# Of a normal variable: passed by one right sampler in 30,000.
_QUANTILE = 4.0


def chi_square_statistic(drawn: Sequence[Hashable], exact: Mapping[Hashable, float]) -> tuple[float, int]:
    """The statistic and its cells. Fails where something was drawn that has no probability."""
    counts = Counter(drawn)
    assert all(exact[one] > 0 for one in counts), "drawn, and impossible"
    observed: list[float] = [0.0]
    expected: list[float] = [0.0]  # the first cell holds the rare ones
    for one, probability in exact.items():
        often = probability * len(drawn) >= _FEWEST_EXPECTED
        if often:
            observed.append(0.0)
            expected.append(0.0)
        place = len(expected) - 1 if often else 0
        observed[place] += counts[one]
        expected[place] += probability * len(drawn)
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    return sum((o - e) ** 2 / e for o, e in cells), len(cells)


def chi_square_limit(degrees: int) -> float:
    """What the statistic of a right sampler hardly ever exceeds (Wilson and Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + _QUANTILE * sqrt(part)) ** 3
