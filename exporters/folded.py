"""Tensors that some variants read in place of parameters: made of them once, when the weight store is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plans are made without torch
    import torch


@dataclass(frozen=True, eq=False)
class Folded:
    """``shapes`` of every such tensor of the universal model by name; ``ElasticSpec.folded`` says how they shrink.

    ``make(module, name)`` makes one of the parameters of ``module``, what ``Architecture.load`` returned, in the order
    that these have now. A slice of it must be, to the bit, what is made of the slices: ``lower`` gives its module the
    same tensors, made of a narrowed module, as parameters of these names.
    """

    shapes: Mapping[str, tuple[int, ...]]
    make: Callable[[torch.nn.Module, str], torch.Tensor]
