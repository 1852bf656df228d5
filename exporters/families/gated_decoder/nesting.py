"""How a gated decoder was trained: what its ``config.json`` says, and what is known of Gemma 3n (no torch here)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.config import Nesting, read_nesting
from .architecture import DecoderArchitecture

# E4B was trained with FFNs of 16384 neurons and with their first 8192, which make E2B; no smaller ones are known.
_E4B_WIDTH, _E4B_LEVELS, _NO_LEVELS = 16_384, (0.5, 1.0), (1.0,)


def decoder_nesting(checkpoint: Checkpoint, architecture: DecoderArchitecture) -> Nesting:
    """Gemma 3n is nested unless its config says otherwise: ranking its neurons would undo its training.

    Raises CheckpointError if config.json has ``nested`` or ``granularities`` in another form than documented.
    """
    nesting = read_nesting(checkpoint, ("ffn",))
    if architecture.gemma3n is None:
        return nesting
    nested = nesting.nested or "nested" not in checkpoint.config
    if not nested or nesting.granularities is not None:
        return replace(nesting, nested=nested)
    levels = _E4B_LEVELS if set(architecture.widths) == {_E4B_WIDTH} else _NO_LEVELS
    return Nesting(nested, {"ffn": levels})
