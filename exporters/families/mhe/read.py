"""What all models with head embeddings tell the compiler, each by its own configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from ....bucket import Bucket
from ....bundle.manifest import TextEntry
from ....elastic import Submodel
from ....workload import Op
from ...architecture import Architecture, Folded
from ...cached_form import CachedForm
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Family
from ...hugging_face.tensors import Shape
from ...signature import Signature
from .architecture.config import MheConfig
from .architecture.folded_shapes import folded_shapes
from .architecture.forms import FORMS, ONNXRUNTIME_FORMS, form_problem
from .architecture.forward_ops import variant_ops
from .architecture.key_spread import key_spread
from .architecture.places import places_of
from .architecture.presets import PRESETS
from .architecture.shapes import compare_weights, elastic_spec, parameter_group

if TYPE_CHECKING:  # plans are made without torch
    import torch

_Config = TypeVar("_Config", bound=MheConfig)
_TABLES = ("embeddings.word.weight", "embeddings.position.weight", "lm_head.weight")


@dataclass(frozen=True)
class Kind(Generic[_Config]):
    """One of the models: ``shapes`` of its parameters, its ``signature``, the ``ops`` of a pass, and how it generates,
    by its configuration and by what ``key_spread`` says of its weights."""

    config: type[_Config]
    shapes: Callable[[_Config], dict[str, Shape]]
    signature: Callable[[Checkpoint, _Config], Signature]
    ops: Callable[[_Config, Submodel, Bucket], list[Op]]
    cached: Callable[[_Config, float], CachedForm] | None = None

    def family(self, model_type: str) -> Family:
        """The family of folders with this ``model_type``."""
        presets = {name: config.to_json() for name, config in PRESETS.items() if isinstance(config, self.config)}
        return Family(model_type, (model_type,), self.read, reads_config_alone=True, presets=presets)

    def read(self, checkpoint: Checkpoint) -> Architecture:
        """The model in ``checkpoint``, whose weights may be absent altogether."""
        config = read_config(checkpoint, self.config)
        shapes = self.shapes(config)
        if checkpoint.has_weights:
            compare_weights(checkpoint, config, shapes)
        spread = key_spread(checkpoint, config)
        places = places_of(config)
        problems = {role: _problems(config, spread, role) for role in dict.fromkeys(place.role for place in places)}
        made = {name: shape for place in places for name, shape in folded_shapes(config, place.at).items()}
        return Architecture(
            signature=self.signature(checkpoint, config),
            workload=partial(self.ops, config),
            load=partial(_load, checkpoint, config),
            spec=elastic_spec(config, shapes),
            parameter_shapes=shapes,
            is_embedding=lambda parameter, _: parameter in _TABLES,
            group_of=parameter_group,
            variants=partial(variant_ops, config, spread=spread),
            variant_problems=problems,
            onnxruntime_variants=ONNXRUNTIME_FORMS if config.has_tables else frozenset(),
            lower=_lower if config.has_tables else None,
            folded=Folded(made, _folded_tensor) if made else None,
            cached=None if self.cached is None else self.cached(config, spread),
        )


def _problems(config: MheConfig, spread: float, role: str) -> dict[str, str]:
    """The forms that attention in ``role`` may not have, to why."""
    found = {form: form_problem(config, form, spread, role) for form in FORMS}
    return {form: problem for form, problem in found.items() if problem is not None}


def text_entry(checkpoint: Checkpoint, mask: str | None) -> TextEntry | None:
    """How a tokenizer's fields feed the inputs, where the folder has one."""
    if not checkpoint.tokenizer_files:
        return None
    return TextEntry("tokenizer.json", "input_ids", mask, None, None)


def _load(checkpoint: Checkpoint, config: MheConfig) -> torch.nn.Module:
    from .folder import model_of
    from .model.answering import Answering

    return Answering(model_of(checkpoint, config))


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
