"""A model in float64: what its rounding in float32 is measured against.

Models ask for float32 by name here and there (norms, softmax, rotary angles). What depends on a weight stays in float64
there; what depends on none, such as a table of rotary angles or a mixing matrix, is as much given as a weight is, and
keeps the float32 numbers that the model, and so an engine, computes with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def widened(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with float64 parameters, twice the bytes of the weights, on the same buffers. Run it ``in_float64``."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.data.double(), requires_grad=False)
    return copy.deepcopy(module, memo)


def nudged(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy of a float32 ``module`` on the same buffers: an eighth of its weights is moved by one unit in the last
    place, in the mean what rounding each of them once does."""
    generator = np.random.default_rng(seed)
    memo: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        bits = parameter.data.contiguous().numpy().view(np.int32)
        chance = np.frombuffer(generator.bytes(bits.size), np.uint8).reshape(bits.shape)
        # A float's bits count up from zero; half of a byte's values in 32 go up, half down.
        steps = (chance < 16).astype(np.int8) - ((chance >= 16) & (chance < 32))
        moved = torch.from_numpy((bits + steps * (bits << 1 != 0)).view(np.float32))  # no sign of a zero
        memo[id(parameter)] = torch.nn.Parameter(moved, requires_grad=False)
    return copy.deepcopy(module, memo)


def float64_inputs(feeds: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    """A ``widened`` module's inputs, by position."""
    given = (torch.from_numpy(np.asarray(array)) for array in feeds.values())
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in given)


@contextmanager
def in_float64() -> Iterator[None]:
    """Where a ``widened`` module runs: nothing that depends on a weight is narrowed to float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of plain numbers, such as the lowest finite one of the weights' type
    try:
        with _Wide(), torch.no_grad():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


class _Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation that takes a float64 tensor takes its float32 ones as float64, and returns no float32."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if not func._schema.is_mutable and (_has_wide(args) or _has_wide(named.values())):
            args = tuple(map(_wide, args))
            named = {name: _wide(value) for name, value in named.items()}
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        return func(*args, **named)


# An operation takes tensors and lists of them. Every one of a pass comes here: torch's walk through any structure
# would take longer than the operations of a small model.
def _has_wide(values: Iterable[Any]) -> bool:
    return any(
        value.dtype is torch.float64
        if isinstance(value, torch.Tensor)
        else isinstance(value, list | tuple) and _has_wide(value)
        for value in values
    )


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype is torch.float32 else value
    return [_wide(each) for each in value] if isinstance(value, list | tuple) else value
