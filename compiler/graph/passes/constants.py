"""Constants that passes add."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


def int64_constant(values: Sequence[int]) -> ir.Node:
    """A Constant node holding an int64 vector, with its type and shape known."""
    node = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(values, np.int64))})
    node.outputs[0].shape = ir.Shape([len(values)])
    node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    return node
