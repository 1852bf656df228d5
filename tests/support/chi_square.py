"""Pearson's chi-square test of samples against exact probabilities."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from scipy.stats import chi2

# Cells that are expected to be rarer are counted together.
_FEWEST_EXPECTED = 5.0
# A right sampler exceeds the limit once in 30,000.
_FALSE_ALARMS = 1 / 30_000


def chi_square(drawn: Sequence[Hashable], exact: Mapping[Hashable, float]) -> tuple[float, float]:
    """The statistic, and its limit for a right sampler. Fails where something impossible was drawn."""
    counts = Counter(drawn)
    assert all(exact[one] > 0 for one in counts), "drawn, and impossible"
    cells: list[list[float]] = [[0.0, 0.0]]  # seen and expected; the rare ones first
    for one, probability in exact.items():
        expected = probability * len(drawn)
        if expected >= _FEWEST_EXPECTED:
            cells.append([counts[one], expected])
        else:
            cells[0] = [cells[0][0] + counts[one], cells[0][1] + expected]
    cells = [cell for cell in cells if cell[1] > 0]
    return sum((o - e) ** 2 / e for o, e in cells), float(chi2.isf(_FALSE_ALARMS, len(cells) - 1))
