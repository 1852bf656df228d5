from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from nestforge.compiler.work.release_memory import release_memory
from nestforge.runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, session_options


def test_the_arena_keeps_nothing_of_a_large_run() -> None:
    sizes = onnx.helper.make_tensor_value_info("sizes", onnx.TensorProto.INT64, [1])
    one, found = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in ("one", "found"))
    nodes = [
        onnx.helper.make_node("Expand", ["one", "sizes"], ["many"]),
        onnx.helper.make_node("ReduceSum", ["many"], ["found"], keepdims=0),
    ]
    graph = onnx.helper.make_graph(nodes, "large", [one, sizes], [found])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(1, OPTIMIZATION_LEVEL, packed=False)
    )
    release_memory()
    before = _anonymous()
    for many in (2**24, 2**25):  # 64 and 128 MB
        session.run(None, {"one": np.ones((), np.float32), "sizes": np.array([many])})
    held = _anonymous()
    release_memory()
    assert held - before > 128e6
    assert _anonymous() - before < 64e6
    assert session.run(None, {"one": np.ones((), np.float32), "sizes": np.array([8])}) == [8]


def _anonymous() -> int:
    """Bytes of memory that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
