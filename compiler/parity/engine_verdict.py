"""The verdict on one engine, asked alike when it is built and when a written bundle is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...bundle.entries.engine_entry import EngineEntry, ParityOutput, ParityReceipt, ParityRouting
from ...bundle.manifest import Manifest
from ...bundle.roles import continued_input, ids_input
from ...exporters.universal import UniversalModel
from ...runtime.inputs.arrays import Arrays
from .evidence.cases import Case
from .evidence.compare import Tolerance, tolerance_for
from .evidence.replayed import Replayed
from .judge import JudgedOutputs, Verdict, judge


@dataclass(frozen=True)
class EngineVerdict:
    """Parity of one engine through the runtime; ``problem`` says which routes or output, and which case, broke the
    rule."""

    engine: str
    outputs: tuple[ParityOutput, ...]
    problem: str | None = None
    routing: tuple[ParityRouting, ...] | None = None

    @staticmethod
    def of(engine: EngineEntry, verdict: Verdict) -> EngineVerdict:
        problem = verdict.broken.describe() if verdict.broken is not None else None
        return EngineVerdict(engine.id, verdict.outputs, problem, verdict.routes)


def judge_engine(
    manifest: Manifest,
    universal: UniversalModel,
    engine: EngineEntry,
    cases: Sequence[Case],
    reference: Replayed,
    found: Sequence[Arrays],
) -> Verdict:
    """The outputs ``found`` on ``cases`` against PyTorch's, by the rule and the tolerance of the gate."""
    outputs = judged_outputs(manifest, universal, engine.segment)
    return judge(reference, found, cases, outputs, tolerance_of(engine, universal))


def judged_outputs(manifest: Manifest, universal: UniversalModel, segment: str | None) -> JudgedOutputs:
    """The outputs of engines of ``segment``, or of whole engines for None."""
    computed = manifest.exits.computed_from if manifest.exits else ()
    # The mask of what an encoder reads says nothing of the positions that a decoder answers.
    mask = universal.source.signature.mask if continued_input(manifest) == ids_input(manifest) else None
    return JudgedOutputs(manifest.interface(segment)[1], computed, mask)


def receipt_of(
    verdict: Verdict,
    limit: Tolerance,
    cases: Sequence[Case],
    *,
    reference: str,
    rule: str,
    graph_sha256: str,
    weights_sha256: str,
) -> ParityReceipt:
    """The receipt of a ``verdict`` that nothing broke; ``reference`` says which PyTorch module."""
    return ParityReceipt(
        reference=f"PyTorch {torch.__version__} module {reference}",
        rule=rule,
        atol=limit.atol,
        rtol=limit.rtol,
        min_cosine=limit.min_cosine,
        cases=tuple(case.name for case in cases),
        outputs=verdict.outputs,
        graph_sha256=graph_sha256,
        weights_sha256=weights_sha256,
        routing=verdict.routes,
        rms=limit.rms,
    )


def tolerance_of(engine: EngineEntry, universal: UniversalModel) -> Tolerance:
    """The limits of the gate for ``engine``."""
    return tolerance_for(engine.precision, universal.spec.depth)
