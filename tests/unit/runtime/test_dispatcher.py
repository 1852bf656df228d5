from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Latency
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.manifest import BudgetEntry, Limits, Manifest, SubmodelEntry
from nestforge.elastic import SEQUENCE, Axis
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.dispatcher import Dispatcher
from nestforge.runtime.engines.residency import Residency
from nestforge.runtime.in_flight import InFlight, LoadEstimate
from nestforge.runtime.request import Request
from support.latencies import latency
from support.three_submodels import BUCKETS, MB, SIZES, dispatcher, make, predicted


@pytest.fixture
def three(manifest: Manifest) -> Manifest:
    return make(manifest, SIZES, BUCKETS)


@pytest.mark.parametrize(
    ("request_", "shape", "engine", "reason"),
    [
        (Request(), (1, 32), "large@b1-s32", "no limit given: the largest submodel"),
        (Request(), (1, 33), "large@b1-s128", "no limit given: the largest submodel"),
        (Request(), (2, 5), "large@b4-s32", "no limit given: the largest submodel"),
        (Request(budget="edge"), (1, 8), "medium@b1-s32", "budget edge: largest within 3 ms"),
        (Request(submodel="S"), (3, 9), "small@b4-s32", "submodel S requested"),
        (Request(latency_ms=4), (1, 8), "large@b1-s32", "predicted 4 ms <= 4 ms"),
        (
            Request(latency_ms=3.9),
            (1, 8),
            "medium@b1-s32",
            "predicted 2 ms <= 3.9 ms; next larger large (predicted 4 ms, 41.0 MB)",
        ),
        (Request(latency_ms=4), (1, 128), "small@b1-s128", "predicted 4 ms <= 4 ms; next larger medium"),
        (Request(memory_mb=21), (1, 8), "medium@b1-s32", "21.0 MB <= 21 MB; next larger large"),
        (Request(latency_ms=3, memory_mb=20), (1, 8), "small@b1-s32", "predicted 1 ms <= 3 ms, 11.0 MB <= 20 MB"),
    ],
)
def test_chooses(three: Manifest, request_: Request, shape: tuple[int, int], engine: str, reason: str) -> None:
    choice = dispatcher(three).choose(request_, *shape)
    assert choice.engine.id == engine
    assert choice.reason.startswith(reason)


@pytest.mark.parametrize(
    ("latencies", "residency", "reason"),
    [
        ([latency("large@b1-s32", 1.0)], "packed", "predicted 1 ms <= 9 ms"),
        ([latency("large@b1-s32", 1.0, 2.0, 3.0, "packed")], "packed", "measured here 2 ms <= 9 ms"),
        ([latency("large@b1-s32", 1.0, 2.0, 3.0)], "packed", "measured here 2 ms <= 9 ms"),
        ([latency("large@b1-s32", 1.0, 2.0, 3.0, "packed")], "shared", "measured here 2 ms as packed <= 9 ms"),
        (
            [latency("large@b1-s32", 1.0, 2.0, 3.0, "packed"), latency("large@b1-s32", 1.0, 5.0, 6.0, "shared")],
            "shared",
            "measured here 5 ms <= 9 ms",
        ),
    ],
)
def test_says_how_a_latency_is_known(
    three: Manifest, latencies: list[Latency], residency: Residency, reason: str
) -> None:
    assert dispatcher(three, latencies, residency).choose(Request(latency_ms=9), 1, 1).reason == reason


def test_says_where_a_latency_was_measured_if_not_on_this_host(three: Manifest) -> None:
    latencies = [latency("large@b1-s32", 1.0, 2.0, 3.0, "packed"), latency("medium@b1-s32", 1.0)]
    residencies = dict.fromkeys((engine.id for engine in three.engines), "shared")
    choose = Dispatcher(three, residencies, latencies, elsewhere="Cortex-A76").choose
    assert choose(Request(latency_ms=9), 1, 1).reason == "measured on Cortex-A76: 2 ms as packed <= 9 ms"
    assert choose(Request(latency_ms=1), 1, 1).reason.startswith(
        "predicted 1 ms <= 1 ms; next larger large (measured on"
    )


def test_true_is_no_limit_even_where_1_was_one(three: Manifest) -> None:
    choose = dispatcher(three).choose
    assert choose(Request(latency_ms=1), 1, 8).engine.submodel == "small"
    with pytest.raises(SelectionError, match="latency_ms: expected a positive number, got True"):
        choose(Request(latency_ms=True), 1, 8)


