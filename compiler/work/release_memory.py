"""Memory of work that is done goes back to the system before more is begun."""

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ...runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, session_options
from .tensor_file import release_pages


def release_memory() -> None:
    """Releases pages of files and of heaps, and what the arena of ONNX Runtime keeps."""
    release_pages()
    release_arena()


def release_arena() -> None:
    """Releases what the arena of ONNX Runtime keeps: it grows by doubling and never shrinks by itself, and a table of 4
    bits is widened in it, 1 GB of a vocabulary of 128,000 and 2,048 hidden."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _smallest_session().run(None, {"x": np.zeros(1, np.float32)}, options)


@cache
def _smallest_session() -> Any:
    one = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "smallest", one[:1], one[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    options = session_options(1, OPTIMIZATION_LEVEL, packed=False)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
