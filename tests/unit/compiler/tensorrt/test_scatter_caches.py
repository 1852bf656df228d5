"""Attention over a cache as TensorRT takes it, against the operator of ONNX Runtime that it replaces; both run here."""

import numpy as np
import onnx
import onnxruntime
import pytest
from nestforge.compiler.tensorrt.graphs import unsupported
from nestforge.compiler.tensorrt.scatter_caches import scatter_caches
from nestforge.errors import BuildError
from onnx import TensorProto, helper

CAPACITY, SIZE = 24, 8
Arrays = dict[str, np.ndarray]


def attending(heads: int, shared: int, window: int = -1, cap: float = 0.0, bias: bool = False) -> onnx.ModelProto:
    """Two layers: one that writes its keys and values, and one that reads the same with other queries."""
    wide, narrow = (f"batch,sequence,{n * SIZE}" for n in (heads, shared))
    cache = f"batch,{shared},capacity,{SIZE}"
    attention = (
        f"com.microsoft.GroupQueryAttention <num_heads = {heads}, kv_num_heads = {shared}, scale = 0.3, "
        f"softcap = {cap:f}, local_window_size = {window}>"
    )
    by_distance = """
        count = Cast <to = 7> (total)
        places = Range (none, count, step)
        distances = Cast <to = 1> (places)
        rows_bias = Mul (distances, slopes)
        tokens = Shape <start = 1, end = 2> (query)
        each = Concat <axis = 0> (one, one, tokens, one)
        bias = Expand (rows_bias, each)"""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]> attending (
            float[{wide}] query, float[{wide}] other, float[{narrow}] key, float[{narrow}] value,
            float[{cache}] past_key, float[{cache}] past_value, int32[batch] last, int32 total
        ) => (float[{wide}] out, float[{wide}] read, float[{cache}] key_after, float[{cache}] value_after)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64 none = {{0}}, int64 step = {{1}}> {{
            {by_distance if bias else ""}
            unread = Shape (query)
            [own] out, key_after, value_after = {attention} (query, key, value, past_key, past_value, last, total)
            no_key = Slice (key, zero, zero, one)
            no_value = Slice (value, zero, zero, one)
            [reading] read = {attention} (other, no_key, no_value, key_after, value_after, last, total)
        }}""")
    slopes = [0.1 * (head + 1) for head in range(heads)]
    model.graph.initializer.append(helper.make_tensor("slopes", TensorProto.FLOAT, [1, heads, 1, 1], slopes))
    own = next(node for node in model.graph.node if node.name == "own")
    own.input.extend(["", "", "", "bias"] if bias else [])
    return model


def answers(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """The caches bound to one buffer each, as a session has them."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    buffers = {
        kind: onnxruntime.OrtValue.ortvalue_from_numpy(feeds[f"past_{kind}"].copy()) for kind in ("key", "value")
    }
    binding = session.io_binding()
    for value in session.get_inputs():
        kind = value.name.removeprefix("past_")
        if kind in buffers and kind != value.name:
            binding.bind_ortvalue_input(value.name, buffers[kind])
        else:
            binding.bind_cpu_input(value.name, feeds[value.name])
    for kind, buffer in buffers.items():
        binding.bind_ortvalue_output(f"{kind}_after", buffer)
    for name in ("out", "read"):
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    names = [*(f"{kind}_after" for kind in buffers), "out", "read"]
    returned = dict(zip(names, binding.get_outputs(), strict=True))
    return {name: value.numpy().copy() for name, value in returned.items()}


def feeds_for(heads: int, shared: int, tokens: int, before: list[int], seed: int) -> Arrays:
    """``tokens`` new ones of each row behind so many ``before``; what lies behind them in the cache is hidden."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    rows, last = len(before), np.array(before, np.int32) + tokens - 1
    return {
        **{name: normal(rows, tokens, heads * SIZE) for name in ("query", "other")},
        **{name: normal(rows, tokens, shared * SIZE) for name in ("key", "value")},
        **{name: normal(rows, shared, CAPACITY, SIZE) for name in ("past_key", "past_value")},
        "last": last,
        "total": np.array(last.max() + 1, np.int32),
    }


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("window", "cap"), [(-1, 0.0), (5, 0.0), (-1, 0.7), (1, 0.7)])
@pytest.mark.parametrize(("tokens", "before"), [(6, [0]), (5, [11]), (1, [23]), (1, [0, 7, 20])])
def test_it_is_what_the_operator_computes(
    heads: int, shared: int, window: int, cap: float, tokens: int, before: list[int]
) -> None:
    model = attending(heads, shared, window, cap)
    feeds = feeds_for(heads, shared, tokens, before, seed=heads + tokens)
    expected = answers(model, feeds)
    model = scatter_caches("engine e", model, CAPACITY)
    found = answers(model, feeds)
    for name in ("key_after", "value_after"):
        np.testing.assert_array_equal(found[name], expected[name])
    for name in ("out", "read"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


def test_the_parser_takes_it_from_the_release_on_that_has_caches() -> None:
    model = attending(4, 2, window=5)
    refused = unsupported(model, "10.15")
    assert any("belongs to com.microsoft" in problem for problem in refused)
    model = scatter_caches("engine e", model, CAPACITY)
    onnx.checker.check_model(model)
    assert unsupported(model, "10.15") == []
    earlier = unsupported(model, "10.14")
    assert any("TensorScatter" in line and "TensorRT 10.15 and later have it" in line for line in earlier)


def test_every_cache_is_an_input_of_one_size_and_comes_back_by_a_scatter() -> None:
    model = attending(4, 2)
    model = scatter_caches("engine e", model, CAPACITY)
    graph = model.graph
    sizes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    makers = {name: node for node in graph.node for name in node.output}
    for kind in ("key", "value"):
        scatter = makers[f"{kind}_after"]
        assert (scatter.op_type, scatter.input[0]) == ("TensorScatter", f"past_{kind}")
        assert sizes[f"past_{kind}"][1:] == sizes[f"{kind}_after"][1:] == [2, CAPACITY, SIZE]
    products = [node for node in graph.node if node.op_type == "MatMul"]
    assert [node.input[0] for node in products[::2]] == ["key_after"] * 2
    assert [node.input[1] for node in products[1::2]] == ["value_after"] * 2
    assert len({node.input[0] for node in graph.node if node.op_type == "Where"}) == 1, "one mask for all layers"
    assert "unread" not in makers
    assert not {"no_key", "no_value"} & makers.keys()


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize(("tokens", "before"), [(6, [0]), (5, [11]), (1, [23]), (1, [0, 7, 20])])
def test_a_bias_by_distance_is_added_where_a_token_sees(window: int, tokens: int, before: list[int]) -> None:
    model = attending(4, 2, window, bias=True)
    feeds = feeds_for(4, 2, tokens, before, seed=tokens)
    expected = answers(model, feeds)
    model = scatter_caches("engine e", model, CAPACITY)
    onnx.checker.check_model(model)
    assert unsupported(model, "10.15") == []
    found = answers(model, feeds)
    for name in ("key_after", "value_after"):
        np.testing.assert_array_equal(found[name], expected[name])
    for name in ("out", "read"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


def test_a_bias_of_capped_scores_is_refused() -> None:
    with pytest.raises(BuildError, match=r"^engine e: attention with a soft cap and a bias by distance; expected one"):
        scatter_caches("engine e", attending(4, 2, cap=0.7, bias=True), CAPACITY)
