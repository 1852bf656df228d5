"""A request: what its caller asked for, and what is known of it before an engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..bucket import Bucket
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


class RequestContext(NamedTuple):
    """A request with its inputs as arrays of ``shape``, and what its answer repeats of it.

    ``exits`` and ``routing`` are what was asked for. ``truncated`` are the texts that were cut, ``prompt`` stood
    before each; ``task`` answers, or the base. The call began at ``started`` and had its arrays at ``encoded``
    (``perf_counter``, seconds).
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
    task: TaskTensors | None = None

    @property
    def task_name(self) -> str | None:
        """The task that answers, None for the base."""
        return None if self.task is None else self.task.name
