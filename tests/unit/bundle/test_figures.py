"""Figures of a manifest, and the rule by which a measured latency may not be trusted."""

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.bundle.build_record import Noise, is_noisy, noisy_figures
from nestforge.bundle.entries.engine_entry import ParityOutput, ParityReceipt
from nestforge.bundle.figures import FIGURES, cell, heading, meanings, present, quality_warnings, recall_in, shortfall
from nestforge.bundle.manifest import Manifest, Quality
from nestforge.profiles.precision import Precision
from nestforge.runtime.request import Request
from support.three_submodels import BUCKETS, SIZES, dispatcher, make

DOCS = Path(__file__).parents[3] / "docs"


def test_figures_stand_in_one_order_whatever_was_measured_first() -> None:
    found = present([{"loss": 1.0, "mean_cosine": 0.5, recall_in(64): 0.5}, {"recall_at_10": 1.0, recall_in(256): 0.9}])
    assert found == ["mean_cosine", "recall_at_10", "loss", "recall_at_10_in_64", "recall_at_10_in_256"]
    assert present([]) == []
    assert (heading(found[3]), cell({found[3]: 0.51234}, found[3])) == ("recall@10 in 64", "0.512")
    assert [line.partition(":")[0] for line in meanings([*found[3:], "new"])] == ["recall@10 in 64", "recall@10 in 256"]


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


@pytest.fixture
def three(manifest: Manifest) -> Manifest:
    return replace(make(manifest, SIZES, BUCKETS), trained_nested=False)


def keeping(manifest: Manifest, **cosines: float) -> Manifest:
    """``manifest`` with the mean cosines of its submodels by id."""
    submodels = tuple(
        replace(entry, quality=Quality(40, {"mean_cosine": cosines[entry.id], "recall_at_10": 0.5}, "0" * 64))
        for entry in manifest.submodels
    )
    return replace(manifest, submodels=submodels)


def test_what_is_below_says_by_which_figure(three: Manifest) -> None:
    kept = keeping(three, small=0.63, medium=0.9, large=1.0)
    assert [shortfall(kept.submodel(name)) for name in ("small", "medium", "large")] == [
        "mean cosine 0.6300, below 0.9",
        None,
        None,
    ]
    assert shortfall(three.submodel("small")) is None  # nothing was measured
    tokens = replace(three.submodel("small"), quality=Quality(9, {"token_agreement": 0.79}, "0" * 64))
    assert shortfall(tokens) == "token agreement 0.7900, below 0.8"


def test_a_budget_that_chose_one_is_named_and_nesting_mends_it(three: Manifest) -> None:
    (warning,) = quality_warnings(keeping(three, small=0.6, medium=0.7, large=1.0))
    assert warning.startswith(
        "2 of 3 submodels keep little of the universal model (budget edge: mean cosine 0.7000, below 0.9): the model "
        "was never nested; "
    )
    assert "`nestforge nest MODEL --text FILE --output nested`" in warning
    assert quality_warnings(keeping(three, small=0.9, medium=0.95, large=1.0)) == []


def test_what_no_training_of_ours_mends_is_not_advised(three: Manifest) -> None:
    low = keeping(three, small=0.6, medium=0.95, large=1.0)
    assert "trained nested; larger levels" in quality_warnings(replace(low, trained_nested=True))[0]
    without_text = quality_warnings(replace(low, text=None))[0]
    assert "never nested; larger levels (`levels`) keep more" in without_text
    assert "nestforge nest" not in without_text


def test_quality_that_was_not_measured_is_said_with_the_setting_that_measures_it(three: Manifest) -> None:
    (warning,) = quality_warnings(three)
    assert "was not measured" in warning
    assert warning.endswith("compile with `text` to measure it")
    assert quality_warnings(replace(three, text=None))[0].endswith("compile with `data` to measure it")
    assert quality_warnings(replace(three, trained_nested=True)) == []


@pytest.mark.parametrize(("precision", "chosen"), [("int8", ""), ("int4", ", and 4 bits are chosen by them")])
def test_integers_that_turn_an_answer_far_are_said_where_nobody_measured_what_it_costs(
    three: Manifest, precision: Precision, chosen: str
) -> None:
    figures = [ParityOutput("logits", 1.0, 1.0, cosine, 1.0, 0.0, 0.0) for cosine in (0.95, 0.4321)]
    receipt = ParityReceipt("", "", 1.0, 0.1, 0.85, ("text",), tuple(figures), "0" * 64, "0" * 64, 1.1)
    whole = replace(three, trained_nested=True)
    engines = tuple(replace(engine, precision=precision, parity=receipt) for engine in whole.engines)
    (warning,) = quality_warnings(replace(whole, engines=engines))
    assert warning.startswith(f"{precision} leaves a cosine of 0.43 to the model's answers on an input of the gate")
    assert warning.endswith(f"compile with `text` to measure it{chosen}")
    both = quality_warnings(replace(three, engines=engines))
    assert len(both) == 2, "beside the line that nothing was measured of smaller submodels"
    near = tuple(replace(engine, parity=replace(receipt, outputs=(figures[0],))) for engine in engines)
    assert quality_warnings(replace(whole, engines=near)) == []
    halves = tuple(replace(engine, precision="fp16") for engine in engines)
    assert quality_warnings(replace(whole, engines=halves)) == [], "which the gate itself judges"
    assert quality_warnings(keeping(replace(whole, engines=engines), small=0.9, medium=0.95, large=1.0)) == []


def test_of_precisions_alone_nothing_is_said_of_nesting(three: Manifest) -> None:
    whole = tuple(axis.size for axis in three.axes)
    entries = tuple(replace(entry, values={"ffn": whole}) for entry in three.submodels)
    precisions = replace(three, submodels=entries)
    (warning,) = quality_warnings(precisions)
    assert "was not measured, since no examples were given: compile with `text`" in warning
    (warning,) = quality_warnings(keeping(precisions, small=0.6, medium=0.95, large=1.0))
    assert warning.endswith("their precision costs it; a higher one keeps more")


@pytest.mark.parametrize("limit", [Request(budget="edge"), Request(latency_ms=3.0)])
def test_the_reason_says_it_where_a_limit_chose_the_submodel(three: Manifest, limit: Request) -> None:
    low = keeping(three, small=0.6, medium=0.7, large=1.0)
    reason = dispatcher(low).choose(limit, 1, 8).reason
    assert reason.endswith("; it keeps little of the universal model: mean cosine 0.7000, below 0.9")
    assert "keeps little" not in dispatcher(low).choose(Request(submodel="medium"), 1, 8).reason
    assert "keeps little" not in dispatcher(low).choose(Request(), 1, 8).reason


@pytest.mark.parametrize(
    ("noise", "problem"),
    [
        (Noise(20, 0.25, 1.10, 0.20), None),
        (Noise(3, 0.0), None),
        (Noise(20, 0.1, 1.32, 0.0), "measured twice it differs by 32% (at most 10%)"),
        (Noise(20, 0.26, 1.0, 0.0), "its runs spread by 26% (at most 25%)"),
        (Noise(20, 0.1, 1.0, 0.63), "other programs used 63% of the CPUs (at most 20%)"),
        (
            Noise(20, 0.4, 1.5, None),
            "measured twice it differs by 50% (at most 10%), its runs spread by 40% (at most 25%)",
        ),
    ],
)
def test_a_figure_is_noisy_beyond_any_of_three_limits(noise: Noise, problem: str | None) -> None:
    assert noise.problem == problem
    assert is_noisy(noise) is (problem is not None)


def test_of_a_figure_without_noise_nothing_is_known() -> None:
    assert not is_noisy(None)


def test_noisy_figures_are_counted_among_all() -> None:
    quiet, noisy = Noise(20, 0.1, 1.0, 0.0), Noise(3, 0.3, 1.0, 0.0)
    assert noisy_figures([("a", quiet), ("a", noisy), ("b", quiet), ("c", noisy)]) == (
        "2 of 4 measured latencies, in 2 of 3 engines, are noisy (a: its runs spread by 30% (at most 25%))"
    )
    assert noisy_figures([("a", quiet)]) is None
