"""What is asked of a model that is to generate: refused before any work where it cannot (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable

from ...elastic import Submodel
from ...errors import PlanError
from ...exporters.checkpoints.generation_defaults import read_generation_defaults
from ...exporters.source import ModelSource
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import PRECISIONS, TRACED


def require_cached_form(source: ModelSource, profile: DeviceProfile) -> None:
    """What cannot generate is refused before any work."""
    if source.cached is None:
        raise PlanError(f"generate: {source.name} cannot; expected a causal language model, see docs/models.md")
    if source.cached.problem is not None:
        raise PlanError(f"generate: {source.name} cannot: {source.cached.problem}")
    if profile.backend == "tensorrt":
        if profile.precisions != (TRACED,):
            asked = ", ".join(profile.precisions)
            raise PlanError(
                f"generate: for tensorrt engines that keep a cache are in {TRACED} alone, asked for {asked}"
            )
        return
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
    for submodel in submodels:
        if (problem := form.at(submodel).problem) is not None:
            raise PlanError(f"generate: submodel {submodel.id} cannot: {problem}")
        if profile.backend == "tensorrt" and form.encoder is not None and form.encoder.routes(submodel):
            raise PlanError(
                f"generate: submodel {submodel.id} cannot for tensorrt: its encoder selects a number of tokens that "
                "follows from the prompt's length, and TensorRT's parser takes a constant one (TopK); ask for levels "
                "without it, or compile for onnxruntime"
            )


def generation_notes(source: ModelSource, profile: DeviceProfile) -> tuple[str, ...]:
    """What the model's folder says of generation and engines do not follow, and what it does not say."""
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
    if profile.backend == "tensorrt":
        notes.append("engines that keep a cache are for TensorRT 10.15 or later; their plans have not run on a GPU yet")
    return tuple(notes)
