"""The tight half of an integer engine's gate: all of it but the rounding of activations (precision/exact.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...elastic import Submodel
from ...exporters.universal import UniversalModel
from ...profiles.precision import TRACED
from ...runtime.bundle.entries.engine_entry import EngineEntry
from ...runtime.inputs.arrays import Arrays
from ..graph.precision.exact import exact, with_stored_weights
from ..parity.evidence.cases import Case
from ..parity.evidence.compare import tolerance_for
from ..parity.evidence.reference import Reference, replayed
from ..parity.judge import JudgedOutputs, judge
from ..parity.require_parity import ProofRun, require_parity
from .emitted import Emitted

_GRAPH_FILE = "exact.onnx"


@dataclass(frozen=True)
class ExactProof:
    """Proves engines of ``universal`` by graphs in ``folder``; ``run`` returns what one makes of sets of inputs."""

    universal: UniversalModel
    folder: Path
    run: Callable[[EngineEntry, Sequence[Arrays]], list[Arrays]]
    # The universal model with the numbers that stored integers stand for, by the names of those.
    stored_weights: dict[frozenset[str], UniversalModel] = field(default_factory=dict)

    def __call__(self, engine: Emitted, submodel: Submodel, cases: Sequence[Case], outputs: JudgedOutputs) -> str:
        """The rule that ``engine``, without the rounding of activations, keeps against PyTorch with its weights.

        Raises ParityError, naming the first module that diverges, if it does not.
        """
        entry, source = engine.entry, self.universal.source
        module = self.module(engine, submodel)
        if entry.segment is not None:
            module = source.parts[entry.segment].module(module)
        reference = Reference(source.architecture.routing, module, outputs.specs)
        limit, (exact_engine, graph) = tolerance_for(TRACED, self.universal.spec.depth), self.graph(engine)
        found = self.run(exact_engine, [case.feeds for case in cases])
        expected = replayed(reference, cases, entry.routing, found, limit.atol)
        verdict = judge(expected, found, cases, outputs, TRACED, limit)
        run = ProofRun(graph, engine.template.module_outputs, self.folder, reference, entry.routing)
        subject = f"engine {entry.id}, without the rounding of activations"
        require_parity(subject, verdict, run, cases, found, limit, limit.rule)
        return limit.rule

    def module(self, engine: Emitted, submodel: Submodel) -> torch.nn.Module:
        """``submodel`` in PyTorch with the numbers that the integers of ``engine`` stand for."""
        names = frozenset(engine.template.weights)
        if names not in self.stored_weights:
            self.stored_weights[names] = with_stored_weights(self.universal, names)
        return self.stored_weights[names].narrow(submodel)

    def graph(self, engine: Emitted) -> tuple[EngineEntry, bytes]:
        """``engine`` without the rounding of activations: as one to run, until the next is made, and its graph."""
        graph = exact(engine.graph)
        (self.folder / _GRAPH_FILE).write_bytes(graph)
        return replace(engine.entry, file=_GRAPH_FILE), graph
