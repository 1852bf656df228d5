from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.exporters.families.sparse_mixer.config import SPECTRAL
from nestforge.exporters.families.sparse_mixer.mixing import FoldedMixing, HalfTables, Mixing, fold, unfold
from support.mixer_reference import mix
from support.tiny_mixer import mixer_config

DENSE = {"moe_layers": (), "num_experts": 0, "expert_intermediate_size": None}


def folded(mixing: str, length: int, hidden: int) -> FoldedMixing:
    config = mixer_config(mixing=mixing, max_position_embeddings=length, hidden_size=hidden, **DENSE)
    return FoldedMixing(config, HalfTables(length), HalfTables(hidden))


@pytest.mark.parametrize("mixing", SPECTRAL)
@pytest.mark.parametrize(("length", "hidden"), [(16, 16), (15, 8), (8, 14), (1, 2), (2, 4), (3, 6)])
def test_is_the_transform(mixing: str, length: int, hidden: int) -> None:
    """Against an FFT, of even and odd sizes and of those that have no pairs."""
    x = torch.randn(2, length, hidden, generator=torch.Generator().manual_seed(0))
    expected = np.stack([mix(mixing, row.double().numpy(), None, None) for row in x])
    np.testing.assert_allclose(folded(mixing, length, hidden)(x).numpy(), expected, atol=2e-4)


@given(st.integers(1, 12), st.integers(0, 1))
def test_what_is_folded_unfolds(size: int, dim: int) -> None:
    x = torch.arange(float(size * 3)).reshape((size, 3) if dim == 0 else (3, size)) ** 2
    even, odd = fold(x, dim, 1), fold(x, dim, -1)
    assert (even.shape[dim], odd.shape[dim]) == (size // 2 + 1 if size > 1 else 1, (size - 1) // 2)
    pairs = (size - 1) // 2
    halved = even.clone()
    halved.narrow(dim, 1, pairs).mul_(0.5)
    assert torch.equal(unfold(halved, odd / 2, size, dim), x)


def test_an_odd_half_alone_is_zero_at_its_ends() -> None:
    whole = unfold(None, torch.tensor([1.0, 2, 3]), 8, 0)
    assert whole.tolist() == [0, 1, 2, 3, 0, -3, -2, -1]
    even = unfold(torch.tensor([5.0, 1, 2, 3, 7]), None, 8, 0)
    assert even.tolist() == [5, 1, 2, 3, 7, 3, 2, 1]


def test_tables_are_a_quarter_of_the_whole() -> None:
    tables = HalfTables(512)
    assert (tables.cosines.shape, tables.sines.shape) == ((257, 257), (255, 255))
    assert not tables.state_dict()


def test_a_folded_form_has_no_whole_matrices() -> None:
    module = folded("fourier", 8, 8)
    assert not isinstance(module, Mixing)
    assert not hasattr(module, "matrices")
