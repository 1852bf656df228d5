"""A device profile: what a target offers, and the named budgets that submodels must meet there.

Units are part of the field names. Everywhere in nestforge 1 MB is 10^6 bytes and 1 GB/s is 10^9 bytes per second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..bucket import Bucket
from .budget import BudgetSpec
from .precision import Precision
from .tensorrt_options import TensorRTOptions

# 1: first published schema.
SCHEMA_VERSION = 1

# Which layers a rung of the promotion ladder promotes first; compiler/planning/ladder.py defines them.
PromotionOrder = Literal["increasing", "decreasing", "up-down", "down-up"]

# Of caches, where a profile states none.
_CAPACITIES = (512, 2048)


@dataclass(frozen=True)
class ProductRates:
    """Sustained rates of products in another precision than fp32; see Rates."""

    gemm_gflops: float
    batched_gemm_gflops: float


@dataclass(frozen=True)
class Rates:
    """Sustained fp32 rates of a device, the input of the roofline.

    ``gemm_gflops`` holds for products with a weight, ``batched_gemm_gflops`` for attention's products of activations;
    ``bandwidth_gb_s`` for bytes read from memory, ``elementwise_gb_s`` for bytes that elementwise operations read and
    write (higher where activations stay in a cache, lower where the arithmetic is the limit). ``op_overhead_us`` is
    paid by every operation. ``source`` says where the figures come from. ``at`` has the products' rates in other
    precisions; one that it lacks is taken to be no faster than fp32, though it moves fewer bytes. ``others_share``
    marks rates that are too low: how much of the CPUs other programs used while they were measured, 0 to 1; None where
    that was little, or is not known.
    """

    gemm_gflops: float
    batched_gemm_gflops: float
    elementwise_gb_s: float
    bandwidth_gb_s: float
    op_overhead_us: float = field(metadata={"min": 0})
    source: str | None = None
    at: Mapping[str, ProductRates] | None = None
    others_share: float | None = field(default=None, metadata={"min": 0, "max": 1})


@dataclass(frozen=True)
class DeviceProfile:
    """One target. Made by ``read_profile``, which checks what the types alone cannot.

    ``cores`` are CPU cores, or streaming multiprocessors of a GPU. ``memory_mb`` is what a set of engines may use.
    ``width_multiple``: FFN widths are rounded to it. ``levels`` maps an axis kind to its granularities as fractions.
    ``promotion_order`` says which layers are promoted first on the way from one level to the next. ``variants`` maps
    what may be computed in several equal ways, such as ``moe.combine``, to the one that engines get in place of the
    cheapest.
    ``tensorrt`` says how that backend builds its plans, None leaves it to the defaults of TensorRTOptions.
    ``precisions``, written ``precision: fp16`` or as a list, are those of engines; where there are several, a budget
    takes the widest one that it can afford at the largest submodel that it can afford.
    ``budget_at`` is the shape at which budgets limit latency and FLOPs, or None for the largest bucket's, of a range
    its fewest rows.
    ``capacities`` are the sizes, in tokens of a row, of caches of engines that generate for TensorRT, where a cache has
    one size; None leaves them to the default.
    ``host`` is the fingerprint of the machine that was probed (processor, cores, version of ONNX Runtime): a compile
    there measures engines, elsewhere it predicts.
    """

    schema_version: Literal[1]
    name: str
    description: str
    backend: Literal["onnxruntime", "tensorrt"]
    cores: int = field(metadata={"min": 1})
    memory_mb: float
    rates: Rates
    width_multiple: Literal[8, 16, 64]
    buckets: tuple[Bucket, ...]
    budgets: Mapping[str, BudgetSpec]
    precisions: tuple[Precision, ...] = ("fp32",)
    # Below 20 Gelu is not one operation; from 23 on attention becomes one that ONNX Runtime's CPU kernel refuses.
    opset: Literal[20, 21, 22] = 20
    levels: Mapping[str, tuple[float, ...]] | None = None
    promotion_order: PromotionOrder = "increasing"
    variants: Mapping[str, str] | None = None
    tensorrt: TensorRTOptions | None = None
    host: str | None = None
    budget_at: Bucket | None = None
    capacities: tuple[int, ...] | None = None

    def capacities_for(self, positions: int) -> tuple[int | None, ...]:
        """The capacities that engines which generate get for a model of so many ``positions``; None is any."""
        if self.backend == "onnxruntime":
            return (None,)
        return tuple(dict.fromkeys(min(tokens, positions) for tokens in self.capacities or _CAPACITIES))

    @property
    def budget_bucket(self) -> Bucket:
        """The bucket whose engines would answer at the shape where budgets are judged: without ``budget_at`` the one of
        most tokens, and of those the one with the longest sequence."""
        return budget_bucket_of(self.buckets, self.budget_at)

    @property
    def budget_shape(self) -> Bucket:
        """The shape at which budgets limit latency and FLOPs: the one nearest to ``budget_at`` that engines run at,
        else the fewest rows and the longest sequence of the largest bucket."""
        return budget_shape_of(self.budget_bucket, self.budget_at)


def budget_bucket_of(buckets: Collection[Bucket], budget_at: Bucket | None) -> Bucket:
    """``DeviceProfile.budget_bucket`` of these ``buckets``."""
    holding = [bucket for bucket in buckets if budget_at is not None and bucket.holds(budget_at)]
    if budget_at is None or not holding:
        return max(buckets, key=lambda bucket: (bucket.tokens, bucket.sequence))
    return min(holding, key=lambda bucket: (bucket.filled(budget_at).tokens, bucket.tokens, not bucket.is_static))


def budget_shape_of(bucket: Bucket, budget_at: Bucket | None) -> Bucket:
    """``DeviceProfile.budget_shape``, in the range of its ``bucket``."""
    if budget_at is not None:
        return bucket.nearest(budget_at)
    return Bucket(bucket.smallest.batch, bucket.sequence)
