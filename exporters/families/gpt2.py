"""GPT-2: learned positions, LayerNorms, an FFN without a gate. See docs/models.md.

Axis per layer: ``ffn``, the neurons that ``c_fc`` makes and ``c_proj`` reads. One full-sequence pass answers at every
position; attention is causal, so what pads a text on its right changes nothing before it and no mask is needed. Modules
of sentence-transformers pool those tokens that a mask names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...bucket import Bucket
from ...bundle.entries.generation_entry import CachedLayer
from ...elastic import Submodel
from ...workload import Op, elementwise, lookup, pre_norm_layer
from ..architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import MOST_LAYERS, read_classes, read_number, read_widths, refuse_unhonoured
from ..family import Family
from ..hugging_face.describe import describe
from ..hugging_face.interface import (
    LAST_TOKEN_CLASSES,
    NEXT_TOKEN,
    QUESTION,
    TOKEN_CLASSES,
    Head,
    Loading,
    TextModel,
    attention_problems,
    read_decoder,
)
from ..hugging_face.tensors import Parameters, held_tensors

if TYPE_CHECKING:  # plans are made without torch
    import torch

_DECODER = "transformer"
# Neurons of every layer, or a list with one number for each; four times the hidden size where config.json is silent.
_WIDTHS = "n_inner"
CLASSES: dict[str, Head | None] = {
    "GPT2Model": None,
    "GPT2LMHeadModel": replace(NEXT_TOKEN, prefix=_DECODER),
    "GPT2ForSequenceClassification": replace(LAST_TOKEN_CLASSES, prefix=_DECODER),
    "GPT2ForTokenClassification": replace(TOKEN_CLASSES, prefix=_DECODER),
    "GPT2ForQuestionAnswering": replace(QUESTION, prefix=_DECODER),
}
# Masks that old files carry, and a part of a class that is not read.
_UNUSED_TENSOR = re.compile(
    r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)|multiple_choice_head\.summary\.(?:weight|bias)"
)


@dataclass(frozen=True, kw_only=True)
class Gpt2Model(TextModel):
    """Settings that determine the graph."""

    @property
    def parameters(self) -> Parameters:
        """Every parameter of the module."""
        found, at, hidden = Parameters(), self.prefix, self.hidden
        found.add(f"{at}wte.weight", self.vocabulary, hidden)
        found.add(f"{at}wpe.weight", self.positions, hidden)
        for number, width in enumerate(self.widths):
            layer, ffn = f"{at}h.{number}", found.axis(f"layers.{number}.ffn", width)
            found.linear(f"{layer}.attn.c_attn", hidden, 3 * hidden)
            found.linear(f"{layer}.attn.c_proj", hidden, hidden)
            found.linear(f"{layer}.mlp.c_fc", hidden, width, rows=ffn)
            found.linear(f"{layer}.mlp.c_proj", width, hidden, columns=ffn)
            for place in (1, 2):
                found.norm(f"{layer}.ln_{place}", hidden)
        found.norm(f"{at}ln_f", hidden)
        if self.head is not None:
            self.head.add_to(found, self.size, self.tied)
        return found

    @property
    def linears(self) -> tuple[str, ...]:
        """Every linear layer of the decoder, whose weight files hold as ``[in, out]``."""
        parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        return tuple(f"{self.prefix}h.{layer}.{part}" for layer in range(len(self.widths)) for part in parts)


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint`` with its head, and with modules of sentence-transformers behind it."""
    model = _read_model(checkpoint)
    parameters, transposed = model.parameters, frozenset(f"{name}.weight" for name in model.linears)
    stored = {name: shape[::-1] if name in transposed else shape for name, shape in parameters.shapes.items()}
    found = describe(
        checkpoint,
        parameters,
        held_tensors(checkpoint, stored, _DECODER, model.unused(CLASSES.values(), _UNUSED_TENSOR)),
        model.signature(checkpoint, "first_token" if checkpoint.has_modules else None),
        partial(_workload, model),
        Loading(widths=_WIDTHS, shapes=stored, finish=partial(_finish, model)),
        model.hidden,
    )
    cached = model.cached_spec([CachedLayer(model.heads, model.head_dim)] * len(model.widths))
    problems = attention_problems(model.heads, model.heads)
    return replace(found, transposed=transposed, cached=cached, variant_problems=problems)


FAMILY = Family("gpt2", ("gpt2",), read, reads_config_alone=True)


def _read_model(checkpoint: Checkpoint) -> Gpt2Model:
    """Raises CheckpointError for what config.json lacks or gets wrong, and for what is not honoured."""
    refuse_unhonoured(checkpoint)

    def number(key: str, general: str, default: int, at_most: int | None = None) -> int:
        """A size by its name in GPT-2's configuration, or by the ``general`` one, which transformers prefers."""
        return read_number(checkpoint, general if general in checkpoint.config else key, default, at_most=at_most)

    hidden, heads = number("n_embd", "hidden_size", 768), number("n_head", "num_attention_heads", 12)
    if hidden % heads:
        raise checkpoint.misfit(f"n_head: {hidden} features cannot be split into {heads} heads")
    layers = number("n_layer", "num_hidden_layers", 12, at_most=MOST_LAYERS)
    vocabulary = read_number(checkpoint, "vocab_size", default=50_257)
    head, pad = read_decoder(checkpoint, CLASSES, vocabulary)
    return Gpt2Model(
        head=head,
        hidden=hidden,
        embedding=hidden,
        vocabulary=vocabulary,
        classes=read_classes(checkpoint),
        pad=pad,
        tied=checkpoint.config.get("tie_word_embeddings", True) is not False,
        heads=heads,
        head_dim=hidden // heads,
        widths=read_widths(checkpoint, layers, _WIDTHS, default=4 * hidden),
        positions=number("n_positions", "max_position_embeddings", 1024),
    )


def _workload(model: Gpt2Model, submodel: Submodel, bucket: Bucket) -> list[Op]:
    hidden, tokens = model.hidden, bucket.tokens
    ops = [lookup("embeddings", 2 * tokens * hidden)]
    for layer in range(len(model.widths)):
        at = f"layers.{layer}"
        ops += pre_norm_layer(at, bucket, hidden, model.heads, model.head_dim, submodel[f"{at}.ffn"])
    return [*ops, elementwise("norm", tokens * hidden, passes=4), *model.head_ops(bucket)]


def _finish(model: Gpt2Model, module: Any) -> None:
    """Linear layers as torch has them, and attention that computes scores as all around them."""
    for name in model.linears:
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, _linear(module.get_submodule(name)))
    for layer in module.get_submodule(model.prefix.rstrip(".")).h:
        # Scores in float32 whatever the numbers around them are: here all are float32, and all float64 in the gate.
        layer.attn.reorder_and_upcast_attn = False


def _linear(layer: Any) -> torch.nn.Linear:
    """A ``Conv1D``, whose weight is ``[in, out]``, as a linear layer."""
    import torch

    weight = layer.weight.detach().T.contiguous()
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias
    return made
