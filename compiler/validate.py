"""A job's parts validated before any work: what cannot be built is refused (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from ..elastic import Submodel
from ..errors import BuildError, PlanError
from ..exporters.architecture import Task
from ..exporters.checkpoints.generation_defaults import read_generation_defaults
from ..exporters.source import ModelSource
from ..exporters.tasks import with_tasks
from ..profiles.backends import BACKENDS
from ..profiles.device_profile import DeviceProfile
from ..profiles.precision import PRECISIONS, TRACED, Precision
from ..profiles.probe_host import is_this_host
from ..runtime.engines.runner import opener
from .planning.levels import Level
from .planning.plan import make_plan


def validate_backend(profile: DeviceProfile, emit_only: bool) -> None:
    """Whether engines can be finished here, or need not be. Raises BuildError."""
    backend = BACKENDS[profile.backend]
    if backend.runs_graphs:
        if emit_only:
            raise BuildError(
                f"`emit_only`: profile {profile.name} is for {profile.backend}, which runs graphs as they are; leave "
                "it out"
            )
        if problem := opener(backend.name).problem(profile.precisions):
            raise BuildError(f"profile {profile.name}: engines for {backend.title} cannot be proven here: {problem}")
    elif not emit_only and (problem := opener(backend.name).problem()):
        raise BuildError(
            f"profile {profile.name}: plans for {backend.title} cannot be built here: {problem}; or compile with "
            "`emit_only=True` and run `nestforge build` on the device"
        )


def validate_budgets(
    source: ModelSource, profile: DeviceProfile, levels: Sequence[Level], submodels: Sequence[Submodel]
) -> None:
    """Whether submodels keep the budgets. What is not known yet is judged later: a latency on this host once rungs were
    measured, memory in other precisions than the traced one once graphs say which weights stay in it. Raises PlanError.
    """
    budgets, memory_mb = profile.budgets, profile.memory_mb
    if is_this_host(profile):
        budgets = {name: replace(budget, latency_ms=None) for name, budget in budgets.items()}
    if profile.precisions != (TRACED,):
        budgets, memory_mb = {name: replace(budget, memory_mb=None) for name, budget in budgets.items()}, inf
    make_plan(source, replace(profile, budgets=budgets, memory_mb=memory_mb), levels=levels, submodels=submodels)


def validate_examples(precisions: Sequence[Precision], are_given: bool) -> None:
    """Whether there is what a precision is calibrated on. Raises BuildError."""
    scaled = [precision for precision in precisions if PRECISIONS[precision].calibration == "scales"]
    if scaled and not are_given:
        raise BuildError(
            f"precision {scaled[0]}: activations are scaled by what examples show; pass `text` or `data`, or use "
            "int8-dynamic, which needs none"
        )


def validate_generation(source: ModelSource, profile: DeviceProfile) -> None:
    """Refuses models that are to generate and cannot."""
    if not source.generates:
        return
    if source.cached is None:
        raise PlanError(f"generate: {source.name} cannot; expected a causal language model, see docs/models.md")
    if source.cached.problem is not None:
        raise PlanError(f"generate: {source.name} cannot: {source.cached.problem}")
    backend = BACKENDS[profile.backend]
    if "generation" not in backend.kinds:
        raise PlanError(f"generate: engines for {backend.name} are whole ones; compile for onnxruntime")
    if not backend.caches_integers and profile.precisions != (TRACED,):
        asked = ", ".join(profile.precisions)
        raise PlanError(f"generate: for {backend.name} KV-cache engines are in {TRACED} alone, asked for {asked}")
    for precision in profile.precisions:
        if PRECISIONS[precision].numbers == "halves":
            raise PlanError(
                f"generate: KV-cache engines are in fp32 or of integers, asked for {precision}; on the "
                "processor the operator that reads the cache takes longer on halves"
            )


def validate_submodels(source: ModelSource, profile: DeviceProfile, submodels: Iterable[Submodel]) -> None:
    """Submodels whose heads no engine keeps in a cache, and for TensorRT those whose encoder counts what it selects,
    are refused."""
    form = source.cached
    if form is None:
        return
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


def validated_tasks(
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
