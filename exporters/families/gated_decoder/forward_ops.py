"""The operations of one full-sequence pass of a gated decoder, for the analytic cost model (no torch here)."""

from __future__ import annotations

from ....bucket import Bucket
from ....elastic import Submodel
from ....workload import Op, elementwise, linear, lookup
from .architecture import DecoderArchitecture

_FLOAT32_BYTES = 4


def forward_ops(architecture: DecoderArchitecture, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """Every position passes every layer and the head; a sliding window masks scores, and computes them all the same."""
    hidden, tokens, extra = architecture.hidden, bucket.tokens, architecture.gemma3n
    ops = [lookup("embedding", tokens * hidden)]
    if extra is not None:
        ops += extra.first_ops(bucket, hidden, len(architecture.widths))
    for layer in range(len(architecture.widths)):
        at = f"layers.{layer}"
        ops += [*_attention(architecture, at, layer, bucket), *_ffn(architecture, at, layer, submodel, bucket)]
        if extra is not None:
            ops += extra.layer_ops(at, bucket, hidden)
    if extra is not None:
        ops += extra.last_ops(bucket, hidden)
    ops.append(elementwise("norm", tokens * hidden, passes=4))
    interface = architecture.interface
    head = interface.head
    if head is None:
        return ops
    ops.append(linear(head.module, tokens, hidden, interface.answers, head.bias))
    if architecture.logit_cap and head.to == "tokens":
        ops.append(elementwise("lm_head.cap", tokens * interface.vocabulary, passes=6))
    return ops


def _attention(a: DecoderArchitecture, at: str, layer: int, bucket: Bucket) -> list[Op]:
    """Grouped-query attention: ``kv_heads`` make keys and values, repeated for all ``heads``."""
    tokens, inner, keys = bucket.tokens, a.heads * a.head_dim, a.kv_heads * a.head_dim
    scores = a.heads * bucket.batch * bucket.sequence**2
    moved = (2 * tokens * inner + scores) * _FLOAT32_BYTES
    made = [("query", inner)] + ([("key", keys), ("value", keys)] if a.has_keys(layer) else [])
    rotated = sum(size for name, size in made if name != "value")
    ops = [
        elementwise(f"{at}.attention.norm", tokens * a.hidden, passes=4),
        *(linear(f"{at}.attention.{name}", tokens, a.hidden, size, a.qkv_bias) for name, size in made),
        elementwise(f"{at}.attention.split", tokens * sum(size for _, size in made), passes=2),
        elementwise(f"{at}.attention.rotary", tokens * rotated, passes=8),
    ]
    if a.head_norms:
        ops.append(elementwise(f"{at}.attention.head_norms", tokens * rotated, passes=4))
    if a.kv_heads != a.heads:
        ops.append(elementwise(f"{at}.attention.repeat", 2 * tokens * inner, passes=2))
    ops.append(Op(f"{at}.attention.scores", "batched_gemm", 2 * scores * a.head_dim, 0, moved))
    if a.score_cap:
        ops.append(elementwise(f"{at}.attention.cap", scores, passes=6))
    ops += [
        elementwise(f"{at}.attention.softmax", scores, passes=8),
        Op(f"{at}.attention.context", "batched_gemm", 2 * scores * a.head_dim, 0, moved),
        elementwise(f"{at}.attention.merge", tokens * inner, passes=2),
        linear(f"{at}.attention.output", tokens, inner, a.hidden, a.output_bias),
        elementwise(f"{at}.attention.residual", tokens * a.hidden, passes=7 if a.norms_around else 3),
    ]
    return ops


def _ffn(a: DecoderArchitecture, at: str, layer: int, submodel: Submodel, bucket: Bucket) -> list[Op]:
    tokens, width = bucket.tokens, submodel[f"{at}.ffn"]
    ops = [
        elementwise(f"{at}.ffn.norm", tokens * a.hidden, passes=4),
        linear(f"{at}.ffn.gate", tokens, a.hidden, width, a.ffn_bias),
        linear(f"{at}.ffn.up", tokens, a.hidden, width, a.ffn_bias),
        # The activation reads and writes once, its product with up reads two tensors and writes one.
        elementwise(f"{at}.ffn.activation", tokens * width, passes=5),
        linear(f"{at}.ffn.down", tokens, width, a.hidden, a.ffn_bias),
        elementwise(f"{at}.ffn.residual", tokens * a.hidden, passes=7 if a.norms_around else 3),
    ]
    if a.gemma3n is not None and a.gemma3n.sparse[layer]:
        ops.append(elementwise(f"{at}.ffn.cutoff", tokens * width, passes=10))
    return ops
