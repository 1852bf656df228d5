"""What a dispatcher chooses once runs have shown more than the figures say, and what it tries for that."""

from __future__ import annotations

from typing import Any

import pytest
from nestforge.bundle.build_record import Latency, Noise
from nestforge.bundle.manifest import Manifest
from nestforge.errors import SelectionError
from nestforge.runtime.in_flight import LoadEstimate
from nestforge.runtime.request import Request
from support.three_submodels import BUCKETS, FAST, SIZES, dispatcher, make


@pytest.fixture
def three(manifest: Manifest) -> Manifest:
    return make(manifest, SIZES, BUCKETS)


def runs(choose: Any, count: int, ratio: float, request: Request = FAST) -> list[str]:
    """``count`` requests of 1x8, each of which takes ``ratio`` times what is stated; the submodels that answered."""
    answered = []
    for _ in range(count):
        choice = choose(request, 1, 8)
        choice.ran(choice.stated_ms * ratio, 0.0)
        answered.append(choice.engine.submodel)
    return answered


def test_figures_that_are_five_times_too_large_correct_themselves(three: Manifest) -> None:
    """What the smallest shows holds for the largest, which has not run: 4 ms are stated for it, and 0.8 are right."""
    chooser = dispatcher(three)
    answered = runs(chooser.choose, 6, 0.2)
    assert answered == ["small"] * 4 + ["large"] * 2, "the first run is not counted, three are enough"
    choice = chooser.choose(FAST, 1, 8)
    assert choice.reason == "predicted 4 ms, seen while running: 0.8 ms <= 1 ms"
    assert choice.latency_ms == pytest.approx(0.8)


def test_figures_that_are_five_times_too_small_correct_themselves(three: Manifest) -> None:
    chooser = dispatcher(three)
    request = Request(latency_ms=8)
    assert runs(chooser.choose, 6, 5.0, request) == ["large"] * 4 + ["small"] * 2
    assert chooser.choose(request, 1, 8).reason.startswith(
        "predicted 1 ms, seen while running: 5 ms <= 8 ms; next larger medium (predicted 2 ms, by what else ran here"
    )


def test_a_deadline_goes_by_what_was_seen_too(three: Manifest) -> None:
    known = [Latency(f"{name}@b1-s32", size, size, 2.0 * size, "packed") for name, size in SIZES.items()]
    chooser = dispatcher(three, known)
    runs(chooser.choose, 5, 0.5, Request(submodel="large"))
    choice = chooser.choose_in_time(Request(deadline_ms=5), 1, 8, LoadEstimate([], 1))
    assert choice.reason.startswith(
        "measured here 4 ms, seen while running: 2 ms (p95 4 ms), expected in 4 ms <= 5 ms left of 5"
    )


def test_what_was_chosen_before_a_change_is_not_remembered_after_it(
    three: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = dispatcher(three)
    real = chooser._choose

    def slowly(request: Request, *shape: Any) -> Any:
        choice = real(request, *shape)
        chooser._forget()  # another thread's run
        return choice

    monkeypatch.setattr(chooser, "_choose", slowly)
    chooser.choose(FAST, 1, 8)
    assert chooser._remembered == {}


def test_noisy_figures_are_named_and_what_to_do_where_they_refuse(three: Manifest) -> None:
    noise = Noise(20, 0.4, 1.3, 0.5)
    known = [Latency(f"{name}@b1-s32", size, size, size, "packed", noise=noise) for name, size in SIZES.items()]
    chooser = dispatcher(three, known)
    assert chooser.choose(Request(latency_ms=4), 1, 8).reason == "measured here 4 ms, noisy <= 4 ms"
    with pytest.raises(SelectionError) as refused:
        chooser.choose(Request(latency_ms=0.5), 1, 8)
    hint = "; noisy figures are not to be trusted: `nestforge measure BUNDLE` measures again"
    assert str(refused.value).endswith(f"small (measured here 1 ms, noisy, 11.0 MB){hint}")
    with pytest.raises(SelectionError) as late:
        chooser.choose_in_time(Request(deadline_ms=0.5), 1, 8, LoadEstimate([], 1))
    assert str(late.value).endswith(f"allow more time, or ask for it as `submodel`{hint}")


def test_what_a_refusal_rests_on_is_tried_until_it_was_seen(three: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = dispatcher(three)
    monkeypatch.setattr("nestforge.runtime.running_estimate.perf_counter", lambda: 100.0)
    for request in (Request(latency_ms=0.5), Request(deadline_ms=0.5), Request(latency_ms=0.5, memory_mb=12)):
        choice = chooser.to_try(request, 1, 8)
        assert choice is not None
        assert choice.engine.submodel == "small"
        assert choice.reason == "tried, since no run has shown lately what it takes: predicted 1 ms"
    assert chooser.to_try(Request(latency_ms=0.5, memory_mb=5), 1, 8) is None, "nothing so small"
    assert chooser.to_try(Request(latency_ms=0.09), 1, 8) is None, "no figure is wrong by so much"
    assert chooser.to_try(Request(memory_mb=5), 1, 8) is None, "memory is not learnt"
    for _ in range(4):
        choice.ran(1.0, 100.0)
    assert chooser.to_try(Request(latency_ms=0.5), 1, 8) is None
    assert chooser.to_try(Request(latency_ms=0.5), 1, 100) is not None, "at another size"
    monkeypatch.setattr("nestforge.runtime.running_estimate.perf_counter", lambda: 101.1)
    assert chooser.to_try(Request(latency_ms=0.5), 1, 8) is not None, "a second later"
    assert dispatcher(three, []).to_try(Request(latency_ms=0.5), 1, 8) is None, "nothing known to compare with"


@pytest.mark.parametrize("request_", [Request(latency_ms=True), Request(latency_ms=1, budget="edge")])
def test_a_malformed_request_is_not_tried(three: Manifest, request_: Request) -> None:
    with pytest.raises(SelectionError):
        dispatcher(three).to_try(request_, 1, 8)
