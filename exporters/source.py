"""The source model as the planner sees it: axes, sizes and workload, known from headers alone (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

from ..bucket import Bucket
from ..bundle.entries.engine_entry import RoutingEntry
from ..elastic import DEPTH, ElasticSpec, Pairs, Submodel
from ..errors import CheckpointError, PlanError
from ..profiles.backends import BACKENDS
from ..profiles.device_profile import DeviceProfile
from ..profiles.precision import (
    FP32,
    HALF_ENCODINGS,
    INT8,
    INT8_ZERO,
    LEAST_INPUTS,
    LEAST_OUTPUTS,
    PRECISIONS,
    SCALES,
    Encoding,
    Precision,
    encoded_bytes,
    highest_first,
    precision_of,
)
from ..runtime.inputs.text import TextEncoder
from ..workload import Op
from .architecture import Architecture, ParameterGroups, TaskSpec, Variants, parameter_groups
from .checkpoints.checkpoint import MODULES_FILE, Checkpoint, text_part
from .checkpoints.generation_defaults import GenerationDefaults, read_generation_defaults
from .checkpoints.hub import open_named
from .checkpoints.tokenizer_file import tokenizer_content
from .depth import outermost_products, with_depth, with_left_out
from .dimensions import read_depths, with_dimensions
from .family import PREFIX, Family, family_of, preset_checkpoint
from .parts import CachedSpec, Exits, Part, chosen_exits
from .sentence_transformers.read_modules import SentenceModules
from .signature import Signature

# Weights from which a model is large.
LARGE = 2**26


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint with its family, and what that read; ``cut_at`` are the layers whose exits are used, None is all.

    ``precisions`` are the ones that its engines get; where there are several, its submodels exist in each.
    ``encodings(submodel)`` are the ones in which its engines read each parameter, known once graphs were traced.
    ``generates``: its submodels get KV-cache engines. ``tasks``: its engines take tasks, and these tensors of
    theirs as inputs. ``whole_along`` are the axes that no submodel of the bundle shrinks: weights need not be laid out
    for them. ``dimensions`` are those to which its embedding may be cut, None as its folder has it; ``pairs`` are
    layers with dimensions, None where each goes with the other. ``left_out`` are sets of
    layers that submodels may lack.
    """

    checkpoint: Checkpoint
    family: Family
    architecture: Architecture
    cut_at: tuple[int, ...] | None = None
    precisions: tuple[Precision, ...] = ("fp32",)
    encodings: Callable[[Submodel], Mapping[str, Collection[Encoding]]] | None = None
    generates: bool = False
    tasks: TaskSpec | None = None
    whole_along: frozenset[str] = frozenset()
    dimensions: tuple[int, ...] | None = None
    pairs: Pairs | None = None
    left_out: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @cached_property
    def spec(self) -> ElasticSpec:
        several = len(self.precisions) > 1
        return replace(self._cut_spec, precisions=highest_first(self.precisions) if several else ())

    @cached_property
    def _cut_spec(self) -> ElasticSpec:
        """The architecture's spec, with the exits that are used and the slices that may be."""
        spec = self.architecture.spec.whole_along(self.whole_along)
        if self.cut_at is None:
            return spec
        return replace(
            spec,
            axes=tuple(
                replace(axis, choices=chosen_exits(axis.choices, self.cut_at)) if axis.choices else axis
                for axis in spec.axes
            ),
        )

    @cached_property
    def exits(self) -> Exits | None:
        """The exits that are used, if the model has several at which a row may leave."""
        exits = self.architecture.exits
        depths = next((axis.choices for axis in self._cut_spec.axes if axis.name == DEPTH), None)
        return None if exits is None or depths is None or len(depths) == 1 else exits.cut_at(depths)

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """Parts that get engines of their own beside the whole model, by name."""
        parts = list(self.exits.parts) if self.exits else []
        if self.cached is not None:
            parts += self.cached.parts(self.workload)
        return {part.name: part for part in parts}

    @property
    def cached(self) -> CachedSpec | None:
        """How the model generates, if its engines are to."""
        return self.architecture.cached if self.generates else None

    @cached_property
    def generation_defaults(self) -> GenerationDefaults | None:
        """How the folder says that its model generates, if its engines are to. Raises CheckpointError."""
        if (cached := self.cached) is None:
            return None
        return read_generation_defaults(self.checkpoint, cached.vocabulary, cached.encoder is not None)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter of the universal model by name, those of ``modules`` included."""
        return {**self.architecture.parameter_shapes, **(self.modules.parameter_shapes if self.modules else {})}

    @property
    def modules(self) -> SentenceModules | None:
        """The modules of sentence-transformers behind the model, if its folder has any."""
        return self.architecture.modules

    def source_files(self) -> list[Path]:
        """The files that the compiled result depends on, sorted. Raises CheckpointError without weights."""
        return sorted({*self.checkpoint.source_files(), *(self.modules.files if self.modules else ())})

    @cached_property
    def signature(self) -> Signature:
        return with_dimensions(self.architecture.signature, self.checkpoint, self.modules, self.dimensions, self.pairs)

    @cached_property
    def tokenizer(self) -> bytes | None:
        """Content of the tokenizer file that the bundle gets, None for a model that neither takes text nor writes it.

        Loads transformers where the folder has a ``tokenizer_config.json``, or no ``tokenizer.json``. Raises
        CheckpointError.
        """
        text = self.signature.text
        file = self.writing_tokenizer if text is None else text.file
        return None if file is None else tokenizer_content(self.checkpoint.folder / file)

    @property
    def writing_tokenizer(self) -> str | None:
        """The tokenizer file of a model that writes text behind an array."""
        array = self.cached and self.cached.encoder and self.cached.encoder.input
        return "tokenizer.json" if array and self.checkpoint.tokenizer_files else None

    def signature_for(self, device: DeviceProfile) -> Signature:
        """The signature with the shapes that engines for ``device`` may have."""
        if BACKENDS[device.backend].static_segments and self.exits is not None:
            return replace(self.signature, static="on a GPU its segments hand on memory of one shape")
        return self.signature

    def fitted(self, device: DeviceProfile, are_asked: bool, is_shape_asked: bool) -> DeviceProfile:
        """``device`` with buckets that the model has, which a request may have requested, as it may have for the shape
        in one of them at which budgets are judged. Raises PlanError, or ExportError for buckets."""
        own = self.signature_for(device).buckets(device.buckets if are_asked else None, device.buckets)
        fitted, shape = replace(device, buckets=own), device.budget_at
        if shape is None or not is_shape_asked:
            of_others = are_asked and fitted.budget_shape != shape  # the profile's own is that of its own buckets
            return replace(fitted, budget_at=None) if of_others else fitted
        if not shape.is_static:
            raise PlanError(f"`budget_at={shape}`: expected one shape, such as {shape.largest}")
        if not any(bucket.holds(shape) for bucket in own):
            raise PlanError(
                f"`budget_at={shape}`: larger than every bucket ({', '.join(map(str, own))}); ask for a smaller shape, "
                "or for a bucket that holds it"
            )
        return fitted

    @cached_property
    def encoder(self) -> TextEncoder | None:
        """The tokenizer as the bundle gets it; None where the folder has none. Raises as ``tokenizer``."""
        text = self.signature.text
        if text is None:
            return None
        return TextEncoder(self.checkpoint.folder / text.file, text, self.signature.inputs, self.tokenizer)

    def parameters(self, submodel: Submodel) -> int:
        """Number of parameters of ``submodel``."""
        return self.parameter_groups(submodel).total

    @property
    def is_large(self) -> bool:
        """Whether it has so many weights that every pass is dear."""
        return self.parameters(self.spec.universal()) >= LARGE

    def parameter_groups(self, submodel: Submodel) -> ParameterGroups:
        """Parameters of ``submodel``: in all, embedding tables, feed-forward."""
        return parameter_groups(self.spec, self.shapes, submodel, self.architecture.is_embedding)

    def named_groups(self, submodel: Submodel) -> dict[str, int]:
        """Parameters of ``submodel`` in the groups that its family names; none of most."""
        counts: dict[str, int] = {}
        group_of = self.architecture.group_of or (lambda _: None)
        for name, shape in self.shapes.items():
            group = group_of(name)
            if group is not None and self.spec.has(name, submodel):
                counts[group] = counts.get(group, 0) + prod(self.spec.shape_of(name, shape, submodel))
        return counts

    def precision(self, submodel: Submodel) -> Precision:
        """The precision of engines of ``submodel``."""
        return precision_of(submodel, self.precisions)

    def weight_bytes(self, submodel: Submodel, backend: str) -> WeightBytes:
        """Bytes of the parameters of ``submodel`` for engines of ``backend``: exact in fp32 and once ``encodings`` are
        known, else an estimate."""
        read = None if self.encodings is None else self.encodings(submodel)
        total = WeightBytes(0)
        folded = self.architecture.folded
        shapes = self.shapes if read is None or folded is None else {**self.shapes, **folded.shapes}
        for name, full in shapes.items():
            if self.spec.has(name, submodel):
                found = self._expected(name, full, submodel, backend) if read is None else read.get(name, ())
                total += weight_bytes(self.spec.shape_of(name, full, submodel), found, backend)
        return total

    def stored_bytes(self, submodel: Submodel, backend: str) -> dict[tuple[str, Encoding], int]:
        """Bytes that engines of ``submodel`` for ``backend`` read of each parameter in each encoding, as estimated."""
        return {
            (name, encoding): encoded_bytes(self.spec.shape_of(name, full, submodel), encoding)
            for name, full in self.shapes.items()
            if self.spec.has(name, submodel)
            for encoding in self._expected(name, full, submodel, backend)
        }

    def _expected(self, name: str, full: tuple[int, ...], submodel: Submodel, backend: str) -> tuple[Encoding, ...]:
        is_table = self.architecture.is_embedding(name, full)
        is_wider = [cut.dim for cut in self.spec.slices_of(name)] == [1] or name in self.outermost
        return expected_encodings(self.precision(submodel), backend, full, is_table, is_wider)

    @cached_property
    def outermost(self) -> frozenset[str]:
        """The weights that ``int4`` has in 8 bits, as whole as they are."""
        return outermost_products(self.shapes)

    def workload(self, submodel: Submodel, bucket: Bucket, variants: Mapping[str, str] | None = None) -> list[Op]:
        """The operations of one forward pass of ``submodel`` at ``bucket``, in ``variants``; where they leave out a
        computation that has several, in the first that the family lists."""
        offered = self.variants(submodel, bucket)
        chosen = {computed: next(iter(options)) for computed, options in offered.items()} | dict(variants or {})
        ops = [
            *self.architecture.workload(submodel, bucket),
            *(self.modules.ops(bucket) if self.modules else ()),
        ]
        return [*ops, *(op for computed, options in offered.items() for op in options[chosen[computed]])]

    def variants(self, submodel: Submodel, bucket: Bucket) -> Variants:
        """Operations by computation and by variant, where there are several equal ones."""
        return self.architecture.variants(submodel, bucket) if self.architecture.variants is not None else {}

    @property
    def variant_problems(self) -> Mapping[str, Mapping[str, str]]:
        """Reasons by computation and by variant, where this model lacks one that others of its family have."""
        return self.architecture.variant_problems

    @property
    def onnxruntime_variants(self) -> frozenset[str]:
        """The variants that ONNX Runtime alone computes, in float32."""
        return self.architecture.onnxruntime_variants

    def routes(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        """The routes that an engine of the whole ``submodel`` returns after its outputs; none of most models."""
        return self.architecture.routing.entries(submodel, bucket) if self.architecture.routing is not None else ()

    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        """Static numbers and rules of the routes of an engine; none where it returns no routes."""
        return self.architecture.routing.metadata(submodel, bucket) if self.architecture.routing is not None else {}


def checkpoint_at(model: Path | str, with_weights: bool = True) -> Checkpoint:
    """The checkpoint of a model folder, ``preset:NAME``, or ``hub:OWNER/NAME@REVISION``, whose weights may be left on
    the hub. Raises CheckpointError."""
    text = str(model)
    if text.startswith(PREFIX):
        return preset_checkpoint(text.removeprefix(PREFIX))
    return text_part(open_named(model, with_weights))


def open_source(
    model: Path | str | Checkpoint,
    exits: Sequence[int] | None = None,
    precisions: tuple[Precision, ...] = ("fp32",),
    *,
    generates: bool = False,
    whole_along: Iterable[str] = (),
    dimensions: Sequence[int] | None = None,
    pairs: Pairs | None = None,
    left_out: tuple[tuple[int, ...], ...] = (),
) -> ModelSource:
    """Opens a model as ``checkpoint_at``, or a checkpoint that was read; ``exits`` are the layers after which it may
    answer, by default those that its folder states, of a model with exits all; the others are fields of
    ``ModelSource``.

    A model without weights (a preset, or a folder with ``config.json`` alone) can be described and planned where its
    configuration says everything; what needs the weights then raises CheckpointError.
    Raises CheckpointError or UnsupportedModelError.
    """
    checkpoint = model if isinstance(model, Checkpoint) else checkpoint_at(model)
    family = family_of(checkpoint)
    if checkpoint.missing is not None and not family.reads_config_alone:
        raise CheckpointError(checkpoint.missing)
    cut_at, pairs = read_depths(checkpoint, exits, dimensions, pairs)
    architecture = family.read(checkpoint)
    if left_out and cut_at is not None:
        raise PlanError(f"{checkpoint.folder}: exits {list(cut_at)} beside slices that leave layers out; take one")
    if left_out:
        architecture = with_left_out(architecture, checkpoint, left_out)
    if checkpoint.has_modules and architecture.modules is None:
        raise CheckpointError(
            f"{checkpoint.folder / MODULES_FILE}: models of family {family.name} run without modules of "
            "sentence-transformers; remove the file to compile the model alone"
        )
    return ModelSource(
        checkpoint,
        family,
        architecture if cut_at is None else with_depth(architecture, checkpoint, cut_at),
        cut_at,
        precisions,
        generates=generates,
        whole_along=frozenset(whole_along),
        dimensions=None if dimensions is None else tuple(dimensions),
        pairs=pairs,
        left_out=left_out,
    )


@dataclass(frozen=True)
class WeightBytes:
    """``stored``: what engines read of the weight store. ``widened``: the largest of the float32 weights that a
    processor makes of stored half-precision ones, one at a time, each where it is read."""

    stored: int
    widened: int = 0

    @property
    def held(self) -> int:
        """Bytes that an open engine holds in memory for its weights."""
        return self.stored + self.widened

    def __add__(self, other: WeightBytes) -> WeightBytes:
        return WeightBytes(self.stored + other.stored, max(self.widened, other.widened))


def weight_bytes(shape: Sequence[int], encodings: Collection[Encoding], backend: str) -> WeightBytes:
    """Bytes of one weight ``[..., out, in]`` that engines of ``backend`` read in ``encodings``."""
    stored = sum(encoded_bytes(shape, encoding) for encoding in encodings)
    is_widened = BACKENDS[backend].widens_half and not HALF_ENCODINGS.isdisjoint(encodings)
    return WeightBytes(stored, encoded_bytes(shape, FP32) if is_widened else 0)


def expected_encodings(
    precision: Precision, backend: str, shape: Sequence[int], is_table: bool, is_wider: bool
) -> tuple[Encoding, ...]:
    """The encodings in which a parameter of the universal model's full ``shape`` is likely to be read.

    Which nodes of a graph stay in float32, and whether a table is a product's weight too, is known once it was traced.
    ``is_wider``: the weight is stored transposed, and never in blocks, or is one of the outermost.
    """
    spec, on_cpu = PRECISIONS[precision], BACKENDS[backend].own_operators
    is_small = len(shape) not in (2, 3) or shape[-1] < LEAST_INPUTS or shape[-2] < LEAST_OUTPUTS
    is_small |= is_table and spec.is_integer and not on_cpu
    stored = spec.reads(is_small=is_small, is_table=is_table, is_wider=is_wider)
    zeros: tuple[Encoding, ...] = (INT8_ZERO,) if stored == INT8 and on_cpu and not is_table else ()
    return (stored, *SCALES.get(stored, ()), *zeros)