def test_an_impossible_budget_lists_what_exists(three: Manifest) -> None:
    with pytest.raises(SelectionError) as error:
        dispatcher(three).choose(Request(latency_ms=0.5), 1, 8)
    assert str(error.value) == (
        "no submodel answers 1x8 with `latency_ms` <= 0.5; there is large (predicted 4 ms, 41.0 MB), "
        "medium (predicted 2 ms, 21.0 MB), small (predicted 1 ms, 11.0 MB)"
    )
    with pytest.raises(SelectionError, match="`latency_ms` <= 5 and `memory_mb` <= 1; there is large"):
        dispatcher(three).choose(Request(latency_ms=5, memory_mb=1), 1, 8)


def test_an_engine_without_a_latency_never_satisfies_one(three: Manifest) -> None:
    with pytest.raises(SelectionError, match=r"small \(no latency known, 11.0 MB\)"):
        dispatcher(three, []).choose(Request(latency_ms=1e9), 1, 8)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(budget="edgy"), "no budget 'edgy' in this bundle; did you mean 'edge'?"),
        (Request(submodel="tiny"), "no submodel 'tiny' in this bundle; it has small (S), medium (M), large (L)"),
        (
            Request(budget="edge", latency_ms=1),
            "request with budget, latency_ms: expected a budget, or a submodel, or limits, not several",
        ),
        (Request(budget="edge", submodel="small"), "expected a budget, or a submodel, or limits"),
        (Request(latency_ms=0), "latency_ms: expected a positive number, got 0"),
        (Request(latency_ms=float("nan")), "latency_ms: expected a positive number, got nan"),
        (Request(memory_mb=float("inf")), "memory_mb: expected a positive number, got inf"),
        (Request(latency_ms=10**400), "latency_ms: expected a positive number, got inf"),
        (Request(latency_ms=True), "latency_ms: expected a positive number, got True"),
        (Request(memory_mb=[8]), "memory_mb: expected a positive number, got [8]"),
        (Request(latency_ms="8"), "latency_ms: expected a positive number, got '8'"),
    ],
)
def test_refuses_a_request(three: Manifest, request_: Request, message: str) -> None:
    with pytest.raises(SelectionError) as error:
        dispatcher(three).choose(request_, 1, 8)
    assert message in str(error.value)


@pytest.mark.parametrize("shape", [(5, 129), (1, 129)])
def test_beyond_every_bucket_is_an_input_error(three: Manifest, shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"larger than every bucket of this bundle \(b1-s32, b1-s128, b4-s32\)"):
        dispatcher(three).choose(Request(), *shape)


@pytest.mark.parametrize("deadline_ms", [None, 5.0], ids=["choose", "in time"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((-1, 8), "batch: expected 1 to 2147483648, got -1"),
        ((1, 0), "sequence: expected 1 to 2147483648, got 0"),
        ((True, 8), "batch: expected a whole number, got True"),
        ((1, 1.0), "sequence: expected a whole number, got 1.0"),
        (([1], 8), "batch: expected a whole number, got [1]"),
        ((10**5000, 8), "batch: expected 1 to 2147483648, got more"),
    ],
    ids=["negative", "none", "true", "fraction", "list", "huge"],
)
def test_sizes_that_no_input_has(
    three: Manifest, shape: tuple[Any, Any], message: str, deadline_ms: float | None
) -> None:
    choosing = dispatcher(three, predicted(three))
    request = Request(deadline_ms=deadline_ms)
    load = InFlight(1.0).load()
    for asked in ((1, 8), shape, shape):
        if asked is not shape:
            choosing.choose(Request(), *asked)
            continue
        with pytest.raises(InputError) as error:
            choosing.choose(request, *asked) if deadline_ms is None else choosing.choose_in_time(request, *asked, load)
        assert str(error.value) == message


def test_numpys_whole_numbers_are_sizes(three: Manifest) -> None:
    choosing = dispatcher(three, predicted(three))
    assert choosing.choose(Request(), np.int64(1), np.int32(8)) == choosing.choose(Request(), 1, 8)


