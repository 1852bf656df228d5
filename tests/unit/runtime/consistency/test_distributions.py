from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from nestforge.runtime.consistency.distributions import (
    kl_divergence,
    log_softmax,
    negative_log_likelihood,
    prefix_length,
    same_choice,
)

LOGITS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(2, 9)), elements=st.floats(-1e4, 1e4, width=32)
)


def test_log_softmax_by_hand() -> None:
    found = log_softmax(np.array([[0.0, math.log(3.0)]], np.float32))
    assert found.dtype == np.float64
    np.testing.assert_allclose(np.exp(found), [[0.25, 0.75]], rtol=1e-7)


def test_logits_of_any_size_neither_overflow_nor_vanish() -> None:
    found = log_softmax(np.array([[3e38, -3e38, 3e38], [-3e38, -3e38, -3e38]], np.float32))
    np.testing.assert_allclose(found[0, [0, 2]], -math.log(2))
    assert found[0, 1] < -1e38
    np.testing.assert_allclose(found[1], -math.log(3))


def test_kl_of_known_distributions_in_both_directions() -> None:
    """KL(P||Q) of P = (1/2, 1/2) and Q = (1/4, 3/4): 1/2 log 2 + 1/2 log 2/3; backwards 1/4 log 1/2 + 3/4 log 3/2."""
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert kl_divergence(p, q)[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert kl_divergence(q, p)[0] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))


def test_what_never_happens_adds_nothing() -> None:
    p = log_softmax(np.array([[0.0, -1e5]]))
    q = log_softmax(np.array([[0.0, 0.0]]))
    assert kl_divergence(p, q)[0] == pytest.approx(math.log(2))
    assert kl_divergence(q, p)[0] == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) + 1e5))


@given(LOGITS, st.integers(0, 10**6))
def test_kl_is_never_negative_and_nothing_from_itself(logits: np.ndarray, seed: int) -> None:
    other = np.random.default_rng(seed).permuted(logits, axis=-1)
    p, q = log_softmax(logits), log_softmax(other)
    assert (kl_divergence(p, q) >= 0).all()
    assert (kl_divergence(p, p) == 0).all()
    np.testing.assert_allclose(np.exp(p).sum(-1), 1.0)


@given(LOGITS, st.floats(-100, 100))
def test_a_shift_of_all_logits_changes_nothing(logits: np.ndarray, shift: float) -> None:
    wide = logits.astype(np.float64)
    np.testing.assert_allclose(log_softmax(wide + shift), log_softmax(wide), atol=1e-9)


def test_equal_logits_choose_the_first() -> None:
    reference = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 2.0, 2.0]])
    found = np.array([[5.0, 0.0, 5.0], [0.0, 5.0, 5.0], [0.0, 9.0, 0.0]])
    assert same_choice(reference, found).tolist() == [True, False, True]


def test_negative_log_likelihood_by_hand() -> None:
    p = np.log([[0.25, 0.75], [0.5, 0.5]])
    np.testing.assert_allclose(negative_log_likelihood(p, np.array([0, 1])), [math.log(4), math.log(2)])


@pytest.mark.parametrize(
    ("same", "length"), [([], 0), ([False, True], 0), ([True, True, False, True], 2), ([True, True], 2)]
)
def test_prefix_ends_at_the_first_difference(same: list[bool], length: int) -> None:
    assert prefix_length(np.array(same, bool)) == length
