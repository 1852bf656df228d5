"""What a pass over an MHE model costs, operation by operation (no torch here).

Attention of heads with embeddings, which engines may have in several forms, is left out: ``variant_ops`` has it.
"""

from __future__ import annotations

from .....bucket import Bucket
from .....elastic import Submodel
from .....workload import Op, elementwise, linear, lookup
from .attention_ops import Sublayer, form_ops, kept_ops, plain_ops, reading_ops
from .config import MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig
from .forms import CROSS, ENCODER, held_forms, prompt_form
from .places import Place, layers_of, places_in, places_of

# Behind which a step is counted.
_PROMPT_TOKENS = 64


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
        _head(config, bucket),
    ]


def encoder_decoder_ops(config: MheEncoderDecoderConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of ``MheEncoderDecoder`` over two texts of the bucket's length, with the logits of every position."""
    d, t = config.hidden_size, bucket.tokens
    tables = [lookup("encoder.embeddings", 2 * t * d), lookup("decoder.embeddings", 2 * t * d)]
    return [*tables, *_layer_ops(config, submodel, bucket), _head(config, bucket)]


def encoding_ops(config: MheEncoderDecoderConfig, submodel: Submodel, bucket: Bucket, spread: float = 0.0) -> list[Op]:
    """The encoder, and the keys and values that the decoder reads of it. ``spread`` as of ``variant_ops``."""
    ops = [lookup("encoder.embeddings", 2 * bucket.tokens * config.hidden_size)]
    ops += [op for layer in layers_of(config) if _is_encoder(layer) for op in _between(config, submodel, bucket, layer)]
    for place in places_of(config):
        of = _sublayer(config, submodel, bucket, place)
        if place.role == ENCODER:
            ops += form_ops(of)[prompt_form(config, spread)] if config.has_tables else plain_ops(of)
        elif place.role == CROSS:
            ops += kept_ops(of)
    return ops


def step_ops(config: MheEncoderDecoderConfig, submodel: Submodel) -> list[Op]:
    """One new token of the decoder, behind a short prompt."""
    bucket = Bucket(1, 1)
    ops = [lookup("decoder.embeddings", 2 * config.hidden_size)]
    for layer in layers_of(config):
        if not _is_encoder(layer):
            own, cross = (_sublayer(config, submodel, bucket, place) for place in places_in(config, layer))
            ops += [*kept_ops(own), *reading_ops(own), *reading_ops(cross._replace(source=_PROMPT_TOKENS))]
            ops += _between(config, submodel, bucket, layer)
    return [*ops, _head(config, bucket)]


def variant_ops(
    config: MheConfig, submodel: Submodel, bucket: Bucket, spread: float = 0.0
) -> dict[str, dict[str, list[Op]]]:
    """Attention of all layers by its role, in each form that the model may have; nothing where heads have no
    embeddings. ``spread`` is what ``key_spread`` says of its weights."""
    if not config.has_tables:
        return {}
    by_role: dict[str, dict[str, list[Op]]] = {}
    for place in places_of(config):
        ops = form_ops(_sublayer(config, submodel, bucket, place))
        held = held_forms(config, spread, place.role)
        offered = by_role.setdefault(place.role, {form: [] for form in held})
        for form in held:
            offered[form] += ops[form]
    return by_role


def _layer_ops(config: MheConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    ops = [op for layer in layers_of(config) for op in _between(config, submodel, bucket, layer)]
    for place in places_of(config):
        of = _sublayer(config, submodel, bucket, place)
        if not config.has_tables:
            ops += plain_ops(of)
        if config.position == "rotary":
            ops.append(elementwise(f"{place.at}.rotary", 2 * bucket.tokens * of.inner, passes=4))
    return ops


def _between(config: MheConfig, submodel: Submodel, bucket: Bucket, layer: str) -> list[Op]:
    """What a layer has beside attention."""
    d, t, width = config.hidden_size, bucket.tokens, submodel[f"{layer}.ffn"]
    return [
        *(elementwise(f"{place.at}_norm", t * d, passes=5) for place in places_in(config, layer)),
        linear(f"{layer}.ffn.up", t, d, width),
        elementwise(f"{layer}.ffn.activation", t * width, passes=2),
        linear(f"{layer}.ffn.down", t, width, d),
        elementwise(f"{layer}.ffn_norm", t * d, passes=5),
    ]


def _sublayer(config: MheConfig, submodel: Submodel, bucket: Bucket, place: Place) -> Sublayer:
    kept = config.axis_size if place.axis is None else submodel[place.axis]
    heads, size = (config.num_attention_heads, kept) if config.width_first else (kept, config.head_size)
    return Sublayer(config, place.at, bucket, heads, size)


def _head(config: MheConfig, bucket: Bucket) -> Op:
    """The product with the vocabulary."""
    return linear("lm_head", bucket.tokens, config.hidden_size, config.vocab_size, bias=False)


def _is_encoder(layer: str) -> bool:
    return layer.startswith("encoder.")
