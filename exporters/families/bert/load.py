"""The user's transformers encoder with its weights, and what stands around it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...hugging_face.transformers_model import TransformersModule, load_transformers
from ...sentence_transformers.head import load_head
from ...sentence_transformers.read_modules import SentenceModules
from ...signature import Signature
from .architecture import BertArchitecture


class ChoiceModule(TransformersModule):
    """Scores of single choices: a row is one choice, where the class takes ``[batch, choices, sequence]``."""

    def answer(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().answer({name: tensor.unsqueeze(1) for name, tensor in inputs.items()})


def load_bert(
    checkpoint: Checkpoint, architecture: BertArchitecture, signature: Signature, modules: SentenceModules | None
) -> TransformersModule:
    """The module that takes ids and masks ``[B, S]`` (int64) and returns the signature's outputs (float32).

    Raises CheckpointError if weights are missing, misfit or not finite.
    """
    model = load_transformers(checkpoint, without_pooler=not architecture.pooler)
    if architecture.head is not None and architecture.head.choices:
        return ChoiceModule(model, signature)
    return TransformersModule(model, signature, load_head(checkpoint.folder, modules))
