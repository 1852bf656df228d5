"""The registry of precisions: what each is, in one entry.

How a graph gets a precision is a table of its own, since that needs onnx (compiler/graph/precision/derive.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ..elastic import Submodel
from .encodings import BF16, FP16, FP32, INT4, INT8, Encoding

Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-dynamic", "int4"]


@dataclass(frozen=True)
class LayerTolerance:
    """What an engine may differ by for each layer of its depth (``min_cosine``: in all), by the rule in
    compiler/parity/evidence/compare.py."""

    atol: float
    rtol: float
    min_cosine: float
    rms: float


@dataclass(frozen=True)
class PrecisionSpec:
    """One precision that engines may have.

    Weights are stored in ``encoding``, by ``bits``, its value on the axis of precisions; ``backends`` run it.
    ``numbers`` are what it computes with: of ``integers`` the products alone, whose activations are rounded by a scale.
    ``calibration`` is what must be known of the values before a graph can have it: ``scales`` of the products' inputs,
    found on examples, or that none leaves the ``range`` of the type. ``is_emulated``: no processor computes with it, so
    that a float32 emulation proves its engines. ``is_always_packed``: on a processor its kernels compute something
    else, and slowly, from weights that are mapped.
    """

    bits: int
    encoding: Encoding
    backends: tuple[str, ...]
    numbers: Literal["floats", "halves", "integers"]
    tolerance: LayerTolerance
    calibration: Literal["scales", "range"] | None = None
    is_emulated: bool = False
    is_always_packed: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether products are of integers."""
        return self.numbers == "integers"


# docs/precision.md shows what the tolerances were measured by. Integers are held to the angle: where activations have
# outliers, single elements are off by several times what is usual in a layer. Precisions below fp32 round everywhere,
# so that their rms limit is no other than what holds of each element.
PRECISIONS: Mapping[Precision, PrecisionSpec] = MappingProxyType(
    {
        "fp32": PrecisionSpec(
            bits=32,
            encoding=FP32,
            backends=("onnxruntime", "tensorrt"),
            numbers="floats",
            tolerance=LayerTolerance(atol=4e-6, rtol=1e-5, min_cosine=1 - 1e-6, rms=4e-7),
        ),
        "fp16": PrecisionSpec(
            bits=16,
            encoding=FP16,
            backends=("onnxruntime", "tensorrt"),
            numbers="halves",
            tolerance=LayerTolerance(atol=1e-2, rtol=1e-3, min_cosine=1 - 1e-4, rms=1.1e-2),
            calibration="range",
        ),
        "bf16": PrecisionSpec(
            bits=16,
            encoding=BF16,
            backends=("tensorrt",),
            numbers="halves",
            tolerance=LayerTolerance(atol=2e-1, rtol=8e-3, min_cosine=1 - 2e-3, rms=2.08e-1),
            is_emulated=True,
        ),
        # Activations are scaled by calibration.
        "int8": PrecisionSpec(
            bits=8,
            encoding=INT8,
            backends=("onnxruntime", "tensorrt"),
            numbers="integers",
            tolerance=LayerTolerance(atol=1.0, rtol=0.1, min_cosine=0.85, rms=1.1),
            calibration="scales",
        ),
        # Activations are scaled by each input, by operators that TensorRT does not have.
        "int8-dynamic": PrecisionSpec(
            bits=8,
            encoding=INT8,
            backends=("onnxruntime",),
            numbers="integers",
            tolerance=LayerTolerance(atol=1.0, rtol=0.1, min_cosine=0.85, rms=1.1),
        ),
        # Weights of 4 bits where these are stored output by output and of 8 elsewhere; activations as int8-dynamic.
        "int4": PrecisionSpec(
            bits=4,
            encoding=INT4,
            backends=("onnxruntime",),
            numbers="integers",
            tolerance=LayerTolerance(atol=2.0, rtol=0.2, min_cosine=0.75, rms=2.2),
            is_always_packed=True,
        ),
    }
)
# What models are traced in; templates of the others are derived from it, and what they cost is measured against it.
TRACED: Precision = "fp32"


def run_by(backend: str) -> tuple[Precision, ...]:
    """The precisions that ``backend`` runs."""
    return tuple(precision for precision, spec in PRECISIONS.items() if backend in spec.backends)


def precision_of(submodel: Submodel, precisions: Sequence[Precision]) -> Precision:
    """The one of ``precisions`` that an engine of ``submodel`` has: the only one, or that of the submodel's bits."""
    if submodel.bits is None:
        return precisions[0]
    return next(precision for precision in precisions if PRECISIONS[precision].bits == submodel.bits)


def widths_of(precisions: Sequence[Precision]) -> tuple[int, ...]:
    """The choices of the axis ``bits``: none where there is nothing to choose."""
    return tuple(sorted(PRECISIONS[precision].bits for precision in precisions)) if len(precisions) > 1 else ()


def precision_problem(precisions: Sequence[Precision], backend: str) -> str | None:
    """Why engines of ``backend`` cannot have these precisions, or None."""
    if not precisions:
        return "expected at least one"
    for precision in precisions:
        if backend not in PRECISIONS[precision].backends:
            return f"{precision} does not run on {backend}; expected some of {', '.join(run_by(backend))}"
    widths = [PRECISIONS[precision].bits for precision in precisions]
    if len(set(widths)) < len(widths):
        twice = next(width for width in widths if widths.count(width) > 1)
        same = [precision for precision in precisions if PRECISIONS[precision].bits == twice]
        if len(set(same)) == 1:
            return f"{same[0]} is named twice; expected one precision of each width"
        return f"{' and '.join(dict.fromkeys(same))} both have {twice} bits; expected one precision of each width"
    return None
