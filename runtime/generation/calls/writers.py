"""Which submodels of a bundle may write, and why the first of them would."""

from __future__ import annotations

from collections.abc import Collection

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.generation_entry import GenerationEntry
from ....bundle.manifest import Manifest
from ....errors import SelectionError
from ....strict import nearest
from .options import Options


def writers(
    manifest: Manifest,
    options: Options,
    admitted: Collection[str],
    rows: int,
    cache_bytes: int,
    proven: Collection[str] | None = None,
) -> tuple[list[EngineEntry], str]:
    """The engines to choose from, the largest submodel's first: only it without a promise. ``admitted`` are the ids of
    engines that may be open here, ``proven`` the submodels (ids) that may write for the task, all where it is None;
    ``rows`` generate at once, with ``cache_bytes``. Raises SelectionError."""
    assert manifest.generation is not None
    generation = manifest.generation
    offered = [engine for engine in generation.writers if proven is None or engine.submodel in proven]
    by_submodel = {
        engine.submodel: engine
        for engine in offered
        if all(needed.id in admitted for needed in _needed(generation, engine))
    }
    order = [entry.id for entry in manifest.largest_first if entry.id in by_submodel]
    engines = [by_submodel[submodel] for submodel in order if by_submodel[submodel].bucket.batch >= rows]
    asked, reason = options.submodel, f"submodel {options.submodel} asked for"
    if options.budget is not None:
        budgets = {budget.name: budget for budget in manifest.budgets}
        if options.budget not in budgets:
            raise SelectionError(
                f"no budget {options.budget!r:.80} in this bundle{nearest(options.budget[:80], budgets)}"
            )
        budget = budgets[options.budget]
        asked, reason = budget.submodel, f"budget {budget.name}: {budget.reason}"
    if asked is not None:
        wanted = manifest.submodel(asked).id
        if proven is not None and wanted not in proven:
            asker = "the request" if options.budget is None else f"budget {options.budget}"
            raise SelectionError(
                f"task {options.task} was proven on {', '.join(proven)}; {asker} names {wanted}; ask for one of them"
            )
        engines = [engine for engine in engines if engine.submodel == wanted]
        if wanted not in by_submodel and any(engine.submodel == wanted for engine in generation.writers):
            raise SelectionError(
                f"submodel {wanted}: the memory_mb of this model leaves no room for it; there is room for "
                f"{', '.join(order)}; ask for one of them, or raise the cap"
            )
        if not engines:
            raise SelectionError(
                f"submodel {wanted} has no engine that generates {rows} rows here; there is "
                f"{', '.join(order) or 'none'}"
            )
        return engines, reason
    if options.memory_mb is not None:
        limit = options.memory_mb
        memory_mb = {
            engine.id: (sum(map(_own_bytes, _needed(generation, engine))) + cache_bytes) / 1e6 for engine in engines
        }
        small = [engine for engine in engines if memory_mb[engine.id] <= limit]
        if not small:
            least = min(memory_mb.values(), default=0.0)
            raise SelectionError(
                f"no submodel generates {rows} rows with `memory_mb` <= {limit:g}; the smallest takes {least:.1f} MB "
                f"with its cache of {cache_bytes / 1e6:.1f} MB"
            )
        engines, reason = small, f"{memory_mb[small[0].id]:.1f} MB <= {limit:g} MB"
    else:
        reason = "the largest submodel" if options.promise else "no limit asked: the largest submodel"
        if left_out := len(offered) - len(by_submodel):
            reason += f" that the memory cap admits, {left_out} left out"
    if not engines:
        raise SelectionError(f"no submodel has an engine that generates {rows} rows here")
    if not options.promise:
        return engines[:1], reason
    if rows > 1:
        able = [engine for engine in engines if engine.kept == engines[0].kept]
        if len(able) < len(engines):
            reason += f"; of several rows only submodels with its heads, {len(engines) - len(able)} left out"
        return able, reason
    return engines, reason


def _needed(generation: GenerationEntry, engine: EngineEntry) -> list[EngineEntry]:
    """The engines with which a submodel generates: its own, of every capacity, and what reads its prompts."""
    encoder = generation.encoder_of(engine)
    return [*generation.siblings(engine), *([] if encoder is None else [encoder])]


def _own_bytes(engine: EngineEntry) -> int:
    """What the engine needs for itself."""
    return (engine.weight_bytes or 0) + engine.private_bytes + engine.activation_bytes
