"""A tiny Sparse Mixer and its peers, trained on an invented standard library."""

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.examples.byte_windows import MaskedBytes
from nestforge.examples.sparse_mixer.fit import Recipe, Subject, Trainer
from nestforge.exporters.families.sparse_mixer.config import SparseMixerConfig

WINDOW = 16
EXPERTS = SparseMixerConfig(
    vocab_size=257,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=WINDOW,
    type_vocab_size=1,
    attention_layers=(2,),
    moe_layers=(1,),
    num_experts=4,
    min_capacity=1,
    group_size=64,
    group_sizes=(16, 64),
    capacities=(50, 100),
    head="masked_lm",
)
MODELS = {
    "experts": EXPERTS,
    "tokens": replace(EXPERTS, router="tokens_choose"),
    "peer": replace(
        EXPERTS, attention_layers=(0, 1, 2), moe_layers=(), num_experts=0, group_sizes=None, capacities=None
    ),
}
RECIPE = Recipe(steps=3, batch=4, decay=0.1, share=0.25, held_out=8)


@pytest.fixture
def trainer(stdlib: Path) -> Trainer:
    return Trainer(RECIPE, WINDOW, stdlib)


@pytest.fixture
def data(trainer: Trainer) -> MaskedBytes:
    return trainer.data()


@pytest.fixture(params=list(MODELS))
def config(request: pytest.FixtureRequest) -> SparseMixerConfig:
    return MODELS[request.param]


@pytest.fixture
def models() -> dict[str, SparseMixerConfig]:
    return dict(MODELS)


@pytest.fixture
def subjects() -> dict[str, Subject]:
    return {name: Subject(config, rate=1e-2) for name, config in MODELS.items()}
