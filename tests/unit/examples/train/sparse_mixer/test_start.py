"""Every matrix works from the first step on, and mixing begins with neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nestforge.examples.train.sparse_mixer.start import draw_start
from nestforge.exporters.families.sparse_mixer.architecture.config import SparseMixerConfig
from nestforge.exporters.families.sparse_mixer.model.encoder import SparseMixer


def started(config: SparseMixerConfig, seed: int = 0) -> SparseMixer:
    torch.manual_seed(seed)
    model = SparseMixer(config)
    draw_start(model)
    return model


def test_the_seed_decides_and_biases_and_norms_stay(config: SparseMixerConfig) -> None:
    first, again, other = started(config), started(config), started(config, 1)
    fixed = ("embeddings.position.weight", "embeddings.projection.weight", "query.weight", "key.weight")
    for (name, one), two, three in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        if name.endswith("bias"):
            assert not one.any()
        elif name.endswith("norm.weight"):
            assert (one == 1).all()
        elif not name.endswith(fixed):
            assert not torch.equal(one, three)


def test_mixing_weighs_by_distance_alone_and_nearer_tokens_more(models: dict[str, SparseMixerConfig]) -> None:
    config = models["experts"]
    for layer in started(config).layers[:2]:
        matrix = layer.mixing.sequence
        assert all(len(set(matrix.diagonal(offset).tolist())) == 1 for offset in range(-15, 16))
        places = torch.arange(16)
        near = (places[:, None] - places).abs() <= 4
        assert matrix[near].square().sum() > 0.8 * matrix.square().sum()


def test_heads_begin_with_a_neighbour_each(models: dict[str, SparseMixerConfig]) -> None:
    config = replace(models["peer"], hidden_size=128, num_attention_heads=4, max_position_embeddings=64)
    model = started(config)
    ids = torch.randint(32, 127, (8, 64))
    hidden = model.embeddings(ids, torch.zeros_like(ids))
    attention = model.layers[0].attention
    queries, keys = (part(hidden).unflatten(2, (4, 32)).transpose(1, 2) for part in (attention.query, attention.key))
    shares = (queries @ keys.transpose(2, 3) / 32**0.5).softmax(-1)  # [B, A, S, S]
    for head, offset in enumerate((1, -1, 2, -2)):
        seen = [shares[:, head].diagonal(-back, dim1=1, dim2=2).mean().item() for back in range(-4, 5)]
        assert max(seen) == seen[4 + offset] > 0.4


def test_positions_and_words_share_no_dimension(models: dict[str, SparseMixerConfig]) -> None:
    tables = started(replace(models["experts"], hidden_size=128, num_attention_heads=4)).embeddings
    assert not tables.word.weight[:, :32].any()
    assert not tables.position.weight[:, 32:].any()
    for part in (tables.word.weight[:, 32:], tables.position.weight[:, :32]):
        assert part.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.02)
