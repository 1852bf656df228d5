"""The rule by which a measured latency may not be trusted."""

from __future__ import annotations

import pytest
from nestforge.bundle.build_record import Noise, is_noisy, noisy_figures


@pytest.mark.parametrize(
    ("noise", "problem"),
    [
        (Noise(20, 0.25, 1.10, 0.20), None),
        (Noise(3, 0.0), None),
        (Noise(20, 0.1, 1.32, 0.0), "measured twice it differs by 32% (at most 10%)"),
        (Noise(20, 0.26, 1.0, 0.0), "its runs spread by 26% (at most 25%)"),
        (Noise(20, 0.1, 1.0, 0.63), "other programs used 63% of the CPUs (at most 20%)"),
        (
            Noise(20, 0.4, 1.5, None),
            "measured twice it differs by 50% (at most 10%), its runs spread by 40% (at most 25%)",
        ),
    ],
)
def test_a_figure_is_noisy_beyond_any_of_three_limits(noise: Noise, problem: str | None) -> None:
    assert noise.problem == problem
    assert is_noisy(noise) is (problem is not None)


def test_of_a_figure_without_noise_nothing_is_known() -> None:
    assert not is_noisy(None)


def test_noisy_figures_are_counted_among_all() -> None:
    quiet, noisy = Noise(20, 0.1, 1.0, 0.0), Noise(3, 0.3, 1.0, 0.0)
    assert noisy_figures([("a", quiet), ("a", noisy), ("b", quiet), ("c", noisy)]) == (
        "2 of 4 measured latencies, in 2 of 3 engines, are noisy (a: its runs spread by 30% (at most 25%))"
    )
    assert noisy_figures([("a", quiet)]) is None
