"""Calibrated mean latency, measured anew on held-out texts, against the budget asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean, median

from ... import load
from ...runtime.arrays import Array
from ...runtime.bundle import Bundle
from ...runtime.exits.choice import OFF, AskedExits
from ...runtime.model import ElasticModel
from .exit_subject import calibrated, exits_bundle, requests
from .harness import Row, milliseconds

_REQUESTS, _ROUNDS = 200, 5
_SHARES = (0.5, 0.7)


def run() -> list[Row]:
    bundle = exits_bundle()
    with load(bundle.path, residency="packed") as model:
        return [_row(model, bundle, share) for share in _SHARES]


def _row(model: ElasticModel, bundle: Bundle, share: float) -> Row:
    asked = requests(bundle, 1, _REQUESTS)
    budget = share * _mean_ms(model, asked, OFF)
    policy = calibrated(bundle, f"mean_latency_ms<={budget:.4g}").policy()
    found = _mean_ms(model, asked, policy)
    return Row(
        f"calibrated latency against a budget of {share:.0%} of the whole engine",
        f"{found:.3f} of {budget:.3f} ms ({found / budget - 1:+.1%})",
        "within 5 %",
        abs(found / budget - 1) <= 0.05,
        f"mean over {_REQUESTS} test texts that calibration never saw, median of {_ROUNDS} rounds, batch 1",
    )


def _mean_ms(model: ElasticModel, asked: Sequence[Mapping[str, Array]], exits: AskedExits) -> float:
    for feeds in asked[:20]:
        model(feeds, exits=exits)
    return median(mean(milliseconds(partial(model, feeds, exits=exits)) for feeds in asked) for _ in range(_ROUNDS))
