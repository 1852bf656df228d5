"""What Gemma 3n adds, against the parameters of transformers' own module."""

from __future__ import annotations

import re

from nestforge.bucket import Bucket
from nestforge.exporters.families.gemma3n import Gemma3nParts
from nestforge.workload import macs
from support.gated_decoders import TINY, make_decoder

HIDDEN, LAYERS = TINY["hidden_size"], 3
PARTS = Gemma3nParts(
    streams=2, layer_vocabulary=40, layer_hidden=8, laurel_rank=4, shared_layers=1, sparse=(True, False, False)
)


def test_shapes_are_those_of_transformers() -> None:
    shapes = {name: tuple(value.shape) for name, value in make_decoder("gemma3n_text").model.named_parameters()}
    own = r"altup|laurel|per_layer"
    assert PARTS.model_shapes("", HIDDEN, LAYERS) == {
        name: shape for name, shape in shapes.items() if re.search(own, name) and not name.startswith("layers.")
    }
    layers = [PARTS.layer_shapes(f"layers.{layer}", HIDDEN) for layer in range(LAYERS)]
    assert {name: shape for layer in layers for name, shape in layer.items()} == {
        name: shape for name, shape in shapes.items() if re.search(own, name) and name.startswith("layers.")
    }


def test_multiply_adds_by_hand() -> None:
    tokens = 2 * 5
    bucket = Bucket(2, 5)
    assert macs(PARTS.first_ops(bucket, HIDDEN, LAYERS)) == tokens * HIDDEN * (LAYERS * 8 + HIDDEN)
    assert macs(PARTS.last_ops(bucket, HIDDEN)) == tokens * HIDDEN * HIDDEN
    routers, coefficients, predicted = 2 * HIDDEN * 2, 2 * 4 + 2 * 2, 2 * 2 * HIDDEN
    laurel, inputs = 2 * HIDDEN * 4, 2 * HIDDEN * 8
    assert macs(PARTS.layer_ops("layers.0", bucket, HIDDEN)) == tokens * (
        routers + coefficients + predicted + laurel + inputs
    )
