"""What a pass over a Sparse Mixer costs, operation by operation (no torch here).

What engines may have in several variants is left out: variant_ops.py has it. A bucket is the submodel's own
(``Submodel.at``).
"""

from __future__ import annotations

from .....bucket import Bucket
from .....elastic import Submodel
from .....workload import Op, elementwise, linear, lookup, self_attention
from .capacity import Routing, routing
from .config import SPECTRAL, SparseMixerConfig


def forward_ops(config: SparseMixerConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``SparseMixer`` at ``bucket``. Raises PlanError for a capacity that rounds to no slots."""
    d, width, t = config.hidden_size, config.embedding_width, bucket.tokens
    ops = [
        lookup("embeddings", 3 * t * width),
        elementwise("embeddings.norm", t * width, passes=6),  # two sums and a norm
        linear("embeddings.projection", t, width, d),
    ]
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        if not config.mixes(layer):
            ops += self_attention(f"{at}.attention", bucket, d, config.num_attention_heads, config.head_dim)
        elif config.mixing not in SPECTRAL:
            n = bucket.sequence
            ops.append(linear(f"{at}.mixing.hidden", t, d, d, bias=False))
            ops.append(linear(f"{at}.mixing.sequence", bucket.batch * d, n, n, bias=False))
        ops.append(elementwise(f"{at}.mixing_norm", t * d, passes=5))
        if config.routes(layer):
            ops += _experts(config, f"{at}.moe", routing(config, submodel, bucket))
        else:
            ops += [
                linear(f"{at}.ffn.up", t, d, config.intermediate_size),
                elementwise(f"{at}.ffn.activation", t * config.intermediate_size, passes=2),
                linear(f"{at}.ffn.down", t, config.intermediate_size, d),
            ]
        ops.append(elementwise(f"{at}.ffn_norm", t * d, passes=5))
    return ops + head_ops(config, bucket.batch, t)


def head_ops(config: SparseMixerConfig, rows: int, positions: int) -> list[Op]:
    """The heads, over ``rows`` pooled first positions and ``positions`` whose tokens are predicted."""
    d, width, vocabulary = config.hidden_size, config.embedding_width, config.vocab_size
    ops: list[Op] = []
    if config.predicts_tokens:
        ops += [
            linear("head.transform", positions, d, width),
            elementwise("head.norm", positions * width, passes=6),  # the activation and a norm
            linear("head.decoder", positions, width, vocabulary),
        ]
    if config.pools:
        ops += [linear("pooler", rows, d, d), elementwise("pooler.activation", rows * d, passes=2)]
    if config.num_labels is not None:
        ops.append(linear("classifier", rows, d, config.num_labels))
    return ops


def _experts(config: SparseMixerConfig, at: str, route: Routing) -> list[Op]:
    """Router and experts of one layer, but for their products and what brings tokens there and back."""
    d, t, slots = config.hidden_size, route.groups * route.tokens, route.slots
    scores = t * route.trained_experts
    return [
        linear(f"{at}.router", t, d, route.trained_experts),
        elementwise(f"{at}.router.softmax", scores, passes=8),
        elementwise(f"{at}.router.top", scores, passes=4),
        elementwise(f"{at}.experts.activation", slots * config.expert_width, passes=2),
        elementwise(f"{at}.experts.gates", slots * d, passes=2),
    ]
