"""A job's parts validated before any work: what cannot be built is refused (no torch here)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import inf

from ..elastic import Submodel
from ..errors import BuildError, PlanError
from ..exporters.source import ModelSource
from ..profiles.backends import BACKENDS
from ..profiles.compile_request import CompileRequest
from ..profiles.device_profile import DeviceProfile
from ..profiles.precision import PRECISIONS, TRACED, Calibration, Precision
from ..profiles.probe_host import is_this_host
from ..runtime.engines.runner import opener
from .planning.candidate import require_scales
from .planning.levels import Level
from .planning.plan import Plan, make_plan


def validate_model(
    source: ModelSource, profile: DeviceProfile, submodels: Iterable[Submodel], request: CompileRequest
) -> None:
    """Whether engines for the profile's back end can have the exits, tasks and decoder that ``request`` asks of the
    model, and ``submodels`` too. Raises PlanError."""
    if source.exits is not None and "segments" not in BACKENDS[profile.backend].kinds:
        raise PlanError(f"{source.name} has exits, and engines for {profile.backend} are whole ones; use onnxruntime")
    for problem in chain(_task_problems(source, profile, request), _decoder_problems(source, profile, submodels)):
        raise PlanError(problem)
    require_scales(source, profile)


def _task_problems(source: ModelSource, profile: DeviceProfile, request: CompileRequest) -> Iterator[str]:
    tasks, rank = request.tasks, request.lora_rank
    if rank is not None and not tasks:
        yield f"`lora_rank={rank}`: expected tasks that are adapters of PEFT"
    if request.mergeable and not tasks:
        yield "mergeable: expected tasks, which are merged into the weights of such engines"
    if not tasks:
        return
    if "tasks" not in BACKENDS[profile.backend].kinds:
        yield f"task: engines with tasks are for onnxruntime, profile {profile.name} is for {profile.backend}"
    if profile.precisions != (TRACED,):
        yield f"task: engines with tasks are in fp32, requested {', '.join(profile.precisions)}"
    if source.exits is not None:
        yield f"task: {source.name} has exits, and segments take no tasks; compile it without `tasks`"


def _decoder_problems(source: ModelSource, profile: DeviceProfile, submodels: Iterable[Submodel]) -> Iterator[str]:
    """Models that cannot generate, precisions and submodels of others in which they cannot: heads that no engine keeps
    in a cache, and for TensorRT an encoder that counts what it selects."""
    form, backend = source.cached, BACKENDS[profile.backend]
    if not source.generates:
        return
    if form is None:
        yield f"generate: {source.name} cannot; expected a causal language model, see docs/models.md"
        return
    if form.problem is not None:
        yield f"generate: {source.name} cannot: {form.problem}"
    if "generation" not in backend.kinds:
        yield f"generate: engines for {backend.name} are whole ones; compile for onnxruntime"
    if form.is_buffered and not backend.runs_graphs:
        yield (
            f"generate: {source.name} cannot for {backend.name}: its class has attention of its own, over buffers that "
            "ONNX Runtime alone writes into; compile for onnxruntime"
        )
    if form.states and not backend.runs_graphs:
        yield f"generate: {source.name} cannot for {backend.name}: it keeps recurrent states; compile for onnxruntime"
    if form.encoder is not None and form.encoder.input is not None and not backend.runs_graphs:
        yield f"generate: {source.name} cannot for {backend.name}: its encoder reads an array; compile for onnxruntime"
    if not backend.caches_integers and profile.precisions != (TRACED,):
        requested = ", ".join(profile.precisions)
        yield f"generate: for {backend.name} KV-cache engines are in {TRACED} alone, requested {requested}"
    for precision in profile.precisions:
        if PRECISIONS[precision].arithmetic == "half":
            yield (
                f"generate: KV-cache engines are in fp32 or an integer precision, requested {precision}; on the "
                "processor the operator that reads the cache takes longer in half precision"
            )
    if form.depths and backend.fixed_caches:
        yield f"generate: engines for {backend.name} have every layer; leave exits out, or compile for onnxruntime"
    for submodel in submodels:
        if (problem := form.at(submodel).problem) is not None:
            yield f"generate: submodel {submodel.id} cannot: {problem}"
        computes = form.encoder is not None and form.encoder.routes(submodel)
        if computes and not backend.takes_computed_counts:
            yield (
                f"generate: submodel {submodel.id} cannot for {backend.name}: its encoder selects a number of tokens "
                f"that follows from the prompt's length, and {backend.title}'s parser takes a constant one (TopK); ask "
                "for levels without it, or compile for onnxruntime"
            )


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
) -> Plan:
    """Submodels that keep the budgets. Limits that cannot be judged yet are judged later: a latency on this host
    once rungs were measured, memory in other precisions than the traced one once graphs say which weights stay in it.
    Raises PlanError."""
    budgets, memory_mb = profile.budgets, profile.memory_mb
    if is_this_host(profile):
        budgets = {name: replace(budget, latency_ms=None) for name, budget in budgets.items()}
    if profile.precisions != (TRACED,):
        budgets, memory_mb = {name: replace(budget, memory_mb=None) for name, budget in budgets.items()}, inf
    return make_plan(source, replace(profile, budgets=budgets, memory_mb=memory_mb), levels=levels, submodels=submodels)


_BY_EXAMPLES: Mapping[Calibration | None, str] = {
    "scales": "activations are scaled by what examples show; pass `text` or `data`, or use int8-dynamic",
    "weights": "numbers are chosen by what examples show; pass `text` or `data`, or use int4",
}


def validate_examples(precisions: Sequence[Precision], are_given: bool) -> None:
    """Whether there is what a precision is calibrated on. Raises BuildError."""
    for precision in [] if are_given else precisions:
        if (of := PRECISIONS[precision].calibration) in _BY_EXAMPLES:
            raise BuildError(f"precision {precision}: {_BY_EXAMPLES[of]}, which needs none")
