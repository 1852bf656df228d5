"""The nested FFN: any first ``m`` of its hidden neurons are an FFN of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """``max(x, 0)^2``, elementwise."""
    return functional.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "squared_relu": squared_relu,
}


class NestedFFN(torch.nn.Module):
    """``down(activation(up(x)))`` with ``up`` [F, H] and ``down`` [H, F]; level ``m`` takes rows ``[:m]`` of ``up`` and
    columns ``[:m]`` of ``down``. The bias of ``down`` is whole at every level, and nothing is rescaled."""

    def __init__(self, hidden: int, width: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.up = torch.nn.Linear(hidden, width, bias=bias)
        self.down = torch.nn.Linear(width, hidden, bias=bias)
        self.activation = activation

    def forward(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """``x`` [..., H] to [..., H] through the first ``width`` neurons, by default all that the module holds."""
        activate = _ACTIVATIONS[self.activation]
        if width is None or width == self.up.weight.shape[0]:
            updated: torch.Tensor = self.down(activate(self.up(x)))
            return updated
        if not 1 <= width < self.up.weight.shape[0]:
            raise ValueError(f"width {width}: expected 1..{self.up.weight.shape[0]} neurons")
        bias = None if self.up.bias is None else self.up.bias[:width]
        inner = activate(functional.linear(x, self.up.weight[:width], bias))  # [..., m]
        return functional.linear(inner, self.down.weight[:, :width], self.down.bias)
