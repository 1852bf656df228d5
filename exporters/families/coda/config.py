"""``config.json`` of encoders with conditional adapters, alone or before T5's decoder, read strictly (no torch here).

See docs/coda.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ....profiles.nest_request import MOST_ADAPTER_SIZE, MOST_LABELS
from ....profiles.nest_request import Activation as Activation
from ....profiles.nest_request import AdapterKind as AdapterKind
from ....profiles.nest_request import KeysOf as KeysOf
from ....profiles.nest_request import Router as Router
from ...checkpoints.config import MOST_LAYERS, rising_problem, shown
from ...checkpoints.own_folder import OwnConfig, StackConfig
from ...hugging_face.tensors import RELATIVE_BUCKETS
from ...signature import IDS, MASK, TYPE_IDS
from ..t5 import T5Model

Norm = Literal["rms", "layer"]
Position = Literal["learned", "relative", "rotary"]
StatedTokens = Mapping[str, Mapping[str, int | tuple[int, ...]]]
PIXELS = "pixel_values"
REDUCTION = "coda.reduction"
# Before the encoder's own names, of parameters and of axes, where a decoder is behind it.
ENCODER = "encoder."
# Reductions larger than the trained one that a model is offered at, where config.json does not say.
_DEFAULT_REDUCTIONS = (8, 5, 3, 2)
# Rounds are unrolled: each is some ten operations of every conditional layer.
_MOST_ROUNDS = 128
# Below it a score over epsilon is beyond float32.
_LEAST_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Images of ``channels`` x ``height`` x ``width``, cut into patches; pixels that fill none are left out.

    ``front_tokens`` stand before the patches: 1 is the class token of ViT, 2 those of DeiT.
    """

    channels: int = field(metadata={"min": 1})
    height: int = field(metadata={"min": 1})
    width: int = field(metadata={"min": 1})
    patch_height: int = field(metadata={"min": 1})
    patch_width: int = field(metadata={"min": 1})
    front_tokens: int = field(default=1, metadata={"min": 0})

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.height // self.patch_height) * (self.width // self.patch_width)

    @property
    def tokens(self) -> int:
        """Tokens of a layer: front tokens and patches."""
        return self.front_tokens + self.patches

    def problem(self) -> str | None:
        """First problem, as ``key: problem``, or None."""
        for key, patch, side in (
            ("patch_height", self.patch_height, self.height),
            ("patch_width", self.patch_width, self.width),
        ):
            if patch > side:
                return f"{key}: expected at most {side}, the image's, got {patch}"
        return None


@dataclass(frozen=True, kw_only=True)
class SoftTopK:
    """The iteration of a ``soft_top_k`` router, which is part of the model: other numbers are another model.

    Round t has temperature ``max(epsilon_start * epsilon_decay**t, epsilon)``; the gates have ``epsilon``. ``initial``
    is what the elementwise term b starts from: 0, or minus the scores.
    """

    rounds: int = field(metadata={"min": 1, "max": _MOST_ROUNDS})
    epsilon: float
    epsilon_start: float
    epsilon_decay: float
    initial: Literal["zero", "minus_scores"]

    @property
    def temperatures(self) -> tuple[float, ...]:
        """That of every round."""
        return tuple(max(self.epsilon_start * self.epsilon_decay**t, self.epsilon) for t in range(self.rounds))

    @property
    def all_temperatures(self) -> tuple[float, ...]:
        """Those of the rounds, and behind them that of the gates."""
        return (*self.temperatures, self.epsilon)

    def problem(self) -> str | None:
        """First problem, as ``key: problem``, or None."""
        if not _LEAST_EPSILON <= self.epsilon <= self.epsilon_start:
            return (
                f"epsilon: expected a number from {_LEAST_EPSILON:g} to epsilon_start {self.epsilon_start:g}, "
                f"got {self.epsilon:g}"
            )
        if not 0 < self.epsilon_decay <= 1:
            return f"epsilon_decay: expected a number above 0 and at most 1, got {self.epsilon_decay:g}"
        return None


# 20 rounds are the paper's. The target epsilon of a task is not published: 0.1 lies between its 0.02 and 1.
SCHEDULE = SoftTopK(rounds=20, epsilon=0.1, epsilon_start=4.0, epsilon_decay=0.7, initial="zero")


