"""The registry of precisions, one entry each, the highest first, and the encodings in which their weights are stored.

An encoding is the suffix of a stored tensor's name; the empty one is float32. Its bytes are specified in
compiler/graph/encodings.py. How a graph gets a precision is a table of its own, since that needs onnx
(compiler/graph/precision/derive.py).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Literal

from ..elastic import Submodel

Precision = Literal["fp32", "fp16-weights", "fp16", "bf16-weights", "bf16", "int8-dynamic", "int8", "int4", "int4-g128"]
Encoding = Literal[
    "",
    ".fp16",
    ".bf16",
    ".int8",
    ".int8-scale",
    ".int8-zero",
    ".int4",
    ".int4-scale",
    ".int4-g128",
    ".int4-g128-scale",
]
FP32: Encoding = ""
FP16: Encoding = ".fp16"
BF16: Encoding = ".bf16"
INT8: Encoding = ".int8"  # symmetric: -63..63, zero point 0
INT8_SCALE: Encoding = ".int8-scale"  # float32
INT8_ZERO: Encoding = ".int8-zero"  # int8: the zero points, all 0, as many as scales, which kernels want beside them
INT4: Encoding = ".int4"  # [out, blocks, 16] uint8: 32 inputs a block, the even ones in the low halves, 8 for 0
INT4_SCALE: Encoding = ".int4-scale"  # [out, blocks] float32
INT4_G128: Encoding = ".int4-g128"  # [out, blocks, 64] uint8: the same in blocks of 128 inputs
INT4_G128_SCALE: Encoding = ".int4-g128-scale"  # [out, blocks] float32
ENCODINGS = (FP16, BF16, INT8, INT8_SCALE, INT8_ZERO, INT4, INT4_SCALE, INT4_G128, INT4_G128_SCALE)
HALF_ENCODINGS = frozenset({FP16, BF16})
# Bits of a weight in the encodings that hold weights; the others are of their scales.
WEIGHT_BITS: Mapping[Encoding, int] = MappingProxyType({FP32: 32, FP16: 16, BF16: 16, INT8: 8, INT4: 4, INT4_G128: 4})
# Read beside weights that are integers.
SCALES: Mapping[Encoding, tuple[Encoding, ...]] = MappingProxyType(
    {INT8: (INT8_SCALE,), INT4: (INT4_SCALE,), INT4_G128: (INT4_G128_SCALE,)}
)
# Inputs of a block, which share a scale, in encodings of 4 bits and of their scales.
BLOCK_INPUTS: Mapping[Encoding, int] = MappingProxyType(
    {INT4: 32, INT4_SCALE: 32, INT4_G128: 128, INT4_G128_SCALE: 128}
)
FOUR_BITS = tuple(encoding for encoding, bits in WEIGHT_BITS.items() if bits == 4)
# Below these a product has no work that smaller numbers would save, and stays in float32; so does a table.
LEAST_INPUTS = 32
LEAST_OUTPUTS = 16


Calibration = Literal["scales", "range", "weights"]


@dataclass(frozen=True)
class LayerTolerance:
    """Largest difference of an engine for each layer of its depth (``min_cosine``: in all), by the rule in
    compiler/parity/compare.py."""

    atol: float
    rtol: float
    min_cosine: float
    rms: float


@dataclass(frozen=True)
class PrecisionSpec:
    """One precision that engines may have.

    Weights of products are stored in ``encoding``, those whose inputs shrink, and the outermost ones
    (exporters/depth.py), in ``wider``, tables in ``tables`` (None: as the others), and what is too small for a
    product to gain by it in ``small``. ``backends`` run it.
    ``arithmetic`` is the type that it computes in: of ``integer`` the products alone, whose activations are rounded by
    a scale.
    ``calibration`` is what must be known of the values before a graph can have it: ``scales`` of the products' inputs,
    found on examples, or that none leaves the ``range`` of the type; or the ``weights`` themselves are chosen on
    examples, since they answer badly without. ``is_emulated``: ONNX Runtime does not compute
    with it, so that a float32 emulation proves engines that it stands in for. ``is_always_packed``: on a processor its
    kernels compute something else, and slowly, from weights that are mapped. ``rated_by`` are the two products that
    measure its rate on a host (measure_rates.py), None where they are those of fp32.
    """

    encoding: Encoding
    backends: tuple[str, ...]
    arithmetic: Literal["float32", "half", "integer"]
    tolerance: LayerTolerance
    wider: Encoding | None = None
    tables: Encoding | None = None
    small: Encoding = FP32
    calibration: Calibration | None = None
    is_emulated: bool = False
    is_always_packed: bool = False
    rated_by: tuple[str, str] | None = None

    @property
    def is_integer(self) -> bool:
        """Whether products are integer products."""
        return self.arithmetic == "integer"

    @property
    def has_exact_form(self) -> bool:
        """Whether engines, with products in float32, compute what PyTorch does with the numbers that are stored."""
        return self.encoding != FP32 and self.arithmetic != "half"

    def reads(self, *, is_small: bool = False, is_table: bool = False, is_wider: bool = False) -> Encoding:
        """The encoding in which engines read a weight."""
        if is_small:
            return self.small
        return ((self.tables if is_table else None) or (self.wider if is_wider else None)) or self.encoding


# docs/precision.md shows what the tolerances were measured by. Integers are held to the angle: where activations have
# outliers, single elements are off by several times what is usual in a layer. Precisions below fp32 round everywhere,
# so that their rms limit is no other than what holds of each element. The order is that of the answers: an entry keeps
# more of them than those behind it, and a budget takes the first that it affords.
PRECISIONS: Mapping[Precision, PrecisionSpec] = MappingProxyType(
    {
        "fp32": PrecisionSpec(
            encoding=FP32,
            backends=("onnxruntime", "tensorrt", "openvino"),
            arithmetic="float32",
            tolerance=LayerTolerance(atol=4e-6, rtol=1e-5, min_cosine=1 - 1e-6, rms=4e-7),
        ),
        # Weights are widened where they are read.
        "fp16-weights": PrecisionSpec(
            encoding=FP16,
            backends=("onnxruntime", "openvino"),
            arithmetic="float32",
            tolerance=LayerTolerance(atol=5e-3, rtol=1e-3, min_cosine=1 - 1e-5, rms=6e-3),
            calibration="range",
        ),
        "fp16": PrecisionSpec(
            encoding=FP16,
            small=FP16,
            backends=("onnxruntime", "tensorrt"),
            arithmetic="half",
            tolerance=LayerTolerance(atol=1e-2, rtol=1e-3, min_cosine=1 - 1e-4, rms=1.1e-2),
            calibration="range",
        ),
        # For a checkpoint in bfloat16 these are its very numbers. 8 bits in place of 11: eight times float16's limits.
        "bf16-weights": PrecisionSpec(
            encoding=BF16,
            backends=("onnxruntime",),
            arithmetic="float32",
            tolerance=LayerTolerance(atol=4e-2, rtol=8e-3, min_cosine=1 - 6.4e-4, rms=4.8e-2),
        ),
        "bf16": PrecisionSpec(
            encoding=BF16,
            small=BF16,
            backends=("tensorrt", "openvino"),
            arithmetic="half",
            tolerance=LayerTolerance(atol=2e-1, rtol=8e-3, min_cosine=1 - 2e-3, rms=2.08e-1),
            is_emulated=True,
        ),
        # Activations are scaled by each input, by operators that TensorRT does not have.
        "int8-dynamic": PrecisionSpec(
            encoding=INT8,
            backends=("onnxruntime",),
            arithmetic="integer",
            tolerance=LayerTolerance(atol=1.0, rtol=0.1, min_cosine=0.85, rms=1.1),
            rated_by=("QGemmOfRows", "QGemmOfRows"),
        ),
        # Activations are scaled by calibration, and clipped where a text has larger ones than its examples: single
        # elements of all-MiniLM-L6-v2 on random tokens are off by 1.6 times the size of their position per layer.
        "int8": PrecisionSpec(
            encoding=INT8,
            backends=("onnxruntime", "tensorrt"),
            arithmetic="integer",
            tolerance=LayerTolerance(atol=3.0, rtol=0.1, min_cosine=0.85, rms=1.1),
            calibration="scales",
            rated_by=("QGemm", "QGemm"),
        ),
        # Weights of 4 bits where these are stored output by output, and of 8 elsewhere and of the outermost products;
        # activations as int8-dynamic.
        "int4": PrecisionSpec(
            encoding=INT4,
            wider=INT8,
            tables=INT8,
            backends=("onnxruntime",),
            arithmetic="integer",
            tolerance=LayerTolerance(atol=1.0, rtol=0.1, min_cosine=0.85, rms=1.1),
            is_always_packed=True,
            rated_by=("MatMulNBits", "QGemmOfRows"),
        ),
        # A scale for every 128 inputs: 4.25 bits a weight in place of 5, and kernels that are some 1.4 times as fast.
        "int4-g128": PrecisionSpec(
            encoding=INT4_G128,
            wider=INT8,
            tables=INT8,
            backends=("onnxruntime",),
            arithmetic="integer",
            tolerance=LayerTolerance(atol=1.0, rtol=0.1, min_cosine=0.85, rms=1.1),
            calibration="weights",
            is_always_packed=True,
            rated_by=("MatMulNBits128", "QGemmOfRows"),
        ),
    }
)
# The precision that models are traced in; templates of the others are derived from it, and what they cost is measured
# against it.
TRACED: Precision = "fp32"


def run_by(backend: str) -> tuple[Precision, ...]:
    """The precisions that ``backend`` runs."""
    return tuple(precision for precision, spec in PRECISIONS.items() if backend in spec.backends)


def rank(precision: Precision) -> int:
    """Its place among all precisions, 0 for the highest."""
    return tuple(PRECISIONS).index(precision)


def highest_first(precisions: Collection[Precision]) -> tuple[Precision, ...]:
    """``precisions`` in the order of the registry."""
    return tuple(sorted(precisions, key=rank))


def precision_of(submodel: Submodel, precisions: Sequence[Precision]) -> Precision:
    """The one of ``precisions`` that engines of ``submodel`` have: the one it names, else the highest."""
    return next(one for one in highest_first(precisions) if submodel.precision in (None, one))


def in_precision(submodel: Submodel, precision: Precision, precisions: Sequence[Precision]) -> Submodel:
    """``submodel`` in one of ``precisions``: the inverse of ``precision_of``."""
    return replace(submodel, precision=None if precision == highest_first(precisions)[0] else precision)


def precision_problem(precisions: Sequence[Precision], backend: str) -> str | None:
    """Why engines of ``backend`` cannot have these precisions, or None."""
    if not precisions:
        return "expected at least one"
    for precision in precisions:
        if backend not in PRECISIONS[precision].backends:
            return f"{precision} does not run on {backend}; expected some of {', '.join(run_by(backend))}"
        if precisions.count(precision) > 1:
            return f"{precision} is named twice"
    return None


def encoded_shape(shape: Sequence[int], encoding: Encoding) -> tuple[int, ...]:
    """Extents of the encoded tensor of a weight ``[..., out, in]``; of a transposed one, which is stored as
    ``[in, out]``, those before it is transposed."""
    match encoding:
        case ".int8-scale" | ".int8-zero":
            return tuple(shape[:-1])
        case ".int4" | ".int4-g128":
            return (*shape[:-1], -(-shape[-1] // BLOCK_INPUTS[encoding]), BLOCK_INPUTS[encoding] // 2)
        case ".int4-scale" | ".int4-g128-scale":
            return (*shape[:-1], -(-shape[-1] // BLOCK_INPUTS[encoding]))
        case _:
            return tuple(shape)


def encoded_bytes(shape: Sequence[int], encoding: Encoding) -> int:
    """Bytes of the encoded tensor of a weight ``[..., out, in]``."""
    return prod(encoded_shape(shape, encoding)) * _ITEM_BYTES[encoding]


_ITEM_BYTES: dict[Encoding, int] = {
    FP32: 4,
    FP16: 2,
    BF16: 2,
    INT8: 1,
    INT8_SCALE: 4,
    INT8_ZERO: 1,
    INT4: 1,
    INT4_SCALE: 4,
    INT4_G128: 1,
    INT4_G128_SCALE: 4,
}
