"""The user's transformers ViT with its weights, each layer at its own FFN width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...hugging_face.transformers_model import TransformersModule, load_transformers
from ...signature import Signature
from .architecture import VitArchitecture


class VisionModule(TransformersModule):
    """Beside what ``model`` returns, ``embedding`` [B, H]: the [CLS] token's state after the final norm."""

    def answer(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = super().answer(inputs)
        if "last_hidden_state" in result:
            result["embedding"] = result["last_hidden_state"][:, 0]
        return result


def load_vit(checkpoint: Checkpoint, architecture: VitArchitecture, signature: Signature) -> VisionModule:
    """The module that takes pixels ``[B, C, H, W]`` and returns the signature's outputs.

    Raises CheckpointError if weights are missing, misfit or not finite.
    """

    def resize(model: Any) -> None:
        base = model.get_submodule(architecture.prefix.rstrip("."))
        for layer, width in zip(base.layers, architecture.widths, strict=True):
            layer.mlp.fc1 = torch.nn.Linear(architecture.hidden, width)
            layer.mlp.fc2 = torch.nn.Linear(width, architecture.hidden)

    model = load_transformers(checkpoint, without_pooler=architecture.pooled is None, resize=resize)
    return VisionModule(model, signature)
