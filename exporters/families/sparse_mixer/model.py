"""The Sparse Mixer: an encoder of BERT's kind whose layers mix tokens or attend, densely or through experts.

Every layer is ``U = norm(X + Mix(X))``, ``Y = norm(U + F(U))``. GELU is its tanh approximation throughout.
Shapes: ``B`` rows, ``S`` tokens, ``d`` hidden, ``e`` embedding width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ....errors import InputError
from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_folder import read_config, with_weights
from ...modules.attention import NestedAttention, additive_mask
from ...modules.layers import Answering, Ffn, MaskedLmHead, draw_weights, on_same_weights
from .config import OF_ANY_LENGTH, SparseMixerConfig
from .mixing import FoldedMixing, HalfTables, Mixing, SpectralMixing, make_mixings, spectral_matrices
from .moe import MoE, Routes
from .static_moe import StaticMoE

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
        self.embeddings = Embeddings(config)
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


class Embeddings(torch.nn.Module):
    """The sum of word, position and type, normalised, then projected from ``e`` to ``d``."""

    def __init__(self, config: SparseMixerConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.word = torch.nn.Embedding(config.vocab_size, width)
        self.position = torch.nn.Embedding(config.max_position_embeddings, width)
        self.token_type = torch.nn.Embedding(config.type_vocab_size, width)
        self.norm = torch.nn.LayerNorm(width, config.layer_norm_eps)
        self.projection = torch.nn.Linear(width, config.hidden_size)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        """Ids [B, S] to [B, S, d]; without types every token is of type 0."""
        types = self.token_type.weight[0] if token_type_ids is None else self.token_type(token_type_ids)
        total = self.word(input_ids) + self.position.weight[: input_ids.shape[1]] + types
        projected: torch.Tensor = self.projection(self.norm(total))
        return projected


class Layer(torch.nn.Module):
    """One block: ``mixing`` or ``attention``, then ``ffn`` or ``moe``, each added to its input and normalised."""

    def __init__(self, config: SparseMixerConfig, number: int, mixing: Mixing | None) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.mixing = mixing
        self.attention = None if mixing is not None else NestedAttention(hidden, heads, config.head_dim, bias=True)
        self.mixing_norm = torch.nn.LayerNorm(hidden, config.layer_norm_eps)
        routes = config.routes(number)
        self.ffn = None if routes else Ffn(hidden, config.intermediate_size, "gelu_tanh")
        self.moe = MoE(config) if routes else None
        self.ffn_norm = torch.nn.LayerNorm(hidden, config.layer_norm_eps)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, Routes | None]:
        """``x`` [B, S, d] to [B, S, d], and the routes where there are experts."""
        mixed = self.mixing(x) if self.mixing is not None else self._attended(x, mask)
        u = self.mixing_norm(x + mixed)
        updated, routes = (self.ffn(u), None) if self.ffn is not None else self._routed(u, given)
        return self.ffn_norm(u + updated), routes

    def _attended(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        assert self.attention is not None
        attended: torch.Tensor = self.attention(x, mask)
        return attended

    def _routed(self, u: torch.Tensor, given: torch.Tensor | None) -> tuple[torch.Tensor, Routes]:
        assert self.moe is not None
        answer: tuple[torch.Tensor, Routes] = self.moe(u, given)
        return answer


def attention_mask(input_ids: torch.Tensor, pad: int, like: torch.Tensor) -> torch.Tensor:
    """``input_ids`` [B, S] to [B, 1, S, S] in the dtype of ``like``, added to scores: 0 where neither query nor key is
    ``pad``; a pad sees nothing.
    """
    is_token = input_ids != pad
    both = is_token[:, None, :, None] & is_token[:, None, None, :]
    return additive_mask(both, like)


class Lowered(torch.nn.Module):
    """``model`` as ``Answering`` has it, whose outputs are followed by the routes of every layer of experts."""

    def __init__(self, model: SparseMixer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        outputs, routes = self.model.routed(input_ids, token_type_ids)
        return (*outputs, *(routes[layer].chosen for layer in sorted(routes)))


def lower(module: Answering, variants: Mapping[str, str]) -> Lowered:
    """A copy of ``module`` on the same weights, in ``variants`` (``variant_ops`` says which there are)."""
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


def load_model(folder: Path) -> SparseMixer:
    """The model in ``folder``, in eval mode and float32, without gradients, its mixing matrices held.

    Raises CheckpointError for another folder, or one whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    return model_of(checkpoint, read_config(checkpoint, SparseMixerConfig))


def model_of(checkpoint: Checkpoint, config: SparseMixerConfig) -> SparseMixer:
    """The module that ``load_model`` returns for an open checkpoint with its configuration."""
    model = with_weights(lambda: SparseMixer(config), checkpoint)
    model.hold_matrices()
    return model
