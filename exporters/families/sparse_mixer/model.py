"""The Sparse Mixer: an encoder of BERT's kind whose layers mix tokens or attend, densely or through experts.

Every layer is ``U = norm(X + Mix(X))``, ``Y = norm(U + F(U))``. GELU is its tanh approximation throughout.
Shapes: ``B`` rows, ``S`` tokens, ``d`` hidden, ``e`` embedding width, ``V`` vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....elastic import SEQUENCE, Submodel
from ....errors import InputError, ParityError
from ...architecture import ROUTES, JudgedRoutes, Replay, given_by_layer
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import with_weights
from ...modules.attention import NestedAttention, additive_mask
from ...modules.layers import (
    Answering,
    AnsweringWithRoutes,
    Embeddings,
    Ffn,
    MaskedLmHead,
    draw_weights,
    on_same_weights,
)
from ...modules.top_tokens import ScoreGap, indices_problem, ranking_gap, repeated_token, shown, taken, worst
from .config import CAPACITY, EXPERTS, GROUP, OF_ANY_LENGTH, Routing, SparseMixerConfig
from .mixing import FoldedMixing, HalfTables, Mixing, SpectralMixing, make_mixings, spectral_matrices
from .moe import DROPPED, MoE, Routes, StaticMoE

Outputs = tuple[torch.Tensor, ...]


class SparseMixer(torch.nn.Module):
    """Token ids to the outputs of the configured head.

    none: last hidden state [B, S, d], pooled [B, d]. masked_lm: logits [B, S, V]. classifier: logits [B, labels].
    pretraining: logits [B, S, V], labels [B, labels].
    Weights are drawn as BERT's are (normal, 0.02; biases 0, norms 1). ``sequence`` is the S that mixing serves.
    """

    def __init__(self, config: SparseMixerConfig) -> None:
        super().__init__()
        self.config = config
        self.sequence = config.max_position_embeddings
        self.embeddings = ProjectedEmbeddings(config)
        self.layers = torch.nn.ModuleList(Layer(config, i, mixing) for i, mixing in enumerate(make_mixings(config)))
        hidden = config.hidden_size
        self.pooler = torch.nn.Linear(hidden, hidden) if config.pools else None
        width, epsilon = config.embedding_width, config.layer_norm_eps
        self.head = (
            MaskedLmHead(hidden, width, config.vocab_size, epsilon, "gelu_tanh") if config.predicts_tokens else None
        )
        self.classifier = torch.nn.Linear(hidden, config.num_labels) if config.num_labels else None
        draw_weights(self)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> Outputs:
        """``input_ids`` and ``token_type_ids`` [B, S] int64, by default all 0, to the head's outputs.

        Raises InputError for a length that the model does not serve.
        """
        return self.routed(input_ids, token_type_ids)[0]

    def routed(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        given: Mapping[int, torch.Tensor] | None = None,
    ) -> tuple[Outputs, dict[int, Routes]]:
        """The outputs of ``forward``, and the routes of every layer of experts.

        ``given`` has routes by layer, which replace the router's own (``Routes.chosen``).
        """
        self._check_length(input_ids.shape[1])
        hidden = self.embeddings(input_ids, token_type_ids)  # [B, S, d]
        mask = attention_mask(input_ids, self.config.pad_token_id, hidden) if self.config.attention_layers else None
        routes: dict[int, Routes] = {}
        for number, layer in enumerate(self.layers):
            hidden, found = layer(hidden, mask, (given or {}).get(number))
            if found is not None:
                routes[number] = found
        return self._answer(hidden), routes

    def hold_matrices(self) -> None:
        """Builds the matrices that are no parameters, for inference; layers of spectral mixing share theirs."""
        tables = None
        for part in self.modules():
            if isinstance(part, SpectralMixing):
                tables = tables or spectral_matrices(self.config.mixing, self.sequence, self.config.hidden_size)
                part.share(tables)
            elif isinstance(part, Mixing):
                part.hold(self.sequence)

    def set_sequence(self, length: int) -> None:
        """Makes mixing serve sequences of ``length``. Raises InputError where its matrices have one length alone."""
        trained = self.config.max_position_embeddings
        if not 1 <= length <= trained:
            raise InputError(f"sequence {length}: expected 1..{trained} tokens")
        if length != trained and self.config.mixing not in OF_ANY_LENGTH:
            raise InputError(f"sequence {length}: {self.config.mixing} mixing is bound to {trained} tokens")
        if length != self.sequence:
            self.sequence = length
            self.hold_matrices()

    def _check_length(self, length: int) -> None:
        if len(self.config.attention_layers) == self.config.num_hidden_layers:
            if length > self.config.max_position_embeddings:
                raise InputError(f"{length} tokens: the model takes at most {self.config.max_position_embeddings}")
        elif length != self.sequence:
            raise InputError(
                f"{length} tokens: {self.config.mixing} mixing serves {self.sequence} tokens; "
                f"pad with {self.config.pad_token_id}"
            )

    def _answer(self, hidden: torch.Tensor) -> Outputs:
        outputs = [] if self.head is None else [self.head(hidden, self.embeddings.word.weight)]
        if self.pooler is not None:
            pooled = torch.tanh(self.pooler(hidden[:, 0]))  # [B, d]
            outputs += [hidden, pooled] if self.classifier is None else [self.classifier(pooled)]
        return tuple(outputs)


class ProjectedEmbeddings(Embeddings):
    """Embeddings of width ``e``, projected to ``d``."""

    def __init__(self, config: SparseMixerConfig) -> None:
        width, positions = config.embedding_width, config.max_position_embeddings
        super().__init__(config.vocab_size, width, positions, config.type_vocab_size, config.layer_norm_eps)
        self.projection = torch.nn.Linear(width, config.hidden_size)

    def forward(self, input_ids: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        """Ids [B, S], as ``Embeddings`` takes them, to [B, S, d]."""
        return self.projection(super().forward(input_ids, *others))


class Layer(torch.nn.Module):
    """One block: ``mixing`` or ``attention``, then ``ffn`` or ``moe``, each added to its input and normalised."""

    def __init__(self, config: SparseMixerConfig, number: int, mixing: Mixing | None) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.mixing = mixing
        self.attention: Any = None if mixing is not None else NestedAttention(hidden, heads, config.head_dim, bias=True)
        self.mixing_norm = torch.nn.LayerNorm(hidden, config.layer_norm_eps)
        routes = config.routes(number)
        self.ffn = None if routes else Ffn(hidden, config.intermediate_size, "gelu_tanh")
        self.moe: Any = MoE(config) if routes else None
        self.ffn_norm = torch.nn.LayerNorm(hidden, config.layer_norm_eps)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, Routes | None]:
        """``x`` [B, S, d] to [B, S, d], and the routes where there are experts."""
        mixed = self.mixing(x) if self.mixing is not None else self.attention(x, mask)
        u = self.mixing_norm(x + mixed)
        updated, routes = (self.ffn(u), None) if self.ffn is not None else self.moe(u, given)
        return self.ffn_norm(u + updated), routes


def attention_mask(input_ids: torch.Tensor, pad: int, like: torch.Tensor) -> torch.Tensor:
    """``input_ids`` [B, S] to [B, 1, S, S] in the dtype of ``like``, added to scores: 0 where neither query nor key is
    ``pad``; a pad sees nothing.
    """
    is_token = input_ids != pad
    both = is_token[:, None, :, None] & is_token[:, None, None, :]
    return additive_mask(both, like)


def narrow(module: torch.nn.Module, submodel: Submodel) -> None:
    """Sets the budget of every layer of experts, and the sequence that mixing serves, to that of ``submodel``."""
    chosen = {axis.name: value for axis, value in submodel.values}
    for part in module.modules():
        if isinstance(part, MoE):
            part.percent = chosen.get(CAPACITY, part.percent)
            part.group_size = chosen.get(GROUP, part.group_size)
            part.kept = chosen.get(EXPERTS, part.kept)
        elif isinstance(part, SparseMixer) and SEQUENCE in chosen:
            part.set_sequence(chosen[SEQUENCE])


class Lowered(AnsweringWithRoutes):
    """``AnsweringWithRoutes`` whose inputs graphs call by their names."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        return super().forward(input_ids, token_type_ids)  # type: ignore[arg-type]


