"""Decoders with a gated FFN, as Llama, Mistral, Qwen, Phi-3 and Gemma have it, up to Gemma 3n. See docs/models.md.

Axis per layer: ``ffn``, the neurons that gate and up make and down reads. One full-sequence pass answers at every
position; attention is causal, so what pads a text on its right changes nothing before it and no mask is needed. Modules
of sentence-transformers pool those tokens that a mask names. Parts that Gemma 3n adds are in gemma3n.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...bucket import Bucket
from ...bundle.entries.generation_entry import CachedLayer
from ...bundle.entries.tensor_spec import RowNeed
from ...elastic import Submodel
from ...errors import CheckpointError
from ...strict import structure
from ...workload import Op, elementwise, linear, lookup
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import MOST_LAYERS, known_keys, read_classes, read_widths, refuse_unhonoured
from ..family import Family
from ..hugging_face.decoder_positions import (
    Window,
    constant_positions,
    every_layer,
    every_second_layer,
    fix_frequencies,
    four_in_five,
    later_layers,
    pattern,
    read_windows,
)
from ..hugging_face.describe import describe
from ..hugging_face.interface import (
    LAST_TOKEN_CLASSES,
    NEXT_TOKEN,
    QUESTION,
    Dense,
    Head,
    Loading,
    TextModel,
    attention_problems,
    read_decoder,
)
from ..hugging_face.tensors import Parameters, Shape, held_tensors
from ..parts import CachedForm
from .gemma3n import Gemma3nParts, nested_spec, read_parts

if TYPE_CHECKING:  # plans are made without torch
    pass

_FLOAT32_BYTES = 4
_TOKEN_CLASSES = Head({"logits": ("sequence", "classes")}, {"score": Dense("hidden", "classes")})
_HEADS = (NEXT_TOKEN, LAST_TOKEN_CLASSES, _TOKEN_CLASSES, QUESTION)
# Tensors that published folders carry and no module has.
_UNUSED_TENSOR = re.compile(r".*\.rotary_emb\.inv_freq")
_SHARED_KEY_TENSOR = re.compile(r"(?:\w+\.)?layers\.(\d{1,9})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")
# Under these names transformers keeps the text part of a multimodal Gemma 3n, and saves it again.
_TEXT_PREFIX = "model.language_model."


@dataclass(frozen=True)
class Layout:
    """One model type: what its classes have that ``config.json`` does not say. ``classes`` are those read, with their
    heads; the first is the base model. ``defaults`` are those of the transformers class for keys that files leave out.

    ``qkv_bias``: queries, keys and values always have a bias. ``heeds``: which keys of ``_HEEDED`` the class reads; it
    passes over the others. ``head_norms``: queries and keys are normalised per head. ``norms_around``: attention and
    FFN have a norm behind them as well as before. ``packed``: one layer makes queries, keys and values, and files hold
    gate above up in one tensor; the module has them apart. ``pad`` is its padding token. ``original_positions`` are the
    ones that its model type has where ``config.json`` is silent, before rotary positions turn to other frequencies.
    ``window``: how its class reads sliding windows, None where it has none.
    """

    classes: Mapping[str, Head | None]
    qkv_bias: bool = False
    heeds: tuple[str, ...] = ()
    head_norms: bool = False
    norms_around: bool = False
    gemma3n: bool = False
    packed: bool = False
    pad: int | None = None
    original_positions: int | None = None
    window: Window | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)


def _classes(stem: str, question: str | None = None) -> dict[str, Head | None]:
    """``question`` is the attribute that holds the decoder in the class that answers questions, if there is one."""
    classes = {
        f"{stem}Model": None,
        f"{stem}ForCausalLM": NEXT_TOKEN,
        f"{stem}ForSequenceClassification": LAST_TOKEN_CLASSES,
        f"{stem}ForTokenClassification": _TOKEN_CLASSES,
    }
    return classes | ({f"{stem}ForQuestionAnswering": replace(QUESTION, prefix=question)} if question else {})


_BIASES, _CAPS = ("attention_bias", "mlp_bias"), ("attn_logit_softcapping", "final_logit_softcapping")
_HEEDED = frozenset([*_BIASES, *_CAPS])
_QWEN: dict[str, object] = {"num_key_value_heads": 32, "sliding_window": 4096}
_GEMMA: dict[str, object] = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA3: dict[str, Any] = {
    "heeds": ("attention_bias", *_CAPS),
    "head_norms": True,
    "norms_around": True,
    "pad": 0,
}
LAYOUTS: dict[str, Layout] = {
    "llama": Layout(_classes("Llama", "transformer"), heeds=_BIASES),
    "granite": Layout({"GraniteModel": None, "GraniteForCausalLM": NEXT_TOKEN}, heeds=_BIASES),
    "mistral": Layout(
        _classes("Mistral", "model"),
        window=every_layer,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Layout(_classes("Qwen2", "transformer"), qkv_bias=True, window=later_layers, defaults=_QWEN),
    "qwen3": Layout(
        _classes("Qwen3", "transformer"),
        heeds=("attention_bias",),
        head_norms=True,
        window=later_layers,
        defaults={**_QWEN, "head_dim": 128},
    ),
    "phi3": Layout(_classes("Phi3"), packed=True, pad=32_000, original_positions=4096, window=every_layer),
    "gemma": Layout(
        _classes("Gemma"), heeds=("attention_bias",), pad=0, defaults={**_GEMMA, "num_key_value_heads": 16}
    ),
    "gemma2": Layout(
        _classes("Gemma2"),
        heeds=("attention_bias", *_CAPS),
        norms_around=True,
        pad=0,
        window=every_second_layer,
        defaults={
            **_GEMMA,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Layout(
        {
            "Gemma3TextModel": None,
            "Gemma3ForCausalLM": NEXT_TOKEN,
            "Gemma3TextForSequenceClassification": LAST_TOKEN_CLASSES,
        },
        **_GEMMA3,
        window=pattern,
        defaults={**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "gemma3n_text": Layout(
        {"Gemma3nTextModel": None, "Gemma3nForCausalLM": NEXT_TOKEN},
        **_GEMMA3,
        gemma3n=True,
        window=four_in_five,
        defaults={**_GEMMA, "num_key_value_heads": 2, "final_logit_softcapping": 30.0, "sliding_window": 512},
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """The keys that determine the graph, with the defaults that all model types share."""

    vocab_size: int = field(metadata={"min": 1})
    hidden_size: int = field(metadata={"min": 1})
    num_hidden_layers: int = field(metadata={"min": 1, "max": MOST_LAYERS})
    num_attention_heads: int = field(metadata={"min": 1})
    max_position_embeddings: int = field(metadata={"min": 1})
    num_key_value_heads: int | None = field(default=None, metadata={"min": 1})
    head_dim: int | None = field(default=None, metadata={"min": 1})
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
    is_causal: bool = True


@dataclass(frozen=True, kw_only=True)
class DecoderModel(TextModel):
    """Settings that determine the graph. ``widths`` are FFN neurons by layer.

    ``qkv_bias``, ``output_bias`` and ``ffn_bias`` say which linear layers have one. ``score_cap`` and ``logit_cap``:
    attention scores or logits are bent by a tanh. ``gemma3n`` is what only that model has, or None. ``positions`` are
    the tokens of the longest text, ``stated_positions`` the ones that the configuration states. ``windows``: how many
    tokens each layer sees, None where it sees all.
    """

    layout: Layout
    heads: int
    kv_heads: int
    head_dim: int
    widths: tuple[int, ...]
    positions: int
    stated_positions: int
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    ffn_bias: bool
    score_cap: bool
    logit_cap: bool
    gemma3n: Gemma3nParts | None

    def has_keys(self, layer: int) -> bool:
        """Whether a layer makes its own keys and values: the last ones of Gemma 3n read those of an earlier layer."""
        return self.gemma3n is None or layer < len(self.widths) - self.gemma3n.shared_layers

    @property
    def parameters(self) -> Parameters:
        """Every parameter of the module."""
        found, hidden = Parameters(), self.hidden
        found.add(f"{self.prefix}embed_tokens.weight", self.vocabulary, hidden)
        for layer, width in enumerate(self.widths):
            at, axis = f"{self.prefix}layers.{layer}", found.axis(f"layers.{layer}.ffn", width)
            self._add_attention(found, f"{at}.self_attn", layer)
            for part in ("gate_proj", "up_proj"):
                found.linear(f"{at}.mlp.{part}", hidden, width, self.ffn_bias, rows=axis)
            found.linear(f"{at}.mlp.down_proj", width, hidden, self.ffn_bias, columns=axis)
            norms = ["input_layernorm", "post_attention_layernorm"]
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.layout.norms_around else []
            for norm in norms:
                found.norm(f"{at}.{norm}", hidden, bias=False)
            if self.gemma3n is not None:
                found.shapes |= self.gemma3n.layer_shapes(at, hidden)
        found.norm(f"{self.prefix}norm", hidden, bias=False)
        if self.gemma3n is not None:
            found.shapes |= self.gemma3n.model_shapes(self.prefix, hidden, len(self.widths))
        if self.head is not None:
            self.head.add_to(found, self.size, self.tied)
        return found

    def _add_attention(self, found: Parameters, at: str, layer: int) -> None:
        inner, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = [("q", inner)] + ([("k", keys), ("v", keys)] if self.has_keys(layer) else [])
        if self.layout.packed:
            parts = [("qkv", inner + 2 * keys)]
        for name, size in parts:
            found.linear(f"{at}.{name}_proj", self.hidden, size, self.qkv_bias)
            if self.layout.head_norms and name != "v":
                found.norm(f"{at}.{name}_norm", self.head_dim, bias=False)
        found.linear(f"{at}.o_proj", inner, self.hidden, self.output_bias)

    @property
    def stacked(self) -> dict[str, tuple[str, ...]]:
        """Tensors of files to the parameters that lie one above the other in them."""
        if not self.layout.packed:
            return {}
        ffns = (f"{self.prefix}layers.{layer}.mlp" for layer in range(len(self.widths)))
        return {f"{at}.gate_up_proj.weight": (f"{at}.gate_proj.weight", f"{at}.up_proj.weight") for at in ffns}


def read_decoder_model(checkpoint: Checkpoint) -> DecoderModel:
    """The model in ``checkpoint``, whose weights may be absent altogether.

    Raises CheckpointError for what config.json lacks or gets wrong, and for what a static graph cannot keep.
    """
    layout, where = LAYOUTS[checkpoint.config["model_type"]], str(checkpoint.folder / "config.json")
    passed_over = _HEEDED.difference(layout.heeds)
    config = {key: value for key, value in {**layout.defaults, **checkpoint.config}.items() if key not in passed_over}
    refuse_unhonoured(checkpoint)
    stated = structure(_Stated, known_keys(_Stated, config), where, CheckpointError)
    for problem in _refusals(stated, masked=checkpoint.has_modules):
        raise checkpoint.misfit(problem)
    hidden, layers, heads = stated.hidden_size, stated.num_hidden_layers, stated.num_attention_heads
    head, pad = read_decoder(checkpoint, layout.classes, stated.vocab_size, layout.pad)
    if head == _TOKEN_CLASSES and config.get("token_classification_bias") is False:
        head = replace(head, layers={"score": Dense("hidden", "classes", bias=False)})
    return DecoderModel(
        head=head,
        hidden=hidden,
        embedding=hidden,
        vocabulary=stated.vocab_size,
        classes=read_classes(checkpoint),
        pad=pad,
        tied=stated.tie_word_embeddings,
        layout=layout,
        heads=heads,
        kv_heads=stated.num_key_value_heads or heads,
        head_dim=stated.head_dim or hidden // heads,
        widths=read_widths(checkpoint, layers),
        positions=constant_positions(config, stated.max_position_embeddings, layout.original_positions),
        stated_positions=stated.max_position_embeddings,
        windows=read_windows(layout.window, config, layers, where),
        qkv_bias=layout.qkv_bias or stated.attention_bias,
        output_bias=stated.attention_bias,
        ffn_bias=stated.mlp_bias,
        score_cap=stated.attn_logit_softcapping is not None,
        logit_cap=stated.final_logit_softcapping is not None,
        gemma3n=read_parts(checkpoint, layers) if layout.gemma3n else None,
    )


def _refusals(stated: _Stated, masked: bool) -> Iterator[str]:
    """``masked``: the model takes a mask, which hides padding from positions that see later ones."""
    heads, pairs = stated.num_attention_heads, stated.num_key_value_heads or stated.num_attention_heads
    if heads % pairs:
        yield f"num_key_value_heads: {heads} heads cannot share {pairs} pairs of keys and values"
    if (stated.use_bidirectional_attention or not stated.is_causal) and not masked:
        key = "is_causal" if not stated.is_causal else "use_bidirectional_attention"
        yield (
            f"{key}: positions that see later ones are not supported; this model takes no mask, so the padding behind "
            "a text would change its answer"
        )


def read(checkpoint: Checkpoint) -> Architecture:
    """The decoder in ``checkpoint`` with its head, and with modules of sentence-transformers behind it."""
    model = read_decoder_model(checkpoint)
    parameters, shortened = model.parameters, None
    own: dict[str, Shape] = dict(parameters.shapes)  # as the class's own module has them
    for tensor, parts in model.stacked.items():
        parted = [own.pop(part) for part in parts]
        own[tensor] = (sum(rows for rows, *_ in parted), *parted[0][1:])
    is_of_others = model.unused(_HEADS, _UNUSED_TENSOR)

    def is_unused(name: str) -> bool:
        """Also keys and values of a layer that reads another's."""
        shared = _SHARED_KEY_TENSOR.fullmatch(name)
        return is_of_others(name) or (shared is not None and not model.has_keys(int(shared[1])))

    # The text part of a multimodal Gemma 3n has names of its own.
    renamed = ((_TEXT_PREFIX, "model."),) if model.gemma3n is not None else ()
    names = held_tensors(checkpoint, own, model.prefix.rstrip(".") or "model", is_unused, renamed)
    if model.positions < model.stated_positions:
        shortened = f"rotary positions change for texts of more, up to the {model.stated_positions} stated"
    needs: RowNeed | None = "first_token" if checkpoint.has_modules else None  # what pools tokens must know them
    found = describe(
        checkpoint,
        parameters,
        names,
        model.signature(checkpoint, model.positions, needs, shortened=shortened),
        partial(_workload, model),
        # Gemma 3n's own class knows widths per layer, the others do not.
        Loading(shapes=None if model.gemma3n else own, finish=partial(_finish, model, checkpoint)),
        model.hidden,
    )
    return replace(
        found,
        spec=found.spec if model.gemma3n is None else nested_spec(checkpoint, found.spec, model.gemma3n),
        stacked={names[tensor]: parts for tensor, parts in model.stacked.items() if tensor in names},
        cached=_cached(model),
        variant_problems=attention_problems(model.heads, model.kv_heads),
    )


