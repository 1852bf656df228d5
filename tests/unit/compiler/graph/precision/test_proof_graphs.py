from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import Bundle
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.graph.encodings import encode
from nestforge.compiler.graph.precision.half import half
from nestforge.compiler.graph.precision.proof_graphs import (
    emulated,
    exact,
    proof_bundle,
    proof_graph,
    with_proof_graphs,
)
from nestforge.compiler.graph.stored_numbers import StoredNumbers
from nestforge.profiles.precision import INT4, INT8, Precision
from onnx import TensorProto, numpy_helper
from support.derived_engines import encoded_engines, rounded, run, run_alone
from support.tiny_compile import save_tiniest


@pytest.fixture
def bundle(builder: EngineBuilder) -> Bundle:
    """Two engines, of which one is in bfloat16; both for TensorRT."""
    one = EngineEntry("a@b1-s8", "a", Bucket(1, 8), "tensorrt", "a.b1-s8.onnx", "sliced", 0, 0, 0, 0)
    engines = (one, replace(one, id="b@b1-s8", submodel="b", file="b.b1-s8.onnx", precision="bf16"))
    return replace(builder.bundle, manifest=replace(builder.bundle.manifest, engines=engines))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int8-dynamic", "int4"])
def test_every_engine_but_one_in_bfloat16_is_proven_by_its_own_graph(precision: Precision) -> None:
    assert proof_graph(b"a graph", precision) == b"a graph"


def test_proof_graphs_run_in_onnx_runtime_under_the_names_of_their_engines(bundle: Bundle, tmp_path: Path) -> None:
    here = with_proof_graphs(bundle, tmp_path)
    assert here.path == tmp_path
    assert [(engine.backend, engine.file) for engine in here.manifest.engines] == [
        ("onnxruntime", "a.b1-s8.onnx"),
        ("onnxruntime", "b.b1-s8.onnx"),
    ]


def test_a_bundle_without_bfloat16_is_not_copied(bundle: Bundle) -> None:
    plain = replace(bundle, manifest=replace(bundle.manifest, engines=bundle.manifest.engines[:1]))
    with proof_bundle(plain) as here:
        assert here.path == plain.path
        assert here.manifest.engines[0].backend == "onnxruntime"


def test_emulations_lie_in_a_folder_that_is_gone_afterwards(builder: EngineBuilder, bundle: Bundle) -> None:
    whole = builder.universal.spec.universal()
    engine = builder.build(whole, next(iter(builder.cases)))
    for file in ("a.b1-s8.onnx", "b.b1-s8.onnx"):
        (bundle.path / file).write_bytes((bundle.path / engine.file).read_bytes())
    with proof_bundle(bundle) as here:
        folder: Path = here.path
        assert folder != bundle.path
        assert {engine.file for engine in here.manifest.engines} <= {path.name for path in folder.iterdir()}
    assert not folder.exists()


def test_proof_graphs_never_lie_in_the_bundle(builder: EngineBuilder) -> None:
    engine = builder.build(builder.universal.spec.universal(), next(iter(builder.cases)))
    assert (builder.proofs.path / engine.file).samefile(builder.stage.folder / engine.file)
    assert builder.proofs.path.parent == builder.stage.work
    assert {path.name for path in builder.stage.folder.glob("*.onnx")} == {engine.file}


DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
RNG = np.random.default_rng(0)
# In steps and of a size that float32 sums exactly in any order, and that 16 bits do not hold.
X, W, V = (RNG.integers(-2048, 2048, shape).astype(np.float32) / 1024 for shape in ((3, 4), (4, 5), (5, 2)))


def _model(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (("w", W), ("v", V)))
    return model


@pytest.mark.parametrize("precision", DTYPES)
def test_what_16_bits_hold_is_rounded_and_what_stays_wide_is_not(precision: Any) -> None:
    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(DTYPES[precision]).astype(np.float32)

    model = _model(
        """m (float[3, 4] x) => (float[3, 2] y, float[3, 5] p, float[5, 3] t)
        { h = Gemm (x, w)  n = Neg (h)  t = Transpose (n)  p = Softmax (h)  y = Gemm (n, v) }"""
    )
    engine = half(model, {}, precision, ())[0]
    found = run_alone(emulated(engine.SerializeToString()), {"x": X})
    h = rounded(rounded(X) @ rounded(W))
    assert np.array_equal(found["t"], -h.T)
    assert np.array_equal(found["y"], rounded(-h @ rounded(V)))
    exponents = np.exp(h - h.max(-1, keepdims=True))
    np.testing.assert_allclose(found["p"], exponents / exponents.sum(-1, keepdims=True), rtol=1e-5)
    assert not np.array_equal(found["p"], rounded(found["p"]))
    assert not np.array_equal(found["y"], run_alone(model.SerializeToString(), {"x": X})["y"])


def test_an_emulation_reads_the_engines_own_weights_and_computes_in_float32() -> None:
    engine = half(_model("m (float[3, 4] x) => (float[3, 5] y) { y = Gemm (x, w) }"), {}, "bf16", ())[0]
    before = engine.SerializeToString()
    graph = onnx.ModelProto.FromString(emulated(before))
    assert graph.graph.initializer == engine.graph.initializer
    kinds = {v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(graph).graph.value_info}
    gemm = next(node for node in graph.graph.node if node.op_type == "Gemm")
    assert {kinds[name] for name in (*gemm.input, *gemm.output)} == {TensorProto.FLOAT}
    assert before == engine.SerializeToString()


