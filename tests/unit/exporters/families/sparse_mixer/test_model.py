"""Tests."""

import math
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import InputError, ParityError
from nestforge.exporters.families.sparse_mixer.config import OF_ANY_LENGTH, MixingKind
from nestforge.exporters.families.sparse_mixer.mixing import FoldedMixing
from nestforge.exporters.families.sparse_mixer.model import (
    SparseMixer,
    attention_mask,
    experts_gap,
    lower,
    replay,
    tokens_gap,
)
from nestforge.exporters.families.sparse_mixer.moe import DROPPED, StaticMoE, experts_choose, tokens_choose
from nestforge.exporters.families.sparse_mixer.ops import parameter_shapes
from nestforge.exporters.family import load_model
from nestforge.exporters.modules.layers import Answering
from support.mixer_reference import mixer_outputs
from support.tiny_mixer import mixer_config, save_tiny_mixer, tiny_mixer

MIXINGS = get_args(MixingKind)
# Two rows of tokens, the second with 5 pads behind.
IDS = torch.randint(1, 24, (2, 16), generator=torch.Generator().manual_seed(0))
IDS[1, 11:] = 0
TYPES = torch.randint(0, 2, (2, 16), generator=torch.Generator().manual_seed(1))
_HEADS: list[dict[str, Any]] = [
    {"head": "none"},
    {"head": "masked_lm", "embedding_size": 12},
    {"head": "classifier", "num_labels": 3},
    {"head": "pretraining", "num_labels": 2},
]


def _agrees(model: SparseMixer, ids: torch.Tensor, types: torch.Tensor, atol: float = 1e-10) -> None:
    """In float64 every output equals the reference's."""
    precise = model.double()
    weights = {name: value.numpy() for name, value in precise.named_parameters()}
    settings = {"head": "none", **vars(model.config)}
    expected = mixer_outputs(settings, weights, ids.numpy(), types.numpy())
    outputs = precise(ids, types)
    assert len(outputs) == len(expected)
    for output, reference in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output.numpy(), reference, atol=atol, rtol=0)


