"""Encoders with MHE attention, or one that its paper compares with. See docs/mhe.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where a head can be left out, ``heads`` (rows
of the tables of head embeddings, or blocks of rows of what each head projects; columns of ``attention.output``), or in
the layout that has it in front ``head_width`` (the same, by numbers of a head; of projections that are shared too).
"""

from __future__ import annotations

from ....bundle.entries.tensor_spec import TensorSpec
from ...checkpoints.checkpoint import Checkpoint
from ...signature import Signature
from .architecture.config import MheEncoderConfig
from .architecture.forward_ops import encoder_ops
from .architecture.shapes import encoder_shapes
from .read import Kind, text_entry

_MASK = "attention_mask"


def _signature(checkpoint: Checkpoint, config: MheEncoderConfig) -> Signature:
    tokens = ("batch", "sequence")
    inputs = (
        TensorSpec("input_ids", "int64", tokens, pad=0, high=config.vocab_size),
        TensorSpec(_MASK, "int64", tokens, pad=0, high=2, row_needs="token"),
    )
    match config.head:
        case "masked_lm":
            output = TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="tokens")
        case "classifier":
            output = TensorSpec("logits", "float32", ("batch", config.num_labels or 0), role="classes")
        case "none":
            output = TensorSpec("last_hidden_state", "float32", (*tokens, config.hidden_size))
    return Signature(inputs, (output,), config.max_position_embeddings, _MASK, text_entry(checkpoint, _MASK))


FAMILY = Kind(MheEncoderConfig, encoder_shapes, _signature, encoder_ops).family("mhe_encoder")
