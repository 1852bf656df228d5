"""Inputs and outputs of a transformer with the modules of sentence-transformers behind it (no torch here)."""

from __future__ import annotations

from dataclasses import replace

from ...bundle.entries.tensor_spec import TensorSpec
from ..checkpoints.checkpoint import Checkpoint
from ..sentence_transformers.modules import TOKENS
from ..sentence_transformers.read_modules import SentenceModules
from ..sentence_transformers.text_settings import with_text_settings
from ..signature import Signature

EMBEDDING, HIDDEN = "sentence_embedding", "last_hidden_state"
# 1 where a token is pooled; an input where a pooling leaves the tokens of prompts out.
POOLING_MASK = "pooling_mask"


def with_modules(signature: Signature, checkpoint: Checkpoint, modules: SentenceModules | None) -> Signature:
    """``signature`` of the transformer alone, which has a mask and returns its tokens, with the embedding that
    ``modules`` make of them, the tokens where modules change those first, and with what the folder says of texts."""
    if modules is None:
        return signature
    mask = next(spec for spec in signature.inputs if spec.name == signature.mask)
    pooling = replace(mask, name=POOLING_MASK, row_needs=None)  # of a prompt alone it leaves nothing
    inputs = (*signature.inputs, *([pooling] if modules.leaves_prompt_out else []))
    outputs = [*signature.outputs, TensorSpec(EMBEDDING, "float32", ("batch", modules.width))]
    if modules.token_width is not None:
        outputs.insert(-1, TensorSpec(TOKENS, "float32", ("batch", "sequence", modules.token_width)))
    text = signature.text
    if text is not None:
        pooled = POOLING_MASK if modules.leaves_prompt_out else None
        text = with_text_settings(checkpoint, replace(text, embedding=EMBEDDING), pooled)
    return replace(signature, inputs=inputs, outputs=tuple(outputs), text=text)
