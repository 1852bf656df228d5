from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.compiler.graph.precision import calibrate as module
from nestforge.compiler.graph.precision.calibrate import Magnitudes, calibrate, observe, overflowing
from nestforge.compiler.graph.precision.error_feedback import seen_moments
from nestforge.compiler.graph.precision.half import half
from nestforge.errors import BuildError
from nestforge.profiles.precision import INT4
from nestforge.progress import heard_by
from onnx import TensorProto
from support.derived_engines import parsed


def magnitudes(*arrays: np.ndarray) -> Magnitudes:
    seen = Magnitudes()
    for array in arrays:
        seen.see(array)
    return seen


def error(array: np.ndarray, scale: float) -> float:
    """Error of int8, squared and summed."""
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


def stored(folder: Path, text: str, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The emitted graph ``text``, whose weights lie in a file of ``folder``."""
    model, content = parsed(text, **{name: array.shape for name, array in weights.items()}), b"header--"
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            raw = weights[tensor.name].tobytes()
            place = {"location": WEIGHTS_NAME, "offset": str(len(content)), "length": str(len(raw))}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
            content += raw
    (folder / WEIGHTS_NAME).write_bytes(content)
    return model


def graph(folder: Path, body: str, weights: dict[str, np.ndarray], rows: int = 4) -> onnx.ModelProto:
    """An emitted graph of ``x [rows, 32]``."""
    return stored(folder, f"agraph (float[{rows},32] x) => (float[{rows},32] out) {{ {body} }}", weights)


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
    model, feeds = graph(tmp_path, TWO, {"a": square(0), "b": square(1)}), [{"x": X}, {"x": broken}]
    said = "calibration: the input of a is not finite for an example; leave out what the float32 engine cannot answer"
    with pytest.raises(BuildError) as failure:
        calibrate(model, tmp_path, feeds, ())
    assert str(failure.value) == said
    with pytest.raises(BuildError) as failure:
        list(seen_moments(model, tmp_path, feeds, (), [np.ones((4, 1), bool)] * 2, {"a" + INT4, "b" + INT4}))
    assert str(failure.value) == said


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


GRAPH = """
  agraph (float[2,3] x) => (float[2,3] out)
  { a = Add (x, x) b = Mul (a, w) c = Relu (b) out = Neg (c) }
"""
W = np.array([1, -1, 2], np.float32)
FEEDS = [{"x": np.full((2, 3), number, np.float32)} for number in (1, -2)]


@pytest.fixture
def shown(tmp_path: Path) -> onnx.ModelProto:
    return stored(tmp_path, GRAPH, {"w": W})


def seen(shown: onnx.ModelProto, folder: Path, names: list[str]) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}

    def see(name: str, array: np.ndarray, number: int) -> None:
        assert number == len(found.setdefault(name, [])), "examples come in their order"
        found[name].append(array)

    observe(shown, folder, names, FEEDS, see)
    return found


@pytest.mark.parametrize("part_bytes", [1 << 20, 48, 1])
def test_every_value_is_shown_for_every_example(
    shown: onnx.ModelProto, tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART_BYTES", part_bytes)
    found = seen(shown, tmp_path, ["c", "a", "out", "a", "x"])
    assert found.keys() == {"a", "c", "out", "x"}
    for name, expected in {
        "x": [feeds["x"] for feeds in FEEDS],
        "a": [2 * feeds["x"] for feeds in FEEDS],
        "c": [np.maximum(2 * feeds["x"] * W, 0) for feeds in FEEDS],
        "out": [-np.maximum(2 * feeds["x"] * W, 0) for feeds in FEEDS],
    }.items():
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize(("part_bytes", "sessions"), [(1 << 20, 1), (48, 2), (1, 3)])
def test_large_values_are_left_to_another_session(
    shown: onnx.ModelProto, tmp_path: Path, part_bytes: int, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[list[str]] = []
    session = module._session
    monkeypatch.setattr(module, "_PART_BYTES", part_bytes)
    monkeypatch.setattr(module, "_session", lambda g, f, part: (opened.append(list(part)), session(g, f, part))[1])
    told: list[tuple[int, int]] = []
    with heard_by(lambda *now: told.append(now)):
        seen(shown, tmp_path, ["a", "b", "c"])
    assert len(opened) == sessions
    assert told == [(run, sessions * len(FEEDS)) for run in range(sessions * len(FEEDS))]
    assert [name for part in opened for name in part] == ["a", "b", "c"]


def test_the_graph_and_the_folder_stay_as_they_were(shown: onnx.ModelProto, tmp_path: Path) -> None:
    before = shown.SerializeToString()
    seen(shown, tmp_path, ["a", "b"])
    assert shown.SerializeToString() == before
    shown.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(Exception, match="NoSuchOperator"):
        observe(shown, tmp_path, ["b"], FEEDS, lambda name, array, number: None)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_NAME]


TEXT = """m (float[2, 4] x, int64[1] ids) => (float[2, 4] y)
{ h = Gemm (x, w)  e = Gather (rows, ids)  a = Add (h, e)  s = Mul (a, a)  n = LayerNormalization (s, scale)
  y = Gemm (n, w) }"""
FEED = {"x": np.full((2, 4), 10, np.float32), "ids": np.zeros(1, np.int64)}


def _scan(folder: Path, *xs: float, rows: float = 2.0, w: float = 1.0) -> dict[str, float]:
    arrays = {
        "w": np.eye(4, dtype=np.float32) * w,
        "rows": np.full((3, 4), rows, np.float32),
        "scale": np.ones(4, np.float32),
    }
    engine = stored(folder, TEXT, arrays)
    feeds = [{**FEED, "x": np.array([[x, 0, -x, 1], [0] * 4], np.float32)} for x in xs]
    proto16 = half(engine, {}, "fp16", ())[0]
    return overflowing(engine, proto16, folder, feeds)


def test_a_value_beyond_the_range_is_named_with_the_largest_of_all_inputs(tmp_path: Path) -> None:
    """300 + 2 squared is more than 65504; what LayerNormalization makes of it is not."""
    assert _scan(tmp_path, 10, 300, 20) == {"s": 302.0**2}
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"], "the temporary graph is gone"


def test_nothing_is_found_where_everything_fits(tmp_path: Path) -> None:
    assert _scan(tmp_path, 1, -250) == {}


def test_negative_values_and_inputs_count(tmp_path: Path) -> None:
    assert _scan(tmp_path, -80000, rows=0) == {"x": 80000.0, "h": 80000.0, "a": 80000.0, "s": 80000.0**2}


def test_a_weight_beyond_the_range_is_named_though_no_input_meets_it(tmp_path: Path) -> None:
    assert list(_scan(tmp_path, 0, w=-1e6)) == ["w", "h", "a", "s", "y"]


@pytest.mark.parametrize("x", [np.inf, np.nan])
def test_what_is_not_finite_is_beyond_any_limit(tmp_path: Path, x: float) -> None:
    found = _scan(tmp_path, x)
    assert set(found.values()) == {np.inf}
    assert next(iter(found)) == "x"


def test_values_that_stay_wide_are_not_scanned(tmp_path: Path) -> None:
    template = parsed("m (float[2, 4] x) => (float[2, 4] y) { e = Exp (x)  y = Sqrt (e) }")
    proto16 = half(template, {}, "fp16", ())[0]
    assert TensorProto.FLOAT16 not in {node.attribute[0].i for node in proto16.graph.node if node.op_type == "Cast"}
    assert overflowing(template, proto16, tmp_path, [{"x": np.full((2, 4), 20, np.float32)}]) == {}
