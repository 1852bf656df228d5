"""The user's transformers decoder with its weights, each layer at its own FFN width."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...hugging_face.rotary_positions import fix_frequencies
from ...hugging_face.transformers_model import TransformersModule, load_transformers
from ...sentence_transformers.head import load_head
from ...sentence_transformers.read_modules import SentenceModules
from ...signature import Signature
from .architecture import DecoderArchitecture
from .split_ffn import SplitFfn


def load_decoder(
    checkpoint: Checkpoint, architecture: DecoderArchitecture, signature: Signature, modules: SentenceModules | None
) -> TransformersModule:
    """The module that takes ids ``[B, S]`` (int64) and returns the signature's outputs (float32).

    Raises CheckpointError if weights are missing, misfit or not finite.
    """

    # Gemma 3n's own class knows widths per layer, the others do not.
    known = architecture.gemma3n is not None
    resize = None if known else partial(_resize, architecture=architecture)
    model: Any = load_transformers(checkpoint, without_pooler=False, resize=resize)
    decoder = model.get_submodule(architecture.prefix.rstrip("."))
    fix_frequencies(decoder.rotary_emb, architecture.positions, checkpoint)
    if architecture.packed:
        for layer in decoder.layers:
            layer.mlp = SplitFfn(layer.mlp)
    return TransformersModule(model, signature, load_head(checkpoint.folder, modules))


def _resize(model: Any, architecture: DecoderArchitecture) -> None:
    """Gives every layer its own width."""
    hidden, bias = architecture.hidden, architecture.ffn_bias
    for layer, width in zip(
        model.get_submodule(architecture.prefix.rstrip(".")).layers, architecture.widths, strict=True
    ):
        made = {"gate_up_proj": 2 * width} if architecture.packed else {"gate_proj": width, "up_proj": width}
        for name, outputs in made.items():
            setattr(layer.mlp, name, torch.nn.Linear(hidden, outputs, bias=bias))
        layer.mlp.down_proj = torch.nn.Linear(width, hidden, bias=bias)
        layer.mlp.intermediate_size = width
