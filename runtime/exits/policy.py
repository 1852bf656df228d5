"""When a row leaves a chain of exits: thresholds on entropy, how they compare, and whether rows leave alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Literal, get_args

import numpy as np

from ...errors import SelectionError

Compare = Literal["<", "<="]
Rule = Literal["per_row", "batch_max"]


@dataclass(frozen=True)
class ExitPolicy:
    """A row leaves at exit ``j`` where ``entropy compare thresholds[j]`` (nats); the last exit always answers.

    There is one threshold for every exit but the last; a negative one closes its exit. ``per_row`` gives each row the
    answer that it would get alone. ``batch_max`` lets the whole batch leave when its least certain row may, as research
    code does; its answers depend on the batch. ``name`` says in answers where the policy comes from.
    Raises SelectionError for a comparison, a rule or a threshold that is none.
    """

    thresholds: tuple[float, ...]
    compare: Compare = "<="
    rule: Rule = "per_row"
    name: str = "thresholds requested"

    def __post_init__(self) -> None:
        if self.compare not in get_args(Compare) or self.rule not in get_args(Rule):
            raise SelectionError(
                f"exit policy: expected a comparison of {', '.join(get_args(Compare))} and a rule of "
                f"{', '.join(get_args(Rule))}, got {self.compare!r:.80} and {self.rule!r:.80}"
            )
        if not isinstance(self.thresholds, tuple):
            raise SelectionError(f"exit policy: expected a tuple of thresholds in nats, got {self.thresholds!r:.80}")
        for value in self.thresholds:
            if not _is_number(value):
                raise SelectionError(f"thresholds: expected numbers in nats, got {value!r:.80}")

    def leavers(self, exit_index: int, entropies: Sequence[float]) -> list[bool]:
        """Which rows leave at this exit, by their entropies. NaN never leaves early."""
        # Without numpy: after an engine has run the caches hold weights, not numpy's code.
        limit = self._limits[exit_index]
        certain = [value < limit for value in entropies] if self.compare == "<" else [v <= limit for v in entropies]
        return [all(certain)] * len(certain) if self.rule == "batch_max" else certain

    @cached_property
    def _limits(self) -> tuple[float, ...]:
        """The thresholds as float32 has them, as entropies are: one that was taken from an entropy must equal it."""
        with np.errstate(over="ignore"):
            return tuple(float(np.float32(value)) for value in self.thresholds)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number beyond every float
        return False


def closed(exits: int) -> ExitPolicy:
    """No row leaves before the last of ``exits`` exits."""
    return ExitPolicy((-1.0,) * (exits - 1), name="every exit closed")


def thresholds_for(requested: float | Sequence[float], exits: int) -> tuple[float, ...]:
    """One threshold per exit but the last, from one number for all or one for each.

    Raises SelectionError for the wrong count or what is no number.
    """
    given = tuple(requested) if isinstance(requested, Sequence) else (requested,) * (exits - 1)
    check_count(given, exits)
    return tuple(float(value) for value in ExitPolicy(given).thresholds)


def read_exits(text: str) -> str | float | tuple[float, ...]:
    """Thresholds where ``text`` reads as numbers with commas between, else a name."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]


def check_count(thresholds: Sequence[object], exits: int) -> None:
    """Raises SelectionError unless there is one threshold for every exit but the last."""
    if len(thresholds) != exits - 1:
        raise SelectionError(
            f"thresholds: expected one number, or {exits - 1} (one for every exit but the last), got {len(thresholds)}"
        )
