"""The shape of a T5 model from config.json alone, held against the weights (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ....elastic import Axis, PrefixSlice
from ...checkpoints.checkpoint import Checkpoint, compare_with_headers
from ...checkpoints.config import LEARNED, MOST_LAYERS, read_number, read_pad, refuse_unhonoured
from ...checkpoints.generation_defaults import read_decoder_start
from ...hugging_face.tensors import Shape, linear_shapes, parameter_names

ENCODER, GENERATOR = "T5EncoderModel", "T5ForConditionalGeneration"
_HEADLESS = "T5Model"
# Positions are relative and have no end; what engines take has one.
MOST_TOKENS = 4096
_FARTHEST = 65_536  # the largest distance in the table
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


@dataclass(frozen=True)
class T5Architecture:
    """What determines the graph. ``decoder_layers`` is 0 for the encoder alone, which answers with its hidden states.

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
    def ffns(self) -> tuple[tuple[str, str], ...]:
        """Every feed-forward network: the layer as axes call it, and the module."""
        return tuple(
            (f"{stack}.layers.{layer}", f"{stack}.block.{layer}.layer.{_ffn_place(stack)}.DenseReluDense")
            for stack, layers in self.stacks.items()
            for layer in range(layers)
        )

    @property
    def ups(self) -> tuple[str, ...]:
        """The layers that make an FFN's neurons."""
        return ("wi_0", "wi_1") if self.gated else ("wi",)

    @property
    def parameter_shapes(self) -> dict[str, Shape]:
        """Every parameter of the module, by the module's names."""
        shapes: dict[str, Shape] = {TABLE: (self.vocabulary, self.hidden)}
        for stack, layers in self.stacks.items():
            for layer in range(layers):
                shapes |= dict(self._block(stack, layer))
            shapes[f"{stack}.final_layer_norm.weight"] = (self.hidden,)
        if self.decoder_layers and not self.tied:
            shapes[HEAD] = (self.vocabulary, self.hidden)
        return shapes

    def _block(self, stack: str, layer: int) -> Iterator[tuple[str, Shape]]:
        at, inner = f"{stack}.block.{layer}.layer", self.heads * self.head_dim
        attentions = ["SelfAttention", *(["EncDecAttention"] if stack == "decoder" else [])]
        for place, attention in enumerate(attentions):
            for part in "qkv":
                yield from linear_shapes(f"{at}.{place}.{attention}.{part}", self.hidden, inner, bias=False).items()
            yield from linear_shapes(f"{at}.{place}.{attention}.o", inner, self.hidden, bias=False).items()
        if layer == 0:
            yield f"{at}.0.SelfAttention.relative_attention_bias.weight", (self.buckets, self.heads)
        ffn = f"{at}.{_ffn_place(stack)}.DenseReluDense"
        for up in self.ups:
            yield from linear_shapes(f"{ffn}.{up}", self.hidden, self.ffn, bias=False).items()
        yield from linear_shapes(f"{ffn}.wo", self.ffn, self.hidden, bias=False).items()
        yield from ((f"{at}.{place}.layer_norm.weight", (self.hidden,)) for place in range(_ffn_place(stack) + 1))


def ffn_axes(architecture: T5Architecture) -> tuple[list[Axis], list[PrefixSlice]]:
    """``encoder.layers.N.ffn`` and ``decoder.layers.N.ffn``, and what of each side shrinks with them."""
    axes, slices = list[Axis](), list[PrefixSlice]()
    for layer, module in architecture.ffns:
        axes.append(Axis(f"{layer}.ffn", architecture.ffn))
        slices += [PrefixSlice(f"{module}.{up}.weight", 0, axes[-1].name) for up in architecture.ups]
        slices.append(PrefixSlice(f"{module}.wo.weight", 1, axes[-1].name))
    return axes, slices


def read_t5(checkpoint: Checkpoint, encoder_alone: bool = False) -> T5Architecture:
    """The architecture of the model in ``checkpoint``, whose weights may be absent altogether; ``encoder_alone`` of a
    model that has a decoder too, which is then not read.

    Raises CheckpointError for what config.json lacks or gets wrong, for what is not honoured, and for a tensor that is
    missing, misfits or has no place.
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
    read_number(checkpoint, "relative_attention_max_distance", 128, at_least=buckets // 2 + 1, at_most=_FARTHEST)
    pad = read_pad(checkpoint, vocabulary, 0)
    architecture = T5Architecture(
        vocabulary=vocabulary,
        hidden=read_number(checkpoint, "d_model"),
        heads=read_number(checkpoint, "num_heads"),
        head_dim=read_number(checkpoint, "d_kv"),
        ffn=read_number(checkpoint, "d_ff"),
        layers=layers,
        decoder_layers=_layers(checkpoint, "num_decoder_layers", layers) if generates else 0,
        buckets=buckets,
        gated=kind.startswith(_GATED),
        tied=_is_tied(checkpoint),
        pad=pad or 0,
        start=read_decoder_start(checkpoint, vocabulary) if generates else 0,
    )
    if checkpoint.has_weights:
        names, unused = names_in_files(checkpoint, architecture), partial(_is_unused, architecture=architecture)
        compare_with_headers(checkpoint, architecture.parameter_shapes, names, unused)
    return architecture


def class_name(checkpoint: Checkpoint) -> str | None:
    """The class that config.json names; sentence-transformers reads the encoder, whatever that is."""
    return ENCODER if checkpoint.has_modules else checkpoint.architecture


def names_in_files(checkpoint: Checkpoint, architecture: T5Architecture) -> dict[str, str]:
    """Every tensor of the folder, by the name that the module gives the parameter."""
    return parameter_names(checkpoint, architecture.parameter_shapes, "transformer")


def _is_unused(name: str, architecture: T5Architecture) -> bool:
    """A copy, or a part of the side that the encoder alone does not have."""
    other_side = not architecture.decoder_layers and name.startswith(("decoder.", "lm_head."))
    return other_side or name in _UNUSED or (architecture.tied and name == HEAD)


def _layers(checkpoint: Checkpoint, key: str, default: int) -> int:
    return read_number(checkpoint, key, default=default, at_most=MOST_LAYERS)


def _ffn_kind(checkpoint: Checkpoint) -> str:
    """``relu``, or ``gated-gelu`` and the like: an activation, perhaps with a gate."""
    kind = checkpoint.config.get("feed_forward_proj", "relu")
    if (
        not isinstance(kind, str)
        or kind.removeprefix(_GATED) in ("", "gated", *LEARNED)
        or "-" in kind.removeprefix(_GATED)
    ):
        raise checkpoint.misfit(
            f"feed_forward_proj: expected an activation, such as relu, or gated-gelu, got {kind!r:.80}"
        )
    return kind


def _is_tied(checkpoint: Checkpoint) -> bool:
    """Whether the head is the table. transformers ties them in every model and unties a head whose weights differ from
    the table's; a model whose outputs are not scaled (v1.1) has such a head, where its files hold one."""
    return scales_outputs(checkpoint) or (checkpoint.has_weights and HEAD not in checkpoint.tensors)


def scales_outputs(checkpoint: Checkpoint) -> bool:
    """Whether what the head reads is multiplied by ``hidden ** -0.5``, as in the first T5."""
    config = checkpoint.config
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False))


def _ffn_place(stack: str) -> int:
    """Its place among the parts of a layer, behind one attention or two."""
    return 2 if stack == "decoder" else 1
