"""T5 and its gated form (v1.1): an encoder, and a decoder that reads it; or the encoder alone. See docs/models.md.

Axis per layer of both sides: ``ffn``, the neurons that ``wi`` (gated: ``wi_0`` and ``wi_1``) makes and ``wo`` reads.
The whole engine answers a pair of texts at every position of the second; both have the bucket's length, since what pads
the first is masked, and what pads the second on its right changes nothing before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ...bucket import Bucket
from ...bundle.entries.generation_entry import CachedLayer
from ...bundle.entries.tensor_spec import TensorSpec
from ...elastic import Submodel
from ...workload import Op, attention_products, elementwise, feed_forward, linear, lookup
from ..architecture import Architecture, is_table
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import LEARNED, MOST_LAYERS, read_number, read_pad, refuse_unhonoured
from ..checkpoints.generation_defaults import read_decoder_start
from ..family import Deferred, Family
from ..hugging_face.describe import describe
from ..hugging_face.interface import Loading, attention_problems
from ..hugging_face.tensors import MOST_REACH, Parameters, held_tensors
from ..parts import CachedSpec, EncoderSpec
from ..signature import TOKENS, Signature, next_token_logits, text_signature

if TYPE_CHECKING:
    from ..hugging_face import generating
else:
    generating = Deferred("..hugging_face.generating", __package__)

ENCODER, GENERATOR = "T5EncoderModel", "T5ForConditionalGeneration"
_HEADLESS = "T5Model"
# Positions are relative and have no end; what engines take has one.
MOST_TOKENS = 4096
_SHORTENED = "relative positions have no end; engines take so many"
TABLE = "shared.weight"
HEAD = "lm_head.weight"
_GATED = "gated-"
# Copies of the table, and a bias that the first published files carry and no layer reads.
_UNUSED = frozenset(
    [
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    ]
)
# Behind which a step is counted.
_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class T5Model:
    """Settings that determine the graph. ``decoder_layers`` is 0 for the encoder alone, which answers with its hidden
    states.

    ``head_dim`` times ``heads`` may differ from ``hidden``. ``gated``: the FFN has a gate beside it. ``tied``: the
    matrix back to the vocabulary is the table of tokens. The decoder's first token is ``start``.
    """

    vocabulary: int
    hidden: int
    heads: int
    head_dim: int
    ffn: int
    layers: int
    decoder_layers: int
    buckets: int
    gated: bool
    tied: bool
    pad: int
    start: int

    @property
    def stacks(self) -> dict[str, int]:
        """The layers of each side."""
        return {"encoder": self.layers, **({"decoder": self.decoder_layers} if self.decoder_layers else {})}

    @property
    def parameters(self) -> Parameters:
        """Every parameter of the module."""
        found = Parameters()
        found.add(TABLE, self.vocabulary, self.hidden)
        for stack, layers in self.stacks.items():
            for layer in range(layers):
                self._add_block(found, stack, layer)
            found.norm(f"{stack}.final_layer_norm", self.hidden, bias=False)
        if self.decoder_layers and not self.tied:
            found.add(HEAD, self.vocabulary, self.hidden)
        return found

    def _add_block(self, found: Parameters, stack: str, layer: int) -> None:
        at, inner = f"{stack}.block.{layer}.layer", self.heads * self.head_dim
        attentions = ["SelfAttention", *(["EncDecAttention"] if stack == "decoder" else [])]
        for place, attention in enumerate(attentions):
            for part in "qkv":
                found.linear(f"{at}.{place}.{attention}.{part}", self.hidden, inner, bias=False)
            found.linear(f"{at}.{place}.{attention}.o", inner, self.hidden, bias=False)
        if layer == 0:
            found.add(f"{at}.0.SelfAttention.relative_attention_bias.weight", self.buckets, self.heads)
        ffn, axis = f"{at}.{len(attentions)}.DenseReluDense", found.axis(f"{stack}.layers.{layer}.ffn", self.ffn)
        for up in ("wi_0", "wi_1") if self.gated else ("wi",):
            found.linear(f"{ffn}.{up}", self.hidden, self.ffn, bias=False, rows=axis)
        found.linear(f"{ffn}.wo", self.ffn, self.hidden, bias=False, columns=axis)
        for place in range(len(attentions) + 1):
            found.norm(f"{at}.{place}.layer_norm", self.hidden, bias=False)

    def names_in_files(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The tensors of a folder by their parameters, as ``held_tensors`` finds them."""

        def is_unused(name: str) -> bool:
            """A copy, or a part of the side that the encoder alone does not have."""
            other_side = not self.decoder_layers and name.startswith(("decoder.", "lm_head."))
            return other_side or name in _UNUSED or (self.tied and name == HEAD)

        return held_tensors(checkpoint, self.parameters.shapes, "transformer", is_unused)