def test_longest_sequence_follows_the_rows(three: Manifest) -> None:
    assert [dispatcher(three).longest_sequence(rows, Request()) for rows in (1, 2, 9)] == [128, 128, 128]
    within = Request(latency_ms=4)  # per row: of 4 rows of 32 steps the smallest submodel takes 4 ms at once
    assert [dispatcher(three).longest_sequence(rows, within) for rows in (1, 4, 8)] == [128, 32, 128]


def test_longest_sequence_is_that_of_engines_which_may_answer(manifest: Manifest) -> None:
    """A text that is cut for one engine must not be too long for the one that a budget or a limit then picks."""
    short, long = (
        make(manifest, sizes, buckets)
        for sizes, buckets in (({"small": 10}, (Bucket(1, 16),)), ({"large": 40}, (Bucket(1, 16), Bucket(1, 64))))
    )
    both = replace(
        long,
        submodels=(*short.submodels, *long.submodels),
        engines=(*short.engines, *long.engines),
        budgets=(BudgetEntry("tight", Limits(), "small", "it fits"),),
    )
    chooser = dispatcher(both)
    assert chooser.longest_sequence(1, Request()) == 64
    assert chooser.longest_sequence(1, Request(budget="tight")) == 16
    assert chooser.longest_sequence(1, Request(submodel="small")) == 16
    small = next(candidate.memory_mb for candidate in chooser._engines._engines["small"])
    assert chooser.longest_sequence(1, Request(memory_mb=small)) == 16
    assert chooser.longest_sequence(1, Request(memory_mb=0.001)) == 64, "none may: the refusal is left to the choice"
    assert chooser.longest_sequence(1, Request(budget="no such")) == 64


def test_engines_without_residency_do_not_take_part(three: Manifest) -> None:
    shared: dict[str, Residency] = {"small@b1-s32": "shared", "medium@b1-s32": "shared"}
    choose = Dispatcher(three, shared, predicted(three)).choose
    assert choose(Request(), 1, 8).reason == "no limit given: the largest submodel with an engine for this input here"
    with pytest.raises(SelectionError, match=r"submodel large has no engine for 1x8 here .* there is medium \("):
        choose(Request(submodel="large"), 1, 8)
    with pytest.raises(SelectionError, match=r"no engine takes 4x99 here: memory_mb leaves out .* there is b1-s32"):
        choose(Request(), 4, 99)


def test_a_long_list_is_cut(manifest: Manifest) -> None:
    many = make(manifest, {f"m{i:02}": 20 - i for i in range(20)}, (Bucket(1, 8),))
    with pytest.raises(SelectionError) as error:
        dispatcher(many, []).choose(Request(memory_mb=1), 1, 1)
    assert str(error.value).endswith("m06 (no latency known, 141.0 MB), m19 (no latency known, 11.0 MB) and 12 more")


def test_remembers_a_choice_across_threads(three: Manifest) -> None:
    chooser = dispatcher(three)
    first = chooser.choose(Request(latency_ms=3), 1, 8)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: chooser.choose(Request(latency_ms=3), 1, 8), "123"))
    assert all(choice is first for choice in found)


SMALL = st.integers(1, 6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(SMALL, min_size=1, max_size=4, unique=True),
    buckets=st.lists(st.builds(Bucket, SMALL, SMALL), min_size=1, max_size=4, unique=True),
    latencies=st.lists(st.floats(0.1, 10), min_size=16, max_size=16),
    limits=st.tuples(st.none() | st.floats(0.1, 10), st.none() | st.floats(1, 80)),
    shape=st.tuples(SMALL, SMALL),
)
def test_the_choice_is_the_largest_that_fits_in_the_smallest_bucket(
    manifest: Manifest,
    sizes: list[int],
    buckets: list[Bucket],
    latencies: list[float],
    limits: tuple[float | None, float | None],
    shape: tuple[int, int],
) -> None:
    manifest = make(manifest, {f"m{size}": size for size in sizes}, tuple(buckets))
    known = {engine.id: ms for engine, ms in zip(manifest.engines, latencies, strict=False)}
    chooser = dispatcher(manifest, [latency(name, ms) for name, ms in known.items()])
    holding = [b for b in buckets if b.batch >= shape[0] and b.sequence >= shape[1]]
    assume(holding)
    bucket = min(holding, key=lambda b: (b.tokens, b))
    latency_ms, memory_mb = limits

    def fits(engine: EngineEntry) -> bool:
        memory = int(engine.submodel[1:]) * 10 + 1
        return (latency_ms is None or known[engine.id] <= latency_ms) and (memory_mb is None or memory <= memory_mb)

    fitting = [engine for engine in manifest.engines if engine.bucket == bucket and fits(engine)]
    request = Request(latency_ms=latency_ms, memory_mb=memory_mb)
    if fitting:
        assert chooser.choose(request, *shape).engine == max(fitting, key=lambda engine: int(engine.submodel[1:]))
    else:
        with pytest.raises(SelectionError, match="no submodel answers"):
            chooser.choose(request, *shape)