@pytest.mark.parametrize("head", _HEADS, ids=lambda head: head["head"])
@pytest.mark.parametrize("mixing", MIXINGS)
def test_the_modules_parameters_are_those_that_its_config_says(mixing: MixingKind, head: dict[str, Any]) -> None:
    config = mixer_config(mixing=mixing, **head)
    with torch.device("meta"):
        model = SparseMixer(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(config)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_all_four_kinds_of_layers_compute_what_the_paper_says(mixing: MixingKind) -> None:
    # Tables of spectral mixing are float32, whatever the rest computes in.
    _agrees(tiny_mixer(mixer_config(mixing=mixing)), IDS, TYPES, 1e-10 if mixing not in _SPECTRAL else 1e-5)


@pytest.mark.parametrize("prioritized", [True, False])
def test_tokens_choose_computes_what_the_paper_says(prioritized: bool) -> None:
    _agrees(tiny_mixer(mixer_config(router="tokens_choose", batch_prioritized=prioritized)), IDS, TYPES)


@pytest.mark.parametrize("head", _HEADS, ids=lambda head: head["head"])
def test_every_head_answers_as_the_paper_says(head: dict[str, Any]) -> None:
    _agrees(tiny_mixer(mixer_config(**head)), IDS, TYPES)


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity_factor": 0.5},
        {"capacity_factor": 2.5},
        {"group_size": 8},
        {"group_size": 5},  # 6 groups do not divide 32 tokens: 8 of 4
        {"min_capacity": 7},
        {"pad_token_id": 3},
        {"layer_norm_eps": 0.5},
        {"attention_layers": (), "moe_layers": (0, 1, 2, 3)},
        {"attention_layers": (0, 1, 2, 3), "moe_layers": (), "num_experts": 0},
        {"hidden_size": 24, "num_attention_heads": 3, "embedding_size": 8},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_setting_does_what_the_paper_says(changes: dict[str, Any]) -> None:
    _agrees(tiny_mixer(mixer_config(**changes)), IDS, TYPES)


@pytest.mark.parametrize("mixing", sorted(OF_ANY_LENGTH))
def test_a_model_of_another_sequence_has_the_matrices_of_that_sequence(mixing: MixingKind) -> None:
    model = tiny_mixer(mixer_config(mixing=mixing))
    model.set_sequence(8)
    _agrees(model, IDS[:, :8], TYPES[:, :8], 1e-10 if mixing not in _SPECTRAL else 1e-5)
    model.set_sequence(16)
    _agrees(model, IDS, TYPES, 1e-10 if mixing not in _SPECTRAL else 1e-5)


@pytest.mark.parametrize("length", [1, 7, 16])
def test_a_model_that_only_attends_takes_every_length(length: int) -> None:
    _agrees(tiny_mixer(mixer_config(attention_layers=(0, 1, 2, 3))), IDS[:, :length], TYPES[:, :length])


def test_lengths_that_the_model_does_not_serve_are_refused() -> None:
    model = tiny_mixer(mixer_config())
    with pytest.raises(InputError, match=r"^8 tokens: linear mixing serves 16 tokens; pad with 0$"):
        model(IDS[:, :8], TYPES[:, :8])
    with pytest.raises(InputError, match=r"^sequence 8: linear mixing is bound to 16 tokens$"):
        model.set_sequence(8)
    with pytest.raises(InputError, match=r"^sequence 17: expected 1\.\.16 tokens$"):
        tiny_mixer(mixer_config(mixing="fourier")).set_sequence(17)
    attending = tiny_mixer(mixer_config(attention_layers=(0, 1, 2, 3)))
    with pytest.raises(InputError, match=r"^17 tokens: the model takes at most 16$"):
        attending(torch.ones(1, 17, dtype=torch.int64), torch.zeros(1, 17, dtype=torch.int64))


def test_pads_mix_and_are_routed_and_only_attention_hides_them() -> None:
    """The state at a pad changes with its type; a token sees the change unless every layer attends densely."""
    changed = TYPES.clone()
    changed[1, 11:] = 1 - changed[1, 11:]
    attending = {"attention_layers": (0, 1, 2, 3)}
    dense = {"moe_layers": (), "num_experts": 0}
    seen = {
        "attends": {**attending, **dense},
        "attends and routes": {**attending, "moe_layers": (0, 1, 2, 3), "capacity_factor": 0.25},
        "mixes": {"attention_layers": (), **dense},
    }
    differs = {}
    for name, settings in seen.items():
        model = tiny_mixer(mixer_config(**settings))
        before, after = model(IDS, TYPES)[0], model(IDS, changed)[0]
        differs[name] = not torch.equal(before[1, :11], after[1, :11])
        assert not torch.equal(before[1, 11:], after[1, 11:])
    assert differs == {"attends": False, "attends and routes": True, "mixes": True}


def test_given_routes_replace_the_routers_own_and_both_are_told() -> None:
    model = tiny_mixer(mixer_config())
    outputs, routes = model.routed(IDS, TYPES)
    assert list(routes) == [1, 2]
    assert all(torch.equal(found.own, found.chosen) for found in routes.values())
    same, _ = model.routed(IDS, TYPES, {layer: found.own for layer, found in routes.items()})
    assert all(torch.equal(*pair) for pair in zip(outputs, same, strict=True))
    other = routes[2].own.flip(1)
    changed, told = model.routed(IDS, TYPES, {2: other})
    assert torch.equal(told[2].own, routes[2].own)
    assert torch.equal(told[2].chosen, other)
    assert torch.equal(told[2].gates, told[2].scores.transpose(1, 2).gather(-1, other))
    assert not torch.allclose(changed[0], outputs[0])


def test_a_row_alone_and_in_a_batch_differ_only_by_sharing_a_group() -> None:
    together = tiny_mixer(mixer_config())
    for layer in (1, 2):
        together.layers[layer].moe.group_size = 16  # one row
    alone = torch.cat([together(IDS[row : row + 1], TYPES[row : row + 1])[0] for row in range(2)])
    torch.testing.assert_close(together(IDS, TYPES)[0], alone, atol=1e-5, rtol=1e-5)
    for layer in (1, 2):
        together.layers[layer].moe.group_size = 4096
    assert not torch.allclose(together(IDS, TYPES)[0], alone, atol=1e-2)


@pytest.mark.parametrize("router", ["experts_choose", "tokens_choose"])
@pytest.mark.parametrize("mixing", ["linear", "circulant", "toeplitz", "hartley"])
def test_every_parameter_learns(mixing: MixingKind, router: str) -> None:
    model = tiny_mixer(mixer_config(mixing=mixing, router=router, head="pretraining", num_labels=2))
    model.train().requires_grad_(True)
    sum(output.square().mean() for output in model(IDS, TYPES)).backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in still if not name.endswith("attention.key.bias")] == []  # softmax ignores that one


