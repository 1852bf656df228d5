"""Acceptance suites that no engine's receipt shows: what loading kept, what slicing keeps, where rows leave a chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...bucket import Bucket
from ...bundle.manifest import Proof
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.universal import PREFIX
from ..work.clock import Clock
from .compare import size_of, tolerance_for
from .prove_exits import prove_exits
from .prove_padding import prove_padding
from .reading import in_float64
from .references import References

# Share of an output's size, whatever the precision of engines: both sides are PyTorch in float64, whose unit roundoff
# is 1e-16. Measured: 3e-15. A model whose float32 is off by less than 1 %, the bound of the gate, stays below 1e-10.
_SLICE_LIMIT = 1e-9
# The smaller cases of one bucket: what is proven in torch alone does not change with a size.
_MOST_CASES = 8


def prove(bundle: Bundle, chosen: Sequence[Submodel], references: References, clock: Clock) -> tuple[Proof, ...]:
    """Every suite on the engines of ``bundle``, which answer through the runtime. Raises ParityError if one fails."""
    universal, cases = references.universal, references.cases
    whole = universal.spec.universal()
    smallest = min(engine.bucket for engine in bundle.manifest.engines if engine.submodel == whole.id)
    prove_load = universal.source.architecture.prove_load
    proofs = list(prove_load(cases[smallest][0].feeds)) if prove_load is not None else []
    if universal.source.architecture.surveyed:
        proofs += prove_padding(references)
    for submodel in clock.each(chosen):
        if submodel.precision is None:  # a slice of PyTorch's weights, whatever engines make of them
            proofs += prove_slice(submodel, submodel.at(smallest), references)
        limit = tolerance_for(universal.source.precision(submodel), universal.spec.depth)
        proofs += prove_exits(bundle, submodel, references, limit)
    for proof in proofs:
        if not proof.worst <= proof.limit:  # NaN fails too
            raise ParityError(f"{proof.suite} suite, {proof.subject}: {proof.worst:.3g}, allowed {proof.limit:.3g}")
    return tuple(proofs)


def prove_slice(submodel: Submodel, bucket: Bucket, references: References) -> Iterator[Proof]:
    """The proof for ``submodel``, in torch alone, on the smaller cases of ``bucket``; none where it slices no
    parameters but by jointly normalised axes.

    A jointly normalised axis has no zeros to compare with: both sides have it narrowed, and so do they what slices
    nothing: depth, capacity, sequence. Computed in float64, since the rounding of sums of other lengths says nothing
    about slices, and weights may amplify it beyond every limit.
    """
    universal = references.universal
    zeroable = {cut.axis for cut in universal.spec.slices} - universal.spec.jointly_normalised
    if all(value == axis.size for axis, value in submodel.values if axis.name in zeroable):
        return
    kept = {axis.name: value for axis, value in submodel.values if axis.name not in zeroable}
    passed, asked = references.replayed(submodel, bucket), references.asked(submodel, bucket)
    narrowed = [pair for pair in zip(asked, passed.outputs, strict=True) if pair[0].name not in passed.in_float32]
    whole = references.of(universal.spec.submodel(kept))
    first = {
        name: [(cut.dim, submodel[cut.axis] * cut.unit) for cut in universal.spec.slices_of(name.removeprefix(PREFIX))]
        for name, _ in whole.module.named_parameters()
    }
    figures = []
    with in_float64(whole.module, first):
        for case, found in sorted(narrowed, key=lambda pair: pair[0].tokens)[:_MOST_CASES]:
            outputs, _ = whole.run(case.feeds)
            named = {spec.name: tensor.numpy() for spec, tensor in zip(whole.specs, outputs, strict=True)}
            for name, reference in case.read(named, whole.specs).items():
                figures.append(np.abs(reference - found[name]).max() / size_of(reference))
    # The figure is no number where any is none.
    yield Proof("slice", submodel.id, min(len(narrowed), _MOST_CASES), float(np.max(figures)), _SLICE_LIMIT)
