"""Presets with a decoder: beside adapters and routers the published T5 v1.1."""

from __future__ import annotations

import pytest
from nestforge.exporters.families.coda.encoder_decoder_family import PRESETS
from nestforge.exporters.source import open_source

# Parameters of google/t5-v1_1-*.
PUBLISHED = {"base": 247_577_856, "large": 783_150_080, "xl": 2_849_757_184}


@pytest.mark.parametrize("size", PUBLISHED)
def test_what_is_frozen_is_the_published_model(size: str) -> None:
    for keys in ("k-to-k", "k-to-all"):
        source = open_source(f"preset:coda-t5-{size}-{keys}-with-decoder")
        whole = source.spec.universal()
        groups = source.named_groups(whole)
        assert source.parameters(whole) - groups["adapters"] - groups["routers"] == PUBLISHED[size]


def test_they_are_models() -> None:
    assert len(PRESETS) == 9
    for config in PRESETS.values():
        assert config.problem() is None
        assert config.num_decoder_layers == config.encoder.num_hidden_layers
