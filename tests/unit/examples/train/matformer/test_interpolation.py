"""Which mixed submodels are not between the levels that they mix."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.examples.train.matformer.interpolation import between_levels, measure_ladder
from nestforge.examples.train.matformer.runs import Run, train
from nestforge.examples.train.matformer.tasks import LanguageTask


def test_rungs_outside_the_levels_that_they_mix() -> None:
    rungs = [("S", 3.0), (None, 2.9), (None, 3.25), ("M", 2.5), (None, 2.25), (None, 2.5), ("L", 2.0)]
    assert between_levels(rungs) == {"mixed": 4, "outside": 1, "worst": 0.25}
    assert between_levels([("S", 2.0), (None, 1.75), ("M", 2.5)]) == {"mixed": 1, "outside": 1, "worst": 0.0}
    assert between_levels([("S", 2.0), ("M", 1.0)]) == {"mixed": 0, "outside": 0, "worst": 0.0}


def test_every_rung_is_measured_and_the_levels_as_training_measured_them(
    language: LanguageTask, tmp_path: Path
) -> None:
    run = train(language, Run(0, folder=tmp_path / "model"))
    told: list[tuple[int, int]] = []
    record = measure_ladder(language, tmp_path / "model", lambda done, total: told.append((done, total)))
    assert told == [(rung, 7) for rung in range(1, 8)]
    assert [rung["level"] for rung in record["rungs"]] == ["S", None, "M", None, "L", None, "XL"]
    sizes = [rung["parameters"] for rung in record["rungs"]]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == run["parameters"]
    for rung in record["rungs"]:
        if rung["level"]:
            assert rung["loss"] == pytest.approx(run["levels"][rung["level"]]["test"]["loss"])
