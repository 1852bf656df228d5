"""The chain on engines whose numbers are exact, so that every answer is compared to the bit."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Latency
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleError, InputError, SelectionError
from nestforge.runtime.answering import joined
from nestforge.runtime.engines.runner import EnginePool
from nestforge.runtime.exits.chain import ExitChain, SegmentRun
from nestforge.runtime.exits.policy import ExitPolicy, closed
from support.exit_bundles import (
    BUCKETS,
    LAYERS,
    LEVELS,
    check_exits,
    every_exit,
    open_chain,
    requests,
    shapes_of,
    write_exits_bundle,
)
from support.latencies import latency


@pytest.fixture(scope="module")
def opened(exits_bundle: Path) -> Iterator[tuple[Bundle, EnginePool]]:
    bundle = open_bundle(exits_bundle)
    pool = EnginePool(bundle, {engine.id: "shared" for engine in bundle.manifest.engines}, 1)
    yield bundle, pool
    pool.close()


@pytest.fixture(scope="module")
def chain(opened: tuple[Bundle, EnginePool]) -> ExitChain:
    bundle, pool = opened
    return ExitChain(bundle, "depth4", pool, bundle.build.latencies)


def measured(bundle: Bundle, cost: Any) -> list[Latency]:
    """Latencies by ``cost(segment, bucket)``."""
    return [
        latency(engine.id, 1.0, float(cost(engine.segment, engine.bucket)))
        for engine in bundle.manifest.engines
        if engine.segment
    ]


LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=8)
THRESHOLDS = st.tuples(st.sampled_from(LEVELS), st.sampled_from(LEVELS))


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    extra=st.integers(0, 16),
    thresholds=THRESHOLDS,
    costs=st.lists(st.integers(1, 9), min_size=18, max_size=18),
    seed=st.integers(0, 99),
)
def test_whatever_engines_cost_answers_are_those_of_each_row_alone(
    opened: tuple[Bundle, EnginePool],
    lengths: list[int],
    extra: int,
    thresholds: tuple[float, float],
    costs: list[int],
    seed: int,
) -> None:
    bundle, pool = opened
    table = dict(zip([(f"to{layer}", bucket) for layer in LAYERS for bucket in BUCKETS], costs, strict=True))
    chain = ExitChain(bundle, "depth4", pool, measured(bundle, lambda segment, bucket: table[segment, bucket]))
    feeds = requests(lengths, min(16, max(lengths) + extra), seed)
    policy = ExitPolicy(thresholds)
    together = chain.run(feeds, policy)
    check_exits(together, feeds, thresholds)
    for row in range(len(lengths)):
        alone = chain.run({name: array[row : row + 1] for name, array in feeds.items()}, policy)
        assert alone.logits[0].tolist() == together.logits[row].tolist()
        assert (alone.index[0], alone.entropy[0]) == (together.index[row], together.entropy[row])
    order = np.random.default_rng(seed).permutation(len(lengths))
    shuffled = chain.run({name: array[order] for name, array in feeds.items()}, policy)
    assert shuffled.logits.tolist() == together.logits[order].tolist()
    assert shuffled.index.tolist() == together.index[order].tolist()


@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS, thresholds=THRESHOLDS, seed=st.integers(0, 99))
def test_a_watcher_sees_every_row_that_is_still_in(
    chain: ExitChain, lengths: list[int], thresholds: tuple[float, float], seed: int
) -> None:
    feeds = requests(lengths, seed=seed)
    found = every_exit(feeds["input_ids"], feeds["attention_mask"])
    seen: list[tuple[int, list[int]]] = []

    def watch(segment: SegmentRun) -> None:
        state, logits, entropy = found[segment.exit_index]
        seen.append((segment.exit_index, sorted(segment.rows.tolist())))
        assert segment.layer == LAYERS[segment.exit_index]
        assert segment.milliseconds > 0
        assert sum(bucket.batch for bucket in segment.buckets) >= len(segment.rows)
        assert np.array_equal(segment.logits, logits[segment.rows])
        assert np.array_equal(segment.entropy, entropy[segment.rows])
        if segment.exit_index == 2:
            assert segment.state is None
        else:
            assert segment.state is not None
            for row, mine in zip(segment.rows.tolist(), segment.state, strict=True):
                steps = int(feeds["attention_mask"][row].sum())
                assert np.array_equal(mine[:steps], state[row, :steps])

    run = chain.run(feeds, ExitPolicy(thresholds), watch)
    check_exits(run, feeds, thresholds)
    last = int(run.index.max())
    assert seen == [(j, np.flatnonzero(run.index >= j).tolist()) for j in range(last + 1)]


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, others=LENGTHS, thresholds=THRESHOLDS, segment=st.integers(1, 2), seed=st.integers(0, 99))
def test_rows_that_stop_go_on_with_others_and_are_answered_as_alone(
    chain: ExitChain, lengths: list[int], others: list[int], thresholds: tuple[float, float], segment: int, seed: int
) -> None:
    policy, both = ExitPolicy(thresholds), [requests(lengths, seed=seed), requests(others, seed=seed + 1)]
    shapes = [Bucket(len(each), max(each)) for each in (lengths, others)]
    runs = [
        chain.answer(feeds, shape, policy, stop=lambda number, rows, longest: number == segment)
        for feeds, shape in zip(both, shapes, strict=True)
    ]
    rests = [one.rest for one in runs if one.rest is not None]
    counts = [len(rest.rows) for rest in rests]
    if rests and sum(counts) <= 8:
        places = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        feeds = {
            name: joined([(place, rest.feeds[name]) for place, rest in zip(places, rests, strict=True)])
            for name in rests[0].feeds
        }
        steps = next(iter(feeds.values())).shape[1]
        behind = chain.answer(feeds, Bucket(sum(counts), steps), policy, first=segment)
        assert behind.rest is None
        for place, rest in zip(places, rests, strict=True):
            (run,) = (one for one in runs if one.rest is rest)
            for name in ("logits", "entropy", "index", "layer"):
                getattr(run, name)[rest.rows] = getattr(behind, name)[place]
            run.flops[rest.rows] += behind.flops[place]
        for run, feeds in zip(runs, both, strict=True):
            check_exits(run, feeds, thresholds)
            assert (run.flops > 0).all()


# By exit, the rows of requests([16, 3, 9, 16, 5, 2, 8, 7], seed=1): entropies in eighths.
EIGHT = [16, 3, 9, 16, 5, 2, 8, 7]


def test_the_rows_that_stay_move_together_where_that_is_cheaper(opened: Any, chain: ExitChain) -> None:
    feeds = requests(EIGHT, seed=1)
    first, second, _ = (entropy for _, _, entropy in every_exit(feeds["input_ids"], feeds["attention_mask"]))
    limits = (float(np.sort(first)[3]), float(np.sort(second)[4]))
    lengths = np.array(EIGHT)
    stay = first > limits[0]
    assert 0 < stay.sum() < 8
    run = chain.run(feeds, ExitPolicy(limits))
    rows = [8, int(stay.sum()), int((stay & (second > limits[1])).sum())]
    longest = [16, int(lengths[stay].max()), int(lengths[stay & (second > limits[1])].max())]
    want = ["+".join(f"{b.batch}x{b.sequence}" for b in chain.batch_plan(j, rows[j], longest[j])) for j in range(3)]
    assert shapes_of(chain, feeds, ExitPolicy(limits)) == want
    assert sum(b.batch for b in chain.batch_plan(1, rows[1], longest[1])) < 8
    check_exits(run, feeds, limits)

    bundle, pool = opened
    flat = ExitChain(bundle, "depth4", pool, measured(bundle, lambda _, bucket: 1.0))
    assert shapes_of(flat, feeds, ExitPolicy((limits[0], -1.0))) == ["8x16"] * 3  # dead rows stay in place
    check_exits(flat.run(feeds, ExitPolicy(limits)), feeds, limits)


def test_steps_behind_the_longest_row_are_cut_at_once(chain: ExitChain) -> None:
    assert shapes_of(chain, requests([3, 8, 1, 2], 16), closed(3)) == ["4x8"] * 3
    assert shapes_of(chain, requests([3, 9, 1, 2], 16), closed(3)) == ["4x16"] * 3
    nothing = requests([1], 16)
    nothing["attention_mask"][:] = 0
    check_exits(chain.run(nothing, closed(3)), nothing, (-1.0, -1.0))


def test_the_longest_survivor_decides_the_steps(chain: ExitChain) -> None:
    for seed in range(50):
        feeds = requests([16, 8, 8, 8], seed=seed)
        first = every_exit(feeds["input_ids"], feeds["attention_mask"])[0][2]
        if first[0] < first[1:].min():
            break
    limits = (float(first[0]), -1.0)
    assert shapes_of(chain, feeds, ExitPolicy(limits)) == ["4x16", "1x8+1x8+1x8", "1x8+1x8+1x8"]
    check_exits(chain.run(feeds, ExitPolicy(limits)), feeds, limits)


def test_a_model_whose_padding_counts_is_never_cut(tmp_path: Path) -> None:
    bundle = open_bundle(write_exits_bundle(tmp_path / "b", [Bucket(1, 8), Bucket(1, 16), Bucket(4, 16)], trims=False))
    with open_chain(bundle) as chain:
        feeds = requests([3, 8, 1], 16)
        assert shapes_of(chain, feeds, ExitPolicy((0.5, 0.5)))[0] == "1x16+1x16+1x16"
        check_exits(chain.run(feeds, ExitPolicy((0.5, 0.5))), feeds, (0.5, 0.5))
        # The same steps whether a row comes alone or not, though whole engines would take 4x16 for two rows.
        short = requests([3, 8])
        assert shapes_of(chain, short, closed(3))[0] == "1x8+1x8"


def test_batch_max_lets_all_leave_together(chain: ExitChain) -> None:
    for seed in range(20):
        feeds = requests([5, 6, 7], seed=seed)
        found = every_exit(feeds["input_ids"], feeds["attention_mask"])
        policy = ExitPolicy((0.5, 0.625), rule="batch_max")
        run = chain.run(feeds, policy)
        want = next((j for j, limit in enumerate(policy.thresholds) if found[j][2].max() <= limit), 2)
        assert run.index.tolist() == [want] * 3
        assert np.array_equal(run.logits, found[want][1])


def test_a_row_pays_for_the_segments_that_it_went_through(chain: ExitChain) -> None:
    feeds = requests([16] * 5, seed=0)
    run = chain.run(feeds, ExitPolicy((0.5, 0.5)))
    assert set(run.index.tolist()) == {0, 1, 2}
    assert run.flops.tolist() == [100 * layer * 16 for layer in run.layer.tolist()]
    assert run.buckets == (Bucket(4, 16), Bucket(1, 16))


def test_a_shallow_submodel_runs_the_segments_that_it_shares(opened: tuple[Bundle, EnginePool]) -> None:
    bundle, pool = opened
    chain = ExitChain(bundle, "depth2", pool, ())
    assert (chain.exits, chain.layers) == (2, (1, 2))
    feeds = requests([16, 4, 7], seed=2)
    check_exits(chain.run(feeds, ExitPolicy((0.25,))), feeds, (0.25,), exits=2)
    states: list[Any] = []
    chain.run(feeds, closed(2), lambda run: states.append(None if run.state is None else run.state.copy()))
    found = every_exit(feeds["input_ids"], feeds["attention_mask"])
    assert np.array_equal(states[1], found[1][0])  # its last segment returns one, as it does in the deeper model


def test_measured_before_predicted_before_tokens_and_by_file(opened: tuple[Bundle, EnginePool]) -> None:
    bundle, pool = opened
    mine = [engine for engine in bundle.manifest.engines if engine.segment == "to1" and engine.submodel == "depth2"]
    filled_up = [latency(engine.id, 10.0 + engine.bucket.batch) for engine in mine]

    def plan(latencies: list[Latency]) -> list[int]:
        return [bucket.batch for bucket in ExitChain(bundle, "depth4", pool, latencies).batch_plan(0, 6, 16)]

    assert plan([]) == [4, 1, 1]
    assert plan(filled_up) == [8]  # measured for another submodel that has the file
    assert plan([latency(one.engine, 99.0, 1.0) for one in filled_up]) == [8]
    assert plan(filled_up[:-1]) == [4, 1, 1]  # one is unknown: all by tokens
    other = [latency(engine.id, 1.0, float(engine.bucket.batch), residency="packed") for engine in mine]
    here = [latency(engine.id, 1.0, 10.0 + engine.bucket.batch, residency="shared") for engine in mine]
    assert plan([*here, *other]) == [8]
    assert plan(other) == [4, 1, 1]


@pytest.mark.parametrize(
    ("feeds", "policy", "error", "message"),
    [
        (
            requests([4] * 9),
            closed(3),
            InputError,
            "input of 9 rows x 4 is larger than every bucket of these exits (b1-s8",
        ),
        (requests([17]), closed(3), InputError, "input of 1 rows x 17 is larger than every bucket"),
        (requests([4]), ExitPolicy((0.1,)), SelectionError, "thresholds: expected one number, or 2"),
        ({"input_ids": np.zeros((1, 2), np.int64)}, closed(3), InputError, "inputs input_ids: expected exactly"),
        ({n: a[:0] for n, a in requests([4]).items()}, closed(3), InputError, "input input_ids: expected int64"),
        ({n: a + 16 for n, a in requests([4]).items()}, closed(3), InputError, "input input_ids: values"),
    ],
    ids=["rows", "steps", "thresholds", "missing", "empty", "values"],
)
def test_refuses(chain: ExitChain, feeds: Any, policy: ExitPolicy, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        chain.run(feeds, policy)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_all_segments_or_none(opened: tuple[Bundle, EnginePool]) -> None:
    bundle, pool = opened
    ids = {engine.id for engine in bundle.manifest.engines}
    with pytest.raises(
        SelectionError, match=r"submodel depth4: its exits cannot be used here, engine depth4.to2@b4-s16 is left out"
    ):
        ExitChain(bundle, "depth4", pool, (), ids - {"depth4.to2@b4-s16"})
    ExitChain(bundle, "depth2", pool, (), ids - {"depth4.to2@b4-s16"})
    plain = replace(bundle, manifest=replace(bundle.manifest, exits=None))
    with pytest.raises(SelectionError, match="this model has no exits to leave at"):
        ExitChain(plain, "depth4", pool, ())


def test_many_threads_get_their_own_answers(chain: ExitChain) -> None:
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        if seed < 8:
            start.wait(10)
        rng = np.random.default_rng(seed)
        feeds = requests(rng.integers(1, 17, rng.integers(1, 9)).tolist(), seed=seed)
        limits = (LEVELS[seed % 9], LEVELS[seed % 7])
        check_exits(chain.run(feeds, ExitPolicy(limits)), feeds, limits)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(400)))
    assert 1 <= len(chain._idle) <= 4


def test_a_closed_pool_says_so(exits_bundle: Path) -> None:
    bundle = open_bundle(exits_bundle)
    pool = EnginePool(bundle, {engine.id: "shared" for engine in bundle.manifest.engines}, 1)
    chain = ExitChain(bundle, "depth4", pool, ())
    first = chain.run(requests([4]), closed(3))
    assert first.open_ms > 0
    assert chain.run(requests([4]), closed(3)).open_ms == 0
    pool.close()
    with pytest.raises(BundleError, match=r"engine depth4.to1@b1-s8: not open"):
        chain.run(requests([4]), closed(3))
    with pytest.raises(BundleError, match="the model is closed"):
        chain.run(requests([4, 4]), closed(3))


def test_a_row_of_padding_alone_is_never_cut(chain: ExitChain) -> None:
    """Attention spreads over all its steps, so that how many there are decides what it answers."""
    feeds = requests([16, 3], 16)
    feeds["attention_mask"][0] = 0
    assert {bucket.sequence for bucket in chain.run(feeds, closed(3)).buckets} == {16}
    shorter = {name: array[1:] for name, array in feeds.items()}
    assert {bucket.sequence for bucket in chain.run(shorter, closed(3)).buckets} == {8}


def test_a_release_meets_requests_that_begin_and_end(
    opened: tuple[Bundle, EnginePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests take the waiting workspaces while a release empties them; threads change between any two steps."""
    bundle, pool = opened
    feeds, interval, problems = requests([4]), sys.getswitchinterval(), []
    chain = ExitChain(bundle, "depth4", pool, bundle.build.latencies)
    monkeypatch.setattr(chain, "_walk", lambda *_: None)  # nothing between a beginning and an end
    over = threading.Event()

    def release() -> None:
        try:
            while not over.is_set():
                chain.release()
                chain._kept = 16
        except IndexError as problem:
            problems.append(problem)

    sys.setswitchinterval(1e-6)
    releasing = threading.Thread(target=release)
    releasing.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: chain.run(feeds, closed(3)), range(10000)))
    finally:
        over.set()
        releasing.join()
        sys.setswitchinterval(interval)
    assert not problems


def test_a_workspace_in_use_is_closed_after_a_release(opened: tuple[Bundle, EnginePool]) -> None:
    bundle, pool = opened
    chain = ExitChain(bundle, "depth4", pool, bundle.build.latencies)
    chain.run(requests([4]), closed(3), watch=lambda _: chain.release())
    assert not chain._idle
