"""The tight half of an integer engine's gate: all of it but the rounding of activations (precision/exact.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.universal import UniversalModel
from ...runtime.bundle.manifest import EngineEntry
from ...runtime.inputs.arrays import Arrays
from ..graph.precision.exact import exact, with_stored_weights
from ..parity.cases import Case
from ..parity.compare import tolerance_for
from ..parity.divergence import first_divergence
from ..parity.judge import Interface, judge
from ..parity.reference import Reference, replayed
from ..work.staging import write_synced
from .emitted import Emitted

_FILE = "exact.onnx"


@dataclass(frozen=True)
class ExactProof:
    """Proves engines of ``universal`` in ``folder``; ``run`` returns what an engine makes of sets of inputs."""

    universal: UniversalModel
    folder: Path
    run: Callable[[EngineEntry, Sequence[Arrays]], list[Arrays]]
    # The universal model with the numbers that stored integers stand for, by the names of those.
    stored_weights: dict[frozenset[str], UniversalModel] = field(default_factory=dict)

    def __call__(self, engine: Emitted, submodel: Submodel, cases: Sequence[Case], interface: Interface) -> str:
        """The rule that ``engine``, without the rounding of activations, keeps against PyTorch with its weights.

        Raises ParityError, naming the first module that diverges, if it does not.
        """
        entry, folder, source = engine.entry, self.folder, self.universal.source
        names = frozenset(engine.template.weights)
        if names not in self.stored_weights:
            self.stored_weights[names] = with_stored_weights(self.universal, names)
        module = self.stored_weights[names].narrow(submodel)
        if entry.segment is not None and source.exits is not None:
            index = [segment.name for segment in source.exits.entry.segments].index(entry.segment)
            module = source.exits.segment(module, index)
        reference = Reference(source.family, module, interface.specs)
        limit, graph = tolerance_for("fp32", self.universal.spec.depth), exact((folder / entry.file).read_bytes())
        write_synced(folder / _FILE, graph)
        try:
            found = self.run(replace(entry, file=_FILE), [case.feeds for case in cases])
        finally:
            (folder / _FILE).unlink()
        expected = replayed(reference, cases, entry.decisions, found, limit.atol)
        judgement = judge(expected, found, cases, interface, "fp32", limit)
        broken, subject = judgement.broken, f"engine {entry.id}, without the rounding of activations"
        if broken is not None and judgement.unprovable:
            raise ParityError(f"{subject}: {broken.describe()}")
        if broken is not None:
            case, arrays = next(pair for pair in zip(cases, found, strict=True) if pair[0].name == broken.failed_case)
            run = reference.bound(case.feeds, entry.decisions, arrays)
            where = first_divergence(graph, engine.template.module_outputs, reference, case, limit, folder, run)
            raise ParityError(f"{subject}: {broken.describe()}; allowed {limit.rule}; first to diverge: {where}")
        return limit.rule
