"""The modules of sentence-transformers as torch modules: pooling, linear layers and norms behind a transformer.

The formulas are those of sentence-transformers' own modules. Positions are found by products and maxima, without
gathering rows, so that every backend takes the graph. A row without any token to pool gets an embedding of zeros.
"""

from pathlib import Path

import torch
from torch.nn import functional

from ..checkpoints.own_folder import read_tensors
from .modules import SENTENCE, TOKENS, Dense, Module, Normalize, Pooling, PoolingMode, Value
from .read_modules import SentenceModules, open_module

_MIN_DIVISOR = 1e-9  # the divisor of a row without tokens


class SentenceHead(torch.nn.ModuleDict):
    """The modules in their order; keys are their places in ``modules.json``."""

    def __init__(self, read: SentenceModules) -> None:
        super().__init__({str(place): _made(module) for place, (_, module) in read.modules.items()})
        self.stated, self.width = [module for _, module in read.modules.values()], read.width

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor, pooling_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens ``[B, S, T]`` that modules make of ``hidden`` ``[B, S, H]``, and the sentence embedding ``[B, D]``
        of those where ``mask`` int64 ``[B, S]`` is 1; poolings that leave prompts out take the positions where
        ``pooling_mask`` is 1 too."""
        values: dict[Value, torch.Tensor] = {TOKENS: hidden}
        for stated, part in zip(self.stated, self.values(), strict=True):
            masks = (mask, pooling_mask) if isinstance(stated, Pooling) else ()
            values[stated.writes] = part(values[stated.reads], *masks)
        return values[TOKENS], values[SENTENCE][:, : self.width]


def load_head(folder: Path, read: SentenceModules | None) -> SentenceHead | None:
    """The modules with their weights, in eval mode and float32; None for none.

    Raises CheckpointError for values that are not finite.
    """
    if read is None:
        return None
    head = SentenceHead(read)
    for place, (path, module) in read.modules.items():
        if module.parameters:
            weights = read_tensors(open_module(folder, path), module.parameters)
            head[str(place)].load_state_dict(weights)
    return head.eval().requires_grad_(False)


class PoolingModule(torch.nn.Module):
    """Tokens ``[B, S, H]`` to one vector per mode, joined: ``[B, modes * H]``."""

    def __init__(self, stated: Pooling) -> None:
        super().__init__()
        self.modes, self.include_prompt = stated.modes, stated.include_prompt

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, pooling_mask: torch.Tensor | None) -> torch.Tensor:
        pooled = mask if self.include_prompt or pooling_mask is None else mask * pooling_mask
        return torch.cat([self._pooled(mode, tokens, mask, pooled) for mode in self.modes], dim=-1)

    def _pooled(
        self, mode: PoolingMode, tokens: torch.Tensor, mask: torch.Tensor, pooled: torch.Tensor
    ) -> torch.Tensor:
        """``[B, H]``; ``mask`` says where tokens are, ``pooled`` which of them count."""
        if mode == "max":
            lowest = torch.finfo(tokens.dtype).min
            highest = torch.where((pooled != 0).unsqueeze(-1), tokens, lowest).amax(1)
            return highest * pooled.amax(1, keepdim=True).to(tokens.dtype)
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # [S]
        if mode in ("cls", "lasttoken"):
            chosen = _first(pooled, positions) if mode == "cls" else _last(pooled, positions)
            return (tokens * chosen.unsqueeze(-1).to(tokens.dtype)).sum(1)
        weights = pooled.unsqueeze(-1).to(tokens.dtype)  # [B, S, 1]
        if mode == "weightedmean":  # the first token that is no padding weighs 1
            before = torch.where(mask != 0, positions, tokens.shape[1]).amin(1, keepdim=True)
            weights = weights * (positions + 1 - before).unsqueeze(-1).to(tokens.dtype)
        divisor = weights.sum(1).clamp(min=_MIN_DIVISOR)  # [B, 1]
        return (tokens * weights).sum(1) / (divisor.sqrt() if mode == "mean_sqrt_len_tokens" else divisor)


def _first(mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """True at the first position of each row where ``mask`` ``[B, S]`` is not 0."""
    at = torch.where(mask != 0, positions, positions.shape[0]).amin(1, keepdim=True)
    return positions == at


def _last(mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """True at the last position of each row where ``mask`` ``[B, S]`` is not 0."""
    at = torch.where(mask != 0, positions, -1).amax(1, keepdim=True)
    return positions == at


class DenseModule(torch.nn.Module):
    """A linear layer, its activation, and perhaps the input on top."""

    def __init__(self, stated: Dense) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(stated.takes, stated.gives, bias=stated.bias)
        self.activation = getattr(torch.nn, stated.activation)()
        self.adds_input = stated.residual
        self.residual = torch.nn.Linear(stated.takes, stated.gives, bias=False) if stated.projects else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.activation(self.linear(x))
        if not self.adds_input:
            return found
        return found + (x if self.residual is None else self.residual(x))


class NormalizeModule(torch.nn.Module):
    """Vectors divided by their Euclidean length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(x, dim=-1)


class LayerNormModule(torch.nn.Module):
    """Layer normalisation of the sentence embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def _made(module: Module) -> torch.nn.Module:
    if isinstance(module, Pooling):
        return PoolingModule(module)
    if isinstance(module, Dense):
        return DenseModule(module)
    return NormalizeModule() if isinstance(module, Normalize) else LayerNormModule(module.takes)
