"""An MHE model as the compiler traces and compares it."""

from __future__ import annotations

from typing import Any

import torch


class Answering(torch.nn.Module):
    """``model`` as families hand it over: inputs by position, a tuple of outputs."""

    def __init__(self, model: Any) -> None:  # MheEncoder or MheDecoder
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        given = (input_ids,) if attention_mask is None else (input_ids, attention_mask)
        return (self.model(*given),)
