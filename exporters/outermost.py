"""The weights that rounding costs most for their bytes: the last product of the FFN in the outermost layers.

They are known by their shapes and places alone, the same in every submodel of a model, so that plans know them before
anything is traced and a weight is stored once (docs/decisions/0054).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from .depth import LISTED

# The part of all layers that lies at each end; llama.cpp's mixtures of 4 bits take as much.
_PART = 8


def outermost_products(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """In the first and the last eighth of each list of layers, rounded down, the weight with more inputs than any other
    of its layer; none of a layer where several have as many. ``shapes`` are ``[..., out, in]``, by parameter."""
    lists = defaultdict[str, dict[int, dict[str, int]]](dict)
    for name, shape in shapes.items():
        if len(shape) in (2, 3) and (match := LISTED.match(name)):
            lists[match["list"]].setdefault(int(match["number"]), {})[name] = shape[-1]
    found = set[str]()
    for layers in lists.values():
        numbers = sorted(layers)
        for number in numbers[: len(numbers) // _PART] + numbers[len(numbers) - len(numbers) // _PART :]:
            inputs = layers[number]
            widest = [name for name in inputs if inputs[name] == max(inputs.values())]
            found |= {*widest} if len(widest) == 1 else set()
    return frozenset(found)