def lower(module: Any, variants: Mapping[str, str]) -> Lowered:
    """A copy of ``module``, an ``Answering``, on the same weights, in ``variants`` (``variant_ops``)."""
    model = on_same_weights(module.model)
    for layer in model.layers:
        if isinstance(layer.moe, MoE):
            layer.moe = StaticMoE(layer.moe, variants)
    if variants.get("mixing") == "folded":
        along = [HalfTables(size) for size in (model.sequence, model.config.hidden_size)]
        for layer in model.layers:
            if layer.mixing is not None:
                layer.mixing = FoldedMixing(model.config, *along)
    return Lowered(model)


def answering(checkpoint: Checkpoint, config: SparseMixerConfig) -> Answering:
    """The model in ``checkpoint`` as families hand it over, its mixing matrices held."""
    model = with_weights(lambda: SparseMixer(config), checkpoint)
    model.hold_matrices()
    return Answering(model)


def replay(model: Any, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]) -> Replay:
    """A pass of ``model``, a SparseMixer, with the routes ``given``, each judged by the scores behind the same routes.

    ``inputs`` are ids and, where there are several, types [B, S]. Raises ParityError for routes that no model of these
    shapes can make.
    """
    layers = {number: moe for number, moe in enumerate(layer.moe for layer in model.layers) if isinstance(moe, MoE)}
    routing = {number: moe.routing(inputs[0].numel()) for number, moe in layers.items()}
    chosen = given_by_layer(given, tuple(layers))
    for number, routes in chosen.items():
        if problem := _problem(routes, layers[number].config.router == "experts_choose", routing[number]):
            raise ParityError(f"{ROUTES}{number}: {problem}")
    outputs, found = model.routed(inputs[0], inputs[1] if len(inputs) > 1 else None, chosen)
    judged = {number: _judged(number, moe, found[number], routing[number]) for number, moe in layers.items()}
    return Replay(outputs, {f"{ROUTES}{number}": one for number, one in judged.items()})


