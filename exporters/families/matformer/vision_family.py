"""MatViT, the nested vision transformer of MatFormer. See docs/matformer.md.

Axes are those of MatLM. Images have no sequence: buckets differ in their batch alone, while attention sees every patch
and the class token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ....bundle.entries.tensor_spec import TensorSpec
from ...architecture import Architecture
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Family
from ...signature import Signature
from .architecture.config import MatformerVitConfig
from .architecture.shapes import compare_weights, elastic_spec, vision_model_shapes
from .architecture.vision_ops import vision_model_ops
from .architecture.vision_presets import VISION

if TYPE_CHECKING:  # plans are made without torch
    import torch


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, MatformerVitConfig)
    shapes = vision_model_shapes(config)
    if checkpoint.has_weights:
        compare_weights(checkpoint, config, shapes)

    def load() -> torch.nn.Module:
        from .folder import model_of
        from .model.answering import Answering

        return Answering(model_of(checkpoint, config))

    return Architecture(
        spec=elastic_spec(config, shapes),
        signature=_signature(config),
        parameter_shapes=shapes,
        workload=partial(vision_model_ops, config),
        load=load,
    )


FAMILY = Family(
    "matformer_vit",
    ("matformer_vit",),
    read,
    reads_config_alone=True,
    presets={name: config.to_json() for name, config in VISION.items()},
)


def _signature(config: MatformerVitConfig) -> Signature:
    dims = ("batch", config.num_channels, config.image_size, config.image_size)
    # Rows do not see each other, so rows of zeros fill a batch up to its bucket.
    pixels = TensorSpec("pixel_values", "float32", dims, pad=0)
    logits = TensorSpec("logits", "float32", ("batch", config.num_labels), role="classes")
    embedding = TensorSpec("embedding", "float32", ("batch", config.hidden_size), role="embedding")
    return Signature((pixels,), (logits, embedding))
