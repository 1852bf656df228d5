"""The two tasks: what is learnt, by which model, from what data."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from ....exporters.families.matformer.architecture.config import MatformerConfig, MatformerVitConfig, NestedConfig
from ....exporters.families.matformer.model.language_model import MatformerLM
from ....exporters.families.matformer.model.vision_model import MatformerViT
from ..byte_tokenizer import byte_tokenizer
from .data import Data
from .digits import read_digits
from .python_bytes import PythonBytes, read_python_bytes
from .recipe import Recipe

_LINES = 2000
_SHORTEST = 40  # bytes of a line of held-out text


class Task(Protocol):
    """One universal model to train: ``config`` is its full size."""

    @property
    def name(self) -> str: ...

    @property
    def held_out_name(self) -> str: ...

    @property
    def config(self) -> NestedConfig: ...

    @property
    def recipe(self) -> Recipe: ...

    @property
    def most_seeds(self) -> int | None:
        """How often its comparison is repeated at most."""
        ...

    @property
    def published_levels(self) -> tuple[str, ...]:
        """Levels whose model trained alone, of seed 0, is published beside the universal one."""
        ...

    def data(self) -> Data:
        """Reads the data; the same on every call."""
        ...

    def model(self, config: Any) -> torch.nn.Module:
        """A model of this task with fresh weights."""
        ...

    def logits(self, model: torch.nn.Module, inputs: torch.Tensor, widths: Sequence[int] | None) -> torch.Tensor:
        """Logits ``[..., classes]`` of ``inputs`` through the first ``widths`` neurons of each layer."""
        ...

    def extra_files(self) -> Mapping[str, bytes]:
        """What the model's folder holds beside configuration and weights."""
        ...

    def held_out_file(self, data: Any) -> bytes:
        """Test data as ``nestforge compile`` takes it, for a file of ``held_out_name``."""
        ...


@dataclass(frozen=True)
class LanguageTask:
    """MatLM: the next byte of Python sources."""

    config: MatformerConfig
    recipe: Recipe
    held_out: int  # windows of each held-out part
    stdlib: Path | None = None
    name: str = "lm"
    most_seeds: int | None = None
    published_levels: tuple[str, ...] = ()

    @property
    def held_out_name(self) -> str:
        return f"{self.name}.txt"

    def data(self) -> PythonBytes:
        return read_python_bytes(self.config.max_position_embeddings, self.held_out, self.stdlib)

    def model(self, config: MatformerConfig) -> MatformerLM:
        return MatformerLM(config)

    def logits(self, model: torch.nn.Module, inputs: torch.Tensor, widths: Sequence[int] | None) -> torch.Tensor:
        logits: torch.Tensor = model(inputs, widths=widths)
        return logits

    def extra_files(self) -> Mapping[str, bytes]:
        return {"tokenizer.json": byte_tokenizer().to_str().encode()}

    def held_out_file(self, data: PythonBytes) -> bytes:
        """Lines of the test part, long enough to say something and short enough for one row."""
        lines = dict.fromkeys(line.strip() for line in data.parts["test"].splitlines())
        usable = [line for line in lines if _SHORTEST <= len(line) <= data.window and line.isascii()]
        return b"\n".join(usable[:: max(1, len(usable) // _LINES)][:_LINES]) + b"\n"


@dataclass(frozen=True)
class DigitsTask:
    """MatViT: the class of a handwritten digit."""

    config: MatformerVitConfig
    recipe: Recipe
    name: ClassVar[str] = "vit"
    held_out_name: ClassVar[str] = "vit.npz"
    most_seeds: ClassVar[int | None] = None
    published_levels: ClassVar[tuple[str, ...]] = ()

    def data(self) -> Data:
        return read_digits()

    def model(self, config: MatformerVitConfig) -> MatformerViT:
        return MatformerViT(config)

    def logits(self, model: torch.nn.Module, inputs: torch.Tensor, widths: Sequence[int] | None) -> torch.Tensor:
        logits: torch.Tensor = model(inputs, widths=widths)[0]
        return logits

    def extra_files(self) -> Mapping[str, bytes]:
        return {}

    def held_out_file(self, data: Data) -> bytes:
        """The test images with their labels."""
        file = io.BytesIO()
        np.savez(file, pixel_values=data.test.inputs.numpy(), labels=data.test.targets.numpy())
        return file.getvalue()
