import numpy as np
import onnx
import pytest
from nestforge.compiler.tensorrt.graphs import in_parsed_operators, operator_tables, unsupported

MASK = "(int64[2,8] mask) => (int64[2,8] out)"


def model(body: str, signature: str = "(float[4,8] x) => (float[4,8] out)", opset: int = 20) -> onnx.ModelProto:
    """``zero`` is a constant of int8 that is 3."""
    head = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    return onnx.parser.parse_model(f"{head} agraph {signature} <int8 zero = {{3}}> {{ {body} }}")


def test_tables_name_their_releases_and_grow() -> None:
    oldest, latest = operator_tables()
    assert (oldest.release, oldest.opsets) == ((10, 0), (9, 20))
    assert (latest.release, latest.opsets) == ((10, 15), (9, 24))
    assert oldest.types.keys() < latest.types.keys()
    assert (len(oldest.types), len(latest.types)) == (150, 158)
    assert oldest.types["MatMul"] == {"FP32", "FP16", "BF16"}
    assert oldest.types["And"] == {"BOOL"}
    assert {"Unique", "DFT", "MatMulInteger", "Multinomial", "SequenceAt"}.isdisjoint(latest.types)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("out = Relu (x)", None),
        ("h = Cast <to = 10> (x) m = Softmax <axis = -1> (h) out = Cast <to = 1> (m)", None),
        ("h = Cast <to = 11> (x) out = Cast <to = 1> (h)", "Cast (node 'h'): FP64; expected one of BF16, BOOL"),
        ("b = Unique (x) out = Identity (x)", "Unique (node 'b'): the parser has no such operator"),
        ("c = NonZero (x) out = Identity (x)", "NonZero (node 'c'): its output's shape follows from values"),
        (
            "k = Constant <value = int64[1] {4}> () v, i = TopK <sorted = 0> (x, k) out = Identity (x)",
            "TopK (node 'v'): sorted 0; expected 1",
        ),
        (
            "k = Constant <value = int64[1] {3840}> () v, i = TopK (x, k) out = Identity (x)",
            "TopK (node 'v'): k 3840; expected fewer than 3840",
        ),
        ("k = Constant <value = int64[1] {3839}> () v, i = TopK (x, k) out = Identity (x)", None),
        (
            "i = Constant <value = int64[1,1] {0}> () u = Constant <value = float[1,8] {1,1,1,1,1,1,1,1}> ()"
            ' out = ScatterND <reduction = "add"> (x, i, u)',
            "ScatterND (node 'out'): reduction 'add'; expected none",
        ),
        (
            "i = Constant <value = int64[1,1] {0}> () u = Constant <value = float[1,8] {1,1,1,1,1,1,1,1}> ()"
            " out = ScatterND (x, i, u)",
            None,
        ),
        (
            "s = Shape (x) a = Gather <axis = 0> (s, s) t = ReduceSum <keepdims = 1> (x, a) out = Identity (x)",
            "ReduceSum (node 't'): input 1 is computed; expected a constant",
        ),
        (
            "w = Constant <value = float[8] {1,1,1,1,1,1,1,1}> () out, mean = LayerNormalization (x, w)",
            "LayerNormalization (node 'out'): returns mean or deviation; expected the first output alone",
        ),
        (
            "s = Constant <value = float {0.5}> () q = QuantizeLinear (x, s, zero) out = DequantizeLinear (q, s, zero)",
            "QuantizeLinear (node 'q'): a zero point other than 0",
        ),
        (
            "out = com.microsoft.Gelu (x)",
            "Gelu (node 'out'): belongs to com.microsoft, and the parser knows standard operators alone",
        ),
    ],
)
def test_each_restriction_is_refused_by_name(body: str, problem: str | None) -> None:
    found = unsupported(model(body))
    if problem is None:
        assert found == []
    else:
        assert found
        assert found[0].startswith(problem)


def test_a_problem_that_many_nodes_share_stands_once() -> None:
    (problem,) = unsupported(model("a = Bernoulli (x) b = Bernoulli (a) out = Identity (x)"))
    assert problem.startswith("Bernoulli (node 'a'): ")


