"""Both tasks, tiny: a language model of an invented standard library, and a vision model of 8 x 8 images."""

from pathlib import Path

import pytest
from nestforge.examples.matformer.recipe import Recipe
from nestforge.examples.matformer.tasks import DigitsTask, LanguageTask, Task
from nestforge.exporters.families.matformer.config import MatformerConfig, MatformerVitConfig

LAYERS, FULL = 2, 16
RECIPE = Recipe(steps=3, batch=4, rate=1e-2, decay=0.1)
SHAPE = {
    "hidden_size": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": FULL,
    "activation": "gelu",
    "nested": True,
    "granularities": {"ffn": (0.125, 0.25, 0.5, 1.0)},
}


@pytest.fixture
def language(stdlib: Path) -> LanguageTask:
    config = MatformerConfig(**SHAPE, vocab_size=256, max_position_embeddings=16, tie_word_embeddings=True)
    return LanguageTask(config, RECIPE, held_out=6, stdlib=stdlib)


@pytest.fixture
def digits() -> DigitsTask:
    return DigitsTask(MatformerVitConfig(**SHAPE, image_size=8, patch_size=4, num_channels=1, num_labels=10), RECIPE)


@pytest.fixture(params=["language", "digits"])
def task(request: pytest.FixtureRequest) -> Task:
    return request.getfixturevalue(request.param)
