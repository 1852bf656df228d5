"""Device profiles: what a target offers and its budgets, read strictly from plain data and written back to it."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..bucket import Bucket
from ..errors import ProfileError
from ..strict import structure, unstructure
from .backends import BACKENDS, BackendName
from .budget import BudgetSpec, check_budget, require_positive
from .precision import PRECISIONS, Precision, precision_problem

# 1: first published schema.
SCHEMA_VERSION = 1
# On which GPUs a plan runs: on the model that built it; on any of its compute capability; on any from Ampere on.
HardwareCompatibility = Literal["none", "same_compute_capability", "ampere_plus"]


@dataclass(frozen=True)
class TensorRTOptions:
    """Options of the builder.

    ``workspace_mb`` (10^6 bytes) bounds what one layer may use beside its tensors; None leaves the whole device to it.
    ``optimization_level`` trades build time for speed, from 0 to 5. ``tf32``: products of float32 may drop mantissa
    bits to run on tensor cores, beyond what the parity tolerance of fp32 allows. ``strip_weights``: plans hold no
    weights, they take them from the weight store when they are opened. ``version_compatible``: plans also run on later
    releases of TensorRT, at some cost in speed. A build that takes longer than ``time_limit_s`` is stopped.
    """

    workspace_mb: int | None = field(default=None, metadata={"min": 1})
    optimization_level: Literal[0, 1, 2, 3, 4, 5] = 3
    tf32: bool = False
    strip_weights: bool = True
    version_compatible: bool = False
    hardware_compatibility: HardwareCompatibility = "none"
    time_limit_s: float | None = field(default=None, metadata={"min": 1})

    @property
    def key(self) -> dict[str, Any]:
        """Settings that a plan follows from, as plain data: everything but how long its build may take."""
        return unstructure(replace(self, time_limit_s=None))


# Which layers a rung of the promotion ladder promotes first; compiler/planning/levels.py defines them.
PromotionOrder = Literal["increasing", "decreasing", "up-down", "down-up"]
# Capacities of caches, where a profile states none.
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
    takes the highest one that it can afford at the largest submodel that it can afford.
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
    backend: BackendName
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
        if not BACKENDS[self.backend].fixed_caches:
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


def read_profile(data: object, where: str) -> DeviceProfile:
    """Reads a profile from plain data (what YAML holds: buckets as ``1x128``); ``where`` names the document.

    Raises ProfileError for an unknown or missing key, a wrong type, or a figure that no device can have.
    """
    if isinstance(data, Mapping):
        if data.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise ProfileError(f"{where}: schema_version {data['schema_version']!r}, expected {SCHEMA_VERSION}")
        data = {**data, "buckets": _read_buckets(data["buckets"], where)} if "buckets" in data else data
        if data.get("budget_at") is not None:
            data = {**data, "budget_at": _read_shape(data["budget_at"], f"{where}: budget_at")}
        data = _with_precisions(data, where)
    profile = structure(DeviceProfile, data, where, ProfileError)
    _check(profile, where)
    return profile


def profile_data(profile: DeviceProfile) -> dict[str, Any]:
    """The plain data that ``read_profile`` reads back as an equal profile, as YAML files have it."""
    data = unstructure(profile)
    precisions = data.pop("precisions")
    data["precision"] = precisions[0] if len(precisions) == 1 else precisions
    if profile.budget_at is not None:
        data["budget_at"] = str(profile.budget_at)
    return {**data, "buckets": [str(bucket) for bucket in profile.buckets]}


def profile_precisions(data: Mapping[str, Any]) -> tuple[Precision, ...]:
    """The precisions in ``profile_data``."""
    given = data.get("precision", "fp32")
    names = [given] if isinstance(given, str) else given
    return tuple(precision for name in names for precision in PRECISIONS if precision == name)


def _read_buckets(texts: object, where: str) -> object:
    if not isinstance(texts, (list, tuple)) or not texts:
        raise ProfileError(f"{where}: buckets: expected a list such as [1x32, 1x128], got {texts!r}")
    try:
        buckets = [Bucket.parse(str(text)) for text in texts]
    except ValueError as failure:
        raise ProfileError(f"{where}: buckets: {failure}") from None
    if len(set(buckets)) != len(buckets):
        raise ProfileError(f"{where}: buckets: one stands twice in {', '.join(map(str, texts))}")
    return [unstructure(bucket) for bucket in buckets]


def _read_shape(text: object, where: str) -> object:
    """One static shape such as ``1x128``."""
    try:
        shape = Bucket.parse(str(text))
    except ValueError as failure:
        raise ProfileError(f"{where}: {failure}") from None
    if not shape.is_static:
        raise ProfileError(f"{where}: expected one shape, such as {shape.largest}, got the range {shape}")
    return unstructure(shape)


def _with_precisions(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``data`` with the field that a profile's ``precision``, a name or a list of them, is read into."""
    if "precisions" in data:
        raise ProfileError(f"{where}: unknown key 'precisions'; did you mean 'precision'?")
    if "precision" not in data:
        return data
    given = data["precision"]
    names = list(given) if isinstance(given, (list, tuple)) else [given]
    for name in names:
        if name not in PRECISIONS:
            raise ProfileError(f"{where}: precision: got {name!r:.80}; expected one of {', '.join(PRECISIONS)}")
    return {**{key: value for key, value in data.items() if key != "precision"}, "precisions": names}


def _check(profile: DeviceProfile, where: str) -> None:
    if not profile.name:
        raise ProfileError(f"{where}: name: expected text, got an empty one")
    if not profile.budgets:
        raise ProfileError(f"{where}: budgets: expected at least one; full: {{}} asks for the universal model")
    require_positive(f"{where}: memory_mb", profile.memory_mb)
    for rate in dataclasses.fields(Rates):
        value = getattr(profile.rates, rate.name)
        if isinstance(value, float) and rate.name != "op_overhead_us":
            require_positive(f"{where}: rates: {rate.name}", value)
    if problem := precision_problem(profile.precisions, profile.backend):
        raise ProfileError(f"{where}: precision: {problem}")
    for precision, products in (profile.rates.at or {}).items():
        if precision not in PRECISIONS:
            raise ProfileError(f"{where}: rates: at: got {precision!r:.80}; expected one of {', '.join(PRECISIONS)}")
        require_positive(f"{where}: rates: at.{precision}: gemm_gflops", products.gemm_gflops)
        require_positive(f"{where}: rates: at.{precision}: batched_gemm_gflops", products.batched_gemm_gflops)
    if profile.tensorrt is not None and BACKENDS[profile.backend].runs_graphs:
        raise ProfileError(f"{where}: tensorrt: only for backend tensorrt, this profile's is {profile.backend}")
    capacities = profile.capacities
    if capacities is not None and not BACKENDS[profile.backend].fixed_caches:
        raise ProfileError(f"{where}: capacities: only for backend tensorrt, this profile's is {profile.backend}")
    if capacities is not None and (not capacities or min(capacities) < 2 or len(set(capacities)) != len(capacities)):
        raise ProfileError(
            f"{where}: capacities: expected numbers of tokens, each once and 2 or above, got {capacities}"
        )
    if profile.host is not None and not BACKENDS[profile.backend].runs_graphs:
        raise ProfileError(f"{where}: host: a compile measures on the processor alone, backend is {profile.backend}")
    for name, budget in profile.budgets.items():
        check_budget(budget, f"{where}: budgets.{name}")
