"""PyTorch rounding as a precision does: what an export in it may differ by is measured so.

Float16 or bfloat16 after every operation, or in weights alone; integers of 8 bits in products, weights of 4 bits in
blocks of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..profiles.precision import Precision

_BLOCK = 128
_HALF_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# By name the place of what is given to a product; its weight follows.
_PRODUCTS = {"addmm": 1, "mm": 0, "bmm": 0, "baddbmm": 1, "convolution": 0, "linear": 0}


@contextmanager
def simulated(precision: Precision) -> Iterator[None]:
    """Passes inside round as ``precision`` does."""
    with _Simulated(precision), torch.no_grad():
        yield


class _Simulated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, precision: Precision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._half = _HALF_TYPES.get(precision)
        self._rounds = _ROUNDS.get(precision)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        at = _PRODUCTS.get(name)
        if self._half is not None:
            args = tuple(map(self._rounded, args)) if at is not None else args
            return self._rounded(func(*args, **(kwargs or {})))
        if self._rounds is not None:
            given, weight, table, left_out = self._rounds
            if at is not None and name not in left_out:
                args = (*args[:at], given(args[at]), weight(args[at + 1]), *args[at + 2 :])
            elif name == "embedding":
                args = (table(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            assert self._half is not None
            return value.to(self._half).float()
        return tuple(map(self._rounded, value)) if isinstance(value, (tuple, list)) else value


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _halves(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float16).to(weight.dtype)


def _brains(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.bfloat16).to(weight.dtype)


def _integers(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric, of 8 bits, one scale a tensor."""
    scale = weight.abs().max().clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """256 steps from the least to the most, which include 0."""
    if value.numel() == 0:
        return value
    least, most = value.min().clamp(max=0), value.max().clamp(min=0)
    scale = ((most - least) / 255).clamp(min=1e-12)
    return (value / scale).round() * scale


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """16 steps in blocks of inputs, the first dimension of ``weight`` ``[in, out]``."""
    found = weight.clone()
    for start in range(0, weight.shape[0] if weight.dim() == 2 else 0, _BLOCK):
        part = found[start : start + _BLOCK]
        scale = (part.abs().amax(0, keepdim=True) / 7.5).clamp(min=1e-12)
        found[start : start + _BLOCK] = (part / scale).round().clamp(-8, 7) * scale
    return found


_Round = Callable[[torch.Tensor], torch.Tensor]
# How what is given to a product, its weight and a table of embeddings are rounded, and the products that are not.
_ROUNDS: Mapping[str, tuple[_Round, _Round, _Round, tuple[str, ...]]] = {
    "fp16-weights": (_same, _halves, _halves, ("bmm", "baddbmm")),
    "bf16-weights": (_same, _brains, _brains, ("bmm", "baddbmm")),
    "int8": (_bytes, _integers, _integers, ()),
    "int8-dynamic": (_bytes, _integers, _integers, ("bmm",)),
    "int4": (_same, _blocks, _same, ("bmm",)),
}
