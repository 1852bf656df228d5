"""What the last verification says of one engine of a written bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..exporters.universal import UniversalModel
from ..runtime.bundle import Bundle
from ..runtime.manifest import EngineEntry, ParityOutput
from .cases import Case
from .parity import Arrays, compare, tolerance_for


@dataclass(frozen=True)
class EngineVerdict:
    """Parity of one engine through the runtime; ``problem`` says which output and case broke the rule."""

    engine: str
    outputs: tuple[ParityOutput, ...]
    problem: str | None = None


def verdict_of(
    bundle: Bundle,
    universal: UniversalModel,
    engine: EngineEntry,
    cases: Sequence[Case],
    reference: Sequence[Arrays],
    found: Sequence[Arrays],
) -> EngineVerdict:
    """The outputs ``found`` on ``cases`` against PyTorch's, by the rule of the gate."""
    limit = tolerance_for(str(bundle.manifest.provenance.profile["precision"]), universal.spec.depth)
    exits = bundle.manifest.exits
    computed_from = exits.computed_from if exits else {}
    comparisons = compare(reference, found, [case.name for case in cases], limit, computed_from)
    broken = next((comparison.describe() for comparison in comparisons if not comparison), None)
    return EngineVerdict(engine.id, tuple(comparison.output for comparison in comparisons), broken)
