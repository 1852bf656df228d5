"""Rotary positions whose frequencies depend on the length of the text, kept to where they do not (no torch here).

transformers turns a text of more tokens than the original length by the long factors of ``longrope``, all of it; a
``dynamic`` one of more tokens than ``max_position_embeddings`` by frequencies that change with every token. An engine
is for padded texts and for texts that grow, whose earlier keys were turned before, so both end where that begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import CheckpointError
from ..checkpoints.checkpoint import Checkpoint

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
    """What ``config`` says of rotary positions, by their present name or the earlier one, for all layers or by type."""
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if isinstance(table, Mapping):
            yield from (entry for entry in (table, *table.values()) if isinstance(entry, Mapping))
