"""Widths and numbers of heads, one per layer."""

from __future__ import annotations

from collections.abc import Sequence


def one_per_layer(values: Sequence[int] | None, layers: int) -> Sequence[int | None]:
    """``values``, or as many None (all that a layer holds). Raises ValueError unless there is one per layer."""
    if values is None:
        return [None] * layers
    if len(values) != layers:
        raise ValueError(f"expected {layers} values, one per layer, got {len(values)}")
    return values