@pytest.mark.parametrize(
    ("load", "options", "engine", "reason"),
    [
        (
            LoadEstimate([], 1),
            {"deadline_ms": 4},
            "large@b1-s32",
            "predicted 4 ms, expected in 4 ms <= 4 ms left of 4, nothing in flight",
        ),
        (
            LoadEstimate([2.0], 1),
            {"deadline_ms": 4},
            "medium@b1-s32",
            "predicted 2 ms, expected in 4 ms <= 4 ms left of 4, 1 in flight that needs 2 ms more; next larger large "
            "(predicted 4 ms, 41.0 MB), expected in 6 ms",
        ),
        (
            LoadEstimate([1.0, 9.0], 1),
            {"deadline_ms": 4, "memory_mb": 30},
            "small@b1-s32",
            "predicted 1 ms, expected in 3 ms <= 4 ms left of 4, 11.0 MB <= 30 MB, 2 in flight that need 10 ms more; "
            "next larger medium (predicted 2 ms, 21.0 MB), expected in 5 ms",
        ),
        (
            LoadEstimate([9.0], 2),
            {"deadline_ms": 4},
            "large@b1-s32",
            "predicted 4 ms, expected in 4 ms <= 4 ms left of 4, 1 in flight that needs 9 ms more",
        ),
        (
            LoadEstimate([], 1, share=0.3),
            {"deadline_ms": 8},
            "medium@b1-s32",
            "predicted 2 ms, expected in 2 ms <= 8 ms left of 8, nothing in flight; next larger large (predicted 4 ms, "
            "41.0 MB), expected in 4 ms, more than the 2.4 ms that a run may take while requests are late or refused",
        ),
        (
            LoadEstimate([], 1, share=0.02),
            {"deadline_ms": 8},
            "small@b1-s32",
            "predicted 1 ms, expected in 1 ms <= 8 ms left of 8, nothing in flight; next larger medium (predicted 2 "
            "ms, 21.0 MB), expected in 2 ms, more than the 1 ms that a run may take while requests are late or refused",
        ),
    ],
    ids=["alone", "behind one", "behind two, in memory", "beside one", "others were late", "many were late"],
)
def test_a_deadline_counts_what_is_in_flight(
    three: Manifest, load: LoadEstimate, options: dict[str, float], engine: str, reason: str
) -> None:
    choice = dispatcher(three).choose_in_time(Request(**options), 1, 8, load)
    assert (choice.engine.id, choice.reason) == (engine, reason)
    assert choice.latency_ms == SIZES[choice.engine.submodel]


def test_a_deadline_goes_by_the_slow_runs_and_a_latency_limit_by_the_median(three: Manifest) -> None:
    known = [latency(f"{name}@b1-s32", size, size, size + 3.0, "packed") for name, size in SIZES.items()]
    chooser = dispatcher(three, known)
    assert chooser.choose(Request(latency_ms=4), 1, 8).engine.id == "large@b1-s32"
    choice = chooser.choose_in_time(Request(deadline_ms=6), 1, 8, LoadEstimate([], 1))
    assert (choice.engine.id, choice.latency_ms) == ("medium@b1-s32", 2.0)
    assert choice.reason.startswith(
        "measured here 2 ms (p95 5 ms), expected in 5 ms <= 6 ms left of 6, nothing in flight"
    )


def test_time_already_spent_is_no_longer_left(three: Manifest) -> None:
    choose = dispatcher(three).choose_in_time
    choice = choose(Request(deadline_ms=4), 1, 8, LoadEstimate([], 1), spent_ms=1.5)
    assert choice.reason.startswith("predicted 2 ms, expected in 2 ms <= 2.5 ms left of 4, nothing in flight; next")


