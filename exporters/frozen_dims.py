"""Where a module takes a dimension that is to stay free for a number, found by one pass with sizes as symbols."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..bucket import Bucket
from ..bundle.entries.tensor_spec import TensorSpec
from .own_lines import own_line


class _Watched(ShapeEnv):
    """``lines`` are those of the module's code at which each symbol was first taken for a number."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.lines: dict[Any, str] = {}
        self._depth = depth

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        super()._set_replacement(a, tgt, msg)
        if tgt.is_number:
            self.lines.setdefault(a, own_line(traceback.extract_stack()[self._depth :]))


def frozen_dims(
    module: torch.nn.Module, inputs: Sequence[TensorSpec], at: Bucket, free: Collection[str]
) -> Mapping[str, str]:
    """Those of the ``free`` dimensions that a pass of ``module`` at the shape ``at`` freezes, each with `` at FILE:LINE
    (CODE)``; none where that cannot be said."""
    shapes = _Watched(len(traceback.extract_stack()))
    fake, given, names = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True), [], dict[Any, str]()
    with suppress(Exception):  # of any kind: what is known by then is said
        for spec in inputs:
            sizes = [DimDynamic.DYNAMIC if dim in free else DimDynamic.STATIC for dim in spec.dims]
            example = torch.ones(spec.shape(at), dtype=getattr(torch, spec.dtype))
            context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
            given.append(fake.from_tensor(example, symbolic_context=context, source=ConstantSource(spec.name)))
            symbolic: Any = zip(spec.dims, given[-1].shape, strict=True)
            names |= {size.node.expr: f"{dim} of {spec.name}" for dim, size in symbolic if dim in free}
        with fake, torch.no_grad():
            module(*given)
    return {names[symbol]: line for symbol, line in shapes.lines.items() if symbol in names}
