"""How far attention reaches back: the window of a gated decoder, as the class of its model type reads it (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ....errors import CheckpointError
from ....strict import structure

_SLIDING = "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """The keys that classes with windows read, with the defaults that they share."""

    num_hidden_layers: int
    sliding_window: int | None = field(default=None, metadata={"min": 1})
    use_sliding_window: bool | None = False
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: int = field(default=6, metadata={"min": 1})
    use_bidirectional_attention: bool | None = None


# How many tokens each layer sees, by what a configuration states; None for one that sees all.
Window = Callable[[_Stated], list[int | None]]


def read_windows(window: Window | None, config: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    """``window`` of a model type applied to its ``config`` of so many ``layers``, the defaults of its class included; a
    model type without one passes over every key of it. Raises CheckpointError for keys of another type, and for types
    of another number of layers."""
    if window is None:
        return (None,) * layers
    known = {key.name: config[key.name] for key in fields(_Stated) if key.name in config}
    stated = structure(_Stated, known, where, CheckpointError)
    if stated.layer_types is not None and len(stated.layer_types) != layers:
        raise CheckpointError(
            f"{where}: layer_types: expected one for each of {layers} layers, got {len(stated.layer_types)}"
        )
    return tuple(window(stated))


def of_every_layer(stated: _Stated) -> list[int | None]:
    """Mistral and Phi-3: as stated; ``use_sliding_window`` is no key of theirs."""
    return [stated.sliding_window] * stated.num_hidden_layers


def of_later_layers(stated: _Stated) -> list[int | None]:
    """Qwen: where it is switched on, in the layers from ``max_window_layers`` on, or of the types that are named."""
    if not stated.use_sliding_window:
        return [None] * stated.num_hidden_layers
    return _by_type(stated, lambda layer: layer >= stated.max_window_layers)


def of_every_second_layer(stated: _Stated) -> list[int | None]:
    """Gemma 2, where the types of its layers are not named."""
    return _by_type(stated, lambda layer: (layer + 1) % 2 != 0)


def of_a_pattern(stated: _Stated) -> list[int | None]:
    """Gemma 3: all but every ``sliding_window_pattern``-th layer. Where positions see later ones too, half to each
    side."""
    windows = _by_type(stated, lambda layer: (layer + 1) % stated.sliding_window_pattern != 0)
    if not stated.use_bidirectional_attention:
        return windows
    return [None if window is None else window // 2 + 1 for window in windows]


def of_four_in_five(stated: _Stated) -> list[int | None]:
    """Gemma 3n."""
    return _by_type(stated, lambda layer: (layer + 1) % 5 != 0)


def _by_type(stated: _Stated, slides: Callable[[int], bool]) -> list[int | None]:
    if stated.layer_types is not None:
        is_sliding = [each == _SLIDING for each in stated.layer_types]
    else:
        is_sliding = [slides(layer) for layer in range(stated.num_hidden_layers)]
    return [stated.sliding_window if own else None for own in is_sliding]
