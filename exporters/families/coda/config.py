"""``config.json`` of encoders with conditional adapters, read strictly (no torch here). See docs/coda.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ....profiles.nest_request import MOST_ADAPTER_SIZE, MOST_LABELS
from ....profiles.nest_request import Activation as Activation
from ....profiles.nest_request import AdapterKind as AdapterKind
from ....profiles.nest_request import KeysOf as KeysOf
from ....profiles.nest_request import Router as Router
from ...checkpoints.config import MOST_LAYERS, granularity_problem
from ...checkpoints.own_folder import OwnConfig

Norm = Literal["rms", "layer"]
Position = Literal["learned", "relative", "rotary"]
StatedTokens = Mapping[str, Mapping[str, int | tuple[int, ...]]]
IDS, MASK, TYPE_IDS, PIXELS = "input_ids", "attention_mask", "token_type_ids", "pixel_values"
REDUCTION = "coda.reduction"
# The routes of a conditional layer are called by this and its number.
ROUTES = "routes."
# Reductions larger than the trained one that a model is offered at, where config.json does not say.
_DEFAULT_REDUCTIONS = (8, 5, 3, 2)
# Rounds are unrolled: each is some ten operations of every conditional layer.
_MOST_ROUNDS = 128
# Below it a score over epsilon is beyond float32.
_LEAST_EPSILON = 1e-6
_DEFAULT_FRACTIONS = (0.25, 0.5, 0.75, 1.0)


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
class CodaConfig(OwnConfig):
    """An encoder with an adapter in every layer, of ``adapter_size`` neurons, or of that rank.

    ``adapter`` is ``parallel`` beside the layer, ``sequential`` behind it, both for all tokens, or ``lora``: low-rank
    terms of queries and values, which only tokens that pass through attention get. It has no ``adapter_activation``.
    It reads texts, of ``vocab_size`` tokens and up to ``max_position_embeddings``, or where ``image`` is stated images.
    ``type_vocab_size`` kinds of token have a vector of their own; of two or more each token's is an input.
    ``norm_place``: norms come ``before`` what they feed and at the end, or, as in BERT, ``after`` each sum and the
    embeddings; the paper has no formula for the second, ``Layer`` has ours.
    ``conditional_layers`` (rising, from 0, nearest the input; all by default) compute ``ceil(n / r)`` of n tokens, the
    others all. ``keys_of`` says whose keys and values the selected tokens read, ``ffn_residual`` which rows the FFN's
    norm reads beside the attended: the layer's input (``raw``), or that normalised. ``soft_top_k`` belongs to that
    router. ``selected_by``: tokens are ranked by their raw scores or by their gates, which differ where gates saturate.
    ``route_padding``: padding takes part in the routing, as a token.
    ``reduction`` is the trained r, ``reductions`` those that the model is offered at; ``reduction_of_one`` says whether
    at r = 1 the router still gates every token, or every token passes whole. ``tokens_selected`` are other k than
    ``ceil(n / r)`` (``tokens_of_layers``).
    ``num_key_value_heads`` are fewer than the heads in grouped attention, 1 in multi-query attention. ``bias`` gives
    every linear layer outside the adapters one. ``nested`` says that every prefix of the FFN was trained as a model,
    ``granularities`` at which levels. Without ``num_labels`` the model answers with its last states, else with logits
    of the mean of its tokens.
    """

    hidden_size: int = field(metadata={"min": 1})
    num_hidden_layers: int = field(metadata={"min": 1})
    num_attention_heads: int = field(metadata={"min": 1})
    intermediate_size: int = field(metadata={"min": 1})
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
    head_dim: int | None = field(default=None, metadata={"min": 1})
    softmax_scale: float | None = None
    bias: bool = False
    norm_eps: float = 1e-6
    num_labels: int | None = field(default=None, metadata={"min": 2, "max": MOST_LABELS})
    nested: bool = False
    granularities: Mapping[str, tuple[float, ...]] | None = field(default=None, hash=False)
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
    def head_size(self) -> int:
        """Numbers of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def scale(self) -> float:
        """Scale of attention scores, which no slice changes."""
        return self.head_size**-0.5 if self.softmax_scale is None else self.softmax_scale

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
        """The levels that training sampled: those stated, else of a nested model four even steps of the FFN. Levels of
        the FFN alone would leave out what several reductions offer, so that beside those there are none."""
        stated = {"ffn": _DEFAULT_FRACTIONS} if self.granularities is None and self.nested else self.granularities
        return None if len(self.offered) > 1 and stated is not None and REDUCTION not in stated else stated

    def problem(self) -> str | None:
        """First problem among the values, as ``key: problem``, or None."""
        if self.num_hidden_layers > MOST_LAYERS:
            return f"num_hidden_layers: expected at most {MOST_LAYERS}, got {self.num_hidden_layers}"
        if found := self._input_problem():
            return found
        if not 0 < self.norm_eps < 1:
            return f"norm_eps: expected a number between 0 and 1, got {self.norm_eps:g}"
        if self.granularities is not None and (found := granularity_problem(self.granularities, self.kinds)):
            return found
        if (self.adapter_activation is None) != (self.adapter == "lora"):
            wanted = "none with lora" if self.adapter == "lora" else f"one with adapter {self.adapter}"
            return f"adapter_activation: expected {wanted}, got {self.adapter_activation or 'none'}"
        if self.norm_place == "after" and self.ffn_residual != "raw":
            return "ffn_residual: expected raw with norm_place after, where a layer's input is not normed"
        return self._attention_problem() or self._routing_problem() or self._reduction_problem()

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

    def _attention_problem(self) -> str | None:
        heads, shared = self.num_attention_heads, self.key_value_heads
        if self.head_dim is None and self.hidden_size % heads:
            return (
                f"num_attention_heads: {heads} heads do not divide hidden_size {self.hidden_size}; state head_dim "
                "where heads have another size"
            )
        if heads % shared:
            return f"num_key_value_heads: {shared} do not divide num_attention_heads {heads}"
        if self.position == "rotary" and self.head_size % 2:
            return f"position: rotary positions need heads of even size, got {self.head_size}"
        if self.softmax_scale is not None and self.softmax_scale <= 0:
            return f"softmax_scale: expected a number above 0, got {self.softmax_scale:g}"
        return None

    def _routing_problem(self) -> str | None:
        layers = self.conditional
        if list(layers) != sorted(set(layers)) or any(not 0 <= n < self.num_hidden_layers for n in layers):
            return (
                f"conditional_layers: expected rising numbers from 0 to {self.num_hidden_layers - 1}, "
                f"got {_shown(layers)}"
            )
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
                f"reduction_of_one: dense says what r = 1 is, which reductions {_shown(self.offered)} lack; add 1 to "
                "reductions, or leave reduction_of_one out"
            )
        if self.tokens_selected is not None:
            found = stated_tokens_problem(self.tokens_selected, self.offered, len(self.conditional), most)
            if found:
                return f"tokens_selected: {found}"
        if self.reductions is None:
            return None
        if list(self.reductions) != sorted(set(self.reductions), reverse=True) or not self.reductions:
            return f"reductions: expected falling numbers, got {_shown(self.reductions)}"
        if not self.conditional:
            return "reductions: no layer is conditional"
        if self.reduction not in self.reductions:
            return f"reductions: {_shown(self.reductions)} lack {self.reduction}, the reduction of training; add it"
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


def _shown(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}]"
