"""Cost of a pass over an MHE model, operation by operation, and its attention in each form (no torch here).

Attention of heads with embeddings, which engines may have in several forms, is left out of a pass: ``variant_ops`` has
it. Shapes: ``B`` rows, ``S`` tokens, ``T = B * S``, ``H`` hidden, ``n`` heads of size ``d``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ....bucket import Bucket
from ....elastic import Submodel
from ....workload import Op, elementwise, feed_forward, linear, lookup, self_attention
from .config import ROLES, MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig
from .forms import CROSS, ENCODER, Place, held_forms, layers_of, places_in, places_of, prompt_form

_FLOAT32_BYTES = 4
# Scores of so many bytes stay in the caches of a processor from one operation to the next. With more, an operator that
# never writes them saves as much as two passes of the softmax take.
_IN_CACHES, _SOFTMAX_PASSES, _SAVED_PASSES = 4_000_000, 8, 2
# Behind which a step is counted.
_PROMPT_TOKENS = 64


def forward_ops(config: MheConfig, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """One pass of the model; of two sides both over texts of the bucket's length. Language models have the logits of
    every position."""
    d, t = config.hidden_size, bucket.tokens
    sides = ("encoder.", "decoder.") if isinstance(config, MheEncoderDecoderConfig) else ("",)
    ops = [lookup(f"{side}embeddings", 2 * t * d) for side in sides]
    if not isinstance(config, MheEncoderConfig):
        norm = [elementwise("norm", t * d, passes=4)] if isinstance(config, MheDecoderConfig) else []
        return [*ops, *_layer_ops(config, submodel, bucket), *norm, _head(config, bucket)]
    ops += [elementwise("embeddings.norm", t * d, passes=5), *_layer_ops(config, submodel, bucket)]
    if config.head == "masked_lm":
        ops += [
            linear("head.transform", t, d, d),
            elementwise("head.norm", t * d, passes=6),  # with the activation before it
            linear("head.decoder", t, d, config.vocab_size),
        ]
    if config.num_labels is not None:
        ops += [linear("pooler", bucket.batch, d, d), linear("classifier", bucket.batch, d, config.num_labels)]
    return ops


def encoding_ops(config: MheEncoderDecoderConfig, submodel: Submodel, bucket: Bucket, spread: float = 0.0) -> list[Op]:
    """The encoder, and the keys and values that the decoder reads of it. ``spread`` as of ``variant_ops``."""
    ops = [lookup("encoder.embeddings", 2 * bucket.tokens * config.hidden_size)]
    ops += [op for layer in layers_of(config) if _is_encoder(layer) for op in _between(config, submodel, bucket, layer)]
    for place in places_of(config):
        of = _sublayer(config, submodel, bucket, place)
        if place.role == ENCODER:
            ops += form_ops(of)[prompt_form(config, spread)] if config.has_tables else plain_ops(of)
        elif place.role == CROSS:
            ops += key_value_ops(of)
    return ops


def step_ops(config: MheEncoderDecoderConfig, submodel: Submodel) -> list[Op]:
    """One new token of the decoder, behind a short prompt."""
    bucket = Bucket(1, 1)
    ops = [lookup("decoder.embeddings", 2 * config.hidden_size)]
    for layer in layers_of(config):
        if not _is_encoder(layer):
            own, cross = (_sublayer(config, submodel, bucket, place) for place in places_in(config, layer))
            ops += [*key_value_ops(own), *reading_ops(own), *reading_ops(cross._replace(source=_PROMPT_TOKENS))]
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
    """Parts of a layer beside attention."""
    d, t = config.hidden_size, bucket.tokens
    return [
        *(elementwise(f"{place.at}_norm", t * d, passes=5) for place in places_in(config, layer)),
        *feed_forward(f"{layer}.ffn", t, d, submodel[f"{layer}.ffn"]),
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


class Sublayer(NamedTuple):
    """One attention sublayer, called ``at``, of a submodel that keeps ``heads`` of ``size``. Its queries read
    ``source`` tokens of each row, as many as there are queries unless stated."""

    config: MheConfig
    at: str
    bucket: Bucket
    heads: int
    size: int
    source: int | None = None

    @property
    def inner(self) -> int:
        return self.heads * self.size

    @property
    def pairs(self) -> int:
        """Numbers of one head's scores."""
        return self.bucket.tokens * (self.source or self.bucket.sequence)

    @property
    def scores(self) -> int:
        """Numbers of all heads' scores."""
        return self.heads * self.pairs

    def linear(self, part: str, outputs: int, bias: bool | None = None) -> Op:
        """A projection of the hidden state."""
        has_bias = self.config.attention_bias if bias is None else bias
        return linear(f"{self.at}.{part}", self.bucket.tokens, self.config.hidden_size, outputs, has_bias)

    def output(self) -> Op:
        tokens, bias = self.bucket.tokens, self.config.attention_bias
        return linear(f"{self.at}.output", tokens, self.inner, self.config.hidden_size, bias)

    def elementwise(self, part: str, elements: int, passes: int) -> Op:
        return elementwise(f"{self.at}.{part}", elements, passes)

    def product(self, part: str, heads: int) -> Op:
        """Scores of ``heads`` queries for each token, or what they mix."""
        size, pairs = self.size, heads * self.pairs
        read = self.bucket.batch * (self.source or self.bucket.sequence)
        moved = (heads * self.bucket.tokens * size + read * size + pairs) * _FLOAT32_BYTES
        return Op(f"{self.at}.{part}", "batched_gemm", 2 * pairs * size, 0, moved)