def test_what_a_branch_holds_is_asked_too() -> None:
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Bernoulli", ["x"], ["inner"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, [4, 8])],
    )
    graph = model("c = Constant <value = bool {1}> () out = Identity (x)")
    graph.graph.node.append(
        onnx.helper.make_node("If", ["c"], ["chosen"], then_branch=branch, else_branch=branch, name="choice")
    )
    assert [line.partition(" ")[0] for line in unsupported(graph)] == ["Bernoulli"]


def test_releases_differ() -> None:
    norm = model("w = Constant <value = float[8] {1,1,1,1,1,1,1,1}> () out = RMSNormalization (x, w)", opset=23)
    assert unsupported(norm) == unsupported(norm, "10.3.0")
    assert unsupported(norm)[0] == "opset 23: expected 9 to 20"
    assert (
        "RMSNormalization (node 'out'): the parser has no such operator; TensorRT 10.15 and later have it"
        in (unsupported(norm)[1])
    )
    assert unsupported(norm, "10.16.1.11") == []
    assert unsupported(norm, "11.4.0.106") == []


@pytest.mark.parametrize("shape", ["2,8", "batch,sequence"])
def test_counts_over_a_mask_are_made_in_float(shape: str) -> None:
    """As RoBERTa's positions are, which count the tokens that are not padding; in a range no more than a bucket has."""
    graph = model(
        "b = Cast <to = 9> (mask) i = Cast <to = 6> (b) l = Cast <to = 7> (i) a = Constant <value = int64 {1}> ()"
        " out = CumSum (l, a)",
        MASK.replace("2,8", shape),
    )
    assert unsupported(graph) == ["CumSum (node 'out'): INT64; expected one of BF16, FP16, FP32"]
    before = onnx.reference.ReferenceEvaluator(graph)
    mask = np.array([[1, 1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1]])
    expected = before.run(None, {"mask": mask})[0]
    graph = in_parsed_operators(graph)
    assert in_parsed_operators(graph) is graph
    onnx.checker.check_model(graph)
    assert unsupported(graph) == []
    np.testing.assert_array_equal(onnx.reference.ReferenceEvaluator(graph).run(None, {"mask": mask})[0], expected)


@pytest.mark.parametrize(
    ("body", "signature"),
    [
        ("a = Constant <value = int64 {1}> () out = CumSum (mask, a)", MASK),  # any whole number
        (
            "b = Cast <to = 9> (mask) l = Cast <to = 7> (b) a = Constant <value = int64 {1}> () out = CumSum (l, a)",
            "(int64[N,8] mask) => (int64[N,8] out)",
        ),
        (
            "b = Cast <to = 9> (mask) l = Cast <to = 7> (b) a = Constant <value = int64 {1}> () out = CumSum (l, a)",
            "(int64[1,16777216] mask) => (int64[1,16777216] out)",
        ),
        ("a = Constant <value = int64 {1}> () out = CumSum (x, a)", "(float[4,8] x) => (float[4,8] out)"),
    ],
)
def test_sums_that_may_not_be_exact_stay(body: str, signature: str) -> None:
    graph = model(body, signature)
    assert in_parsed_operators(graph) is graph


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("out = TensorScatter <axis = 2> (k, q)", None),
        (
            'out = TensorScatter <axis = 2, mode = "circular"> (k, q)',
            "TensorScatter (node 'out'): mode 'circular'; expected linear",
        ),
    ],
)
def test_attention_over_a_cache_is_of_the_kind_that_the_parser_reads(body: str, problem: str | None) -> None:
    given = "float[1,2,3,8] q, float[1,2,9,8] k, float[1,2,9,8] v, bool[1,1,3,9] seen"
    text = f'<ir_version: 10, opset_import: ["" : 24]> agraph ({given}) => (float[1,2,3,8] out) {{ {body} }}'
    found = unsupported(onnx.parser.parse_model(text), "10.15")
    if problem is None:
        assert found == []
    else:
        assert any(line.startswith(problem) for line in found), found
