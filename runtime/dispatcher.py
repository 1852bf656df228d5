"""Which engine answers a request, and why: a choice over the bundle's figures, over what runs have shown of them, and,
for a deadline, over what is in flight.

Everything is sorted when the model is loaded, and choices are remembered, so that a request costs microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..bucket import Bucket
from ..errors import InputError, SelectionError
from ..strict import nearest
from .bundle.build_record import Latency
from .bundle.device_files.task_index import TaskEntry
from .bundle.manifest import Manifest
from .candidates import Candidate, Choice, Engine, by_padding, listing, next_larger, noise_hint, stated_latency
from .engines.contract.residency import Residency
from .in_flight import LoadEstimate
from .inputs.limits import positive_limit
from .request import Request
from .running_estimate import RunningEstimate

_MAX_REMEMBERED_SIZES = 4096
_MAX_DIMENSION = 2**31
# By how much figures may be wrong for a limit to be tried: what they put further off would take too long to refuse.
_MOST_WRONG = 10.0


class Dispatcher:
    """Chooses among the whole engines of ``residencies``; engines of the manifest without one do not take part.

    Among several fitting submodels the one with the most parameters wins, and of those with equally many the one whose
    other choices, such as capacity, keep more; of its buckets that hold the input the one that pads least answers, and
    of those the smallest. A latency is the measured median of the engine in the residency it has here, else in another,
    else the prediction, at the size of the input, corrected by the runs of this model (running_estimate.py); the reason
    says which. Latency limits go by the median, deadlines by the 95th percentile. ``elsewhere`` names the processor of
    the measurements where it is not this host's, and the reason then says so. ``task`` is the one whose engines
    these are, if any. Thread-safe.
    """

    def __init__(
        self,
        manifest: Manifest,
        residencies: Mapping[str, Residency],
        latencies: Sequence[Latency] = (),
        elsewhere: str | None = None,
        task: TaskEntry | None = None,
    ) -> None:
        self._manifest, self._task = manifest, task
        self._budgets = {budget.name: budget for budget in manifest.budgets}
        self._submodels = manifest.largest_first
        self._running = RunningEstimate(self._forget)
        weights = {entry.id: entry.weight_bytes for entry in manifest.submodels}
        known: dict[str, list[Latency]] = {}
        for each in latencies:
            known.setdefault(each.engine, []).append(each)
        by_submodel: dict[str, list[Engine]] = {entry.id: [] for entry in manifest.submodels}
        self._whole = [engine for engine in manifest.engines if engine.segment is None]
        for engine in self._whole:
            if engine.id in residencies:
                stated = stated_latency(known.get(engine.id, ()), residencies[engine.id], elsewhere)
                reads = weights[engine.submodel] if engine.weight_bytes is None else engine.weight_bytes
                memory = reads + engine.private_bytes + engine.activation_bytes
                by_submodel[engine.submodel].append(Engine(engine, stated, memory / 1e6, self._running))
        for engines in by_submodel.values():
            engines.sort(key=lambda one: (one.entry.bucket.tokens, not one.entry.bucket.is_static, one.entry.bucket))
        self._engines = by_submodel
        self._remembered: dict[tuple[object, ...], Choice] = {}
        self._remembered_untimed: dict[tuple[object, ...], Choice] = {}
        self._remembered_holding: dict[tuple[int, int], list[Candidate]] = {}
        # How often everything was forgotten: what was chosen before is not remembered after.
        self._forgotten = 0

    def choose(self, request: Request, batch: int, sequence: int) -> Choice:
        """The engine for an input of ``batch`` rows of ``sequence`` steps, of a request without a deadline.

        Raises SelectionError, listing what exists, if none satisfies the request or it is malformed; InputError if the
        input is larger than every bucket.
        """
        if type(batch) is not int or type(sequence) is not int:
            _check_sizes(batch, sequence)
        # By type as well: True equals 1, but is no limit.
        key = (request, type(request.latency_ms), type(request.memory_mb), batch, sequence)
        # Without a limit in time no figure decides, so that what runs show changes nothing.
        remembered = self._remembered if request.latency_ms is not None else self._remembered_untimed
        try:
            choice = remembered.get(key)
        except TypeError:  # a list cannot be remembered; _choose says what is wrong with it
            choice = None
        if choice is None:
            forgotten = self._forgotten
            choice = self._choose(request, batch, sequence)
            if len(remembered) >= _MAX_REMEMBERED_SIZES:
                remembered.clear()
            if forgotten == self._forgotten:
                remembered[key] = choice
        return choice

    def choose_in_time(
        self, request: Request, batch: int, sequence: int, load: LoadEstimate, spent_ms: float = 0.0
    ) -> Choice:
        """The largest submodel that answers by the request's ``deadline_ms``, after ``spent_ms`` of it, among
        what is in flight.

        Raises as ``choose`` does.
        """
        deadline, memory = self._deadline(request)
        left = deadline - spent_ms
        room = load.room_ms(left)
        candidates = self._remember_holding(batch, sequence)
        for candidate in candidates:
            if candidate.p95_ms <= room and candidate.memory_mb <= memory:
                reason = f"{_expected(candidate.latency, candidate, load)} <= {left:.3g} ms left of {deadline:g}"
                if memory < math.inf:
                    reason += f", {candidate.memory_mb:.1f} MB <= {memory:g} MB"
                larger = next_larger(candidates, candidate)
                missed = f"; next larger {_expected(str(larger), larger, load)}" if larger else ""
                return candidate.choice(f"{reason}, {load}{missed}")
        within = f" and memory_mb <= {memory:g}" if memory < math.inf else ""
        small_enough = [candidate for candidate in candidates if candidate.memory_mb <= memory]
        soonest = min(small_enough or candidates, key=lambda each: each.p95_ms)
        raise SelectionError(
            f"no submodel answers {batch}x{sequence} with deadline_ms <= {deadline:g}{within} ({left:.3g} ms left, "
            f"{load}); the soonest is {_expected(str(soonest), soonest, load)}; allow more time, or ask for it as "
            f"submodel{noise_hint([soonest])}"
        )

    def to_try(self, request: Request, batch: int, sequence: int) -> Choice | None:
        """Of a request that was refused for its limit in time: the engine that is stated to take the least, for its run
        to show whether that is so; None where that was seen lately, or is stated to be far beyond the limit.

        Raises as ``choose`` does for a request that is malformed, or too large.
        """
        _check_one_selector(request)
        given = (("latency_ms", request.latency_ms), ("deadline_ms", request.deadline_ms))
        within = min((positive_limit(name, limit) for name, limit in given if limit is not None), default=None)
        if within is None:
            return None
        memory = math.inf if request.memory_mb is None else positive_limit("memory_mb", request.memory_mb)
        candidates = [one for one in self._holding(batch, sequence) if one.memory_mb <= memory]
        soonest = min(candidates, key=lambda one: one.latency_ms, default=None)
        if soonest is None or soonest.latency_ms > _MOST_WRONG * within or soonest.estimate.is_fresh:
            return None
        return soonest.choice(f"tried, since no run has shown lately what it takes: {soonest.latency}")

    def longest_sequence(self, batch: int, request: Request) -> int:
        """The longest sequence that an engine which may answer ``request`` takes for ``batch`` rows; where none may,
        that any engine takes. A deadline rules none out.

        Raises InputError beyond every bucket.
        """
        buckets = self._buckets_for(batch, 1)
        asked, limits = self._named(request), {}
        if asked is None:  # a malformed limit is refused when the request is answered
            given = (("latency_ms", request.latency_ms), ("memory_mb", request.memory_mb))
            limits = {name: limit for name, limit in given if isinstance(limit, int | float)}
        engines = [one for name, own in self._engines.items() if asked in (None, name) for one in own]
        taking = [engine for engine in engines if engine.entry.bucket in buckets]
        longest = max((engine.longest_sequence(batch, limits) for engine in taking), default=0)
        return longest or max(bucket.sequence for bucket in buckets)

    def _named(self, request: Request) -> str | None:
        """The submodel that the request names, itself or by a budget."""
        asked = request.submodel
        if isinstance(request.budget, str) and request.budget in self._budgets:
            asked = self._budgets[request.budget].submodel
        return self._manifest.submodel(asked).id if isinstance(asked, str) else None

    def _choose(self, request: Request, batch: int, sequence: int) -> Choice:
        limits = _check_one_selector(request)
        for name, asked in (("budget", request.budget), ("submodel", request.submodel)):
            if not isinstance(asked, str | None):
                raise SelectionError(f"{name}: expected a name, got {asked!r:.80}")
        self._buckets_for(batch, sequence)
        if request.budget is not None:
            budget = self._budgets.get(request.budget)
            if budget is None:
                raise SelectionError(
                    f"no budget {request.budget!r:.80} in this bundle{nearest(request.budget[:80], self._budgets)}"
                )
            candidate = self._smallest(budget.submodel, f"budget {budget.name}", batch, sequence)
            return candidate.choice(f"budget {budget.name}: {budget.reason}")
        if request.submodel is not None:
            candidate = self._smallest(request.submodel, "the request", batch, sequence)
            return candidate.choice(f"submodel {request.submodel} asked for")
        if limits:
            return self._within(request, batch, sequence)
        candidate = self._holding(batch, sequence)[0]
        which = "" if candidate.engine.submodel == self._submodels[0].id else " with an engine for this input here"
        return candidate.choice(f"no limit asked: the largest submodel{which}")

    def _within(self, request: Request, batch: int, sequence: int) -> Choice:
        limits = {
            name: positive_limit(name, limit)
            for name, limit in (("latency_ms", request.latency_ms), ("memory_mb", request.memory_mb))
            if limit is not None
        }
        candidates = self._holding(batch, sequence)
        for candidate in candidates:
            fits, reason = candidate.compared(limits)
            if fits:
                larger = next_larger(candidates, candidate)
                missed = f"; next larger {larger}" if larger else ""
                return candidate.choice(f"{reason}{missed}")
        wanted = " and ".join(f"{name} <= {limit:g}" for name, limit in limits.items())
        raise SelectionError(f"no submodel answers {batch}x{sequence} with {wanted}; there is {listing(candidates)}")

    def _deadline(self, request: Request) -> tuple[float, float]:
        """The request's deadline and its limit on memory, infinite if it has none."""
        _check_one_selector(request)
        memory = math.inf if request.memory_mb is None else positive_limit("memory_mb", request.memory_mb)
        return positive_limit("deadline_ms", request.deadline_ms), memory

    def _smallest(self, asked: str, asker: str, batch: int, sequence: int) -> Candidate:
        """The engine of the submodel ``asked`` that pads the input least, and of those the one of the smallest bucket;
        ``asker`` is what names it."""
        submodel, task = self._manifest.submodel(asked), self._task
        if task is not None and submodel.id not in task.submodels:
            raise SelectionError(
                f"task {task.name} was proven on {', '.join(task.submodels)}; {asker} names {submodel.id}; ask for one "
                "of the task's"
            )
        shape = Bucket(int(batch), int(sequence))
        for engine in by_padding(self._engines[submodel.id], shape):
            return engine.candidate(shape)
        own = submodel.sequence
        if own is not None and sequence > own:
            raise SelectionError(
                f"submodel {submodel.id} takes at most {own} tokens, the input has {sequence}; there is "
                f"{listing(self._holding(batch, sequence))}"
            )
        raise SelectionError(
            f"submodel {submodel.id} has no engine for {batch}x{sequence} here (no bucket that large, or left out by "
            f"memory_mb); there is {listing(self._holding(batch, sequence))}"
        )

    def _forget(self) -> None:
        """Chooses anew from now on: what runs have shown has changed."""
        self._forgotten += 1
        self._remembered.clear()
        self._remembered_holding.clear()

    def _remember_holding(self, batch: int, sequence: int) -> list[Candidate]:
        _check_sizes(batch, sequence)
        found = self._remembered_holding.get((batch, sequence))
        if found is None:
            forgotten = self._forgotten
            self._buckets_for(batch, sequence)
            found = self._holding(batch, sequence)
            if len(self._remembered_holding) >= _MAX_REMEMBERED_SIZES:
                self._remembered_holding.clear()
            if forgotten == self._forgotten:
                self._remembered_holding[batch, sequence] = found
        return found

    def _holding(self, batch: int, sequence: int) -> list[Candidate]:
        """Per submodel, from the largest down, the engine that pads the input least; behind one of a range also those
        that pad more and take less time or memory all the same."""
        shape = Bucket(int(batch), int(sequence))
        found: list[Candidate] = []
        for submodel in self._submodels:
            own: list[Candidate] = []
            for engine in by_padding(self._engines[submodel.id], shape):
                candidate = engine.candidate(shape)
                if own and own[0].engine.bucket.is_static:
                    break
                if all(candidate.memory_mb < one.memory_mb or candidate.p95_ms < one.p95_ms for one in own):
                    own.append(candidate)
            found += own
        return found

    def _buckets_for(self, batch: int, sequence: int) -> list[Bucket]:
        _check_sizes(batch, sequence)
        shape = Bucket(int(batch), int(sequence))
        buckets = sorted({engine.entry.bucket for engines in self._engines.values() for engine in engines})
        holding = [bucket for bucket in buckets if bucket.holds(shape)]
        if not holding and any(engine.bucket.holds(shape) for engine in self._whole):
            raise SelectionError(
                f"no engine takes {batch}x{sequence} here: memory_mb leaves out any that would, or they need another "
                f"backend; there is {', '.join(bucket.label for bucket in buckets)}"
            )
        if not holding:
            known = ", ".join(bucket.label for bucket in buckets)
            raise InputError(
                f"input of {batch} rows x {sequence} is larger than every bucket of this bundle ({known}); "
                "send less at once, or compile with a larger bucket"
            )
        return holding


