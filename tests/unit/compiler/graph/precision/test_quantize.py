from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.graph.emit import emit
from nestforge.compiler.graph.encodings import decoded, encode, split_encoding
from nestforge.compiler.graph.precision.quantize import (
    as_qgemm,
    dynamic,
    products,
    quantized,
    small_tables,
    weight_only,
)
from nestforge.compiler.graph.template import Template
from nestforge.compiler.tensorrt.graphs import accepted
from nestforge.compiler.tensorrt.operators import unsupported
from nestforge.elastic import ElasticSpec
from onnx import TensorProto
from support.cost_eff_models import save_tiny
from support.encoded_engines import FORMS, EncodedEngines, encoded_engines, filled, parsed, run
from support.gated_decoders import save_decoder
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import add_pooling, save_tiny_encoder
from support.tiny_vision import save_tiny_vit

HEAD = "agraph (float[4,64] x) => (float[4,48] out)"
# Two products of one value, one of what they make; a transposed weight, and a bias.
BODY = """
  a = Gemm <transB = 1> (x, up, bias) b = Gemm <transB = 1> (x, gate) h = Mul (a, b)
  out = Gemm <transB = 0> (h, down__T)
"""
SHAPES = {"up": (32, 64), "gate": (32, 64), "down__T": (32, 48), "bias": (32,)}
SCALES = {"up": 0.03, "gate": 0.03, "down.T": 0.25}
RNG = np.random.default_rng(0)
WEIGHTS = {name.replace("__", "."): RNG.standard_normal(shape).astype(np.float32) / 8 for name, shape in SHAPES.items()}
X = RNG.standard_normal((4, 64)).astype(np.float32)


