"""What a chain of segments works in: buffers for a request and the state between two segments, on host or device.

The state goes back and forth between two buffers: a segment reads one and writes the other. All buffers are flat and as
large as the largest batch needs; a batch of ``R`` rows (spare ones included) and ``s`` steps is their beginning, so
that engines of any bucket read and write in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter

from ...bucket import Bucket
from ...bundle.entries.exits_entry import ExitsEntry, SegmentEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...errors import InputError
from ..engines.runner import Runner
from ..inputs.arrays import Array
from .batch_plan import BatchPlan
from .steps import Step, StepKey, Steps

# Inputs of a request by name.
Feeds = Mapping[str, Array]


class Workspace(ABC):
    """Buffers for one request at a time. ``open_ms`` is what opening and binding engines took, which a chain resets."""

    # Of every exit its own, on the host, so that answers stay where they are until the request ends: logits
    # [exits, R, C] and entropy [exits, R].
    _answers: tuple[Array, ...]

    def __init__(self, exits: ExitsEntry) -> None:
        self._exits = exits
        first = exits.segments[0]
        self._inputs = first.inputs
        specs = {spec.name: spec for spec in first.outputs}
        self._state_spec = specs[exits.state_out]
        (self._mask_spec,) = (spec for spec in first.inputs if spec.name == exits.mask)
        self._answer_specs = (specs[exits.logits], specs[exits.entropy])
        self._steps = Steps()
        self.open_ms = 0.0

    @abstractmethod
    def fill(self, feeds: Feeds, plan: BatchPlan) -> None:
        """Puts a request where the first segment reads it, cut or padded to the batch plan; spare rows are all 0.

        Raises InputError for an input that cannot be padded.
        """

    @abstractmethod
    def keep(self, positions: Array, old: BatchPlan, new: BatchPlan, source: int) -> tuple[Array, int]:
        """Moves the rows at ``positions`` (int64, rising) of state ``source``, laid out as ``old``, to the front of
        ``new``. Returns the position that each row came from, and the state that they are in now."""

    @abstractmethod
    def close(self) -> None:
        """Gives back all of it; no step may run afterwards."""

    @abstractmethod
    def _bind(self, key: StepKey, segment: SegmentEntry, runner: Callable[[Bucket], Runner]) -> Step:
        """Binds the engines of a step, see ``step``."""

    def step(
        self,
        index: int,
        segment: SegmentEntry,
        plan: BatchPlan,
        source: int,
        fetch_state: bool,
        runner: Callable[[Bucket], Runner],
    ) -> Step:
        """Segment number ``index`` over a batch plan: from the inputs (number 0) or state ``source`` into the other.

        Engines are bound when a step is first asked for; the time that this took is added to ``open_ms``.
        """
        key = StepKey(index, plan, source, fetch_state)
        return self._steps.get(key, lambda: self._bind(key, segment, runner))

    def answers(self, exits: Array, places: Array) -> tuple[Array, Array]:
        """Copies of the answers that stand at ``places`` [B] of ``exits`` [B] (int64): logits [B, C], entropy [B]."""
        logits, entropy = self._answers
        return logits[exits, places], entropy[exits, places]

    def _engines(self, plan: BatchPlan, runner: Callable[[Bucket], Runner]) -> Iterator[tuple[Runner, int, int]]:
        """The open engines of a batch plan, each with its first row and the row behind its last; what the caller does
        with each counts as opening it."""
        begin = 0
        for bucket in plan.buckets:
            end = begin + bucket.batch
            started = perf_counter()
            yield runner(bucket), begin, end
            self.open_ms += 1e3 * (perf_counter() - started)
            begin = end


def put_rows(spec: TensorSpec, target: Array, given: Array) -> None:
    """Copies one input of a request into ``target``, cut or padded to its rows and steps; spare rows are all 0.

    Raises InputError for an input that cannot be padded.
    """
    if given.shape == target.shape:
        target[...] = given
        return
    rows = len(given)
    if "sequence" in spec.dims:
        steps = min(given.shape[1], target.shape[1])
        if steps < target.shape[1]:
            if spec.pad is None:
                raise InputError(
                    f"input {spec.name}: cannot be padded, and shape {list(given.shape)} has not the bucket's "
                    f"{target.shape[1]} steps; send exactly that"
                )
            target[:rows, steps:] = spec.pad
        target[:rows, :steps] = given[:, :steps]
    else:
        target[:rows] = given
    target[rows:] = 0
