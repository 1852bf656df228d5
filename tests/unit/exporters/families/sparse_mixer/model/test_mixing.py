from __future__ import annotations

import copy
from typing import get_args

import numpy as np
import pytest
import torch
from nestforge.exporters.families.sparse_mixer.config import MixingKind as Kind
from nestforge.exporters.families.sparse_mixer.config import SparseMixerConfig
from nestforge.exporters.families.sparse_mixer.mixing import (
    LinearMixing,
    VectorMixing,
    circulant,
    make_mixings,
    toeplitz,
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


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_mixed_apart(kind: Kind) -> None:
    part = _mixed(mixer_config(mixing=kind))
    x = torch.randn(3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(part(x), torch.cat([part(row[None]) for row in x]), atol=1e-12, rtol=1e-12)


def test_toeplitz_through_a_circulant_of_twice_the_size() -> None:
    vector = torch.randn(9)
    embedded = torch.cat((vector[:5].flip(0), torch.zeros(1), vector[5:].flip(0)))
    assert torch.equal(circulant(embedded)[:5, :5], toeplitz(vector, 5))


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


def test_a_copy_keeps_what_is_held() -> None:
    model = tiny_mixer(mixer_config(mixing="fourier"))
    copied = copy.deepcopy(model)
    first, second = (copied.layers[n].mixing.sequence_matrix for n in (0, 1))
    assert first is second
    assert torch.equal(first, model.layers[0].mixing.sequence_matrix)


def test_layers_that_attend_have_no_mixing() -> None:
    mixings = make_mixings(mixer_config(attention_layers=(0, 2)))
    assert [type(part) for part in mixings] == [type(None), LinearMixing, type(None), LinearMixing]
