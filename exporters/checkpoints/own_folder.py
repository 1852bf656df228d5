"""A model of ours as a folder: ``config.json``, read strictly into a frozen dataclass, and ``model.safetensors``.

Configurations are read without torch.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import safe_open

from ...errors import CheckpointError
from ...strict import structure, unstructure
from .checkpoint import CONFIG_SAYS, Checkpoint
from .config import MOST_LAYERS, Granularities, granularity_problem

if TYPE_CHECKING:  # plans are made without torch
    import torch

# Said by many tools in a config.json, and nothing about the graph.
_IGNORED_KEYS = ("architectures", "_name_or_path")
# Levels of a nested model whose config.json names none.
_EVEN_STEPS = (0.25, 0.5, 0.75, 1.0)


class OwnConfig(ABC):
    """The base of such a dataclass, whose fields are the keys of ``config.json``."""

    @abstractmethod
    def problem(self) -> str | None:
        """First problem among the values, as ``key: problem``, or None."""

    def to_json(self) -> dict[str, Any]:
        """The object that ``config.json`` holds, which reads back as this configuration."""
        return unstructure(self)


@dataclass(frozen=True, kw_only=True)
class StackConfig(OwnConfig):
    """The base of those of a stack of layers with attention and an FFN of ``intermediate_size`` neurons.

    ``head_dim`` is the size of a head, by default ``hidden_size`` over the heads; ``softmax_scale`` what scores are
    multiplied by, by default ``1 / sqrt(head_dim)``, which no slice changes. ``position`` says how attention knows
    places. ``nested``: every prefix was trained as a model; ``granularities``: at which levels, by axis kind.
    """

    hidden_size: int = field(metadata={"min": 1})
    num_hidden_layers: int = field(metadata={"min": 1, "max": MOST_LAYERS})
    num_attention_heads: int = field(metadata={"min": 1})
    intermediate_size: int = field(metadata={"min": 1})
    position: str
    head_dim: int | None = field(default=None, metadata={"min": 1})
    softmax_scale: float | None = None
    nested: bool = False
    granularities: Granularities | None = field(default=None, hash=False)

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Axis kinds of the model."""

    @property
    def head_size(self) -> int:
        """Numbers of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.num_attention_heads * self.head_size

    @property
    def scale(self) -> float:
        """Scale of attention scores."""
        return self.head_size**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def levels(self) -> Granularities | None:
        """The levels that training sampled: those stated, else four even steps; None where it was not nested."""
        if self.granularities is not None or not self.nested:
            return self.granularities
        return dict.fromkeys(self.kinds, _EVEN_STEPS)

    def problem(self) -> str | None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            return (
                f"num_attention_heads: {self.num_attention_heads} heads do not divide hidden_size {self.hidden_size}; "
                "state head_dim where heads have another size"
            )
        if self.softmax_scale is not None and self.softmax_scale <= 0:
            return f"softmax_scale: expected a number above 0, got {self.softmax_scale:g}"
        if self.position == "rotary" and self.head_size % 2:
            return f"position: rotary positions need heads of even size, got {self.head_size}"
        return None if self.granularities is None else granularity_problem(self.granularities, self.kinds)


C = TypeVar("C", bound=OwnConfig)


def config_from_json(cls: type[C], data: Mapping[str, Any], where: str) -> C:
    """Reads ``data`` as ``cls``; ``where`` names the document.

    Raises CheckpointError for an unknown or missing key, and for values that make no model.
    """
    stated = {key: value for key, value in data.items() if key not in _IGNORED_KEYS}
    config = structure(cls, stated, where, CheckpointError)
    if problem := config.problem():
        raise CheckpointError(f"{where}: {problem}")
    return config


def read_config(checkpoint: Checkpoint, cls: type[C]) -> C:
    """The configuration of the model in ``checkpoint``. Raises CheckpointError as ``config_from_json`` does."""
    return config_from_json(cls, checkpoint.config, str(checkpoint.folder / "config.json"))


M = TypeVar("M", bound="torch.nn.Module")


def save_model(
    module: torch.nn.Module, config: OwnConfig, folder: Path, extra_files: Mapping[str, str | bytes] | None = None
) -> Path:
    """Writes ``config.json``, ``model.safetensors`` and ``extra_files`` (name to content) into ``folder``; returns it.

    Parameters are stored in float32 under the module's own names.
    """
    save_tensors(dict(module.named_parameters()), config, folder)
    for name, content in (extra_files or {}).items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def save_tensors(tensors: Mapping[str, torch.Tensor], config: OwnConfig, folder: Path) -> Path:
    """Writes ``config.json``, and ``tensors`` in float32 as ``model.safetensors``, into ``folder``; returns it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
    weights = {name: value.detach().to("cpu", torch.float32) for name, value in tensors.items()}
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def with_weights(make: Callable[[], M], checkpoint: Checkpoint) -> M:
    """The module that ``make`` builds (on the meta device here) with the checkpoint's weights: float32, eval mode,
    without gradients.

    Raises CheckpointError if a tensor is missing, has another shape or is not finite.
    """
    import torch

    with torch.device("meta"):
        module = make()
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    module.load_state_dict(read_tensors(checkpoint, shapes), assign=True)
    return module.eval().requires_grad_(False)


def read_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], says: str = CONFIG_SAYS
) -> dict[str, torch.Tensor]:
    """The tensors of ``checkpoint`` that have these names and shapes, in float32.

    Raises CheckpointError if one is missing, has another shape than its source ``says``, or is not finite.
    """
    checkpoint.require_weights()
    for name, shape in shapes.items():
        checkpoint.header(name, shape, says)
    return {name: stored_tensor(checkpoint, name) for name in shapes}


def stored_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The tensor that files call ``name``, in float32. Raises CheckpointError for numbers that are not finite."""
    import torch

    tensor = tensor_as_stored(checkpoint, name).to(torch.float32)
    if not is_finite(tensor):
        raise checkpoint.not_finite(name)
    return tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of ``tensor`` are finite; no tensor of its size is made for that."""
    return not tensor.numel() or all(map(math.isfinite, map(float, tensor.detach().aminmax())))


def tensor_as_stored(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The tensor that files call ``name``, in its own type."""
    with safe_open(checkpoint.folder / checkpoint.tensors[name].file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor
