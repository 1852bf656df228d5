"""A named family beside the general one on the same folder: the same axes, interface, and bytes of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bundle.weight_files import WEIGHTS_NAME
from nestforge.compiler.graph.passes.contract import TRANSPOSED
from nestforge.exporters import source
from nestforge.exporters.families.general import FAMILY
from nestforge.runtime.inputs.arrays import random_feeds
from safetensors.numpy import load_file
from support.tiny_compile import board

from .test_general import save_model

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
