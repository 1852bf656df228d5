"""Which engine answers a request, and why: a choice over the bundle's figures, over what runs have shown of them, and,
for a deadline, over what is in flight.

Everything is sorted when the model is loaded, and choices are remembered, so that a request costs microseconds.
"""

import math
from collections.abc import Mapping, Sequence

from ..bundle.build_record import Latency
from ..bundle.device_files.task_index import TaskEntry
from ..bundle.figures import shortfall
from ..bundle.manifest import Manifest, SubmodelEntry
from ..errors import SelectionError
from ..strict import nearest
from .candidates import Candidate, Choice, listing, next_larger, noise_hint
from .engine_table import EngineTable, check_sizes
from .engines.residency import Residency
from .in_flight import LoadEstimate
from .request import Request
from .running_estimate import RunningEstimate

_MAX_REMEMBERED_SIZES = 4096
# By how much figures may be wrong for a limit to be tried: what they put further off would take too long to refuse.
_MOST_WRONG = 10.0


class Dispatcher:
    """Chooses among the whole engines of ``residencies``; engines of the manifest without one do not take part.

    Among several fitting submodels the one with the most parameters wins, and of those with equally many the one whose
    other choices, such as capacity, keep more; of its buckets that hold the input the one that pads least answers, and
    of those the smallest. A latency is the measured median of the engine in the residency it has here, else in another,
    else the prediction, at the size of the input, corrected by the runs of this model; the reason says which. Where no
    engine takes all rows at once, one submodel answers them in runs, whose latencies add up: ``lengths`` are the steps
    of each row without padding, None where all have those of the input. Latency limits go by the median, deadlines by
    the 95th percentile. ``elsewhere`` names the processor of the measurements where it is not this host's, and the
    reason then says so. ``task`` is the one whose engines these are, if any; a run has ``threads``. Thread-safe.
    """

    def __init__(
        self,
        manifest: Manifest,
        residencies: Mapping[str, Residency],
        latencies: Sequence[Latency] = (),
        elsewhere: str | None = None,
        task: TaskEntry | None = None,
        threads: int = 1,
    ) -> None:
        self._manifest, self._task = manifest, task
        self._budgets = {budget.name: budget for budget in manifest.budgets}
        self._submodels = manifest.largest_first
        # Ends of reasons where a limit chooses: reckoned once, since a deadline chooses anew every time.
        self._little = {one.id: _keeps_little(one) for one in self._submodels}
        self._engines = EngineTable(manifest, residencies, latencies, elsewhere, RunningEstimate(self._forget), threads)
        self._remembered: dict[tuple[object, ...], Choice] = {}
        self._remembered_untimed: dict[tuple[object, ...], Choice] = {}
        self._remembered_holding: dict[tuple[int, int], list[Candidate]] = {}
        self._remembered_chosen: dict[tuple[Request, int, int], Candidate] = {}
        # How often everything was forgotten: what was chosen before is not remembered after.
        self._forgotten = 0

    def choose(self, request: Request, batch: int, sequence: int, lengths: Sequence[int] | None = None) -> Choice:
        """The engine for an input of ``batch`` rows of ``sequence`` steps, of a request without a deadline.

        Raises SelectionError, listing what exists, if none satisfies the request or it is malformed; InputError if a
        row is longer than every bucket.
        """
        if type(batch) is not int or type(sequence) is not int:
            check_sizes(batch, sequence)
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
            candidate, reason = self._choose(request, batch, sequence, lengths)
            choice = candidate.choice(reason)
            if len(remembered) >= _MAX_REMEMBERED_SIZES:
                remembered.clear()
            if forgotten == self._forgotten and not choice.runs:
                remembered[key] = choice
        return choice

    def candidates(
        self, request: Request, batch: int, sequence: int, lengths: Sequence[int] | None = None
    ) -> Sequence[Candidate]:
        """The engines that may answer ``request``, with what they take: where it has a deadline all that keep its limit
        of memory, the largest submodel first; else the one that ``choose`` takes.

        Raises as ``choose`` does.
        """
        if request.deadline_ms is not None:
            request.check_one_selector()
            return self._small_enough(request, self._remember_holding(batch, sequence, lengths))
        key = (request, batch, sequence)
        found = self._remembered_chosen.get(key)
        if found is None:
            forgotten = self._forgotten
            found, _ = self._choose(request, batch, sequence, lengths)
            if len(self._remembered_chosen) >= _MAX_REMEMBERED_SIZES:
                self._remembered_chosen.clear()
            if forgotten == self._forgotten and found.runs is None:
                self._remembered_chosen[key] = found
        return [found]

    def choose_in_time(
        self,
        request: Request,
        batch: int,
        sequence: int,
        load: LoadEstimate,
        spent_ms: float = 0.0,
        lengths: Sequence[int] | None = None,
    ) -> Choice:
        """The largest submodel that answers by the request's ``deadline_ms``, after ``spent_ms`` of it, among
        what is in flight.

        Raises as ``choose`` does.
        """
        request.check_one_selector()
        memory, deadline = request.limit("memory_mb"), request.limit("deadline_ms")
        left = deadline - spent_ms
        room = load.room_ms(left)
        candidates = self._remember_holding(batch, sequence, lengths)
        small_enough = [candidate for candidate in candidates if candidate.memory_mb <= memory]
        soonest = min(small_enough or candidates, key=lambda each: each.p95_ms)
        most = max(load.share * deadline, soonest.p95_ms)
        for candidate in small_enough:
            if candidate.p95_ms <= min(room, most):
                reason = f"{_expected(candidate.latency, candidate, load)} <= {left:.3g} ms left of {deadline:g}"
                if memory < math.inf:
                    reason += f", {candidate.memory_mb:.1f} MB <= {memory:g} MB"
                larger = next_larger(candidates, candidate)
                missed = f"; next larger {_expected(str(larger), larger, load)}" if larger else ""
                if larger and most < larger.p95_ms <= room:
                    missed += f", more than the {most:.3g} ms that a run may take while requests are late or refused"
                return candidate.choice(f"{reason}, {load}{missed}{self._little[candidate.engine.submodel]}")
        within = f" and `memory_mb` <= {memory:g}" if memory < math.inf else ""
        fits = bool(small_enough) and load.finish_ms(soonest.p95_ms) <= left
        others = ", too late for another request" if fits else ""
        raise SelectionError(
            f"no submodel answers {batch}x{sequence} with `deadline_ms` <= {deadline:g}{within} ({left:.3g} ms left, "
            f"{load}); the soonest is {_expected(str(soonest), soonest, load)}{others}; allow more "
            f"time, or ask for it as `submodel`{noise_hint([soonest])}"
        )

    def longest_sequence(self, batch: int, request: Request) -> int:
        """The longest sequence that an engine which may answer ``request`` takes, of ``batch`` rows within its limits;
        where none may, that any engine takes. A deadline rules none out.

        Raises InputError beyond every bucket.
        """
        requested, limits = self._named(request), {}
        if requested is None:  # a malformed limit is refused when the request is answered
            given = (("latency_ms", request.latency_ms), ("memory_mb", request.memory_mb))
            limits = {name: limit for name, limit in given if isinstance(limit, int | float)}
        return self._engines.longest_sequence(batch, requested, limits)

    def to_try(
        self, request: Request, batch: int, sequence: int, lengths: Sequence[int] | None = None
    ) -> Choice | None:
        """Engine to try for a request that was refused for its limit in time: the one that is stated to take the least,
        for its run to show whether that is so; None where that was seen lately, or is stated to be far beyond the
        limit.

        Raises as ``choose`` does for a request that is malformed, or too large.
        """
        request.check_one_selector()
        within, memory = min(request.limit("latency_ms"), request.limit("deadline_ms")), request.limit("memory_mb")
        if within == math.inf:
            return None
        candidates = [one for one in self._engines.holding(batch, sequence, lengths) if one.memory_mb <= memory]
        soonest = min(candidates, key=lambda one: one.latency_ms, default=None)
        if soonest is None or soonest.latency_ms > _MOST_WRONG * within or soonest.estimate.is_fresh:
            return None
        return soonest.choice(f"tried, since no run has shown lately what it takes: {soonest.latency}")

    def _named(self, request: Request) -> str | None:
        """The submodel that the request names, itself or by a budget."""
        requested = request.submodel
        if isinstance(request.budget, str) and request.budget in self._budgets:
            requested = self._budgets[request.budget].submodel
        return self._manifest.submodel(requested).id if isinstance(requested, str) else None

    def _small_enough(self, request: Request, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that keep the request's limit of memory. Raises SelectionError for none."""
        memory = request.limit("memory_mb")
        found = [candidate for candidate in candidates if candidate.memory_mb <= memory]
        if not found:
            raise SelectionError(f"no submodel answers with `memory_mb` <= {memory:g}; there is {listing(candidates)}")
        return found

    def _choose(
        self, request: Request, batch: int, sequence: int, lengths: Sequence[int] | None
    ) -> tuple[Candidate, str]:
        limits = request.check_one_selector()
        self._engines.buckets_for(batch, sequence)
        if request.budget is not None:
            budget = self._budgets.get(request.budget)
            if budget is None:
                raise SelectionError(
                    f"no budget {request.budget!r:.80} in this bundle{nearest(request.budget[:80], self._budgets)}"
                )
            candidate = self._smallest(budget.submodel, f"budget {budget.name}", batch, sequence, lengths)
            return candidate, f"budget {budget.name}: {budget.reason}{self._little[candidate.engine.submodel]}"
        if request.submodel is not None:
            candidate = self._smallest(request.submodel, "the request", batch, sequence, lengths)
            return candidate, f"submodel {request.submodel} requested"
        if limits:
            return self._within(request, batch, sequence, lengths)
        candidate = self._engines.holding(batch, sequence, lengths)[0]
        which = "" if candidate.engine.submodel == self._submodels[0].id else " with an engine for this input here"
        return candidate, f"no limit given: the largest submodel{which}"

    def _within(
        self, request: Request, batch: int, sequence: int, lengths: Sequence[int] | None
    ) -> tuple[Candidate, str]:
        given = {"latency_ms": request.limit("latency_ms"), "memory_mb": request.limit("memory_mb")}
        limits = {name: limit for name, limit in given.items() if limit < math.inf}
        candidates = self._engines.holding(batch, sequence, lengths)
        for candidate in candidates:
            fits, reason = candidate.compared(limits)
            if fits:
                larger = next_larger(candidates, candidate)
                missed = f"; next larger {larger}" if larger else ""
                return candidate, f"{reason}{missed}{self._little[candidate.engine.submodel]}"
        wanted = " and ".join(f"`{name}` <= {limit:g}" for name, limit in limits.items())
        raise SelectionError(f"no submodel answers {batch}x{sequence} with {wanted}; there is {listing(candidates)}")

    def _smallest(
        self, requested: str, asker: str, batch: int, sequence: int, lengths: Sequence[int] | None
    ) -> Candidate:
        """The engine of submodel ``requested`` that pads the input least, and of those the one of the smallest bucket;
        ``asker`` is what names it."""
        submodel, task = self._manifest.submodel(requested), self._task
        if task is not None and submodel.id not in task.submodels:
            raise SelectionError(
                f"task {task.name} was proven on {', '.join(task.submodels)}; {asker} names {submodel.id}; ask for one "
                "of the task's"
            )
        candidate = self._engines.of_submodel(submodel.id, batch, sequence, lengths)
        if candidate is not None:
            return candidate
        own = submodel.sequence
        if own is not None and sequence > own:
            raise SelectionError(
                f"submodel {submodel.id} takes at most {own} tokens, the input has {sequence}; there is "
                f"{listing(self._engines.holding(batch, sequence, lengths))}"
            )
        raise SelectionError(
            f"submodel {submodel.id} has no engine for {batch}x{sequence} here (no bucket that large, or left out by "
            f"memory_mb); there is {listing(self._engines.holding(batch, sequence, lengths))}"
        )

    def _forget(self) -> None:
        """Chooses anew from now on: what runs have shown has changed."""
        self._forgotten += 1
        self._remembered.clear()
        self._remembered_holding.clear()
        self._remembered_chosen.clear()

    def _remember_holding(self, batch: int, sequence: int, lengths: Sequence[int] | None) -> list[Candidate]:
        check_sizes(batch, sequence)
        found = self._remembered_holding.get((batch, sequence))
        if found is None:
            forgotten = self._forgotten
            self._engines.buckets_for(batch, sequence)
            found = self._engines.holding(batch, sequence, lengths)
            if len(self._remembered_holding) >= _MAX_REMEMBERED_SIZES:
                self._remembered_holding.clear()
            if forgotten == self._forgotten and not any(one.runs for one in found):
                self._remembered_holding[batch, sequence] = found
        return found


def _keeps_little(submodel: SubmodelEntry) -> str:
    """The end of the reason for a submodel that a limit chose, where it keeps too little of the universal model."""
    said = shortfall(submodel)
    return f"; it keeps little of the universal model: {said}" if said else ""


def _expected(shown: str, candidate: Candidate, load: LoadEstimate) -> str:
    slow = f" (p95 {candidate.p95_ms:.3g} ms)" if candidate.p95_ms > candidate.latency_ms else ""
    return f"{shown}{slow}, expected in {load.finish_ms(candidate.p95_ms):.3g} ms"
