"""What one pass over a multi-exit model with every exit computed costs, operation by operation (no torch here).

Multiply-adds are those of the published accounting: a layer has ``4 S H a + 2 S^2 a + 2 S H F`` with ``a`` the width of
its heads together, the embedding projection ``S R H``, an exit ``H C``.
"""

from __future__ import annotations

from ...elastic import Bucket, Submodel
from ...workload import Op, elementwise, linear, lookup, self_attention
from .architecture import Architecture


def forward_ops(architecture: Architecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """The operations of ``submodel`` at ``bucket``."""
    h, t, rows = architecture.hidden, bucket.tokens, bucket.batch
    word = architecture.rank or h
    ops = [lookup("embeddings", t * (word + 2 * h))]
    if architecture.rank:
        ops.append(linear("embeddings.projection", t, word, h, bias=False))
    ops.append(elementwise("embeddings.norm", t * h, passes=4))
    for layer, widths in enumerate(architecture.layers):
        at = f"layers.{layer}"
        if widths.heads:
            heads = submodel[f"{at}.heads"]
            ops += self_attention(f"{at}.attention", bucket, h, heads, architecture.head_size)
        ops.append(elementwise(f"{at}.attention.norm", t * h, passes=5))
        if widths.ffn:
            width = submodel[f"{at}.ffn"]
            ops += [
                linear(f"{at}.ffn.up", t, h, width),
                elementwise(f"{at}.ffn.activation", t * width, passes=2),
                linear(f"{at}.ffn.down", t, width, h),
            ]
        ops.append(elementwise(f"{at}.ffn.norm", t * h, passes=5))
    for layer in architecture.exits.layers:
        pooled = rows * h if architecture.exits.pool == "cls" else t * h
        ops += [
            elementwise(f"exits.{layer}.pool", pooled, passes=2),
            linear(f"exits.{layer}.classifier", rows, h, architecture.exits.classes),
        ]
        if architecture.has_entropy:
            ops.append(elementwise(f"exits.{layer}.entropy", rows * architecture.exits.classes, passes=8))
    return ops
