"""What the last verification says of one engine of a written bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..exporters.universal import UniversalModel
from ..runtime.bundle import Bundle
from ..runtime.manifest import EngineEntry, ParityDecision, ParityOutput
from .cases import Case
from .parity import Arrays, Tolerance, compare, judged, tolerance_for
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
    exits = bundle.manifest.exits
    computed_from = exits.computed_from if exits else {}
    names, mask = [case.name for case in cases], universal.source.signature.mask
    specs = bundle.manifest.interface(engine.segment)[1]
    masks = [case.feeds.get(mask) if mask else None for case in cases]
    wanted, got = (
        [judged(arrays, specs, engine.precision, hidden) for arrays, hidden in zip(outputs, masks, strict=True)]
        for outputs in (reference.outputs, found)
    )
    comparisons = compare(wanted, got, names, tolerance_of(engine, universal), computed_from)
    broken = reference.broken or next((comparison for comparison in comparisons if not comparison), None)
    outputs = tuple(comparison.output for comparison in comparisons)
    return EngineVerdict(engine.id, outputs, broken.describe() if broken is not None else None, reference.decisions)


def tolerance_of(engine: EngineEntry, universal: UniversalModel) -> Tolerance:
    """The tolerance that the gate of the build had."""
    return tolerance_for(engine.precision, universal.spec.depth)
