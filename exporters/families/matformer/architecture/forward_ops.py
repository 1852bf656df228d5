"""What a pass over a MatFormer model costs, operation by operation (no torch here)."""

from __future__ import annotations

from .....bucket import Bucket
from .....elastic import Submodel
from .....workload import Op, elementwise, linear, lookup, pre_norm_layer
from .config import MatformerConfig, NestedConfig


def language_model_ops(config: MatformerConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``MatformerLM`` at ``bucket``, with the logits of every position."""
    d, t = config.hidden_size, bucket.tokens
    ops = [lookup("embed_tokens", t * d)]
    for layer in range(config.num_hidden_layers):
        ops += layer_ops(config, submodel, bucket, layer, config.bias)
        ops += _position_ops(config, submodel, bucket, layer)
    ops.append(elementwise("norm", t * d, passes=4))
    return [*ops, linear("lm_head", t, d, config.vocab_size, config.bias)]


def layer_ops(config: NestedConfig, submodel: Submodel, bucket: Bucket, layer: int, bias: bool) -> list[Op]:
    """One pre-norm layer on ``bucket``'s tokens: attention and FFN, each with its norm and residual."""
    at = f"layers.{layer}"
    heads, width = heads_of(config, submodel, layer), submodel[f"{at}.ffn"]
    return pre_norm_layer(at, bucket, config.hidden_size, heads, config.head_dim, width, bias)


def _position_ops(config: MatformerConfig, submodel: Submodel, bucket: Bucket, layer: int) -> list[Op]:
    at, heads = f"layers.{layer}", heads_of(config, submodel, layer)
    if config.position == "rotary":
        turned = 2 * bucket.tokens * heads * config.head_dim
        return [elementwise(f"{at}.attention.rotary", turned, passes=4)]
    pairs = heads * bucket.sequence**2  # the same for every row of the batch
    return [lookup(f"{at}.relative_bias", pairs), elementwise(f"{at}.relative_bias.mask", pairs, passes=3)]


def heads_of(config: NestedConfig, submodel: Submodel, layer: int) -> int:
    """Heads of ``layer`` in ``submodel``: all of them where heads are no axis."""
    return submodel[f"layers.{layer}.heads"] if config.nested_heads else config.num_attention_heads
