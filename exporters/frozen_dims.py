"""Where a module takes a dimension that is to stay free for a number, or does another thing at some of its sizes, found
by one pass with sizes as symbols."""

import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..bucket import Bucket
from ..bundle.entries.tensor_spec import TensorSpec
from .own_lines import own_line
from .torch_internals import ConstantSource, FakeTensorMode, enable_python_dispatcher


class _Watched(ShapeEnv):
    """``lines`` are those of the module's code at which each symbol was first taken for a number; ``branches`` are the
    conditions that it asked for by itself, each as it was answered, with its line."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.lines: dict[Any, str] = {}
        self.branches: list[tuple[Any, bool, str]] = []
        self._depth = depth

    def _set_replacement(self, a: Any, tgt: Any, msg: str) -> None:
        super()._set_replacement(a, tgt, msg)
        if tgt.is_number:
            self.lines.setdefault(a, own_line(traceback.extract_stack()[self._depth :]))

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluate_expr(orig_expr, *args, **kwargs)
        if orig_expr.free_symbols and _is_asked_by_code():
            line = own_line(traceback.extract_stack()[self._depth :])
            self.branches.append((orig_expr, bool(found), line))
        return found


def _is_asked_by_code() -> bool:
    """Whether the nearest frame outside of PyTorch asked for the truth of a size itself, not by an operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        below, frame = frame, frame.f_back
    return below.f_code.co_name == "__bool__"


def frozen_dims(
    module: torch.nn.Module, inputs: Sequence[TensorSpec], at: Bucket, free: Collection[str]
) -> Mapping[str, str]:
    """Those of the ``free`` dimensions that a pass of ``module`` at the shape ``at`` freezes, each with `` at FILE:LINE
    (CODE)``; none where that cannot be said."""
    shapes, names = _watched(module, inputs, at, free)
    said = {symbol: f"{dim} of {spec}" for symbol, (dim, spec) in names.items()}
    return {said[symbol]: line for symbol, line in shapes.lines.items() if symbol in said}


def branching_dims(
    module: torch.nn.Module, inputs: Sequence[TensorSpec], at: Bucket, bucket: Bucket
) -> Mapping[str, str]:
    """Those free dimensions of ``bucket`` on which the code of ``module`` branches, so that a pass at the shape ``at``
    is another one than at a size in between, with that size, each with its line. Not at 1, which symbols never are; at
    the ends of a range engines are compared."""
    shapes, names = _watched(module, inputs, at, bucket.free)
    found: dict[str, str] = {}
    for condition, answer, line in shapes.branches:
        dims = {names[symbol][0] for symbol in condition.free_symbols if symbol in names}
        for dim in dims if len(condition.free_symbols) == sum(s in names for s in condition.free_symbols) else ():
            for size in range(max(2, getattr(bucket.smallest, dim)), getattr(bucket.largest, dim) + 1):
                sizes = {s: size if names[s][0] == dim else getattr(at, names[s][0]) for s in condition.free_symbols}
                if bool(condition.subs(sizes)) != answer:
                    found.setdefault(f"{dim} {size}", line)
                    break
    return found


def _watched(
    module: torch.nn.Module, inputs: Sequence[TensorSpec], at: Bucket, free: Collection[str]
) -> tuple[_Watched, Mapping[Any, tuple[str, str]]]:
    """Symbols of a pass after it, and the dimension and the input of each."""
    shapes = _Watched(len(traceback.extract_stack()))
    fake, given, names = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True), [], dict[Any, tuple[str, str]]()
    with suppress(Exception):  # of any kind: what is known by then is said
        for spec in inputs:
            sizes = [DimDynamic.DYNAMIC if dim in free else DimDynamic.STATIC for dim in spec.dims]
            example = torch.ones(spec.shape(at), dtype=getattr(torch, spec.dtype))
            context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
            given.append(fake.from_tensor(example, symbolic_context=context, source=ConstantSource(spec.name)))
            symbolic: Any = zip(spec.dims, given[-1].shape, strict=True)
            names |= {size.node.expr: (dim, spec.name) for dim, size in symbolic if isinstance(size, torch.SymInt)}
        with (
            fake,
            enable_python_dispatcher(),
            torch.no_grad(),
        ):  # whose forms of operations take symbols, as an export's
            module(*given)
    return shapes, names
