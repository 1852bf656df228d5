from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.errors import BundleError, SelectionError
from nestforge.ownership import Owner
from nestforge.profiles.probe_host import probe_host

Feeds = Callable[..., dict[str, Any]]


def test_a_request_that_fails_is_no_longer_in_flight(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        for options in ({"exits": 0.3}, {"deadline_ms": 1e-9}, {"submodel": "none"}):
            with pytest.raises(SelectionError):
                model(feeds(1, 8), **options)
    with pytest.raises(BundleError, match="the model is closed"):
        model(feeds(1, 8))
    assert model._in_flight.load().remaining_ms == []


def test_a_deadline_excludes_other_choices(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        for options in ({"latency_ms": 1}, {"budget": "edge"}, {"submodel": "S"}):
            with pytest.raises(SelectionError, match=r"request with .*deadline_ms`?: expected"):
                model(feeds(1, 8), deadline_ms=5, **options)


def test_many_deadlines_at_once_and_a_close_leave_nothing_in_flight(tiny_bundle: Path, feeds: Feeds) -> None:
    model = nestforge.load(tiny_bundle, threads=1, preload=True)
    begun = threading.Event()

    def ask(seed: int) -> str:
        try:
            answer = model(feeds(1, 8, seed=seed), deadline_ms=(1e-9, 3, 1e3)[seed % 3])
        except (SelectionError, BundleError) as failure:
            return type(failure).__name__
        begun.set()
        return answer.submodel

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, seed) for seed in range(400)]
        assert begun.wait(10)
        model.close()
        found = {each.result(10) for each in asked}
    assert found <= {"ffn16", "ffn32", "SelectionError", "BundleError"}
    assert {"SelectionError"} < found
    assert model._in_flight.load().remaining_ms == []


def test_a_first_run_beside_others_does_not_say_how_long_later_ones_take(
    tiny_bundle: Path, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nestforge.load(tiny_bundle, threads=probe_host().cores) as model:
        monkeypatch.setattr(model._in_flight, "_clock", count().__next__)  # a second passes at every look
        other = Owner()
        model._in_flight.enter(other, 1e6)
        found = [(model(feeds(1, 8)).first_run, model._in_flight.load().stretch > 1.0) for _ in range(2)]
        assert found == [(True, False), (False, True)]


@pytest.mark.parametrize("deadline_ms", [np.float32(1e5), np.int64(10**5)])
def test_others_leave_a_deadline_its_time_whatever_kind_of_number_it_is(
    tiny_bundle: Path, feeds: Feeds, deadline_ms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        left: list[float] = []
        monkeypatch.setattr(model._inputs, "check_values", lambda _: left.extend(model._in_flight.load().left_ms))
        model(feeds(1, 8), deadline_ms=deadline_ms)
    assert 0 < left[0] <= 1e5


def test_a_deadline_beyond_all_floats_is_refused(tiny_bundle: Path, feeds: Feeds) -> None:
    refused = pytest.raises(SelectionError, match=r"^deadline_ms: expected a positive number, got inf$")
    with nestforge.load(tiny_bundle, threads=1) as model, refused:
        model(feeds(1, 8), deadline_ms=10**400)