def plain_ops(of: Sublayer) -> list[Op]:
    """One sublayer of a kind without head embeddings (section 2.4)."""
    widths, heads = _plain_widths(of), _heads_of_scores(of)
    return [
        *(of.linear(f"projection.{number}", width) for number, width in enumerate(widths)),
        of.elementwise("split", of.bucket.tokens * sum(widths), passes=4),
        of.product("scores", heads),
        of.elementwise("softmax", heads * of.pairs, passes=_SOFTMAX_PASSES),
        of.product("context", heads),
        of.output(),
    ]


def key_value_ops(of: Sublayer) -> list[Op]:
    """The keys and values that all queries of a generation read, in the form of KV-cache engines."""
    one = of.size
    widths = (one, one) if of.config.has_tables else _plain_widths(of)[1:]
    return [of.linear(f"kept.{number}", width) for number, width in enumerate(widths)]


def reading_ops(of: Sublayer) -> list[Op]:
    """Queries over keys and values that are there, in the form of KV-cache engines."""
    heads, config = _heads_of_scores(of), of.config
    fold = [of.elementwise("embeddings", of.bucket.tokens * of.inner, passes=2)] if config.has_tables else []
    return [
        of.linear("query", of.size if config.has_tables else _plain_widths(of)[0]),
        *fold,
        of.product("scores", heads),
        of.elementwise("softmax", heads * of.pairs, passes=_SOFTMAX_PASSES),
        of.product("context", heads),
        of.output(),
    ]


def _plain_widths(of: Sublayer) -> tuple[int, ...]:
    """Outputs of the projections of a kind without head embeddings, queries first."""
    config = of.config
    return tuple(of.inner if part in config.own_projections else of.size for part in config.projections)


def _heads_of_scores(of: Sublayer) -> int:
    return 1 if of.config.attention == "sha" else of.heads


def form_ops(of: Sublayer) -> Mapping[str, list[Op]]:
    """The operations of one sublayer with head embeddings, by form."""
    return {form: ops(of) for form, ops in _OPS_BY_FORM.items()}


def _literal(of: Sublayer) -> list[Op]:
    """Every head's queries, keys and values are made, then turned around as an MHA's are."""
    every = of.bucket.tokens * of.inner
    return [
        *(of.linear(part, of.size) for part in ROLES),
        of.elementwise("embeddings", 3 * every, passes=2),
        of.elementwise("split", 3 * every, passes=2),
        of.product("scores", of.heads),
        of.elementwise("softmax", of.scores, passes=_SOFTMAX_PASSES),
        of.product("context", of.heads),
        of.output(),
    ]


