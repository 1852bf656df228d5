"""Who writes the next token."""

from dataclasses import replace
from pathlib import Path

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import Decode, EngineEntry
from nestforge.errors import SelectionError
from nestforge.runtime.generation import pace as pace_module
from nestforge.runtime.generation.draft_gains import RunTime, StepTimes
from nestforge.runtime.generation.options import GenerationRequest
from nestforge.runtime.generation.pace import Pace
from nestforge.runtime.load import load

STEP_MS = (8.0, 4.0, 2.0)


@pytest.fixture(scope="module")
def engines(llama_bundle: Path) -> list[EngineEntry]:
    with load(llama_bundle) as model:
        assert model.bundle.manifest.generation
        found = model.bundle.manifest.generation.engines
    return sorted(found, key=lambda engine: -(engine.weight_bytes or 0))[:3]


def paced(engines: list[EngineEntry], promise: GenerationRequest) -> Pace:
    times = StepTimes()
    for engine, ms in zip(engines, STEP_MS, strict=True):
        for _ in range(2):  # the first does not count
            times.ran(engine, 1, ms)
    return Pace(engines, "requested", promise, times, started=0.0)


def steps(pace: Pace, count: int, ms: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The submodels of ``count`` steps, each of which takes what ``ms`` says."""
    clock = 0.0
    found = []
    for left in range(count, 0, -1):
        monkeypatch.setattr(pace_module, "perf_counter", lambda now=clock: now)
        chosen = pace.for_step(1, left)
        found.append(chosen.engine.submodel)
        took = ms[chosen.engine.submodel]
        clock += took / 1e3
        pace.stepped(chosen.engine, 1, took, took)
    return found


def took(engines: list[EngineEntry]) -> dict[str, float]:
    return {engine.submodel: ms for engine, ms in zip(engines, STEP_MS, strict=True)}


def test_without_a_promise_the_first_writes(engines: list[EngineEntry]) -> None:
    pace = paced(engines, GenerationRequest())
    assert pace.for_prompts(9, 1, 3) == pace.for_step(1, 3) == (engines[0], "requested")


def test_a_rate_is_kept_by_the_largest_that_can(engines: list[EngineEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    large, middle, small = (engine.submodel for engine in engines)
    assert set(steps(paced(engines, GenerationRequest(tokens_per_second=100)), 9, took(engines), monkeypatch)) == {
        large
    }
    # 6 ms a token: what two of the middle one save, one of the large one spends.
    mixed = steps(paced(engines, GenerationRequest(tokens_per_second=1e3 / 6)), 9, took(engines), monkeypatch)
    assert mixed == [middle, large] * 4 + [middle]
    assert set(steps(paced(engines, GenerationRequest(tokens_per_second=1e3 / 2)), 9, took(engines), monkeypatch)) == {
        small
    }


def test_a_rate_asks_nothing_of_the_prompt(engines: list[EngineEntry]) -> None:
    chosen = paced(engines, GenerationRequest(tokens_per_second=500)).for_prompts(1000, 1, 9)
    assert chosen == (engines[0], "requested; a rate asks nothing of the prompt")


def test_a_deadline_is_divided_among_the_tokens_that_are_left(
    engines: list[EngineEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    large, middle, _ = (engine.submodel for engine in engines)
    written = steps(paced(engines, GenerationRequest(deadline_ms=60)), 10, took(engines), monkeypatch)
    assert written[0] == middle
    assert {large, middle} == set(written)
    assert sum(took(engines)[submodel] for submodel in written) <= 60


def test_a_deadline_counts_the_prompt(engines: list[EngineEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "perf_counter", lambda: 0.010)
    chosen = paced(engines, GenerationRequest(deadline_ms=100)).for_prompts(tokens=10, rows=1, steps=10)
    assert chosen == (engines[1], "expected 80 ms <= 90 ms left for the prompt and all tokens")


def test_a_promise_that_nobody_keeps_is_said(engines: list[EngineEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "perf_counter", lambda: 0.0)
    chosen = paced(engines, GenerationRequest(tokens_per_second=1000)).for_step(1, 5)
    assert chosen == (
        engines[2],
        "the smallest, expected 2 ms > 1 ms until the token is due: the promise is not kept",
    )


@pytest.mark.parametrize("value", [0, -1, float("inf"), "fast", True])
@pytest.mark.parametrize("name", ["tokens_per_second", "deadline_ms"])
def test_a_promise_is_a_positive_number(name: str, value: object) -> None:
    with pytest.raises(SelectionError, match=f"^{name}: expected a positive number, got "):
        GenerationRequest(**{name: value})


def test_what_one_wrote_only_those_continue_that_have_no_more_heads(engines: list[EngineEntry]) -> None:
    heads = (None, (1, 2), (2, 1))
    large, middle, small = (
        replace(engine, kind=Decode(cache_heads=own)) for engine, own in zip(engines, heads, strict=True)
    )
    pace = paced([large, middle, small], GenerationRequest(tokens_per_second=100))
    pace.stepped(large, 1, 8.0, 8.0)
    assert pace.for_step(1, 9) == (large, "expected 8 ms <= 12 ms until the token is due")
    pace.stepped(middle, 1, 4.0, 4.0)
    assert pace.engines == [middle], "the large one has more heads in one layer, the small one in the other"
    left_out = "2 with heads that earlier tokens lack, or of another size, cannot continue"
    reason = f"expected 4 ms <= 18 ms until the token is due; {left_out}"
    assert pace.for_step(1, 9) == (middle, reason)


def engine(name: str, weight_bytes: int) -> EngineEntry:
    bucket = Bucket(64, 256, 1, 1)
    return EngineEntry(
        name, name, bucket, "onnxruntime", "e.onnx", "sliced", 0, 0, 0, 0, Decode(), weight_bytes=weight_bytes
    )


LARGE, SMALL = engine("large", 40_000_000), engine("small", 10_000_000)


def test_before_any_run_the_bytes_say_it() -> None:
    times = StepTimes()
    assert times.expected_ms(LARGE, 1) == 4.0
    assert times.expected_ms(LARGE, 3) == 12.0
    assert times.expected_ms(SMALL, 1) == 1.0


def test_the_first_run_of_an_engine_does_not_count() -> None:
    times = StepTimes()
    times.ran(LARGE, 1, 500.0)
    assert times.expected_ms(LARGE, 1) == 4.0
    times.ran(LARGE, 1, 7.0)
    assert times.expected_ms(LARGE, 1) == 7.0


def test_what_one_took_is_scaled_by_bytes_of_weights() -> None:
    times = StepTimes()
    for ms in (8.0, 8.0):
        times.ran(LARGE, 1, ms)
    assert times.expected_ms(SMALL, 1) == 2.0
    for ms in (3.0, 3.0):
        times.ran(SMALL, 1, ms)
    assert (times.expected_ms(SMALL, 1), times.expected_ms(LARGE, 1)) == (3.0, 8.0)


def test_rows_that_have_not_run_are_reckoned_from_above() -> None:
    times = StepTimes()
    for ms in (8.0, 8.0):
        times.ran(LARGE, 4, ms)
    assert times.expected_ms(LARGE, 2) == 8.0
    assert times.expected_ms(LARGE, 6) == 12.0
    assert times.expected_ms(SMALL, 2) == 2.0


def test_an_odd_step_counts_for_little() -> None:
    times = StepTimes()
    for _ in range(9):
        times.ran(LARGE, 1, 4.0)
    times.ran(LARGE, 1, 4000.0)
    assert times.expected_ms(LARGE, 1) == pytest.approx(4.0 + 2.0 / 8)


def test_a_prompt_takes_a_step_a_token_until_one_has_run() -> None:
    times = StepTimes()
    assert times.expected_prompt_ms(LARGE, 10) == 40.0
    times.ran_prompt(LARGE, 20, 20.0)
    assert times.expected_prompt_ms(LARGE, 10) == 10.0
    assert times.expected_prompt_ms(SMALL, 10) == 2.5  # by its bytes, until it has read one
    times.ran_prompt(SMALL, 20, 40.0)
    assert times.expected_prompt_ms(SMALL, 10) == 20.0
    times.ran_prompt(SMALL, 1, 40.0)  # a turn of one token says little
    assert times.expected_prompt_ms(SMALL, 10) == 20.0


def test_checks_are_between_those_that_have_run() -> None:
    times = StepTimes()
    assert not times.is_known(LARGE, 1)
    for ms in (99.0, 10.0):
        times.ran(LARGE, 1, ms)
    assert times.is_known(LARGE, 1)
    assert times.expected_checks_ms(LARGE, 3) == [10.0] * 3
    for ms in (99.0, 18.0):
        times.ran_check(LARGE, 5, ms)
    assert times.expected_checks_ms(LARGE, 6) == [10.0, 12.0, 14.0, 16.0, 18.0, 18.0]


def test_what_is_known_is_where_others_start() -> None:
    times = StepTimes()
    for ms in (100.0, 8.0, 8.0, 8.0):
        times.ran(LARGE, 1, ms)
        times.ran_check(LARGE, 5, ms + 2)
    for ms in (100.0, 30.0):  # too seldom to be believed
        times.ran_check(LARGE, 3, ms)
    known = times.known([LARGE, SMALL])
    assert known == [RunTime("large", 1, 8.0), RunTime("large", 5, 10.0)]
    later = StepTimes()
    later.ran(LARGE, 1, 70.0)
    for time in known:
        later.start_from(LARGE, time)
    assert later.is_known(LARGE, 1)
    assert later.expected_checks_ms(LARGE, 5) == [8.0, 8.5, 9.0, 9.5, 10.0]
    later.ran(LARGE, 1, 4.0)
    assert later.expected_ms(LARGE, 1) == 6.0, "runs correct it"
    later.start_from(LARGE, RunTime("large", 1, 90.0))
    assert later.expected_ms(LARGE, 1) == 6.0, "what was seen counts more"
