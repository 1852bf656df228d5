"""Precisions that an engine may have, how wide its weights then are, and which backends run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from ..elastic import Submodel

# ``int8`` scales activations by calibration, ``int8-dynamic`` by each input; ``int4`` has weights of 4 bits where these
# are stored output by output and of 8 elsewhere, and activations as ``int8-dynamic``.
Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-dynamic", "int4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
BITS_OF: Mapping[Precision, int] = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int8-dynamic": 8, "int4": 4}
INTEGERS: frozenset[Precision] = frozenset({"int8", "int8-dynamic", "int4"})
# bfloat16 has no kernels on a CPU; integers that are scaled at run time have none in TensorRT.
RUN_BY: Mapping[str, tuple[Precision, ...]] = {
    "onnxruntime": ("fp32", "fp16", "int8", "int8-dynamic", "int4"),
    "tensorrt": ("fp32", "fp16", "bf16", "int8"),
}


def precision_of(submodel: Submodel, precisions: Sequence[Precision]) -> Precision:
    """The one of ``precisions`` that an engine of ``submodel`` has: the only one, or that of the submodel's bits."""
    if submodel.bits is None:
        return precisions[0]
    return next(precision for precision in precisions if BITS_OF[precision] == submodel.bits)


def widths_of(precisions: Sequence[Precision]) -> tuple[int, ...]:
    """The choices of the axis ``bits``: none where there is nothing to choose."""
    return tuple(sorted(BITS_OF[precision] for precision in precisions)) if len(precisions) > 1 else ()


def precision_problem(precisions: Sequence[Precision], backend: str) -> str | None:
    """Why engines of ``backend`` cannot have these precisions, or None."""
    if not precisions:
        return "expected at least one"
    for precision in precisions:
        if precision not in RUN_BY[backend]:
            return f"{precision} does not run on {backend}; expected some of {', '.join(RUN_BY[backend])}"
    widths = [BITS_OF[precision] for precision in precisions]
    if len(set(widths)) < len(widths):
        twice = next(width for width in widths if widths.count(width) > 1)
        same = [precision for precision in precisions if BITS_OF[precision] == twice]
        if len(set(same)) == 1:
            return f"{same[0]} is named twice; expected one precision of each width"
        return f"{' and '.join(dict.fromkeys(same))} both have {twice} bits; expected one precision of each width"
    return None
