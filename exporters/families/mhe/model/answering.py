"""An MHE model as the compiler traces and compares it."""

from __future__ import annotations

from typing import Any

import torch


class Answering(torch.nn.Module):
    """``model`` as families hand it over: inputs by position, a tuple of outputs."""

    def __init__(self, model: Any) -> None:  # MheEncoder, MheDecoder or MheEncoderDecoder
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.model(*inputs),)
