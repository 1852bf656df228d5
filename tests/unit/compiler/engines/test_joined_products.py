"""Products of decoders that generate: joined with their biases, and the outermost ones of int4 in 8 bits."""

from collections import Counter
from pathlib import Path
from typing import Any

import nestforge
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import Bundle
from nestforge.compiler.graph.encodings import parts_of
from nestforge.exporters.source import open_source
from nestforge.profiles.precision import FP32, INT4, INT4_SCALE, encoded_bytes
from safetensors import safe_open
from support.gated_decoders import save_decoder

_ATTENTION = "model.layers.0.self_attn"
_WEIGHT, _BIAS = ("+".join(f"{_ATTENTION}.{name}_proj.{kind}" for name in "qkv") for kind in ("weight", "bias"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("qwen2")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8, "max_position_embeddings": 38}
    model = save_decoder(folder / "model", "qwen2", use_sliding_window=False, **sizes)
    options: dict[str, Any] = {"buckets": [Bucket(1, 8)], "include": "levels", "precisions": ["fp32", "int4"]}
    path = nestforge.compile(model, "raspberry-pi-5", folder / "b", generate=True, measure=False, **options)
    return nestforge.open_bundle(path)  # whose gates have passed


def engines(bundle: Bundle) -> list[EngineEntry]:
    generation = bundle.manifest.generation
    return [engine for engine in generation.engines if engine.submodel.startswith("ffn32")]


def graph_of(bundle: Bundle, engine: EngineEntry) -> onnx.GraphProto:
    return onnx.load(bundle.file(engine.file), load_external_data=False).graph


def places(graph: onnx.GraphProto) -> dict[str, tuple[int, int]]:
    """Offset and length of each initializer that lies in the weight store."""
    named = {tensor.name: {one.key: one.value for one in tensor.external_data} for tensor in graph.initializer}
    return {name: (int(one["offset"]), int(one["length"])) for name, one in named.items() if one}


def test_a_step_has_one_product_for_queries_keys_and_values(bundle: Bundle) -> None:
    kinds = {}
    for engine in engines(bundle):
        graph = graph_of(bundle, engine)
        kinds[engine.precision] = Counter(node.op_type for node in graph.node)
        encoding = {"fp32": FP32, "int4": INT4}[engine.precision]
        assert {_WEIGHT + encoding, _BIAS} <= places(graph).keys()
        assert engine.weight_bytes == sum(length for _, length in places(graph).values())
    assert kinds["fp32"]["Gemm"] == 6, "attention, gate and up, which an axis cuts, down, and the head"
    assert (kinds["int4"]["MatMulNBits"], kinds["int4"]["Split"]) == (5, 1)


def test_engines_without_a_cache_read_the_parts_where_they_lie(bundle: Bundle) -> None:
    joined = {name: place for engine in engines(bundle) for name, place in places(graph_of(bundle, engine)).items()}
    plain = {
        name: place
        for engine in bundle.manifest.engines
        for name, place in places(graph_of(bundle, engine)).items()
        if _ATTENTION in name and "o_proj" not in name
    }
    assert len(plain) == 3 + 3 + 2 * 3, "weights and biases, weights in 4 bits and their scales"
    for name in (_WEIGHT, _BIAS, _WEIGHT + INT4, _WEIGHT + INT4_SCALE):
        end, length = joined[name]
        for part in parts_of(name):
            assert plain[part][0] == end
            end += plain[part][1]
        assert end == joined[name][0] + length


def test_nothing_is_stored_twice(bundle: Bundle) -> None:
    with safe_open(bundle.file(WEIGHTS_NAME), framework="np") as store:
        names = list(store.keys())
        for encoding in (FP32, INT4, INT4_SCALE):
            assert store.get_tensor(_WEIGHT + encoding).nbytes == encoded_bytes((64, 32), encoding)
    assert set(Counter(part for name in names for part in parts_of(name)).values()) == {1}


TABLE = "model.embed_tokens.weight"
FIRST, LAST = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 7))
AXES = [f"layers.{layer}.ffn" for layer in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    return save_decoder(tmp_path_factory.mktemp("llama") / "model", **sizes)


@pytest.fixture(scope="module")
def llama(model: Path) -> Bundle:
    options: dict[str, Any] = {"buckets": [Bucket(1, 8)], "precisions": ["int4"], "levels": {"ffn": [1]}}
    path = nestforge.compile(model, "raspberry-pi-5", model.parent / "b", measure=False, **options)
    return nestforge.open_bundle(path)  # whose gates have passed


def test_the_store_has_them_once_and_all_others_in_4_bits(llama: Bundle) -> None:
    with safe_open(llama.file(WEIGHTS_NAME), framework="np") as store:
        names = set(store.keys())
    assert {name for name in names if name.endswith(".int8")} == {TABLE + ".int8", FIRST + ".int8", LAST + ".int8"}
    assert not {FIRST + ".int4", LAST + ".int4"} & names
    assert sum(name.endswith(".int4") for name in names) == 8 * 7 - 2 + 1


def test_the_manifest_names_them(llama: Bundle) -> None:
    (engine,) = llama.manifest.engines
    assert engine.metadata == {"products in 8 bits": f"{FIRST}, {LAST}"}


@pytest.mark.parametrize(("depth", "expected"), [(8, {FIRST, LAST}), (4, {FIRST})])
def test_a_plan_counts_them_and_a_layer_is_the_same_in_every_depth(model: Path, depth: int, expected: set[str]) -> None:
    source = open_source(model, exits=[4], precisions=("int4",), whole_along=AXES)
    found = source.stored_bytes(source.spec.submodel({"depth": depth}), "onnxruntime")
    assert {name for name, encoding in found if encoding == ".int8" and ".layers." in name} == expected
    assert found[FIRST, ".int8"] == 64 * 96
