"""Acceptance suites that no engine's receipt shows: what loading kept, what slicing keeps, where rows leave a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...elastic import Bucket, Submodel
from ...errors import ParityError
from ...exporters.universal import UniversalModel
from ...runtime.bundle.manifest import Proof
from ...runtime.bundle.open_bundle import Bundle
from ..work.clock import Clock
from .cases import Case
from .compare import tolerance_for
from .prove_exits import prove_exits
from .prove_slices import prove_slice
from .reference import References

# That a slice is proven on, of a range.
_LEAST_CASES = 5


def prove(
    universal: UniversalModel,
    bundle: Bundle,
    chosen: Sequence[Submodel],
    cases: Mapping[Bucket, Sequence[Case]],
    references: References,
    clock: Clock,
) -> tuple[Proof, ...]:
    """Every suite on the engines of ``bundle``, which answer through the runtime. Raises ParityError if one fails."""
    whole = universal.spec.universal()
    smallest = min(engine.bucket for engine in bundle.manifest.engines if engine.submodel == whole.id)
    prove_load = universal.source.architecture.prove_load
    proofs = list(prove_load(cases[smallest][0].feeds)) if prove_load is not None else []
    for submodel in clock.each(chosen):
        if submodel.bits in (None, whole.bits):  # a slice of PyTorch's weights, whatever engines make of them
            proofs += prove_slice(universal, submodel, references, _small(cases[submodel.at(smallest)]))
        limit = tolerance_for(universal.source.precision(submodel), universal.spec.depth)
        proofs += prove_exits(universal, bundle, submodel, references, cases, limit)
    for proof in proofs:
        if not proof.worst <= proof.limit:  # NaN fails too
            raise ParityError(f"{proof.suite} suite, {proof.subject}: {proof.worst:.3g}, allowed {proof.limit:.3g}")
    return tuple(proofs)


def _small(cases: Sequence[Case]) -> list[Case]:
    """The smaller of many cases, as those of a range are: what is proven in torch alone does not change with a size."""
    return sorted(cases, key=lambda case: case.tokens)[: max(_LEAST_CASES, len(cases) // 2)]
