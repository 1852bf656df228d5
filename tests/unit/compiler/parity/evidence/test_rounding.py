from __future__ import annotations

import numpy as np
import pytest
from nestforge.compiler.parity.evidence.rounding import Rounding, rounding, with_rounding


def test_rounding_is_what_float32_is_off_by_at_each_place() -> None:
    reference = np.array([[1.0, 2.0], [3.0, 4.0]])
    own = rounding(reference, np.array([[1.0, 2.5], [3.0, 4.0]], np.float32))
    assert np.asarray(own.max_abs).tolist() == [0.5, 0.0]
    assert np.asarray(own.rms).tolist() == pytest.approx([0.5 / 2**0.5, 0.0])
    assert (own.largest, own.rms_of_all) == (0.5, pytest.approx(0.25))
    worst = own.worst(Rounding(np.array([0.1, 0.2]), np.array([0.7, 0.1])))
    assert np.asarray(worst.max_abs).tolist() == [0.5, 0.2]
    assert np.asarray(worst.rms).tolist() == [0.7, 0.1]


@pytest.mark.parametrize(
    ("shape", "places"), [((4,), (4,)), ((4, 3), (4,)), ((4, 3, 2), (4, 3)), ((4, 3, 2, 5), (4, 3))]
)
def test_a_place_is_a_position_or_a_row(shape: tuple[int, ...], places: tuple[int, ...]) -> None:
    assert np.shape(rounding(np.ones(shape), np.ones(shape, np.float32)).max_abs) == places


def test_a_place_that_is_not_finite_is_off_by_all() -> None:
    own = rounding(np.ones((3, 2)), np.array([[1, np.nan], [1, 1], [-np.inf, 1]], np.float32))
    assert np.asarray(own.max_abs).tolist() == np.asarray(own.rms).tolist() == [np.inf, 0, np.inf]


def test_beyond_half_of_a_limit_four_times_the_rest_is_allowed() -> None:
    assert with_rounding(np.array([1.0, 1.0, 1.0]), np.array([0.5, 0.6, 2.0])) == pytest.approx([1.0, 1.4, 7.0])
