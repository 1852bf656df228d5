"""Memory of a bundle's engines: their needs, the residencies that follow, and a cap on all that is open."""

import threading
from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from typing import Literal

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import CACHED, ENCODER
from ...bundle.open_bundle import Bundle
from ...elastic import DEPTH, Submodel
from ...errors import SelectionError
from ...ownership import Owned, Owner
from ...profiles.backends import BACKENDS
from ...profiles.precision import PRECISIONS, rank
from .residency import EngineNeed, OpenEngines, Residency, assign_residencies

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
        # Among submodels that share a file the one that matters most decides.
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
    spec = manifest.spec
    entries = {entry.id: entry for entry in manifest.submodels}
    submodels = {entry.id: spec.from_kinds(entry.values) for entry in manifest.submodels}
    predicted = {latency.engine: latency.largest.predicted_ms for latency in bundle.build.latencies}
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
                widths=(*_widths(submodel, layers), rank(engine.precision), -rank(engine.precision)),
                weight_bytes=weight_bytes,
                own_bytes=engine.private_bytes + engine.activation_bytes + tables,
                latency_ms=predicted.get(engine.id, 1.0),
                importance=1.0 + named.count(engine.submodel),
                layers=layers,
                can_share=BACKENDS[engine.backend].shares_weights and not PRECISIONS[engine.precision].is_always_packed,
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
    """The values of every axis but the depth, 0 where it lies in a layer outside ``layers``."""
    first, last = layers
    return tuple(
        value if submodel.depth is None or axis.layer is None or (first <= axis.layer and axis.runs_at(last)) else 0
        for axis, value in submodel.values
        if axis.name != DEPTH
    )


class MemoryCap:
    """Counts, by the figures of the manifest, what is open; what would exceed the cap is refused. Thread-safe.

    Engines for whole inputs have residencies that keep the cap when all of them are open; so none of them is refused
    until engines that generate, or caches, are open beside them.
    """

    def __init__(self, bundle: Bundle, memory_mb: float) -> None:
        self.memory_mb = memory_mb
        needs = engine_needs(bundle, bundle.manifest.every_engine)
        self._needs = {need.engine: need for need in needs}
        self._engines = OpenEngines(needs)
        self._open = Owned[tuple[str, Residency]]()
        self._others = Owned[int]()
        self.of_model = Owner()  # of what stays as long as the model
        self._lock = threading.Lock()

    @property
    def left_mb(self) -> float:
        """MB (10^6 bytes) left under the cap."""
        with self._lock:
            return self._left_mb(self._open.present())

    def left_mb_without(self, engines: Collection[tuple[EngineEntry, Residency]]) -> float:
        """MB (10^6 bytes) left if these, which are open so, were not."""
        with self._lock:
            others = self._open.present()
            for engine, residency in engines:
                others.remove((engine.id, residency))
            return self._left_mb(others)

    def open(self, owner: Owner, engine: EngineEntry, residency: Residency) -> None:
        """Counts ``engine`` until ``owner`` is over. Raises SelectionError where it exceeds the cap beside what is
        open."""
        with self._lock:
            left_mb = self._left_mb([*self._open.present(), (engine.id, residency)])
            if left_mb < 0:
                raise SelectionError(
                    f"memory_mb={self.memory_mb:g}: engine {engine.id} as {residency} takes {-left_mb:.1f} MB more "
                    "than is left beside the engines and sessions that are open; close a session, or raise the cap"
                )
            self._open.add(owner, (engine.id, residency))

    def take(self, owner: Owner, count: int, what: str, mend: str) -> None:
        """Counts ``count`` bytes beside the engines until ``owner`` is over. Raises SelectionError if they exceed the
        cap, by a line that says ``what`` takes them, and what to do but to raise the cap."""
        with self._lock:
            left_mb = self._left_mb(self._open.present())
            if count > 1e6 * left_mb:
                raise SelectionError(
                    f"memory_mb={self.memory_mb:g}: {what} of {count / 1e6:.1f} MB, {max(0.0, left_mb):.1f} MB "
                    f"are left; {mend}, or raise the cap"
                )
            self._others.add(owner, count)

    def taken_by(self, owner: Owner) -> int:
        """The bytes that ``owner`` has taken."""
        with self._lock:
            return sum(self._others.of(owner))

    def _left_mb(self, engines: Collection[tuple[str, Residency]]) -> float:
        """Beside ``engines`` and all that is no engine."""
        self._engines.clear()
        for engine, residency in engines:
            self._engines.add(self._needs[engine], residency)
        return self.memory_mb - (self._engines.bytes + sum(self._others.present())) / 1e6
