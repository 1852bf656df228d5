"""What a pass over a multi-exit model costs, operation by operation (no torch here).

Multiply-adds are those of the published accounting: a layer has ``4 S H a + 2 S^2 a + 2 S H F`` with ``a`` the width of
its heads together, the embedding projection ``S R H``, an exit ``H C``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....bucket import Bucket
from ....elastic import Submodel
from ....workload import Op, elementwise, linear, lookup, self_attention
from .architecture import CostEffArchitecture


def forward_ops(architecture: CostEffArchitecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass through ``submodel``, to its depth and with each of its exits computed, as published costs count it.

    A whole engine computes the last exit alone, which is less by a thousandth or so.
    """
    assert submodel.depth is not None
    depth = submodel.depth
    exits = [layer for layer in architecture.exits.layers if layer <= depth]
    return segment_ops(architecture, submodel, bucket, (0, depth), exits)


def segment_ops(
    architecture: CostEffArchitecture, submodel: Submodel, bucket: Bucket, span: tuple[int, int], exits: Sequence[int]
) -> list[Op]:
    """The layers behind the first of ``span`` up to its last, and ``exits``; the embeddings too if the first is 0."""
    first, last = span
    ops = _embedding_ops(architecture, bucket) if first == 0 else []
    for layer in range(first, last):
        ops += _layer_ops(architecture, submodel, bucket, layer)
    for layer in exits:
        ops += _exit_ops(architecture, bucket, layer)
    return ops


def _embedding_ops(architecture: CostEffArchitecture, bucket: Bucket) -> list[Op]:
    h, t = architecture.hidden, bucket.tokens
    word = architecture.rank or h
    ops = [lookup("embeddings", t * (word + 2 * h))]
    if architecture.rank:
        ops.append(linear("embeddings.projection", t, word, h, bias=False))
    return [*ops, elementwise("embeddings.norm", t * h, passes=4)]


def _layer_ops(architecture: CostEffArchitecture, submodel: Submodel, bucket: Bucket, layer: int) -> list[Op]:
    h, t, widths, at = architecture.hidden, bucket.tokens, architecture.layers[layer], f"layers.{layer}"
    ops = []
    if widths.heads:
        ops += self_attention(f"{at}.attention", bucket, h, submodel[f"{at}.heads"], architecture.head_size)
    ops.append(elementwise(f"{at}.attention.norm", t * h, passes=5))
    if widths.ffn:
        width = submodel[f"{at}.ffn"]
        ops += [
            linear(f"{at}.ffn.up", t, h, width),
            elementwise(f"{at}.ffn.activation", t * width, passes=2),
            linear(f"{at}.ffn.down", t, width, h),
        ]
    return [*ops, elementwise(f"{at}.ffn.norm", t * h, passes=5)]


def _exit_ops(architecture: CostEffArchitecture, bucket: Bucket, layer: int) -> list[Op]:
    h, rows, exits = architecture.hidden, bucket.batch, architecture.exits
    pooled = rows * h if exits.pool == "cls" else bucket.tokens * h
    ops = [
        elementwise(f"exits.{layer}.pool", pooled, passes=2),
        linear(f"exits.{layer}.classifier", rows, h, exits.classes),
    ]
    if architecture.has_entropy:
        ops.append(elementwise(f"exits.{layer}.entropy", rows * exits.classes, passes=8))
    return ops
