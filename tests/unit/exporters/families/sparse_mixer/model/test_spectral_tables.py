from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.exporters.families.sparse_mixer.config import SPECTRAL, MixingKind
from nestforge.exporters.families.sparse_mixer.mixing import cos_sin, spectral_matrices
from support.mixer_reference import mix


@pytest.mark.parametrize("size", [1, 2, 7, 16, 512])
def test_the_tables_are_the_two_parts_of_the_dft_matrix(size: int) -> None:
    cosines, sines = cos_sin(size)
    dft = np.fft.fft(np.eye(size))
    np.testing.assert_allclose(cosines.numpy(), dft.real, atol=1e-12)
    np.testing.assert_allclose(-sines.numpy(), dft.imag, atol=1e-12)


@settings(max_examples=30)
@given(
    mixing=st.sampled_from(list(SPECTRAL)),
    n=st.integers(1, 12),
    d=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_the_sum_of_products_is_the_transform_by_fft(mixing: MixingKind, n: int, d: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((n, d))
    left, right = (table.double().numpy() for table in spectral_matrices(mixing, n, d))
    parts = left.shape[1] // n
    assert left.shape == (n, parts * n)
    assert right.shape == (d, parts * d)
    total = sum(left[:, p * n : p * n + n] @ x @ right[:, p * d : p * d + d] for p in range(parts))
    np.testing.assert_allclose(total, mix(mixing, x), atol=2e-4)


HARTLEYS = [kind for kind in SPECTRAL if kind.startswith("hartley")]


def test_the_hartleys_are_four_functions_and_plus_is_the_other_turned_around() -> None:
    x = np.random.default_rng(0).standard_normal((6, 5))
    found = {kind: mix(kind, x) for kind in HARTLEYS}
    rows, columns = -np.arange(6) % 6, -np.arange(5) % 5
    for kind in ("hartley", "hartley_separable"):
        np.testing.assert_allclose(found[f"{kind}_plus"], found[kind][rows][:, columns], atol=1e-12)
    assert len(found) == 4
    for one, other in combinations(found.values(), 2):
        assert not np.allclose(one, other, atol=0.1)


@pytest.mark.parametrize("exponent", [-1, 1])
@pytest.mark.parametrize("separable", [False, True])
def test_the_papers_formula_under_either_sign_of_the_dft(exponent: int, separable: bool) -> None:
    """The footnote adds the imaginary part to the real one; a DFT has negative exponents, or positive ones."""
    x = np.random.default_rng(0).standard_normal((6, 5))

    def dft(size: int) -> np.ndarray:
        return np.exp(exponent * 2j * np.pi * np.outer(np.arange(size), np.arange(size)) / size)

    if separable:
        along = [dft(size).real + dft(size).imag for size in (6, 5)]
        expected = along[0] @ x @ along[1]
    else:
        spectrum = dft(6) @ x @ dft(5)
        expected = spectrum.real + spectrum.imag
    kind = ("hartley_separable" if separable else "hartley") + ("_plus" if exponent < 0 else "")
    np.testing.assert_allclose(mix(kind, x), expected, atol=1e-12)


def test_learned_mixing_has_no_tables() -> None:
    with pytest.raises(ValueError, match=r"^mixing linear: expected a spectral one$"):
        spectral_matrices("linear", 4, 4)
