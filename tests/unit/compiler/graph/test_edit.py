import numpy as np
import onnx
from nestforge.compiler.graph.edit import Edit, uses
from nestforge.compiler.graph.passes.operators import MICROSOFT
from onnx import TensorProto
from support.derived_engines import parsed

TEXT = "agraph (float[2,4] x, bool c) => (float[2,4] out) { a = Add (x, w) q0 = Relu (a) out = Neg (q0) }"


def test_a_graph_written_again_is_the_same_graph() -> None:
    proto = parsed(TEXT, w=(4,))
    edit = Edit(proto)
    edit.nodes += edit.source
    assert edit.done() == proto


def test_what_leads_nowhere_is_left_out() -> None:
    edit = Edit(parsed(TEXT, w=(4,)))
    edit.add("Add", ["x", edit.constant(np.ones(4, np.float32))])
    edit.add("Neg", ["x"], ["out"])
    found = edit.done().graph
    assert [node.op_type for node in found.node] == ["Neg"]
    assert list(found.initializer) == []


def test_names_are_new_and_equal_constants_one() -> None:
    edit = Edit(parsed(TEXT, w=(4,)))
    edit.nodes += edit.source[:2]
    one, same = (edit.constant(np.array(1, np.float32)) for _ in range(2))
    others = [edit.constant(np.array(1, np.int8)), edit.constant(np.ones(1, np.float32))]
    assert one == same
    names = [one, *others, edit.add("Split", ["x"], 2), *edit.nodes[-1].output[1:]]
    assert names == ["q1", "q2", "q3", "q4", "q5"]  # q0 is taken


def test_an_encoded_weight_is_named_once() -> None:
    edit = Edit(parsed(TEXT, w=(4,)))
    names = {edit.encoded("w", ".int8", TensorProto.INT8, [4]) for _ in range(2)}
    edit.add("Cast", [names.pop()], ["out"], to=TensorProto.FLOAT)
    (tensor,) = edit.done().graph.initializer
    assert (tensor.name, tensor.data_type, list(tensor.dims)) == ("w.int8", TensorProto.INT8, [4])
    assert tensor.data_location == TensorProto.EXTERNAL
    assert not names


def test_the_domain_of_the_kernels_is_named_where_they_are() -> None:
    edit = Edit(parsed(TEXT, w=(4,)))
    edit.add("QuickGelu", ["x"], ["out"], MICROSOFT)
    once = edit.done()
    assert [(entry.domain, entry.version) for entry in once.opset_import] == [("", 20), (MICROSOFT, 1)]
    again = Edit(once)
    again.nodes += again.source
    assert again.done() == once


def test_graphs_inside_nodes_read_too() -> None:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> {TEXT[: TEXT.index("{")]}'
        "{ a = Neg (x) b = Relu (x) d = Abs (x)"
        " out = If (c) <then_branch = t () => (float[2,4] y) { y = Neg (a) },"
        " else_branch = e () => (float[2,4] z) { z = Neg (b) }> }"
    )
    assert uses(proto.graph) == {"x": 3, "a": 1, "b": 1, "c": 1, "y": 1, "z": 1, "out": 1}
    edit = Edit(proto)
    edit.nodes += edit.source
    assert [node.output[0] for node in edit.done().graph.node] == ["a", "b", "out"]
