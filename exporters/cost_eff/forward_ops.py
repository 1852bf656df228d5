"""What one pass over a multi-exit model with every exit computed costs, operation by operation (no torch here).

Multiply-adds are those of the published accounting: a layer has ``4 S H a + 2 S^2 a + 2 S H F`` with ``a`` the width of
its heads together, the embedding projection ``S R H``, an exit ``H C``.
"""

from __future__ import annotations

from ...elastic import Bucket, Submodel
from ...workload import Op
from .architecture import Architecture

_FLOAT = 4


def forward_ops(architecture: Architecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """The operations of ``submodel`` at ``bucket``."""
    h, t, rows = architecture.hidden, bucket.tokens, bucket.batch
    word = architecture.rank or h
    gathered = t * (word + 2 * h) * _FLOAT
    ops = [Op("embeddings", "gather", 0, gathered, gathered)]
    if architecture.rank:
        ops.append(_linear("embeddings.projection", t, word, h, bias=False))
    ops.append(_elementwise("embeddings.norm", t * h, passes=4))
    for layer, widths in enumerate(architecture.layers):
        at = f"layers.{layer}"
        if widths.heads:
            ops += _attention(at, architecture, submodel[f"{at}.heads"], bucket)
        ops.append(_elementwise(f"{at}.attention.norm", t * h, passes=5))
        if widths.ffn:
            width = submodel[f"{at}.ffn"]
            ops += [
                _linear(f"{at}.ffn.up", t, h, width),
                _elementwise(f"{at}.ffn.activation", t * width, passes=2),
                _linear(f"{at}.ffn.down", t, width, h),
            ]
        ops.append(_elementwise(f"{at}.ffn.norm", t * h, passes=5))
    for layer in architecture.exits.layers:
        pooled = rows * h if architecture.exits.pool == "cls" else t * h
        ops += [
            _elementwise(f"exits.{layer}.pool", pooled, passes=2),
            _linear(f"exits.{layer}.classifier", rows, h, architecture.exits.classes),
        ]
        if architecture.has_entropy:
            ops.append(_elementwise(f"exits.{layer}.entropy", rows * architecture.exits.classes, passes=8))
    return ops


def _attention(at: str, architecture: Architecture, heads: int, bucket: Bucket) -> list[Op]:
    h, t, inner = architecture.hidden, bucket.tokens, heads * architecture.head_size
    scores = heads * bucket.batch * bucket.sequence**2
    product = (2 * scores * architecture.head_size, 0, (2 * t * inner + scores) * _FLOAT)
    return [
        *(_linear(f"{at}.attention.{part}", t, h, inner) for part in ("query", "key", "value")),
        _elementwise(f"{at}.attention.split", 3 * t * inner, passes=4),
        Op(f"{at}.attention.scores", "batched_gemm", *product),
        _elementwise(f"{at}.attention.softmax", scores, passes=8),
        Op(f"{at}.attention.context", "batched_gemm", *product),
        _linear(f"{at}.attention.output", t, inner, h),
    ]


def _linear(name: str, rows: int, inputs: int, outputs: int, bias: bool = True) -> Op:
    weights = (inputs + bias) * outputs * _FLOAT
    return Op(name, "gemm", 2 * rows * inputs * outputs, weights, rows * (inputs + outputs) * _FLOAT)


def _elementwise(name: str, elements: int, passes: int) -> Op:
    """``passes`` counts reads and writes of the tensor over the operations that are fused under this name."""
    return Op(name, "elementwise", elements * passes, 0, elements * passes * _FLOAT)
