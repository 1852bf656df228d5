"""scikit-learn's handwritten digits: 1797 images of 8 x 8, 17 grey levels, ten classes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from .data import Rows

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
