"""MatViT, the nested vision transformer of MatFormer. See docs/matformer.md.

Axes are those of MatLM. Images have no sequence: buckets differ in their batch alone, while attention sees every patch
and the class token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ....elastic import Bucket, ElasticSpec, Submodel
from ....runtime.bundle.manifest import TensorSpec
from ....workload import Op
from ...checkpoints.checkpoint import Checkpoint
from ...family import Family, Signature
from .architecture.config import MatformerVitConfig, read_config
from .architecture.shapes import compare_weights, elastic_spec, vision_model_shapes
from .architecture.vision_ops import vision_model_ops
from .architecture.vision_presets import VISION

if TYPE_CHECKING:
    import torch


class MatformerVitFamily(Family):
    name: ClassVar[str] = "matformer_vit"
    model_types: ClassVar[tuple[str, ...]] = ("matformer_vit",)
    reads_config_alone: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: config.to_json() for name, config in VISION.items()}

    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        config = read_config(checkpoint, MatformerVitConfig)
        return elastic_spec(config, vision_model_shapes(config))

    def signature(self, checkpoint: Checkpoint) -> Signature:
        config = read_config(checkpoint, MatformerVitConfig)
        dims = ("batch", config.num_channels, config.image_size, config.image_size)
        # Rows do not see each other, so rows of zeros fill a batch up to its bucket.
        pixels = TensorSpec("pixel_values", "float32", dims, pad=0)
        logits = TensorSpec("logits", "float32", ("batch", config.num_labels), role="classes")
        embedding = TensorSpec("embedding", "float32", ("batch", config.hidden_size), role="embedding")
        return Signature((pixels,), (logits, embedding))

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        return vision_model_ops(read_config(checkpoint, MatformerVitConfig), submodel, bucket)

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        config = read_config(checkpoint, MatformerVitConfig)
        shapes = vision_model_shapes(config)
        if checkpoint.has_weights:
            compare_weights(checkpoint, config, shapes)
        return shapes

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        from .folder import model_of
        from .model.answering import Answering

        return Answering(model_of(checkpoint))


FAMILY = MatformerVitFamily()
