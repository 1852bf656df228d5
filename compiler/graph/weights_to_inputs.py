"""Weights that every request brings anew, such as a task's: inputs of the engine in place of initializers.

Requires: initializers without values in the file. Ensures: the same function, of the other inputs and of these.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx


def weights_to_inputs(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Makes float32 inputs of the initializers in ``shapes``, behind the inputs that the model has, by name."""
    if not shapes:
        return
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in shapes]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    for name, shape in sorted(shapes.items()):
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
