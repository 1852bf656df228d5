"""What the engines of a bundle ask of memory, file by file, and the residencies that follow."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Literal

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import CACHED, ENCODER
from ...bundle.open_bundle import Bundle
from ...elastic import DEPTH, ElasticSpec, Submodel
from ...profiles.precision import PRECISIONS
from .contract.residency import EngineNeed, Residency, assign_residencies

# An encoder reads other pages of the weight store than the decoder behind it, as if it were of other layers.
_ENCODER_LAYERS = (1, 2)


def residencies_for(
    bundle: Bundle,
    engines: Sequence[EngineEntry],
    memory_mb: float | None,
    requested: Residency | Literal["auto"] = "auto",
    limit: str | None = None,
) -> dict[str, Residency]:
    """Residency per engine id, see ``assign_residencies``. Engines of one file are one, and get the same.

    Segments get memory only where their chain can run, which takes all of them and a whole engine; a decoder and the
    encoder that reads its prompts, and engines of one submodel that differ in capacity, only together.
    """
    needs: dict[str, EngineNeed] = {}
    for engine, need in zip(engines, engine_needs(bundle, engines), strict=True):
        first = needs.setdefault(engine.file, need)
        # Of submodels that share a file the one that matters most decides.
        needs[engine.file] = replace(first, importance=max(first.importance, need.importance))
    while True:
        assigned = assign_residencies(list(needs.values()), memory_mb, requested, limit)
        of_file = {file: assigned[need.engine] for file, need in needs.items() if need.engine in assigned}
        idle = _idle_segments(engines, of_file.keys())
        if len(of_file) == len(needs) or idle.isdisjoint(needs):
            break
        needs = {file: need for file, need in needs.items() if file not in idle}
    return {engine.id: of_file[engine.file] for engine in engines if engine.file in of_file}


def engine_needs(bundle: Bundle, engines: Sequence[EngineEntry]) -> list[EngineNeed]:
    """The need of each engine, by the figures of the manifest."""
    manifest = bundle.manifest
    spec = ElasticSpec(manifest.axes, ())
    entries = {entry.id: entry for entry in manifest.submodels}
    submodels = {entry.id: spec.from_kinds(entry.values) for entry in manifest.submodels}
    predicted = {latency.engine: latency.predicted_ms for latency in bundle.build.latencies}
    named = [budget.submodel for budget in manifest.budgets]
    behind_encoder = manifest.generation is not None and manifest.generation.encoder is not None
    before = {ENCODER: _ENCODER_LAYERS}
    if manifest.exits:
        ends = [segment.layer for segment in manifest.exits.segments]
        names = [segment.name for segment in manifest.exits.segments]
        before |= dict(zip(names, zip((0, *ends), ends, strict=False), strict=True))
    needs = []
    for engine in engines:
        submodel = submodels[engine.submodel]
        layers = before.get(engine.segment or CACHED, (0, submodel.depth or 1))
        reads = engine.weight_bytes or 0
        weight_bytes = entries[engine.submodel].weight_bytes if engine.segment is None else reads
        tables = max(0, reads - weight_bytes)  # of its bucket, so that a larger submodel's pages may not hold them
        needs.append(
            EngineNeed(
                engine=engine.id,
                widths=_widths(submodel, layers),
                weight_bytes=weight_bytes,
                own_bytes=engine.private_bytes + engine.activation_bytes + tables,
                latency_ms=predicted.get(engine.id, 1.0),
                importance=1.0 + named.count(engine.submodel),
                layers=layers,
                can_share=engine.backend == "onnxruntime" and not PRECISIONS[engine.precision].is_always_packed,
                group=engine.submodel if _is_one_of_several(engine, behind_encoder) else None,
            )
        )
    return needs


def _is_one_of_several(engine: EngineEntry, behind_encoder: bool) -> bool:
    """Whether a submodel generates with this engine and others alone: an encoder, or those of other capacities."""
    return engine.capacity is not None or (behind_encoder and engine.segment in (CACHED, ENCODER))


def _idle_segments(engines: Sequence[EngineEntry], admitted: Set[str]) -> set[str]:
    """Files of segments that no chain can use while these files are ``admitted``."""
    chains: dict[str, set[str]] = {}
    for engine in engines:
        if engine.segment not in (None, CACHED, ENCODER):
            chains.setdefault(engine.submodel, set()).add(engine.file)
    answering = {engine.submodel for engine in engines if engine.segment is None and engine.file in admitted}
    usable = [files for submodel, files in chains.items() if submodel in answering and files <= admitted]
    return set().union(*chains.values()).difference(*usable)


def _widths(submodel: Submodel, layers: tuple[int, int]) -> tuple[int, ...]:
    """The values of every axis but the depth, 0 where it lies in a layer outside ``layers``; the bits of a weight up
    and down, since an engine reads nothing of what another precision reads."""
    first, last = layers
    values = tuple(
        value if axis.layer is None or submodel.depth is None or first <= axis.layer < last else 0
        for axis, value in submodel.values
        if axis.name != DEPTH
    )
    return values if submodel.bits is None else (*values, -submodel.bits)
