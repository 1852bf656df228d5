"""Tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from nestforge.errors import CheckpointError, InputError
from nestforge.exporters.families.sparse_mixer.config import OF_ANY_LENGTH, MixingKind
from nestforge.exporters.families.sparse_mixer.mixing import FoldedMixing
from nestforge.exporters.families.sparse_mixer.model import SparseMixer, attention_mask, load_model, lower
from nestforge.exporters.families.sparse_mixer.ops import parameter_shapes
from nestforge.exporters.families.sparse_mixer.static_moe import StaticMoE
from nestforge.exporters.modules.attention import NestedAttention
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


def test_norms_divide_by_the_root_of_the_variance_and_1e_12() -> None:
    model = tiny_mixer(mixer_config())
    for table in (model.embeddings.word, model.embeddings.position, model.embeddings.token_type):
        table.weight.data *= 1e-6  # a variance of the size of epsilon
    _agrees(model, IDS, TYPES)


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
    """What stands at a pad changes with its type; a token sees the change unless every layer attends densely."""
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


def test_a_pad_gets_the_mean_of_all_values_whatever_the_scores() -> None:
    torch.manual_seed(0)
    attention = NestedAttention(8, 2, 4, bias=True).requires_grad_(False)
    x = 30 * torch.randn(2, 4, 8)
    answer = attention(x, attention_mask(PADDED, 7, x))
    mean = attention.output(attention.value(x).mean(1))
    torch.testing.assert_close(answer[0, 2], mean[0])
    torch.testing.assert_close(answer[0, 3], mean[0])
    torch.testing.assert_close(answer[1, 2], mean[1])
    assert not torch.allclose(answer[0, 0], mean[0])


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


def test_a_model_without_experts_or_spectra_has_no_decisions() -> None:
    config = mixer_config(moe_layers=(), num_experts=0, expert_intermediate_size=None)
    module = Answering(tiny_mixer(config))
    for one, other in zip(lower(module, {})(*ids()), module(*ids()), strict=True):
        assert torch.equal(one, other)


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


def test_a_config_that_the_weights_do_not_fit_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_mixer(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts": 8}))
    with pytest.raises(
        CheckpointError,
        match=r"layers\.1\.moe\.router\.weight has shape \[4, 16\]; expected \[8, 16\] as config\.json says$",
    ):
        load_model(folder)
