"""The tight half of an integer engine's gate: all of it but the rounding of activations (precision/exact.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...elastic import Submodel
from ...errors import ParityError
from ..graph.precision.exact import exact, with_stored_weights
from ..work.staging import write_synced
from .cases import Case
from .compare import tolerance_for
from .divergence import first_divergence
from .judge import judge
from .reference import Reference, replayed

if TYPE_CHECKING:
    from ..build.build_engine import Emitted, EngineBuilder

_FILE = "exact.onnx"


def prove_exact(builder: EngineBuilder, engine: Emitted, submodel: Submodel, cases: Sequence[Case]) -> str:
    """The rule that ``engine``, without the rounding of activations, keeps against PyTorch with its weights.

    Raises ParityError, naming the first module that diverges, if it does not.
    """
    entry, folder, source = engine.entry, builder.stage.folder, builder.universal.source
    names = frozenset(engine.template.weights)
    if names not in builder.stored_weights:
        builder.stored_weights[names] = with_stored_weights(builder.universal, names)
    module = builder.stored_weights[names].narrow(submodel)
    if entry.segment is not None and source.exits is not None:
        index = [segment.name for segment in source.exits.entry.segments].index(entry.segment)
        module = source.exits.segment(module, index)
    interface = builder.interface(entry.segment)
    reference = Reference(source.family, module, interface.specs)
    limit, graph = tolerance_for("fp32", builder.universal.spec.depth), exact((folder / entry.file).read_bytes())
    write_synced(folder / _FILE, graph)
    try:
        found = builder.run(replace(entry, file=_FILE), [case.feeds for case in cases])
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
