"""Acceptance suites that no engine's receipt shows: what loading kept, what slicing keeps, where rows leave a chain."""

from __future__ import annotations

from collections.abc import Sequence

from ...bundle.manifest import Proof
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import ParityError
from ..work.clock import Clock
from .evidence.compare import tolerance_for
from .evidence.references import References
from .prove_exits import prove_exits
from .prove_slices import prove_slice


def prove(bundle: Bundle, chosen: Sequence[Submodel], references: References, clock: Clock) -> tuple[Proof, ...]:
    """Every suite on the engines of ``bundle``, which answer through the runtime. Raises ParityError if one fails."""
    universal, cases = references.universal, references.cases
    whole = universal.spec.universal()
    smallest = min(engine.bucket for engine in bundle.manifest.engines if engine.submodel == whole.id)
    prove_load = universal.source.architecture.prove_load
    proofs = list(prove_load(cases[smallest][0].feeds)) if prove_load is not None else []
    for submodel in clock.each(chosen):
        if submodel.bits in (None, whole.bits):  # a slice of PyTorch's weights, whatever engines make of them
            proofs += prove_slice(submodel, submodel.at(smallest), references)
        limit = tolerance_for(universal.source.precision(submodel), universal.spec.depth)
        proofs += prove_exits(bundle, submodel, references, limit)
    for proof in proofs:
        if not proof.worst <= proof.limit:  # NaN fails too
            raise ParityError(f"{proof.suite} suite, {proof.subject}: {proof.worst:.3g}, allowed {proof.limit:.3g}")
    return tuple(proofs)
