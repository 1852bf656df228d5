"""Encoders with MHE attention, or one that its paper compares with. See docs/mhe.md.

Axes per layer: ``ffn`` (rows of ``ffn.up``, columns of ``ffn.down``) and, where a head can be left out, ``heads`` (rows
of the tables of head embeddings, or blocks of rows of what each head projects; columns of ``attention.output``).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ....runtime.bundle.entries.tensor_spec import TensorSpec
from ...architecture import Architecture
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_config import read_config
from ...family import Family
from ...signature import Signature
from .architecture.config import MheEncoderConfig
from .architecture.forward_ops import encoder_ops
from .architecture.key_spread import key_spread
from .architecture.presets import PRESETS
from .architecture.shapes import compare_weights, encoder_shapes
from .read import attention_facts, text_entry

if TYPE_CHECKING:  # plans are made without torch
    import torch

_MASK = "attention_mask"


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, MheEncoderConfig)
    shapes = encoder_shapes(config)
    if checkpoint.has_weights:
        compare_weights(checkpoint, config, shapes)
    spread = key_spread(checkpoint, config)

    def load() -> torch.nn.Module:
        from .folder import model_of
        from .model.answering import Answering

        return Answering(model_of(checkpoint, config))

    return Architecture(
        signature=_signature(checkpoint, config),
        workload=partial(encoder_ops, config),
        load=load,
        **attention_facts(config, shapes, spread),
    )


FAMILY = Family(
    "mhe_encoder",
    ("mhe_encoder",),
    read,
    reads_config_alone=True,
    presets={name: config.to_json() for name, config in PRESETS.items() if isinstance(config, MheEncoderConfig)},
)


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
