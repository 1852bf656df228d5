from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nestforge.compiler import mix_n_match as module
from nestforge.compiler.mix_n_match import Comparison, compare_assignments
from nestforge.elastic import Submodel
from nestforge.errors import PlanError
from nestforge.exporters.source import ModelSource, open_source
from nestforge.profiles.budget import parse_budget
from nestforge.profiles.compile_request import CompileRequest
from nestforge.profiles.device_profile import DeviceProfile
from nestforge.strict import unstructure
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
