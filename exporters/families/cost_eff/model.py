"""The reference model: a post-norm BERT encoder of any width per layer, with an exit after some of its layers.

Parameters carry BERT's names. The number of heads is read off the weights, so a narrowed copy needs no attributes
mended; the head size and with it the scale ``1 / sqrt(head_size)`` never change.
Shapes: ``B`` rows, ``S`` tokens, ``H`` hidden, ``A`` heads of size ``D``, ``F`` FFN channels, ``C`` classes.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from ...modules.attention import additive_mask
from ...modules.layers import ACTIVATIONS
from .config import CostEffArchitecture, Widths


class CostEffModel(torch.nn.Module):
    """Embeddings, layers and exits. Dropout and gradient scaling belong to training and are not here."""

    def __init__(self, architecture: CostEffArchitecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.embeddings = Embeddings(architecture)
        self.encoder = Encoder(architecture)
        classes = architecture.exits.classes
        heads = {str(layer): torch.nn.Linear(architecture.hidden, classes) for layer in architecture.exits.layers}
        self.exits = torch.nn.ModuleDict(heads)

    @property
    def depth(self) -> int:
        """Layers of this model, fewer than the architecture's in a shorter submodel."""
        return len(self.encoder.layer)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Ids, mask and types ``[B, S]`` to the answer of the last exit; nothing leaves early here."""
        hidden = self.hidden_states(input_ids, attention_mask, token_type_ids)[-1]
        return self.answer(self.depth, hidden, attention_mask)

    def answer(self, layer: int, hidden: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits ``[B, C]`` of the exit after ``layer`` layers and, where it is defined, their entropy ``[B]``."""
        logits = self.exit_logits(layer, hidden, attention_mask)
        return (logits, entropy(logits)) if self.architecture.has_entropy else (logits,)

    def hidden_states(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """``[B, S, H]`` of the embeddings and of every layer: index ``i`` is the state after ``i`` layers."""
        states = [self.embeddings(input_ids, token_type_ids)]
        return states + self.states_from(states[0], attention_mask, 0, self.depth)

    def states_from(
        self, hidden: torch.Tensor, attention_mask: torch.Tensor, first: int, last: int
    ) -> list[torch.Tensor]:
        """The states ``[B, S, H]`` after layers ``first + 1`` to ``last``, from the one after ``first`` layers."""
        keys = additive_mask(attention_mask[:, None, None, :].bool(), hidden)
        states = []
        for layer in self.encoder.layer[first:last]:
            hidden = layer(hidden, keys)
            states.append(hidden)
        return states

    def exit_logits(self, layer: int, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[B, C]`` of the exit after ``layer`` layers, from the state ``[B, S, H]`` there."""
        exits = self.architecture.exits
        if exits.pool == "cls":
            pooled = hidden[:, 0]  # [B, H]
        elif exits.pool == "mean":
            real = attention_mask.unsqueeze(1).to(hidden.dtype)  # [B, 1, S]
            pooled = (real @ hidden).squeeze(1) / real.sum(-1).clamp(min=1)
        else:
            pooled = hidden.mean(1)
        head: torch.nn.Module = self.exits[str(layer)]
        return head(pooled.tanh() if exits.activation == "tanh" else pooled)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """``[..., C]`` logits to ``[...]`` entropies in nats, float32, within ``[0, ln C]`` up to rounding, for
    logits below 1e38.

    ``-sum(exp(s) * s)`` with ``s = z - max(z) - ln sum(exp(z - max(z)))``, the log of the softmax, which is finite:
    where a probability underflows, its term is ``0 * s = 0``, while ``p * ln p`` would be NaN and send the easiest rows
    through every layer. Few operations, since every exit computes them on a handful of numbers.
    """
    logs = logits.float().log_softmax(-1)  # [..., C]
    return -(logs.exp() * logs).sum(-1).clamp(max=0)


class Embeddings(torch.nn.Module):
    """Word (dense, or factorised through a bias-free projection), position and type embeddings, then LayerNorm."""

    def __init__(self, architecture: CostEffArchitecture) -> None:
        super().__init__()
        hidden, rank = architecture.hidden, architecture.rank
        self.word_embeddings = torch.nn.Embedding(architecture.vocabulary, rank or hidden)
        self.word_projection = torch.nn.Linear(rank, hidden, bias=False) if rank else None
        self.position_embeddings = torch.nn.Embedding(architecture.positions, hidden)
        self.token_type_embeddings = torch.nn.Embedding(architecture.types, hidden)
        self.LayerNorm = torch.nn.LayerNorm(hidden, architecture.norm_eps)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        words = self.word_embeddings(input_ids)  # [B, S, R or H]
        if self.word_projection is not None:
            words = self.word_projection(words)  # [B, S, H]
        types = (
            self.token_type_embeddings.weight[0]
            if token_type_ids is None
            else self.token_type_embeddings(token_type_ids)
        )
        positions = self.position_embeddings.weight[: input_ids.shape[1]]  # [S, H]
        return self.LayerNorm(words + types + positions)


class Encoder(torch.nn.Module):
    """The layers, under BERT's name for them."""

    def __init__(self, architecture: CostEffArchitecture) -> None:
        super().__init__()
        self.layer = torch.nn.ModuleList(Layer(architecture, widths) for widths in architecture.layers)


class Layer(torch.nn.Module):
    """Attention and FFN, each with its residual and LayerNorm; a sub-layer of width 0 adds its output bias alone."""

    def __init__(self, architecture: CostEffArchitecture, widths: Widths) -> None:
        super().__init__()
        self.attention = Attention(architecture, widths.heads)
        self.intermediate = Intermediate(architecture, widths.ffn) if widths.ffn else None
        self.output = Residual(widths.ffn, architecture)

    def forward(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        hidden = self.attention(hidden, keys)
        return self.output(self.intermediate(hidden) if self.intermediate else None, hidden)


class Attention(torch.nn.Module):
    def __init__(self, architecture: CostEffArchitecture, heads: int) -> None:
        super().__init__()
        self.self = SelfAttention(architecture, heads) if heads else None
        self.output = Residual(heads * architecture.head_size, architecture)

    def forward(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return self.output(self.self(hidden, keys) if self.self else None, hidden)


class SelfAttention(torch.nn.Module):
    def __init__(self, architecture: CostEffArchitecture, heads: int) -> None:
        super().__init__()
        self.head_size = architecture.head_size
        self.query, self.key, self.value = (
            torch.nn.Linear(architecture.hidden, heads * architecture.head_size) for _ in range(3)
        )

    def forward(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] and what ``keys`` [B, 1, 1, S] adds to every score, to ``[B, S, A * D]``."""
        query, key, value = (
            part(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # [B, A, S, D]
            for part in (self.query, self.key, self.value)
        )
        context = functional.scaled_dot_product_attention(query, key, value, keys, scale=self.head_size**-0.5)
        return context.transpose(1, 2).flatten(2)


class Intermediate(torch.nn.Module):
    def __init__(self, architecture: CostEffArchitecture, width: int) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(architecture.hidden, width)
        self.activation = ACTIVATIONS[architecture.activation]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(hidden))


class Residual(torch.nn.Module):
    """``LayerNorm(dense(inner) + residual)``; without an inner width, ``dense`` is its bias."""

    def __init__(self, inner: int, architecture: CostEffArchitecture) -> None:
        super().__init__()
        hidden = architecture.hidden
        self.dense = torch.nn.Linear(inner, hidden) if inner else OutputBias(hidden)
        self.LayerNorm = torch.nn.LayerNorm(hidden, architecture.norm_eps)

    def forward(self, inner: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        update = self.dense(inner) if inner is not None else self.dense.bias
        return self.LayerNorm(update + residual)


class OutputBias(torch.nn.Module):
    """Rest of a linear layer without inputs: the bias ``[H]``, under its name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(width))


def inner_model(module: torch.nn.Module) -> CostEffModel:
    """The model inside an ``Answering``, or inside a copy of one with narrower parameters."""
    assert isinstance(module.model, CostEffModel)
    return module.model


class _Segment(torch.nn.Module):
    """The layers behind ``first`` up to ``last`` and the exit there; a state ``[B, S, H]`` passed on is first."""

    def __init__(self, model: CostEffModel, first: int, last: int, passes_on: bool) -> None:
        super().__init__()
        self.model = model
        self._span = (first, last)
        self._passes_on = passes_on

    def _from(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.model.states_from(hidden, attention_mask, *self._span)[-1]
        answer = self.model.answer(self._span[1], hidden, attention_mask)
        return (hidden, *answer) if self._passes_on else answer


class FirstSegment(_Segment):
    """From ids, mask and types ``[B, S]``: the embeddings come before its layers."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *types: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return self._from(self.model.embeddings(input_ids, *types or (None,)), attention_mask)


class LaterSegment(_Segment):
    """From the state ``[B, S, H]`` that the segment before passed on, and the mask ``[B, S]``."""

    def forward(self, state: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._from(state, attention_mask)


class EveryExit(torch.nn.Module):
    """One pass that returns what all segments return, in order; the state is not passed on at layer ``deepest``."""

    def __init__(self, model: CostEffModel, layers: Sequence[int], deepest: int) -> None:
        super().__init__()
        self.model = model
        self._layers = tuple(layers)
        self._deepest = deepest

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *types: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        states = self.model.hidden_states(input_ids, attention_mask, *types)
        outputs: list[torch.Tensor] = []
        for layer in self._layers:
            if layer != self._deepest:
                outputs.append(states[layer])
            outputs += self.model.answer(layer, states[layer], attention_mask)
        return tuple(outputs)