def test_a_float32_engine_is_its_own_emulation() -> None:
    model = _model("m (float[3, 4] x) => (float[3, 2] y) { h = Gemm (x, w)  y = Gemm (h, v) }")
    assert onnx.ModelProto.FromString(emulated(model.SerializeToString())) == model


def test_a_mask_that_is_made_narrow_stays_a_mask() -> None:
    model = _model("m (bool[3, 4] keep) => (float[3, 5] y) { k = Cast <to=1> (keep)  n = Neg (k)  y = Gemm (n, w) }")
    engine = half(model, {}, "bf16", ())[0]
    keep = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
    expected = -(keep @ W.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.array_equal(run_alone(emulated(engine.SerializeToString()), {"keep": keep})["y"], expected)


BUCKET = Bucket(2, 8)
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
FORMS = ("qdq", "int8", "int8-dynamic", "int4")


@pytest.mark.parametrize(("form", "neurons"), [*((form, 64) for form in FORMS), ("int4", 48), ("int4-g128", 160)])
def test_without_the_rounding_of_activations_nothing_is_left_but_that_of_weights(
    tmp_path: Path, form: str, neurons: int
) -> None:
    """Of 48 and of 160 inputs the last block of 4 bits is not full."""
    engines = encoded_engines(
        tmp_path, save_tiniest(tmp_path / "model", **WIDE | {"intermediate_size": neurons}), BUCKET
    )
    whole = engines.model.spec.universal()
    graph = engines.graph(form, whole)
    left = onnx.ModelProto.FromString(exact(graph.SerializeToString()))
    kinds = {node.op_type for node in left.graph.node}
    assert not kinds & {"QGemm", "QuantizeLinear", "DynamicQuantizeLinear", "MatMulNBits"}
    turned = [sum(node.op_type == "Transpose" for node in one.graph.node) for one in (graph, left)]
    assert turned[0] == turned[1], "a decoded weight, the largest that a run holds, is there once"
    found, rounded = (run(one, engines.feeds, engines.folder, True) for one in (left, graph))
    stored = StoredNumbers(engines.model, [engines.folder / WEIGHTS_NAME], tmp_path)
    module = stored.in_model(engines.templates[form].weights).narrow(whole, {})
    import torch

    with torch.no_grad():
        results = module(*(torch.from_numpy(array) for array in engines.feeds.values()))
    for name, expected in zip(found, results, strict=True):
        np.testing.assert_allclose(found[name], expected.numpy(), atol=2e-5)
        assert np.abs(rounded[name] - expected.numpy()).max() > 1e-4, "the engine itself rounds"


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"bits": 8}, r"\(8, 32\)"),
        ({"block_size": 64}, r"\(4, 64\)"),
        ({"zero_points": "z"}, r"\(4, 32, 'z'\)"),
        ({"g_idx": "g"}, r"\(4, 32, 'g'\)"),
    ],
)
def test_products_with_4_bits_of_another_kind_are_not_taken_for_ours(change: dict[str, Any], got: str) -> None:
    said = {"bits": 4, "block_size": 32, "zero_points": "", "g_idx": ""} | change
    inputs = ["x", "w", "s", said.pop("zero_points"), said.pop("g_idx"), "b"]
    node = onnx.helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", K=64, N=32, **said)
    shapes = {"w": (32, 2, 16), "s": (32, 2), "z": (32, 1), "g": (64,), "b": (32,)}
    given = [numpy_helper.from_array(np.zeros(shape, np.uint8), name) for name, shape in shapes.items()]
    graph = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [], given))
    with pytest.raises(AssertionError, match=rf"MatMulNBits y: expected .*\(4, 128\)\], got {got}"):
        exact(graph.SerializeToString())


def test_a_largest_number_of_an_input_is_left_alone() -> None:
    """A sentence model whose tokens are pooled by max asks the mask, an input, whether there is any."""
    graph = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        agraph (int64[2, 8] mask) => (int64[2, 1] y) <int64[1] width = {-1}> { y = ReduceMax (mask, width) }
        """
    )
    left = onnx.ModelProto.FromString(exact(graph.SerializeToString()))
    assert [node.op_type for node in left.graph.node] == ["ReduceMax"]


def test_the_model_itself_is_left_alone(tmp_path: Path) -> None:
    engines = encoded_engines(tmp_path, save_tiniest(tmp_path / "model", **WIDE), BUCKET)
    before = {name: p.detach().clone() for name, p in engines.model.parameters().items()}
    stored = StoredNumbers(engines.model, [engines.folder / WEIGHTS_NAME], tmp_path)
    other = stored.in_model(engines.templates["int8"].weights)
    changed = {name for name, p in other.universal.parameters().items() if not p.equal(before[name])}
    assert changed
    assert all(p.dim() == 2 for name, p in other.universal.parameters().items() if name in changed)
    assert all(p.equal(before[name]) for name, p in engines.model.parameters().items())


@pytest.mark.parametrize(("name", "steps"), [("w" + INT8, 63), ("w.T" + INT8, 63), ("w" + INT4, 7)])
def test_decoded_numbers_are_half_a_step_away_at_most(name: str, steps: int) -> None:
    array = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    found = rounded(array, name)
    assert found.shape == array.shape
    assert found.dtype == np.float32
    assert np.abs(found - array).max() <= np.abs(array).max() / steps
    if name.endswith(INT8):
        np.testing.assert_array_equal(encode(found, name), encode(array, name))
