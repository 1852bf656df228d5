"""Parameters of the usual layers, by the names that torch gives them (no torch here)."""

from __future__ import annotations

Shape = tuple[int, ...]


def linear_shapes(name: str, inputs: int, outputs: int, bias: bool = True) -> dict[str, Shape]:
    """Of a linear layer called ``name``."""
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def norm_shapes(name: str, width: int) -> dict[str, Shape]:
    """Of a LayerNorm called ``name``."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
