"""An encoder with conditional adapters: a text or an image to last states, or to the logits of classes.

One layer is a frozen Transformer layer of which some tokens, or all, pass through, and an adapter for all.

Shapes: ``B`` rows of ``n`` tokens, ``d`` hidden, ``k`` selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ....errors import InputError, ParityError
from ...architecture import ROUTES, JudgedRoutes, Replay, given_by_layer
from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_folder import read_config, with_weights
from ...modules.layers import Answering, AnsweringWithRoutes, Ffn, draw_weights, on_same_weights
from ...modules.top_tokens import indices_problem, ranking_gap, repeated_token, taken, traced_highest
from ...onnx_translations import top_places
from ...signature import MASK
from .attention import Attention, LowRank, Places, RelativeBias, make_adapter
from .config import CodaConfig, ImageInput
from .ops import layer_tokens
from .routing import Router, Rows, Selection, TracedRows


class CodaEncoder(torch.nn.Module):
    """Without labels: last states [B, n, d]; else logits [B, labels] of the mean of a row's tokens.

    ``reduction`` is the r at which conditional layers compute, the trained one until something else is set. With
    ``any_length`` a row may have fewer tokens than that, of which a layer computes one. Weights are drawn from a normal
    distribution of 0.02 (norms 1, biases 0).
    """

    def __init__(self, config: CodaConfig, any_length: bool = False) -> None:
        super().__init__()
        self.config, self.reduction, self.any_length = config, config.reduction, any_length
        self.embeddings = make_embeddings(config)
        self.relative_bias = RelativeBias(config.num_attention_heads) if config.position == "relative" else None
        self.layers = torch.nn.ModuleList(
            Layer(config, layer in config.conditional) for layer in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config) if config.norm_place == "before" else None
        labels = config.num_labels
        self.classifier = None if labels is None else torch.nn.Linear(config.hidden_size, labels)
        draw_weights(self)

    def forward(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        """``inputs`` in the order of ``config.inputs``: ids, a mask that is 1 where a token counts (None: all do) and
        perhaps kinds of token, each [B, n] int64; or pixels [B, C, height, width]. Raises as ``routed``."""
        return self.routed(*inputs)[0]

    def routed(
        self, *inputs: torch.Tensor | None, given: Mapping[int, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, dict[int, Selection]]:
        """The outputs of ``forward``, and the selected tokens of every conditional layer that compares scores;
        ``given`` [B, k] by layer replaces the routers' own.

        Raises InputError for more tokens than the model takes, PlanError for fewer in a row than the reduction, unless
        rows may have ``any_length``.
        """
        read = dict(zip(self.config.inputs, inputs, strict=True))
        mask = read.pop(MASK, None)
        hidden = self.embeddings(*read.values())
        length = hidden.shape[1]
        turned = self.config.head_size if self.config.position == "rotary" else None
        places = Places.of(mask, hidden, self.relative_bias, turned)
        counts = self.counts(length)
        found: dict[int, Selection] = {}
        for number, layer in enumerate(self.layers):
            hidden, selection = layer(hidden, places, counts.get(number), (given or {}).get(number))
            if selection is not None and self.config.has_scores:
                found[number] = selection
        return self._answer(hidden if self.norm is None else self.norm(hidden), places.is_token), found

    def counts(self, tokens: int) -> dict[int, int]:
        """By conditional layer how many of ``tokens`` it computes; empty where all pass without a gate."""
        return layer_tokens(self.config, tokens, self.reduction, self.any_length)

    def _answer(self, hidden: torch.Tensor, is_token: torch.Tensor | None) -> torch.Tensor:
        if self.classifier is None:
            return hidden
        if is_token is None:
            mean = hidden.mean(1)
        else:
            counted = is_token[..., None].to(hidden.dtype)
            mean = (hidden * counted).sum(1) / counted.sum(1).clamp(min=1)
        return self.classifier(mean)


class Layer(torch.nn.Module):
    """Adapter, attention and FFN; with a router where ``conditional``. ``rows`` says how tokens are read and added.

    Equations (1) to (7) of Conditional Adapters (arXiv 2304.04947), which are of layers whose norms come first. Where
    norms come last the paper has none, and what a layer adds to the rows that it computes is the frozen layer of them
    less the rows: with every token at a gate of 1 and no adapter, it is the frozen layer there too.

    The equations are of parallel adapters. The paper says no more of the others than that they work, and the readings
    are ours: a sequential adapter reads what the layer made of every token and adds to it; LoRA belongs to the frozen
    weights of the conditional branch, so that a token that is left out passes as it is.
    """

    def __init__(self, config: CodaConfig, conditional: bool) -> None:
        super().__init__()
        self.config, self.norms_first = config, config.norm_place == "before"
        self.rows: Rows = Rows()
        self.attention_norm, self.ffn_norm = make_norm(config), make_norm(config)
        ffn = Ffn(config.hidden_size, config.intermediate_size, config.activation, config.bias, config.gated_ffn)
        self.attention, self.ffn, self.adapter = Attention(config), ffn, make_adapter(config)
        self.router = Router(config) if conditional else None

    def forward(
        self, x: torch.Tensor, places: Places, count: int | None, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Selection | None]:
        """``x`` [B, n, d] to [B, n, d] and, of a conditional layer, the ``count`` tokens of each row that it computed:
        its own, or those ``given`` [B, k]. Without ``count`` all tokens pass, without a gate."""
        normed = self.attention_norm(x) if self.norms_first else x  # [B, n, d]
        base = x + self.adapter(normed) if self.config.adapter == "parallel" else x  # (1)
        if self.router is None or count is None:
            turn = places.turn()
            return self._behind(base + self._computed(x, normed, normed, places.added(), turn, turn)), None
        selection: Selection = self.router(normed, places.is_token, count, given)  # (2)
        chosen = selection.chosen
        routed = self.rows.read(normed, chosen)  # (3) [B, k, d]
        raw = self.rows.read(x, chosen) if self.config.reads_raw else routed
        to_selected = self.config.keys_of == "selected"
        computed = self._computed(
            raw,
            routed,
            routed if to_selected else normed,
            places.added(chosen, chosen if to_selected else None),
            places.turn(chosen),
            places.turn(chosen if to_selected else None),
        )
        # (6), (7): gates scale the k rows that were computed, not all n.
        return self._behind(self.rows.add(base, chosen, selection.gates[..., None] * computed)), selection

    def _behind(self, y: torch.Tensor) -> torch.Tensor:
        """The layer's output for all tokens, and a sequential adapter of that."""
        return y + self.adapter(y) if self.config.adapter == "sequential" else y

    def _computed(
        self,
        residual: torch.Tensor,
        asking: torch.Tensor,
        read: torch.Tensor,
        added: torch.Tensor | None,
        turn_queries: Callable[[torch.Tensor], torch.Tensor] | None,
        turn_keys: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """(4), (5): what attention and FFN make of the rows ``asking``, and of the ``residual`` beside them; the sum of
        both."""
        low_rank = self.adapter if isinstance(self.adapter, LowRank) else None
        attended: torch.Tensor = self.attention(asking, read, added, turn_queries, turn_keys, low_rank)
        if not self.norms_first:
            middle = self.attention_norm(residual + attended)
            whole: torch.Tensor = self.ffn_norm(middle + self.ffn(middle))
            return whole - residual
        return attended + self.ffn(self.ffn_norm(residual + attended))


class RmsNorm(torch.nn.Module):
    """``x / rms(x) * weight``, as in T5."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A product, not a power: ONNX Runtime takes three times as long for a Pow.
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.epsilon) * self.weight


def make_norm(config: CodaConfig) -> torch.nn.Module:
    """The norm of the configured kind."""
    if config.norm == "rms":
        return RmsNorm(config.hidden_size, config.norm_eps)
    return torch.nn.LayerNorm(config.hidden_size, config.norm_eps)


def make_embeddings(config: CodaConfig) -> TextEmbeddings | ImageEmbeddings:
    """Those of what the model reads."""
    return TextEmbeddings(config) if config.image is None else ImageEmbeddings(config, config.image)


class Embeddings(torch.nn.Module):
    """Parts that texts and images share: vectors of places where positions are learned, and a norm where norms come
    last."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        learned = config.position == "learned"
        self.position = torch.nn.Embedding(config.most_tokens, config.hidden_size) if learned else None
        self.norm = make_norm(config) if config.norm_place == "after" else None

    def placed(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [B, n, d] with their places, normed."""
        if self.position is not None:
            states = states + self.position.weight[: states.shape[1]]
        return states if self.norm is None else self.norm(states)


class TextEmbeddings(Embeddings):
    """Tokens, and what kind each is of, where kinds have vectors; one kind alone is every token's."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__(config)
        assert config.vocab_size is not None
        kinds = config.type_vocab_size
        self.most_tokens = config.most_tokens
        self.word = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type = torch.nn.Embedding(kinds, config.hidden_size) if kinds else None

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Both [B, n] int64 to [B, n, d]. Raises InputError for more tokens than the model takes."""
        if input_ids.shape[1] > self.most_tokens:
            raise InputError(f"{input_ids.shape[1]} tokens: the model takes at most {self.most_tokens}")
        states: torch.Tensor = self.word(input_ids)
        if self.token_type is not None:
            states = states + (self.token_type.weight if token_type_ids is None else self.token_type(token_type_ids))
        return self.placed(states)


class ImageEmbeddings(Embeddings):
    """Patches row by row, each a product with ``patch`` [d, C, height, width], behind the learned tokens ``front``."""

    def __init__(self, config: CodaConfig, image: ImageInput) -> None:
        super().__init__(config)
        size = (image.patch_height, image.patch_width)
        self.patch = torch.nn.Conv2d(image.channels, config.hidden_size, size, stride=size)
        front = torch.nn.Parameter(torch.empty(image.front_tokens, config.hidden_size))
        self.front = front if image.front_tokens else None

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """``pixel_values`` [B, C, height, width] to [B, n, d]."""
        states = self.patch(pixel_values).flatten(2).transpose(1, 2)
        if self.front is not None:
            states = torch.cat((self.front.expand(states.shape[0], -1, -1), states), 1)
        return self.placed(states)


def load_model(folder: Path) -> CodaEncoder:
    """The model in ``folder``, in eval mode and float32, without gradients, at its trained reduction.

    Raises CheckpointError for another folder, or one whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    config = read_config(checkpoint, CodaConfig)
    return with_weights(lambda: CodaEncoder(config), checkpoint)


def answering(checkpoint: Checkpoint, config: CodaConfig) -> Answering:
    """The model as families hand it over, at the least reduction that it is offered at."""
    module = Answering(with_weights(lambda: CodaEncoder(config), checkpoint))
    narrow(module, config.offered[-1])
    return module


def narrow(module: Any, reduction: int) -> None:
    """Makes ``module``, an ``Answering``, compute at ``reduction``."""
    module.model.reduction = reduction


def lower(module: Any, variants: Mapping[str, str]) -> AnsweringWithRoutes:
    """A copy of ``module``, an ``Answering``, on the same weights as a graph has it, in ``variants``."""
    model: CodaEncoder = on_same_weights(module.model)
    take_variants(model, variants)
    return AnsweringWithRoutes(model)


def take_variants(model: CodaEncoder, variants: Mapping[str, str]) -> None:
    """Makes ``model`` choose, read and add tokens as a graph does, in ``variants``."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if layer.router is not None:
            layer.router.choose = _traced_choice
            if variants:
                layer.rows = TracedRows(variants)


def _traced_choice(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the highest, of a row of one length or of any."""
    return top_places(scores, count) if isinstance(count, torch.SymInt) else traced_highest(scores, count)


# A gate below this adds nothing that float32 could hold beside a state.
_VANISHED = 1e-6


def replay(
    model: Any,
    inputs: Sequence[torch.Tensor | None],
    given: Mapping[str, torch.Tensor],
    behind: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = lambda answer: (answer,),
) -> Replay:
    """A pass of ``model``, a CodaEncoder, on the tokens ``given`` [B, k] by name, each judged by the scores behind the
    same tokens.

    ``inputs`` are the model's; its outputs are what ``behind`` makes of its answer. Raises ParityError for tokens that
    no router of these shapes can select.
    """
    chosen = given_by_layer(given, model.config.conditional)
    image = model.config.image
    assert inputs[0] is not None
    rows, tokens = inputs[0].shape[0], inputs[0].shape[1] if image is None else image.tokens
    counts = model.counts(tokens)
    for layer, places in chosen.items():
        shape = (rows, counts.get(layer, 0))
        if problem := indices_problem(places, shape, 0, tokens - 1) or repeated_token(places, _row):
            raise ParityError(f"{ROUTES}{layer}: {problem}")
    output, found = model.routed(*inputs, given=chosen)
    return Replay(behind(output), {f"{ROUTES}{layer}": _judged(layer, found[layer]) for layer in chosen})


def _judged(layer: int, selection: Selection) -> JudgedRoutes:
    gap = ranking_gap(selection.ranked, selection.chosen, _row)
    tokens = selection.ranked.shape[1]
    took, own = (taken(chosen, tokens) for chosen in (selection.chosen, selection.own))  # [B, n]
    shares = {
        "mean_gate": float(selection.gates.mean()),
        "gates_vanished": float((selection.gates < _VANISHED).double().mean()),
    }
    made, differing = selection.chosen.numel(), int((took & ~own).sum())
    return JudgedRoutes(gap.value, f"layer {layer}, {gap.where}", made, differing, shares)


def _row(index: tuple[int, ...]) -> str:
    (row,) = index
    return f"row {row}"