def read_t5(checkpoint: Checkpoint, encoder_alone: bool = False) -> T5Model:
    """The model in ``checkpoint``, whose weights may be absent altogether; ``encoder_alone`` of a model that has a
    decoder too, which is then not read.

    Raises CheckpointError for what config.json lacks or gets wrong, and for what is not honoured.
    """
    refuse_unhonoured(checkpoint, encoder_decoder=True)
    name = class_name(checkpoint)
    known = (GENERATOR, ENCODER, *([_HEADLESS] if encoder_alone else []))
    if name not in known:
        raise checkpoint.misfit(f"architectures: expected {' or '.join(known)}, got {name!r:.80}")
    vocabulary, layers = read_number(checkpoint, "vocab_size"), _layers(checkpoint, "num_layers", 6)
    generates, kind = name == GENERATOR and not encoder_alone, _ffn_kind(checkpoint)
    buckets = read_number(checkpoint, "relative_attention_num_buckets", default=32, at_least=4)
    # Half of a decoder's buckets are a distance each, and the others are those up to the farthest.
    read_number(checkpoint, "relative_attention_max_distance", 128, at_least=buckets // 2 + 1, at_most=MOST_REACH)
    # transformers ties the head to the table in every model and unties one whose weights differ from the table's; a
    # model whose outputs are not scaled (v1.1) has such a head, where its files hold one.
    tied = scales_outputs(checkpoint) or (checkpoint.has_weights and HEAD not in checkpoint.tensors)
    return T5Model(
        vocabulary=vocabulary,
        hidden=read_number(checkpoint, "d_model"),
        heads=read_number(checkpoint, "num_heads"),
        head_dim=read_number(checkpoint, "d_kv"),
        ffn=read_number(checkpoint, "d_ff"),
        layers=layers,
        decoder_layers=_layers(checkpoint, "num_decoder_layers", layers) if generates else 0,
        buckets=buckets,
        gated=kind.startswith(_GATED),
        tied=tied,
        pad=read_pad(checkpoint, vocabulary, 0) or 0,
        start=read_decoder_start(checkpoint, vocabulary) if generates else 0,
    )


def class_name(checkpoint: Checkpoint) -> str | None:
    """The class that config.json names; sentence-transformers reads the encoder, whatever that is."""
    return ENCODER if checkpoint.has_modules else checkpoint.architecture


def scales_outputs(checkpoint: Checkpoint) -> bool:
    """Whether what the head reads is multiplied by ``hidden ** -0.5``, as in the first T5."""
    config = checkpoint.config
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False))


def _layers(checkpoint: Checkpoint, key: str, default: int) -> int:
    return read_number(checkpoint, key, default=default, at_most=MOST_LAYERS)


def _ffn_kind(checkpoint: Checkpoint) -> str:
    """``relu``, or ``gated-gelu`` and the like: an activation, perhaps with a gate."""
    kind = checkpoint.config.get("feed_forward_proj", "relu")
    activation = kind.removeprefix(_GATED) if isinstance(kind, str) else ""
    if activation in ("", "gated", *LEARNED) or "-" in activation:
        raise checkpoint.misfit(
            f"feed_forward_proj: expected an activation, such as relu, or gated-gelu, got {kind!r:.80}"
        )
    return str(kind)


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``; the encoder alone with modules of sentence-transformers behind it."""
    model = read_t5(checkpoint)
    found = describe(
        checkpoint,
        model.parameters,
        model.names_in_files(checkpoint),
        _signature(checkpoint, model),
        partial(forward_ops, model),
        Loading(class_name=class_name(checkpoint), untied=not model.tied),
        model.hidden,
    )
    return replace(
        found,
        is_embedding=lambda name, shape: name == TABLE or is_table(name, shape),
        cached=_cached(model) if model.decoder_layers else None,
        variant_problems=attention_problems(model.heads, model.heads),
    )


FAMILY = Family("t5", ("t5",), read, reads_config_alone=True)


def _signature(checkpoint: Checkpoint, model: T5Model) -> Signature:
    generates = bool(model.decoder_layers)
    states = TensorSpec("last_hidden_state", "float32", (*TOKENS, model.hidden))
    output, start = (next_token_logits(model.vocabulary), model.start) if generates else (states, None)
    sizes = (MOST_TOKENS, model.vocabulary, model.pad)
    return text_signature(checkpoint, [output], *sizes, "token", shortened=_SHORTENED, start=start)


def _cached(model: T5Model) -> CachedSpec:
    layers = (CachedLayer(model.heads, model.head_dim),) * model.decoder_layers
    return CachedSpec(
        model.vocabulary,
        MOST_TOKENS,
        layers,
        lambda module: generating.CachedDecoder(module.model, layers, reads=layers).eval(),
        lambda module: generating.RecordedDecoder(module.model, layers).eval(),
        encoder=EncoderSpec(
            model.start,
            MOST_TOKENS,
            lambda module: generating.SourceKeys(module.model),
            partial(encoding_ops, model),
            partial(step_ops, model),
        ),
    )


def forward_ops(model: T5Model, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """Encoder and decoder, each over as many tokens, and the head."""
    ops = _stack(model, "encoder", submodel, bucket)
    return [*ops, *decoder_ops(model, submodel, bucket)] if model.decoder_layers else ops


def decoder_ops(model: T5Model, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """The decoder, behind as many tokens, and the head."""
    return _stack(model, "decoder", submodel, bucket, source=bucket.sequence)


def encoding_ops(model: T5Model, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """The encoder, and the keys and values that every layer of the decoder makes of its answer."""
    return [*_stack(model, "encoder", submodel, bucket), *source_ops(model, bucket)]


def source_ops(model: T5Model, bucket: Bucket) -> list[Op]:
    """The keys and values that every layer of the decoder makes of what an encoder returned."""
    inner, ops = model.heads * model.head_dim, list[Op]()
    for layer in range(model.decoder_layers):
        at = f"decoder.layers.{layer}.cross_attention"
        ops += [linear(f"{at}.{p}", bucket.tokens, model.hidden, inner, bias=False) for p in ("key", "value")]
    return ops


def step_ops(model: T5Model, submodel: Submodel) -> list[Op]:
    """One new token of the decoder, behind a short prompt."""
    return _stack(model, "decoder", submodel, Bucket(1, 1), source=_PROMPT_TOKENS, has_source_keys=True)


def _stack(
    model: T5Model, stack: str, submodel: Submodel, bucket: Bucket, source: int = 0, has_source_keys: bool = False
) -> list[Op]:
    """One side over ``bucket``; a decoder with the head. It reads ``source`` tokens of the encoder, whose keys and
    values it makes too, unless it ``has_source_keys`` already."""
    hidden, tokens = model.hidden, bucket.tokens
    ops = [lookup(f"{stack}.embedding", tokens * hidden)]
    ops.append(lookup(f"{stack}.position_bias", model.heads * bucket.sequence**2))
    for layer in range(model.stacks[stack]):
        at = f"{stack}.layers.{layer}"
        ops += _attention(model, f"{at}.attention", bucket, bucket.sequence, made_of=tokens)
        if stack == "decoder":
            made = 0 if has_source_keys else bucket.batch * source
            ops += _attention(model, f"{at}.cross_attention", bucket, source, made_of=made)
        width = submodel[f"{at}.ffn"]
        ops += [
            elementwise(f"{at}.ffn.norm", tokens * hidden, passes=4),
            *feed_forward(f"{at}.ffn", tokens, hidden, width, bias=False, gated=model.gated),
            elementwise(f"{at}.ffn.residual", tokens * hidden, passes=3),
        ]
    ops.append(elementwise(f"{stack}.norm", tokens * hidden, passes=4))
    return [*ops, linear("lm_head", tokens, hidden, model.vocabulary, bias=False)] if stack == "decoder" else ops


def _attention(model: T5Model, at: str, bucket: Bucket, seen: int, made_of: int) -> Iterator[Op]:
    """Queries of ``bucket`` over ``seen`` tokens of each row; keys and values are made of ``made_of`` tokens in all."""
    tokens, inner = bucket.tokens, model.heads * model.head_dim
    scores, read = model.heads * tokens * seen, (tokens + bucket.batch * seen) * inner
    yield elementwise(f"{at}.norm", tokens * model.hidden, passes=4)
    yield linear(f"{at}.query", tokens, model.hidden, inner, bias=False)
    if made_of:
        yield from (linear(f"{at}.{part}", made_of, model.hidden, inner, bias=False) for part in ("key", "value"))
    yield elementwise(f"{at}.split", (tokens + 2 * made_of) * inner, passes=2)
    yield from attention_products(at, scores, model.head_dim, read, {"softmax": 10})
    yield elementwise(f"{at}.merge", tokens * inner, passes=2)
    yield linear(f"{at}.output", tokens, inner, model.hidden, bias=False)
    yield elementwise(f"{at}.residual", tokens * model.hidden, passes=3)
