"""Short names for what nobody asks for by name: a bundle has one graph per submodel, and names are a third of each.

Ensures: inputs, outputs and the initializers in ``keep`` have their names; every other value is ``v0``, ``v1``... and
nodes, which ONNX identifies by their outputs, have none.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

import onnx_ir as ir


def shorten_names(model: ir.Model, keep: Collection[str]) -> bool:
    """Renames in place, in the order of the graph, so that the same graph gets the same names."""
    graph = model.graph
    fixed = {id(value) for value in (*graph.inputs, *graph.outputs)}
    fixed |= {id(value) for name, value in graph.initializers.items() if name in keep}
    taken = {*keep, *(value.name for value in (*graph.inputs, *graph.outputs))}
    fresh = (name for name in (f"v{number}" for number in count()) if name not in taken)
    values = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    renamed = [value for value in values if id(value) not in fixed]
    for number, value in enumerate(renamed):  # out of the way first: an old name may be another's new one
        value.name = f"\0{number}"
    for value in renamed:
        value.name = next(fresh)
    for node in graph:
        node.name = None
    return bool(renamed)