@dataclass(frozen=True, kw_only=True)
class CodaConfig(StackConfig):
    """An encoder with an adapter in every layer, of ``adapter_size`` neurons, or of that rank.

    ``adapter`` is ``parallel`` beside the layer, ``sequential`` behind it, both for all tokens, or ``lora``: low-rank
    terms of queries and values, which only tokens that pass through attention get. It has no ``adapter_activation``. It
    reads texts, of ``vocab_size`` tokens and up to ``max_position_embeddings``, or where ``image`` is stated images.
    ``type_vocab_size`` kinds of token have a vector of their own; of two or more each token's is an input.
    ``norm_place``: norms come ``before`` what they feed and at the end, or, as in BERT, ``after`` each sum and the
    embeddings; the paper has no formula for the second, ``Layer`` has ours. ``conditional_layers`` (rising, from 0,
    nearest the input; all by default) compute ``ceil(n / r)`` of n tokens, the others all. ``keys_of`` says whose keys
    and values the selected tokens read, ``ffn_residual`` which rows the FFN's norm reads beside the attended: the
    layer's input (``raw``), or that normalised. ``soft_top_k`` belongs to that router. ``selected_by``: tokens are
    ranked by their raw scores or by their gates, which differ where gates saturate. ``route_padding``: padding takes
    part in the routing, as a token. ``reduction`` is the trained r, ``reductions`` those that the model is offered at;
    ``reduction_of_one`` says whether at r = 1 the router still gates every token, or every token passes whole.
    ``tokens_selected`` are other k than ``ceil(n / r)`` (``tokens_of_layers``). ``num_key_value_heads`` are fewer than
    the heads in grouped attention, 1 in multi-query attention. ``bias`` gives every linear layer outside the adapters
    one. Without ``num_labels`` the model answers with its last states, else with logits of the mean of its tokens.
    """

    activation: Activation
    gated_ffn: bool
    norm: Norm
    position: Position
    adapter_size: int = field(metadata={"min": 1, "max": MOST_ADAPTER_SIZE})
    router: Router
    keys_of: KeysOf
    ffn_residual: Literal["raw", "normed"]
    reduction: int = field(metadata={"min": 1})
    vocab_size: int | None = field(default=None, metadata={"min": 1})
    max_position_embeddings: int | None = field(default=None, metadata={"min": 1})
    type_vocab_size: int = field(default=0, metadata={"min": 0})
    image: ImageInput | None = None
    norm_place: Literal["before", "after"] = "before"
    adapter: AdapterKind = "parallel"
    adapter_activation: Activation | None = None
    soft_top_k: SoftTopK | None = None
    selected_by: Literal["scores", "gates"] = "scores"
    route_padding: bool = False
    reduction_of_one: Literal["routed", "dense"] = "routed"
    reductions: tuple[int, ...] | None = None
    tokens_selected: StatedTokens | None = field(default=None, hash=False)
    conditional_layers: tuple[int, ...] | None = None
    adapter_bias: bool = True
    adapter_scale: float = 1.0
    num_key_value_heads: int | None = field(default=None, metadata={"min": 1})
    bias: bool = False
    norm_eps: float = 1e-6
    num_labels: int | None = field(default=None, metadata={"min": 2, "max": MOST_LABELS})
    model_type: Literal["coda_encoder"] = "coda_encoder"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of the model, in order."""
        if self.image is not None:
            return (PIXELS,)
        return (IDS, MASK, TYPE_IDS) if self.type_vocab_size > 1 else (IDS, MASK)

    @property
    def most_tokens(self) -> int:
        """The longest row."""
        longest = self.max_position_embeddings if self.image is None else self.image.tokens
        assert longest is not None
        return longest

    @property
    def reads_raw(self) -> bool:
        """Whether a conditional layer reads its input beside its normed input."""
        return self.ffn_residual == "raw" and self.norm_place == "before"

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def conditional(self) -> tuple[int, ...]:
        """The conditional layers."""
        return tuple(range(self.num_hidden_layers)) if self.conditional_layers is None else self.conditional_layers

    @property
    def has_scores(self) -> bool:
        """Whether tokens are chosen by comparing scores."""
        return bool(self.conditional) and self.router != "first_k"

    @property
    def offered(self) -> tuple[int, ...]:
        """The reductions that the model is offered at, falling to the least; one alone makes no axis."""
        if not self.conditional:
            return (1,)
        if self.reductions is not None:
            return self.reductions
        larger = (r for r in _DEFAULT_REDUCTIONS if self.reduction < r <= self.most_tokens)
        return (*larger, self.reduction)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Axis kinds of the model."""
        return ("ffn", REDUCTION) if len(self.offered) > 1 else ("ffn",)

    @property
    def levels(self) -> Mapping[str, tuple[float, ...]] | None:
        """As of ``StackConfig``; but levels of the FFN alone would leave out what several reductions offer, so that
        beside those there are none."""
        several = len(self.offered) > 1 and REDUCTION not in (self.granularities or ())
        return None if several else super().levels

    def problem(self) -> str | None:
        """First problem among the values, as ``key: problem``, or None."""
        if found := self._input_problem() or super().problem():
            return found
        if not 0 < self.norm_eps < 1:
            return f"norm_eps: expected a number between 0 and 1, got {self.norm_eps:g}"
        if (self.adapter_activation is None) != (self.adapter == "lora"):
            wanted = "none with lora" if self.adapter == "lora" else f"one with adapter {self.adapter}"
            return f"adapter_activation: expected {wanted}, got {self.adapter_activation or 'none'}"
        if self.norm_place == "after" and self.ffn_residual != "raw":
            return "ffn_residual: expected raw with norm_place after, where a layer's input is not normed"
        if self.num_attention_heads % self.key_value_heads:
            return (
                f"num_key_value_heads: {self.key_value_heads} do not divide num_attention_heads "
                f"{self.num_attention_heads}"
            )
        return self._routing_problem() or self._reduction_problem()

    def _input_problem(self) -> str | None:
        of_text = {
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "type_vocab_size": self.type_vocab_size or None,
        }
        if self.image is not None:
            for key, value in of_text.items():
                if value is not None:
                    return f"{key}: got {value} beside image; expected one of them"
            found = self.image.problem()
            return found and f"image: {found}"
        for key in ("vocab_size", "max_position_embeddings"):
            if of_text[key] is None:
                return f"{key}: missing; a model of texts needs it, and one of images has image in its place"
        return None

    def _routing_problem(self) -> str | None:
        if found := rising_problem("conditional_layers", self.conditional, 0, self.num_hidden_layers - 1):
            return found
        if (self.soft_top_k is None) == (self.router == "soft_top_k"):
            given = "none" if self.soft_top_k is None else "some"
            return f"soft_top_k: expected with router soft_top_k alone, got {given} with {self.router}"
        if self.soft_top_k is not None and (found := self.soft_top_k.problem()):
            return f"soft_top_k: {found}"
        if self.selected_by == "gates" and self.router == "first_k":
            return "selected_by: first_k compares neither scores nor gates"
        return None

    def _reduction_problem(self) -> str | None:
        most, of = self.most_tokens, "max_position_embeddings" if self.image is None else "an image"
        for key, values in (("reduction", (self.reduction,)), ("reductions", self.reductions or ())):
            outside = [value for value in values if not 1 <= value <= most]
            if outside:
                return f"{key}: {outside[0]}: expected 1 to {most}, the tokens of {of}"
        if self.reduction_of_one == "dense" and 1 not in self.offered:
            return (
                f"reduction_of_one: dense says what r = 1 is, which reductions {shown(self.offered)} lack; add 1 to "
                "reductions, or leave reduction_of_one out"
            )
        if self.tokens_selected is not None:
            found = stated_tokens_problem(self.tokens_selected, self.offered, len(self.conditional), most)
            if found:
                return f"tokens_selected: {found}"
        if self.reductions is None:
            return None
        if list(self.reductions) != sorted(set(self.reductions), reverse=True) or not self.reductions:
            return f"reductions: expected falling numbers, got {shown(self.reductions)}"
        if not self.conditional:
            return "reductions: no layer is conditional"
        if self.reduction not in self.reductions:
            return f"reductions: {shown(self.reductions)} lack {self.reduction}, the reduction of training; add it"
        return None


