"""Early exits on labelled texts: accuracy per exit, accuracy and latency over thresholds, rows leaving at each exit.

The runtime answers requests of one text, as a user would send them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from ...runtime.exits.choice import OFF, RequestedExits
from ...runtime.exits.policy import ExitPolicy
from ...runtime.load import load
from ...runtime.model import ElasticModel
from ...tables import Table
from .texts import Text

# Thresholds of the sweep, as shares of the largest entropy that there is, ln C.
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
_TIMED = 150


@dataclass(frozen=True)
class Outcome:
    """Figures of one way to answer: ``milliseconds`` is the mean over requests of one text."""

    accuracy: float
    milliseconds: float
    flops: float
    layers: np.ndarray


def exit_report(bundle: Path, texts: Sequence[Text]) -> list[tuple[str, Table]]:
    """Tables of one bundle, each under its heading."""
    with load(bundle) as model:
        layers = _layers(model)
        single = {f"exit after layer {layer}": _only(number, len(layers)) for number, layer in enumerate(layers)}
        most = math.log(_classes(model))
        sweep: dict[str, RequestedExits] = {f"{share * most:.3f}": share * most for share in _SHARES}
        named: dict[str, RequestedExits] = {policy: policy for policy in _policies(model)}
        ways: dict[str, RequestedExits] = {**single, **sweep, **named, "whole engine": OFF}
        times = _times(model, ways, texts)
        outcomes = {name: _outcome(model, exits, texts, times[name]) for name, exits in ways.items()}
    whole = outcomes["whole engine"]
    return [
        ("Accuracy of each exit, if every text leaves there", _table("exit", single, outcomes, whole, layers)),
        ("One threshold for every exit", _table("threshold (nats)", sweep, outcomes, whole, layers)),
        ("Calibrated, and without exits", _table("policy", {**named, "whole engine": OFF}, outcomes, whole, layers)),
    ]


def _table(
    first: str, ways: Mapping[str, object], outcomes: Mapping[str, Outcome], whole: Outcome, layers: Sequence[int]
) -> Table:
    rows = []
    for name in ways:
        found = outcomes[name]
        left = [f"{100 * float((found.layers == layer).mean()):.0f}" for layer in layers]
        rows.append(
            [
                name,
                f"{100 * found.accuracy:.1f}",
                f"{found.milliseconds:.2f}",
                f"{100 * found.milliseconds / whole.milliseconds:.0f}",
                f"{100 * found.flops / whole.flops:.0f}",
                " ".join(left),
            ]
        )
    columns = [first, "accuracy %", "mean ms", "% of whole ms", "% of whole FLOPs"]
    return Table([*columns, f"% leaving after layer {' '.join(map(str, layers))}"], rows)


def _outcome(model: ElasticModel, exits: RequestedExits, texts: Sequence[Text], milliseconds: float) -> Outcome:
    right, flops, layers = [], [], []
    whole = {engine.id: engine for engine in model.bundle.manifest.engines}
    for each in texts:
        answer = model(each.text, exits=exits, truncate=True)
        right.append(int(answer["logits"][0].argmax()) == each.label)
        if answer.exits is None:
            flops.append(whole[answer.engine].flops)
            layers.append(_layers(model)[-1])
        else:
            flops.append(int(answer.exits.flops[0]))
            layers.append(int(answer.exits.layer[0]))
    return Outcome(mean(right), milliseconds, mean(flops), np.array(layers))


def _times(model: ElasticModel, ways: Mapping[str, RequestedExits], texts: Sequence[Text]) -> dict[str, float]:
    """Mean milliseconds of each way to answer, all in turn on every text, so that a busy moment touches all alike."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for exits in ways.values():
        model(texts[0].text, exits=exits, truncate=True)  # opens engines
    for each in texts[:: max(1, len(texts) // _TIMED)]:
        for name, exits in ways.items():
            taken[name].append(model(each.text, exits=exits, truncate=True).timings.run)
    return {name: mean(times) for name, times in taken.items()}


def _only(number: int, exits: int) -> ExitPolicy:
    """Every row leaves at exit ``number``."""
    return ExitPolicy(tuple(math.inf if place == number else -1.0 for place in range(exits - 1)))


def _layers(model: ElasticModel) -> tuple[int, ...]:
    assert model.bundle.manifest.exits is not None
    return tuple(segment.layer for segment in model.bundle.manifest.exits.segments)


def _classes(model: ElasticModel) -> int:
    assert model.bundle.manifest.exits is not None
    return model.bundle.manifest.exits.classes


def _policies(model: ElasticModel) -> list[str]:
    from ...runtime.exits.policy import Calibration

    calibration = Calibration.read(model.bundle)
    return [policy.name for policy in calibration.policies] if calibration else []
