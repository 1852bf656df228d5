"""Parts of the reference model as modules of their own, on its weights: what the compiler traces, segment by segment.

Shapes as in model.py. The user's module stays attribute ``model``, so that parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .model import CostEffModel


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
