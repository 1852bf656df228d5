"""BERT, and named families beside the general one on the same folder: the same axes, interface, and bytes of
weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
import torch
from nestforge.bucket import Bucket
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.compiler.graph.passes.contract import TRANSPOSED
from nestforge.exporters import source
from nestforge.exporters.families.general import FAMILY
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from nestforge.runtime.inputs.arrays import random_feeds
from safetensors.numpy import load_file
from support.tiny_compile import board
from support.tiny_models import add_pooling, save_tiny_encoder

from .test_general import save_model


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


TEXT: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BOTH = [f"layers.{layer}.{kind}" for layer in range(2) for kind in ("ffn", "heads")]
# Class, settings, bucket, and the axes of the named family.
MODELS: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "bert": ("BertModel", TEXT, "2x12", BOTH),
    "vit": ("ViTForImageClassification", {"image_size": 16, "patch_size": 8}, "2x1", BOTH),
    "llama": ("LlamaForCausalLM", {**TEXT, "num_key_value_heads": 2}, "1..2x1..12", BOTH[::2]),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_named_and_general(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_name, settings, bucket, axes = MODELS[model_type]
    folder = save_model(tmp_path / "m", class_name, model_type, **LAYERS, **settings)
    levels = {axis.rpartition(".")[2]: [0.5, 1.0] for axis in axes}
    bundles = []
    for name in ("named", "general"):
        with monkeypatch.context() as patch:
            if name == "general":
                patch.setattr(source, "family_of", lambda _: FAMILY)
            profile = board(budgets={"full": {}}, buckets=[bucket])
            output = nestforge.compile(folder, profile, output=tmp_path / name, levels=levels)
        bundles.append(nestforge.open_bundle(output))
    named, general = (bundle.manifest for bundle in bundles)
    assert (named.family == "general", general.family) == (False, "general")
    assert [axis.name for axis in named.axes] == axes
    assert [axis.name for axis in general.axes] == BOTH
    assert set(named.axes) <= set(general.axes)
    assert [spec for spec in general.inputs if spec.name != "attention_mask" or model_type == "bert"] == [*named.inputs]
    assert [replace(spec, role=None) for spec in named.outputs] == [
        replace(spec, role=None) for spec in general.outputs
    ]
    sizes = [[(one.parameters, one.weight_bytes) for one in each.submodels] for each in (named, general)]
    assert sizes[0] == sizes[1]
    stored, other = (_weights(bundle.path / WEIGHTS_NAME) for bundle in bundles)
    assert stored.keys() == other.keys()
    assert all(np.array_equal(array, other[name]) for name, array in stored.items())
    feeds = random_feeds(named.inputs, named.engines[0].bucket.largest)
    mask = {s.name: np.ones_like(feeds["input_ids"]) for s in general.inputs if s.name not in feeds}
    answers = []
    for bundle, given in zip(bundles, (feeds, {**feeds, **mask}), strict=True):
        with nestforge.load(bundle.path) as loaded:
            answers.append(loaded(given).outputs)
    for output, array in answers[0].items():
        np.testing.assert_allclose(array, answers[1][output], atol=1e-5, rtol=1e-5)


def _weights(store: Path) -> dict[str, np.ndarray]:
    """What a store holds, as the model has it: along an axis that the other family lacks a matrix is transposed."""
    found = load_file(store)
    return {name.removesuffix(TRANSPOSED): a.T if name.endswith(TRANSPOSED) else a for name, a in found.items()}
