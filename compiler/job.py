"""A compile's job: a request resolved for one model on one device, made once and used by everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..argument_types import checked, takes_request
from ..bucket import Bucket
from ..bundle.manifest import JobOptions, Manifest
from ..elastic import DEPTH, ElasticSpec, Submodel
from ..errors import InputError
from ..exporters.architecture import Task
from ..exporters.checkpoints.checkpoint import Checkpoint
from ..exporters.dimensions import trained_by_layer
from ..exporters.families.general import MODULE
from ..exporters.in_memory.checkpoint import ModuleInMemory
from ..exporters.published_slices import TableRow, read_slice, read_slicing_table, sets_left_out
from ..exporters.source import ModelSource, open_source
from ..exporters.tasks import with_stated_tasks, with_tasks
from ..profiles.backends import BACKENDS
from ..profiles.compile_request import CompileRequest, is_module
from ..profiles.device_profile import DeviceProfile, profile_precisions
from ..profiles.load_profile import requested_profile
from ..profiles.precision import rank
from .examples.corpus import ArrayCorpus, Corpus, read_array_corpus, read_corpus
from .planning.candidate import Corrections
from .planning.compile_cost import CompileCost, compile_cost, lacking_room, require_room
from .planning.levels import Level, in_every_precision, ladder, read_assignment
from .planning.levels import levels as make_levels
from .planning.plan import Plan, make_plan
from .validate import validate_backend, validate_budgets, validate_examples, validate_model


@dataclass(frozen=True)
class Job:
    """Everything that a compile will do, resolved once from a request: nothing asks the request again.

    ``source`` is the model as its folder states it (headers alone), in the precisions and with the tasks and exits of
    the job; ``profile`` is the device with what the request puts in place of its own. ``submodels`` were requested by
    id or as published slices, those ``tabled`` by the rows of a slicing table; ``included`` are the ids of the
    submodels that are built whatever budgets choose. ``options`` are what the profile does not say of the job, as the
    manifest keeps it: with that, ``stated_source`` gives the source back. ``notes`` state what of the profile this
    model cannot have. ``tasks`` were read whole; ``examples`` is the file of texts (``options.text``) or arrays that
    rank the axes.
    """

    source: ModelSource
    profile: DeviceProfile
    levels: tuple[Level, ...]
    submodels: tuple[Submodel, ...]
    tabled: tuple[tuple[Submodel, TableRow], ...]
    included: frozenset[str]
    options: JobOptions
    notes: tuple[str, ...]
    tasks: Mapping[str, Task]
    lora_rank: int | None
    examples: Path | None
    output: Path
    overwrite: bool
    emit_only: bool
    command: tuple[str, ...]

    @cached_property
    def corpus(self) -> Corpus | ArrayCorpus | None:
        """The examples, read when first requested: a plan needs none."""
        if self.examples is None:
            return None
        return read_corpus(self.examples) if self.options.text else read_array_corpus(self.examples, self.source)

    @cached_property
    def rungs(self) -> tuple[Submodel, ...]:
        """The ladder between the levels, smallest first, in one precision."""
        return tuple(ladder(self.levels, self.profile.promotion_order))

    @cached_property
    def cost(self) -> CompileCost:
        """Cost of the compile, with the budgets that can be judged by now. Raises PlanError if one is not kept."""
        made = validate_budgets(self.source, self.profile, self.levels, self.submodels)
        return compile_cost(self.source, self.profile, self.chosen(self.source.spec, made), self.corpus)

    @property
    def shared_options(self) -> JobOptions:
        """``options`` without the choice of submodels: two jobs with the same ones may trace the same graphs."""
        return replace(self.options, include="levels", submodels=(), slices=())

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
            tabled=self.tabled,
            corrections=corrections,
        )
        cost = compile_cost(self.source, self.profile, self.chosen(self.source.spec, made), self.corpus)
        return replace(made, notes=(*self.notes, *made.notes), cost=cost)

    def chosen(self, spec: ElasticSpec, plan: Plan) -> list[Submodel]:
        """The submodels to build by ``plan``, smallest first."""
        ids = {budget.submodel for budget in plan.budgets} | self.included
        found = [(c.parameters, rank(c.precision), spec.parse(c.id)) for c in plan.candidates if c.id in ids]
        found.sort(key=lambda one: (one[0], [value for _, value in one[2].structure], -one[1], one[2].id))
        return [submodel for *_, submodel in found]

    def validate(self) -> None:
        """Refuses before any work what would fail behind it: weights that are not there, budgets that no submodel
        keeps, examples that a precision lacks or that cannot be read, a back end that cannot finish engines here, and
        what fits neither the disk nor the memory.
        """
        self.source.checkpoint.require_weights()
        cost = self.cost
        validate_examples(self.profile.precisions, self.corpus is not None)
        validate_backend(self.profile, self.emit_only)
        require_room(cost, self.output)


def resolve(request: CompileRequest) -> Job:
    """Opens the profile and the model (headers alone, no torch), and reads what was requested by name.

    Raises a NestforgeError for a model, profile, level, submodel, bucket or precision that does not exist or fit.
    """
    wanted = requested_profile(request)
    rows = () if request.slicing_table is None else read_slicing_table(Path(request.slicing_table))
    source = open_source(
        _model(request),
        request.exits,
        wanted.precisions,
        generates=request.generate,
        dimensions=request.dimensions,
        pairs=request.layer_dimensions,
        left_out=sets_left_out(rows),
    )
    source, tasks = with_tasks(source, request.tasks, request.lora_rank) if request.tasks else (source, {})
    published = tuple(read_slice(source, Path(folder)) for folder in request.slices)
    tabled = tuple((row.submodel(source.spec), row) for row in rows)
    published = (*published, *dict.fromkeys(submodel for submodel, _ in tabled))
    profile = source.fitted(wanted, request.buckets is not None, request.budget_at is not None)

    levels = tuple(make_levels(source.spec, profile.levels, profile.width_multiple))
    of_levels = tuple(level.submodel for level in levels)
    by_id = tuple(read_assignment(source.spec, id_, levels, profile) for id_ in request.submodels)
    validate_model(source, profile, (*of_levels, *by_id), request)
    source = replace(source, whole_along=_whole_along(source.spec, (*of_levels, *by_id, *published)))

    whole = {"budgets": (), "levels": of_levels, "ladder": ladder(levels, profile.promotion_order)}
    included = whole[request.include]
    always = (source.spec.universal(), *by_id, *published, *in_every_precision(included, profile.precisions))
    examples = request.data if request.text is None else request.text
    return Job(
        source=source,
        profile=profile,
        levels=levels,
        submodels=(*by_id, *published),
        tabled=tabled,
        included=frozenset(submodel.id for submodel in always),
        options=JobOptions(
            include=request.include,
            submodels=tuple(submodel.id for submodel in (*by_id, *published)),
            text=request.text is not None,
            data=request.data is not None,
            exits=source.cut_at,
            generate=request.generate,
            mergeable=request.mergeable,
            slices=tuple(submodel.id for submodel in published),
            whole_along=tuple(sorted(source.whole_along)),
            dimensions=source.dimensions,
            pairs=source.pairs,
            left_out=source.left_out,
        ),
        notes=_notes(source, wanted, profile, (*of_levels, *by_id), has_buckets=request.buckets is not None),
        tasks=tasks,
        lora_rank=request.lora_rank,
        examples=None if examples is None else Path(examples),
        output=Path(request.output),
        overwrite=request.overwrite,
        emit_only=request.emit_only,
        command=tuple(request.command),
    )


def _model(request: CompileRequest) -> str | Path | Checkpoint:
    if isinstance(request.model, str | Path):
        return request.model
    from ..exporters.in_memory.examples import module_in_memory

    return module_in_memory(request.model, request.example_inputs, request.dynamic)


def stated_source(model: Any, manifest: Manifest) -> ModelSource:
    """The folder ``model``, or the module, opened as the job had it whose bundle states ``manifest``. Raises
    InputError for the one in the place of the other."""
    is_folder, was_folder = isinstance(model, str | Path), manifest.family != MODULE.name
    if is_folder != was_folder or not (is_folder or is_module(model)):
        was = f"of the folder of {manifest.name}" if was_folder else f"of a module in memory, {manifest.name}"
        raise InputError(f"the bundle was made {was}; compare it with that, got {type(model).__name__} {model!r:.80}")
    profile, options = manifest.provenance.profile, manifest.provenance.options
    source = open_source(
        model if is_folder else _again(model, manifest),
        options.exits,
        profile_precisions(profile),
        generates=options.generate,
        whole_along=options.whole_along,
        dimensions=options.dimensions,
        pairs=options.pairs,
        left_out=options.left_out,
    )
    return source if manifest.tasks is None else with_stated_tasks(source, manifest.tasks)


def _again(module: Any, manifest: Manifest) -> Checkpoint:
    from ..exporters.in_memory.module import without_whole_parameters

    longest = max(engine.bucket.sequence for engine in manifest.engines)
    return ModuleInMemory(without_whole_parameters(module), manifest.inputs, longest)


def _whole_along(spec: ElasticSpec, submodels: Sequence[Submodel]) -> frozenset[str]:
    """The axes that none of ``submodels``, nor any between them, shrinks."""
    return frozenset(
        axis.name for axis in spec.prefix_axes if all(submodel[axis.name] == axis.size for submodel in submodels)
    )


def _notes(
    source: ModelSource,
    wanted: DeviceProfile,
    profile: DeviceProfile,
    submodels: Sequence[Submodel],
    has_buckets: bool,
) -> tuple[str, ...]:
    """Settings of the model's folder and of the profile ``wanted`` that engines cannot follow: of generation, of
    ranges, exit layers at which none of ``submodels`` ends, and the shape at which budgets are judged."""
    notes: list[str | None] = []
    if (stated := source.generation_defaults) is not None and source.cached is not None:
        notes += [*stated.notes(source.cached.vocabulary), BACKENDS[profile.backend].generation_note]
        if source.cached.states:
            notes.append(
                "rows keep recurrent states, from which no token can be taken back: prompts are read token by token, "
                "nothing is drafted, and a session goes on only from all that it has read"
            )
    if source.signature.shortened is not None:
        notes.append(f"texts of at most {source.signature.max_sequence} tokens: {source.signature.shortened}")
    notes.append(source.signature.left_out)
    if source.checkpoint.left_out is not None:
        notes.append(f"the text model of the folder alone: {source.checkpoint.left_out} are left out")
    if DEPTH not in source.spec.kinds and (loss := trained_by_layer(source.checkpoint)) is not None:
        notes.append(f"its card says that it was trained with {loss}: name layers that it may end with as `exits`")
    shape_wanted, shape = profile.budget_at, profile.budget_shape
    if shape_wanted is not None and source.signature.max_sequence is None:
        shape_wanted = Bucket(shape_wanted.batch, 1)  # of such a model only batches differ
    if shape_wanted not in (None, shape):
        notes.append(f"budgets limit latency and FLOPs at {shape}, the nearest to {shape_wanted} that engines run at")
    last = source.spec.depth
    early = [layer for layer in source.cut_at or () if layer < last]
    if early and source.exits is None and all(submodel[DEPTH] == last for submodel in submodels):
        notes.append(f"no submodel ends after layers {early}: `levels` leaves depth out, so that it stays whole")
    static = source.signature_for(profile).static
    if static is not None and not has_buckets and not all(bucket.is_static for bucket in wanted.buckets):
        notes.append(f"static buckets {', '.join(map(str, profile.buckets))}, to which inputs are padded: {static}")
    return tuple(note for note in notes if note is not None)


@takes_request(CompileRequest)
def plan(request: CompileRequest) -> Plan:
    """Which submodel each budget gets and why; nothing is traced, latencies are predicted.

    The arguments are the fields of ``CompileRequest``; those that say how engines are made change nothing here.
    Raises as ``resolve``, and PlanError if no submodel keeps a budget.
    """
    return plan_here(resolve(request))


def plan_here(job: Job) -> Plan:
    """The plan of ``job``; a note says why its compile does not fit this host, if so."""
    made = job.plan()
    lacking = lacking_room(made.cost, job.output) if made.cost is not None else None
    return made if lacking is None else replace(made, notes=(*made.notes, f"a compile is refused here: {lacking}"))
