"""What compiled models with conditional adapters answer to images, and how long that takes.

All is asked of the runtime, and all that is timed takes turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ....bucket import Bucket
from ....runtime.calibrate.measure import time_in_turns
from ....runtime.inputs.arrays import Array
from ....runtime.model import ElasticModel
from ....tools.console import Progress

_TIMED = 8  # requests in one turn


@dataclass(frozen=True, eq=False)
class Asked:
    """Requests of one kind: one ``task`` of a ``model`` at one ``submodel``, for ``images`` [N, C, H, W] of classes
    ``labels`` [N]."""

    model: ElasticModel
    submodel: str
    task: str
    images: Array
    labels: Array

    def __call__(self, start: int, stop: int) -> Array:
        """Logits [M, classes] of the images from ``start`` to ``stop``."""
        answer = self.model({"pixel_values": self.images[start:stop]}, submodel=self.submodel, task=self.task)
        return answer.outputs["logits"]


def accuracy(asked: Asked, batch: int) -> float:
    """Share of the images whose highest logit is right, ``batch`` a request."""
    found = [asked(at, min(at + batch, len(asked.images))) for at in range(0, len(asked.images), batch)]
    return float((np.concatenate(found).argmax(-1) == asked.labels).mean())


def milliseconds(asked: Sequence[Asked], buckets: Sequence[Bucket], progress: Progress) -> list[list[float]]:
    """The median of a request of each kind that fills each of ``buckets``."""
    found: list[list[float]] = [[] for _ in asked]
    for bucket in buckets:
        calls = [[partial(one, 0, bucket.batch)] * _TIMED for one in asked]
        times = time_in_turns(calls, progress, f"time in turns at batch {bucket.batch}")
        for taken, row in zip(times, found, strict=True):
            row.append(float(np.median(taken)))
    return found
