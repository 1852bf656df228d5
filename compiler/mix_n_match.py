"""Mix'n'Match on held-out text: the ladder's rung for a budget, the other promotion orders, and a search's best."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..elastic import Submodel
from ..errors import PlanError
from ..exporters.source import ModelSource
from ..exporters.universal import load_universal
from ..profiles.budget import LIMITS, BudgetSpec
from ..profiles.compile_request import CompileRequest
from ..profiles.precision import PRECISIONS
from .examples.corpus import read_corpus
from .examples.held_out_loss import HeldOutLoss
from .examples.rank_axes import rank_axes
from .planning.candidate import figures_of
from .planning.ladder import PROMOTION_ORDERS
from .planning.plan import Plan
from .planning.search_assignments import Found, Sizes, search_assignments
from .request import resolve
from .work.clock import Clock, Progress, silent
from .work.staging import Stage

# Candidates of the search are of the size of the ladder's rung, give or take this share, and within the budget.
WITHIN = 0.02


@dataclass(frozen=True)
class Assignment:
    """A way to assign levels to layers: its ``size`` in the budget's unit, its loss on texts that no search saw."""

    way: str
    submodel: str
    size: float
    loss: float


@dataclass(frozen=True)
class Comparison:
    """What every way of assigning makes of one budget. ``metric`` is the budget's unit, ``loss_unit`` the loss's.

    The search chose by the loss on ``search_texts`` texts; ``losses`` are on ``texts`` others.
    """

    model: str
    metric: str
    limit: float
    loss_unit: str
    assignments: tuple[Assignment, ...]
    texts: int
    search_texts: int
    evaluations: int
    seconds: float


def compare_assignments(
    request: CompileRequest,
    text: Path,
    *,
    evaluations: int,
    seed: int,
    progress: Progress = silent,
) -> Comparison:
    """Compares the promotion orders and a search of ``evaluations`` assignments under the one budget of ``request``.

    Losses are PyTorch's in float32, so of several precisions only the widest is planned for.
    A model that was not trained nested is ranked on the calibration texts first, as ``compile`` does.
    Raises PlanError unless the budget has exactly one limit and a submodel that keeps it; CheckpointError for a bad
    text file or a model that reads no text.
    """
    resolved = resolve(request)
    widest = max(resolved.profile.precisions, key=lambda precision: PRECISIONS[precision].bits)
    resolved = resolve(replace(request, precisions=(widest,)))
    source, profile, levels = resolved.source, resolved.profile, resolved.levels
    ((name, budget),) = profile.budgets.items()
    metric = _only_metric(name, budget)
    plans = {
        order: replace(resolved, profile=replace(profile, promotion_order=order)).plan() for order in PROMOTION_ORDERS
    }
    corpus, clock = read_corpus(text), Clock(progress)
    model = load_universal(source)
    with clock("rank"), TemporaryDirectory() as folder:
        stage = Stage(Path(folder), Path(folder))
        rank_axes(model, corpus, stage, clock)
    seen, unseen = HeldOutLoss(model, corpus.held_out[::2]), HeldOutLoss(model, corpus.held_out[1::2])
    chosen: dict[str, Submodel] = {order: _chosen(source, plan) for order, plan in plans.items()}
    limit = float(getattr(plans["increasing"].budgets[0].limits, metric))

    def size(submodel: Submodel) -> float:
        return figures_of(source, profile, submodel)[metric]

    found: list[Found] = []
    began = time.perf_counter()
    with clock("search"):
        rung = size(chosen["increasing"])
        sizes = Sizes(size, (1 - WITHIN) * rung, min((1 + WITHIN) * rung, limit))
        search = search_assignments(levels, list(chosen.values()), sizes, seen, evaluations, seed)
        for candidate in search:
            found.append(candidate)
            clock.tick(len(found), evaluations)
    seconds = time.perf_counter() - began
    best = min(found, key=_by_loss).submodel
    ways = {level.label: level.submodel for level in levels} | chosen | {"best of the search": best}
    with clock("compare"):
        rows = tuple(Assignment(way, s.id, size(s), unseen(s)) for way, s in clock.each(list(ways.items())))
    return Comparison(
        model=source.name,
        metric=metric,
        limit=limit,
        loss_unit=seen.unit,
        assignments=rows,
        texts=len(corpus.held_out[1::2]),
        search_texts=len(corpus.held_out[::2]),
        evaluations=len(found),
        seconds=seconds,
    )


def _only_metric(name: str, budget: BudgetSpec) -> str:
    limits = [name for name in LIMITS if getattr(budget, name) is not None]
    if len(limits) != 1:
        raise PlanError(f"budget {name!r}: expected exactly one limit to compare assignments by, got {len(limits)}")
    return limits[0]


def _chosen(source: ModelSource, plan: Plan) -> Submodel:
    return source.spec.parse(plan.budgets[0].submodel)


def _by_loss(found: Found) -> float:
    return found.loss