def test_a_deadline_that_cannot_be_met_names_the_soonest(three: Manifest) -> None:
    choose = dispatcher(three).choose_in_time
    with pytest.raises(SelectionError) as error:
        choose(Request(deadline_ms=2), 1, 8, LoadEstimate([3.0, 3.0], 1), spent_ms=0.5)
    assert str(error.value) == (
        "no submodel answers 1x8 with `deadline_ms` <= 2 (1.5 ms left, 2 in flight that need 6 ms more); the soonest "
        "is small (predicted 1 ms, 11.0 MB), expected in 3 ms; allow more time, or ask for it as `submodel`"
    )
    with pytest.raises(SelectionError, match=r"expected in 2 ms, too late for another request; allow more time, or"):
        choose(Request(deadline_ms=9), 1, 8, LoadEstimate([3.0], 1, [3.5]))
    with pytest.raises(SelectionError, match=r"`deadline_ms` <= 9 and `memory_mb` <= 1 .*expected in 1 ms; allow"):
        choose(Request(deadline_ms=9, memory_mb=1), 1, 8, LoadEstimate([], 1))
    with pytest.raises(SelectionError, match=r"no latency known, \d+.0 MB\), expected in inf ms"):
        dispatcher(three, []).choose_in_time(Request(deadline_ms=1e9), 1, 8, LoadEstimate([], 1))
    with pytest.raises(InputError, match="larger than every bucket"):
        choose(Request(deadline_ms=9), 9, 129, LoadEstimate([], 1))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(deadline_ms=0), "deadline_ms: expected a positive number, got 0"),
        (Request(deadline_ms=float("nan")), "deadline_ms: expected a positive number, got nan"),
        (Request(deadline_ms=True), "deadline_ms: expected a positive number, got True"),
        (Request(deadline_ms="8"), "deadline_ms: expected a positive number, got '8'"),
        (Request(deadline_ms=3, memory_mb=0), "memory_mb: expected a positive number, got 0"),
        (
            Request(deadline_ms=3, latency_ms=3),
            "request with `latency_ms`, `deadline_ms`: expected one; the first limits the run alone, the second counts",
        ),
        (Request(deadline_ms=3, budget="edge"), "request with budget, deadline_ms: expected a budget, or a submodel"),
        (Request(deadline_ms=3, submodel="small"), "request with submodel, deadline_ms: expected a budget"),
    ],
)
def test_refuses_a_deadline(three: Manifest, request_: Request, message: str) -> None:
    with pytest.raises(SelectionError) as error:
        dispatcher(three).choose_in_time(request_, 1, 8, LoadEstimate([], 1))
    assert str(error.value).startswith(message)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    latencies=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    remaining=st.lists(st.floats(0, 10), max_size=4),
    parallel_runs=st.floats(1, 3),
    deadline=st.floats(0.1, 40),
)
def test_the_choice_is_the_largest_that_is_expected_in_time(
    manifest: Manifest, latencies: list[float], remaining: list[float], parallel_runs: float, deadline: float
) -> None:
    manifest = make(manifest, {f"m{size}": size for size in (1, 2, 3, 4)}, (Bucket(1, 8),))
    known = [latency(engine.id, ms) for engine, ms in zip(manifest.engines, latencies, strict=True)]
    load = LoadEstimate(sorted(remaining), parallel_runs)
    finishes = {e.submodel: load.finish_ms(ms) for e, ms in zip(manifest.engines, latencies, strict=True)}
    assume(all(abs(finish - deadline) > 1e-6 for finish in finishes.values()))
    in_time = [name for name, finish in finishes.items() if finish <= deadline]
    choose = dispatcher(manifest, known).choose_in_time
    if in_time:
        assert choose(Request(deadline_ms=deadline), 1, 8, load).engine.submodel == max(in_time)
    else:
        with pytest.raises(SelectionError, match="no submodel answers"):
            choose(Request(deadline_ms=deadline), 1, 8, load)


def routed(manifest: Manifest) -> Manifest:
    """Submodels of one size, told apart by choices: capacity, and a sequence that may be shorter."""
    axes = (Axis("capacity", 100, (25, 50, 75, 100)), Axis(SEQUENCE, 128, (32, 128)))
    points = [(25, 128), (50, 128), (75, 128), (100, 32), (100, 128)]
    entries = [SubmodelEntry(f"c{c}-s{s}", (), {"capacity": (c,), SEQUENCE: (s,)}, 1000, 10 * MB) for c, s in points]
    engines = [
        replace(manifest.engines[0], id=f"{e.id}@x", submodel=e.id, bucket=e.at(Bucket(1, 128)), private_bytes=0)
        for e in entries
    ]
    return replace(manifest, axes=axes, submodels=tuple(entries), engines=tuple(engines), budgets=())


