"""An engine of a bundle, and the receipt of its proof; the exits of a model whose requests may leave early, and the
segments between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...bucket import Bucket
from ...profiles.backends import BackendName
from ...profiles.backends import EngineKind as Needed
from ...profiles.precision import Precision
from .tensor_spec import TensorSpec

# How an engine holds its weights, see residency.py.
Residency = Literal["shared", "packed", "mapped"]


@dataclass(frozen=True)
class RoutingEntry:
    """Routes that an engine chooses on the way, such as which tokens each expert took: whole numbers (int64) of
    ``shape``, returned beside its outputs where they are asked for."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParityOutput:
    """Worst figures of one output over all parity cases.

    ``float32_max_abs`` and ``float32_rms`` are what PyTorch's own float32 differs by from the reference, at most and as
    the root of the mean square; ``max_rms`` is the latter of the engine.
    """

    name: str
    max_abs: float
    max_rel: float
    min_cosine: float
    max_rms: float
    float32_max_abs: float
    float32_rms: float


@dataclass(frozen=True)
class ParityRouting:
    """One tensor of routes over all parity cases, judged by the PyTorch submodel that was made to take them.

    ``differing`` of ``made`` single choices are not PyTorch's own; ``worst_score_gap`` is by how much the worst of them
    is worse, in units of the score that decides. ``shares`` are means over the cases.
    """

    name: str
    made: int = field(metadata={"min": 0})
    differing: int = field(metadata={"min": 0})
    worst_score_gap: float = field(metadata={"min": 0})
    shares: Mapping[str, float]


@dataclass(frozen=True)
class ParityReceipt:
    """Proof that an engine equals the PyTorch submodel: the rule and its limits, the cases and the worst figures.

    With ``routing`` PyTorch took the engine's routes; their score gaps are at most ``atol``.
    """

    reference: str
    rule: str
    atol: float
    rtol: float
    min_cosine: float
    cases: tuple[str, ...]
    outputs: tuple[ParityOutput, ...]
    graph_sha256: str
    weights_sha256: str
    rms: float
    difference_to_universal: float | None = None
    routing: tuple[ParityRouting, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Whole:
    """All of a submodel. ``routing`` are the routes that it returns after its outputs, in order; ``metadata`` are
    static numbers and words that no shape of it shows, such as the slots of an expert; ``variants`` say in which of
    several equal variants it computes what. Each is None where there is nothing to say."""

    name: Literal["whole"] = "whole"
    routing: tuple[RoutingEntry, ...] | None = None
    metadata: Mapping[str, int | str] | None = None
    variants: Mapping[str, str] | None = None

    part: ClassVar[None] = None
    needs: ClassVar[None] = None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The layers between two exits: the segment ``part`` of the manifest's exits."""

    name: Literal["segment"] = "segment"
    part: str

    needs: ClassVar[Needed] = "segments"


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Reads a prompt for a decoder. ``source_heads`` and ``source_sizes`` are how many heads each layer of the decoder
    reads of it, and how many numbers each of those has, where its submodel has other ones than the model; ``routing``
    as of whole engines."""

    name: Literal["encoder"] = "encoder"
    routing: tuple[RoutingEntry, ...] | None = None
    source_heads: tuple[int, ...] | None = None
    source_sizes: tuple[int, ...] | None = None

    part: ClassVar[str] = "encoder"
    needs: ClassVar[Needed] = "generation"


@dataclass(frozen=True, kw_only=True)
class Decode:
    """A step of a decoder on a cache of keys and values. ``cache_heads`` is how many heads each layer of that has, 0 of
    one that its submodel lacks, and
    ``cache_sizes`` how many numbers each of those, where its submodel has other ones than the model; ``source_heads``
    and ``source_sizes`` say the same of what it reads of a prompt. ``capacity`` is how many tokens each row of the
    cache has room for, where caches have one size."""

    name: Literal["decode"] = "decode"
    capacity: int | None = field(default=None, metadata={"min": 2})
    cache_heads: tuple[int, ...] | None = None
    cache_sizes: tuple[int, ...] | None = None
    source_heads: tuple[int, ...] | None = None
    source_sizes: tuple[int, ...] | None = None

    part: ClassVar[str] = "cached"
    needs: ClassVar[Needed] = "generation"


# ``part`` is the part of the model that an engine of the kind is, None for all of it; ``needs`` is what a back end must
# run beside whole engines.
EngineKind = Whole | Segment | Encoder | Decode


@dataclass(frozen=True)
class EngineEntry:
    """A submodel at one bucket, or a part of it, as a file that a backend runs, with its analytic costs; its ``kind``
    says which, and what such engines alone state.

    Engines of one file are one engine: submodels that differ in depth alone share their segments. ``private_bytes`` are
    the initializers inside the file, which no other engine shares; ``weight_bytes`` is what a segment reads of the
    weight store, or a whole engine with tables there (any other reads its submodel's weights). ``activation_bytes``
    estimates what a run takes beside the weights: eight times the operands of its largest product. ``slice_problem``
    says why an engine was traced. Only an engine that is still being built has no ``parity``. ``precision`` is that of
    its products; which values it holds in others its graph says.
    """

    id: str
    submodel: str
    bucket: Bucket
    backend: BackendName
    file: str
    emitted: Literal["sliced", "traced"]
    private_bytes: int = field(metadata={"min": 0})
    flops: int = field(metadata={"min": 0})
    moved_bytes: int = field(metadata={"min": 0})
    activation_bytes: int = field(metadata={"min": 0})
    kind: EngineKind = field(default=Whole())
    slice_problem: str | None = None
    parity: ParityReceipt | None = None
    weight_bytes: int | None = field(default=None, metadata={"min": 0})
    precision: Precision = "fp32"

    @property
    def segment(self) -> str | None:
        """The part of the model that it is, None for all of it: a segment of the exits, ``encoder`` or ``cached``."""
        return self.kind.part

    @property
    def routing(self) -> tuple[RoutingEntry, ...] | None:
        return self.kind.routing if isinstance(self.kind, Whole | Encoder) else None

    @property
    def metadata(self) -> Mapping[str, int | str] | None:
        return self.kind.metadata if isinstance(self.kind, Whole) else None

    @property
    def variants(self) -> Mapping[str, str] | None:
        return self.kind.variants if isinstance(self.kind, Whole) else None

    @property
    def capacity(self) -> int | None:
        return self.kind.capacity if isinstance(self.kind, Decode) else None

    @property
    def cache_layout(self) -> tuple[tuple[int, ...] | None, ...]:
        """Key of its cache, and of its part of a prompt, among those of other engines: heads and sizes of both."""
        cache = (self.kind.cache_heads, self.kind.cache_sizes) if isinstance(self.kind, Decode) else (None, None)
        if not isinstance(self.kind, Decode | Encoder):
            return (*cache, None, None)
        return (*cache, self.kind.source_heads, self.kind.source_sizes)

    def can_continue(self, other: EngineEntry) -> bool:
        """Whether this one can read the keys and values that ``other`` wrote, or read of a prompt: they have every head
        that it reads, and each of these as many numbers."""
        heads, sizes = (tuple(zip(self.cache_layout[at::2], other.cache_layout[at::2], strict=True)) for at in (0, 1))
        return all(own == there for own, there in sizes) and all(_are_first(own, there) for own, there in heads)

    def row_flops(self, sequence: int) -> int:
        """Cost of a row of ``sequence`` steps: its share of the bucket, of a range also by its length. That counts
        attention as the longest row has it, so that a shorter one takes a little less."""
        length = self.bucket.nearest(Bucket(1, sequence)).sequence
        return self.flops * length // (self.bucket.sequence * self.bucket.batch)


def _are_first(own: tuple[int, ...] | None, there: tuple[int, ...] | None) -> bool:
    """Whether each layer has no more heads of its ``own`` than ``there`` are; None is as many as the model has."""
    if own is None or there is None:
        return there is None
    return all(few <= many for few, many in zip(own, there, strict=True))


@dataclass(frozen=True)
class SegmentEntry:
    """The layers between two exits, compiled as engines of their own; ``layer`` counts the layers that have run when
    its exit answers. A segment but the first takes the state that the one before returned."""

    name: str
    layer: int = field(metadata={"min": 1})
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class GateEntry:
    """When a row leaves early: ``entropy compare threshold``, in nats; a threshold for every exit but the last, which
    always answers. A negative one closes its exit."""

    compare: Literal["<", "<="]
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class ExitsEntry:
    """The exits of a multi-exit model and the segments between them, in order; ``gate`` is the model's own, if any.

    Every segment returns ``logits`` ``[B, classes]`` and ``entropy`` ``[B]`` (nats) of its exit, and all but the last
    the state ``state_out`` ``[B, S, H]`` that the next takes as ``state_in``. ``mask`` is the input that says which
    positions count. ``trims``: whether positions behind the longest row may be cut without changing an answer.
    """

    segments: tuple[SegmentEntry, ...]
    classes: int = field(metadata={"min": 2})
    logits: str
    entropy: str
    state_in: str
    state_out: str
    mask: str
    trims: bool
    gate: GateEntry | None = None

    @property
    def computed_from(self) -> dict[str, str]:
        """Outputs that are computed from another one."""
        return {self.entropy: self.logits}
