"""A compile's job: a request resolved for one model on one device, made once and used by everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..argument_types import checked, takes_request
from ..bucket import Bucket
from ..elastic import ElasticSpec, Submodel
from ..errors import InputError, PlanError
from ..exporters.architecture import Task
from ..exporters.signature import Signature
from ..exporters.source import ModelSource, open_source
from ..profiles.backends import BACKENDS, Backend
from ..profiles.compile_request import CompileRequest
from ..profiles.device_profile import DeviceProfile
from ..profiles.load_profile import load_profile
from ..profiles.precision import precision_problem, rank
from .examples.corpus import ArrayCorpus, Corpus, read_array_corpus, read_corpus
from .planning.candidate import Corrections
from .planning.levels import Level, in_every_precision, ladder, read_assignment
from .planning.levels import levels as make_levels
from .planning.plan import Plan, make_plan
from .planning.variants import require_scales
from .validate import (
    generation_notes,
    validate_backend,
    validate_budgets,
    validate_examples,
    validate_generation,
    validate_submodels,
    validated_tasks,
)

# Of the options that a bundle states: the axes along which its weights are not laid out.
WHOLE_ALONG = "whole_along"


@dataclass(frozen=True)
class Job:
    """Everything that a compile will do, resolved once from a request: nothing asks the request again.

    ``source`` is the model as its folder states it (headers alone), in the precisions and with the tasks and exits of
    the job; ``profile`` is the device with what the request puts in place of its own. ``submodels`` were asked for by
    id or as published slices; ``included`` are the ids of the submodels that are built whatever budgets choose.
    ``options`` are what the profile does not say of the job, as the manifest keeps it; ``notes`` state what of the
    profile this model cannot have.
    ``tasks`` were read whole; ``examples`` is the file of texts (``text``) or arrays that rank the axes.
    """

    source: ModelSource
    profile: DeviceProfile
    levels: tuple[Level, ...]
    submodels: tuple[Submodel, ...]
    included: frozenset[str]
    options: Mapping[str, Any]
    notes: tuple[str, ...]
    tasks: Mapping[str, Task]
    lora_rank: int | None
    examples: Path | None
    output: Path
    overwrite: bool
    emit_only: bool
    mergeable: bool
    command: tuple[str, ...]

    @cached_property
    def corpus(self) -> Corpus | ArrayCorpus | None:
        """The examples, read when first asked for: a plan needs none."""
        if self.examples is None:
            return None
        return read_corpus(self.examples) if self.options["text"] else read_array_corpus(self.examples, self.source)

    @cached_property
    def rungs(self) -> tuple[Submodel, ...]:
        """The ladder between the levels, smallest first, in one precision."""
        return tuple(ladder(self.levels, self.profile.promotion_order))

    @property
    def candidates(self) -> tuple[Submodel, ...]:
        """Every submodel that may get engines."""
        return (*in_every_precision(self.rungs, self.profile.precisions), *self.submodels)

    @checked
    def plan(self, source: ModelSource | None = None, corrections: Corrections | None = None) -> Plan:
        """The submodel of each budget; ``source`` replaces the headers' once the weights were read.

        Raises PlanError if no submodel keeps a budget.
        """
        made = make_plan(
            source or self.source,
            self.profile,
            levels=self.levels,
            submodels=self.submodels,
            corrections=corrections,
        )
        return replace(made, notes=(*self.notes, *made.notes))

    def chosen(self, spec: ElasticSpec, plan: Plan) -> list[Submodel]:
        """The submodels to build by ``plan``, smallest first."""
        ids = {budget.submodel for budget in plan.budgets} | self.included
        found = [(c.parameters, rank(c.precision), spec.parse(c.id)) for c in plan.candidates if c.id in ids]
        found.sort(key=lambda one: (one[0], [value for _, value in one[2].structure], -one[1], one[2].id))
        return [submodel for *_, submodel in found]

    def validate(self) -> None:
        """Refuses before any work what would fail behind it: weights that are not there, a back end that cannot finish
        engines here, budgets that no submodel keeps, and examples that a precision lacks or that cannot be read."""
        self.source.checkpoint.require_weights()
        validate_backend(self.profile, self.emit_only)
        validate_budgets(self.source, self.profile, self.levels, self.submodels)
        validate_examples(self.profile.precisions, self.corpus is not None)


def resolve(request: CompileRequest) -> Job:
    """Opens the model (headers alone, no torch) and the profile, and reads what was asked for by name.

    Raises a NestforgeError for a model, profile, level, submodel, bucket or precision that does not exist or fit.
    """
    source = open_source(request.model, request.exits)
    given = request.profile if isinstance(request.profile, DeviceProfile) else load_profile(request.profile)
    profile = _for_request(given, request, source)
    source = replace(source, precisions=profile.precisions, generates=request.generate)
    source, tasks = validated_tasks(source, profile, request.tasks, request.lora_rank, request.mergeable)
    validate_generation(source, profile)
    levels = tuple(make_levels(source.spec, profile.levels, profile.width_multiple))
    asked = [read_assignment(source.spec, id_, levels, profile) for id_ in request.submodels]
    validate_submodels(source, profile, (*(level.submodel for level in levels), *asked))
    published = _published(source, request.slices)
    require_scales(source, profile)
    submodels = (*(level.submodel for level in levels), *asked, *published)
    source = replace(source, whole_along=_whole_along(source.spec, submodels))
    if request.text is not None and request.data is not None:
        raise InputError("text and data: expected one of them, the examples that rank the axes and show quality")
    examples = request.data if request.text is None else request.text
    whole = {
        "budgets": (),
        "levels": tuple(level.submodel for level in levels),
        "ladder": ladder(levels, profile.promotion_order),
    }
    included = whole[request.include]
    always = (source.spec.universal(), *asked, *published, *in_every_precision(included, profile.precisions))
    return Job(
        source=source,
        profile=profile,
        levels=levels,
        submodels=(*asked, *published),
        included=frozenset(submodel.id for submodel in always),
        options=_options(request, source, asked, published),
        notes=_notes(source, given, profile, is_asked=bool(request.buckets)),
        tasks=tasks,
        lora_rank=request.lora_rank,
        examples=None if examples is None else Path(examples),
        output=Path(request.output),
        overwrite=request.overwrite,
        emit_only=request.emit_only,
        mergeable=request.mergeable,
        command=tuple(request.command),
    )


def _options(
    request: CompileRequest, source: ModelSource, asked: Sequence[Submodel], published: Sequence[Submodel]
) -> dict[str, Any]:
    stated = {
        "data": request.data is not None,
        "generate": request.generate,
        "mergeable": request.mergeable,
        WHOLE_ALONG: sorted(source.whole_along),
        "slices": [submodel.id for submodel in published],
    }
    ids = [submodel.id for submodel in (*asked, *published)]
    always: dict[str, Any] = {"include": request.include, "submodels": ids, "text": request.text is not None}
    if request.exits is not None:  # none of them is the last exit alone
        always["exits"] = sorted(request.exits)
    return {**always, **{name: value for name, value in stated.items() if value not in (False, [])}}


def _whole_along(spec: ElasticSpec, submodels: Sequence[Submodel]) -> frozenset[str]:
    """The axes that none of ``submodels``, nor any between them, shrinks."""
    return frozenset(
        axis.name for axis in spec.prefix_axes if all(submodel[axis.name] == axis.size for submodel in submodels)
    )


def _notes(source: ModelSource, given: DeviceProfile, profile: DeviceProfile, is_asked: bool) -> tuple[str, ...]:
    """Settings of ``given`` that this model cannot have: ranges, and the shape at which budgets are judged."""
    asked, shape = profile.budget_at, profile.budget_shape
    if asked is not None and source.signature.max_sequence is None:
        asked = Bucket(asked.batch, 1)  # of such a model only batches differ
    notes = generation_notes(source, profile)
    if source.signature.shortened is not None:
        notes = (*notes, f"texts of at most {source.signature.max_sequence} tokens: {source.signature.shortened}")
    if asked not in (None, shape):
        notes = (
            *notes,
            f"budgets limit latency and FLOPs at {shape}, the nearest to {asked} that engines run at",
        )
    static = _signature(source, profile).static
    if static is None or is_asked or all(bucket.is_static for bucket in given.buckets):
        return notes
    return (
        *notes,
        f"static buckets {', '.join(map(str, profile.buckets))}, to which inputs are padded: {static}",
    )


def _signature(source: ModelSource, device: DeviceProfile) -> Signature:
    """The model's, with the shapes that engines for ``device`` may have."""
    if BACKENDS[device.backend].static_segments and source.exits is not None:
        return replace(source.signature, static="on a GPU its segments hand on memory of one shape")
    return source.signature


