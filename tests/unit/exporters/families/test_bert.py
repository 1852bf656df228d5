from __future__ import annotations

from pathlib import Path

import torch
from nestforge.bucket import Bucket
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.tiny_models import add_pooling, save_tiny_encoder


def test_axes_of_a_bert(source) -> None:
    assert [axis.name for axis in source.spec.axes[:4]] == [
        "layers.0.ffn",
        "layers.0.heads",
        "layers.1.ffn",
        "layers.1.heads",
    ]
    assert source.spec.universal().id == "ffn64-heads4"


def test_parameters_of_a_submodel_by_hand(source) -> None:
    half = source.spec.parse("ffn32-heads4")
    per_layer = 32 * 32 + 32 + 32 * 32  # up rows, up bias, down columns
    assert source.parameters(source.spec.universal()) - source.parameters(half) == 3 * per_layer
    fewer = source.spec.parse("ffn64-heads3")
    per_head = 3 * (8 * 32 + 8) + 32 * 8  # query, key, value rows and biases, output columns
    assert source.parameters(source.spec.universal()) - source.parameters(fewer) == 3 * per_head


def test_narrowing_equals_masking_what_was_cut(universal) -> None:
    """Independent of any slicing code: zero the down columns of cut neurons and the output columns of cut heads."""
    ids, mask = torch.randint(4, 60, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    submodel = universal.spec.parse("ffn64_16x2-heads4_1_3")
    narrowed = universal.narrow(submodel)(ids, mask, mask * 0)
    encoder = universal.module.model.encoder.layer
    for index, layer in enumerate(encoder):
        layer.output.dense.weight.data[:, submodel[f"layers.{index}.ffn"] :] = 0
        layer.attention.output.dense.weight.data[:, 8 * submodel[f"layers.{index}.heads"] :] = 0
    for expected, found in zip(universal.module(ids, mask, mask * 0), narrowed, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_narrowing_copies_no_weight(universal) -> None:
    narrowed = universal.narrow(universal.spec.parse("ffn16-heads2"))
    full = universal.module.model.encoder.layer[1].intermediate.dense.weight
    assert narrowed.model.encoder.layer[1].intermediate.dense.weight.data_ptr() == full.data_ptr()


def test_the_sentence_embedding_is_the_masked_mean(tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path / "m")
    add_pooling(folder)
    model = load_universal(open_source(folder))
    ids, mask = torch.randint(4, 60, (1, 6)), torch.tensor([[1, 1, 1, 1, 0, 0]])
    hidden, _, embedding = model.module(ids, mask, mask * 0)
    expected = torch.nn.functional.normalize(hidden[:, :4].mean(1), dim=-1)
    torch.testing.assert_close(embedding, expected)


def test_roberta_cannot_use_its_first_positions(tmp_path: Path) -> None:
    source = open_source(save_tiny_encoder(tmp_path / "m", "roberta", pad_token_id=1))
    assert source.signature.max_sequence == 38


def test_flops_of_one_layer_by_hand(source) -> None:
    tokens, hidden = 16, 32
    flops = sum(
        op.flops for op in source.workload(source.spec.universal(), Bucket(1, tokens)) if op.kind != "elementwise"
    )
    linear = 2 * tokens * (4 * hidden * hidden + 2 * hidden * 64)
    attention = 2 * 2 * tokens * tokens * hidden
    assert flops == 3 * (linear + attention) + 2 * hidden * hidden  # the pooler