def test_of_submodels_with_equally_many_parameters_the_larger_choices_win(manifest: Manifest) -> None:
    chooser = dispatcher(routed(manifest), [])
    assert chooser.choose(Request(), 1, 100).engine.submodel == "c100-s128"
    latencies = [latency(f"{name}@x", ms) for name, ms in (("c50-s128", 1.0), ("c75-s128", 2.0), ("c100-s128", 9.0))]
    within = dispatcher(routed(manifest), latencies).choose(Request(latency_ms=3), 1, 100)
    assert within.engine.submodel == "c75-s128", "75 before 50, which as text would come first"


def test_a_submodel_of_a_shorter_sequence_answers_what_fits_it_and_says_what_does_not(manifest: Manifest) -> None:
    chooser = dispatcher(routed(manifest), [])
    assert chooser.choose(Request(submodel="c100-s32"), 1, 32).engine.bucket == Bucket(1, 32)
    with pytest.raises(SelectionError) as refused:
        chooser.choose(Request(submodel="c100-s32"), 1, 33)
    assert str(refused.value).startswith(
        "submodel c100-s32 takes at most 32 tokens, the input has 33; there is c100-s128"
    )
    assert chooser.longest_sequence(1, Request(submodel="c100-s32")) == 32


def test_tables_that_an_engine_reads_count_as_its_memory(three: Manifest) -> None:
    engines = tuple(replace(engine, weight_bytes=15 * MB) for engine in three.engines if engine.submodel == "small")
    chooser = dispatcher(replace(three, engines=engines), [])
    assert "16.0 MB <= 20 MB" in chooser.choose(Request(memory_mb=20), 1, 8).reason


def test_every_latency_is_looked_at_once(manifest: Manifest) -> None:
    """However many a build record states, and however many engines there are."""

    class Counted(tuple[Latency, ...]):
        looks = 0

        def __iter__(self) -> Iterator[Latency]:
            Counted.looks += 1
            return super().__iter__()

    latencies = Counted(latency(engine.id, 1.0) for engine in manifest.engines)
    Dispatcher(manifest, {engine.id: "packed" for engine in manifest.engines}, latencies)
    assert Counted.looks == 1


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (Request(deadline_ms=1), ["large", "medium", "small"]),
        (Request(deadline_ms=1, memory_mb=21), ["medium", "small"]),
        (Request(), ["large"]),
        (Request(submodel="S"), ["small"]),
        (Request(budget="edge"), ["medium"]),
        (Request(latency_ms=3.9), ["medium"]),
    ],
    ids=str,
)
def test_candidates_are_all_that_a_request_leaves(three: Manifest, request_: Request, found: list[str]) -> None:
    choosing = dispatcher(three)
    for _ in range(2):  # remembered
        candidates = choosing.candidates(request_, 1, 8)
        assert [one.engine.submodel for one in candidates] == found
        if request_.deadline_ms is None:
            assert choosing.choose(request_, 1, 8).engine == candidates[0].engine


def test_candidates_for_more_rows_than_an_engine_takes_are_of_all_runs(three: Manifest) -> None:
    for request_ in (Request(), Request(deadline_ms=1)):
        assert dispatcher(three).candidates(request_, 9, 8)[0].p95_ms == 2 * 16 + 4


def test_candidates_follow_what_runs_show(three: Manifest) -> None:
    choosing = dispatcher(three)
    for request_ in (Request(submodel="L"), Request(deadline_ms=9)):
        before = choosing.candidates(request_, 1, 32)[0].p95_ms
        for _ in range(8):
            choosing.choose(Request(submodel="L"), 1, 32).ran(2 * before, 0.0)
        assert choosing.candidates(request_, 1, 32)[0].p95_ms > before


@pytest.mark.parametrize(
    "request_", [Request(deadline_ms=1, memory_mb=5), Request(latency_ms=0.5), Request(budget="no")]
)
def test_no_candidates_are_refused(three: Manifest, request_: Request) -> None:
    with pytest.raises(SelectionError):
        dispatcher(three).candidates(request_, 1, 8)
