"""Calibration of a small real bundle from data to policy. Its times are noise, so decisions are checked on FLOPs."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.calibrate import calibrate as calibrate_exits
from nestforge.runtime.calibrate.calibrate import Fitter, calibrate
from nestforge.runtime.calibrate.simulate import Observed, SegmentCosts, parse_budget
from nestforge.runtime.exits.policy import CalibratedPolicy, ExitPolicy
from nestforge.runtime.inputs.arrays import Array
from support.exit_bundles import (
    every_exit,
    make_rows,
    timed_once,
    write_arrays,
    write_exits_bundle,
    write_text_bundle,
    write_texts,
)

ROWS = 150


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with timed_once():
        yield


@pytest.fixture(scope="module")
def bundle(exits_bundle: Path) -> Bundle:
    return open_bundle(exits_bundle)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arrays(tmp_path_factory.mktemp("rows") / "rows.npz", ROWS)


@pytest.fixture(scope="module")
def found(bundle: Bundle, rows: Path) -> CalibratedPolicy:
    return calibrate(bundle, rows, parse_budget("mean_flops<=3500"), threads=1)


def test_the_policy_keeps_a_budget_of_flops(found: CalibratedPolicy) -> None:
    assert (found.name, found.budget, found.submodel, found.batch) == (
        "mean_flops<=3500",
        "mean_flops<=3500",
        "depth4",
        1,
    )
    assert 3000 < found.simulated.costs.mean_flops <= 3500
    # On the engines rows leave where the simulation lets them leave, and cost what it says.
    assert found.measured.costs.mean_flops == pytest.approx(found.simulated.costs.mean_flops)
    assert found.measured.histogram == found.simulated.histogram == found.histogram
    assert found.measured.quality == found.simulated.quality
    assert found.simulated.quality >= found.global_point.simulated.quality
    assert found.quality_is == "accuracy"


def test_quality_is_that_of_the_answers(found: CalibratedPolicy, bundle: Bundle) -> None:
    rows = make_rows(ROWS)
    exits = every_exit(rows["input_ids"], rows["attention_mask"])
    index = np.full(ROWS, 2)
    for exit_ in (1, 0):
        index[np.array(found.policy().leavers(exit_, exits[exit_][2].tolist()))] = exit_
    predicted = np.stack([logits.argmax(axis=1) for _, logits, _ in exits])[index, np.arange(ROWS)]
    assert found.measured.rows + found.held_out.rows == found.rows == ROWS
    right = found.measured.quality * found.measured.rows + found.held_out.quality * found.held_out.rows
    assert right == pytest.approx((predicted == rows["labels"]).sum())
    counted = np.add(found.histogram, found.held_out.histogram)
    assert counted.tolist() == np.bincount(index, minlength=3).tolist()


def test_the_whole_engine_stands_beside(found: CalibratedPolicy) -> None:
    for figures in (found.whole, found.held_out_whole):
        assert figures.histogram == (0, 0, figures.rows)
        assert figures.costs.mean_flops > 3500
        assert 0.8 < figures.quality < 1.0
        assert 0 < figures.costs.p50_latency_ms <= figures.costs.p95_latency_ms <= figures.costs.p99_latency_ms


def test_the_record_says_what_it_rests_on(found: CalibratedPolicy, bundle: Bundle, rows: Path) -> None:
    assert found.data_sha256 == hashlib.sha256(rows.read_bytes()).hexdigest()
    assert set(found.engines) == {engine.id for engine in bundle.manifest.engines if engine.submodel == "depth4"}
    assert found.threads == 1
    assert found.processor
    assert found.compare == "<="
    assert [point.threshold for point in found.curve] == sorted(point.threshold for point in found.curve)
    assert found.curve[0].simulated.histogram[2] == found.curve[-1].simulated.histogram[0] == found.measured.rows


def timed(fitting: tuple[float, float], checking: tuple[float, float]) -> Callable[..., list[Array]]:
    """``time_in_turns`` with these milliseconds of chain and whole engine, first while thresholds are fitted."""

    def times(sets: Sequence[Sequence[object]], _: object, stage: str) -> list[Array]:
        pair = fitting if stage == "measure thresholds" else checking
        return [np.full((3, len(sets[0])), ms) for ms in pair * (len(sets) // 2)]

    return times


def test_figures_are_of_one_pace(bundle: Bundle, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That at which the first thresholds were measured; half as long again is what everything took later."""

    monkeypatch.setattr(calibrate_exits, "time_in_turns", timed((2.0, 4.0), (3.0, 6.0)))
    found = calibrate(bundle, rows, parse_budget("mean_flops<=3500"), threads=1)
    assert found.held_out is not None
    assert found.held_out_whole is not None
    assert [each.costs.mean_latency_ms for each in (found.measured, found.held_out)] == pytest.approx([2.0, 2.0])
    assert [each.costs.p95_latency_ms for each in (found.whole, found.held_out_whole)] == pytest.approx([4.0, 4.0])


def test_over_a_range_the_engines_do_what_the_simulation_says(tmp_path: Path, rows: Path) -> None:
    bundle = open_bundle(write_exits_bundle(tmp_path / "b", [Bucket(8, 16, 1, 1)]))
    policy = calibrate(bundle, rows, parse_budget("mean_flops<=70%"), batch=3, threads=1)
    assert policy.measured.costs.mean_flops == pytest.approx(policy.simulated.costs.mean_flops)
    assert policy.measured.costs.mean_flops <= 0.7 * policy.whole.costs.mean_flops
    assert policy.measured.histogram == policy.simulated.histogram
    assert set(policy.engines) == {f"depth4{part}@b1_8-s1_16" for part in ("", ".to1", ".to2", ".to4")}


@pytest.mark.parametrize(
    ("limit", "options"),
    [(4000, {"batch": 3}), (4000, {"batch": 8}), (5500, {"batch": 4, "rule": "batch_max"})],
    ids=str,
)
def test_requests_of_several_rows(bundle: Bundle, rows: Path, limit: int, options: dict[str, Any]) -> None:
    policy = calibrate(bundle, rows, parse_budget(f"mean_flops<={limit}"), threads=1, **options)
    assert policy.policy().rule == options.get("rule", "per_row")
    assert policy.measured.costs.mean_flops == pytest.approx(policy.simulated.costs.mean_flops)
    assert policy.measured.costs.mean_flops <= limit
    assert policy.measured.histogram == policy.simulated.histogram
    assert sum(policy.histogram[:2]) > 0


def test_without_labels_quality_is_agreement(bundle: Bundle, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "rows.npz", 60, labelled=False)
    policy = calibrate(bundle, path, parse_budget("mean_flops<=3500"), threads=1)
    assert policy.quality_is == "agreement_with_last_exit"
    assert policy.whole.quality == 1.0
    assert policy.notes[0] == "no labels: quality is agreement with the last exit"
    assert 0 < policy.simulated.quality < 1


def test_texts(tmp_path: Path) -> None:
    bundle = open_bundle(write_text_bundle(tmp_path / "text.bundle"))
    path = write_texts(tmp_path / "rows.jsonl", 60)
    policy = calibrate(bundle, path, parse_budget("mean_flops<=3500"), name="texts", compare="<", threads=1)
    assert (policy.name, policy.compare, policy.rows, policy.truncated_rows) == ("texts", "<", 60, 0)
    path.write_text(path.read_text() + '{"text": "' + "w1 " * 30 + '", "label": 0}\n')
    policy = calibrate(bundle, path, parse_budget("mean_flops<=3500"), truncate=True, threads=1)
    assert "1 of 61 texts were truncated" in policy.notes


def test_few_rows_all_calibrate(bundle: Bundle, tmp_path: Path) -> None:
    policy = calibrate(bundle, write_arrays(tmp_path / "r.npz", 20), parse_budget("mean_flops<=3500"), threads=1)
    assert (policy.held_out, policy.held_out_whole, policy.measured.rows) == (None, None, 20)
    assert any(note.startswith("20 rows are too few to hold some out") for note in policy.notes)


def test_a_budget_for_full_depth_closes_every_exit(bundle: Bundle, rows: Path) -> None:
    policy = calibrate(bundle, rows, parse_budget("mean_latency_ms<=60000"), threads=1)
    assert policy.thresholds == (-1.0, -1.0)
    assert any(note.startswith("full depth meets the budget: every exit is closed") for note in policy.notes)


def test_a_truncated_submodel(bundle: Bundle, rows: Path) -> None:
    policy = calibrate(bundle, rows, parse_budget("mean_flops<=2000"), submodel="S", threads=1)
    assert policy.submodel == "depth2"
    assert len(policy.thresholds) == 1
    assert len(policy.histogram) == 2


def test_out_of_reach_names_the_least(bundle: Bundle, rows: Path) -> None:
    with pytest.raises(SelectionError) as failure:
        calibrate(bundle, rows, parse_budget("mean_flops<=10"), threads=1)
    message = str(failure.value)
    least = float(message.split(" FLOPs on this host")[0].split()[-1])
    assert message.startswith("budget mean_flops<=10: out of reach; with every row leaving at the first exit it is ")
    inside = calibrate(bundle, rows, parse_budget(f"mean_flops<={least * 1.001}"), threads=1)
    assert inside.histogram[0] == inside.measured.rows
    with pytest.raises(SelectionError, match=r"out of reach; .* ms on this host, the least possible"):
        calibrate(bundle, rows, parse_budget("p95_latency_ms<=1e-6"), threads=1)


def test_a_share_of_the_whole_engines_flops(bundle: Bundle, rows: Path) -> None:
    policy = calibrate(bundle, rows, parse_budget("mean_flops<=60 %"), batch=4, threads=1)
    assert (policy.name, policy.budget) == ("mean_flops<=60%", "mean_flops<=60%")
    share = policy.measured.costs.mean_flops / policy.whole.costs.mean_flops
    assert 0.5 < share <= 0.6
    # The same thresholds as for that many FLOPs in numbers.
    absolute = parse_budget(f"mean_flops<={0.6 * policy.whole.costs.mean_flops}")
    assert calibrate(bundle, rows, absolute, batch=4, threads=1).thresholds == policy.thresholds
    with pytest.raises(SelectionError) as failure:
        calibrate(bundle, rows, parse_budget("mean_flops<=1 %"), threads=1)
    found = re.fullmatch(
        r"budget mean_flops<=1%: out of reach; with every row leaving at the first exit it is (.+) % of the whole "
        r"engine's on this host, the least possible; ask for more",
        str(failure.value),
    )
    assert found
    least = calibrate(bundle, rows, parse_budget(f"mean_flops<={float(found[1]) + 0.01} %"), threads=1)
    assert least.histogram[0] == least.measured.rows


def test_a_share_of_latency_is_of_the_whole_engine_timed_in_turns(
    bundle: Bundle, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of 2 ms for everything, whole engine 4 ms and later 6: half is met at once, and a note says 60 %."""

    monkeypatch.setattr(calibrate_exits, "time_in_turns", timed((2.0, 4.0), (3.6, 6.0)))
    found = calibrate(bundle, rows, parse_budget("p95_latency_ms<=50 %"), threads=1)
    assert found.whole.costs.p95_latency_ms == pytest.approx(4.0)
    assert found.measured.costs.p95_latency_ms == pytest.approx(2.4)
    assert [note for note in found.notes if note.startswith("measured 60 % of the whole engine's, 20% over the budget")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 9}, "batch 9: larger than every bucket"),
        ({"batch": 8}, "5 rows are less than one request of 8; send more, or choose smaller"),
        ({"submodel": "depth9"}, "no submodel 'depth9' in this bundle"),
        ({"name": "off"}, "name 'off': expected a letter"),
    ],
)
def test_requests_that_make_no_sense(bundle: Bundle, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    few = write_arrays(tmp_path / "rows.npz", 5)
    with pytest.raises((InputError, SelectionError), match=message):
        calibrate(bundle, few, parse_budget("mean_flops<=3000"), threads=1, **options)


def test_models_without_exits(tiny_bundle: Path, rows: Path) -> None:
    with pytest.raises(SelectionError, match="this model has no exits to leave at; nothing to calibrate"):
        calibrate(open_bundle(tiny_bundle), rows, parse_budget("mean_flops<=3000"))


def drifting_fitter(
    monkeypatch: pytest.MonkeyPatch, limit: float | str, slower: Sequence[float], pace: Sequence[float] = (1.0,)
) -> Fitter:
    """Rows that leave evenly, on a machine whose chain takes ``slower`` times what was simulated, one measurement after
    the other; and all of it, the whole engine of 3 ms too, ``pace`` times as long."""
    rng = np.random.default_rng(0)
    entropy = rng.random((1000, 3)).astype(np.float32)
    table = np.zeros((3, 2, 1))
    table[:, 1] = 1.0
    observed = Observed(entropy, np.ones((1000, 3), bool), np.zeros(1000, int), 1, "<=")
    costs = SegmentCosts(table, table)
    factors, paces = list(slower), list(pace)

    class Chain:
        @staticmethod
        def run(feeds: Any, policy: ExitPolicy) -> ExitPolicy:
            return policy

    class Bench:
        chain = Chain()

        @staticmethod
        def run_whole(feeds: Any) -> None: ...

    def measure(calls: Sequence[Sequence[partial[Any]]], *_: object) -> list[Array]:
        thresholds = np.float32(calls[0][0]().thresholds)
        simulated = observed.request_ms(observed.leaving(thresholds), costs)
        factor = factors.pop(0) if len(factors) > 1 else factors[0]
        now = paces.pop(0) if len(paces) > 1 else paces[0]
        chain = now * factor * simulated[calibrate_exits.spread(simulated)]
        return [np.tile(chain, (3, 1)), np.full((3, len(chain)), now * 3.0)]

    monkeypatch.setattr(calibrate_exits, "time_in_turns", measure)
    budget = parse_budget(f"mean_latency_ms<={limit}")
    policy_of = lambda thresholds: ExitPolicy(tuple(map(float, thresholds)))  # noqa: E731 - as short as it is
    return Fitter(Bench(), [{}] * 1000, observed, costs, budget, 3, policy_of, lambda *_: None)


@pytest.mark.parametrize("slower", [[1.0], [1.25], [0.8], [1.3, 1.2], [1.1, 1.1, 1.2, 1.2]])
def test_thresholds_are_corrected_by_what_is_measured(monkeypatch: pytest.MonkeyPatch, slower: list[float]) -> None:
    """Each time the last factor holds while the corrected thresholds are measured again."""
    fit = drifting_fitter(monkeypatch, 2.0, slower).fit()
    assert fit.figure == pytest.approx(2.0, rel=0.02)
    cost = fit.problem.observed.metric(
        fit.problem.observed.leaving(fit.thresholds), fit.problem.costs, "mean_latency_ms"
    )
    assert cost <= 2.0


@pytest.mark.parametrize("pace", [[1.0, 2.0, 0.5, 3.0], [0.7, 1.0, 1.0], [1.3, 1.1, 0.9, 0.8]])
def test_a_machine_whose_pace_changes_does_not_change_the_thresholds(
    monkeypatch: pytest.MonkeyPatch, pace: list[float]
) -> None:
    """The chain takes that share of the whole engine's time that the budget was at the first measurement."""
    fit = drifting_fitter(monkeypatch, 2.0, [1.1], pace).fit()
    assert fit.figure == pytest.approx(2.0, rel=0.02)
    assert fit.whole_ms == pytest.approx(3.0 * pace[0])
    unscaled = SegmentCosts(fit.problem.costs.milliseconds / fit.correction, fit.problem.costs.flops)
    index = fit.problem.observed.leaving(fit.thresholds)
    simulated = fit.problem.observed.metric(index, unscaled, "mean_latency_ms")
    assert 1.1 * simulated / 3.0 == pytest.approx(2.0 / fit.whole_ms, rel=0.02)


@pytest.mark.parametrize("metric", ["mean_latency_ms", "p50_latency_ms", "p95_latency_ms"])
@pytest.mark.parametrize("pace", [[1.0], [1.0, 2.0, 0.5, 3.0], [0.4, 1.0, 1.3]])
@pytest.mark.parametrize("slower", [[1.0], [1.3, 1.2], [0.8, 0.9]])
def test_a_share_is_reached_whatever_the_pace(
    monkeypatch: pytest.MonkeyPatch, metric: str, pace: list[float], slower: list[float]
) -> None:
    """A share of the whole engine's 3 ms, with which the chain's own time is compared."""
    fitter = drifting_fitter(monkeypatch, "70 %", slower, pace)
    fitter.budget = replace(fitter.budget, metric=metric)
    fit = fitter.fit()
    assert fit.whole_ms == pytest.approx(3.0 * pace[0])
    assert fit.problem.budget.limit == pytest.approx(0.7 * 3.0 * pace[0])
    observed, index = fit.problem.observed, fit.problem.observed.leaving(fit.thresholds)
    unscaled = SegmentCosts(fit.problem.costs.milliseconds / fit.correction, fit.problem.costs.flops)
    chain = slower[-1] * observed.metric(index, unscaled, metric)
    if metric == "mean_latency_ms":  # percentiles of times of 1, 2 or 3 ms come in steps
        assert chain / 3.0 == pytest.approx(0.7, rel=0.02)
    assert fit.problem.cost(fit.thresholds) <= fit.problem.budget.limit


def test_a_share_below_the_first_exit_is_refused_by_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first exit takes a third of the whole engine when simulated; measured, 40 %.
    with pytest.raises(
        SelectionError, match=r"mean_latency_ms<=35%: out of reach; .* it is 40 % of the whole engine's"
    ):
        drifting_fitter(monkeypatch, "35 %", [1.2], [1.7]).fit()
    assert drifting_fitter(monkeypatch, "45 %", [1.2], [1.7]).fit().figure == pytest.approx(0.45 * 3 * 1.7, rel=0.02)


def test_a_budget_that_only_the_measurement_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulated, the first exit takes 1 ms; measured, 0.8.
    assert drifting_fitter(monkeypatch, 0.9, [0.8]).fit().figure == pytest.approx(0.9, rel=0.02)
    with pytest.raises(SelectionError, match=r"out of reach; .* it is 0.8 ms on this host"):
        drifting_fitter(monkeypatch, 0.7, [0.8]).fit()


def test_a_machine_that_slows_down_leaves_the_best_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = drifting_fitter(monkeypatch, 1.2, [1.05, 1.3, 1.6]).fit()
    assert fit.thresholds.shape == (2,)
    assert fit.figure > 1.2 * 1.02
