"""Keeps weights out of reach of general optimisers: while they run, a weight is an input of the graph.

An optimiser may fold an initializer, rename it, or merge two that hold equal values. A weight must keep its name and
stay one tensor: two biases that are both zero shrink with different axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import onnx_ir as ir


@contextmanager
def weights_as_inputs(model: ir.Model, names: Collection[str]) -> Iterator[None]:
    """Within the block the initializers ``names`` are graph inputs; afterwards, however it ends, those still used are
    initializers."""
    graph = model.graph
    held = [(value, value.const_value) for name, value in graph.initializers.items() if name in names]
    for value, _ in held:
        del graph.initializers[value.name or ""]
        value.const_value = None
        graph.inputs.append(value)
    try:
        yield
    finally:
        for value, tensor in held:
            graph.inputs.remove(value)
            if value.uses():
                value.const_value = tensor
                graph.register_initializer(value)
