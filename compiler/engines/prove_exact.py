"""The tight half of a quantised engine's gate: all of it but the rounding of activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import torch

from ...bundle.entries.engine_entry import EngineEntry
from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.universal import UniversalModel
from ...profiles.precision import TRACED
from ...runtime.inputs.arrays import Arrays
from ..graph.encodings import parts_of
from ..graph.precision.proof_graphs import exact
from ..graph.store import StoredModel, with_stored_weights
from ..parity.cases import Case
from ..parity.compare import Tolerance, tolerance_for
from ..parity.engine_verdict import ProofRun, require_parity
from ..parity.judge import JudgedOutputs, Replayed, Verdict, judge
from ..parity.reading import in_float64
from ..parity.reference import Reference, replayed
from .emitted import Emitted

_GRAPH_FILE = "exact.onnx"
# Inputs of a product of 4 bits up to which it sums as precisely as others of float32. It does so in one chain, whose
# error grows by the square root of its length: 4.4e-7 of rms at 768 inputs, 1.4e-6 at 8,192, where Gemm stays at 3e-7.
_CHAIN = 768


@dataclass(frozen=True)
class ExactProof:
    """Proves engines of ``universal`` by graphs in ``folder``; ``run`` returns what one makes of sets of inputs.

    PyTorch's numbers never come from the integers and scales of the store: they are rounded anew from the model's
    weights, or stand for those ``chosen`` on examples, tensors of 4 bits by name.
    """

    universal: UniversalModel
    folder: Path
    run: Callable[[EngineEntry, Sequence[Arrays]], list[Arrays]]
    chosen: Mapping[str, np.ndarray] = field(default_factory=dict)
    # The universal model with the numbers that stored integers stand for, by the names of those.
    stored_weights: dict[frozenset[str], StoredModel] = field(default_factory=dict)

    def __call__(
        self,
        engine: Emitted,
        submodel: Submodel,
        cases: Sequence[Case],
        outputs: JudgedOutputs,
        written: Replayed,
    ) -> str:
        """The rule that ``engine``, without the rounding of activations, keeps against PyTorch with its weights.

        Where it reads tensors made of several weights, that is PyTorch in the engine's variants, which are first held
        against the model as it is ``written``. Raises ParityError, naming the first module that diverges, if a rule is
        broken.
        """
        entry, source = engine.entry, self.universal.source
        part = None if entry.segment is None else source.parts[entry.segment]
        variants = (entry.variants or {}) if part is None else part.variants
        limit = exact_limit(engine.graph, self.universal.spec.depth)
        if (form := self.form(engine, submodel, variants)) is not None:
            lowered = Reference(None, form if part is None else part.module(form), outputs.specs)
            answers = in_torch(lowered, cases)
            require_form(entry.id, judge(written, answers, cases, outputs, limit), limit)
        module = self.module(engine, submodel, variants)
        if part is not None:
            module = part.module(module)
        reference = Reference(source.architecture.routing, module, outputs.specs)
        exact_engine, graph = self.graph(engine)
        found = self.run(exact_engine, [case.feeds for case in cases])
        expected = replayed(reference, cases, entry.routing, found, limit.atol)
        verdict = judge(expected, found, cases, outputs, limit)
        run = ProofRun(graph, engine.template.module_outputs, self.folder, reference, entry.routing, outputs)
        subject = f"engine {entry.id}, without the rounding of activations"
        require_parity(subject, verdict, run, cases, found, limit, limit.rule)
        return limit.rule

    def module(self, engine: Emitted, submodel: Submodel, variants: Mapping[str, str]) -> torch.nn.Module:
        """``submodel`` in PyTorch with the numbers that the integers of ``engine`` stand for, and where it reads folded
        tensors, in its ``variants``."""
        return self._stored(engine).narrow(submodel, variants)

    def form(self, engine: Emitted, submodel: Submodel, variants: Mapping[str, str]) -> torch.nn.Module | None:
        """``submodel`` in PyTorch in ``variants``, without any rounding of weights; None where ``engine`` reads no
        folded tensor."""
        lower = self.universal.source.architecture.lower
        if lower is None or not self._stored(engine).folded:
            return None
        return lower(self.universal.narrow(submodel), variants)

    def _stored(self, engine: Emitted) -> StoredModel:
        names = frozenset(chain.from_iterable(map(parts_of, engine.template.weights)))
        if names not in self.stored_weights:
            path = self.folder / f"rounded{len(self.stored_weights)}.safetensors"
            self.stored_weights[names] = with_stored_weights(self.universal, names, path, self.chosen)
        return self.stored_weights[names]

    def graph(self, engine: Emitted) -> tuple[EngineEntry, bytes]:
        """``engine`` without the rounding of activations: as one to run, until the next is made, and its graph."""
        graph = exact(engine.graph)
        (self.folder / _GRAPH_FILE).write_bytes(graph)
        return replace(engine.entry, file=_GRAPH_FILE), graph


def exact_limit(graph: bytes, depth: int) -> Tolerance:
    """The tolerance of float32 for the emitted engine ``graph`` of ``depth`` layers without the rounding of its
    activations, wider where products of 4 bits have many inputs."""
    limit = tolerance_for(TRACED, depth)
    inputs = [
        attribute.i
        for node in onnx.ModelProto.FromString(graph).graph.node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "K"
    ]
    return limit.wider(math.sqrt(max(1.0, max(inputs, default=0) / _CHAIN)))


def in_torch(reference: Reference, cases: Sequence[Case]) -> list[Arrays]:
    """Answers of ``reference``, in float64, to ``cases``: outputs by name."""
    with in_float64(reference.module):
        answers = [reference.run(case.feeds)[0] for case in cases]
    names = [spec.name for spec in reference.specs]
    return [dict(zip(names, (tensor.numpy() for tensor in tensors), strict=True)) for tensors in answers]


def require_form(engine: str, verdict: Verdict, limit: Tolerance) -> None:
    """Raises ParityError where the ``verdict`` on the form in which PyTorch computes what ``engine`` does is broken."""
    if verdict.broken is not None:
        problem = verdict.broken.describe()
        raise ParityError(
            f"engine {engine}: its variants are not the model in PyTorch: {problem}; allowed {limit.rule}"
        )
