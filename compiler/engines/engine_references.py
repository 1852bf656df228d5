"""The references of engines: PyTorch's model, or with the numbers that an engine's integers stand for; and the tight
half of a quantised engine's gate: all of it but the rounding of activations.

Rounding weights to a few bits moves the answers of some models by more than any fault would: a language model's logits
on a token that nothing precedes, or on one that repeats, may turn by half a right angle. So an integer engine is held
against PyTorch with the very numbers that its integers stand for, which are held against the model's weights one by one
(graph/stored_numbers.py), and how far they leave its answers is stated, not judged (docs/decisions/0058).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import ParityError
from ...profiles.precision import BLOCK_INPUTS, PRECISIONS, TRACED
from ...runtime.inputs.arrays import Arrays
from ..graph.encodings import parts_of, split_encoding, stored_stack
from ..graph.passes.contract import is_table
from ..graph.precision.proof_graphs import exact
from ..graph.store import stored_arrays
from ..graph.stored_numbers import StoredNumbers
from ..graph.template import Emitted
from ..parity.cases import Case
from ..parity.compare import Tolerance, tolerance_for
from ..parity.engine_verdict import ProofRun, require_parity
from ..parity.judge import JudgedOutputs, Replayed, Verdict, judge
from ..parity.reference import Reference, in_torch, replayed, rule_of
from ..parity.references import References, smallest

# Names of what engines read of the weight store, and the variants in which they do.
_Key = tuple[frozenset[str], tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class EngineReferences:
    """Those ``of_model`` as it is, or with the ``numbers`` of the weight store, if any is of integers."""

    of_model: References
    numbers: StoredNumbers | None = None
    _known: dict[_Key, References] = field(default_factory=dict)

    def of(self, bundle: Bundle, *engines: EngineEntry) -> References:
        """The references of ``engines`` of ``bundle``, of one precision, that answer together, such as a chain."""
        return self.rounded(bundle, *engines) if PRECISIONS[engines[0].precision].is_integer else self.of_model

    def rounded(self, bundle: Bundle, *engines: EngineEntry) -> References:
        """Those with the numbers that ``engines`` read in the place of the model's weights. Raises ParityError where
        one is not made of the model's."""
        names, variants = frozenset(_read_by(bundle, engines)), self._variants(engines[0])
        key = names, tuple(sorted(variants.items()))
        if key not in self._known:
            assert self.numbers is not None
            model = self.numbers.in_model(names)
            self._known[key] = self.of_model.narrowed_by(model.universal, partial(model.narrow, variants=variants))
        return self._known[key]

    def form(self, bundle: Bundle, engine: EngineEntry, submodel: Submodel) -> torch.nn.Module | None:
        """``submodel`` in the variants of ``engine``, without any rounding; None where it reads no folded tensor."""
        universal = self.of_model.universal
        lower = universal.source.architecture.lower
        if lower is None or not any(split_encoding(n)[0] in universal.spec.folded for n in _read_by(bundle, [engine])):
            return None
        return lower(universal.narrow(submodel), self._variants(engine))

    def on(self, some: Callable[[Sequence[Case]], Sequence[int]]) -> EngineReferences:
        """The same on ``some`` of the cases of each bucket; see ``References.on``."""
        known = {key: references.on(some) for key, references in self._known.items()}
        return EngineReferences(self.of_model.on(some), self.numbers, known)

    def _variants(self, engine: EngineEntry) -> Mapping[str, str]:
        parts = self.of_model.universal.source.parts
        return (engine.variants or {}) if engine.segment is None else parts[engine.segment].variants


@contextmanager
def written_references(bundle: Bundle, references: References) -> Iterator[EngineReferences]:
    """Those of a written ``bundle``; the numbers of its integers lie in a temporary folder. Where it was compiled with
    examples, these may have chosen every matrix of 4 bits."""
    universal, store = references.universal, bundle.weights
    options, chosen, shapes = bundle.manifest.provenance.options, dict[str, np.ndarray](), universal.stored_shapes()
    if options.text or options.data:
        of_4_bits = stored_arrays(store, universal.spec, *BLOCK_INPUTS)
        chosen = {name: array for name, array in of_4_bits.items() if len(shapes.get(split_encoding(name)[0], ())) == 2}
    with TemporaryDirectory(prefix="nestforge-verify-") as folder:
        yield EngineReferences(references, StoredNumbers(universal, store, Path(folder), chosen))


def _read_by(bundle: Bundle, engines: Sequence[EngineEntry]) -> Iterator[str]:
    """The weights that the graphs of ``engines`` name in the weight store, row by row where these are joined."""
    for engine in engines:
        graph = onnx.load(bundle.file(engine.file), load_external_data=False).graph
        for tensor in graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL and not is_table(tensor.name):
                yield from parts_of(stored_stack(tensor.name)[0])


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
