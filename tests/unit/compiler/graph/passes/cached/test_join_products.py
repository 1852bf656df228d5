from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.cached.join_products import Joined, join_products, joined_parts

# Queries, keys and values of the same tokens, and a product of what they make.
LAYER = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (float[5, 4] x) => (float[5, 4] y)
{
  q = Gemm <transB = 1> (x, wq, bq)
  k = Gemm <transB = 1> (x, wk, bk)
  v = Gemm <transB = 1> (x, wv, bv)
  seen = Mul (k, v)
  wide = Concat <axis = 1> (seen, q)
  y = Gemm <transB = 1> (wide, wo)
}
"""
RNG = np.random.default_rng(0)
SHAPES = {"wq": (24, 4), "wk": (16, 4), "wv": (16, 4), "wo": (4, 40), "bq": (24,), "bk": (16,), "bv": (16,)}
WEIGHTS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def joined(
    text: str = LAYER, parameters: Collection[str] = frozenset(SHAPES), weights: Mapping[str, np.ndarray] = WEIGHTS
) -> tuple[onnx.ModelProto, ir.Model, Joined]:
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    before = onnx.shape_inference.infer_shapes(proto)
    model = ir.from_proto(before)
    return before, model, join_products(model, parameters)


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def require_same(before: onnx.ModelProto, model: ir.Model) -> None:
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    runs = (onnxruntime.InferenceSession(proto.SerializeToString()) for proto in (before, ir.to_proto(model)))
    expected, found = (session.run(None, {"x": x})[0] for session in runs)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_products_of_one_value_are_one_over_weights_side_by_side() -> None:
    before, model, found = joined()
    assert kinds(model) == {"Gemm": 2, "Split": 1, "Mul": 1, "Concat": 1}
    assert found.names == {"wq+wk+wv", "bq+bk+bv"}
    weight = model.graph.initializers["wq+wk+wv"].const_value
    assert weight is not None
    np.testing.assert_array_equal(weight.numpy(), np.concatenate([WEIGHTS[name] for name in ("wq", "wk", "wv")]))
    assert not {"wq", "wk", "wv", "bq", "bk", "bv"} & model.graph.initializers.keys()
    assert {old.name: new.producer() and new.producer().op_type for old, new in found.values.items()} == {
        "q": "Split",
        "k": "Split",
        "v": "Split",
    }
    require_same(before, model)


def test_parts_are_named_by_the_whole() -> None:
    assert joined_parts("wq+wk+wv") == ("wq", "wk", "wv")
    assert joined_parts("wq") == ("wq",)


def test_products_with_a_bias_and_those_without_are_joined_apart() -> None:
    before, model, found = joined(LAYER.replace("(x, wk, bk)", "(x, wk)").replace("(x, wv, bv)", "(x, wv)"))
    assert found.names == {"wk+wv"}
    assert kinds(model) == {"Gemm": 3, "Split": 1, "Mul": 1, "Concat": 1}
    require_same(before, model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Gemm <transB = 1> (x, wk", "Gemm <transB = 1, alpha = 2.0> (x, wk"),
        ("  k = Gemm <transB = 1> (x,", "  other = Neg (x)\n  k = Gemm <transB = 1> (other,"),
        ("(k, v)", "(k, v)\n  again = MatMul (k, wk)"),  # something else reads the weight
    ],
    ids=["a factor", "another value", "a weight read twice"],
)
def test_what_is_no_such_product_stays(old: str, new: str) -> None:
    text = LAYER.replace(old, new)
    assert text != LAYER
    before, model, found = joined(text)
    assert found.names == {"wq+wv", "bq+bv"}
    require_same(before, model)


def test_what_is_no_joinable_parameter_stays() -> None:
    """As what an axis cuts."""
    _, model, found = joined(parameters=WEIGHTS.keys() - {"wk", "bv"})
    assert (found.names, found.values) == (frozenset(), {})
    assert kinds(model)["Gemm"] == 4


def test_what_is_too_short_for_integers_is_not_joined() -> None:
    """Keys of 15 outputs and as many values: as they are, no precision changes them, and none has a scale for them."""
    narrow = {name: array[..., :39] if name == "wo" else array for name, array in WEIGHTS.items()}
    narrow |= {name: WEIGHTS[name][:15] for name in ("wk", "wv", "bk", "bv")}
    before, model, found = joined(weights=narrow)
    assert found.names == set()
    assert kinds(model)["Gemm"] == 4
    require_same(before, model)
