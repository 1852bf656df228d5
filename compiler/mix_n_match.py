"""Mix'n'Match on held-out text: the ladder's rung for a budget, the other promotion orders, and a search's best.

The evolutionary search over the level of every layer shows what the promotion ladder leaves on the table.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from ..elastic import Submodel, canonical
from ..errors import PlanError
from ..exporters.source import ModelSource
from ..exporters.universal import load_universal
from ..profiles.budget import LIMITS, BudgetSpec
from ..profiles.compile_request import CompileRequest
from ..profiles.precision import highest_first
from ..progress import Progress, silent
from .examples.corpus import read_corpus
from .examples.rank_axes import rank_axes
from .examples.texts import HeldOutLoss
from .job import resolve
from .planning.candidate import figures_of
from .planning.levels import PROMOTION_ORDERS, Level
from .planning.plan import Plan
from .work.clock import Clock
from .work.staging import Stage

# Candidates of the search are of the size of the ladder's rung, give or take this share, and within the budget.
WITHIN = 0.02
_PARENT_COUNT = 8
# Children in a row that are known already or of the wrong size, after which the space counts as searched.
_MAX_FRUITLESS_CHILDREN = 200

Genes = tuple[int, ...]  # the index of a level, per layer


@dataclass(frozen=True)
class Assignment:
    """A way to assign levels to layers: its ``size`` in the budget's unit, its loss on texts that no search saw."""

    way: str
    submodel: str
    size: float
    loss: float


@dataclass(frozen=True)
class Comparison:
    """Submodels of one budget, by way of assigning. ``metric`` is the budget's unit, ``loss_unit`` the loss's.

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


@dataclass(frozen=True)
class Found:
    """An assignment, its size in the budget's unit, and its loss."""

    submodel: Submodel
    size: float
    loss: float


@dataclass(frozen=True)
class Sizes:
    """Bounds of an assignment's size: from ``floor`` to ``limit`` of ``size``, which rises with every level."""

    size: Callable[[Submodel], float]
    floor: float
    limit: float


def compare_assignments(
    request: CompileRequest,
    text: Path,
    *,
    evaluations: int,
    seed: int,
    progress: Progress = silent,
) -> Comparison:
    """Compares the promotion orders and a search of ``evaluations`` assignments under the one budget of ``request``.

    Losses are PyTorch's in float32, so of several precisions only the highest is planned for.
    A model that was not trained nested is ranked on the calibration texts first, as ``compile`` does.
    Raises PlanError unless the budget has exactly one limit and a submodel that keeps it; CheckpointError for a bad
    text file or a model that reads no text.
    """
    resolved = resolve(request)
    resolved = resolve(replace(request, precisions=highest_first(resolved.profile.precisions)[:1]))
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
    best = min(found, key=lambda one: one.loss).submodel
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


def search_assignments(
    levels: Sequence[Level],
    known: Sequence[Submodel],
    sizes: Sizes,
    loss: Callable[[Submodel], float],
    evaluations: int,
    seed: int,
) -> Iterator[Found]:
    """Evaluates up to ``evaluations`` different assignments within ``sizes``, those ``known`` first, by ``seed``.

    Children of the best so far swap the levels of two layers, move one layer by a level, or mix two parents, and are
    then brought to size by moving random layers. Axes outside the layers keep the first known submodel's values.
    Yields every assignment as it is evaluated; fewer than requested where there are no more.
    """
    space = _Space(levels, known[0])
    random = Random(seed)  # noqa: S311  (a search, not a secret)
    found: dict[str, tuple[Genes, Found]] = {}

    def evaluate(genes: Genes) -> Found:
        submodel = space.submodel(genes)
        result = Found(submodel, sizes.size(submodel), loss(submodel))
        found[submodel.id] = (genes, result)
        return result

    for submodel in known:
        if submodel.id not in found and len(found) < evaluations:
            yield evaluate(space.genes(submodel))
    fruitless = 0
    while len(found) < evaluations and fruitless < _MAX_FRUITLESS_CHILDREN:
        parents = [genes for genes, _ in sorted(found.values(), key=lambda entry: entry[1].loss)[:_PARENT_COUNT]]
        child = _to_size(_child(parents, len(levels), random), space, sizes, random)
        if child is None or space.submodel(child).id in found:
            fruitless += 1
            continue
        fruitless = 0
        yield evaluate(child)


def _only_metric(name: str, budget: BudgetSpec) -> str:
    limits = [name for name in LIMITS if getattr(budget, name) is not None]
    if len(limits) != 1:
        raise PlanError(f"budget {name!r}: expected exactly one limit to compare assignments by, got {len(limits)}")
    return limits[0]


def _chosen(source: ModelSource, plan: Plan) -> Submodel:
    return source.spec.parse(plan.budgets[0].submodel)


class _Space:
    """Assignments as the index of a level per layer."""

    def __init__(self, levels: Sequence[Level], like: Submodel) -> None:
        self.levels = levels
        self.like = like
        self.layers = sorted({axis.layer for axis, _ in like.values if axis.layer is not None})

    def submodel(self, genes: Genes) -> Submodel:
        level = dict(zip(self.layers, genes, strict=True))
        return canonical(
            (axis, value if axis.layer is None else self.levels[level[axis.layer]].submodel[axis.name])
            for axis, value in self.like.values
        )

    def genes(self, submodel: Submodel) -> Genes:
        """The largest level that each layer of ``submodel`` has on all its axes."""
        return tuple(
            max(
                index
                for index, level in enumerate(self.levels)
                if all(level.submodel[axis.name] <= value for axis, value in submodel.values if axis.layer == layer)
            )
            for layer in self.layers
        )


def _child(parents: Sequence[Genes], levels: int, random: Random) -> list[int]:
    child = list(random.choice(parents))
    places = range(len(child))
    match random.choice(("swap", "step", "mix")):
        case "swap":
            one, other = random.choice(places), random.choice(places)
            child[one], child[other] = child[other], child[one]
        case "step":
            place = random.choice(places)
            child[place] = min(levels - 1, max(0, child[place] + random.choice((-1, 1))))
        case _:
            other_parent = random.choice(parents)
            child = [random.choice(pair) for pair in zip(child, other_parent, strict=True)]
    return child


def _to_size(child: list[int], space: _Space, sizes: Sizes, random: Random) -> Genes | None:
    """``child`` with random layers moved down and then up until its size is allowed, or None if that fails."""

    def size() -> float:
        return sizes.size(space.submodel(tuple(child)))

    while size() > sizes.limit:
        lower = [place for place, level in enumerate(child) if level > 0]
        if not lower:
            return None
        child[random.choice(lower)] -= 1
    raisable = [place for place, level in enumerate(child) if level < len(space.levels) - 1]
    random.shuffle(raisable)
    for place in raisable:
        if size() >= sizes.floor:
            break
        child[place] += 1
        if size() > sizes.limit:
            child[place] -= 1
    return tuple(child) if size() >= sizes.floor else None