def _published(source: ModelSource, folders: Sequence[str | Path]) -> tuple[Submodel, ...]:
    """The submodels of ``source`` that ``folders`` hold."""
    if not folders:
        return ()
    from ..exporters.published_slice import read_slice  # it compares weights, which needs torch; nothing else here does

    return tuple(read_slice(source, Path(folder)) for folder in folders)


@takes_request(CompileRequest)
def plan(request: CompileRequest) -> Plan:
    """Which submodel each budget gets and why; nothing is traced, latencies are predicted.

    The arguments are the fields of ``CompileRequest``; those that say how engines are made change nothing here.
    Raises as ``resolve``, and PlanError if no submodel keeps a budget.
    """
    return resolve(request).plan()


def _for_request(device: DeviceProfile, request: CompileRequest, source: ModelSource) -> DeviceProfile:
    """The profile with what the request puts in place of its own, and with buckets that the model has."""
    asked = None if request.buckets is None else [_bucket(bucket) for bucket in request.buckets]
    if request.backend is not None and request.backend != device.backend:
        device = _for_backend(device, BACKENDS[request.backend], request)
    if source.exits is not None and "segments" not in BACKENDS[device.backend].kinds:
        raise PlanError(f"{source.name} has exits, and engines for {device.backend} are whole ones; use onnxruntime")
    device = replace(
        device,
        buckets=_signature(source, device).buckets(asked, device.buckets),
        promotion_order=request.promotion_order or device.promotion_order,
        budgets=request.budgets or device.budgets,
    )
    if request.budget_at is not None:
        shape = _bucket(request.budget_at)
        _require_shape(shape, device)
        device = replace(device, budget_at=shape)
    elif request.buckets and device.budget_shape != device.budget_at:
        device = replace(device, budget_at=None)  # the profile's own is that of its own buckets
    if not request.measure:
        device = replace(device, host=None)
    if request.levels:
        device = replace(device, levels={kind: tuple(fractions) for kind, fractions in request.levels.items()})
    if request.variants:
        device = replace(device, variants={**(device.variants or {}), **request.variants})
    if request.precisions:
        device = replace(device, precisions=tuple(request.precisions))
        if problem := precision_problem(device.precisions, device.backend):
            raise PlanError(f"precision: {problem}")
    return device


def _for_backend(device: DeviceProfile, backend: Backend, request: CompileRequest) -> DeviceProfile:
    """``device`` with ``backend`` in place of its own, and without what the profile states for that alone."""
    device = replace(
        device,
        backend=backend.name,
        tensorrt=None if backend.runs_graphs else device.tensorrt,
        capacities=device.capacities if backend.fixed_caches else None,
        host=device.host if backend.runs_graphs else None,
    )
    if problem := precision_problem(request.precisions or device.precisions, backend.name):
        raise PlanError(f"precision: {problem}")
    return device


def _bucket(given: str | Bucket) -> Bucket:
    if isinstance(given, Bucket):
        return given
    try:
        return Bucket.parse(given)
    except ValueError as failure:
        raise PlanError(str(failure)) from failure


def _require_shape(shape: Bucket, device: DeviceProfile) -> None:
    if not shape.is_static:
        raise PlanError(f"`budget_at={shape}`: expected one shape, such as {shape.largest}")
    if not any(bucket.holds(shape) for bucket in device.buckets):
        raise PlanError(
            f"`budget_at={shape}`: larger than every bucket ({', '.join(map(str, device.buckets))}); ask for a smaller "
            "shape, or for a bucket that holds it"
        )
