"""Attention and routing of conditional adapters."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from nestforge.exporters.families.coda.attention import Attention, Places, RelativeBias, relative_bucket
from nestforge.exporters.families.coda.config import SoftTopK
from nestforge.exporters.families.coda.routing import Router, Rows, Selection, TracedRows, soft_top_k
from nestforge.exporters.modules.top_tokens import traced_highest
from support.tiny_coda import SCHEDULE, coda_config
from transformers.models.t5.modeling_t5 import T5Attention

ALL = torch.ones(2, 10, dtype=torch.bool)


def routed(is_token: torch.Tensor = ALL, count: int = 4, **settings: Any) -> tuple[Selection, torch.Tensor]:
    """The selection, and the scores that it rests on."""
    torch.manual_seed(0)
    router = Router(coda_config(**settings))
    normed = torch.randn(2, 10, 32)
    if "weight" in dict(router.named_parameters()):
        router.weight.data = torch.randn(32)
        return router(normed, is_token, count), normed @ router.weight
    return router(normed, is_token, count), normed[..., 0]


def test_soft_top_k_gates_and_takes_the_highest_scores() -> None:
    found, scores = routed()
    assert torch.equal(found.chosen, scores.topk(4).indices)
    expected = soft_top_k(scores, 4, SCHEDULE).gather(-1, found.chosen)
    torch.testing.assert_close(found.gates, expected)
    assert found.own is found.chosen


def test_sigmoid_gates_each_token_by_itself() -> None:
    found, scores = routed(router="sigmoid")
    assert torch.equal(found.chosen, scores.topk(4).indices)
    torch.testing.assert_close(found.gates, scores.sigmoid().gather(-1, found.chosen))


def test_first_k_has_no_vector_and_whole_gates() -> None:
    is_token = ALL.clone()
    is_token[1, 2:] = False
    found, _ = routed(is_token, router="first_k")
    assert found.chosen.tolist() == [[0, 1, 2, 3]] * 2
    assert found.gates.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert not list(Router(coda_config(router="first_k")).parameters())
    found, _ = routed(is_token, router="first_k", route_padding=True)
    assert found.gates.tolist() == [[1, 1, 1, 1]] * 2


def test_first_k_are_tokens_wherever_padding_stands() -> None:
    is_token = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0, 0, 0, 1]]) > 0
    found, _ = routed(is_token, router="first_k")
    assert found.chosen.tolist() == [[3, 4, 5, 6], [0, 2, 9, 1]]
    assert found.gates.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    found, _ = routed(is_token, router="first_k", route_padding=True)
    assert found.chosen.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("router", ["soft_top_k", "sigmoid"])
def test_padding_comes_last_and_gets_nothing(router: str) -> None:
    """Where a row has fewer tokens than are selected, padding fills the rest, by its place, at a gate of 0."""
    is_token = ALL.clone()
    is_token[1, 3:] = False
    found, scores = routed(is_token, router=router)
    assert torch.equal(found.chosen[0], scores[0].topk(4).indices)
    assert sorted(found.chosen[1, :3].tolist()) == [0, 1, 2]
    assert found.chosen[1, 3] == 3
    assert found.gates[1, 3] == 0


def test_padding_that_training_routed_is_a_token() -> None:
    is_token = ALL.clone()
    is_token[1, 3:] = False
    found, _ = routed(is_token, route_padding=True)
    everything, _ = routed(ALL)
    assert torch.equal(found.chosen, everything.chosen)
    assert torch.equal(found.gates, everything.gates)


def test_equal_scores_fall_to_the_lower_place() -> None:
    router = Router(coda_config())
    router.weight.data = torch.zeros(32)
    for choose in (router.choose, traced_highest):
        assert choose(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), 3).tolist() == [[1, 2, 0]]


def test_saturated_gates_are_ties_that_scores_are_not() -> None:
    """``selected_by``: of gates that are all 1 the first are taken, whatever their scores."""
    router = Router(coda_config(selected_by="gates", router="sigmoid"))
    router.weight.data = torch.ones(32)
    normed = torch.arange(1, 11).float().reshape(1, 10, 1).expand(1, 10, 32)
    assert router(normed, ALL[:1], 3).chosen.tolist() == [[0, 1, 2]]
    router = Router(coda_config(router="sigmoid"))
    router.weight.data = torch.ones(32)
    assert router(normed, ALL[:1], 3).chosen.tolist() == [[9, 8, 7]]


def test_given_tokens_replace_the_router_s_own_and_get_their_gates() -> None:
    torch.manual_seed(0)
    router = Router(coda_config())
    router.weight.data = torch.randn(32)
    normed, given = torch.randn(2, 10, 32), torch.tensor([[9, 0], [3, 4]])
    found = router(normed, ALL, 2, given)
    expected = soft_top_k(normed @ router.weight, 2, SCHEDULE)
    assert torch.equal(found.chosen, given)
    torch.testing.assert_close(found.gates, expected.gather(-1, given))
    assert not torch.equal(found.own, given)


ANNEALED = SoftTopK(rounds=20, epsilon=0.1, epsilon_start=4.0, epsilon_decay=0.7, initial="zero")
CONSTANT = SoftTopK(rounds=20, epsilon=1.0, epsilon_start=1.0, epsilon_decay=1.0, initial="zero")
SCHEDULES = {
    "annealed": ANNEALED,
    "sharp": replace(ANNEALED, epsilon=0.02),
    "constant": CONSTANT,
    "from minus the scores": replace(CONSTANT, initial="minus_scores"),
    "annealed, from minus the scores": replace(ANNEALED, initial="minus_scores"),
    "one round": replace(ANNEALED, rounds=1),
}


def literal(scores: torch.Tensor, count: int, schedule: SoftTopK) -> torch.Tensor:
    """The paper's loop over the vector b and the number a, in float64, with nothing done against overflow."""
    s = scores.double()
    b = torch.zeros_like(s) if schedule.initial == "zero" else -s
    a = torch.zeros_like(s[..., :1])
    for number in range(schedule.rounds):
        epsilon = max(schedule.epsilon_start * schedule.epsilon_decay**number, schedule.epsilon)
        a = epsilon * math.log(count) - epsilon * torch.exp((s + b) / epsilon).sum(-1, keepdim=True).log()
        b = torch.minimum(-s - a, torch.zeros_like(s))
    return torch.exp((s + b + a) / schedule.epsilon)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(("tokens", "count"), [(512, 171), (64, 1), (64, 64), (7, 3)])
