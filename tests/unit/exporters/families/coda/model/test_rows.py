from __future__ import annotations

import pytest
import torch
from nestforge.exporters.families.coda.routing import Rows, TracedRows

TOKENS = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
PLACES = torch.tensor([[6, 0], [3, 4], [1, 2]])


@pytest.mark.parametrize("dispatch", ["gather", "one_hot"])
@pytest.mark.parametrize("combine", ["scatter", "one_hot"])
def test_every_variant_reads_and_adds_as_the_model_does(dispatch: str, combine: str) -> None:
    traced, values = TracedRows({"coda.dispatch": dispatch, "coda.combine": combine}), torch.randn(3, 2, 4)
    read, added = traced.read(TOKENS, PLACES), traced.add(TOKENS, PLACES, values)
    for row in range(3):
        expected = TOKENS[row].clone()
        assert torch.equal(read[row], expected[PLACES[row]])
        expected[PLACES[row]] += values[row]
        assert torch.equal(added[row], expected)
    assert torch.equal(Rows().read(TOKENS, PLACES), read)
    assert torch.equal(Rows().add(TOKENS, PLACES, values), added)