def _problem(given: torch.Tensor, experts_choose: bool, routing: Routing) -> str | None:
    """Why no router of these shapes can take them, or None."""
    if experts_choose:
        shape, least, most = [routing.groups, routing.experts, routing.capacity], 0, routing.tokens - 1
    else:
        shape, least, most = [routing.groups, routing.tokens], DROPPED, routing.trained_experts - 1
    if problem := indices_problem(given, shape, least, most):
        return problem
    if experts_choose:
        return repeated_token(given, group_and_expert)
    held = holds(given, routing.trained_experts).sum(1)  # [G, E]
    for group, expert in (held > routing.capacity).nonzero().tolist():
        return f"group {group}, expert {expert}: took {int(held[group, expert])} tokens into {routing.capacity} slots"
    return None


def _judged(layer: int, moe: MoE, routes: Routes, routing: Routing) -> JudgedRoutes:
    chosen = routes.chosen
    if moe.config.router == "experts_choose":
        gap = experts_gap(routes.scores, chosen)
        took, own = (taken(indices, routing.tokens) for indices in (chosen, routes.own))  # [G, K, T]
        differing, routed, kept = int((took & ~own).sum()), routing.slots, int(took.any(1).sum())
    else:
        gap = tokens_gap(routes.scores, chosen, routing.capacity, moe.config.batch_prioritized)
        differing, routed = int((chosen != routes.own).sum()), int((chosen != DROPPED).sum())
        kept = routed
    shares = {
        "tokens_dropped": 1 - kept / (routing.groups * routing.tokens),
        "slots_used": routed / routing.slots,
        "mean_gate": float(routes.gates.sum()) / max(1, routed),
    }
    return JudgedRoutes(gap.value, f"layer {layer}, {gap.where}", chosen.numel(), differing, shares)


def experts_gap(scores: torch.Tensor, chosen: torch.Tensor) -> ScoreGap:
    """Score gaps of ``chosen`` [G, K, C], the tokens of each expert by falling score, under ``scores`` [G, T, E].

    By how much a token stands behind, or is left out for, one that scores less.
    """
    by_expert = scores[..., : chosen.shape[1]].transpose(1, 2)  # [G, K, T]
    return ranking_gap(by_expert, chosen, group_and_expert)


def group_and_expert(index: tuple[int, ...]) -> str:
    """Units of the first two dimensions of the routes of Experts Choose."""
    group, expert = index
    return f"group {group}, expert {expert}"


def tokens_gap(scores: torch.Tensor, chosen: torch.Tensor, capacity: int, prioritized: bool) -> ScoreGap:
    """Score gaps of ``chosen`` [G, T], the expert of each token or DROPPED, under ``scores`` [G, T, E].

    A token that an expert computes: by how much another expert scores higher. A dropped one: the least by which an
    expert without a free slot may lie below its best, or, where tokens are ``prioritized``, above one that has a slot
    there; infinite where no expert is full (without priorities: of tokens before it).
    """
    best, first = scores.max(-1)  # [G, T]
    missed = best[..., None] - scores  # [G, T, E]
    kept = holds(chosen, scores.shape[-1])  # [G, T, E]
    full = kept.sum(1, keepdim=True) == capacity  # [G, 1, E]
    if prioritized:
        lowest = scores.masked_fill(~kept, torch.inf).amin(1, keepdim=True)  # [G, 1, E]
        refusal = torch.maximum(missed, scores - lowest)
    else:
        before = kept.cumsum(1) - kept.long()
        refusal = missed.masked_fill(before < capacity, torch.inf)
    refusal = refusal.masked_fill(~full, torch.inf).amin(-1)  # [G, T]
    expert = chosen.clamp(min=0)
    worse = torch.where(chosen == DROPPED, refusal, missed.gather(-1, expert[..., None])[..., 0])
    group, token = worst(worse)
    own, taken = int(first[group, token]), int(chosen[group, token])
    wanted = f"expert {own} ({shown(best[group, token])})"
    if taken == DROPPED:
        done = f"was dropped, its best is {wanted}"
    else:
        done = f"went to expert {taken} ({shown(scores[group, token, taken])}), its best is {wanted}"
    return ScoreGap(float(worse[group, token]), f"group {group}, token {token} {done}")


def holds(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """``chosen`` [G, T] to [G, T, E]: whether an expert computes a token."""
    return chosen[..., None] == torch.arange(experts)
