from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from nestforge.compiler.graph.precision.half import half
from nestforge.compiler.graph.precision.range_scan import Overflow, overflowing
from onnx import TensorProto
from support.half_engines import parsed

TEXT = """m (float[2, 4] x, int64[1] ids) => (float[2, 4] y)
{ h = Gemm (x, w)  e = Gather (rows, ids)  a = Add (h, e)  s = Mul (a, a)  n = LayerNormalization (s, scale)
  y = Gemm (n, w) }"""
FEED = {"x": np.full((2, 4), 10, np.float32), "ids": np.zeros(1, np.int64)}


def _scan(folder: Path, *xs: float, rows: float = 2.0, w: float = 1.0) -> list[Overflow]:
    arrays = {
        "w": np.eye(4, dtype=np.float32) * w,
        "rows": np.full((3, 4), rows, np.float32),
        "scale": np.ones(4, np.float32),
    }
    template = parsed(TEXT, **{name: array.shape for name, array in arrays.items()})
    engine, offset = onnx.ModelProto(), 8
    engine.CopyFrom(template)
    with (folder / "weights.safetensors").open("wb") as store:
        store.write(bytes(offset))
        for tensor in engine.graph.initializer:
            store.write(arrays[tensor.name].tobytes())
            place = {"location": "weights.safetensors", "offset": offset, "length": arrays[tensor.name].nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            offset += arrays[tensor.name].nbytes
    feeds = [{**FEED, "x": np.array([[x, 0, -x, 1], [0] * 4], np.float32)} for x in xs]
    proto16 = half(template, {}, "fp16", ()).proto
    return overflowing(engine, proto16, folder, feeds)


def test_a_value_beyond_the_range_is_named_with_the_largest_of_all_inputs(tmp_path: Path) -> None:
    """300 + 2 squared is more than 65504; what LayerNormalization makes of it is not."""
    assert _scan(tmp_path, 10, 300, 20) == [Overflow("s", 302.0**2, 65504.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"], "the temporary graph is gone"


def test_nothing_is_found_where_everything_fits(tmp_path: Path) -> None:
    assert _scan(tmp_path, 1, -250) == []


def test_negative_values_and_inputs_count(tmp_path: Path) -> None:
    assert [(found.value, found.largest) for found in _scan(tmp_path, -80000, rows=0)] == [
        ("x", 80000.0),
        ("h", 80000.0),
        ("a", 80000.0),
        ("s", 80000.0**2),
    ]


def test_a_weight_beyond_the_range_is_named_though_no_input_meets_it(tmp_path: Path) -> None:
    assert [found.value for found in _scan(tmp_path, 0, w=-1e6)] == ["w", "h", "a", "s", "y"]


@pytest.mark.parametrize("x", [np.inf, np.nan])
def test_what_is_not_finite_is_beyond_any_limit(tmp_path: Path, x: float) -> None:
    found = _scan(tmp_path, x)
    assert {entry.largest for entry in found} == {np.inf}
    assert found[0].value == "x"


def test_values_that_stay_wide_are_not_scanned(tmp_path: Path) -> None:
    template = parsed("m (float[2, 4] x) => (float[2, 4] y) { e = Exp (x)  y = Sqrt (e) }")
    proto16 = half(template, {}, "fp16", ()).proto
    assert TensorProto.FLOAT16 not in {node.attribute[0].i for node in proto16.graph.node if node.op_type == "Cast"}
    assert overflowing(template, proto16, tmp_path, [{"x": np.full((2, 4), 20, np.float32)}]) == []
