"""``config.json`` of MHE models and of the attentions that the paper compares with, read strictly (no torch here).

See docs/mhe.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...checkpoints.config import MOST_LAYERS
from ...checkpoints.own_folder import StackConfig

# Sections 2.1 to 2.4: which projections a head has of its own, and which it shares.
AttentionKind = Literal["mha", "sha", "mqa", "skv", "el_att", "mhe_add", "mhe_mul"]
MHE: frozenset[str] = frozenset({"mhe_add", "mhe_mul"})
# Kinds of which a head can be left out: it is rows of queries or of tables, and columns of the output projection.
WITH_HEADS_TO_LEAVE_OUT: frozenset[str] = frozenset({"mha", "mqa", "skv", *MHE})
# How the tables of mhe_mul are stored: as what 1 is added to, or with that 1.
Factors = Literal["e", "1+e"]
Position = Literal["learned", "rotary"]
Head = Literal["none", "masked_lm", "classifier"]
# The slower index where a dimension of a tensor holds the numbers of all heads.
Layout = Literal["heads_first", "width_first"]
# Kinds whose heads all read the same keys and values, in one form at least, so that a cache does not shrink with them.
WITH_SHARED_KEYS: frozenset[str] = frozenset({"sha", "mqa", *MHE})
ROLES = ("query", "key", "value")
# Projections of hidden states, where they are not one for each role.
_PROJECTIONS: Mapping[str, tuple[str, ...]] = {"skv": ("query", "key_value"), "el_att": ("query",)}
# Those of which every head has rows of its own; the others are one head's, which all share.
_OWN_PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "mha": ROLES,
    "mqa": ("query",),
    "skv": ("query", "key_value"),
    "el_att": ("query",),
}


@dataclass(frozen=True, kw_only=True)
class MheConfig(StackConfig):
    """Configuration that encoders, decoders and both together share.

    ``attention`` is the kind of every sublayer. ``factors`` says how the tables of ``mhe_mul`` are stored.
    ``attention_bias`` gives the projections of attention a bias each. ``position``: a learned vector for each place, or
    queries and keys turned after their head embeddings. ``layout`` says how the numbers of all heads lie in tensors,
    head by head or number by number, and ``elastic_heads`` makes what is in front an axis, where the kind allows it:
    heads, or how many numbers each has.
    """

    attention: AttentionKind
    vocab_size: int = field(metadata={"min": 1})
    max_position_embeddings: int = field(metadata={"min": 1})
    factors: Factors | None = None
    attention_bias: bool = False
    position: Position = "learned"
    layout: Layout = "heads_first"
    elastic_heads: bool = True

    @property
    def places(self) -> int:
        """Places that have a learned vector."""
        return self.max_position_embeddings if self.position == "learned" else 0

    @property
    def has_tables(self) -> bool:
        """Whether heads are told apart by head embeddings."""
        return self.attention in MHE

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections of hidden states."""
        return _PROJECTIONS.get(self.attention, ROLES)

    @property
    def own_projections(self) -> tuple[str, ...]:
        """The projections of which every head has rows of its own."""
        return _OWN_PROJECTIONS.get(self.attention, ())

    @property
    def width_first(self) -> bool:
        """Whether a dimension that holds the numbers of all heads has the first number of each in front."""
        return self.layout == "width_first"

    @property
    def heads_axis(self) -> str | None:
        """The kind of axis along which the heads of a layer shrink: how many there are, or how many numbers each has;
        None where neither does."""
        if not self.elastic_heads:
            return None
        if self.width_first:
            return "head_width"
        return "heads" if self.attention in WITH_HEADS_TO_LEAVE_OUT else None

    @property
    def axis_size(self) -> int:
        """Steps of that axis."""
        return self.head_size if self.width_first else self.num_attention_heads

    @property
    def step(self) -> int:
        """Rows of a projection that a step of that axis has: all numbers of one head, or one number of all heads."""
        return self.num_attention_heads if self.width_first else self.head_size

    @property
    def table_shape(self) -> tuple[int, int]:
        """Shape of a table of head embeddings."""
        return (self.axis_size, self.step)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Axis kinds of the model."""
        return ("ffn",) if self.heads_axis is None else ("ffn", self.heads_axis)

    def problem(self) -> str | None:
        """First problem among the values, as ``key: problem``, or None."""
        if self.attention == "el_att" and self.inner != self.hidden_size:
            return (
                f"head_dim: el_att reads keys and values from slices of the hidden state, so that "
                f"{self.num_attention_heads} heads need size {self.hidden_size / self.num_attention_heads:g}, "
                f"got {self.head_size}"
            )
        if (self.factors is None) == (self.attention == "mhe_mul"):
            needed = 'expected "e" or "1+e"' if self.attention == "mhe_mul" else "expected with mhe_mul alone"
            return f"factors: {needed}, got {self.factors!r} with {self.attention}"
        if self.width_first and self.attention == "el_att":
            return "layout: el_att reads keys and values from slices of the hidden state; expected heads_first"
        if self.width_first and self.position == "rotary":
            return (
                "layout: rotary positions turn each number of a head with one of its second half, by an angle of its "
                "own, so that no first numbers are a head by themselves; expected heads_first"
            )
        if self.granularities is not None and {"heads", "head_width"} <= self.granularities.keys():
            return (
                "granularities: expected heads or head_width, got both; what layout has in front is one range of bytes "
                "for each level, and the other is not"
            )
        return super().problem()


@dataclass(frozen=True, kw_only=True)
class MheEncoderConfig(MheConfig):
    """An encoder of BERT's shape, whose norms follow what they normalise. ``head`` is what it answers with."""

    head: Head = "none"
    num_labels: int | None = field(default=None, metadata={"min": 2})
    model_type: Literal["mhe_encoder"] = "mhe_encoder"

    def problem(self) -> str | None:
        if (self.head == "classifier") != (self.num_labels is not None):
            return f"num_labels: expected with head classifier alone, got {self.num_labels} with {self.head}"
        return super().problem()


