"""The runs of a training that are not done yet, side by side, each recorded as it ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from .side_by_side import side_by_side
from .stages import Record, Stages

R = TypeVar("R", bound=Hashable)


class Stage(NamedTuple):
    """Of one run: its name among the records, the key of what it is made from, and the files that it leaves."""

    name: str
    key: Record
    files: Sequence[Path]


def train_missing(
    stages: Stages, work: Callable[[R], Record], runs: Mapping[R, Stage], jobs: int, what: str = "training"
) -> None:
    """Does ``work`` for all of ``runs`` that are not kept, ``jobs`` at a time; progress calls them ``what``."""
    left = [run for run, stage in runs.items() if not stages.kept(*stage)]
    finished: list[R] = []

    def on_done(run: R, record: Record) -> None:
        stages.store(runs[run].name, runs[run].key, record)
        finished.append(run)
        stages.progress(what, len(finished), len(left))

    if left:
        side_by_side(work, left, min(jobs, len(left)), on_done)