_SPECTRAL = OF_ANY_LENGTH - {"toeplitz"}
PADDED = torch.tensor([[5, 9, 7, 7], [9, 3, 7, 9]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_query_sees_a_key_where_neither_is_a_pad(dtype: torch.dtype) -> None:
    mask = attention_mask(PADDED, 7, torch.zeros(1, dtype=dtype))
    assert mask.dtype == dtype
    assert mask.isfinite().all()
    assert (mask == 0)[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert (mask == 0)[1, 0].int().tolist() == [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]]
    assert set(mask.unique().tolist()) == {0.0, max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)}


VARIANTS = {"moe.dispatch": "gather", "moe.products": "per_expert", "moe.combine": "scatter"}


def ids() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, 24, (2, 16), generator=draw), torch.randint(0, 2, (2, 16), generator=draw)


@pytest.mark.parametrize(
    ("settings", "variants"),
    [
        ({}, VARIANTS),
        ({"mixing": "hartley"}, {**VARIANTS, "mixing": "dense"}),
        ({"mixing": "hartley", "head": "masked_lm"}, {**VARIANTS, "mixing": "folded"}),
    ],
)
def test_outputs_then_routes_by_layer(settings: dict[str, Any], variants: dict[str, str]) -> None:
    module = Answering(tiny_mixer(mixer_config(**settings)))
    outputs, routes = module.model.routed(*ids())
    found = lower(module, variants)(*ids())
    assert len(found) == len(outputs) + 2
    for one, other in zip(found, outputs, strict=False):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    assert torch.equal(found[-2], routes[1].chosen)
    assert torch.equal(found[-1], routes[2].chosen)
    assert found[-1].dtype == torch.int64


def test_shares_the_weights_and_leaves_the_module() -> None:
    module = Answering(tiny_mixer(mixer_config(mixing="hartley")))
    before = {name: type(part) for name, part in module.named_modules()}
    copy = lower(module, {**VARIANTS, "mixing": "folded"})
    assert {name: type(part) for name, part in module.named_modules()} == before
    mine, theirs = dict(module.named_parameters()), dict(copy.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(theirs[name] is parameter for name, parameter in mine.items())
    kinds = [type(part) for part in copy.modules()]
    assert (kinds.count(StaticMoE), kinds.count(FoldedMixing)) == (2, 2)


EIGHT = torch.randint(0, 24, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mixing", get_args(MixingKind))
def test_what_was_saved_is_what_is_loaded(tmp_path: Path, mixing: MixingKind) -> None:
    folder = save_tiny_mixer(tmp_path / "model", mixing=mixing, head="pretraining", num_labels=3)
    loaded = load_model(folder)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert {name: held.device.type for name, held in loaded.named_buffers()} == {
        name: "cpu" for name, _ in tiny_mixer(loaded.config).named_buffers()
    }
    expected = tiny_mixer(mixer_config(mixing=mixing, head="pretraining", num_labels=3))
    types = torch.zeros_like(EIGHT)
    for output, reference in zip(loaded(EIGHT, types), expected(EIGHT, types), strict=True):
        assert torch.equal(output, reference)
    assert (folder / "tokenizer.json").is_file()


INPUTS = (torch.randint(1, 24, (2, 16), generator=torch.Generator().manual_seed(1)), torch.zeros_like(IDS))
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
    """A layer's routes follow from those before it, so the given ones make its own."""
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


# Multiples of a sixteenth, so that ties are common and every difference is exact.
SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 4))


@st.composite
def drawn_scores(draw: st.DrawFn) -> torch.Tensor:
    groups, tokens, experts = draw(SHAPES)
    numbers = st.lists(st.integers(0, 16), min_size=(n := groups * tokens * experts), max_size=n)
    return torch.tensor(draw(numbers)).reshape(groups, tokens, experts) / 16


@given(drawn_scores(), st.data())
def test_own_routes_have_no_gap(scores: torch.Tensor, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, scores.shape[1]))
    kept = data.draw(st.integers(1, scores.shape[2]))
    assert experts_gap(scores, experts_choose(scores, slots, kept)).value == 0
    for prioritized in (True, False):
        assert tokens_gap(scores, tokens_choose(scores, slots, prioritized), slots, prioritized).value == 0


