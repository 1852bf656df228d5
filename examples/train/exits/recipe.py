"""Every setting of the training, in one place; training.json repeats them beside what came of them."""

from __future__ import annotations

from dataclasses import dataclass

from .fit import Stretch
from .slender import Target
from .texts import Limits


@dataclass(frozen=True)
class Recipe:
    """``batch`` texts a step. ``scoring`` batches judge importance ahead of each of ``cuts`` cuts, ``between``
    follows each cut, ``recovery`` the last one's."""

    limits: Limits
    seed: int
    batch: int
    whole: Stretch
    target: Target
    cuts: int
    scoring: int
    between: Stretch
    recovery: Stretch


# About ten minutes on two quiet cores: a step of the whole model takes half a second.
RECIPE = Recipe(
    limits=Limits(
        most={"train": 900, "calibration": 100, "test": 100},
        least={"train": 300, "calibration": 30, "test": 30},
        characters=60,
        tokens=64,
    ),
    seed=0,
    batch=32,
    whole=Stretch(steps=480, rate=2e-4, exit_rate=1e-3, dropout=0.1),
    target=Target(heads=6, ffn=512, rank=192),
    cuts=6,
    scoring=8,
    between=Stretch(steps=25, rate=1e-4, exit_rate=1e-4),
    recovery=Stretch(steps=350, rate=2e-4, exit_rate=2e-4),
)
