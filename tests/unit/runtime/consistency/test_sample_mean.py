from __future__ import annotations

import numpy as np
import pytest
from nestforge.runtime.consistency.sample_mean import SampleMean, mean_over


def test_of_one_value_a_sample_it_is_the_mean_and_its_standard_error() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    found = mean_over(values)
    assert found.mean == 4.0
    assert found.error == pytest.approx(values.std(ddof=1) / 2)


def test_samples_of_more_positions_count_more() -> None:
    found = SampleMean(np.array([1.0, 6.0]), np.array([1.0, 2.0]))
    assert found.mean == pytest.approx(7 / 3)
    # what is left of each sample is 1 - 7/3 and 6 - 14/3
    assert found.error == pytest.approx(np.sqrt(2 * 2 * (4 / 3) ** 2) / 3)


def test_of_one_sample_no_error_is_known() -> None:
    assert mean_over(np.array([3.0])).error is None


def test_the_error_is_what_means_of_other_samples_differ_by() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 40, (2000, 50)).astype(np.float64)
    totals = counts * 0.7 + rng.standard_normal(counts.shape) * np.sqrt(counts)
    drawn = [SampleMean(*each) for each in zip(totals, counts, strict=True)]
    assert np.mean([one.error for one in drawn]) == pytest.approx(np.std([one.mean for one in drawn]), rel=0.05)