@dataclass(frozen=True, kw_only=True)
class CodaEncoderDecoderConfig(OwnConfig):
    """The ``encoder``, a model of texts without labels, and a decoder of ``num_decoder_layers`` dense layers with the
    encoder's table of tokens, width, heads, FFN and activation, as T5 has them.

    ``tie_word_embeddings``: the matrix back to the vocabulary is the table of tokens. ``scale_decoder_outputs``: what
    it reads is multiplied by ``hidden_size ** -0.5``, as in the first T5. A text that is written begins with
    ``decoder_start_token_id`` and ends with ``eos_token_id``. ``nested`` and ``granularities`` of the encoder say of
    both sides how they were trained.
    """

    encoder: CodaConfig
    num_decoder_layers: int = field(metadata={"min": 1, "max": MOST_LAYERS})
    tie_word_embeddings: bool
    scale_decoder_outputs: bool
    decoder_start_token_id: int = field(metadata={"min": 0})
    pad_token_id: int = field(default=0, metadata={"min": 0})
    eos_token_id: int | tuple[int, ...] | None = field(default=None, metadata={"min": 0})
    model_type: Literal["coda_encoder_decoder"] = "coda_encoder_decoder"

    @property
    def vocabulary(self) -> int:
        """Tokens of both texts."""
        assert self.encoder.vocab_size is not None
        return self.encoder.vocab_size

    @property
    def decoder(self) -> T5Model:
        """Settings that determine the decoder's graph; of the encoder's layers it says nothing."""
        encoder = self.encoder
        return T5Model(
            vocabulary=self.vocabulary,
            hidden=encoder.hidden_size,
            heads=encoder.num_attention_heads,
            head_dim=encoder.head_size,
            ffn=encoder.intermediate_size,
            layers=0,
            decoder_layers=self.num_decoder_layers,
            buckets=RELATIVE_BUCKETS,
            gated=encoder.gated_ffn,
            tied=self.tie_word_embeddings,
            pad=self.pad_token_id,
            start=self.decoder_start_token_id,
        )

    def problem(self) -> str | None:
        """First problem among the values, as ``key: problem``, or None."""
        if (found := self.encoder.problem()) is not None:
            return f"encoder: {found}"
        for key, usual in (
            ("image", None),
            ("num_labels", None),
            ("type_vocab_size", 0),
            ("norm", "rms"),
        ):
            stated = getattr(self.encoder, key)
            if stated != usual:
                return f"encoder: {key}: got {stated!s:.80} before a decoder of T5; expected {usual or 'none'}"
        ends = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id or 0,)
        for key, tokens in (
            ("decoder_start_token_id", (self.decoder_start_token_id,)),
            ("pad_token_id", (self.pad_token_id,)),
            ("eos_token_id", ends),
        ):
            if max(tokens, default=0) >= self.vocabulary:
                return f"{key}: expected a token of the vocabulary, 0..{self.vocabulary - 1}, got {max(tokens)}"
        return None


