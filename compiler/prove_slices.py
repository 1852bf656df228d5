"""Slice parity: a submodel equals the universal model with everything that it dropped set to zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..elastic import Submodel
from ..exporters.universal import PREFIX, UniversalModel
from ..runtime.manifest import Proof
from .cases import Case
from .parity import Tolerance


def prove_slice(
    universal: UniversalModel, submodel: Submodel, cases: Sequence[Case], limit: Tolerance
) -> Iterator[Proof]:
    """The proof for ``submodel``, in torch alone; none where it slices no parameters but by coupled axes.

    A coupled axis has no zeros to compare with: both sides have it narrowed, and so do they what slices nothing: depth,
    capacity, sequence. Computed in float64, since the rounding of
    sums of other lengths says nothing about slices, and weights may amplify it beyond every limit.
    """
    zeroable = {cut.axis for cut in universal.spec.slices} - universal.spec.coupled
    if all(value == axis.size for axis, value in submodel.values if axis.name in zeroable):
        return
    kept = {axis.name: value for axis, value in submodel.values if axis.name not in zeroable}
    whole = universal.narrow(universal.spec.submodel(kept)).double()
    zeroed = {
        name: _zeroed(universal, name.removeprefix(PREFIX), parameter.data, submodel)
        for name, parameter in whole.named_parameters()
    }
    narrowed = universal.narrow(submodel).double()
    worst = 0.0
    for case in cases:
        given = [torch.from_numpy(np.asarray(array)) for array in case.feeds.values()]
        inputs = tuple(array.double() if array.is_floating_point() else array for array in given)
        with torch.no_grad(), _float64_by_default():
            expected = torch.func.functional_call(whole, zeroed, inputs)
            found = narrowed(*inputs)
        for reference, output in zip(expected, found, strict=True):
            scale = max(1.0, float(reference.double().square().mean().sqrt()))
            worst = max(worst, float((reference - output).abs().max()) / scale)
    yield Proof("slice", submodel.id, len(cases), worst, limit.atol)


def _zeroed(universal: UniversalModel, name: str, data: torch.Tensor, submodel: Submodel) -> torch.Tensor:
    for cut in universal.spec.slices_of(name):
        kept = submodel[cut.axis] * cut.unit
        if kept < data.shape[cut.dim]:
            data = data.clone()
            data.narrow(cut.dim, kept, data.shape[cut.dim] - kept).zero_()
    return data


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """What a module makes of plain numbers, such as the lowest finite one, has the type of its weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
