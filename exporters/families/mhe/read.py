"""What all models with head embeddings tell the compiler in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ....runtime.bundle.manifest import TextEntry
from ...checkpoints.checkpoint import Checkpoint
from ...folded import Folded
from ...hugging_face.layer_shapes import Shape
from .architecture.config import MheConfig
from .architecture.folded_shapes import folded_shapes
from .architecture.forms import FORMS, form_problem
from .architecture.forward_ops import variant_ops
from .architecture.places import places_of
from .architecture.shapes import elastic_spec, parameter_group

if TYPE_CHECKING:  # plans are made without torch
    import torch

_TABLES = ("embeddings.word.weight", "embeddings.position.weight", "lm_head.weight")


def attention_facts(config: MheConfig, shapes: Mapping[str, Shape], spread: float) -> dict[str, Any]:
    """The fields of an ``Architecture`` that say what shrinks, and how attention may be computed; ``spread`` is what
    ``key_spread`` says of its weights."""
    problems = {form: problem for form in FORMS if (problem := form_problem(config, form, spread)) is not None}
    places = places_of(config)
    made = {name: shape for place in places for name, shape in folded_shapes(config, place.at).items()}
    return {
        "spec": elastic_spec(config, shapes),
        "parameter_shapes": shapes,
        "is_embedding": lambda parameter, _: parameter in _TABLES,
        "group_of": parameter_group,
        "variants": partial(variant_ops, config, spread=spread),
        "variant_problems": dict.fromkeys((place.role for place in places), problems) if problems else {},
        "lower": _lower if config.has_tables else None,
        "folded": Folded(made, _folded_tensor) if made else None,
    }


def text_entry(checkpoint: Checkpoint, mask: str | None) -> TextEntry | None:
    """How a tokenizer's fields feed the inputs, where the folder has one."""
    if not (checkpoint.folder / "tokenizer.json").is_file():
        return None
    return TextEntry("tokenizer.json", "input_ids", mask, None, None)


def _lower(module: torch.nn.Module, variants: Mapping[str, str]) -> torch.nn.Module:
    from .model.answering import Answering
    from .model.lower import lower

    assert isinstance(module, Answering)
    return lower(module, variants)


def _folded_tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    from .model.answering import Answering
    from .model.lower import folded_tensor

    assert isinstance(module, Answering)
    return folded_tensor(module, name)
