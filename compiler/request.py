"""A compile request resolved: its meaning for one model on one device, made once and used by everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..argument_types import checked
from ..bucket import Bucket
from ..elastic import ElasticSpec, Submodel
from ..errors import PlanError
from ..exporters.architecture import Task
from ..exporters.checkpoints.generation_defaults import read_generation_defaults
from ..exporters.signature import Signature
from ..exporters.source import ModelSource, open_source
from ..exporters.tasks import with_tasks
from ..profiles.backends import BACKENDS, Backend
from ..profiles.compile_request import CompileRequest, takes_request
from ..profiles.device_profile import DeviceProfile
from ..profiles.load_profile import load_profile
from ..profiles.precision import PRECISIONS, TRACED, precision_problem
from .planning.candidate import Corrections
from .planning.levels import Level, ladder, read_assignment
from .planning.levels import levels as make_levels
from .planning.plan import Plan, make_plan
from .planning.variants import require_scales

# Of the options that a bundle states: the axes along which its weights are not laid out.
WHOLE_ALONG = "whole_along"


@dataclass(frozen=True)
class Resolved:
    """A request with its model opened (headers alone) and its profile as this request has it.

    ``submodels`` were asked for by id or as published slices; ``published`` are the slices. ``notes``
    state what of the profile this model cannot have. ``tasks`` were read whole.
    """

    request: CompileRequest
    source: ModelSource
    profile: DeviceProfile
    levels: tuple[Level, ...]
    submodels: tuple[Submodel, ...]
    published: tuple[Submodel, ...]
    notes: tuple[str, ...] = ()
    tasks: Mapping[str, Task] = field(default_factory=dict)

    @cached_property
    def rungs(self) -> tuple[Submodel, ...]:
        """The ladder between the levels, smallest first, in one precision."""
        return ladder(self.levels, self.profile.promotion_order)

    @property
    def options(self) -> dict[str, Any]:
        """Settings of this request beside the profile, as the manifest keeps it."""
        request = self.request
        options: dict[str, Any] = {
            "include": request.include,
            "submodels": [submodel.id for submodel in self.submodels],
            "text": request.text is not None,
        }
        if request.data is not None:
            options["data"] = True
        if request.exits is not None:
            options["exits"] = sorted(request.exits)
        if request.generate:
            options["generate"] = True
        if request.mergeable:
            options["mergeable"] = True
        if self.source.whole_along:
            options[WHOLE_ALONG] = sorted(self.source.whole_along)
        if self.published:
            options["slices"] = [submodel.id for submodel in self.published]
        return options

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


def resolve(request: CompileRequest) -> Resolved:
    """Opens the model (headers alone, no torch) and the profile, and reads what was asked for by name.

    Raises a NestforgeError for a model, profile, level, submodel, bucket or precision that does not exist or fit.
    """
    source = open_source(request.model, request.exits)
    given = request.profile if isinstance(request.profile, DeviceProfile) else load_profile(request.profile)
    profile = _for_request(given, request, source)
    source = replace(source, precisions=profile.precisions, generates=request.generate)
    source, tasks = asked_tasks(source, profile, request.tasks, request.lora_rank, request.mergeable)
    if request.generate:
        require_cached_form(source, profile)
    levels = tuple(make_levels(source.spec, profile.levels, profile.width_multiple))
    asked = [read_assignment(source.spec, id_, levels, profile) for id_ in request.submodels]
    if request.generate:
        require_that_generate(source, profile, (*(level.submodel for level in levels), *asked))
    published = _published(source, request.slices)
    require_scales(source, profile)
    submodels = (*(level.submodel for level in levels), *asked, *published)
    source = replace(source, whole_along=_whole_along(source.spec, submodels))
    notes = _notes(source, given, profile, is_asked=bool(request.buckets))
    return Resolved(request, source, profile, levels, (*asked, *published), published, notes, tasks)


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


def require_cached_form(source: ModelSource, profile: DeviceProfile) -> None:
    """Refuses models that cannot generate, before any work."""
    if source.cached is None:
        raise PlanError(f"generate: {source.name} cannot; expected a causal language model, see docs/models.md")
    if source.cached.problem is not None:
        raise PlanError(f"generate: {source.name} cannot: {source.cached.problem}")
    backend = BACKENDS[profile.backend]
    if "generation" not in backend.kinds:
        raise PlanError(f"generate: engines for {backend.name} are whole ones; compile for onnxruntime")
    if not backend.caches_integers and profile.precisions != (TRACED,):
        asked = ", ".join(profile.precisions)
        raise PlanError(
            f"generate: for {backend.name} engines that keep a cache are in {TRACED} alone, asked for {asked}"
        )
    for precision in profile.precisions:
        if PRECISIONS[precision].numbers == "halves":
            raise PlanError(
                f"generate: engines that keep a cache are in fp32 or of integers, asked for {precision}; on the "
                "processor the operator that reads the cache takes longer on halves"
            )


def require_that_generate(source: ModelSource, profile: DeviceProfile, submodels: Iterable[Submodel]) -> None:
    """Submodels whose heads no engine keeps in a cache, and for TensorRT those whose encoder counts what it selects,
    are refused before any work."""
    form = source.cached
    assert form is not None
    backend = BACKENDS[profile.backend]
    for submodel in submodels:
        if (problem := form.at(submodel).problem) is not None:
            raise PlanError(f"generate: submodel {submodel.id} cannot: {problem}")
        computes = form.encoder is not None and form.encoder.routes(submodel)
        if computes and not backend.takes_computed_counts:
            raise PlanError(
                f"generate: submodel {submodel.id} cannot for {backend.name}: its encoder selects a number of tokens "
                f"that follows from the prompt's length, and {backend.title}'s parser takes a constant one (TopK); ask "
                "for levels without it, or compile for onnxruntime"
            )


def generation_notes(source: ModelSource, profile: DeviceProfile) -> tuple[str, ...]:
    """Settings of generation in the model's folder that engines do not follow, and those that it lacks."""
    if source.cached is None:
        return ()
    vocabulary = source.cached.vocabulary
    stated = read_generation_defaults(source.checkpoint, vocabulary)
    notes = []
    if stated.left_out:
        notes.append(f"generation does not follow {', '.join(stated.left_out)}, which the model's folder states")
    if stated.beyond:
        notes.append(
            f"the model's folder states {', '.join(stated.beyond)}, beyond its vocabulary of {vocabulary} tokens: no "
            "such token can come"
        )
    if not stated.end_ids:
        of_it = " of its vocabulary" if stated.beyond else ""
        notes.append(
            f"the model's folder states no eos_token_id{of_it}: a text ends at a stop of the request's or at its "
            "`max_tokens`"
        )
    if (note := BACKENDS[profile.backend].generation_note) is not None:
        notes.append(note)
    return tuple(notes)