@given(drawn_scores(), st.data())
def test_routes_of_rounded_scores_are_within_twice_the_rounding(scores: torch.Tensor, data: st.DataObject) -> None:
    """The gate never refuses an engine that is right but for rounding."""
    slots = data.draw(st.integers(1, scores.shape[1]))
    torch.manual_seed(data.draw(st.integers(0, 100)))
    error = 1 / 16
    rounded = scores + error * (2 * torch.rand(scores.shape) - 1)
    assert experts_gap(scores, experts_choose(rounded, slots, scores.shape[2])).value <= 2 * error
    for prioritized in (True, False):
        found = tokens_choose(rounded, slots, prioritized)
        assert tokens_gap(scores, found, slots, prioritized).value <= 2 * error


@given(drawn_scores(), st.data())
def test_the_gap_of_an_expert_is_its_largest_inversion(scores: torch.Tensor, data: st.DataObject) -> None:
    groups, tokens, experts = scores.shape
    slots = data.draw(st.integers(1, tokens))
    chosen = torch.tensor(
        [[data.draw(st.permutations(range(tokens)))[:slots] for _ in range(experts)] for _ in range(groups)]
    )
    worst = 0.0
    for group in range(groups):
        for expert in range(experts):
            took = chosen[group, expert].tolist()
            left = [token for token in range(tokens) if token not in took]
            pairs = [*combinations(took, 2), *((one, other) for one in took for other in left)]
            by = scores[group, :, expert]
            worst = max([worst, *(float(by[after] - by[before]) for before, after in pairs)])
    assert experts_gap(scores, chosen).value == worst


EXPERTS = torch.tensor([[[0.5, 0.1], [0.4, 0.2], [0.1, 0.9], [0.3, 0.6]]])  # [1, 4, 2]


@pytest.mark.parametrize(
    ("chosen", "value", "where"),
    [
        ([[0, 1], [2, 1]], 0.4, "group 0, expert 1: took token 1 (0.2) before 3 (0.6)"),
        ([[1, 0], [2, 3]], 0.1, "group 0, expert 0: ranked token 1 (0.4) before 0 (0.5)"),
        ([[2, 3], [2, 3]], 0.4, "group 0, expert 0: took token 2 (0.1) before 0 (0.5)"),
    ],
    ids=["another token", "another order", "the best left out"],
)
def test_what_is_said_of_an_expert(chosen: list[list[int]], value: float, where: str) -> None:
    gap = experts_gap(EXPERTS, torch.tensor([chosen]))
    assert math.isclose(gap.value, value, rel_tol=1e-6)
    assert gap.where == where


# Tokens 0, 1 and 3 want expert 0, token 2 wants expert 1; there is one slot each.
TOKENS = torch.tensor([[[0.7, 0.3], [0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]])
FIRST = "group 0, token {} was dropped, its best is expert {}"


@pytest.mark.parametrize(
    ("chosen", "prioritized", "value", "where"),
    [
        ([DROPPED, 0, 1, DROPPED], True, 0.0, None),
        ([0, DROPPED, 1, DROPPED], True, 0.2, FIRST.format(1, "0 (0.9)")),
        ([0, DROPPED, 1, DROPPED], False, 0.0, None),
        ([DROPPED, 0, 1, DROPPED], False, math.inf, FIRST.format(0, "0 (0.7)")),
        ([DROPPED, 0, DROPPED, 1], True, 0.4, FIRST.format(2, "1 (0.8)")),
        ([1, 0, DROPPED, DROPPED], True, 0.5, FIRST.format(2, "1 (0.8)")),
        ([DROPPED, 0, DROPPED, DROPPED], True, 0.6, FIRST.format(2, "1 (0.8)")),
        ([DROPPED, DROPPED, DROPPED, DROPPED], True, math.inf, FIRST.format(0, "0 (0.7)")),
        ([DROPPED, 1, 0, DROPPED], True, 0.8, "group 0, token 1 went to expert 1 (0.1), its best is expert 0 (0.9)"),
    ],
)
def test_what_is_said_of_a_token(chosen: list[int], prioritized: bool, value: float, where: str | None) -> None:
    gap = tokens_gap(TOKENS, torch.tensor([chosen]), 1, prioritized)
    assert gap.value == pytest.approx(value, rel=1e-6)
    if where is not None:
        assert gap.where == where


def test_scores_that_are_no_numbers_are_no_near_tie() -> None:
    scores = EXPERTS.clone()
    scores[0, 2, 1] = math.nan
    assert not experts_gap(scores, torch.tensor([[[0, 1], [2, 3]]])).value <= 1