FAMILY = Family("gated_decoder", tuple(LAYOUTS), read, reads_config_alone=True)


def _cached(model: DecoderModel) -> CachedForm | None:
    layers = tuple(
        CachedLayer(model.kv_heads, model.head_dim, None if window is None or window >= model.positions else window)
        for layer, window in enumerate(model.windows)
        if model.has_keys(layer)
    )
    return model.cached_form(model.positions, layers)


def _workload(model: DecoderModel, submodel: Submodel, bucket: Bucket) -> list[Op]:
    """Every position passes every layer and the head; a sliding window masks scores, and computes them all the same."""
    hidden, tokens, extra = model.hidden, bucket.tokens, model.gemma3n
    ops = [lookup("embedding", tokens * hidden)]
    if extra is not None:
        ops += extra.first_ops(bucket, hidden, len(model.widths))
    for layer in range(len(model.widths)):
        at = f"layers.{layer}"
        ops += [*_attention_ops(model, at, layer, bucket), *_ffn_ops(model, at, layer, submodel, bucket)]
        if extra is not None:
            ops += extra.layer_ops(at, bucket, hidden)
    if extra is not None:
        ops += extra.last_ops(bucket, hidden)
    ops += [elementwise("norm", tokens * hidden, passes=4), *model.head_ops(bucket)]
    if model.logit_cap and model.head is not None and model.head.vocabulary is not None:
        ops.append(elementwise("lm_head.cap", tokens * model.vocabulary, passes=6))
    return ops


