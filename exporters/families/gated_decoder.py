"""Decoders with a gated FFN, as Llama, Mistral, Qwen, Phi-3 and Gemma have it, up to Gemma 3n. See docs/models.md.

Axis per layer: ``ffn``, the neurons that gate and up make and down reads. One full-sequence pass answers at every
position; attention is causal, so what pads a text on its right changes nothing before it and no mask is needed. Modules
of sentence-transformers pool those tokens that a mask names. Parts that Gemma 3n adds are in gemma3n.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...bucket import Bucket
from ...bundle.entries.generation_entry import CachedLayer
from ...bundle.entries.tensor_spec import RowNeed
from ...elastic import Submodel
from ...errors import CheckpointError
from ...strict import structure
from ...workload import Op, attention_products, elementwise, feed_forward, linear, lookup
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import known_keys, read_classes, read_widths, refuse_unhonoured
from ..family import Family
from ..hugging_face.decoder_positions import constant_positions, fix_frequencies, read_windows
from ..hugging_face.describe import describe
from ..hugging_face.interface import Dense, Loading, TextModel, attention_problems, read_decoder
from ..hugging_face.tensors import Parameters, Shape, held_tensors
from .decoder_types import HEADS, LAYOUTS, TOKEN_CLASSES, Layout, Stated
from .gemma3n import Gemma3nParts, nested_spec, read_parts

# Tensors that published folders carry and no module has.
_UNUSED_TENSOR = re.compile(r".*\.rotary_emb\.inv_freq")
_SHARED_KEY_TENSOR = re.compile(r"(?:\w+\.)?layers\.(\d{1,9})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")
# Under these names transformers keeps the text part of a multimodal Gemma 3n, and saves it again.
_TEXT_PREFIX = "model.language_model."


@dataclass(frozen=True, kw_only=True)
class DecoderModel(TextModel):
    """Settings that determine the graph.

    ``kv_heads`` pairs of keys and values are shared by all heads. ``windows``: how many tokens each layer sees, None
    where it sees all. ``gemma3n`` is what only that model has, or None.
    """

    layout: Layout
    stated: Stated
    kv_heads: int
    windows: tuple[int | None, ...]
    gemma3n: Gemma3nParts | None

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.layout.qkv_bias or self.stated.attention_bias

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
                found.linear(f"{at}.mlp.{part}", hidden, width, self.stated.mlp_bias, rows=axis)
            found.linear(f"{at}.mlp.down_proj", width, hidden, self.stated.mlp_bias, columns=axis)
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
        found.linear(f"{at}.o_proj", inner, self.hidden, self.stated.attention_bias)

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
    config = layout.read(checkpoint.config)
    refuse_unhonoured(checkpoint)
    stated = structure(Stated, known_keys(Stated, config), where, CheckpointError)
    for problem in stated.problems(masked=checkpoint.has_modules):
        raise checkpoint.misfit(problem)
    hidden, layers, heads = stated.hidden_size, stated.num_hidden_layers, stated.num_attention_heads
    head, pad = read_decoder(checkpoint, layout.classes, stated.vocab_size, layout.pad)
    if head == TOKEN_CLASSES and config.get("token_classification_bias") is False:
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
        stated=stated,
        heads=heads,
        kv_heads=stated.num_key_value_heads or heads,
        head_dim=stated.head_dim or hidden // heads,
        widths=read_widths(checkpoint, layers),
        positions=constant_positions(config, stated.max_position_embeddings, layout.original_positions),
        windows=read_windows(layout.window, config, layers, where),
        gemma3n=read_parts(checkpoint, layers) if layout.gemma3n else None,
    )


def read(checkpoint: Checkpoint) -> Architecture:
    """The decoder in ``checkpoint`` with its head, and with modules of sentence-transformers behind it."""
    model = read_decoder_model(checkpoint)
    parameters, shortened = model.parameters, None
    own: dict[str, Shape] = dict(parameters.shapes)  # as the class's own module has them
    for tensor, parts in model.stacked.items():
        parted = [own.pop(part) for part in parts]
        own[tensor] = (sum(rows for rows, *_ in parted), *parted[0][1:])
    is_of_others = model.unused(HEADS, _UNUSED_TENSOR)

    def is_unused(name: str) -> bool:
        """Also keys and values of a layer that reads another's."""
        shared = _SHARED_KEY_TENSOR.fullmatch(name)
        return is_of_others(name) or (shared is not None and not model.has_keys(int(shared[1])))

    # The text part of a multimodal Gemma 3n has names of its own.
    renamed = ((_TEXT_PREFIX, "model."),) if model.gemma3n is not None else ()
    names = held_tensors(checkpoint, own, model.prefix.rstrip(".") or "model", is_unused, renamed)
    if model.positions < (stated := model.stated.max_position_embeddings):
        shortened = f"rotary positions change for texts of more, up to the {stated} stated"
    needs: RowNeed | None = "first_token" if checkpoint.has_modules else None  # what pools tokens must know them
    found = describe(
        checkpoint,
        parameters,
        names,
        model.signature(checkpoint, needs, shortened=shortened),
        partial(_workload, model),
        # Gemma 3n's own class knows widths per layer, the others do not.
        Loading(shapes=None if model.gemma3n else own, finish=partial(_finish, model, checkpoint)),
        model.hidden,
    )
    return replace(
        found,
        spec=found.spec if model.gemma3n is None else nested_spec(checkpoint, found.spec, model.gemma3n),
        stacked={names[tensor]: parts for tensor, parts in model.stacked.items() if tensor in names},
        cached=model.cached_spec(_kept_layers(model)),
        variant_problems=attention_problems(model.heads, model.kv_heads),
        skippable=frozenset(layer for layer in range(len(model.widths)) if not model.has_keys(layer)),
    )


