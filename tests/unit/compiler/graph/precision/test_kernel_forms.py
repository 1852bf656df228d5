"""Integer products and tables in the forms of ONNX Runtime's kernels for processors, by their numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.graph.encodings import encode, split_encoding
from nestforge.compiler.graph.precision.quantize import (
    dynamic,
    quantized,
    small_tables,
    static,
    weight_only,
)
from nestforge.compiler.graph.template import Template, emit
from nestforge.elastic import ElasticSpec
from onnx import TensorProto
from support.derived_engines import filled, parsed, rounded, run

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
    """Output of its QuantizeLinear for x, less the zero point."""
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
    scales = {"w.T" if transposed else "w": SCALE}
    qdq, lowered = (form(proto, scales, ()) for form in (quantized, static))
    operators = [node.op_type for node in lowered.graph.node]
    assert operators == ["QuantizeLinear", "QGemm", *(["Add"] if bias else [])]
    np.testing.assert_array_equal(
        integers(stored(lowered, tensors), tmp_path), integers(stored(qdq, tensors), tmp_path)
    )

    # Sums of integers are exact; their scale is rounded, and the bias that is added.
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


def test_int4_is_int8_in_outermost_products() -> None:
    proto, _ = product(False)
    assert weight_only(proto, (), {"w"}) == dynamic(proto, ()) != weight_only(proto, (), {"v"})


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
    expected = rounded(W, "w.int4")[ids]
    np.testing.assert_array_equal(answers["h"], expected)
    assert np.abs(expected - W[ids]).max() < np.abs(W).max() / 7
    assert np.vdot(answers["out"], expected @ W.T) > 0.98 * np.linalg.norm(answers["out"]) * np.linalg.norm(
        expected @ W.T
    )


@pytest.mark.parametrize("form", [dynamic, weight_only])
def test_a_table_stays_float32_where_the_product_does(form: Callable[..., onnx.ModelProto]) -> None:
    assert small_tables(form(tied(), ("out",))).graph.node == tied().graph.node
