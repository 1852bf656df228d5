"""What the last verification says of one engine of a written bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...exporters.universal import UniversalModel
from ...runtime.bundle.manifest import EngineEntry, ParityDecision, ParityOutput
from ...runtime.bundle.open_bundle import Bundle
from ...runtime.inputs.arrays import Arrays
from .cases import Case
from .compare import Tolerance, tolerance_for
from .judge import Interface, judge
from .reference import Replayed


@dataclass(frozen=True)
class EngineVerdict:
    """Parity of one engine through the runtime; ``problem`` says which decision or output, and which case, broke the
    rule."""

    engine: str
    outputs: tuple[ParityOutput, ...]
    problem: str | None = None
    decisions: tuple[ParityDecision, ...] | None = None


def verdict_of(
    bundle: Bundle,
    universal: UniversalModel,
    engine: EngineEntry,
    cases: Sequence[Case],
    reference: Replayed,
    found: Sequence[Arrays],
) -> EngineVerdict:
    """The outputs ``found`` on ``cases`` against PyTorch's, by the rule of the gate."""
    manifest = bundle.manifest
    computed = manifest.exits.computed_from if manifest.exits else ()
    interface = Interface(manifest.interface(engine.segment)[1], computed, universal.source.signature.mask)
    judgement = judge(reference, found, cases, interface, engine.precision, tolerance_of(engine, universal))
    broken = judgement.broken
    return EngineVerdict(
        engine.id, judgement.outputs, broken.describe() if broken is not None else None, judgement.decisions
    )


def tolerance_of(engine: EngineEntry, universal: UniversalModel) -> Tolerance:
    """The tolerance that the gate of the build had."""
    return tolerance_for(engine.precision, universal.spec.depth)
