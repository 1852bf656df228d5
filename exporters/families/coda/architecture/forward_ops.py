"""What a pass over an encoder with conditional adapters costs, operation by operation (no torch here).

What reads and writes selected tokens is left out: variant_ops.py has it.
"""

from __future__ import annotations

from .....bucket import Bucket
from .....elastic import Submodel
from .....workload import Op, elementwise, linear, lookup
from .config import CodaConfig
from .selection import capacities, token_bucket

_FLOAT32_BYTES = 4


def forward_ops(config: CodaConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``CodaEncoder``. Raises PlanError for a reduction above the tokens of a row."""
    counts, bucket = capacities(config, submodel, bucket), token_bucket(config, bucket)
    d, t, n = config.hidden_size, bucket.tokens, bucket.sequence
    ops = _embedding_ops(config, bucket)
    if config.position == "learned":
        ops.append(elementwise("embeddings.position", t * d, passes=3))
    of_pairs = config.keys_of == "selected"  # of selected queries and keys: each layer makes those of its own
    if config.position == "relative" and not (of_pairs and len(counts) == config.num_hidden_layers):
        ops += _bias_ops("relative_bias", n * n * config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        at, asking = f"layers.{layer}", n
        ops.append(elementwise(f"{at}.attention_norm", t * d, passes=4))
        if config.adapter != "lora":
            ops += [
                linear(f"{at}.adapter.down", t, d, config.adapter_size, config.adapter_bias),
                elementwise(f"{at}.adapter.activation", t * config.adapter_size, passes=2),
                linear(f"{at}.adapter.up", t, config.adapter_size, d, config.adapter_bias),
                elementwise(f"{at}.adapter.residual", t * d, passes=3),
            ]
        if layer in counts:
            asking = counts[layer]
            ops += _router_ops(config, f"{at}.router", bucket)
            ops.append(elementwise(f"{at}.gates", bucket.batch * asking * d, passes=2))
        reads = asking if of_pairs else n
        ops += _attention_ops(config, f"{at}.attention", bucket.batch, asking, reads)
        if config.position == "relative" and layer in counts:
            scores = bucket.batch * config.num_attention_heads * asking * reads
            ops += _bias_ops(f"{at}.bias", scores) if of_pairs else [lookup(f"{at}.bias", scores)]
        ops += _ffn_ops(config, at, bucket.batch * asking, submodel[f"{at}.ffn"])
    ops.append(elementwise("norm", t * d, passes=4))  # at the end, or of the embeddings
    if config.num_labels is not None:
        ops += [elementwise("mean", t * d, passes=2), linear("classifier", bucket.batch, d, config.num_labels)]
    return ops


def _embedding_ops(config: CodaConfig, bucket: Bucket) -> list[Op]:
    d, t, image = config.hidden_size, bucket.tokens, config.image
    if image is not None:
        numbers = image.channels * image.patch_height * image.patch_width
        return [linear("embeddings.patch", bucket.batch * image.patches, numbers, d)]
    ops = [lookup("embeddings", t * d)]
    if config.type_vocab_size:
        ops += [lookup("embeddings.token_type", t * d), elementwise("embeddings.token_type.sum", t * d, passes=3)]
    return ops


def _bias_ops(name: str, pairs: int) -> list[Op]:
    """Relative biases by the steps of ``pairs``, of each head."""
    return [lookup(name, pairs), elementwise(f"{name}.turn", pairs, passes=2)]


def _router_ops(config: CodaConfig, at: str, bucket: Bucket) -> list[Op]:
    """Scores, the rounds of the soft top-k one after the other, and the choice of the highest."""
    t = bucket.tokens
    if not config.has_scores:
        return [] if config.route_padding or config.image else [elementwise(f"{at}.top", t, passes=4)]
    ops = [elementwise(f"{at}.scores", t * config.hidden_size, passes=1), elementwise(f"{at}.mask", t, passes=2)]
    rounds = config.soft_top_k.rounds if config.soft_top_k else 0
    if rounds:
        ops.append(elementwise(f"{at}.shifted", (rounds + 1) * t, passes=5))
    for number in range(rounds):
        passes = {"softmax": 6, "level": 3, "ratio": 2, "minimum": 3}
        ops += [elementwise(f"{at}.{number}.{part}", t, count) for part, count in passes.items()]
    return [*ops, elementwise(f"{at}.gates", t, passes=8), elementwise(f"{at}.top", t, passes=4)]


def _attention_ops(config: CodaConfig, at: str, rows: int, asking: int, reads: int) -> list[Op]:
    """Of ``asking`` tokens of each row, for ``reads`` tokens of it."""
    d, heads, size, bias = config.hidden_size, config.num_attention_heads, config.head_size, config.bias
    inner, shared = heads * size, config.key_value_heads * size
    q, m, scores = rows * asking, rows * reads, rows * heads * asking * reads
    moved = (q * inner + m * shared + scores) * _FLOAT32_BYTES
    product = 2 * scores * size
    ops = [
        linear(f"{at}.query", q, d, inner, bias),
        linear(f"{at}.key", m, d, shared, bias),
        linear(f"{at}.value", m, d, shared, bias),
        elementwise(f"{at}.split", 2 * q * inner + 2 * m * shared, passes=2),
    ]
    if config.adapter == "lora":
        for part, tokens, width in (("query", q, inner), ("value", m, shared)):
            ops += [
                linear(f"{at}.{part}.low_rank.down", tokens, d, config.adapter_size, bias=False),
                linear(f"{at}.{part}.low_rank.up", tokens, config.adapter_size, width, bias=False),
                elementwise(f"{at}.{part}.low_rank.sum", tokens * width, passes=3),
            ]
    if config.position == "rotary":
        ops.append(elementwise(f"{at}.rotary", q * inner + m * shared, passes=4))
    return [
        *ops,
        Op(f"{at}.scores", "batched_gemm", product, 0, moved),
        elementwise(f"{at}.mask", scores, passes=3),
        elementwise(f"{at}.softmax", scores, passes=8),
        Op(f"{at}.context", "batched_gemm", product, 0, moved),
        linear(f"{at}.output", q, inner, d, bias),
    ]


def _ffn_ops(config: CodaConfig, at: str, tokens: int, width: int) -> list[Op]:
    d, bias = config.hidden_size, config.bias
    inward = ("gate", "up") if config.gated_ffn else ("up",)
    return [
        elementwise(f"{at}.ffn_norm", tokens * d, passes=7),  # with the sum before it
        *(linear(f"{at}.ffn.{part}", tokens, d, width, bias) for part in inward),
        elementwise(f"{at}.ffn.activation", tokens * width, passes=2 * len(inward)),
        linear(f"{at}.ffn.down", tokens, width, d, bias),
        elementwise(f"{at}.sum", tokens * d, passes=6),
    ]
