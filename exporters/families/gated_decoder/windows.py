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


# How many tokens the layers see that do not see all, by what a configuration states; None where every layer sees all.
Window = Callable[[_Stated], int | None]


def read_window(window: Window | None, config: Mapping[str, Any], where: str) -> int | None:
    """``window`` of a model type applied to its ``config``, the defaults of its class included; a model type without
    one passes over every key of it. Raises CheckpointError for keys of another type."""
    if window is None:
        return None
    known = {key.name: config[key.name] for key in fields(_Stated) if key.name in config}
    return window(structure(_Stated, known, where, CheckpointError))


def of_every_layer(stated: _Stated) -> int | None:
    """Mistral and Phi-3: as stated; ``use_sliding_window`` is no key of theirs."""
    return stated.sliding_window


def of_later_layers(stated: _Stated) -> int | None:
    """Qwen: where it is switched on, in the layers from ``max_window_layers`` on, or of the types that are named."""
    if not stated.use_sliding_window:
        return None
    return _by_type(stated, lambda layer: layer >= stated.max_window_layers)


def of_every_second_layer(stated: _Stated) -> int | None:
    """Gemma 2, where the types of its layers are not named."""
    return _by_type(stated, lambda layer: (layer + 1) % 2 != 0)


def of_a_pattern(stated: _Stated) -> int | None:
    """Gemma 3: all but every ``sliding_window_pattern``-th layer. Where positions see later ones too, half to each
    side."""
    window = _by_type(stated, lambda layer: (layer + 1) % stated.sliding_window_pattern != 0)
    return window // 2 + 1 if window is not None and stated.use_bidirectional_attention else window


def of_four_in_five(stated: _Stated) -> int | None:
    """Gemma 3n."""
    return _by_type(stated, lambda layer: (layer + 1) % 5 != 0)


def _by_type(stated: _Stated, slides: Callable[[int], bool]) -> int | None:
    if stated.layer_types is not None:
        return stated.sliding_window if _SLIDING in stated.layer_types else None
    return stated.sliding_window if any(map(slides, range(stated.num_hidden_layers))) else None