def asked_tasks(
    source: ModelSource,
    profile: DeviceProfile,
    tasks: Mapping[str, str | Path],
    lora_rank: int | None,
    mergeable: bool,
) -> tuple[ModelSource, dict[str, Task]]:
    """``source`` whose engines take ``tasks``, folders by name, and what those hold; itself without any.

    Raises PlanError for options without tasks, and for what engines with tasks cannot be, CheckpointError for a folder
    that is none of the model's tasks.
    """
    if lora_rank is not None and (not tasks or lora_rank < 1):
        raise PlanError(f"`lora_rank={lora_rank}`: expected at least 1, with tasks that are adapters of PEFT")
    if mergeable and not tasks:
        raise PlanError("mergeable: expected tasks, which are merged into the weights of such engines")
    if not tasks:
        return source, {}
    source, read = with_tasks(source, {name: Path(folder) for name, folder in tasks.items()}, lora_rank)
    if "tasks" not in BACKENDS[profile.backend].kinds:
        raise PlanError(
            f"task: engines with tasks are for onnxruntime, profile {profile.name} is for {profile.backend}"
        )
    if profile.precisions != ("fp32",):
        raise PlanError(f"task: engines with tasks are in fp32, asked for {', '.join(profile.precisions)}")
    if source.exits is not None:
        raise PlanError(f"task: {source.name} has exits, and segments take no tasks; compile it without `tasks`")
    return source, read
