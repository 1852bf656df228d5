from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.compiler import mix_n_match as module
from nestforge.compiler.mix_n_match import Comparison, Found, Sizes, compare_assignments, search_assignments
from nestforge.compiler.planning.levels import PROMOTION_ORDERS, ladder, levels
from nestforge.elastic import Axis, ElasticSpec, Submodel
from nestforge.errors import PlanError
from nestforge.exporters.source import ModelSource, open_source
from nestforge.profiles.budget import parse_budget
from nestforge.profiles.compile_request import CompileRequest
from nestforge.profiles.device_profile import DeviceProfile
from nestforge.strict import unstructure
from support.bare_encoder import encoder
from support.tiny_compile import board
from support.tiny_models import corpus


class FrontHeavy:
    """A loss that wants wide first layers, unlike the ladder; it remembers what it judged."""

    unit = "made up"
    judged: list[tuple[int, str]]

    def __init__(self, model: Any, texts: tuple[str, ...]) -> None:
        self.texts = len(texts)

    def __call__(self, submodel: Submodel) -> float:
        self.judged.append((self.texts, submodel.id))
        return 10 - sum(value / (2 + (axis.layer or 0)) for axis, value in submodel.values)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    calls: list[tuple[int, str]] = []
    monkeypatch.setattr(FrontHeavy, "judged", calls, raising=False)
    monkeypatch.setattr(module, "HeldOutLoss", FrontHeavy)
    return calls


def profile(*budgets: str) -> DeviceProfile:
    plain = unstructure(dict(map(parse_budget, budgets)))
    return board(budgets=plain)


def compared(source: ModelSource, device: DeviceProfile, text: Path, **options: Any) -> Comparison:
    request = CompileRequest(source.checkpoint.folder, device, levels={"ffn": [0.25, 0.5, 1]})
    return compare_assignments(request, text, evaluations=8, seed=0, **options)


def test_shapes_and_search_under_one_budget(tiny_folder: Path, tmp_path: Path, judged: list[tuple[int, str]]) -> None:
    source, texts = open_source(tiny_folder), corpus(tmp_path / "corpus.txt")
    found = compared(source, profile("ffn_parameters<=60%"), texts)
    ways = {row.way: row for row in found.assignments}
    assert list(ways) == [
        *("25%", "50%", "100%"),
        *("increasing", "decreasing", "up-down", "down-up"),
        "best of the search",
    ]
    assert {way: row.submodel for way, row in ways.items() if way in ("increasing", "decreasing", "up-down")} == {
        "increasing": "ffn32-heads4",
        "decreasing": "ffn32-heads4",
        "up-down": "ffn32-heads4",
    }
    full = source.parameter_groups(source.spec.universal()).ffn
    assert (found.metric, found.limit, found.loss_unit) == ("ffn_parameters", int(0.6 * full), "made up")
    best = ways["best of the search"]
    assert best.size <= found.limit
    assert best.loss <= min(ways[way].loss for way in ("increasing", "decreasing", "up-down", "down-up"))
    assert best.submodel == "ffn64x1_16x2-heads4"
    assert 0 <= found.search_texts - found.texts <= 1


def test_the_search_never_sees_the_texts_that_are_reported(
    tiny_folder: Path, tmp_path: Path, judged: list[tuple[int, str]]
) -> None:
    texts = tmp_path / "odd.txt"
    lines = [f"the quick fox {number}" for number in range(501)]
    texts.write_text("\n".join(lines))
    found = compared(open_source(tiny_folder), profile("parameters<=95%"), texts)
    searched = [submodel for _, submodel in judged[: found.evaluations]]
    assert len(set(searched)) == found.evaluations <= 8
    assert [submodel for _, submodel in judged[found.evaluations :]] == [row.submodel for row in found.assignments]


def test_the_real_loss(tiny_folder: Path, tmp_path: Path) -> None:
    """A random encoder, ranked on the texts: its universal model is itself, and smaller ones are not."""
    texts = corpus(tmp_path / "corpus.txt")
    found = compared(open_source(tiny_folder), profile("parameters<=95%"), texts)
    losses = {row.way: row.loss for row in found.assignments}
    assert losses["100%"] == pytest.approx(0, abs=1e-9)
    assert 0 < losses["50%"] < losses["25%"]
    again = compared(open_source(tiny_folder), profile("parameters<=95%"), texts)
    assert again.assignments == found.assignments


def test_one_limit_exactly(tiny_folder: Path, tmp_path: Path) -> None:
    source = open_source(tiny_folder)
    with pytest.raises(PlanError) as failure:
        compared(source, profile("parameters<=90%,flops<=90%"), tmp_path / "none.txt")
    assert str(failure.value) == (
        "budget 'parameters<=90%,flops<=90%': expected exactly one limit to compare assignments by, got 2"
    )


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
