"""Segments run one after the other return what one pass over the whole model returns at each exit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nestforge.exporters.families.cost_eff.model import EveryExit, FirstSegment, LaterSegment
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.cost_eff_models import save_tiny

IDS = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])


@pytest.mark.parametrize("layers", [(1, 3, 4), (3, 4), (4,)])
def test_a_chain_equals_one_pass(tmp_path: Path, layers: tuple[int, ...]) -> None:
    model = load_universal(open_source(save_tiny(tmp_path / "m"))).module.model
    with torch.no_grad():
        whole = EveryExit(model, layers, layers[-1])(IDS, MASK)
        outputs: list[torch.Tensor] = []
        state = IDS
        for number, (first, last) in enumerate(zip((0, *layers), layers, strict=False)):
            kind = LaterSegment if number else FirstSegment
            returned = kind(model, first, last, passes_on=last != layers[-1])(state, MASK)
            state = returned[0]
            outputs += returned
        logits, entropy = model(IDS, MASK)
    torch.testing.assert_close(tuple(outputs), whole, rtol=0, atol=0)
    torch.testing.assert_close(whole[-2:], (logits, entropy), rtol=0, atol=0)
