from __future__ import annotations

import pytest
from nestforge.exporters.families.coda.family import PRESETS
from nestforge.exporters.source import open_source

# Published T5 v1.1 shapes: layers, d, f, heads.
SHAPES = {"base": (12, 768, 2048, 12), "large": (24, 1024, 2816, 16), "xl": (24, 2048, 5120, 32)}


@pytest.mark.parametrize("size", SHAPES)
def test_they_have_the_published_shapes(size: str) -> None:
    for kind in ("k-to-k", "k-to-all", "k-to-all-mq"):
        config = PRESETS[f"coda-t5-{size}-{kind}"]
        shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads)
        assert shape == SHAPES[size]
        assert (config.head_size, config.scale, config.gated_ffn, config.vocab_size) == (64, 1.0, True, 32128)
        assert config.problem() is None


def test_inspect_knows_them_without_weights() -> None:
    source = open_source("preset:coda-t5-base-k-to-k")
    whole = source.spec.universal()
    assert source.spec.axes[-1].choices == (8, 5, 4, 3, 2, 1)
    attention, ffn, norms = 4 * 768 * 768, 3 * 768 * 2048, 2 * 768
    adapter = 2 * 768 * 64 + 768 + 64
    layers = 12 * (attention + ffn + norms + adapter + 768)
    assert source.parameters(whole) == layers + 768 + 32_128 * 768 + 32 * 12
    assert source.named_groups(whole) == {"adapters": 12 * adapter, "routers": 12 * 768, "norms": 25 * 768}
