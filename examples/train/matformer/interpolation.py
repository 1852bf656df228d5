"""Quality between the trained levels: every rung of the Mix'n'Match ladder."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from ....compiler.planning.ladder import ladder
from ....compiler.planning.levels import levels
from ....exporters.families.matformer.folder import load_model
from ....exporters.source import open_source
from ..stages import Record
from .fit import quality
from .tasks import Task


def measure_ladder(task: Task, folder: Path, on_rung: Callable[[int, int], None]) -> Record:
    """Loss and accuracy on the test rows of every rung of the model in ``folder``, smallest first.

    ``outside`` counts the rungs whose loss is not between those of the two trained levels that they mix, and ``worst``
    is the largest excess over the worse of the two, in nats (0 if there is none).
    """
    source, model, rows = open_source(folder), load_model(folder), task.data().test
    trained = {level.submodel.id: level.label for level in levels(source.spec, None, 1)}
    rungs = ladder(levels(source.spec, None, 1))
    measured: list[Record] = []
    for number, rung in enumerate(rungs, start=1):
        widths = [int(width) for width in rung.by_kind()["ffn"]]
        figures = quality(task, model, rows, widths)
        facts = {"submodel": rung.id, "level": trained.get(rung.id), "parameters": source.parameters(rung)}
        measured.append({**facts, **figures})
        on_rung(number, len(rungs))
    return {"rungs": measured, **between_levels([(r["level"], r["loss"]) for r in measured])}


def between_levels(rungs: list[tuple[str | None, float]]) -> Record:
    """``outside`` and ``worst`` of ``rungs``: (name of the trained level or None, loss) in the ladder's order."""
    at = [index for index, (level, _) in enumerate(rungs) if level is not None]
    outside, worst = 0, 0.0
    for low, high in pairwise(at):
        ends = sorted((rungs[low][1], rungs[high][1]))
        for _, loss in rungs[low + 1 : high]:
            outside += not ends[0] <= loss <= ends[1]
            worst = max(worst, loss - ends[1])
    return {"mixed": len(rungs) - len(at), "outside": outside, "worst": worst}
