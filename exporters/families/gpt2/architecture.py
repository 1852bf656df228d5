"""The shape of a GPT-2 model with its head, from config.json alone, held against the weights (no torch here)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.config import MOST_LAYERS, read_number, read_widths, refuse_unhonoured
from ...hugging_face.interface import DecoderHead, DecoderInterface, read_interface
from ...hugging_face.tensors import Shape, linear_shapes, norm_shapes, parameter_names

_DECODER = "transformer"
# Neurons of every layer, or a list with one number for each; four times the hidden size where config.json is silent.
WIDTHS = "n_inner"
CLASSES: dict[str, DecoderHead | None] = {
    "GPT2Model": None,
    "GPT2LMHeadModel": DecoderHead("lm_head", to="tokens", prefix=_DECODER),
    "GPT2ForSequenceClassification": DecoderHead("score", last=True, prefix=_DECODER),
    "GPT2ForTokenClassification": DecoderHead("classifier", bias=True, prefix=_DECODER),
    "GPT2ForQuestionAnswering": DecoderHead(
        "qa_outputs", ("start_logits", "end_logits"), bias=True, classes=2, prefix=_DECODER
    ),
}
# Masks that old files carry.
_UNUSED_TENSOR = re.compile(r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)")
_HEAD_TENSOR = re.compile(r"(lm_head|score|classifier|qa_outputs|multiple_choice_head\.summary)\.(?:weight|bias)")


@dataclass(frozen=True)
class Gpt2Architecture:
    """What determines the graph. ``widths`` are FFN neurons by layer."""

    interface: DecoderInterface
    heads: int
    widths: tuple[int, ...]
    positions: int
    tied: bool

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.interface.hidden // self.heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of every linear layer of the decoder."""
        hidden, found = self.interface.hidden, dict[str, tuple[int, int]]()
        for layer, width in enumerate(self.widths):
            at = f"{self.interface.prefix}h.{layer}"
            found |= {f"{at}.attn.c_attn": (hidden, 3 * hidden), f"{at}.attn.c_proj": (hidden, hidden)}
            found |= {f"{at}.mlp.c_fc": (hidden, width), f"{at}.mlp.c_proj": (width, hidden)}
        return found

    @property
    def transposed(self) -> frozenset[str]:
        """Weights that files hold as ``[in, out]``."""
        return frozenset(f"{name}.weight" for name in self.linears)

    @property
    def parameter_shapes(self) -> dict[str, Shape]:
        """Every parameter of the module, by the module's names."""
        at, hidden = self.interface.prefix, self.interface.hidden
        shapes: dict[str, Shape] = {
            f"{at}wte.weight": (self.interface.vocabulary, hidden),
            f"{at}wpe.weight": (self.positions, hidden),
        }
        for name, (inputs, outputs) in self.linears.items():
            shapes |= linear_shapes(name, inputs, outputs)
        norms = [f"{at}h.{layer}.ln_{place}" for layer in range(len(self.widths)) for place in (1, 2)]
        for norm in (*norms, f"{at}ln_f"):
            shapes |= norm_shapes(norm, hidden)
        return shapes | self.interface.head_shapes(self.tied)

    @property
    def stored_shapes(self) -> dict[str, Shape]:
        """Every tensor that files have of the module."""
        turned = self.transposed
        return {name: shape[::-1] if name in turned else shape for name, shape in self.parameter_shapes.items()}


def read_gpt2(checkpoint: Checkpoint) -> Gpt2Architecture:
    """The architecture of the model in ``checkpoint``, whose weights may be absent altogether.

    Raises CheckpointError for what config.json lacks or gets wrong, for what is not honoured, and for a tensor that is
    missing, misfits or has no place.
    """
    refuse_unhonoured(checkpoint)
    hidden, heads = _number(checkpoint, "n_embd", "hidden_size", 768), _heads(checkpoint)
    if hidden % heads:
        raise checkpoint.misfit(f"n_head: {hidden} features cannot be split into {heads} heads")
    layers = _number(checkpoint, "n_layer", "num_hidden_layers", 12, at_most=MOST_LAYERS)
    architecture = Gpt2Architecture(
        interface=read_interface(checkpoint, CLASSES, read_number(checkpoint, "vocab_size", default=50_257), hidden),
        heads=heads,
        widths=read_widths(checkpoint, layers, WIDTHS, default=4 * hidden),
        positions=_number(checkpoint, "n_positions", "max_position_embeddings", 1024),
        tied=checkpoint.config.get("tie_word_embeddings", True) is not False,
    )
    if checkpoint.has_weights:
        names, unused = names_in_files(checkpoint, architecture), partial(_is_unused, architecture=architecture)
        compare_with_headers(checkpoint, architecture.stored_shapes, names, unused)
    return architecture


def names_in_files(checkpoint: Checkpoint, architecture: Gpt2Architecture) -> dict[str, str]:
    """Every tensor of the folder, by the name that the module gives the parameter."""
    return parameter_names(checkpoint, architecture.parameter_shapes, _DECODER)


def _is_unused(name: str, architecture: Gpt2Architecture) -> bool:
    """A head of another class, a copy of the tied one, or a mask of an old file."""
    head = _HEAD_TENSOR.fullmatch(name)
    if head is None:
        return _UNUSED_TENSOR.fullmatch(name) is not None
    behind = architecture.interface.head
    own = behind is not None and behind.module == head[1]
    return not own or (architecture.tied and name == "lm_head.weight")


def _heads(checkpoint: Checkpoint) -> int:
    return _number(checkpoint, "n_head", "num_attention_heads", 12)


def _number(checkpoint: Checkpoint, key: str, general: str, default: int, at_most: int | None = None) -> int:
    """A size by its name in GPT-2's configuration, or by the ``general`` one, which transformers prefers."""
    stated = general if general in checkpoint.config else key
    return read_number(checkpoint, stated, default=default, at_most=at_most)
