"""Pairs of low-rank matrices taken out of a template: what is left is the layer beside, under the sum's name."""

from __future__ import annotations

import onnx
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.graph.template import Template
from nestforge.compiler.graph.without_pairs import without_pairs
from nestforge.errors import BuildError

PAIR = """
    a = Gemm(x, down)
    b = Gemm(a, up)
    c = Reshape(b, s)
    w = Gemm(x, weight)
    y = Reshape(w, s)
    {end}
"""


# The parser takes no dots in names.
NAMES = {"down": "l.lora_A.weight.T", "up": "l.lora_B.weight", "weight": "l.weight"}


def template(end: str, outputs: str = "float[2,4] z") -> Template:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[2,4] x) => ({outputs}) '
        "<int64[2] s = {2, 4}, float[4,1] down = {1, 1, 1, 1}, float[1,4] up = {1, 1, 1, 1}, float[1,1] weight = {1}> "
        f"{{ {PAIR.format(end=end)} }}"
    )
    for tensor in proto.graph.initializer:
        if tensor.name != "s":
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.name = NAMES[tensor.name]
    for node in proto.graph.node:
        node.input[:] = [NAMES.get(name, name) for name in node.input]
    return Template(Bucket(1, 2), proto, {"l": "t", "l.lora_B": "b", "other": "z"}, None)


@pytest.mark.parametrize("total", ["Add(y, c)", "Add(c, y)"])
def test_the_layer_takes_the_name_of_the_sum(total: str) -> None:
    found = without_pairs(template(f"t = {total} z = Tanh(t)"))
    graph = found.proto.graph
    assert [(node.op_type, *node.input, *node.output) for node in graph.node] == [
        ("Gemm", "x", "l.weight", "w"),
        ("Reshape", "w", "s", "t"),
        ("Tanh", "t", "z"),
    ]
    assert [tensor.name for tensor in graph.initializer] == ["s", "l.weight"]
    assert found.module_outputs == {"l": "t", "other": "z"}, "a module that is gone returns nothing"


def test_a_sum_may_be_an_output() -> None:
    graph = without_pairs(template("z = Add(y, c)")).proto.graph
    assert [node.output[0] for node in graph.node] == ["w", "z"]


def test_a_template_without_pairs_is_itself() -> None:
    plain = without_pairs(template("z = Add(y, c)"))
    assert without_pairs(plain) is plain


def test_a_pair_that_is_no_summand_is_refused() -> None:
    with pytest.raises(BuildError, match=r"l\.lora_B\.weight is no summand of its layer; nothing can be merged"):
        without_pairs(template("z = Mul(y, c)"))
    with pytest.raises(BuildError, match="is no summand"):
        without_pairs(template("t = Add(y, c) u = Tanh(c) z = Add(t, u)"))
    with pytest.raises(BuildError, match=r"l\.lora_A\.weight\.T, is read beside its layer"):
        without_pairs(template("z = Add(y, c) u = Tanh(a)", "float[2,4] z, float[2,1] u"))
