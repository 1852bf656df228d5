"""Tiny models of two kinds, trained on an invented standard library."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from nestforge.examples.mhe.fit import Recipe, Trainer, models
from nestforge.exporters.families.mhe.config import MheConfig

RECIPE = Recipe(steps=3, batch=4, window=16, decoder_rate=1e-2, encoder_rate=1e-2, decay=0.1, share=0.25, held_out=8)


@pytest.fixture
def trainer(stdlib: Path) -> Trainer:
    return Trainer(RECIPE, stdlib)


@pytest.fixture
def tiny() -> Mapping[str, MheConfig]:
    every = models(RECIPE.window, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    return {name: every[name] for name in ("encoder-mha", "encoder-mhe_mul", "decoder-mhe_add")}
