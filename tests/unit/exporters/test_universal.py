from pathlib import Path

import pytest
import torch
from nestforge.errors import CheckpointError
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import UniversalModel, load_universal, magnitude_scores, rank, taylor_scores
from support.tiny_mixer import save_tiny_mixer


def _batches(count: int = 3) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(4, 60, (4, 12), generator=generator) for _ in range(count)]
    return [(i, torch.ones_like(i), torch.zeros_like(i)) for i in ids]


@pytest.mark.parametrize("method", ["magnitude", "taylor"])
def test_ranking_leaves_the_function_unchanged_and_orders_the_axes(universal, method: str) -> None:
    batch = _batches()[0]
    before = universal.module(*batch)
    scores = magnitude_scores(universal) if method == "magnitude" else taylor_scores(universal, _batches())
    record, _ = rank(universal, scores, method, "0" * 64, 1)
    for expected, found in zip(before, universal.module(*batch), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (record.method, record.samples, len(record.order_sha256 or "")) == (method, 1, 64)
    again = magnitude_scores(universal) if method == "magnitude" else taylor_scores(universal, _batches())
    for values in again.values():
        assert (values.diff() <= 1e-5 * values[:-1]).all(), "importance must fall along every axis"


def test_taylor_finds_the_neurons_that_matter(universal) -> None:
    """Neurons whose down column is zero cannot matter, so they must come last."""
    dead = [3, 17, 40]
    universal.module.model.encoder.layer[1].output.dense.weight.data[:, dead] = 0
    scores = taylor_scores(universal, _batches())["layers.1.ffn"]
    assert sorted(torch.argsort(scores)[:3].tolist()) == dead


def test_magnitude_by_hand(universal) -> None:
    attention = universal.module.model.encoder.layer[2].attention
    head = slice(8, 16)
    parts = [getattr(attention.self, name) for name in ("query", "key", "value")]
    expected = sum(part.weight[head].square().sum() + part.bias[head].square().sum() for part in parts)
    expected = expected + attention.output.dense.weight[:, head].square().sum()
    torch.testing.assert_close(magnitude_scores(universal)["layers.2.heads"][1], expected.double())


def test_equal_scores_keep_their_order(universal) -> None:
    before = universal.module.model.encoder.layer[0].intermediate.dense.weight.clone()
    rank(universal, {axis.name: torch.ones(axis.size) for axis in universal.spec.axes}, "magnitude")
    assert torch.equal(universal.module.model.encoder.layer[0].intermediate.dense.weight, before)


def test_ranking_writes_into_no_weight_that_was_read(universal) -> None:
    """It may lie in the checkpoint's file, and its pages are let go."""
    weight = universal.module.model.encoder.layer[0].intermediate.dense.weight
    read, before = weight.data, weight.detach().clone()
    rank(universal, {axis.name: torch.arange(axis.size) for axis in universal.spec.axes}, "magnitude")
    assert torch.equal(read, before)
    assert torch.equal(weight, before.flip(0))


def test_scores_that_are_not_finite_are_refused(universal) -> None:
    scores = magnitude_scores(universal)
    scores["layers.1.ffn"][0] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers.1.ffn: importance is not finite"):
        rank(universal, scores, "magnitude")


TWO = {"num_hidden_layers": 2, "attention_layers": (1,), "moe_layers": (0, 1)}


@pytest.fixture
def mixer(tmp_path: Path) -> UniversalModel:
    """Two layers of four stacked experts, which one axis cuts and each layer orders."""
    return load_universal(open_source(save_tiny_mixer(tmp_path / "mixer", **TWO)))


def _ids(count: int = 2) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, 24, (3, 16), generator=generator) for _ in range(count)]
    return [(i, torch.zeros_like(i)) for i in ids]


@pytest.mark.parametrize("method", ["magnitude", "taylor"])
def test_each_layer_orders_its_experts_and_the_router_follows(mixer: UniversalModel, method: str) -> None:
    batch = _ids()[0]
    before = mixer.module(*batch)
    weights = {name: parameter.clone() for name, parameter in mixer.parameters().items()}
    scores = magnitude_scores(mixer) if method == "magnitude" else taylor_scores(mixer, _ids())
    assert list(scores) == ["layers.0.moe.experts", "layers.1.moe.experts"]
    rank(mixer, scores, method)
    for expected, found in zip(before, mixer.module(*batch), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, values in scores.items():
        order = torch.argsort(values, descending=True)
        for part in ("experts.up_weight", "experts.down_bias", "router.weight", "router.bias"):
            parameter = f"{name.removesuffix('.experts')}.{part}"
            assert torch.equal(mixer.parameters()[parameter], weights[parameter][order])
    assert not any(parameter.requires_grad for parameter in mixer.parameters().values())


def test_taylor_finds_the_expert_that_does_nothing(mixer: UniversalModel) -> None:
    for part in ("down_weight", "down_bias"):
        mixer.parameters()[f"layers.1.moe.experts.{part}"].data[2] = 0
    scores = taylor_scores(mixer, _ids())["layers.1.moe.experts"]
    assert (int(scores.argmin()), float(scores[2])) == (2, 0.0)
    assert (scores[[0, 1, 3]] > 0).all()


def test_magnitude_of_stacked_experts_by_hand(mixer: UniversalModel) -> None:
    experts = mixer.module.model.layers[0].moe.experts
    expected = sum(part[3].double().square().sum() for part in experts.parameters())
    torch.testing.assert_close(magnitude_scores(mixer)["layers.0.moe.experts"][3], expected)
