"""Slice parity: a submodel equals the universal model with everything that it dropped set to zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...elastic import Submodel
from ...exporters.universal import PREFIX, UniversalModel
from ...runtime.bundle.manifest import Proof
from .cases import Case
from .float64 import float64_inputs, in_float64, widened
from .reference import Reference, References

# Of an output's size, whatever the precision of engines: both sides are PyTorch in float64, whose unit roundoff is
# 1e-16. Measured: 3e-15. A model whose float32 is off by less than 1 %, the bound of the gate, stays below 1e-10.
_SLICE_LIMIT = 1e-9


def prove_slice(
    universal: UniversalModel, submodel: Submodel, references: References, cases: Sequence[Case]
) -> Iterator[Proof]:
    """The proof for ``submodel``, in torch alone; none where it slices no parameters but by jointly normalised axes.

    A jointly normalised axis has no zeros to compare with: both sides have it narrowed, and so do they what slices
    nothing: depth, capacity, sequence. Computed in float64, since the rounding of sums of other lengths says nothing
    about slices, and weights may amplify it beyond every limit.
    """
    zeroable = {cut.axis for cut in universal.spec.slices} - universal.spec.jointly_normalised
    if all(value == axis.size for axis, value in submodel.values if axis.name in zeroable):
        return
    kept = {axis.name: value for axis, value in submodel.values if axis.name not in zeroable}
    whole = widened(universal.narrow(universal.spec.submodel(kept)))
    zeroed = {
        name: _zeroed(universal, name.removeprefix(PREFIX), parameter.data, submodel)
        for name, parameter in whole.named_parameters()
    }
    narrowed = references.of(submodel)
    figures = []
    for case in cases:
        inputs = float64_inputs(case.feeds)
        with in_float64():
            expected = case.read(_named(narrowed, torch.func.functional_call(whole, zeroed, inputs)), narrowed.specs)
            found = case.read(_named(narrowed, narrowed.wide(*inputs)), narrowed.specs)
        for name, reference in expected.items():
            scale = max(1.0, float(np.sqrt(np.mean(np.square(reference)))))
            figures.append(np.abs(reference - found[name]).max() / scale)
    yield Proof("slice", submodel.id, len(cases), float(np.max(figures)), _SLICE_LIMIT)  # NaN if any is


def _zeroed(universal: UniversalModel, name: str, data: torch.Tensor, submodel: Submodel) -> torch.Tensor:
    for cut in universal.spec.slices_of(name):
        kept = submodel[cut.axis] * cut.unit
        if kept < data.shape[cut.dim]:
            data = data.clone()
            data.narrow(cut.dim, kept, data.shape[cut.dim] - kept).zero_()
    return data


def _named(reference: Reference, outputs: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
    return {spec.name: tensor.numpy() for spec, tensor in zip(reference.specs, outputs, strict=True)}
