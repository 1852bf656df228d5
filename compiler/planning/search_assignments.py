"""An evolutionary search over the level of every layer, to see what the promotion ladder leaves on the table.

Pure and seeded: what an assignment costs and how well it does are functions of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from ...elastic import Submodel, canonical
from .levels import Level

_PARENT_COUNT = 8
# Children in a row that are known already or of the wrong size, after which the space counts as searched.
_MAX_FRUITLESS_CHILDREN = 200

Genes = tuple[int, ...]  # the index of a level, per layer


@dataclass(frozen=True)
class Found:
    """An assignment, its size in the budget's unit, and its loss."""

    submodel: Submodel
    size: float
    loss: float


@dataclass(frozen=True)
class Sizes:
    """What an assignment may cost: from ``floor`` to ``limit`` of ``size``, which rises with every level."""

    size: Callable[[Submodel], float]
    floor: float
    limit: float


def search_assignments(
    levels: Sequence[Level],
    known: Sequence[Submodel],
    sizes: Sizes,
    loss: Callable[[Submodel], float],
    evaluations: int,
    seed: int,
) -> Iterator[Found]:
    """Evaluates up to ``evaluations`` different assignments within ``sizes``, those ``known`` first.

    Children of the best so far swap the levels of two layers, move one layer by a level, or mix two parents, and are
    then brought to size by moving random layers. Axes outside the layers keep the first known submodel's values.
    Yields every assignment as it is evaluated; fewer than asked for where there are no more.
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
