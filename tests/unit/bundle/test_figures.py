from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.bundle.figures import FIGURES, cell, heading, present

DOCS = Path(__file__).parents[3] / "docs"


def test_figures_stand_in_one_order_whatever_was_measured_first() -> None:
    found = present([{"loss": 1.0, "mean_cosine": 0.5}, {"recall_at_10": 1.0, "zeta": 1.0, "alpha": 2.0}])
    assert found == ["mean_cosine", "recall_at_10", "loss", "alpha", "zeta"]
    assert present([]) == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("mean_cosine", 1.0, "1.0000"), ("matched_prefix", 12.345, "12.3"), ("kl_small_to_universal", 1e-6, "0.00000")],
)
def test_a_figure_has_the_digits_that_it_is_worth(name: str, value: float, shown: str) -> None:
    assert cell({name: value}, name) == shown


def test_a_standard_error_stands_behind_its_figure() -> None:
    figures, errors = {"mean_cosine": 0.81234, "loss": 2.0, "new": 0.25}, {"mean_cosine": 0.00416, "new": 0.5}
    shown = [cell(figures, name, errors) for name in figures]
    assert shown == ["0.8123 ±0.0042", "2.0000", "0.25 ±0.5"]


def test_what_was_not_measured_is_a_dash_and_what_is_not_known_is_shown() -> None:
    assert (cell(None, "loss"), cell({}, "loss"), cell({"new": 0.25}, "new"), heading("new")) == (
        "-",
        "-",
        "0.25",
        "new",
    )


def test_every_figure_is_explained_on_both_pages() -> None:
    for page in ("consistency.md", "bundle-format.md"):
        text = (DOCS / page).read_text()
        assert [name for name in FIGURES if f"`{name}`" not in text] == []