def _attention_ops(model: DecoderModel, at: str, layer: int, bucket: Bucket) -> list[Op]:
    """Grouped-query attention: ``kv_heads`` make keys and values, repeated for all ``heads``."""
    tokens, inner, keys = bucket.tokens, model.heads * model.head_dim, model.kv_heads * model.head_dim
    scores = model.heads * bucket.batch * bucket.sequence**2
    moved = (2 * tokens * inner + scores) * _FLOAT32_BYTES
    made = [("query", inner)] + ([("key", keys), ("value", keys)] if model.has_keys(layer) else [])
    rotated = sum(size for name, size in made if name != "value")
    ops = [
        elementwise(f"{at}.attention.norm", tokens * model.hidden, passes=4),
        *(linear(f"{at}.attention.{name}", tokens, model.hidden, size, model.qkv_bias) for name, size in made),
        elementwise(f"{at}.attention.split", tokens * sum(size for _, size in made), passes=2),
        elementwise(f"{at}.attention.rotary", tokens * rotated, passes=8),
    ]
    if model.layout.head_norms:
        ops.append(elementwise(f"{at}.attention.head_norms", tokens * rotated, passes=4))
    if model.kv_heads != model.heads:
        ops.append(elementwise(f"{at}.attention.repeat", 2 * tokens * inner, passes=2))
    ops.append(Op(f"{at}.attention.scores", "batched_gemm", 2 * scores * model.head_dim, 0, moved))
    if model.score_cap:
        ops.append(elementwise(f"{at}.attention.cap", scores, passes=6))
    ops += [
        elementwise(f"{at}.attention.softmax", scores, passes=8),
        Op(f"{at}.attention.context", "batched_gemm", 2 * scores * model.head_dim, 0, moved),
        elementwise(f"{at}.attention.merge", tokens * inner, passes=2),
        linear(f"{at}.attention.output", tokens, inner, model.hidden, model.output_bias),
        elementwise(f"{at}.attention.residual", tokens * model.hidden, passes=7 if model.layout.norms_around else 3),
    ]
    return ops


