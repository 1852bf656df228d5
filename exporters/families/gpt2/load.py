"""The user's GPT-2 with its weights, its linear layers as torch has them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...hugging_face.transformers_model import TransformersModule, load_transformers
from ...sentence_transformers.head import load_head
from ...sentence_transformers.read_modules import SentenceModules
from ...signature import Signature
from .architecture import WIDTHS, Gpt2Architecture


def load_gpt2(
    checkpoint: Checkpoint, architecture: Gpt2Architecture, signature: Signature, modules: SentenceModules | None
) -> TransformersModule:
    """The module that takes ids ``[B, S]`` (int64) and returns the signature's outputs (float32).

    Raises CheckpointError if weights are missing, misfit or not finite.
    """
    resize = partial(_resize, architecture=architecture)
    model: Any = load_transformers(checkpoint, without_pooler=False, resize=resize, widths=WIDTHS)
    for name in architecture.linears:
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, _linear(model.get_submodule(name)))
    for layer in model.get_submodule(architecture.interface.prefix.rstrip(".")).h:
        # Scores in float32 whatever the numbers around them are: here all are float32, and all float64 in the gate.
        layer.attn.reorder_and_upcast_attn = False
    return TransformersModule(model, signature, load_head(checkpoint.folder, modules))


def _linear(layer: Any) -> torch.nn.Linear:
    """A ``Conv1D``, whose weight is ``[in, out]``, as a linear layer."""
    weight = layer.weight.detach().T.contiguous()
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias
    return made


def _resize(model: Any, architecture: Gpt2Architecture) -> None:
    """Gives every layer its own width."""
    layers = model.get_submodule(architecture.interface.prefix.rstrip(".")).h
    for layer, width in zip(layers, architecture.widths, strict=True):
        layer.mlp = type(layer.mlp)(width, model.config)
