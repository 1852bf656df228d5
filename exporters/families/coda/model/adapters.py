"""What a task adds to a frozen layer: a small FFN for all tokens, or low-rank terms of queries and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from ..architecture.config import CodaConfig

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class Adapter(torch.nn.Module):
    """A small FFN for all tokens, beside a layer or behind it: ``scale * up(activation(down(x)))``."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.adapter_size
        assert config.adapter_activation is not None
        self.activation, self.scale = ACTIVATIONS[config.adapter_activation], config.adapter_scale
        self.down = torch.nn.Linear(hidden, width, config.adapter_bias)
        self.up = torch.nn.Linear(width, hidden, config.adapter_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, n, d] to [B, n, d]."""
        updated: torch.Tensor = self.up(self.activation(self.down(x)))
        return updated if self.scale == 1 else updated * self.scale


class LowRankTerm(torch.nn.Module):
    """``scale * up(down(x))``, what LoRA adds to a matrix: ``up @ down`` has the rank ``adapter_size``."""

    def __init__(self, config: CodaConfig, width: int) -> None:
        super().__init__()
        self.scale = config.adapter_scale
        self.down = torch.nn.Linear(config.hidden_size, config.adapter_size, bias=False)
        self.up = torch.nn.Linear(config.adapter_size, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., d] to [..., width]."""
        updated: torch.Tensor = self.up(self.down(x))
        return updated if self.scale == 1 else updated * self.scale


class LowRank(torch.nn.Module):
    """LoRA of attention: terms of ``query`` and ``value``, the two that its paper (arXiv 2106.09685, 4.2) adapts."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        self.query = LowRankTerm(config, config.num_attention_heads * config.head_size)
        self.value = LowRankTerm(config, config.key_value_heads * config.head_size)


def make_adapter(config: CodaConfig) -> Adapter | LowRank:
    """The adapter of one layer."""
    return LowRank(config) if config.adapter == "lora" else Adapter(config)
