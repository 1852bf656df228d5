"""Cost of a submodel on a device before it exists: a roofline over its operations.

Per operation: the longer of computing (FLOPs at the rate of its kind) and moving its bytes, plus a fixed overhead.
``Cost.predicted_ms`` is that sum, from the profile's figures alone. Where a few rungs were measured, a ``Correction``
gives ``corrected_ms``; nothing here is itself a measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ...profiles.backends import BACKENDS
from ...profiles.device_profile import DeviceProfile, Rates
from ...profiles.precision import FP32, HALF_ENCODINGS, PRECISIONS, WEIGHT_BITS, Encoding, Precision
from ...workload import Op

# ONNX Runtime's arena grows by doubling and is kept: measured 5.4 to 7.8 times the operands of the largest product
# (6 layers of 384 at 1x128, 8x512 and 32x128). TensorRT needs less.
_ARENA_FACTOR = 8
# How strongly each factor of a correction holds to their common scale, against a weight of 1 for every measured rung.
# Along the ladder of a 6-layer (384) and a 12-layer (768) encoder anything from 0.03 to 0.3 predicts alike; towards 0
# the noise of a busy host decides, and submodels off the ladder suffer.
_PRIOR_WEIGHT = 0.2
# Shares of float32's bytes: a half-precision weight is read, written as float32 and read again.
_WIDENED_HALF_SHARE = 2.5
_HALF_SHARE = 0.5


@dataclass(frozen=True)
class Cost:
    """One forward pass of one submodel at one bucket.

    ``moved_bytes``: weights read once, activations read and written. ``activation_bytes``: what
    the backend holds for activations, a cautious estimate.
    """

    flops: int
    moved_bytes: int
    activation_bytes: int
    gemm_ms: float
    other_ms: float
    overhead_ms: float

    @property
    def predicted_ms(self) -> float:
        """Latency by the roofline alone, in milliseconds."""
        return self.gemm_ms + self.other_ms + self.overhead_ms


@dataclass(frozen=True)
class Correction:
    """Factors on the parts of a predicted latency, fitted to ``rungs`` measured at the same bucket."""

    gemm: float
    other: float
    overhead: float
    rungs: int

    def corrected_ms(self, cost: Cost) -> float:
        """Predicted latency of ``cost`` after correction, in milliseconds."""
        return self.gemm * cost.gemm_ms + self.other * cost.other_ms + self.overhead * cost.overhead_ms


def predict(ops: Sequence[Op], profile: DeviceProfile, precision: Precision = "fp32") -> Cost:
    """Cost of running ``ops``, which are counted in float32, one after the other on the device of ``profile``."""
    ops = [_in_precision(op, precision, BACKENDS[profile.backend].widens_half) for op in ops]
    gemm_ms = sum(_milliseconds(op, profile.rates, precision) for op in ops if op.kind == "gemm")
    other_ms = sum(_milliseconds(op, profile.rates, precision) for op in ops if op.kind != "gemm")
    products = [op.activation_bytes for op in ops if op.kind in ("gemm", "batched_gemm")]
    return Cost(
        flops=sum(op.flops for op in ops),
        moved_bytes=sum(op.weight_bytes + op.activation_bytes for op in ops),
        activation_bytes=_ARENA_FACTOR * max(products, default=0),
        gemm_ms=gemm_ms,
        other_ms=other_ms,
        overhead_ms=len(ops) * profile.rates.op_overhead_us / 1e3,
    )


def predict_memory_bytes(held_bytes: int, costs: Sequence[Cost]) -> int:
    """Memory of a submodel's engine: the weights that it holds, and the activations of the most demanding of its
    buckets."""
    return held_bytes + max((cost.activation_bytes for cost in costs), default=0)


def fit_correction(costs: Sequence[Cost], measured_ms: Sequence[float]) -> Correction:
    """Fits factors to rungs measured at one bucket; one is enough, and each further one tells the parts apart better.

    Least squares of the relative error with factors of at least zero, held near their common scale: along the ladder
    the parts grow together, so a few rungs alone do not determine three factors.
    Raises ValueError unless there are as many measurements as costs, at least one, all positive.
    """
    if len(costs) != len(measured_ms) or not costs or min(measured_ms) <= 0:
        raise ValueError(f"expected one positive measurement per cost, got {len(costs)} costs and {list(measured_ms)}")
    parts = np.array([[cost.gemm_ms, cost.other_ms, cost.overhead_ms] for cost in costs])
    scale = float(np.median(np.asarray(measured_ms) / parts.sum(axis=1)))
    relative = scale * parts / np.asarray(measured_ms)[:, None]  # (rungs, 3), rows near 1 in sum
    matrix = np.vstack([relative, _PRIOR_WEIGHT * np.eye(3)])
    target = np.concatenate([np.ones(len(costs)), np.full(3, _PRIOR_WEIGHT)])
    gemm, other, overhead = (scale * float(factor) for factor in _nonnegative_least_squares(matrix, target))
    return Correction(gemm, other, overhead, len(costs))


def _in_precision(op: Op, precision: Precision, on_cpu: bool) -> Op:
    """``op`` with the bytes that it moves: weights as they are stored, and activations, in half precision or
    float32. A processor widens half-precision numbers first and narrows them again."""
    spec, half = PRECISIONS[precision], _WIDENED_HALF_SHARE if on_cpu else _HALF_SHARE
    stored: Encoding = spec.reads(is_small=op.kind not in ("gemm", "gather"), is_table=op.kind == "gather")
    weights = half if stored in HALF_ENCODINGS else WEIGHT_BITS[stored] / WEIGHT_BITS[FP32]
    activations = half if spec.arithmetic == "half" else 1
    moved = int(weights * op.weight_bytes), int(activations * op.activation_bytes)
    return replace(op, weight_bytes=moved[0], activation_bytes=moved[1])


def _milliseconds(op: Op, rates: Rates, precision: Precision) -> float:
    """Roofline time of ``op``, whose bytes are those of ``precision``, without its fixed overhead."""
    weights_s = op.weight_bytes / (rates.bandwidth_gb_s * 1e9)
    activations_s = op.activation_bytes / (rates.elementwise_gb_s * 1e9)
    products = (rates.at or {}).get(precision, rates)
    gflops = {"gemm": products.gemm_gflops, "batched_gemm": products.batched_gemm_gflops}.get(op.kind)
    compute_s = op.flops / (gflops * 1e9) if gflops else 0.0
    return 1e3 * max(compute_s, weights_s + activations_s)


def _nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The exact solution: with three unknowns every set of them that stays above zero can be tried."""
    best, best_error = np.zeros(matrix.shape[1]), float(target @ target)
    for size in range(1, matrix.shape[1] + 1):
        for free in combinations(range(matrix.shape[1]), size):
            part = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            error = float(np.sum((matrix[:, free] @ part - target) ** 2))
            if part.min() >= 0 and error < best_error:
                best, best_error = np.zeros(matrix.shape[1]), error
                best[list(free)] = part
    return best
