"""The user's T5 with its weights, whose relative positions are looked up."""

from __future__ import annotations

from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...hugging_face.transformers_model import TransformersModule, load_transformers
from ...sentence_transformers.head import load_head
from ...sentence_transformers.read_modules import SentenceModules
from ...signature import Signature
from .architecture import T5Architecture, class_name


class Buckets:
    """The function from relative positions to buckets that a class of transformers has, as a table of its own results.

    Between two buckets the logarithm of a position is a whole number, which its last bit decides: an engine's logarithm
    may have another.
    """

    def __init__(self, attention: Any) -> None:
        farthest = attention.relative_attention_max_distance
        self.table: torch.Tensor = attention._relative_position_bucket(
            torch.arange(-farthest, farthest + 1),
            bidirectional=not attention.is_decoder,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=farthest,
        )

    def __call__(self, relative_position: torch.Tensor, **_how: Any) -> torch.Tensor:
        """Buckets of ``relative_position``, both int64 of any shape; all that are farther share the last ones."""
        farthest = len(self.table) // 2
        return self.table[relative_position.clamp(-farthest, farthest) + farthest]


def look_up_distances(stack: Any) -> None:
    """Makes one side of a T5 look its relative positions up."""
    attention = stack.block[0].layer[0].SelfAttention
    # In the place of the class's own function, which a submodule of this name would not hide.
    attention.__dict__["_relative_position_bucket"] = Buckets(attention)


def load_t5(
    checkpoint: Checkpoint, architecture: T5Architecture, signature: Signature, modules: SentenceModules | None
) -> TransformersModule:
    """The module that takes ids and masks ``[B, S]`` (int64) and returns the signature's outputs (float32).

    Raises CheckpointError if weights are missing, misfit or not finite.
    """
    model: Any = load_transformers(checkpoint, without_pooler=False, class_name=class_name(checkpoint))
    for stack in architecture.stacks:
        look_up_distances(model.get_submodule(stack))
    if architecture.decoder_layers and not architecture.tied and model.lm_head.weight is model.shared.weight:
        # transformers ties a head that equals the table
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone(), requires_grad=False)
    return TransformersModule(model, signature, load_head(checkpoint.folder, modules))
