"""A linear layer with a pair of low-rank matrices beside it, and the layer with the pair merged into its weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import CheckpointError
from .layers import on_same_weights


class LowRankLinear(torch.nn.Linear):
    """``x W^T + b + (x A^T) B^T`` (LoRA, arXiv 2106.09685, section 4.1): ``A`` [r, in], ``B`` [out, r] with the scale.

    Both are 0 until a task brings its own, which is the layer as it was, to the bit.
    """

    def __init__(self, linear: torch.nn.Linear, rank: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = torch.nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, linear.out_features, bias=False)
        for pair in (self.lora_A, self.lora_B):
            torch.nn.init.zeros_(pair.weight)
            pair.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in] to [..., out]."""
        added: torch.Tensor = self.lora_B(self.lora_A(x))
        return super().forward(x) + added


def with_pairs(module: torch.nn.Module, ranks: Mapping[str, int], where: str) -> torch.nn.Module:
    """``module``, changed in place: a pair of the rank in ``ranks`` beside each linear layer named there.

    Raises CheckpointError for a layer that is no plain linear one; ``where`` begins the message.
    """
    for name, rank in ranks.items():
        linear = module.get_submodule(name)
        if type(linear) is not torch.nn.Linear:
            raise CheckpointError(
                f"{where}: {name} is a {type(linear).__name__}, and LoRA is read beside plain linear layers"
            )
        _replace(module, name, LowRankLinear(linear, rank))
    return module


class MergedLinear(torch.nn.Module):
    """``x (W + B A)^T + b``, summed in float64 where it is used: a merged weight does not outlive the product."""

    def __init__(self, pair: LowRankLinear) -> None:
        super().__init__()
        self.weight, self.bias, self.lora_A, self.lora_B = pair.weight, pair.bias, pair.lora_A, pair.lora_B

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in] to [..., out]."""
        change = self.lora_B.weight.double() @ self.lora_A.weight.double()
        weight = (self.weight.double() + change).to(self.weight.dtype)
        return torch.nn.functional.linear(x, weight, self.bias)


def merged(module: torch.nn.Module) -> torch.nn.Module:
    """A copy, on the same memory, that has every pair merged into its weight."""
    found = on_same_weights(module)
    for name, part in list(found.named_modules()):
        if isinstance(part, LowRankLinear):
            _replace(found, name, MergedLinear(part))
    return found


def _replace(module: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)
