from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.compiler.graph.precision.calibrate import Magnitudes, calibrate
from nestforge.errors import BuildError
from onnx import TensorProto


def magnitudes(*arrays: np.ndarray) -> Magnitudes:
    seen = Magnitudes()
    for array in arrays:
        seen.see(array)
    return seen


def error(array: np.ndarray, scale: float) -> float:
    """What int8 leaves over, squared and summed."""
    return float(np.square(np.clip(np.rint(array / scale), -128, 127) * scale - array).sum())


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(-12, 12)), min_size=1, max_size=6), st.randoms())
@settings(max_examples=40, deadline=None)
def test_order_and_grouping_of_examples_do_not_matter(parts: list[tuple[int, int]], random: Random) -> None:
    arrays = [np.random.default_rng(seed).standard_normal(50).astype(np.float32) * 2.0**power for seed, power in parts]
    shuffled = random.sample(arrays, len(arrays))
    whole, turned, joined = magnitudes(*arrays), magnitudes(*shuffled), Magnitudes()
    for array in arrays:
        joined.join(magnitudes(array))
    for other in (turned, joined, magnitudes(np.concatenate(arrays))):
        assert (other.limit, other.largest) == (whole.limit, whole.largest)
        np.testing.assert_array_equal(other.counts, whole.counts)
        assert other.scale() == whole.scale()
    assert whole.counts.sum() == 50 * len(arrays)


def test_zeros_count_for_nothing_and_powers_of_two_have_a_bin() -> None:
    seen = magnitudes(np.array([0, 0.5, -1, 0], np.float32))
    assert (seen.limit, seen.largest, seen.counts.sum()) == (2.0, 1.0, 2)
    seen.see(np.zeros(3, np.float32))
    assert seen.counts.sum() == 2
    seen.see(np.array([2.0], np.float32))
    assert (seen.limit, seen.counts[2048]) == (4.0, 1)


def test_the_scale_leaves_less_than_its_neighbours() -> None:
    heavy = np.append(np.random.default_rng(0).standard_normal(100_000), -20).astype(np.float32)
    seen = magnitudes(heavy)
    scale = seen.scale()
    assert seen.whole_scale() == float(np.float32(20 / 127))
    assert scale < 0.7 * seen.whole_scale()
    for other in (0.8 * scale, 1.25 * scale, seen.whole_scale()):
        assert error(heavy, scale) < error(heavy, other)


def test_an_even_spread_is_not_clipped() -> None:
    even = np.linspace(-3, 3, 10_001, dtype=np.float32)
    assert magnitudes(even).scale() == pytest.approx(3 / 127, rel=0.02)


def graph(folder: Path, body: str, weights: dict[str, np.ndarray], rows: int = 4) -> onnx.ModelProto:
    """An emitted graph of ``x [rows, 32]`` whose weights lie in a file of ``folder``."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> agraph (float[{rows},32] x) => (float[{rows},32] out) {{ {body} }}'
    )
    offset = 0
    for name, array in weights.items():
        tensor = TensorProto(
            name=name, dims=array.shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL
        )
        for key, value in {"location": WEIGHTS_NAME, "offset": offset, "length": array.nbytes}.items():
            tensor.external_data.add(key=key, value=str(value))
        model.graph.initializer.append(tensor)
        offset += array.nbytes
    (folder / WEIGHTS_NAME).write_bytes(b"".join(array.tobytes() for array in weights.values()))
    return model


def square(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((32, 32)).astype(np.float32)


TWO = "h = Gemm <transB = 1> (x, a) r = Relu (h) out = Gemm <transB = 1> (r, b)"
X = np.random.default_rng(3).standard_t(3, (4, 32)).astype(np.float32)


def test_each_weight_has_the_scale_of_its_input(tmp_path: Path) -> None:
    weights = {"a": square(0), "b": square(1)}
    model = graph(tmp_path, TWO, weights)
    feeds = [{"x": X}, {"x": 3 * X}]
    hidden = [np.maximum(arrays["x"] @ weights["a"].T, 0) for arrays in feeds]
    found = calibrate(model, tmp_path, feeds, ())
    assert found.keys() == {"a", "b"}
    assert found["a"] == magnitudes(X, 3 * X).scale()
    assert found["b"] == pytest.approx(magnitudes(*hidden).scale(), rel=1e-4)
    assert calibrate(model, tmp_path, feeds, ("out",)).keys() == {"a"}
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_NAME]


def test_two_products_of_one_weight_share_a_scale(tmp_path: Path) -> None:
    weights = {"a": square(0)}
    model = graph(tmp_path, TWO.replace("(r, b)", "(r, a)"), weights)
    hidden = np.maximum(X @ weights["a"].T, 0)
    found = calibrate(model, tmp_path, [{"x": X}], ())
    assert found == {"a": pytest.approx(magnitudes(X, hidden).scale(), rel=1e-4)}
    assert found["a"] != pytest.approx(magnitudes(X).scale(), rel=1e-2)


def test_what_a_softmax_compares_is_not_clipped(tmp_path: Path) -> None:
    """Queries and keys, and with them what else reads the value; not what comes after."""
    x = np.random.default_rng(0).standard_normal((2048, 32)).astype(np.float32)
    x[7, 5] = 6
    body = """
      q = Gemm <transB = 1> (x, a) k = Gemm <transB = 1> (x, b) t = Transpose (k)
      s = MatMul (q, t) z = Add (s, s) p = Softmax (z)
      y = Relu (x) v = Gemm <transB = 1> (y, c) o = MatMul (p, v) u = Gemm <transB = 1> (x, d) out = Add (o, u)
    """
    model = graph(tmp_path, body, {name: square(seed) for seed, name in enumerate("abcd")}, rows=2048)
    found = calibrate(model, tmp_path, [{"x": x}], ())
    assert found["a"] == found["b"] == found["d"] == magnitudes(x).whole_scale()
    positive = magnitudes(np.maximum(x, 0))
    assert found["c"] == positive.scale() < positive.whole_scale()


def test_a_layer_that_no_example_reaches_is_named(tmp_path: Path) -> None:
    model = graph(tmp_path, TWO, {"a": -np.abs(square(0)), "b": square(1)})
    with pytest.raises(BuildError) as failure:
        calibrate(model, tmp_path, [{"x": np.abs(X)}, {"x": 2 * np.abs(X)}], ())
    assert str(failure.value) == (
        "calibration: the input of b is 0 in every example, so it has no int8 scale; add examples that reach this "
        "layer, or choose another precision"
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_named(tmp_path: Path, bad: float) -> None:
    broken = X.copy()
    broken[1, 2] = bad
    with pytest.raises(BuildError) as failure:
        calibrate(graph(tmp_path, TWO, {"a": square(0), "b": square(1)}), tmp_path, [{"x": X}, {"x": broken}], ())
    assert str(failure.value) == (
        "calibration: the input of a is not finite for an example; leave out what the float32 engine cannot answer"
    )


def test_padding_has_no_say(tmp_path: Path) -> None:
    weights = {"a": square(0), "b": square(1)}
    model = graph(tmp_path, TWO, weights)
    padded = X.copy()
    padded[2:] = 100.0
    counted = [np.array([[True, True], [False, False]])]
    found = calibrate(model, tmp_path, [{"x": padded}], (), counted)
    hidden = np.maximum(X[:2] @ weights["a"].T, 0)
    assert found["a"] == magnitudes(X[:2]).scale()
    assert found["b"] == pytest.approx(magnitudes(hidden).scale(), rel=1e-4)
