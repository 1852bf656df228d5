"""The two tasks: what is learnt, by which model, from what data."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional

from ...exporters.families.matformer.config import MatformerConfig, MatformerVitConfig
from ...exporters.families.matformer.model import MatformerLM, MatformerViT
from ..byte_windows import PythonBytes, Rows, read_python_bytes
from ..python_text import byte_tokenizer
from .recipe import Recipe

_LINES = 2000
_SHORTEST = 40  # bytes of a line of held-out text
_SPLIT_SEED = 0
_GREY = 16.0  # the largest value


@dataclass(frozen=True)
class Digits:
    """Images ``[N, 1, 8, 8]`` float32 from 0 to 1, classes ``[N]`` int64."""

    train: Rows
    validation: Rows
    test: Rows

    @property
    def facts(self) -> dict[str, object]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        digest = hashlib.sha256()
        for rows in parts.values():
            digest.update(rows.inputs.numpy().tobytes() + rows.targets.numpy().tobytes())
        return {"images": {name: len(rows.targets) for name, rows in parts.items()}, "sha256": digest.hexdigest()}

    def batches(self, size: int, steps: int, seed: int) -> Iterator[Rows]:
        """Images drawn at random, each turned, scaled and moved a little."""
        chance = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            chosen = torch.randint(len(self.train.targets), (size,), generator=chance)
            yield Rows(_distorted(self.train.inputs[chosen], chance), self.train.targets[chosen])


def run_first_neurons(model: torch.nn.Module, inputs: torch.Tensor, widths: Sequence[int] | None) -> Any:
    """A pass through the first so many neurons of each layer, by default all, on views of the model's parameters, which
    gradients reach."""
    views: dict[str, torch.Tensor] = {}
    for number, width in enumerate(widths or ()):
        at = f"layers.{number}.ffn"
        views |= {
            f"{at}.up.{name}": whole[:width] for name, whole in model.get_submodule(f"{at}.up").named_parameters()
        }
        views[f"{at}.down.weight"] = model.get_parameter(f"{at}.down.weight")[:, :width]
    return torch.func.functional_call(model, views, (inputs,))


@dataclass(frozen=True)
class LanguageTask:
    """MatLM: the next byte of Python sources.

    ``config`` is the full size of the model; its comparison is repeated for at most ``most_seeds`` seeds; of
    ``published_levels`` the model trained alone, of seed 0, is published beside the universal one.
    """

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

    def model(self, config: Any) -> MatformerLM:
        return MatformerLM(config)

    def logits(self, model: torch.nn.Module, inputs: torch.Tensor, widths: Sequence[int] | None) -> torch.Tensor:
        logits: torch.Tensor = run_first_neurons(model, inputs, widths)
        return logits

    def extra_files(self) -> Mapping[str, bytes]:
        return {"tokenizer.json": byte_tokenizer().to_str().encode()}

    def held_out_file(self, data: Any) -> bytes:
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

    def data(self) -> Digits:
        return read_digits()

    def model(self, config: Any) -> MatformerViT:
        return MatformerViT(config)

    def logits(self, model: torch.nn.Module, inputs: torch.Tensor, widths: Sequence[int] | None) -> torch.Tensor:
        logits: torch.Tensor = run_first_neurons(model, inputs, widths)[0]
        return logits

    def extra_files(self) -> Mapping[str, bytes]:
        return {}

    def held_out_file(self, data: Any) -> bytes:
        """The test images with their labels."""
        file = io.BytesIO()
        np.savez(file, pixel_values=data.test.inputs.numpy(), labels=data.test.targets.numpy())
        return file.getvalue()


Task = LanguageTask | DigitsTask


def read_digits() -> Digits:
    """The data set in a fixed split: 60 % to train, 20 % to validate, 20 % to test, every class in proportion."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    pixels, labels = load_digits(return_X_y=True)
    numbers = range(len(labels))
    train, rest = train_test_split(numbers, test_size=0.4, random_state=_SPLIT_SEED, stratify=labels)
    validation, test = train_test_split(rest, test_size=0.5, random_state=_SPLIT_SEED, stratify=labels[rest])
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / _GREY
    classes = torch.tensor(labels, dtype=torch.int64)
    return Digits(*(Rows(images[sorted(part)], classes[sorted(part)]) for part in (train, validation, test)))


def _distorted(images: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Each of ``images`` turned by up to 15 degrees, scaled by up to 15 % and moved by up to a pixel."""
    count = len(images)

    def between(most: float) -> torch.Tensor:
        return (2 * torch.rand(count, generator=chance) - 1) * most

    angle, scale, shift_x, shift_y = between(0.26), 1 + between(0.15), between(0.25), between(0.25)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    rows = torch.stack((cos, -sin, shift_x, sin, cos, shift_y), dim=1).reshape(count, 2, 3)
    grid = functional.affine_grid(rows, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)