def _ffn_ops(model: DecoderModel, at: str, layer: int, submodel: Submodel, bucket: Bucket) -> list[Op]:
    tokens, width = bucket.tokens, submodel[f"{at}.ffn"]
    ops = [
        elementwise(f"{at}.ffn.norm", tokens * model.hidden, passes=4),
        linear(f"{at}.ffn.gate", tokens, model.hidden, width, model.ffn_bias),
        linear(f"{at}.ffn.up", tokens, model.hidden, width, model.ffn_bias),
        # The activation reads and writes once, its product with up reads two tensors and writes one.
        elementwise(f"{at}.ffn.activation", tokens * width, passes=5),
        linear(f"{at}.ffn.down", tokens, width, model.hidden, model.ffn_bias),
        elementwise(f"{at}.ffn.residual", tokens * model.hidden, passes=7 if model.layout.norms_around else 3),
    ]
    if model.gemma3n is not None and model.gemma3n.sparse[layer]:
        ops.append(elementwise(f"{at}.ffn.cutoff", tokens * width, passes=10))
    return ops


def _finish(model: DecoderModel, checkpoint: Checkpoint, module: Any) -> None:
    """Constant frequencies, and a layer each for gate and up. Raises CheckpointError for frequencies that change."""
    decoder = module.get_submodule(model.prefix.rstrip("."))
    fix_frequencies(decoder.rotary_emb, model.positions, checkpoint)
    if model.layout.packed:
        from ..hugging_face.transformers_model import SplitFfn

        for layer in decoder.layers:
            layer.mlp = SplitFfn(layer.mlp)
