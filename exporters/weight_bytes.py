"""What the weights of a submodel take: in the weight store, and in the memory of an engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..profiles.precision import (
    FP32,
    HALVES,
    INT4,
    INT4_SCALE,
    INT8,
    INT8_SCALE,
    INT8_ZERO,
    LEAST_INPUTS,
    LEAST_OUTPUTS,
    PRECISIONS,
    Encoding,
    Precision,
    encoded_bytes,
)


@dataclass(frozen=True)
class WeightBytes:
    """``stored``: what engines read of the weight store. ``held``: what an open engine keeps in memory for it, which is
    more where a processor computes with halves: it widens each to a float32 that stays beside it."""

    stored: int
    held: int

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(self.stored + other.stored, self.held + other.held)


def weight_bytes(shape: Sequence[int], encodings: Collection[Encoding], backend: str) -> WeightBytes:
    """Bytes of one weight ``[..., out, in]`` that engines of ``backend`` read in ``encodings``."""
    stored = sum(encoded_bytes(shape, encoding) for encoding in encodings)
    widened = sum(encoded_bytes(shape, FP32) for encoding in encodings if encoding in HALVES)
    return WeightBytes(stored, stored + (widened if backend == "onnxruntime" else 0))


def expected_encodings(
    precision: Precision, backend: str, shape: Sequence[int], is_table: bool, inputs_shrink: bool
) -> tuple[Encoding, ...]:
    """The encodings in which a parameter of the universal model's full ``shape`` is likely to be read.

    Which nodes of a graph stay in float32, and whether a table is a product's weight too, is known once it was traced.
    ``inputs_shrink``: the weight is stored transposed, and never in blocks.
    """
    spec = PRECISIONS[precision]
    if not spec.is_integer:
        return (spec.encoding,)
    on_cpu = backend == "onnxruntime"
    is_small = len(shape) not in (2, 3) or shape[-1] < LEAST_INPUTS or shape[-2] < LEAST_OUTPUTS
    if is_small or (is_table and not on_cpu):
        return (FP32,)
    if is_table:
        return (INT8, INT8_SCALE)
    if spec.encoding == INT4 and not inputs_shrink:
        return (INT4, INT4_SCALE)
    return (INT8, INT8_SCALE, INT8_ZERO) if on_cpu else (INT8, INT8_SCALE)
