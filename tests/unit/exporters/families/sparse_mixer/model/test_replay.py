from __future__ import annotations

from typing import Any

import pytest
import torch
from nestforge.errors import ParityError
from nestforge.exporters.families.sparse_mixer.model import SparseMixer
from nestforge.exporters.families.sparse_mixer.replay import replay
from support.tiny_mixer import mixer_config, tiny_mixer

IDS = torch.randint(1, 24, (2, 16), generator=torch.Generator().manual_seed(1))
INPUTS = (IDS, torch.zeros_like(IDS))
POLICIES: dict[str, dict[str, Any]] = {
    "experts": {"router": "experts_choose"},
    "prioritized": {"router": "tokens_choose"},
    "in turn": {"router": "tokens_choose", "batch_prioritized": False},
}


def model_of(policy: str, **overrides: Any) -> SparseMixer:
    return tiny_mixer(mixer_config(**{"capacity_factor": 0.5, **POLICIES[policy], **overrides}))


def own_routes(model: SparseMixer) -> dict[str, torch.Tensor]:
    return {f"routes.{layer}": routes.own for layer, routes in model.routed(*INPUTS)[1].items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_own_routes_change_nothing(policy: str) -> None:
    model = model_of(policy)
    found = replay(model, INPUTS, own_routes(model))
    for mine, alone in zip(found.outputs, model(*INPUTS), strict=True):
        torch.testing.assert_close(mine, alone, rtol=0, atol=0)
    assert list(found.routes) == ["routes.1", "routes.2"]
    for judged in found.routes.values():
        assert (judged.score_gap, judged.differing) == (0.0, 0)
        # 32 tokens in one group, four experts of 4 slots.
        assert judged.made == (16 if policy == "experts" else 32)


def test_shares_are_those_of_the_given_routes() -> None:
    model = model_of("experts")
    given = own_routes(model)
    given["routes.1"] = torch.arange(4).expand(1, 4, 4).clone()
    judged = replay(model, INPUTS, given).routes["routes.1"]
    scores = model.routed(*INPUTS)[1][1].scores
    assert judged.shares["tokens_dropped"] == 28 / 32
    assert judged.shares["slots_used"] == 1
    assert judged.shares["mean_gate"] == pytest.approx(float(scores[0, :4].mean()), rel=1e-5)

    model = model_of("prioritized")
    given = own_routes(model)
    given["routes.1"] = torch.full((1, 32), -1)
    given["routes.1"][0, 5] = 3
    judged = replay(model, INPUTS, given).routes["routes.1"]
    scores = model.routed(*INPUTS)[1][1].scores
    assert judged.shares == {
        "tokens_dropped": 31 / 32,
        "slots_used": 1 / 16,
        "mean_gate": pytest.approx(float(scores[0, 5, 3]), rel=1e-5),
    }


def test_later_layers_are_judged_behind_the_given_routes() -> None:
    """What a layer decides follows from the routes before it, so those that were given make its own."""
    model = model_of("experts")
    own = own_routes(model)
    given = {**own, "routes.1": own["routes.1"].flip(1).contiguous()}
    found = replay(model, INPUTS, given)
    assert found.routes["routes.1"].score_gap > 0
    assert found.routes["routes.1"].where.startswith("layer 1, group 0, expert ")
    assert found.routes["routes.2"].differing > 0
    with torch.no_grad():
        _, routes = model.routed(*INPUTS, {1: given["routes.1"]})
    given["routes.2"] = routes[2].own
    assert replay(model, INPUTS, given).routes["routes.2"].score_gap == 0


def test_another_order_is_the_same_choice() -> None:
    model = model_of("experts")
    given = own_routes(model)
    given["routes.2"] = given["routes.2"].clone()
    given["routes.2"][0, 1] = given["routes.2"][0, 1].flip(0)
    judged = replay(model, INPUTS, given).routes["routes.2"]
    assert judged.differing == 0
    assert judged.score_gap > 0
    assert judged.where.startswith("layer 2, group 0, expert 1: ranked token ")


def test_equal_scores_make_equal_routes() -> None:
    """Two rows of one text: the same token of the other row is as good."""
    model = model_of("experts", attention_layers=(0, 1, 2, 3), capacity_factor=0.38)  # 3 slots
    ids = IDS[:1].expand(2, -1).contiguous()
    inputs = (ids, torch.zeros_like(ids))
    own = {f"routes.{layer}": routes.own for layer, routes in model.routed(*inputs)[1].items()}
    twins = {name: (routes + 16) % 32 for name, routes in own.items()}  # the same tokens of the other row
    judged = replay(model, inputs, {**own, "routes.1": twins["routes.1"]}).routes["routes.1"]
    assert judged.differing > 0
    assert judged.score_gap <= 1e-6


@pytest.mark.parametrize(
    ("policy", "value", "message"),
    [
        ("experts", 32, "routes.2: expected 0..31, got 32 at [0, 0, 1]"),
        ("experts", -1, "routes.2: expected 0..31, got -1 at [0, 0, 1]"),
        ("experts", None, r"routes.2: group 0, expert 0: took token {first} twice"),
        ("prioritized", 4, "routes.2: expected -1..3, got 4 at [0, 1]"),
        ("prioritized", -2, "routes.2: expected -1..3, got -2 at [0, 1]"),
    ],
)
def test_a_choice_that_cannot_be(policy: str, value: int | None, message: str) -> None:
    model = model_of(policy)
    given = {name: routes.contiguous().clone() for name, routes in own_routes(model).items()}
    first = int(given["routes.2"].flatten()[0])
    given["routes.2"].flatten()[1] = first if value is None else value
    with pytest.raises(ParityError) as error:
        replay(model, INPUTS, given)
    assert str(error.value) == message.format(first=first)


def test_more_tokens_than_slots() -> None:
    model = model_of("prioritized")
    given = own_routes(model)
    given["routes.1"] = torch.zeros(1, 32, dtype=torch.int64)
    with pytest.raises(ParityError) as error:
        replay(model, INPUTS, given)
    assert str(error.value) == "routes.1: group 0, expert 0: took 32 tokens into 4 slots"


@pytest.mark.parametrize(
    ("policy", "given", "message"),
    [
        ("experts", torch.zeros(1, 4, 5, dtype=torch.int64), "expected int64 [1, 4, 4], got int64 [1, 4, 5]"),
        ("experts", torch.zeros(1, 3, 4, dtype=torch.int64), "expected int64 [1, 4, 4], got int64 [1, 3, 4]"),
        ("experts", torch.zeros(1, 4, 4, dtype=torch.int32), "expected int64 [1, 4, 4], got int32 [1, 4, 4]"),
        ("in turn", torch.zeros(2, 16, dtype=torch.int64), "expected int64 [1, 32], got int64 [2, 16]"),
    ],
)
def test_another_count(policy: str, given: torch.Tensor, message: str) -> None:
    model = model_of(policy)
    with pytest.raises(ParityError) as error:
        replay(model, INPUTS, {**own_routes(model), "routes.1": given})
    assert str(error.value) == f"routes.1: {message}"


def test_routes_of_another_model() -> None:
    model = model_of("experts")
    with pytest.raises(ParityError, match=r"routes routes\.1, routes\.3: expected routes\.1, routes\.2"):
        replay(model, INPUTS, {"routes.1": torch.zeros(1), "routes.3": torch.zeros(1)})
    with pytest.raises(ParityError, match=r"routes none: expected routes\.1, routes\.2"):
        replay(model, INPUTS, {})
