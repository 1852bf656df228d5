"""Which engines run so many rows: a batch between two buckets is split where that is cheaper than filling one up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...elastic import Bucket


@dataclass(frozen=True, eq=False)
class Cover:
    """Runs of one sequence length, the largest first, that hold a number of rows together; only the last has spare
    rows. ``cost`` is their sum, in the unit that the choice was made in. Equal to itself alone, so that it is a quick
    key."""

    buckets: tuple[Bucket, ...]
    cost: float

    @cached_property
    def rows(self) -> int:
        """Rows that run, spare ones included."""
        return sum(bucket.batch for bucket in self.buckets)

    @cached_property
    def sequence(self) -> int:
        return self.buckets[0].sequence


class Covers:
    """The cheapest covers by engines of these costs, each above 0. Thread-safe; what was found is remembered.

    An engine counts as no dearer than those of larger buckets: where one was measured to be, something else disturbed
    the measurement.
    """

    def __init__(self, costs: Mapping[Bucket, float]) -> None:
        self._costs = {bucket: min(cost for other, cost in costs.items() if _holds(other, bucket)) for bucket in costs}
        self._batches: dict[int, list[Bucket]] = {}
        for bucket in sorted(costs, reverse=True):
            self._batches.setdefault(bucket.sequence, []).append(bucket)
        self._cheapest: dict[tuple[int, int], Cover] = {}
        self._shortest: dict[tuple[int, int], Cover] = {}
        self._best: dict[tuple[int, int], Cover] = {}

    def cheapest(self, rows: int, longest: int) -> Cover:
        """For ``rows`` rows of up to ``longest`` steps, no more than the longest bucket has; among equals the shorter
        sequence, then fewer runs, then fewer spare rows."""
        cover = self._cheapest.get((rows, longest))
        if cover is None:
            fitting = sorted(sequence for sequence in self._batches if sequence >= longest)
            cover = min((self._at(sequence, rows) for sequence in fitting), key=lambda cover: cover.cost)
            self._cheapest[rows, longest] = cover
        return cover

    def shortest(self, rows: int, longest: int) -> Cover:
        """The cheapest among those of the shortest sequence that fits."""
        cover = self._shortest.get((rows, longest))
        if cover is None:
            cover = self._at(min(sequence for sequence in self._batches if sequence >= longest), rows)
            self._shortest[rows, longest] = cover
        return cover

    def cost(self, cover: Cover) -> float:
        """What the engines here take at another segment's ``cover``."""
        return sum(self._costs[bucket] for bucket in cover.buckets)

    def _at(self, sequence: int, rows: int) -> Cover:
        """One cover for all lengths that it serves: whoever keeps something by cover keeps it once."""
        cover = self._best.get((sequence, rows))
        return cover or self._best.setdefault((sequence, rows), self._found(sequence, rows))

    def _found(self, sequence: int, rows: int) -> Cover:
        """``best[n]`` holds ``n`` rows: one run of any batch, and the best for the rows that it leaves."""
        best: list[tuple[float, int, int, tuple[Bucket, ...]]] = [(0.0, 0, 0, ())]
        for n in range(1, rows + 1):
            options = []
            for bucket in self._batches[sequence]:
                cost, runs, places, rest = best[max(0, n - bucket.batch)]
                options.append((cost + self._costs[bucket], runs + 1, places + bucket.batch, (bucket, *rest)))
            best.append(min(options, key=lambda option: option[:3]))
        cost, _, _, buckets = best[rows]
        # Fewer spare rows than the smallest run has, or that run could go; so they all lie in the last.
        return Cover(tuple(sorted(buckets, reverse=True)), cost)


def _holds(outer: Bucket, inner: Bucket) -> bool:
    return outer.batch >= inner.batch and outer.sequence >= inner.sequence
