"""A small Llama of eight layers in int4: its outermost products have 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle
from nestforge.bundle.weight_files import WEIGHTS_NAME
from nestforge.exporters.source import open_source
from safetensors import safe_open
from support.gated_decoders import save_decoder

TABLE = "model.embed_tokens.weight"
FIRST, LAST = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 7))
AXES = [f"layers.{layer}.ffn" for layer in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    return save_decoder(tmp_path_factory.mktemp("llama") / "model", **sizes)


@pytest.fixture(scope="module")
def bundle(model: Path) -> Bundle:
    options: dict[str, Any] = {"buckets": [Bucket(1, 8)], "precisions": ["int4"], "levels": {"ffn": [1]}}
    path = nestforge.compile(model, "raspberry-pi-5", model.parent / "b", measure=False, **options)
    return nestforge.open_bundle(path)  # whose gates have passed


def test_the_store_has_them_once_and_all_others_in_4_bits(bundle: Bundle) -> None:
    with safe_open(bundle.file(WEIGHTS_NAME), framework="np") as store:
        names = set(store.keys())
    assert {name for name in names if name.endswith(".int8")} == {TABLE + ".int8", FIRST + ".int8", LAST + ".int8"}
    assert not {FIRST + ".int4", LAST + ".int4"} & names
    assert sum(name.endswith(".int4") for name in names) == 8 * 7 - 2 + 1


def test_the_manifest_names_them(bundle: Bundle) -> None:
    (engine,) = bundle.manifest.engines
    assert engine.metadata == {"products in 8 bits": f"{FIRST}, {LAST}"}


@pytest.mark.parametrize(("depth", "expected"), [(8, {FIRST, LAST}), (4, {FIRST})])
def test_a_plan_counts_them_and_a_layer_is_the_same_in_every_depth(model: Path, depth: int, expected: set[str]) -> None:
    source = open_source(model, exits=[4], precisions=("int4",), whole_along=AXES)
    found = source.stored_bytes(source.spec.submodel({"depth": depth}), "onnxruntime")
    assert {name for name, encoding in found if encoding == ".int8" and ".layers." in name} == expected
    assert found[FIRST, ".int8"] == 64 * 96
