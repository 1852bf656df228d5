"""The settings that are shipped say what the paper says."""

from __future__ import annotations

import pytest
from nestforge.examples.train.matformer.recipe import (
    DIGITS_CONFIG,
    DIGITS_RECIPE,
    LANGUAGE_CONFIG,
    LANGUAGE_RECIPE,
    WRITER_CONFIG,
    WRITER_RECIPE,
    Recipe,
)
from nestforge.exporters.families.matformer.architecture.config import NestedConfig


@pytest.mark.parametrize("recipe", [LANGUAGE_RECIPE, DIGITS_RECIPE, WRITER_RECIPE])
def test_levels_and_probabilities(recipe: Recipe) -> None:
    assert recipe.levels == {"S": 0.125, "M": 0.25, "L": 0.5, "XL": 1.0}
    assert recipe.probabilities == (0.20, 0.22, 0.24, 0.34)
    assert recipe.universal_steps == 4 * recipe.steps
    assert recipe.widths(256) == {"S": 32, "M": 64, "L": 128, "XL": 256}


@pytest.mark.parametrize("config", [LANGUAGE_CONFIG, DIGITS_CONFIG, WRITER_CONFIG])
def test_configurations_make_models_that_say_what_was_trained(config: NestedConfig) -> None:
    assert config.problem() is None
    assert config.nested
    assert config.granularities == {"ffn": (0.125, 0.25, 0.5, 1.0)}


def test_nearly_all_weights_of_the_model_that_writes_are_ffn() -> None:
    assert WRITER_CONFIG.intermediate_size == 16 * WRITER_CONFIG.hidden_size
    assert LANGUAGE_CONFIG.intermediate_size == 4 * LANGUAGE_CONFIG.hidden_size
    assert DIGITS_CONFIG.intermediate_size == 4 * DIGITS_CONFIG.hidden_size


def test_the_language_model_has_the_ladder_of_the_papers_models() -> None:
    assert LANGUAGE_CONFIG.num_hidden_layers == 16
    assert LANGUAGE_CONFIG.vocab_size == 256
