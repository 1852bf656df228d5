"""The user's transformers decoder with its weights, each layer at its own FFN width."""

from __future__ import annotations

from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...hugging_face.transformers_model import TransformersModule, load_transformers
from ...sentence_transformers.head import load_head
from ...sentence_transformers.read_modules import SentenceModules
from ...signature import Signature
from .architecture import DecoderArchitecture


def load_decoder(
    checkpoint: Checkpoint, architecture: DecoderArchitecture, signature: Signature, modules: SentenceModules | None
) -> TransformersModule:
    """The module that takes ids ``[B, S]`` (int64) and returns the signature's outputs (float32).

    Raises CheckpointError if weights are missing, misfit or not finite.
    """

    def resize(model: Any) -> None:
        for layer, width in zip(
            model.get_submodule(architecture.prefix.rstrip(".")).layers, architecture.widths, strict=True
        ):
            mlp, bias = layer.mlp, architecture.ffn_bias
            mlp.gate_proj = torch.nn.Linear(architecture.hidden, width, bias=bias)
            mlp.up_proj = torch.nn.Linear(architecture.hidden, width, bias=bias)
            mlp.down_proj = torch.nn.Linear(width, architecture.hidden, bias=bias)
            mlp.intermediate_size = width

    # Gemma 3n's own class knows widths per layer, the others do not.
    known = architecture.gemma3n is not None
    model = load_transformers(checkpoint, without_pooler=False, resize=None if known else resize)
    return TransformersModule(model, signature, load_head(checkpoint.folder, modules))