def model(body: str = BODY, head: str = HEAD, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    return parsed(f"{head} {{ {body} }}", **(shapes or SHAPES))


def encoded(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The store's tensors that ``proto`` reads."""
    external = [t.name for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    return {name: encode(WEIGHTS[name.split(".int8")[0]], name) for name in external}


def rounded(x: np.ndarray, scale: float) -> np.ndarray:
    """What int8 with zero point 0 makes of ``x``."""
    return np.clip(np.rint(x / np.float32(scale)), -128, 127) * np.float32(scale)


def as_int8(name: str) -> np.ndarray:
    """A weight as the int8 one says it, ``[in, out]``."""
    integers, scale = encode(WEIGHTS[name], f"{name}.int8"), encode(WEIGHTS[name], f"{name}.int8-scale")
    return integers * scale if name.endswith(".T") else (integers * scale[:, None]).T


def test_a_graph_is_quantised_around_its_products() -> None:
    proto = model()
    before = proto.SerializeToString()
    found = quantized(proto, SCALES, ())
    assert proto.SerializeToString() == before
    assert [node.op_type for node in found.graph.node] == [
        *("QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "Gemm"),  # x once, and the first weight
        *("DequantizeLinear", "Gemm", "Mul"),
        *("QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "Gemm"),
    ]
    outputs = {name for node in found.graph.node for name in node.output}
    assert {"a", "b", "h", "out"} <= outputs
    external = {t.name: list(t.dims) for t in found.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert external == {
        "bias": [32],
        "up.int8": [32, 64],
        "up.int8-scale": [32],
        "gate.int8": [32, 64],
        "gate.int8-scale": [32],
        "down.T.int8": [32, 48],
        "down.T.int8-scale": [48],
    }
    axes = [node.attribute[0].i for node in found.graph.node if node.op_type == "DequantizeLinear" and node.attribute]
    assert axes == [0, 0, 1]
    assert [entry.domain for entry in found.opset_import] == [""]
    assert unsupported(found) == []


def test_it_computes_with_the_rounded_numbers(tmp_path: Path) -> None:
    proto = quantized(model(), SCALES, ())
    found = run(filled(proto, encoded(proto)), {"x": X}, tmp_path)["out"]
    x = rounded(X, 0.03)
    hidden = (x @ as_int8("up") + WEIGHTS["bias"]) * (x @ as_int8("gate"))
    np.testing.assert_allclose(found, rounded(hidden, 0.25) @ as_int8("down.T"), rtol=1e-5, atol=1e-5)


def test_a_value_is_quantised_once_for_each_scale() -> None:
    found = quantized(model(), {**SCALES, "gate": 0.05}, ())
    quantised = [node.input[0] for node in found.graph.node if node.op_type == "QuantizeLinear"]
    assert quantised == ["x", "x", "h"]


def test_one_weight_is_decoded_once() -> None:
    body = BODY.replace("gate", "up")
    found = quantized(model(body), SCALES, ())
    decodings = [node.input[0] for node in found.graph.node if node.op_type == "DequantizeLinear"]
    assert decodings.count("up.int8") == 1


def test_what_is_kept_stays_as_it_is() -> None:
    found = quantized(model(), SCALES, ("a", "out"))
    gemms = {node.output[0]: list(node.input) for node in found.graph.node if node.op_type == "Gemm"}
    assert gemms["a"] == ["x", "up", "bias"]
    assert gemms["out"] == ["h", "down.T"]
    external = {t.name for t in found.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert external == {"bias", "up", "gate.int8", "gate.int8-scale", "down.T"}
    everything = quantized(model(), SCALES, ("a", "b", "out"))
    assert everything.graph.node == model().graph.node


@pytest.mark.parametrize(
    ("body", "shapes"),
    [
        ("out = Gemm <transB = 1> (x, w)", {"w": (15, 64)}),
        ("y = Slice (x, from, to, axis) out = Gemm <transB = 1> (y, w)", {"w": (16, 31)}),
        ("out = Gemm <transB = 1, alpha = 2.0> (x, w)", {"w": (32, 64)}),
        ("out = Gemm <transB = 1, beta = 0.5> (x, w, bias)", {"w": (32, 64), "bias": (32,)}),
        ("out = Gemm <transA = 1, transB = 1> (x, w)", {"w": (32, 64)}),
        ("out = Gemm <transB = 1> (x, w, bias)", {"w": (32, 64), "bias": (4, 32)}),
        ("out = Gemm <transB = 1> (x, w, x)", {"w": (64, 64)}),
        ("v = Relu (w) out = Gemm <transB = 1> (x, v)", {"w": (32, 64)}),
        ("out = Gemm (x, w)", {"w": (64, 32)}),  # its scales would not be those of the outputs
        ("out = Gemm <transB = 1> (x, w__T)", {"w__T": (32, 64)}),
        ("out = MatMul (x, w)", {"w": (64, 32)}),
    ],
)
def test_everything_else_stays_float32(body: str, shapes: dict[str, tuple[int, ...]]) -> None:
    proto = model(body, "agraph (float[4,64] x) => (float[4,32] out)", **shapes)
    assert products(proto.graph, ()) == {}
    assert quantized(proto, {}, ()).graph.node == proto.graph.node


def test_a_weight_that_the_graph_holds_itself_stays_float32() -> None:
    proto = filled(model(), WEIGHTS)
    assert products(proto.graph, ()) == {}


def test_products_are_described_as_they_are_stored() -> None:
    found = products(model().graph, ("b",))
    assert list(found) == ["a", "out"]
    up, down = found.values()
    assert (up.x, up.weight, up.bias, up.inputs, up.outputs, up.transposed) == ("x", "up", "bias", 64, 32, False)
    assert (down.x, down.weight, down.bias, down.inputs, down.outputs, down.transposed) == (
        *("h", "down.T", None),
        *(32, 48, True),
    )
    assert (up.shape, down.shape) == ((32, 64), (32, 48))


def test_a_row_of_a_stack_is_a_weight() -> None:
    proto = model("out = Gemm <transB = 1> (x, w)", HEAD, w=(48, 64))
    proto.graph.node[0].input[1] = proto.graph.initializer[0].name = "stack[3]"
    found = quantized(proto, {"stack[3]": 0.1}, ())
    names = {t.name for t in found.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert names == {"stack[3].int8", "stack[3].int8-scale"}


def test_new_names_avoid_those_that_there_are() -> None:
    proto = model()
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = ["q1" if name == "h" else name for name in names]
    found = quantized(proto, SCALES, ())
    names = [name for node in found.graph.node for name in node.output]
    names += [tensor.name for tensor in found.graph.initializer]
    assert len(names) == len(set(names))
    assert "q1" in names


def test_a_product_of_joined_weights_takes_the_largest_of_their_scales() -> None:
    proto = parsed("agraph (float[4,64] x) => (float[4,48] out) { out = Gemm <transB = 1> (x, both) }", both=(48, 64))
    for place in (proto.graph.initializer[0].name, proto.graph.node[0].input[1]):
        assert place == "both"
    proto.graph.initializer[0].name = proto.graph.node[0].input[1] = "up+gate"
    found = quantized(proto, {"up": 0.03, "gate": 0.25}, ())
    scale = next(node.input[1] for node in found.graph.node if node.op_type == "QuantizeLinear")
    held = {tensor.name: tensor for tensor in found.graph.initializer}
    assert onnx.numpy_helper.to_array(held[scale]) == np.float32(0.25)
    assert {"up+gate.int8", "up+gate.int8-scale"} <= held.keys()


WIDE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}  # what is narrower is left in float32


def _pooled(folder: Path) -> Path:
    save_tiny_encoder(folder)
    add_pooling(folder)
    return folder


# Checkpoint, bucket, segment, a narrow submodel, and the products there are.
FAMILIES: dict[str, tuple[Callable[[Path], Any], Bucket, int | None, str | None, int]] = {
    "bert": (_pooled, Bucket(2, 8), None, "ffn16-heads1", 19),
    "cost_eff": (save_tiny, Bucket(2, 8), 1, None, 8),
    "matlm": (save_tiny_matlm, Bucket(2, 8), None, "ffn16", 19),
    "gated_decoder": (lambda folder: save_decoder(folder, "gemma3_text", **WIDE), Bucket(2, 8), None, "ffn16", 9),
    "vit": (lambda f: save_tiny_vit(f, "vit", "ForImageClassification", **WIDE), Bucket(2, 1), None, "ffn16", 12),
    "sparse_mixer": (lambda folder: save_tiny_mixer(folder, **WIDE), Bucket(2, 16), None, None, 14),
}
# The least cosine of an output to float32's. Tiny models with large random weights lose more than trained ones, and
# where tokens are routed, rounding takes some elsewhere.
LEAST = {"qdq": 0.995, "int8": 0.995, "int8-dynamic": 0.995, "int4": 0.85}
LEAST_ROUTED = {"qdq": 0.95, "int8": 0.95, "int8-dynamic": 0.85, "int4": 0.8}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncodedEngines, str]:
    save, bucket, segment, *_ = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save(folder / "m")
    return encoded_engines(folder, folder / "m", bucket, segment), request.param


def test_every_family_answers_almost_as_in_float32(family: tuple[EncodedEngines, str]) -> None:
    engines, name = family
    narrow, spec = FAMILIES[name][3], engines.model.spec
    least = LEAST_ROUTED if name == "sparse_mixer" else LEAST
    assert len(engines.scales) == FAMILIES[name][4]
    assert all(0 < scale < 1 for scale in engines.scales.values())
    for submodel in (spec.universal(), *([spec.parse(narrow)] if narrow else [])):
        expected = engines.answers("fp32", submodel)
        for form in FORMS:
            graph = engines.graph(form, submodel)
            (engines.folder / "checked.onnx").write_bytes(graph.SerializeToString())
            onnx.checker.check_model(engines.folder / "checked.onnx", full_check=True)
            found = engines.answers(form, submodel)
            for output, array in expected.items():
                assert (found[output].dtype, found[output].shape) == (array.dtype, array.shape)
                if array.dtype == np.float32:
                    lengths = np.linalg.norm(array) * np.linalg.norm(found[output])
                    assert least[form] < np.vdot(array, found[output]) / lengths < 1, (form, output)


def test_every_family_is_the_same_packed_and_mapped(family: tuple[EncodedEngines, str]) -> None:
    engines, _ = family
    universal = engines.model.spec.universal()
    for form in ("int8", "int8-dynamic"):
        packed, mapped = (engines.answers(form, universal, packed) for packed in (True, False))
        for output, array in packed.items():
            np.testing.assert_array_equal(mapped[output], array)


def test_every_family_is_taken_by_tensorrt_as_qdq_alone(family: tuple[EncodedEngines, str]) -> None:
    engines, _ = family
    universal = engines.model.spec.universal()
    assert accepted("qdq", engines.graph("qdq", universal).SerializeToString())
    domains = {entry.domain for entry in engines.graph("qdq", universal).opset_import}
    assert domains == {""}
    assert {entry.domain for entry in engines.graph("int8", universal).opset_import} == {"", "com.microsoft"}


def test_no_product_of_a_family_is_left_in_float32_but_small_ones(family: tuple[EncodedEngines, str]) -> None:
    engines, name = family
    graph = engines.templates["int8"].proto.graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    left = {node.input[1] for node in graph.node if node.op_type == "Gemm"}
    assert {weight for weight in left if "router" in weight or "exits" in weight} == {
        "cost_eff": {"exits.3.weight"},
        "sparse_mixer": {"layers.1.moe.router.weight", "layers.2.moe.router.weight"},
    }.get(name, set())
    for weight in left:
        inputs, outputs = shapes[weight] if weight.endswith(".T") else shapes[weight][::-1]
        assert inputs < 32 or outputs < 16, weight


# One product, and the numbers of it.
SUBMODEL = ElasticSpec((), ()).universal()
ROWS, INPUTS, OUTPUTS = 5, 96, 48
KERNEL_RNG = np.random.default_rng(0)
ROWS_X = (KERNEL_RNG.standard_normal((ROWS, INPUTS)) + 0.5).astype(np.float32)
W = (KERNEL_RNG.standard_normal((OUTPUTS, INPUTS)) / 8).astype(np.float32)
BIAS = KERNEL_RNG.standard_normal(OUTPUTS).astype(np.float32)
SCALE = 0.02
ROUNDED_ROWS = ["Abs", "ReduceMax", "Div", "QuantizeLinear"]
ONE_HEAD = f"agraph (float[{ROWS},{INPUTS}] x) => (float[{ROWS},{OUTPUTS}] out)"


def product(transposed: bool, bias: bool = True) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """One Gemm, and its tensors as they are stored."""
    weight = "w__T" if transposed else "w"
    body = f"out = Gemm <transB = {int(not transposed)}> (x, {weight}{', bias' if bias else ''})"
    shapes = {weight: (INPUTS, OUTPUTS) if transposed else (OUTPUTS, INPUTS), **({"bias": (OUTPUTS,)} if bias else {})}
    return parsed(f"{ONE_HEAD} {{ {body} }}", **shapes), {"bias": BIAS, "w": W, "w.T": np.ascontiguousarray(W.T)}


def stored(proto: onnx.ModelProto, tensors: dict[str, np.ndarray]) -> onnx.ModelProto:
    names = [t.name for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    return filled(proto, {name: encode(tensors[split_encoding(name)[0]], name) for name in names})


def integers(proto: onnx.ModelProto, folder: Path) -> np.ndarray:
    """What its QuantizeLinear makes of x, less the zero point."""
    quantise = next(node for node in proto.graph.node if node.op_type == "QuantizeLinear")
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    del shown.graph.output[:]
    shown.graph.output.append(onnx.ValueInfoProto(name=quantise.output[0]))
    zero = next(t for t in proto.graph.initializer if t.name == quantise.input[2])
    (found,) = run(shown, {"x": 40 * ROWS_X}, folder).values()  # far over both ends
    return found.astype(int) - int(onnx.numpy_helper.to_array(zero))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_qgemm_sums_the_integers_of_qdq(tmp_path: Path, transposed: bool, bias: bool, packed: bool) -> None:
    proto, tensors = product(transposed, bias)
    qdq = quantized(proto, {"w.T" if transposed else "w": SCALE}, ())
    lowered = as_qgemm(qdq)
    operators = [node.op_type for node in lowered.graph.node]
    assert operators == ["QuantizeLinear", "QGemm", *(["Add"] if bias else [])]
    np.testing.assert_array_equal(
        integers(stored(lowered, tensors), tmp_path), integers(stored(qdq, tensors), tmp_path)
    )

    # Of integers the sums are exact; what is rounded is their scale, and the bias that is added.
    sums = np.clip(np.rint(ROWS_X / np.float32(SCALE)), -128, 127).astype(np.int64) @ encode(W, "w.int8").T.astype(
        np.int64
    )
    exact = sums * (np.float32(SCALE).astype(np.float64) * encode(W, "w.int8-scale")) + (BIAS if bias else 0)
    largest = np.abs(sums).max() * SCALE * float(encode(W, "w.int8-scale").max()) + 4
    by_qgemm = run(stored(lowered, tensors), {"x": ROWS_X}, tmp_path, packed)["out"]
    np.testing.assert_allclose(by_qgemm, exact, rtol=0, atol=3 * largest * 2.0**-24)
    by_qdq = run(stored(qdq, tensors), {"x": ROWS_X}, tmp_path)["out"]
    np.testing.assert_allclose(by_qgemm, by_qdq, rtol=0, atol=INPUTS * largest * 2.0**-24)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_dynamic_scales_each_row_by_its_largest_magnitude(tmp_path: Path, transposed: bool, packed: bool) -> None:
    proto, tensors = product(transposed)
    found = dynamic(proto, ())
    assert [node.op_type for node in found.graph.node] == [*ROUNDED_ROWS, "QGemm", "Mul", "Add"]
    largest = np.abs(ROWS_X).max(axis=1, keepdims=True)
    rounded = np.rint(ROWS_X / largest * 127) / 127 * largest
    expected = rounded @ (encode(W, "w.int8").T * encode(W, "w.int8-scale")) + BIAS
    actual = run(stored(found, tensors), {"x": ROWS_X}, tmp_path, packed)["out"]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_row_is_what_it_is_alone_whatever_stands_beside_it(tmp_path: Path, transposed: bool, packed: bool) -> None:
    proto, tensors = product(transposed)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    graph = stored(dynamic(proto, ()), tensors)
    sizes = np.array([[1], [0], [1e-40], [1e30], [1000]], np.float32)
    together = run(graph, {"x": sizes * ROWS_X}, tmp_path, packed)["out"]
    for row in range(ROWS):
        alone = run(graph, {"x": (sizes * ROWS_X)[row : row + 1]}, tmp_path, packed)["out"]
        np.testing.assert_array_equal(together[row], alone[0])
    np.testing.assert_array_equal(together[1], BIAS)  # of a row of zeros


@pytest.mark.parametrize("spoiling", [np.inf, -np.inf])
def test_an_infinite_number_stays_in_its_row_and_shows(tmp_path: Path, spoiling: float) -> None:
    proto, tensors = product(True)
    graph = stored(dynamic(proto, ()), tensors)
    spoilt = ROWS_X.copy()
    spoilt[2, 7] = spoiling
    expected, found = (run(graph, {"x": x}, tmp_path)["out"] for x in (ROWS_X, spoilt))
    assert not np.isfinite(found[2]).any()
    np.testing.assert_array_equal(np.delete(found, 2, axis=0), np.delete(expected, 2, axis=0))


def decoded_int4(array: np.ndarray) -> np.ndarray:
    packed, scale = encode(array, "w.int4"), encode(array, "w.int4-scale")
    values = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.float32).reshape(*packed.shape[:2], 32) - 8
    return (values * scale[..., None]).reshape(len(array), -1)[:, : array.shape[1]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_int4_multiplies_by_the_weights_of_the_store(tmp_path: Path, bias: bool, packed: bool) -> None:
    proto, tensors = product(False, bias)
    found = weight_only(proto, ())
    assert [node.op_type for node in found.graph.node] == ["MatMulNBits"]
    expected = ROWS_X @ decoded_int4(W).T + (BIAS if bias else 0)
    # Packed, the activations are int8 too, with a scale for each block of 32.
    step = float(np.abs(ROWS_X).max()) / 127
    allowed = 1e-5 if not packed else step / 2 * float(np.abs(W).sum(axis=1).max()) / 3
    actual = run(stored(found, tensors), {"x": ROWS_X}, tmp_path, packed)["out"]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=allowed)


def test_int4_is_int8_where_inputs_shrink() -> None:
    proto, _ = product(True)
    assert weight_only(proto, ()) == dynamic(proto, ())


def test_a_prefix_of_an_int4_weight_gives_a_prefix_of_the_answer(tmp_path: Path) -> None:
    proto, tensors = product(False)
    whole = stored(weight_only(proto, ()), tensors)
    expected = run(whole, {"x": ROWS_X}, tmp_path)["out"]
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in whole.graph.initializer}
    for tensor in whole.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name][:20], tensor.name))
    whole.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 20
    whole = onnx.ModelProto.FromString(emit(Template(Bucket(1, 16), whole, {}, None), {}, SUBMODEL))
    np.testing.assert_array_equal(run(whole, {"x": ROWS_X}, tmp_path)["out"], expected[:, :20])


@pytest.mark.parametrize("form", [dynamic, weight_only])
def test_kept_products_stay_as_they_are(form: Callable[..., onnx.ModelProto]) -> None:
    proto, _ = product(False)
    assert form(proto, ("out",)) == proto


def test_one_value_is_scaled_once_at_run_time() -> None:
    body = "a = Gemm <transB = 1> (x, v) b = Gemm <transB = 1> (x, w) out = Add (a, b)"
    found = dynamic(parsed(f"{ONE_HEAD} {{ {body} }}", v=(OUTPUTS, INPUTS), w=(OUTPUTS, INPUTS)), ())
    assert [node.op_type for node in found.graph.node] == [*ROUNDED_ROWS, *["QGemm", "Mul"] * 2, "Add"]


def table(body: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    return parsed(f"agraph (int64[2,3] ids) => (float[2,3,32] out) {{ {body} }}", **shapes)


@pytest.mark.parametrize("packed", [True, False])
def test_a_table_takes_rows_of_int8(tmp_path: Path, packed: bool) -> None:
    rng = np.random.default_rng(0)
    array = rng.standard_normal((50, 32)).astype(np.float32) * rng.uniform(0.01, 10, (50, 1)).astype(np.float32)
    found = small_tables(table("out = Gather (words, ids)", words=(50, 32)))
    external = {t.name: list(t.dims) for t in found.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert external == {"words.int8": [50, 32], "words.int8-scale": [50]}
    ids = rng.integers(0, 50, (2, 3))
    actual = run(stored(found, {"words": array}), {"ids": ids}, tmp_path, packed)["out"]
    expected = encode(array, "words.int8")[ids] * encode(array, "words.int8-scale")[ids][..., None]
    np.testing.assert_array_equal(actual, expected)
    assert np.abs(actual - array[ids]).max() < np.abs(array[ids]).max() / 63 / 1.9


@pytest.mark.parametrize(
    ("body", "shapes"),
    [
        ("out = Gather (kinds, ids)", {"kinds": (2, 32)}),
        ("n = Gather (narrow, ids) out = Concat <axis = 2> (n, n)", {"narrow": (50, 16)}),
        ("g = Gather (words, ids) w = Neg (words) h = Gather (w, ids) out = Add (g, h)", {"words": (50, 32)}),
        ("t = Gather <axis = 1> (turned, ids) out = Transpose <perm = [1, 2, 0]> (t)", {"turned": (32, 50)}),
    ],
)
def test_other_tables_stay_as_they_are(body: str, shapes: dict[str, tuple[int, ...]]) -> None:
    proto = table(body, **shapes)
    assert small_tables(proto).graph.node == proto.graph.node


TIED = "e = Gather (w, ids) h = Reshape (e, shape) out = Gemm <transB = 1> (h, w)"


def tied(inputs: int = INPUTS) -> onnx.ModelProto:
    proto = parsed(f"agraph (int64[6] ids) => (float[6,{OUTPUTS}] out) {{ {TIED} }}", w=(OUTPUTS, inputs))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([6, inputs]), "shape"))
    return proto


@pytest.mark.parametrize(
    ("form", "inputs", "encodings"),
    [
        (dynamic, INPUTS, {"int8", "int8-scale", "int8-zero"}),
        (weight_only, INPUTS, {"int4", "int4-scale"}),
        (weight_only, INPUTS - 8, {"int8", "int8-scale", "int8-zero"}),  # rows that are no blocks of 32
    ],
)
def test_a_weight_that_is_a_table_too_is_stored_once(
    form: Callable[..., onnx.ModelProto], inputs: int, encodings: set[str]
) -> None:
    found = small_tables(form(tied(inputs), ()))
    names = {t.name for t in found.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert names == {f"w.{encoding}" for encoding in encodings}


def test_a_table_in_blocks_gives_the_numbers_that_its_product_has(tmp_path: Path) -> None:
    proto = tied()
    proto.graph.output[0].name = "h"
    proto.graph.output.append(onnx.helper.make_tensor_value_info("out", TensorProto.FLOAT, [6, OUTPUTS]))
    ids = KERNEL_RNG.integers(0, OUTPUTS, 6)
    answers = run(stored(small_tables(weight_only(proto, ())), {"w": W}), {"ids": ids}, tmp_path)
    expected = decoded(W, "w.int4")[ids]
    np.testing.assert_array_equal(answers["h"], expected)
    assert np.abs(expected - W[ids]).max() < np.abs(W).max() / 7
    assert np.vdot(answers["out"], expected @ W.T) > 0.98 * np.linalg.norm(answers["out"]) * np.linalg.norm(
        expected @ W.T
    )


@pytest.mark.parametrize("form", [dynamic, weight_only])
def test_a_table_stays_float32_where_the_product_does(form: Callable[..., onnx.ModelProto]) -> None:
    assert small_tables(form(tied(), ("out",))).graph.node == tied().graph.node
