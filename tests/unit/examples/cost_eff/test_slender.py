"""Slicing keeps the function where nothing is lost; the schedule has the published numbers."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import CheckpointError
from nestforge.examples.cost_eff.fit import forward, label_loss
from nestforge.examples.cost_eff.slender import (
    Importance,
    Target,
    load_model,
    most_important,
    multi_exit_model,
    save_model,
    schedule,
    slender,
    taylor_importance,
    word_embedding,
)
from nestforge.examples.cost_eff.texts import Batch, Rows
from nestforge.examples.training import parameters_of
from nestforge.exporters.checkpoints.checkpoint import open_checkpoint
from nestforge.exporters.families.cost_eff.config import Widths
from nestforge.exporters.families.cost_eff.model import CostEffModel
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.tiny_models import save_tiny_encoder

KEPT_HEADS = [torch.tensor([0, 3]), torch.tensor([1, 2]), torch.tensor([2, 3])]
KEPT_FFN = [torch.tensor([0, 4, 11]), torch.tensor([1, 2, 3]), torch.tensor([5, 9, 10])]


def without(model: CostEffModel) -> None:
    """Zeroes what the dropped heads and channels add."""
    with torch.no_grad():
        for layer, heads, channels in zip(model.encoder.layer, KEPT_HEADS, KEPT_FFN, strict=True):
            for head in set(range(4)) - set(heads.tolist()):
                layer.attention.output.dense.weight[:, 4 * head : 4 * head + 4] = 0
            for channel in set(range(12)) - set(channels.tolist()):
                layer.output.dense.weight[:, channel] = 0


def test_dropping_what_adds_nothing_changes_nothing(model: CostEffModel, batch: Batch) -> None:
    without(model)
    thin = slender(model, KEPT_HEADS, KEPT_FFN, rank=16)  # the full rank: nothing lost there either
    assert thin.architecture.layers == (Widths(2, 3),) * 3
    assert thin.architecture.rank == 16
    before, after = forward(model, batch), forward(thin, batch)
    torch.testing.assert_close(torch.stack(after.states), torch.stack(before.states), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits), rtol=1e-4, atol=1e-4)


def test_a_copy_of_its_own_that_can_be_cut_again(model: CostEffModel, batch: Batch) -> None:
    thin = slender(model, KEPT_HEADS, KEPT_FFN, rank=8)
    thinner = slender(thin, [torch.tensor([1])] * 3, [torch.tensor([0, 2])] * 3, rank=4)
    assert thinner.architecture.layers == (Widths(1, 2),) * 3
    kept = model.encoder.layer[0].attention.self.query.weight[12:16]  # head 3 is the second that stayed
    assert torch.equal(thinner.encoder.layer[0].attention.self.query.weight, kept)
    assert torch.linalg.matrix_rank(word_embedding(thin)) == 8
    assert torch.linalg.matrix_rank(word_embedding(thinner)) == 4
    left, values, right = torch.linalg.svd(word_embedding(model))
    best = left[:, :4] * values[:4] @ right[:4]
    torch.testing.assert_close(word_embedding(thinner), best, rtol=1e-4, atol=1e-4)
    forward(thinner, batch).logits[-1].sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_best_stay_in_their_order() -> None:
    importance = Importance([torch.tensor([0.1, 0.9, 0.5, 0.5])], [torch.tensor([3.0, 1.0, 2.0])])
    heads, channels = most_important(importance, Target(heads=2, ffn=1, rank=1))
    assert [ids.tolist() for ids in heads] == [[1, 2]]
    assert [ids.tolist() for ids in channels] == [[0]]


def test_the_published_schedule() -> None:
    steps = schedule(Target(12, 3072, 768), Target(2, 256, 128), 10)
    assert [step.heads for step in steps] == [11, 10, 9, 8, 7, 6, 5, 4, 3, 2]
    assert [step.ffn for step in steps] == [2790, 2508, 2227, 1945, 1664, 1382, 1100, 819, 537, 256]
    assert [step.rank for step in steps] == [704, 640, 576, 512, 448, 384, 320, 256, 192, 128]


@given(start=st.tuples(*[st.integers(1, 4000)] * 3), shares=st.tuples(*[st.floats(0, 1)] * 3), steps=st.integers(1, 30))
def test_widths_never_grow_and_end_at_the_target(
    start: tuple[int, int, int], shares: tuple[float, float, float], steps: int
) -> None:
    end = tuple(max(1, int(size * share)) for size, share in zip(start, shares, strict=True))
    path = [Target(*start), *schedule(Target(*start), Target(*end), steps)]
    assert len(path) == steps + 1
    assert path[-1] == Target(*end)
    for wide, thin in pairwise(path):
        assert thin.heads <= wide.heads
        assert thin.ffn <= wide.ffn
        assert thin.rank <= wide.rank


@pytest.mark.parametrize("rank", [4, 12])
def test_a_smaller_rank_changes_the_embedding_alone(model: CostEffModel, rank: int) -> None:
    everything = [torch.arange(4)] * 3, [torch.arange(12)] * 3
    thin = slender(model, *everything, rank)
    changed = {n for n, p in thin.named_parameters() if not torch.equal(p, model.state_dict().get(n, torch.empty(0)))}
    assert changed == {"embeddings.word_embeddings.weight", "embeddings.word_projection.weight"}


def test_zeroed_structures_score_nothing(model: CostEffModel, rows: Rows) -> None:
    with torch.no_grad():
        model.encoder.layer[1].attention.output.dense.weight[:, 4:8] = 0  # head 1
        model.encoder.layer[2].intermediate.dense.weight[5] = 0
        model.encoder.layer[2].output.dense.weight[:, 5] = 0
    calls: list[tuple[int, int]] = []
    importance = taylor_importance(model, rows.in_order(8), lambda done, total: calls.append((done, total)))
    assert [layer.shape for layer in importance.heads] == [(4,)] * 3
    assert [layer.shape for layer in importance.ffn] == [(12,)] * 3
    assert [(layer == 0).nonzero().flatten().tolist() for layer in importance.heads] == [[], [1], []]
    assert [(layer == 0).nonzero().flatten().tolist() for layer in importance.ffn] == [[], [], [5]]
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_equal_heads_rank_by_the_size_of_their_output_columns(model: CostEffModel, rows: Rows) -> None:
    """Heads made alike, with output columns of size 3, 1, 4 and 2, must rank in that order."""
    attention = model.encoder.layer[0].attention
    with torch.no_grad():
        for part in (attention.self.query, attention.self.key, attention.self.value):
            part.weight.copy_(part.weight[:4].repeat(4, 1))
            part.bias.copy_(part.bias[:4].repeat(4))
        columns = attention.output.dense.weight[:, :4].clone()
        attention.output.dense.weight.copy_(torch.cat([size * columns for size in (3, 1, 4, 2)], 1))
    scores = taylor_importance(model, rows.in_order(8), lambda *_: None).heads[0]
    assert scores.argsort(descending=True).tolist() == [2, 0, 3, 1]
    torch.testing.assert_close(scores / scores[1], torch.tensor([3.0, 1.0, 4.0, 2.0]))


def test_the_score_is_the_mean_gradient_size_times_the_weight(model: CostEffModel, rows: Rows) -> None:
    batches: list[Batch] = rows.in_order(12)
    weight = model.encoder.layer[1].attention.output.dense.weight
    sizes = [torch.autograd.grad(label_loss(model, batch), weight)[0].abs() for batch in batches]
    expected = (torch.stack(sizes).mean(0) * weight.detach().abs()).sum(0).reshape(4, 4).sum(1)
    scores = taylor_importance(model, batches, lambda *_: None).heads[1]
    torch.testing.assert_close(scores, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


INPUTS = torch.tensor([[2, 7, 9, 3], [2, 5, 3, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = save_tiny_encoder(tmp_path / "bert")
    set_field(folder, "pad_token_id", 0)
    return folder


def set_field(folder: Path, key: str, value: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_states_are_those_of_the_checkpoint(folder: Path) -> None:
    from transformers import AutoModel

    model = multi_exit_model(open_checkpoint(folder), classes=5)
    with torch.no_grad():
        states = model.hidden_states(*INPUTS)
        expected = AutoModel.from_pretrained(folder)(*INPUTS, output_hidden_states=True).hidden_states
    real = INPUTS[1].bool()
    assert len(states) == len(expected) == 4
    for found, wanted in zip(states, expected, strict=True):
        torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)


def test_exits_after_every_layer_over_the_mean(folder: Path) -> None:
    torch.manual_seed(3)
    model = multi_exit_model(open_checkpoint(folder), classes=5)
    assert model.architecture.exits.layers == (1, 2, 3)
    assert (model.architecture.exits.pool, model.architecture.exits.activation) == ("mean", "tanh")
    weights = torch.stack([head.weight for head in model.exits.values()])
    assert weights.shape == (3, 5, 32)
    assert 0.01 < weights.std() < 0.03
    assert not any(head.bias.any() for head in model.exits.values())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "roberta", "expected model_type bert, got 'roberta'"),
        ("hidden_size", None, "config.json: hidden_size: expected a whole number of at least 1, got None"),
        ("vocab_size", 65, r"tensor embeddings.word_embeddings.weight has shape \[64, 32\]; expected \[65, 32\]"),
        ("num_hidden_layers", 2, "tensor 'encoder.layer.2.attention.output.LayerNorm.bias' has no place"),
    ],
)
def test_what_is_no_such_encoder_is_refused(folder: Path, key: str, value: object, message: str) -> None:
    set_field(folder, key, value)
    with pytest.raises(CheckpointError, match=message):
        multi_exit_model(open_checkpoint(folder), classes=5)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "given.json"
    path.write_text("{}")
    return path


def thin_of(model: CostEffModel) -> CostEffModel:
    heads = [torch.tensor(ids) for ids in ([0, 3], [1], [0, 1, 2])]
    return slender(model, heads, [torch.arange(size) for size in (5, 12, 7)], rank=6)


@pytest.mark.parametrize("slim", [False, True], ids=["whole", "slender"])
def test_the_family_answers_as_the_trained_model(
    model: CostEffModel, batch: Batch, tokenizer: Path, tmp_path: Path, slim: bool
) -> None:
    trained = thin_of(model) if slim else model
    save_model(trained, tokenizer, tmp_path / "model")
    source = open_source(tmp_path / "model")
    universal = load_universal(source)
    (loaded,) = [part for part in universal.module.modules() if isinstance(part, CostEffModel)]
    with torch.no_grad():
        expected, found = forward(trained, batch), forward(loaded, batch)
        answer = universal.module(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.input_ids))
    assert torch.equal(torch.stack(found.states), torch.stack(expected.states))
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    torch.testing.assert_close(answer[-2], expected.logits[-1])
    assert source.parameters(source.spec.universal()) == parameters_of(trained)
    assert source.signature.text is not None


def test_what_was_saved_trains_on(model: CostEffModel, batch: Batch, tokenizer: Path, tmp_path: Path) -> None:
    save_model(thin_of(model), tokenizer, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert [(w.heads, w.ffn) for w in loaded.architecture.layers] == [(2, 5), (1, 12), (3, 7)]
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(forward(loaded, batch).logits[2], forward(thin_of(model), batch).logits[2])
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
