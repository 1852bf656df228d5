from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from nestforge.bundle.manifest import WEIGHTS_NAME
from nestforge.compiler.graph.precision import observe as module
from nestforge.compiler.graph.precision.observe import observe

GRAPH = """
  agraph (float[2,3] x) => (float[2,3] out)
  { a = Add (x, x) b = Mul (a, w) c = Relu (b) out = Neg (c) }
"""
W = np.array([1, -1, 2], np.float32)
FEEDS = [{"x": np.full((2, 3), number, np.float32)} for number in (1, -2)]


@pytest.fixture
def graph(tmp_path: Path) -> onnx.ModelProto:
    """Its weight lies in a file of the folder."""
    (tmp_path / WEIGHTS_NAME).write_bytes(b"header--" + W.tobytes())
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {GRAPH}')
    external = onnx.TensorProto.EXTERNAL
    weight = onnx.TensorProto(name="w", dims=[3], data_type=onnx.TensorProto.FLOAT, data_location=external)
    for key, value in {"location": WEIGHTS_NAME, "offset": "8", "length": "12"}.items():
        weight.external_data.add(key=key, value=value)
    model.graph.initializer.append(weight)
    return model


def seen(graph: onnx.ModelProto, folder: Path, names: list[str]) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}

    def see(name: str, array: np.ndarray, number: int) -> None:
        assert number == len(found.setdefault(name, [])), "examples come in their order"
        found[name].append(array)

    observe(graph, folder, names, FEEDS, see)
    return found


@pytest.mark.parametrize("part_bytes", [1 << 20, 48, 1])
def test_every_value_is_shown_for_every_example(
    graph: onnx.ModelProto, tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART_BYTES", part_bytes)
    found = seen(graph, tmp_path, ["c", "a", "out", "a", "x"])
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
    graph: onnx.ModelProto, tmp_path: Path, part_bytes: int, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[list[str]] = []
    session = module._session
    monkeypatch.setattr(module, "_PART_BYTES", part_bytes)
    monkeypatch.setattr(module, "_session", lambda g, f, part: (opened.append(list(part)), session(g, f, part))[1])
    seen(graph, tmp_path, ["a", "b", "c"])
    assert len(opened) == sessions
    assert [name for part in opened for name in part] == ["a", "b", "c"]


def test_the_graph_and_the_folder_stay_as_they_were(graph: onnx.ModelProto, tmp_path: Path) -> None:
    before = graph.SerializeToString()
    seen(graph, tmp_path, ["a", "b"])
    assert graph.SerializeToString() == before
    graph.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(Exception, match="NoSuchOperator"):
        observe(graph, tmp_path, ["b"], FEEDS, lambda name, array, number: None)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_NAME]
