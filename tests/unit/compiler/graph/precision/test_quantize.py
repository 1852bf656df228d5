"""Integer products written with QuantizeLinear and DequantizeLinear, on small graphs and on every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.graph.encodings import encode
from nestforge.compiler.graph.precision.quantize import (
    products,
    quantized,
)
from nestforge.compiler.tensorrt.graphs import accepted, unsupported
from onnx import TensorProto
from support.cost_eff_models import save_tiny
from support.derived_engines import FORMS, EncodedEngines, encoded_engines, filled, parsed, run
from support.gated_decoders import save_decoder
from support.tiny_matlm import save_tiny_matlm
from support.tiny_mixer import save_tiny_mixer
from support.tiny_models import add_pooling, save_tiny_encoder, save_tiny_vit

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
    """``x`` in int8 with zero point 0."""
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
LEAST = {"qdq": 0.995, "int8": 0.995, "int8-dynamic": 0.995, "int4": 0.85, "int4-g128": 0.85}
LEAST_ROUTED = {"qdq": 0.95, "int8": 0.95, "int8-dynamic": 0.85, "int4": 0.8, "int4-g128": 0.8}


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
