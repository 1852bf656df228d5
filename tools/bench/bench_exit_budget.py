"""Calibrated mean latency, measured anew on held-out texts, against the budget asked for.

The budget is a share of the whole engine's time, and the check is that share, of a whole engine timed in turns with the
chain: between calibration and check the machine itself gets faster and slower by more than the bar.
"""

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
    budget = share * _mean_ms(model, asked, [OFF])[0]
    policy = calibrated(bundle, f"mean_latency_ms<={budget:.4g}").policy()
    whole, found = _mean_ms(model, asked, [OFF, policy])
    off = found / (share * whole) - 1
    return Row(
        f"calibrated latency against a budget of {share:.0%} of the whole engine",
        f"{found / whole:.1%} ({off:+.1%}; {found:.3f} of {whole:.3f} ms)",
        "within 5 %",
        abs(off) <= 0.05,
        f"mean over {_REQUESTS} test texts that calibration never saw, median of {_ROUNDS} rounds in turns, batch 1",
    )


def _mean_ms(model: ElasticModel, asked: Sequence[Mapping[str, Array]], ways: Sequence[AskedExits]) -> list[float]:
    """Mean milliseconds a request of each way, text by text in turns."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        times = [[milliseconds(partial(model, feeds, exits=exits)) for exits in ways] for feeds in asked]
        rounds.append([mean(way) for way in zip(*times, strict=True)])
    return [median(way) for way in zip(*rounds[1:], strict=True)]  # the first round warmed up
