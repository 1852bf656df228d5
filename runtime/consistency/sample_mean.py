"""A figure as a mean over samples, and how far the mean of that few may be off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..inputs.arrays import Array


@dataclass(frozen=True)
class SampleMean:
    """Of every sample the sum of a figure and over how many ``counts`` (positions, or 1), float64 ``[n]``."""

    totals: Array
    counts: Array

    @property
    def mean(self) -> float:
        """Over all counts, so that a sample of more positions counts more."""
        return float(self.totals.sum() / self.counts.sum())

    @property
    def error(self) -> float | None:
        """Its standard error, of samples drawn independently (positions of one are not); None of a single sample.

        That of a ratio of sums, to first order: Cochran, Sampling Techniques, section 6.3.
        """
        samples = len(self.counts)
        if samples < 2:
            return None
        rest = self.totals - self.mean * self.counts
        return float(np.sqrt(samples / (samples - 1) * np.square(rest).sum()) / self.counts.sum())


def mean_over(values: Array) -> SampleMean:
    """Of one value a sample, ``[n]``."""
    return SampleMean(values.astype(np.float64), np.ones(len(values)))
