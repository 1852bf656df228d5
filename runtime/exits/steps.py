"""The steps of a workspace: engines bound to its buffers, once for each batch plan that a segment has met."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from ..engines.runner import DeviceCall
from ..inputs.arrays import Array
from .batch_plan import BatchPlan

# In a range every size has steps of its own: about 0.1 ms for each segment when the size is first met, and 6 kB kept.
_MAX_BOUND_STEPS = 512


class StepKey(NamedTuple):
    """Which step: segment number ``segment`` over ``plan``, reading state ``source``; whether it returns its own."""

    segment: int
    plan: BatchPlan
    source: int
    fetch_state: bool


@dataclass(frozen=True)
class Step:
    """One segment over one batch plan, ready to run: the calls in order, and what they write. ``logits`` [R, C],
    ``entropy`` [R]; ``state`` gives the state [R, s, H], None where it is not fetched. ``bound`` are those of the calls
    that keep something on a device."""

    calls: tuple[Callable[[], None], ...]
    logits: Array
    entropy: Array
    state: Callable[[], Array] | None
    bound: tuple[DeviceCall, ...] = ()

    def close(self) -> None:
        """Gives back what the calls keep; none may be made afterwards."""
        for call in self.bound:
            call.close()


class Steps:
    """Steps by what they depend on, a bounded number of them: the ones that were asked for last."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Step] = {}

    def get(self, key: Hashable, bind: Callable[[], Step]) -> Step:
        """The step for ``key``, made by ``bind`` when it is first asked for; another may be closed for it."""
        step = self._known.pop(key, None)
        if step is None:
            if len(self._known) >= _MAX_BOUND_STEPS:
                self._known.pop(next(iter(self._known))).close()
            step = bind()
        self._known[key] = step  # the last now
        return step

    def close(self) -> None:
        """Closes and forgets all of them."""
        while self._known:
            self._known.popitem()[1].close()