def test_the_stable_form_is_the_paper_s_loop(tokens: int, count: int, schedule: SoftTopK) -> None:
    """Where the loop neither overflows nor underflows: float64 to 1e-9, float32 to 1e-4."""
    torch.manual_seed(tokens + count)
    scores = torch.randn(4, tokens, dtype=torch.float64)
    expected = literal(scores, count, schedule)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(soft_top_k(scores, count, schedule), expected, rtol=0, atol=1e-9)
    found = soft_top_k(scores.float(), count, schedule)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_scores_give_numbers(dtype: torch.dtype) -> None:
    scores = torch.randn(3, 32, dtype=dtype)
    scores[0, 5:], scores[1] = -1e9, -1e9
    for schedule in SCHEDULES.values():
        gates = soft_top_k(scores, 8, schedule)
        assert ((gates >= 0) & (gates <= 1)).all()


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


def test_shared_keys_are_those_of_neighbouring_heads() -> None:
    """Grouped attention is that of every head with its group's keys and values repeated."""
    torch.manual_seed(0)
    grouped = Attention(coda_config(num_key_value_heads=2)).requires_grad_(False)
    whole = Attention(coda_config()).requires_grad_(False)
    for part in ("query", "output"):
        getattr(whole, part).weight = getattr(grouped, part).weight
    for part in ("key", "value"):
        rows = getattr(grouped, part).weight.view(2, 8, 32)
        getattr(whole, part).weight.data = rows.repeat_interleave(2, 0).flatten(0, 1)
    asking, read, added = torch.randn(3, 2, 32), torch.randn(3, 5, 32), torch.randn(3, 4, 2, 5)
    found, expected = (module(asking, read, added, None, None) for module in (grouped, whole))
    torch.testing.assert_close(found, expected)
    assert found.shape == (3, 2, 32)


MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def test_buckets_are_those_of_t5() -> None:
    found = [relative_bucket(step) for step in range(-600, 600)]
    assert found == T5Attention._relative_position_bucket(torch.arange(-600, 600), bidirectional=True).tolist()


def test_every_pair_reads_its_bucket() -> None:
    bias = RelativeBias(3)
    bias.weight.data = torch.randn(32, 3)
    found = bias(300)  # longer than what the buckets tell apart
    assert found.shape == (3, 300, 300)
    for query in range(0, 300, 13):
        for key in range(0, 300, 7):
            assert torch.equal(found[:, query, key], bias.weight[relative_bucket(key - query)])


def test_masks_and_biases_follow_the_selected_tokens() -> None:
    relative = RelativeBias(3)
    relative.weight.data = torch.randn(32, 3)
    bias = relative(4)
    places = Places.of(MASK, bias, relative, None)
    asking, read = torch.tensor([[2, 0], [1, 3]]), torch.tensor([[3, 1, 2], [0, 2, 1]])
    lowest = torch.finfo(torch.float32).min
    for row in range(2):
        hidden = torch.where(MASK[row] > 0, 0.0, lowest)
        whole, rows, both = places.added()[row], places.added(asking)[row], places.added(asking, read)[row]
        torch.testing.assert_close(whole, bias + hidden)
        torch.testing.assert_close(rows, (bias + hidden)[:, asking[row]])
        torch.testing.assert_close(both, (bias + hidden)[:, asking[row]][..., read[row]])


def test_without_a_bias_the_mask_is_all_that_is_added() -> None:
    places = Places.of(MASK, torch.zeros(2, 4, 1), None, None)
    assert places.added().shape == (2, 1, 1, 4)
    assert places.added(torch.tensor([[2], [1]]), torch.tensor([[3], [1]])).shape == (2, 1, 1, 1)
    assert places.turn() is None


def test_selected_tokens_are_turned_by_their_own_positions() -> None:
    places = Places.of(MASK, torch.zeros(2, 4, 1), None, 8)
    states, tokens = torch.randn(2, 3, 4, 8), torch.tensor([[2, 0], [1, 3]])
    every, some = places.turn(), places.turn(tokens)
    picked = tokens[:, None, :, None].expand(2, 3, 2, 8)
    torch.testing.assert_close(some(states.gather(2, picked)), every(states).gather(2, picked))