def _check_one_selector(request: Request) -> bool:
    """Whether limits are given. Raises SelectionError for a request that asks in several ways."""
    limits = any(limit is not None for limit in (request.latency_ms, request.memory_mb, request.deadline_ms))
    if (request.budget is not None) + (request.submodel is not None) + limits > 1:
        given = ", ".join(name for name, value in request._asdict().items() if value is not None)
        raise SelectionError(f"request with {given}: expected a budget, or a submodel, or limits, not several")
    if request.latency_ms is not None and request.deadline_ms is not None:
        raise SelectionError(
            "request with latency_ms, deadline_ms: expected one; latency_ms limits the run alone, deadline_ms counts "
            "the requests in flight too"
        )
    return limits


def _check_sizes(batch: object, sequence: object) -> None:
    for name, size in (("batch", batch), ("sequence", sequence)):
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise InputError(f"{name}: expected a whole number, got {size!r:.80}")
        number = int(size)
        if not 0 < number <= _MAX_DIMENSION:
            raise InputError(
                f"{name}: expected 1 to {_MAX_DIMENSION}, got {number if abs(number) <= _MAX_DIMENSION else 'more'}"
            )


def _expected(shown: str, candidate: Candidate, load: LoadEstimate) -> str:
    slow = f" (p95 {candidate.p95_ms:.3g} ms)" if candidate.p95_ms > candidate.latency_ms else ""
    return f"{shown}{slow}, expected in {load.finish_ms(candidate.p95_ms):.3g} ms"
