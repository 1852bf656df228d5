"""What a pass over an MHE model costs, operation by operation (no torch here).

Attention of heads with embeddings, which engines may have in several forms, is left out: ``variant_ops`` has it.
"""

from __future__ import annotations

from .....elastic import Bucket, Submodel
from .....workload import Op, elementwise, linear, lookup
from .attention_ops import Sublayer, form_ops, plain_ops
from .config import MheConfig, MheDecoderConfig, MheEncoderConfig
from .forms import ATTENTION, held_forms


def encoder_ops(config: MheEncoderConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``MheEncoder``."""
    d, t = config.hidden_size, bucket.tokens
    ops = [lookup("embeddings", 2 * t * d), elementwise("embeddings.norm", t * d, passes=5)]
    ops += _layer_ops(config, submodel, bucket)
    if config.head == "masked_lm":
        ops += [
            linear("head.transform", t, d, d),
            elementwise("head.norm", t * d, passes=6),  # with the activation before it
            linear("head.decoder", t, d, config.vocab_size),
        ]
    if config.num_labels is not None:
        ops += [linear("pooler", bucket.batch, d, d), linear("classifier", bucket.batch, d, config.num_labels)]
    return ops


def decoder_ops(config: MheDecoderConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``MheDecoder``, with the logits of every position."""
    d, t = config.hidden_size, bucket.tokens
    return [
        lookup("embeddings", 2 * t * d),
        *_layer_ops(config, submodel, bucket),
        elementwise("norm", t * d, passes=4),
        linear("lm_head", t, d, config.vocab_size, bias=False),
    ]


def variant_ops(config: MheConfig, submodel: Submodel, bucket: Bucket) -> dict[str, dict[str, list[Op]]]:
    """Attention of all layers in each form that the model may have; nothing where heads have no embeddings."""
    held = held_forms(config)
    if not held:
        return {}
    by_layer = [form_ops(of) for of in _sublayers(config, submodel, bucket)]
    return {ATTENTION: {form: [op for ops in by_layer for op in ops[form]] for form in held}}


def _layer_ops(config: MheConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    d, t = config.hidden_size, bucket.tokens
    ops: list[Op] = []
    for layer, of in enumerate(_sublayers(config, submodel, bucket)):
        at, width = f"layers.{layer}", submodel[f"layers.{layer}.ffn"]
        if not config.has_tables:
            ops += plain_ops(of)
        if config.position == "rotary":
            ops.append(elementwise(f"{at}.attention.rotary", 2 * t * of.inner, passes=4))
        ops += [
            elementwise(f"{at}.attention_norm", t * d, passes=5),
            linear(f"{at}.ffn.up", t, d, width),
            elementwise(f"{at}.ffn.activation", t * width, passes=2),
            linear(f"{at}.ffn.down", t, width, d),
            elementwise(f"{at}.ffn_norm", t * d, passes=5),
        ]
    return ops


def _sublayers(config: MheConfig, submodel: Submodel, bucket: Bucket) -> list[Sublayer]:
    kept = (
        submodel[f"layers.{layer}.heads"] if config.heads_shrink else config.num_attention_heads
        for layer in range(config.num_hidden_layers)
    )
    return [Sublayer(config, f"layers.{layer}.attention", bucket, heads) for layer, heads in enumerate(kept)]
