"""The comparison of ``make demo-exits``, on the golden bundle with three exits."""

from __future__ import annotations

from pathlib import Path

import nestforge
import numpy as np
import pytest
from nestforge.examples.cost_eff.report import exit_report
from nestforge.examples.cost_eff.texts import Text
from nestforge.tables import Table

BUNDLE = Path(__file__).parents[3] / "golden" / "bundle-exits"
TEXTS = ["the quick brown fox", "jumps over", "the lazy dog", "fox", "the the the dog", "quick brown dog jumps"]


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    """Labelled with what the exit after layer 3 says, so that it alone is always right."""
    with nestforge.load(BUNDLE, threads=1) as model:
        labels = np.concatenate([model(text, submodel="depth3", exits="off")["logits"].argmax(1) for text in TEXTS])
    return dict(exit_report(BUNDLE, list(map(Text, TEXTS, labels.tolist()))))


def test_each_exit_alone(tables: dict[str, Table]) -> None:
    table = tables["Accuracy of each exit, if every text leaves there"]
    assert [row[0] for row in table.rows] == ["exit after layer 1", "exit after layer 3", "exit after layer 4"]
    assert table.rows[1][1] == "100.0"
    assert [row[-1] for row in table.rows] == ["100 0 0", "0 100 0", "0 0 100"]
    flops = [int(row[4]) for row in table.rows]
    assert flops[0] < flops[1] < flops[2] == 100


def test_the_sweep_goes_from_nobody_to_everybody(tables: dict[str, Table]) -> None:
    table = tables["One threshold for every exit"]
    assert table.columns[-1] == "% leaving after layer 1 3 4"
    assert table.rows[0][-1] == "0 0 100", "no entropy is exactly 0"
    assert table.rows[-1][-1] == "100 0 0", "none is above ln C"
    depths = [
        sum(int(share) * layer for share, layer in zip(row[-1].split(), (1, 3, 4), strict=True)) for row in table.rows
    ]
    assert depths == sorted(depths, reverse=True)


def test_the_whole_engine_is_the_reference(tables: dict[str, Table]) -> None:
    (row,) = tables["Calibrated, and without exits"].rows
    assert (row[0], row[3], row[4], row[5]) == ("whole engine", "100", "100", "0 0 100")
