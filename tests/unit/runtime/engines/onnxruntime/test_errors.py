from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
from nestforge.errors import BundleCorruptError, BundleError, BundleIncompatibleError
from nestforge.runtime.engines.onnxruntime.session import open_error
from onnx import TensorProto, helper


def graph(ir_version: int) -> bytes:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    nodes = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(nodes, opset_imports=opset, ir_version=ir_version).SerializeToString()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"not a graph", BundleCorruptError),
        (graph(ir_version=99), BundleIncompatibleError),
        (None, BundleCorruptError),
    ],
    ids=["damaged", "of a later release", "missing"],
)
def test_what_onnx_runtime_raises_is_named_by_its_cause(
    tmp_path: Path, content: bytes | None, expected: type[BundleError]
) -> None:
    path = tmp_path / "g.onnx"
    if content is not None:
        path.write_bytes(content)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception) as failure:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert open_error(failure.value) is expected
