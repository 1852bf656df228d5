from __future__ import annotations

import pytest
import torch
from nestforge.exporters.families.coda.passes import Answering, lower
from support.tiny_coda import coda_config, tiny_coda

IDS = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, 5:] = 0


@pytest.mark.parametrize("combine", ["scatter", "one_hot"])
def test_what_is_traced_answers_alike_and_returns_its_tokens(combine: str) -> None:
    module = Answering(tiny_coda(coda_config()))
    module.model.reduction = 2
    traced = lower(module, {"coda.dispatch": "gather", "coda.combine": combine})
    output, *routes = traced(IDS, MASK)
    torch.testing.assert_close(output, module(IDS, MASK)[0], rtol=0, atol=1e-5)
    assert [tuple(route.shape) for route in routes] == [(2, 4)] * 2
    own = {id(parameter) for parameter in module.parameters()}
    assert {id(parameter) for parameter in traced.parameters()} == own


def test_first_k_returns_no_tokens() -> None:
    module = Answering(tiny_coda(coda_config(router="first_k")))
    module.model.reduction = 2
    assert len(lower(module, {"coda.dispatch": "gather", "coda.combine": "scatter"})(IDS, MASK)) == 1