@dataclass(frozen=True, kw_only=True)
class MheDecoderConfig(MheConfig):
    """A causal language model of GPT-2's shape, whose norms come before what they feed."""

    tie_word_embeddings: bool = True
    model_type: Literal["mhe_decoder"] = "mhe_decoder"


@dataclass(frozen=True, kw_only=True)
class MheEncoderDecoderConfig(MheConfig):
    """A translation model (Vaswani et al. 2017), whose norms follow what they normalise.

    ``num_hidden_layers`` are the encoder's; ``num_decoder_layers`` as many unless stated. Its decoder begins with
    ``decoder_start_token_id``. Both sides have one table of tokens, which is the matrix back to the vocabulary too
    where ``tie_word_embeddings`` says so, and one of positions.
    """

    decoder_start_token_id: int = field(metadata={"min": 0})
    num_decoder_layers: int | None = field(default=None, metadata={"min": 1, "max": MOST_LAYERS})
    tie_word_embeddings: bool = True
    model_type: Literal["mhe_encoder_decoder"] = "mhe_encoder_decoder"

    @property
    def decoder_layers(self) -> int:
        return self.num_decoder_layers or self.num_hidden_layers

    @property
    def cross_axis(self) -> str | None:
        """``heads_axis`` of the decoder's attention to the encoder."""
        return None if self.heads_axis is None else f"cross_{self.heads_axis}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Axis kinds of the model."""
        return super().kinds if self.cross_axis is None else (*super().kinds, self.cross_axis)

    def problem(self) -> str | None:
        if self.decoder_start_token_id >= self.vocab_size:
            return (
                f"decoder_start_token_id: expected a token of the vocabulary, 0..{self.vocab_size - 1}, got "
                f"{self.decoder_start_token_id}"
            )
        if self.position == "rotary":
            return "position: expected learned in an encoder-decoder, whose attentions read two texts; got rotary"
        return super().problem()


KINDS: Mapping[str, type[MheConfig]] = {
    "mhe_encoder": MheEncoderConfig,
    "mhe_decoder": MheDecoderConfig,
    "mhe_encoder_decoder": MheEncoderDecoderConfig,
}


# The paper's models by name (section 5.2), and the shapes of which it states parameters (4.4), for every attention.
# Encoders have BERT-base's shape, decoders GPT-2-base's; ``large`` and ``medium`` are those of its appendix.
# Translation models have 6 and 6 layers, and texts of up to 100 tokens. Sublayers of attention have no biases: the
# paper's counts omit them and its text does not say. Layers, width, heads.
_BERT = {"vocab_size": 30_000, "max_position_embeddings": 512, "head": "masked_lm"}
_GPT2 = {"vocab_size": 50_257, "max_position_embeddings": 512}
_BOTH_LANGUAGES = {"vocab_size": 37_000, "max_position_embeddings": 100, "decoder_start_token_id": 0}
_SHAPES: Mapping[str, tuple[int, int, int, type[MheConfig], dict[str, Any]]] = {
    "encoder-base": (12, 768, 12, MheEncoderConfig, _BERT),
    "encoder-large": (24, 1024, 16, MheEncoderConfig, _BERT),
    "decoder-base": (12, 768, 12, MheDecoderConfig, _GPT2),
    "decoder-medium": (24, 1024, 16, MheDecoderConfig, _GPT2),
    "decoder-gpt3": (96, 12288, 96, MheDecoderConfig, {**_GPT2, "max_position_embeddings": 2048}),
    "encoder-decoder-base": (6, 512, 8, MheEncoderDecoderConfig, _BOTH_LANGUAGES),
}
PRESETS: Mapping[str, MheConfig] = {
    f"{kind.replace('_', '-')}-{name}": config(
        attention=kind,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        softmax_scale=(width // heads) ** -0.5,
        factors="e" if kind == "mhe_mul" else None,
        **own,
    )
    for kind in get_args(AttentionKind)
    for name, (layers, width, heads, config, own) in _SHAPES.items()
}
