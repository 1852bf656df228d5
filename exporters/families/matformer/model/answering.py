"""A MatFormer module as the compiler traces it: its answer as a tuple."""

from __future__ import annotations

import torch


class Answering(torch.nn.Module):
    """``model`` with one positional input; a single output becomes a tuple of one."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answer = self.model(inputs)
        return answer if isinstance(answer, tuple) else (answer,)
