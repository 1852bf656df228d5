"""The tight half of a quantised engine's gate: all of it but the rounding of activations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import ParityError
from ...profiles.precision import PRECISIONS, TRACED
from ...runtime.inputs.arrays import Arrays
from ..graph.precision.proof_graphs import exact
from ..graph.template import Emitted
from ..parity.cases import Case
from ..parity.compare import Tolerance, tolerance_for
from ..parity.engine_verdict import ProofRun, require_parity
from ..parity.judge import JudgedOutputs, Replayed, Verdict, judge
from ..parity.reference import Reference, in_torch, replayed, rule_of
from ..parity.references import smallest
from .engine_references import EngineReferences

_GRAPH_FILE = "exact.onnx"


@dataclass(frozen=True)
class ExactProof:
    """Proves engines of ``bundle``, whose weight store lies in its folder; ``run`` returns what one makes of sets of
    inputs."""

    references: EngineReferences
    bundle: Bundle
    run: Callable[[EngineEntry, Sequence[Arrays]], list[Arrays]]

    @property
    def limit(self) -> Tolerance:
        """The tolerance of float32."""
        return tolerance_for(TRACED, self.references.of_model.universal.spec.depth)

    def stated(self, entry: EngineEntry, rule: str) -> str:
        """The ``rule`` of the engine ``entry`` in words, with that of this proof."""
        exact = f"without the rounding of activations, {rule_of(self.limit, entry.routing)}"
        if not PRECISIONS[entry.precision].is_integer:
            return f"{rule}; {exact}"
        return f"with the weights as they are rounded, {rule}; {exact}; figures are those from the model as it is"

    def __call__(
        self,
        engine: Emitted,
        submodel: Submodel,
        cases: Sequence[Case],
        outputs: JudgedOutputs,
        written: Replayed,
    ) -> tuple[Reference, Replayed]:
        """PyTorch with the numbers of ``engine``, and its answers, which the engine has without the rounding of
        activations.

        Where it reads tensors made of several weights, that is PyTorch in the engine's variants, which are first held
        against the model as it is ``written``. Raises ParityError, naming the first module that diverges, if a rule is
        broken.
        """
        entry, limit, source = engine.entry, self.limit, self.references.of_model.universal.source
        part = None if entry.segment is None else source.parts[entry.segment]
        if (form := self.references.form(self.bundle, entry, submodel)) is not None:
            lowered = Reference(None, form if part is None else part.module(form), outputs.specs)
            answers = in_torch(lowered, cases)
            require_form(entry.id, judge(written, answers, cases, outputs, limit), limit)
        exact_engine, graph = self.graph(engine)
        kept = _few(cases) if self.references.of_model.looks else range(len(cases))
        asked = [cases[number] for number in kept]
        found = self.run(exact_engine, [case.feeds for case in asked])
        rounded = self.references.rounded(self.bundle, entry)
        reference = rounded.of(submodel)
        if part is None:
            expected = rounded.replayed(submodel, entry.bucket, entry.routing, found, limit.atol)
        else:
            reference = reference.viewed(part.module, outputs.specs)
            expected = replayed(reference, cases, entry.routing, found, limit.atol)
        verdict = judge(expected.at(kept), found, asked, outputs, limit)
        run = ProofRun(graph, engine.template.module_outputs, self.bundle.path)
        subject = f"engine {entry.id}, without the rounding of activations"
        require_parity(subject, verdict, run, reference, entry, outputs, asked, found, limit, limit.rule)
        return reference, expected

    def graph(self, engine: Emitted) -> tuple[EngineEntry, bytes]:
        """``engine`` without the rounding of activations: as one to run, until the next is made, and its graph."""
        graph = exact(engine.graph)
        (self.bundle.path / _GRAPH_FILE).write_bytes(graph)
        return replace(engine.entry, file=_GRAPH_FILE), graph


def _few(cases: Sequence[Case]) -> list[int]:
    """By number the smallest case of several tokens, the next one and the largest, for a large model, all of whose 4
    bits are decoded in every run; which shapes an engine takes, all cases of it show."""
    first, by_size = smallest(cases)[0], sorted(range(len(cases)), key=lambda number: cases[number].tokens)
    at = by_size.index(first)
    return sorted({*by_size[at : at + 2], by_size[-1]})


def require_form(engine: str, verdict: Verdict, limit: Tolerance) -> None:
    """Raises ParityError where the ``verdict`` on the form in which PyTorch computes what ``engine`` does is broken."""
    if verdict.broken is not None:
        problem = verdict.broken.describe()
        raise ParityError(
            f"engine {engine}: its variants are not the model in PyTorch: {problem}; allowed {limit.rule}"
        )
