"""Calibrated mean latency, measured anew on texts that the search never saw, against the share asked for.

Between calibration and check the machine itself gets faster and slower by more than the bar. So the budget is a share
of the whole engine's latency, and both times the chain and the whole engine are timed in turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from ... import load
from ...bundle.open_bundle import Bundle
from ...runtime.calibrate.measure import measured_figure, spread, time_in_turns
from ...runtime.exits.choice import OFF, AskedExits
from ...runtime.exits.policy import ExitPolicy
from ...runtime.inputs.arrays import Array
from ...runtime.model import ElasticModel
from ..harness import Row
from .exit_subject import calibrated, exits_bundle, unseen

_SHARES = (0.5, 0.7)
_MEAN = "mean_latency_ms"


def run() -> list[Row]:
    bundle = exits_bundle()
    texts = unseen(bundle)
    with load(bundle.path, residency="packed") as model:
        return [_row(model, bundle, texts, share) for share in _SHARES]


def _row(model: ElasticModel, bundle: Bundle, texts: Sequence[Mapping[str, Array]], share: float) -> Row:
    calibrated_to = calibrated(bundle, f"{_MEAN}<={100 * share:g}%")
    policy = calibrated_to.policy()
    timed = [texts[number] for number in _spread(model, texts, policy)]
    whole, chain = _times(model, timed, [OFF, policy])

    found = measured_figure(chain, _MEAN) / measured_figure(whole, _MEAN)
    off = found / share - 1
    fitted = calibrated_to.measured.costs.mean_latency_ms / calibrated_to.whole.costs.mean_latency_ms
    # Of texts drawn at random, as many as calibrated and as many as check.
    of_a_text = np.std(np.median(chain, axis=0) - found * np.median(whole, axis=0)) / np.median(whole, axis=0).mean()
    chance = of_a_text * np.sqrt(1 / calibrated_to.measured.rows + 1 / len(texts)) / share
    return Row(
        f"calibrated latency against a budget of {share:.0%} of the whole engine",
        f"{off:+.1%} ({found:.1%} of the whole engine)",
        "within 5 %",
        abs(off) <= 0.05,
        f"mean over {len(timed)} texts that stand for the {len(texts)} unseen, in turns, batch 1; thresholds found on "
        f"{calibrated_to.measured.rows} texts, measured there as {fitted:.1%}; by the draw of texts alone "
        f"a standard deviation of {chance:.1%}",
    )


def _spread(model: ElasticModel, texts: Sequence[Mapping[str, Array]], policy: ExitPolicy) -> Array:
    """The numbers of texts that leave where all do, at the lengths that all have."""
    answers = [model(feeds, exits=policy) for feeds in texts]
    lengths = [answer.bucket.sequence for answer in answers]
    exits = [answer.exits.index[0] if answer.exits else -1 for answer in answers]
    return spread(np.array(exits), np.array(lengths))


def _times(model: ElasticModel, texts: Sequence[Mapping[str, Array]], ways: Sequence[AskedExits]) -> list[Array]:
    """Milliseconds ``[rounds, texts]`` of each way, in turns."""
    calls = [[partial(model, feeds, exits=way) for feeds in texts] for way in ways]
    return time_in_turns(calls, lambda *_: None, "")
