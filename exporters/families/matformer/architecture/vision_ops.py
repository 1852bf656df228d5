"""What a pass over a MatViT costs, operation by operation (no torch here)."""

from __future__ import annotations

from .....bucket import Bucket
from .....elastic import Submodel
from .....workload import Op, elementwise, linear
from .config import MatformerVitConfig
from .forward_ops import layer_ops


def vision_model_ops(config: MatformerVitConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``MatformerViT`` over ``bucket.batch`` images, each of as many tokens as it has patches and one."""
    d, rows = config.hidden_size, bucket.batch
    image = Bucket(rows, config.patches + 1)
    ops = [
        linear("patch", rows * config.patches, config.num_channels * config.patch_size**2, d),
        elementwise("positions", image.tokens * d, passes=5),
    ]
    for layer in range(config.num_hidden_layers):
        ops += layer_ops(config, submodel, image, layer, bias=True)
    return [*ops, elementwise("norm", rows * d, passes=4), linear("head", rows, d, config.num_labels)]