def _expanded(of: Sublayer) -> list[Op]:
    """An MHA of as many heads; what mhe_add adds is its biases."""
    config, has_bias = of.config, of.config.attention_bias or of.config.attention == "mhe_add"
    return self_attention(of.at, of.bucket, config.hidden_size, of.heads, of.size, has_bias)


def _expanded_queries(of: Sublayer) -> list[Op]:
    has_bias = of.config.attention_bias or of.config.attention == "mhe_add"
    return [of.linear("query", of.inner, has_bias), *_over_shared_keys(of)]


def _normal(of: Sublayer) -> list[Op]:
    fold = of.elementwise("embeddings", of.bucket.tokens * of.inner, passes=2)
    return [of.linear("query", of.size), fold, *_over_shared_keys(of)]


def _one_head(of: Sublayer) -> list[Op]:
    """As the normal form, but that scores never leave the caches of a core, where many of them would."""
    saved = _SAVED_PASSES if of.scores * _FLOAT32_BYTES > _IN_CACHES else 0
    softmax = of.elementwise("softmax", of.scores, passes=_SOFTMAX_PASSES - saved)
    return [softmax if op.name == softmax.name else op for op in _normal(of)]


def _shared_scores(of: Sublayer) -> list[Op]:
    return [
        *(of.linear(part, of.size) for part in ROLES),
        of.product("scores", 1),
        of.elementwise("mask", of.pairs, passes=2),
        linear(f"{of.at}.key_bias", of.bucket.tokens, of.size, of.heads, bias=False),
        of.elementwise("softmax", of.scores, passes=_SOFTMAX_PASSES),
        *_mixed(of),
    ]


def _one_exponential(of: Sublayer) -> list[Op]:
    tokens = of.bucket.tokens
    moved = (of.pairs + 2 * tokens * of.inner) * _FLOAT32_BYTES
    return [
        *(of.linear(part, of.size) for part in ROLES),
        of.product("scores", 1),
        of.elementwise("mask", of.pairs, passes=2),
        of.elementwise("softmax", of.pairs, passes=_SOFTMAX_PASSES),
        linear(f"{of.at}.key_bias", tokens, of.size, of.heads, bias=False),
        of.elementwise("weights", tokens * of.heads, passes=6),
        of.elementwise("weighed", tokens * of.inner, passes=2),
        Op(f"{of.at}.context", "batched_gemm", 2 * of.pairs * of.inner, 0, moved),
        Op(f"{of.at}.sums", "batched_gemm", 2 * of.scores, 0, of.pairs * _FLOAT32_BYTES),
        of.elementwise("divided", tokens * of.inner, passes=2),
        of.elementwise("value_shift", tokens * of.inner, passes=2),
        of.output(),
    ]


def _over_shared_keys(of: Sublayer) -> list[Op]:
    return [
        *(of.linear(part, of.size) for part in ("key", "value")),
        of.product("scores", of.heads),
        of.elementwise("softmax", of.scores, passes=_SOFTMAX_PASSES),
        *_mixed(of),
    ]


def _mixed(of: Sublayer) -> list[Op]:
    """Values are the same for all heads; what mhe_add adds to them is added to what each head read."""
    shifts = of.config.attention == "mhe_add"
    shift = [of.elementwise("value_shift", of.bucket.tokens * of.inner, passes=2)] if shifts else []
    return [of.product("context", of.heads), *shift, of.output()]


_OPS_BY_FORM: Mapping[str, Callable[[Sublayer], list[Op]]] = {
    "normal": _normal,
    "one_head": _one_head,
    "shared_scores": _shared_scores,
    "one_exponential": _one_exponential,
    "expanded_queries": _expanded_queries,
    "expanded": _expanded,
    "literal": _literal,
}
