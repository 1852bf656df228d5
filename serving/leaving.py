"""Rows of several requests in one chain of exits, which may stop between two segments: those that have not left then go
on with rows of others that have come as far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..bucket import Bucket
from ..runtime.answering import joined
from ..runtime.exits.chain import Stop
from ..runtime.exits.choice import OpenExits
from ..runtime.inputs.arrays import Array


@dataclass(eq=False, frozen=True)
class Going:
    """A request of ``count`` rows, of which ``rows`` [n], by number, have not left: ``feeds`` is what segment number
    ``segment`` takes of them, by name. Those that left have ``outputs``, by name, and the ``layer`` of each.
    The engines are chosen for ``reason``. Others may come to where it stands ``until`` then (milliseconds)."""

    count: int
    rows: Array
    feeds: Mapping[str, Array]
    reason: str
    segment: int = 0
    until: float | None = None
    outputs: dict[str, Array] = field(default_factory=dict)
    layer: dict[int, int] = field(default_factory=dict)

    @property
    def shape(self) -> Bucket:
        """Rows that go on, and the steps that they have there."""
        return Bucket(len(self.rows), next(iter(self.feeds.values())).shape[1])

    @property
    def layers(self) -> list[int]:
        """After how many layers each row left, once all have."""
        return [self.layer[row] for row in range(self.count)]


def go_on(exits: OpenExits, given: Sequence[Going], stop: Stop) -> list[Going]:
    """Requests that stand before one segment, after a run of all of them; of those that are answered no row goes on."""
    entry, shapes = exits.chain.entry, [one.shape for one in given]
    together = Bucket(sum(shape.batch for shape in shapes), max(shape.sequence for shape in shapes))
    places = np.split(np.arange(together.batch), np.cumsum([shape.batch for shape in shapes])[:-1])
    feeds = given[0].feeds
    if len(given) > 1:
        feeds = {
            name: joined([(place, one.feeds[name]) for place, one in zip(places, given, strict=True)]) for name in feeds
        }
    run = exits.answer(feeds, together, given[0].segment, stop)
    found = []
    for place, one in zip(places, given, strict=True):
        # Outputs of rows that go on are written again when they leave.
        for name, array in ((entry.logits, run.logits), (entry.entropy, run.entropy)):
            outputs = one.outputs.setdefault(name, np.empty((one.count, *array.shape[1:]), array.dtype))
            outputs[one.rows] = array[place]
        one.layer.update(zip(one.rows.tolist(), run.layer[place].tolist(), strict=True))
        if run.rest is None:
            found.append(replace(one, rows=one.rows[:0]))
            continue
        stays = np.isin(run.rest.rows, place)
        feeds = {name: array[stays] for name, array in run.rest.feeds.items()}
        rows = one.rows[run.rest.rows[stays] - place[0]]
        found.append(replace(one, rows=rows, feeds=feeds, segment=run.rest.segment))
    return found
