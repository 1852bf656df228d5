"""A Sparse Mixer as the compiler traces and compares it."""

from __future__ import annotations

import torch

from .encoder import SparseMixer


class Answering(torch.nn.Module):
    """``model`` as families hand it over: ids by position, with types where there are several, a tuple of outputs."""

    def __init__(self, model: SparseMixer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        answer: tuple[torch.Tensor, ...] = self.model(input_ids, token_type_ids)
        return answer
