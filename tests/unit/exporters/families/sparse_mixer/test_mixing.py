"""Tests."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.exporters.families.sparse_mixer.config import SPECTRAL, MixingKind, SparseMixerConfig
from nestforge.exporters.families.sparse_mixer.config import MixingKind as Kind
from nestforge.exporters.families.sparse_mixer.mixing import (
    FoldedMixing,
    HalfTables,
    LinearMixing,
    VectorMixing,
    circulant,
    cos_sin,
    fold,
    make_mixings,
    spectral_matrices,
    toeplitz,
    unfold,
)
from support.mixer_reference import mix
from support.tiny_mixer import mixer_config, tiny_mixer

KINDS = get_args(Kind)


def _mixed(config: SparseMixerConfig) -> torch.nn.Module:
    """The first mixing of the tiny model, in float64."""
    return tiny_mixer(config).layers[0].mixing.double()


def test_circulant_and_toeplitz_matrices_written_out() -> None:
    assert circulant(torch.tensor([1, 2, 3])).tolist() == [[1, 3, 2], [2, 1, 3], [3, 2, 1]]
    vector = torch.tensor([1, 2, 3, 4, 5])
    assert toeplitz(vector, 3).tolist() == [[3, 4, 5], [2, 3, 4], [1, 2, 3]]
    assert toeplitz(vector, 2).tolist() == [[3, 4], [2, 3]]


@pytest.mark.parametrize("kind", KINDS)
def test_mixing_one_entry_answers_with_one_column_times_one_row(kind: Kind) -> None:
    """Tells left from right and a matrix from its transpose: ``X`` is 1 at (3, 5) and 0 elsewhere."""
    part = _mixed(mixer_config(mixing=kind, hidden_size=12))
    x = torch.zeros(1, 16, 12, dtype=torch.float64)
    x[0, 3, 5] = 1
    p = {name: value.numpy() for name, value in part.named_parameters()}
    y = part(x)[0].numpy()
    np.testing.assert_allclose(y, mix(kind, x[0].numpy(), p.get("sequence"), p.get("hidden")), atol=1e-5)
    if kind == "linear":  # Ws[:, 3] Wh[5, :]
        np.testing.assert_allclose(y, np.outer(p["sequence"][:, 3], p["hidden"][5]))
    if kind == "circulant":  # c[(r - 3) mod n] and, transposed, c[(s - 5) mod d]
        turned = [np.roll(p["sequence"], 3), np.roll(p["hidden"], 5)]
        np.testing.assert_allclose(y, np.outer(*turned))
    if kind == "toeplitz":  # t[n - 1 + 3 - r] and, transposed, t[d - 1 + 5 - s]
        windows = [p["sequence"][15 + 3 - np.arange(16)], p["hidden"][11 + 5 - np.arange(12)]]
        np.testing.assert_allclose(y, np.outer(*windows))


def test_matrices_that_are_no_parameters_are_held_and_shared_where_equal() -> None:
    names = {}
    for kind in KINDS:
        model = tiny_mixer(mixer_config(mixing=kind))
        names[kind] = {name: tuple(held.shape) for name, held in model.named_buffers()}
        assert not any("matrix" in name for name in model.state_dict())
    own = {f"layers.{n}.mixing.{side}_matrix": (16, 16) for n in (0, 1) for side in ("sequence", "hidden")}
    shared = {f"layers.0.mixing.{side}_matrix": (16, 32) for side in ("sequence", "hidden")}
    assert names["linear"] == {}
    assert names["circulant"] == names["toeplitz"] == own
    assert names["fourier"] == names["hartley"] == names["hartley_plus"] == shared
    assert names["hartley_separable"] == names["hartley_separable_plus"] == dict.fromkeys(shared, (16, 16))


def test_held_matrices_are_used_as_they_are_and_learned_ones_made_anew() -> None:
    part = VectorMixing(4, 3, toeplitz=False)
    with torch.no_grad():
        part.sequence.copy_(torch.arange(4.0))
        part.hidden.copy_(torch.tensor([1.0, 0.0, 0.0]))  # the unit matrix
    part.requires_grad_(False)
    part.hold(4)
    x = torch.eye(4)[None, :, :3]
    held, _ = part.matrices()
    assert part.sequence_matrix is held
    assert torch.equal(part(x)[0], circulant(torch.arange(4.0))[:, :3])
    part.requires_grad_(True)
    part.sequence.data += 1  # an optimiser's step: what is held is of yesterday
    assert torch.equal(part(x)[0], circulant(torch.arange(1.0, 5.0))[:, :3])
    part(x).sum().backward()
    assert part.sequence.grad is not None
    part.train()
    assert part.sequence_matrix is None
    with torch.no_grad():
        assert torch.equal(part.eval()(x)[0], circulant(torch.arange(1.0, 5.0))[:, :3])


def test_layers_that_attend_have_no_mixing() -> None:
    mixings = make_mixings(mixer_config(attention_layers=(0, 2)))
    assert [type(part) for part in mixings] == [type(None), LinearMixing, type(None), LinearMixing]


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


def test_tables_are_a_quarter_of_the_whole() -> None:
    tables = HalfTables(512)
    assert (tables.cosines.shape, tables.sines.shape) == ((257, 257), (255, 255))
    assert not tables.state_dict()
