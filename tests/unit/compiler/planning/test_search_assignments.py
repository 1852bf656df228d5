from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.compiler.planning.ladder import PROMOTION_ORDERS, ladder
from nestforge.compiler.planning.levels import levels
from nestforge.compiler.planning.search_assignments import Found, Sizes, search_assignments
from nestforge.elastic import Axis, ElasticSpec, Submodel
from support.bare_encoder import encoder

SOURCE = encoder(layers=4, ffn=64, heads=4)
STEPS = levels(SOURCE.spec, {"ffn": [0.25, 0.5, 1], "heads": [0.25, 0.5, 1]}, 8)
RUNGS = [ladder(STEPS, order)[6] for order in PROMOTION_ORDERS]
SIZE = SOURCE.parameters(RUNGS[0])


def front_heavy(submodel: Submodel) -> float:
    """A loss that wants wide first layers, unlike the ladder."""
    return -sum(value / (2 + (axis.layer or 0)) for axis, value in submodel.values)


def search(evaluations: int, seed: int = 0, slack: float = 0.0) -> list[Found]:
    sizes = Sizes(SOURCE.parameters, (1 - slack) * SIZE, SIZE)
    return list(search_assignments(STEPS, RUNGS, sizes, front_heavy, evaluations, seed))


def test_the_known_come_first_and_each_assignment_once() -> None:
    found = search(20)
    ids = [candidate.submodel.id for candidate in found]
    assert ids[: len(RUNGS)] == [rung.id for rung in RUNGS]
    assert len(ids) == len(set(ids)) <= 20


def test_the_best_of_a_small_space_is_found() -> None:
    fitting = [
        submodel for choice in product(range(3), repeat=4) if SOURCE.parameters(submodel := assignment(choice)) == SIZE
    ]
    found = search(100)
    assert {candidate.submodel.id for candidate in found} == {submodel.id for submodel in fitting}
    best = min(found, key=lambda candidate: candidate.loss)
    assert best.loss == min(map(front_heavy, fitting)) < min(map(front_heavy, RUNGS[:1]))


def assignment(choice: tuple[int, ...]) -> Submodel:
    return SOURCE.spec.submodel(
        {axis.name: STEPS[choice[axis.layer or 0]].submodel[axis.name] for axis in SOURCE.spec.axes}
    )


@settings(max_examples=10)
@given(st.integers(0, 1000), st.floats(0, 0.5))
def test_sizes_are_kept_and_a_seed_repeats(seed: int, slack: float) -> None:
    found = search(24, seed, slack)
    assert all((1 - slack) * SIZE <= candidate.size <= SIZE for candidate in found)
    assert [candidate.size for candidate in found] == [SOURCE.parameters(c.submodel) for c in found]
    assert found == search(24, seed, slack)


def test_axes_outside_the_layers_stay() -> None:
    axes = (Axis("rank", 8), *(Axis(f"layers.{layer}.ffn", 16) for layer in range(4)))
    steps = levels(ElasticSpec(axes, ()), {"rank": [0.5, 1], "ffn": [0.5, 1]}, 8)
    rung = ladder(steps)[2]

    def size(submodel: Submodel) -> float:
        return sum(value for _, value in submodel.values)

    found = list(search_assignments(steps, [rung], Sizes(size, size(rung), size(rung)), front_heavy, 50, 0))
    assert len(found) == 6, "two of four layers"
    assert {candidate.submodel["rank"] for candidate in found} == {4}