FAMILY = Family("gated_decoder", tuple(LAYOUTS), read, reads_config_alone=True)


def _kept_layers(model: DecoderModel) -> Iterator[CachedLayer]:
    for layer, window in enumerate(model.windows):
        if model.has_keys(layer):
            seen = None if window is None or window >= model.positions else window
            yield CachedLayer(model.kv_heads, model.head_dim, seen)


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
    if model.stated.final_logit_softcapping is not None and model.head and model.head.vocabulary:
        ops.append(elementwise("lm_head.cap", tokens * model.vocabulary, passes=6))
    return ops


def _attention_ops(model: DecoderModel, at: str, layer: int, bucket: Bucket) -> list[Op]:
    """Grouped-query attention: ``kv_heads`` make keys and values, repeated for all ``heads``."""
    tokens, inner, keys = bucket.tokens, model.heads * model.head_dim, model.kv_heads * model.head_dim
    scores = model.heads * bucket.batch * bucket.sequence**2
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
    bent = {} if model.stated.attn_logit_softcapping is None else {"cap": 6}
    return [
        *ops,
        *attention_products(f"{at}.attention", scores, model.head_dim, 2 * tokens * inner, {**bent, "softmax": 8}),
        elementwise(f"{at}.attention.merge", tokens * inner, passes=2),
        linear(f"{at}.attention.output", tokens, inner, model.hidden, model.stated.attention_bias),
        elementwise(f"{at}.attention.residual", tokens * model.hidden, passes=7 if model.layout.norms_around else 3),
    ]


def _ffn_ops(model: DecoderModel, at: str, layer: int, submodel: Submodel, bucket: Bucket) -> list[Op]:
    tokens, width = bucket.tokens, submodel[f"{at}.ffn"]
    ops = [
        elementwise(f"{at}.ffn.norm", tokens * model.hidden, passes=4),
        *feed_forward(f"{at}.ffn", tokens, model.hidden, width, model.stated.mlp_bias, gated=True),
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
