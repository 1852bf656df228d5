"""How far attention of a decoder reaches back, and rotary positions kept to where no longer text changes them (no
torch here).

transformers turns a text of more tokens than the original length by the long factors of ``longrope``, all of it; a
``dynamic`` one of more tokens than ``max_position_embeddings`` by frequencies that change with every token. An engine
is for padded texts and for texts that grow, whose earlier keys were turned before, so both end where that begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError
from ...strict import structure
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import known_keys

_LONG, _DYNAMIC, _FIXED = "longrope", "dynamic", "default"
# Names that Phi-3's files have for it.
_OLD_LONG_NAMES = ("su", "yarn")
_ORIGINAL = "original_max_position_embeddings"


def constant_positions(config: Mapping[str, Any], stated: int, original: int | None) -> int:
    """How many of the ``stated`` positions have frequencies that no longer text changes.

    ``original`` is what the model type has as its original length where ``config.json`` is silent; None of those whose
    classes read it as every other key of rotary positions.
    """
    own = config.get(_ORIGINAL, original)
    lengths = [stated]
    for table in _tables(config):
        kind = table.get("rope_type", table.get("type"))
        if kind == _LONG or (original is not None and kind in _OLD_LONG_NAMES):
            lengths.append(own if own is not None else table.get(_ORIGINAL, stated))
    return min(length for length in lengths if type(length) is int)


def fix_frequencies(rotary: Any, positions: int, checkpoint: Checkpoint) -> None:
    """Leaves ``rotary``, of a model that transformers loaded, the frequencies that it has up to ``positions``.

    Raises CheckpointError where it would change them before, so that its class reads the configuration otherwise than
    ``constant_positions``.
    """
    kinds, tables = rotary.rope_type, rotary.config.rope_parameters
    by_layer = isinstance(kinds, dict)
    for layer_type, kind in (kinds if by_layer else {"": kinds}).items():
        table = tables[layer_type] if by_layer else tables
        if kind == _LONG and table[_ORIGINAL] < positions:
            raise CheckpointError(
                f"{checkpoint.folder / 'config.json'}: rotary positions of type {kind!r} change after "
                f"{table[_ORIGINAL]!r:.80} tokens, where {positions} were expected; state "
                f"{_ORIGINAL} once"
            )
        if kind in (_LONG, _DYNAMIC) and by_layer:
            kinds[layer_type] = _FIXED
        elif kind in (_LONG, _DYNAMIC):
            rotary.rope_type = _FIXED


def _tables(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rotary positions in ``config``, by their present name or the earlier one, for all layers or by type."""
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if isinstance(table, Mapping):
            yield from (entry for entry in (table, *table.values()) if isinstance(entry, Mapping))


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
    stated = structure(_Stated, known_keys(_Stated, config), where, CheckpointError)
    if stated.layer_types is not None and len(stated.layer_types) != layers:
        raise CheckpointError(
            f"{where}: layer_types: expected one for each of {layers} layers, got {len(stated.layer_types)}"
        )
    return tuple(window(stated))


def every_layer(stated: _Stated) -> list[int | None]:
    """Mistral and Phi-3: as stated; ``use_sliding_window`` is no key of theirs."""
    return [stated.sliding_window] * stated.num_hidden_layers


def later_layers(stated: _Stated) -> list[int | None]:
    """Qwen: where it is switched on, in the layers from ``max_window_layers`` on, or of the types that are named."""
    if not stated.use_sliding_window:
        return [None] * stated.num_hidden_layers
    return _by_type(stated, lambda layer: layer >= stated.max_window_layers)


def every_second_layer(stated: _Stated) -> list[int | None]:
    """Gemma 2, where the types of its layers are not named."""
    return _by_type(stated, lambda layer: (layer + 1) % 2 != 0)


def pattern(stated: _Stated) -> list[int | None]:
    """Gemma 3: all but every ``sliding_window_pattern``-th layer. Where positions see later ones too, half to each
    side."""
    windows = _by_type(stated, lambda layer: (layer + 1) % stated.sliding_window_pattern != 0)
    if not stated.use_bidirectional_attention:
        return windows
    return [None if window is None else window // 2 + 1 for window in windows]


def four_in_five(stated: _Stated) -> list[int | None]:
    """Gemma 3n."""
    return _by_type(stated, lambda layer: (layer + 1) % 5 != 0)


def _by_type(stated: _Stated, slides: Callable[[int], bool]) -> list[int | None]:
    if stated.layer_types is not None:
        is_sliding = [each == _SLIDING for each in stated.layer_types]
    else:
        is_sliding = [slides(layer) for layer in range(stated.num_hidden_layers)]
    return [stated.sliding_window if own else None for own in is_sliding]