def tokens_of_layers(stated: StatedTokens | None, tokens: int, reduction: int, layers: int) -> tuple[int, ...]:
    """k of each of so many conditional ``layers``, of rows of ``tokens``: ``ceil(n / r)`` unless the checkpoint
    states another number by tokens and reduction, ``{"512": {"3": 192}}``, or ``[192, 128]`` there, layer by layer."""
    found = (stated or {}).get(str(tokens), {}).get(str(reduction), (tokens + reduction - 1) // reduction)
    return found if isinstance(found, tuple) else (found,) * layers


def stated_tokens_problem(stated: StatedTokens, reductions: Sequence[int], layers: int, most_tokens: int) -> str | None:
    """First problem of a model offered at ``reductions`` (falling), as ``key: problem``, or None."""
    for length, by_reduction in stated.items():
        if not _is_number(length, 1, most_tokens):
            return f"{length[:80]!r}: expected the tokens of a row, 1 to {most_tokens}"
        tokens = int(length)
        held = [r for r in reductions if r <= tokens]
        for reduction, count in by_reduction.items():
            where = f"{length}: {reduction[:80]}"
            if not _is_number(reduction, 2, tokens) or int(reduction) not in held:
                offered = ", ".join(str(r) for r in held if r > 1)
                return f"{where}: expected a reduction that is offered, {offered or 'none'}"
            counts = count if isinstance(count, tuple) else (count,) * layers
            if len(counts) != layers:
                return f"{where}: expected a number for each of {layers} conditional layers, got {len(counts)}"
            if outside := [k for k in counts if not 1 <= k <= tokens]:
                return f"{where}: expected 1 to {tokens} tokens, got {outside[0]}"
        by_share = [tokens_of_layers(stated, tokens, r, layers) for r in held]
        for fewer, more, low, high in zip(by_share, by_share[1:], held, held[1:], strict=False):
            if any(a > b for a, b in zip(fewer, more, strict=True)):
                return f"{length}: {low}: selects more tokens of a layer than reduction {high} does"
    return None


def _is_number(text: str, least: int, most: int) -> bool:
    return text.isascii() and text.isdecimal() and text == str(int(text[:10])) and least <= int(text) <= most
