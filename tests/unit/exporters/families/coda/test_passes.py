"""Tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.errors import ParityError
from nestforge.exporters.families.coda.family import TokenRoutes
from nestforge.exporters.families.coda.ops import elastic_spec
from nestforge.exporters.families.coda.passes import lower, replay
from nestforge.exporters.modules.layers import Answering
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


BUCKET = Bucket(2, 10)


def stated(reduction: int, **settings: Any) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, int | str]]:
    config = coda_config(**settings)
    routes, submodel = TokenRoutes(config), elastic_spec(config).submodel({"coda.reduction": reduction})
    entries = [(entry.name, entry.shape) for entry in routes.entries(submodel, BUCKET)]
    return entries, dict(routes.metadata(submodel, BUCKET))


def test_the_manifest_says_which_k() -> None:
    entries, metadata = stated(4)
    assert entries == [("routes.0", (2, 3)), ("routes.1", (2, 3))]
    assert metadata == {
        "reduction": 4,
        "tokens per row": 10,
        "tokens selected": 3,
        "router": "soft_top_k",
        "keys and values of": "all",
        "padding is routed": "no",
        "soft top-k": "3 rounds from epsilon 4 by 0.7 to 0.5, b from zero",
    }
    assert stated(4, conditional_layers=(1,))[0] == [("routes.1", (2, 3))]


def test_where_nothing_is_compared_nothing_is_returned() -> None:
    entries, metadata = stated(4, router="first_k")
    assert (entries, metadata["tokens selected"], metadata["router"]) == ([], 3, "first_k")
    entries, metadata = stated(1, reduction_of_one="dense")
    assert (entries, metadata["tokens selected"], metadata["router"]) == ([], 10, "none")


def test_layers_may_differ_in_k() -> None:
    entries, metadata = stated(4, tokens_selected={"10": {"4": (4, 2)}})
    assert entries == [("routes.0", (2, 4)), ("routes.1", (2, 2))]
    assert (metadata["tokens per row"], metadata["tokens selected"]) == (10, "4, 2")
