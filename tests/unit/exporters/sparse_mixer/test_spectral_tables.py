from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_reference import mix
from nestforge.exporters.sparse_mixer.config import Mixing
from nestforge.exporters.sparse_mixer.spectral_tables import cos_sin, spectral_matrices


@pytest.mark.parametrize("size", [1, 2, 7, 16, 512])
def test_the_tables_are_the_two_parts_of_the_dft_matrix(size: int) -> None:
    cosines, sines = cos_sin(size)
    dft = np.fft.fft(np.eye(size))
    np.testing.assert_allclose(cosines.numpy(), dft.real, atol=1e-12)
    np.testing.assert_allclose(-sines.numpy(), dft.imag, atol=1e-12)


@settings(max_examples=30)
@given(
    mixing=st.sampled_from(["fourier", "hartley", "hartley_plus", "hartley_separable"]),
    n=st.integers(1, 12),
    d=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_the_sum_of_products_is_the_transform_by_fft(mixing: Mixing, n: int, d: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((n, d))
    left, right = (table.double().numpy() for table in spectral_matrices(mixing, n, d))
    parts = left.shape[1] // n
    assert left.shape == (n, parts * n)
    assert right.shape == (d, parts * d)
    total = sum(left[:, p * n : p * n + n] @ x @ right[:, p * d : p * d + d] for p in range(parts))
    np.testing.assert_allclose(total, mix(mixing, x), atol=2e-4)


def test_the_three_hartleys_are_three_functions_and_plus_is_the_coded_one_turned_around() -> None:
    x = np.random.default_rng(0).standard_normal((6, 5))
    coded, plus, separable = (mix(kind, x) for kind in ("hartley", "hartley_plus", "hartley_separable"))
    rows, columns = -np.arange(6) % 6, -np.arange(5) % 5
    np.testing.assert_allclose(plus, coded[rows][:, columns], atol=1e-12)
    assert not np.allclose(coded, plus, atol=0.1)
    assert not np.allclose(coded, separable, atol=0.1)
    assert not np.allclose(plus, separable, atol=0.1)


def test_learned_mixing_has_no_tables() -> None:
    with pytest.raises(ValueError, match=r"^mixing linear: expected a spectral one$"):
        spectral_matrices("linear", 4, 4)
