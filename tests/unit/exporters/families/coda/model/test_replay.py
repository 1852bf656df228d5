from __future__ import annotations

import pytest
import torch
from nestforge.errors import ParityError
from nestforge.exporters.families.coda.passes import replay
from support.tiny_coda import coda_config, tiny_coda

IDS = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
INPUTS = (IDS, torch.ones_like(IDS))
MODEL = tiny_coda(coda_config()).double()
MODEL.reduction = 4
OUTPUT, OWN = MODEL.routed(*INPUTS)
ROUTES = {f"routes.{layer}": selection.chosen for layer, selection in OWN.items()}


def test_own_tokens_have_no_gap() -> None:
    found = replay(MODEL, INPUTS, ROUTES)
    assert torch.equal(found.outputs[0], OUTPUT)
    for name, judged in found.routes.items():
        assert (judged.score_gap, judged.made, judged.differing) == (0, 4, 0), name
        assert judged.shares.keys() == {"mean_gate", "gates_vanished"}


def test_another_token_is_judged_by_the_scores_and_named() -> None:
    last = OWN[0].ranked[1].sort(descending=True).indices[-1]
    given = {**ROUTES, "routes.0": ROUTES["routes.0"].clone()}
    given["routes.0"][1, 1] = last
    judged = replay(MODEL, INPUTS, given).routes["routes.0"]
    second = ROUTES["routes.0"][1, 1]
    gap = float(OWN[0].ranked[1, second] - OWN[0].ranked[1, last])
    assert judged.score_gap == pytest.approx(gap, rel=1e-12)
    assert judged.differing == 1
    assert judged.where.startswith(f"layer 0, row 1: took token {int(last)} (")
    assert f" before {int(second)} (" in judged.where


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "routes none: expected routes.0, routes.1"),
        ({**ROUTES, "routes.1": ROUTES["routes.1"][:, :1]}, r"routes.1: expected int64 \[2, 2\], got int64 \[2, 1\]"),
        ({**ROUTES, "routes.1": torch.tensor([[0, 8], [1, 2]])}, r"routes.1: expected 0..7, got 8 at \[0, 1\]"),
        ({**ROUTES, "routes.0": torch.tensor([[0, 1], [2, 2]])}, "routes.0: row 1: took token 2 twice"),
    ],
    ids=["none", "another k", "no such token", "twice"],
)
def test_what_no_router_can_select_is_refused(given: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ParityError, match=f"^{message}$"):
        replay(MODEL, INPUTS, given)
