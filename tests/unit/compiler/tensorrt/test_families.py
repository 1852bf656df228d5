"""TensorRT's parser takes what every family emits: operators, types and shapes, by its own table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cost_eff_models
import gated_decoders
import pytest
import tiny_language
import tiny_vision
from nestforge.compiler.template import traced_template
from nestforge.compiler.tensorrt.float_sums import float_sums
from nestforge.compiler.tensorrt.operators import unsupported
from nestforge.elastic import Bucket
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from tiny_compile import save_tiniest

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "bert": save_tiniest,
    "roberta": lambda folder: save_tiniest(folder, "roberta"),
    "vit": tiny_vision.save_tiny_vit,
    "matformer_vit": tiny_vision.save_tiny_matvit,
    "matformer_lm": tiny_language.save_tiny_matlm,
    "llama": gated_decoders.save_decoder,
    "gemma2": lambda folder: gated_decoders.save_decoder(folder, "gemma2"),
    "cost_eff": cost_eff_models.save_tiny,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parser_takes_what_a_family_emits(family: str, tmp_path: Path) -> None:
    universal = load_universal(open_source(FAMILIES[family](tmp_path / family)))
    (bucket,) = universal.source.signature.buckets([Bucket(2, 8)])
    proto = traced_template(universal, universal.module, universal.source.signature, bucket, 20).proto
    assert float_sums(proto) == (family == "roberta")  # which counts tokens to place them
    assert unsupported(proto) == []
