"""The values of an export on one wrong case: its answers, and the value of its own that comes nearest to another."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..errors import InputError
from ..runtime.inputs.arrays import Array
from .cases import MASK, Trial
from .export import Export, Value
from .match import Match
from .model import Model
from .steps import with_no_past
from .verdict import Rule, hidden_out


def typed(array: Array, dtype: str) -> Array:
    """``array`` as an export takes it; texts as they are."""
    return array if dtype == "str" else np.ascontiguousarray(array.astype(dtype))


class Found:
    """``values`` are none where the kind of export shows none."""

    def __init__(
        self,
        export: Export,
        model: Model,
        rule: Rule,
        inputs: Sequence[Match],
        outputs: Sequence[Match],
        trial: Trial,
    ) -> None:
        self.export, self.model, self.rule, self.trial = export, model, rule, trial
        self.mask = trial.feeds.get(MASK)
        self.outputs = outputs
        feeds = {match.name: typed(trial.feeds[match.model], _dtype(export, match.name)) for match in inputs}
        whole = with_no_past(export, feeds)
        try:
            shown = export.values(whole)
        except InputError:  # a graph that runs as a whole alone
            shown = []
        given = [Value(name, name, "input", None, array) for name, array in feeds.items() if array.dtype.kind == "f"]
        self.values = [value for value in [*given, *shown] if np.isfinite(value.array).all()]
        answers = export.run(whole)
        self.answers = {match.model: self.counted(answers[match.name]) for match in outputs}
        self._by_size: dict[tuple[int, bool], tuple[Array, list[Value]]] = {}

    def counted(self, array: Array) -> Array:
        return hidden_out(array, self.mask)

    def nearest(self, wanted: Array, claimed: Collection[str] = ()) -> tuple[Value, Array] | None:
        """The export's value that comes nearest to ``wanted``, and its numbers in that shape; none that is ``claimed``,
        by name."""
        matrix, values = self._of_size(wanted)
        if not values:
            return None
        off = np.linalg.norm(matrix - wanted.reshape(1, -1).astype(np.float32), axis=1)
        off[[value.name in claimed for value in values]] = np.inf
        best = int(off.argmin())
        if off[best] == np.inf:
            return None
        return values[best], self.counted(values[best].array.reshape(wanted.shape)).astype(np.float64)

    def _of_size(self, wanted: Array) -> tuple[Array, list[Value]]:
        masked = self.mask is not None and wanted.shape[:2] == self.mask.shape
        key = (wanted.size, masked)
        if key not in self._by_size:
            values = [value for value in self.values if value.array.size == wanted.size and wanted.size]
            rows = [self.counted(value.array.reshape(wanted.shape)).reshape(-1).astype(np.float32) for value in values]
            self._by_size[key] = (np.stack(rows) if rows else np.zeros((0, wanted.size), np.float32), values)
        return self._by_size[key]


def _dtype(export: Export, name: str) -> str:
    port = export.port(name)
    if port is None:
        raise InputError(f"{export.label}: no input {name}")
    return port.dtype
