"""What TensorRT made of a graph, read from the JSON of its engine inspector.

TensorRT 10 and 11 spell it differently: the tensors stand under ``Bindings`` as names, or under ``I/O Tensors`` as
objects; a layer is a name, or an object where the plan was built with details.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import BuildError
from ...strict import parse_json

_UNKNOWN_KIND = "unknown"
# TensorRT's own name of a layer that only changes a tensor's layout or type.
_REFORMAT = "Reformat"


@dataclass(frozen=True)
class Layers:
    """Inputs and outputs by name, and how many layers of each kind run, reformats among them."""

    tensors: tuple[str, ...]
    kinds: Mapping[str, int]

    @property
    def count(self) -> int:
        """How many layers run."""
        return sum(self.kinds.values())

    @property
    def reformats(self) -> int:
        """How many of them only change a tensor's layout or type."""
        return self.kinds.get(_REFORMAT, 0)


def read_layers(text: str) -> Layers:
    """Reads the inspector's answer. Raises BuildError for anything that neither release writes."""
    try:
        data = parse_json(text, strict=False)
        layers, tensors = data["Layers"], data["I/O Tensors"] if "I/O Tensors" in data else data["Bindings"]
        names = tuple(tensor["Name"] if isinstance(tensor, dict) else str(tensor) for tensor in tensors)
        kinds = Counter(_kind(layer) for layer in layers)
    except (ValueError, KeyError, TypeError) as failure:
        raise BuildError(f"engine inspector: expected its JSON of TensorRT 10 or 11, got {text[:80]!r}") from failure
    return Layers(names, dict(sorted(kinds.items())))


def _kind(layer: Any) -> str:
    return str(layer.get("LayerType", _UNKNOWN_KIND)) if isinstance(layer, dict) else _UNKNOWN_KIND
