"""What is stated of an engine at a size, corrected by what its runs took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Latency, LatencyPoint, Noise
from nestforge.bundle.manifest import Manifest
from nestforge.runtime.choosing.candidates import Candidate, Engine, noise_hint, stated_latency
from nestforge.runtime.choosing.running_estimate import RunningEstimate

RANGE = Bucket(4, 64, 1, 8)
NOISY = Noise(3, 0.1, 2.0)


def engine(manifest: Manifest, noise: Noise | None = None) -> Engine:
    """1 ms per 8 tokens of length, measured at four lengths."""
    points = tuple(LatencyPoint(1, length, 9.0, length / 8, noise=noise) for length in (8, 16, 32, 64))
    stated = stated_latency([Latency("e", 9.0, 8.0, points=points)], "packed", None)
    entry = replace(manifest.engines[0], id="e", bucket=RANGE)
    return Engine(entry, stated, 20.0, RunningEstimate(lambda: None))


def ran(found: Callable[[], Candidate], ratio: float) -> None:
    for _ in range(5):
        choice = found().choice("")
        choice.ran(choice.stated_ms * ratio, 0.0)


def test_runs_correct_the_figure_and_the_text_says_whose_they_were(manifest: Manifest) -> None:
    one = engine(manifest)
    ran(lambda: one.candidate(Bucket(1, 16)), 3.0)
    found = one.candidate(Bucket(1, 16))
    assert (found.latency_ms, found.stated_ms) == (pytest.approx(6.0), 2.0)
    assert str(found).endswith("(measured here 2 ms, seen while running: 6 ms, 20.0 MB)")
    other = replace(one, entry=replace(one.entry, id="other")).candidate(Bucket(1, 16))
    assert other.latency == "measured here 2 ms, by what else ran here: 6 ms"


def test_a_noisy_figure_is_one_until_runs_have_shown_another(manifest: Manifest) -> None:
    one = engine(manifest, NOISY)
    before = one.candidate(Bucket(1, 16))
    assert (before.is_noisy, before.latency) == (True, "measured here 2 ms, noisy")
    assert noise_hint([before]).startswith("; noisy figures are not to be trusted")
    ran(lambda: one.candidate(Bucket(1, 16)), 3.0)
    after = one.candidate(Bucket(1, 16))
    assert (after.is_noisy, noise_hint([after])) == (False, "")


def test_the_longest_sequence_within_a_limit_follows_what_runs_take(manifest: Manifest) -> None:
    one = engine(manifest)
    assert one.longest_sequence(1, {}) == 64
    assert one.longest_sequence(1, {"latency_ms": 4.0}) == 32
    for length in (8, 16, 32, 64):
        ran(lambda length=length: one.candidate(Bucket(1, length)), 0.5)  # type: ignore[misc]
    assert one.longest_sequence(1, {"latency_ms": 4.0}) == 64


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ([], "no latency known"),
        ([Latency("e", 0.0)], "predicted 0 ms"),
        ([Latency("e", 5e-324)], "predicted 4.94e-324 ms"),
    ],
)
def test_runs_of_engines_without_a_figure_are_not_counted(manifest: Manifest, known: list[Latency], text: str) -> None:
    one = replace(engine(manifest), stated=stated_latency(known, "packed", None))
    for _ in range(5):
        one.candidate(Bucket(1, 16)).choice("").ran(1.0, 0.0)
    assert one.candidate(Bucket(1, 16)).latency == text
