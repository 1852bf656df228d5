"""The FFN of a decoder whose class makes gate and up in one layer, with a layer for each: a prefix of neurons is then a
prefix of every weight."""

from __future__ import annotations

from typing import Any

import torch


class SplitFfn(torch.nn.Module):
    """``packed``, an FFN whose ``gate_up_proj`` makes the gate before up; on the same weights, without biases."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        gate, up = packed.gate_up_proj.weight.chunk(2)
        self.gate_proj, self.up_proj = _linear(gate), _linear(up)
        self.down_proj = packed.down_proj
        self.activation = packed.activation_fn

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]."""
        found: torch.Tensor = self.down_proj(self.up_proj(hidden) * self.activation(self.gate_proj(hidden)))
        return found


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer
