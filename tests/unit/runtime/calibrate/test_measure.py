"""On real engines whose answers are known: what is observed and counted, never how long it took."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.calibrate.data import LabelledData, read_data
from nestforge.runtime.calibrate.measure import ExitBench, costs_of, measured_figure, spread, time_in_turns
from nestforge.runtime.calibrate.simulate import Observed
from nestforge.runtime.engines.runner import EnginePool
from nestforge.runtime.exits.policy import ExitPolicy
from support.exit_bundles import LONGEST, every_exit, make_rows, write_arrays, write_exits_bundle

ROWS = 60


@pytest.fixture(scope="module")
def bundle(exits_bundle: Path) -> Bundle:
    return open_bundle(exits_bundle)


@pytest.fixture(scope="module")
def data(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> LabelledData:
    return read_data(write_arrays(tmp_path_factory.mktemp("rows") / "rows.npz", ROWS), bundle, LONGEST)


def bench_of(bundle: Bundle, submodel: str) -> Iterator[ExitBench]:
    pool = EnginePool(bundle, dict.fromkeys((engine.id for engine in bundle.manifest.engines), "shared"), 1)
    yield ExitBench(bundle, submodel, pool)
    pool.close()


@pytest.fixture(scope="module")
def bench(bundle: Bundle) -> Iterator[ExitBench]:
    yield from bench_of(bundle, "depth4")


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_exit_is_observed_for_every_row(bench: ExitBench, data: LabelledData, batch: int) -> None:
    samples: dict[object, list[float]] = {}
    answers = bench.observe(bench.requests(data, batch), samples)
    rows = make_rows(ROWS)
    exits = every_exit(rows["input_ids"], rows["attention_mask"])
    assert np.array_equal(answers.entropy, np.stack([entropy for _, _, entropy in exits], axis=1))
    assert np.array_equal(answers.predicted, np.stack([logits.argmax(axis=1) for _, logits, _ in exits], axis=1))
    assert sum(len(times) for (segment, _), times in samples.items() if segment == 0) == -(-ROWS // batch)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_requests_are_the_rows_in_order_cut_to_the_longest(bench: ExitBench, data: LabelledData, batch: int) -> None:
    requests = bench.requests(data, batch)
    assert [len(feeds["input_ids"]) for feeds in requests[:-1]] == [batch] * (ROWS // batch - (ROWS % batch == 0))
    for start, feeds in zip(range(0, ROWS, batch), requests, strict=True):
        longest = data.lengths[start : start + batch].max()
        assert np.array_equal(feeds["input_ids"], data.feeds["input_ids"][start : start + batch, :longest])


@pytest.mark.parametrize("batch", [1, 5, 8])
@pytest.mark.parametrize("thresholds", [(-1.0, -1.0), (0.3, 0.2), (0.5, 0.9), (9.0, 9.0)])
def test_simulation_says_what_the_chain_does(
    bench: ExitBench, data: LabelledData, batch: int, thresholds: tuple[float, float]
) -> None:
    """Exits and FLOPs of every row are the chain's own; engines cost as their tokens, so batch plans are known too."""
    samples: dict[tuple[int, tuple[object, ...]], list[float]] = {}
    requests = bench.requests(data, batch)
    answers = bench.observe(requests, samples)
    costs = bench.segment_costs(data, batch, samples, lambda *_: None)
    classes, lengths = bench.length_classes(data, batch)
    assert lengths == (8, 16)
    assert classes.tolist() == (data.lengths > 8).astype(int).tolist()
    observed = Observed(answers.entropy, np.ones((ROWS, 3), bool), classes, batch, "<=")
    index = observed.leaving(np.float32(thresholds))
    ran = bench.answer(requests, ExitPolicy(thresholds))
    assert np.array_equal(ran.index, index)
    assert observed.metric(index, costs, "mean_flops") == ran.flops.mean()
    assert (costs.milliseconds[:, 1:] > 0).all()
    assert (costs.milliseconds[:, 0] == 0).all()
    assert (np.diff(costs.milliseconds, axis=1) >= 0).all()


@pytest.fixture(scope="module")
def ranged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExitBench]:
    bundle = open_bundle(write_exits_bundle(tmp_path_factory.mktemp("range") / "b", [Bucket(8, LONGEST, 1, 1)]))
    yield from bench_of(bundle, "depth4")


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("thresholds", [(-1.0, -1.0), (0.3, 0.2), (9.0, 9.0)])
def test_in_a_range_every_length_costs_its_own(
    ranged: ExitBench, data: LabelledData, batch: int, thresholds: tuple[float, float]
) -> None:
    samples: dict[tuple[int, tuple[Bucket, ...]], list[float]] = {}
    requests = ranged.requests(data, batch)
    answers = ranged.observe(requests, samples)
    costs = ranged.segment_costs(data, batch, samples, lambda *_: None)
    classes, lengths = ranged.length_classes(data, batch)
    assert np.array_equal(np.array(lengths)[classes], data.lengths)
    observed = Observed(answers.entropy, np.ones((ROWS, 3), bool), classes, batch, "<=")
    index = observed.leaving(np.float32(thresholds))
    ran = ranged.answer(requests, ExitPolicy(thresholds))
    assert np.array_equal(ran.index, index)
    assert observed.metric(index, costs, "mean_flops") == ran.flops.mean()
    assert costs.milliseconds.shape == (3, batch + 1, len(lengths))
    assert (costs.milliseconds[:, 1:] > 0).all()
    longest = [data.lengths[start : start + batch].max() for start in range(0, ROWS, batch)]
    assert np.array_equal(ranged.whole_flops(requests), 400 * np.repeat(longest, batch))
    *_, (_, logits, _) = every_exit(data.feeds["input_ids"], data.feeds["attention_mask"])
    assert np.array_equal(ranged.answer_whole(requests).predicted, logits.argmax(axis=1))


def test_in_a_range_few_sizes_are_timed(ranged: ExitBench, bench: ExitBench) -> None:
    lengths = (3, 4, 5, 7, 9, 16)
    assert ranged._timed_sizes(6, lengths) == ([1, 2, 4, 6], [0, 1, 4, 5])
    assert ranged._timed_sizes(1, (5,)) == ([1], [0])
    assert bench._timed_sizes(3, (8, 16)) == ([1, 2, 3], [0, 1])


def test_the_whole_engine_answers_as_the_last_exit(bench: ExitBench, data: LabelledData) -> None:
    whole = bench.answer_whole(bench.requests(data, 4))
    rows = make_rows(ROWS)
    *_, (_, logits, _) = every_exit(rows["input_ids"], rows["attention_mask"])
    assert np.array_equal(whole.predicted, logits.argmax(axis=1))
    assert set(whole.index) == {2}
    longest = data.lengths.reshape(-1, 4).max(axis=1).repeat(4)
    assert np.array_equal(whole.flops, 400 * np.where(longest > 8, 16, 8))


def test_a_truncated_submodel_has_its_own_exits(bundle: Bundle, data: LabelledData) -> None:
    for bench in bench_of(bundle, "depth2"):
        assert bench.observe(bench.requests(data, 4), {}).entropy.shape == (ROWS, 2)
        assert set(bench.engines) == {engine.id for engine in bundle.manifest.engines if engine.submodel == "depth2"}


def test_where_steps_are_not_cut_a_row_is_as_long_as_its_request(tmp_path: Path) -> None:
    bundle = open_bundle(write_exits_bundle(tmp_path / "untrimmed.bundle", trims=False))
    rows = {name: array[:, :7] if array.ndim > 1 else array for name, array in make_rows(6).items()}
    np.savez(tmp_path / "rows.npz", **rows)
    data = read_data(tmp_path / "rows.npz", bundle, LONGEST)
    for bench in bench_of(bundle, "depth4"):
        assert bench.length_classes(data, 2)[1] == (8,)
        assert bench.requests(data, 2)[0]["input_ids"].shape == (2, 7)


def test_batches_beyond_every_bucket(bench: ExitBench) -> None:
    assert bench.longest(8) == 16
    with pytest.raises(InputError, match="batch 9: larger than every bucket of this bundle \\(b1-s8, "):
        bench.longest(9)


def test_models_without_exits(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    with pytest.raises(SelectionError, match="this model has no exits"):
        for _ in bench_of(bundle, "ffn32"):
            pass


def test_sets_take_turns() -> None:
    calls: list[str] = []
    sets = [[partial(calls.append, name)] * count for name, count in (("a", 20), ("b", 3))]
    times = time_in_turns(sets, lambda *_: None, "time")
    assert [taken.shape for taken in times] == [(9, 20), (9, 3)]
    turn = ["a"] * 16 + ["b"] * 3 + ["a"] * 4
    assert calls == ["a"] * 20 + ["b"] * 3 + turn * 9


def test_one_interruption_is_not_the_mean() -> None:
    times = np.full((5, 10), 2.0)
    times[1, 3] = 500.0
    assert measured_figure(times, "mean_latency_ms") == 2.0
    tail = np.tile(np.arange(1.0, 101.0), (3, 1))
    assert costs_of(tail, np.array([4, 6])).p95_latency_ms == pytest.approx(95.05)
    assert costs_of(tail, np.array([4, 6])).mean_flops == 5.0


def test_few_requests_are_all_timed() -> None:
    assert spread(np.array([3.0, 1.0, 2.0])).tolist() == [0, 1, 2]


def test_timed_requests_cost_what_all_do() -> None:
    """Also where the dear ones lie together, as in a file sorted by class."""
    rng = np.random.default_rng(0)
    whole = rng.choice([2.0, 4.0], 3000)
    chain = np.sort(rng.choice([0.3, 0.6, 1.0], 3000)) * whole
    timed = spread(chain, whole)
    assert len(timed) == 400
    assert (np.diff(timed) > 0).all()
    for costs in (chain, whole):
        assert costs[timed].mean() == pytest.approx(costs.mean(), rel=0.01)
