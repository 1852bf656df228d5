"""A request: what its caller asked for, and what is known of it before an engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from ..bucket import Bucket
from ..errors import SelectionError
from ..ownership import Owner
from .exits.choice import AskedExits
from .graphs.task_tensors import TaskTensors
from .inputs.arrays import Array


class Request(NamedTuple):
    """What a request can afford: a named budget, or one submodel, or limits (all must hold); nothing asks for the
    largest submodel. ``memory_mb`` limits what the engine needs for itself: weights, private initializers, activations.
    A limit in time is one of two: ``latency_ms`` for the run alone, or ``deadline_ms`` for the run among the
    requests that are in flight.
    """

    budget: str | None = None
    submodel: str | None = None
    latency_ms: float | None = None
    memory_mb: float | None = None
    deadline_ms: float | None = None

    @property
    def is_timed(self) -> bool:
        """Whether it has a limit in time."""
        return self.latency_ms is not None or self.deadline_ms is not None

    def check_one_selector(self) -> bool:
        """Whether limits are given. Raises SelectionError for a request that asks in several ways."""
        limits = any(limit is not None for limit in (self.latency_ms, self.memory_mb, self.deadline_ms))
        if (self.budget is not None) + (self.submodel is not None) + limits > 1:
            given = ", ".join(name for name, value in self._asdict().items() if value is not None)
            raise SelectionError(f"request with {given}: expected a budget, or a submodel, or limits, not several")
        if self.latency_ms is not None and self.deadline_ms is not None:
            raise SelectionError(
                "request with `latency_ms`, `deadline_ms`: expected one; the first limits the run alone, the second "
                "counts the requests in flight too"
            )
        return limits


class RequestContext(NamedTuple):
    """A request with its inputs as arrays of ``shape``, and what its answer repeats of it.

    ``exits`` and ``routing`` are what was asked for. ``truncated`` are the texts that were cut, ``prompt`` stood
    before each; ``task`` answers, or the base. The call began at ``started`` and had its arrays at ``encoded``
    (``perf_counter``, seconds); it may be in flight until ``owner`` is over. ``lengths`` are the steps of each row of
    texts without their padding, None for arrays.
    """

    request: Request
    exits: AskedExits | None
    routing: bool
    feeds: Mapping[str, Array]
    shape: Bucket
    truncated: tuple[int, ...]
    prompt: str
    started: float
    encoded: float
    owner: Owner
    task: TaskTensors | None = None
    lengths: Sequence[int] | None = None

    @property
    def task_name(self) -> str | None:
        """The task that answers, None for the base."""
        return None if self.task is None else self.task.name

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        deadline_ms = self.request.deadline_ms
        return deadline_ms is not None and 1e3 * (perf_counter() - self.started) > deadline_ms
