"""The submodel for each token: the engines to choose from, and the largest of them that keeps what was promised, chosen
again at every token."""

from collections.abc import Collection, Sequence
from time import perf_counter
from typing import NamedTuple

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import GenerationEntry
from ...bundle.manifest import Manifest
from ...errors import SelectionError
from ...strict import nearest
from .draft_gains import StepTimes
from .options import GenerationRequest


class Chosen(NamedTuple):
    """The engine that computes the next token, and why."""

    engine: EngineEntry
    reason: str


class Pace:
    """The choices of one generation.

    A rate is kept from the first token on: token ``k`` after it is due ``k`` periods later, so that what a small
    submodel saved a larger one may spend. Only time of the generation counts, not what its consumer does between two
    tokens. A deadline counts all time, and what is left of it is divided among the tokens that are left, which may be
    fewer in the end. Where not even the smallest submodel keeps the promise, it is chosen, and the reason says so.

    A row that one submodel began is continued only by those that have no more heads in any layer, of the same size, so
    that the choice is among them from then on.
    """

    def __init__(
        self, engines: Sequence[EngineEntry], reason: str, request: GenerationRequest, times: StepTimes, started: float
    ) -> None:
        """``engines``, the largest first, are those to choose from, and ``reason`` why the first of them is without a
        promise; the call began at ``started`` (``perf_counter``, seconds)."""
        self.engines, self._request, self._times, self._started = engines, request, times, started
        if request.tokens_per_second is not None:
            reason += "; a rate asks nothing of the prompt"
        self._first = Chosen(engines[0], reason)
        self._last: Chosen | None = None
        self._last_fits = True
        self._continued: EngineEntry | None = None  # by all that are left
        self._steps, self._spent_ms, self._left_out = 0, 0.0, 0

    @property
    def is_timed(self) -> bool:
        """Whether it matters how long prompts take."""
        return self._request.deadline_ms is not None

    def for_prompts(self, tokens: int, rows: int, steps: int) -> Chosen:
        """The engine that reads prompts of ``tokens`` in all, whose ``rows`` rows then take up to ``steps`` steps each.
        A rate asks nothing of prompts."""
        if not self.is_timed:
            return self._first
        return self._within(
            self._left_ms(),
            [
                self._times.expected_prompt_ms(engine, tokens) + steps * self._times.expected_ms(engine, rows)
                for engine in self.engines
            ],
            "left for the prompt and all tokens",
        )

    def for_step(self, rows: int, steps: int) -> Chosen:
        """The engine for the next token of ``rows`` rows, the first of at most ``steps`` that are left."""
        if not self._request.is_timed:
            return self._first
        expected = [self._times.expected_ms(engine, rows) for engine in self.engines]
        rate = self._request.tokens_per_second
        if rate is not None:
            due = 1e3 * (self._steps + 1) / rate
            return self._within(due - self._spent_ms, expected, "until the token is due")
        return self._within(self._left_ms() / steps, expected, "left for each token")

    def stepped(self, engine: EngineEntry, rows: int, step_ms: float, all_ms: float) -> None:
        """Counts a step: ``step_ms`` of the engine, ``all_ms`` with the work beside it."""
        self._times.ran(engine, rows, step_ms)
        self._leave_out(engine)
        self._steps += 1
        self._spent_ms += all_ms

    def read(self, engine: EngineEntry, tokens: int, ms: float) -> None:
        """Counts a prompt; ``tokens`` of it were computed."""
        self._times.ran_prompt(engine, tokens, ms)
        self._leave_out(engine)

    def _leave_out(self, before: EngineEntry) -> None:
        """Chooses no more among engines that cannot continue the cache of ``before``."""
        if before is self._continued:
            return
        self._continued = before
        able = [engine for engine in self.engines if engine.can_continue(before)]
        self._left_out += len(self.engines) - len(able)
        self.engines = able

    def _left_ms(self) -> float:
        assert self._request.deadline_ms is not None
        return self._request.deadline_ms - 1e3 * (perf_counter() - self._started)

    def _within(self, room_ms: float, expected: Sequence[float], what: str) -> Chosen:
        """The first engine that is expected to take no more than there is room for; the last choice where
        nothing but the figures has changed."""
        fitting = next((place for place, ms in enumerate(expected) if ms <= room_ms), None)
        engine = self.engines[-1 if fitting is None else fitting]
        if self._last is None or self._last.engine is not engine or self._last_fits != (fitting is not None):
            figures = "expected {:.3g} ms {} {:.3g} ms {}"
            if fitting is None:
                reason = f"the smallest, {figures.format(expected[-1], '>', room_ms, what)}: the promise is not kept"
            else:
                reason = figures.format(expected[fitting], "<=", room_ms, what)
            if self._left_out:
                reason += f"; {self._left_out} with heads that earlier tokens lack, or of another size, cannot continue"
            self._last, self._last_fits = Chosen(engine, reason), fitting is not None
        return self._last


def candidates(
    manifest: Manifest,
    request: GenerationRequest,
    admitted: Collection[str],
    rows: int,
    cache_bytes: int,
    proven: Collection[str] | None = None,
) -> tuple[list[EngineEntry], str]:
    """The engines to choose from, the largest submodel's first, and why that one: only it without a promise in time.
    ``admitted`` are the ids of engines that may be open here, ``proven`` the submodels (ids) that the task was proven
    on, all where it is None; ``rows`` generate at once, with ``cache_bytes``. Raises SelectionError."""
    assert manifest.generation is not None
    generation = manifest.generation
    offered = [engine for engine in generation.generators if proven is None or engine.submodel in proven]
    by_submodel = {
        engine.submodel: engine
        for engine in offered
        if all(needed.id in admitted for needed in _needed(generation, engine))
    }
    order = [entry.id for entry in manifest.largest_first if entry.id in by_submodel]
    engines = [by_submodel[submodel] for submodel in order if by_submodel[submodel].bucket.batch >= rows]
    if request.submodel is not None or request.budget is not None:
        wanted, reason = _named(manifest, request, proven)
        if wanted not in by_submodel and any(engine.submodel == wanted for engine in generation.generators):
            raise SelectionError(
                f"submodel {wanted}: the memory_mb of this model leaves no room for it; there is room for "
                f"{', '.join(order)}; ask for one of them, or raise the cap"
            )
        engines = [engine for engine in engines if engine.submodel == wanted]
        if not engines:
            raise SelectionError(
                f"submodel {wanted} has no engine that generates {rows} rows here; there is "
                f"{', '.join(order) or 'none'}"
            )
        return engines, reason
    if request.memory_mb is not None:
        engines, reason = _within_memory(generation, engines, request.memory_mb, rows, cache_bytes)
    else:
        reason = "the largest submodel" if request.is_timed else "no limit given: the largest submodel"
        if left_out := len(offered) - len(by_submodel):
            reason += f" that the memory cap admits, {left_out} left out"
    if not engines:
        raise SelectionError(f"no submodel has an engine that generates {rows} rows here")
    if not request.is_timed:
        return engines[:1], reason
    able = engines if rows == 1 else [engine for engine in engines if engine.cache_layout == engines[0].cache_layout]
    if len(able) < len(engines):
        reason += f"; of several rows only submodels with its heads, {len(engines) - len(able)} left out"
    return able, reason


def _named(manifest: Manifest, request: GenerationRequest, proven: Collection[str] | None) -> tuple[str, str]:
    """The submodel (id) of the request, or of its budget, and why it."""
    name, reason = request.submodel, f"submodel {request.submodel} requested"
    if request.budget is not None:
        budgets = {budget.name: budget for budget in manifest.budgets}
        if request.budget not in budgets:
            raise SelectionError(
                f"no budget {request.budget!r:.80} in this bundle{nearest(request.budget[:80], budgets)}"
            )
        budget = budgets[request.budget]
        name, reason = budget.submodel, f"budget {budget.name}: {budget.reason}"
    assert name is not None
    wanted = manifest.submodel(name).id
    if proven is not None and wanted not in proven:
        asker = "the request" if request.budget is None else f"budget {request.budget}"
        raise SelectionError(
            f"task {request.task} was proven on {', '.join(proven)}; {asker} names {wanted}; ask for one of them"
        )
    return wanted, reason


def _within_memory(
    generation: GenerationEntry, engines: Sequence[EngineEntry], limit_mb: float, rows: int, cache_bytes: int
) -> tuple[list[EngineEntry], str]:
    """Those of ``engines`` that take no more than the limit with the cache, and why the first of them."""
    memory_mb = {
        engine.id: (sum(map(_own_bytes, _needed(generation, engine))) + cache_bytes) / 1e6 for engine in engines
    }
    small = [engine for engine in engines if memory_mb[engine.id] <= limit_mb]
    if not small:
        raise SelectionError(
            f"no submodel generates {rows} rows with `memory_mb` <= {limit_mb:g}; the smallest takes "
            f"{min(memory_mb.values(), default=0.0):.1f} MB with its cache of {cache_bytes / 1e6:.1f} MB"
        )
    return small, f"{memory_mb[small[0].id]:.1f} MB <= {limit_mb:g} MB"


def _needed(generation: GenerationEntry, engine: EngineEntry) -> list[EngineEntry]:
    """The engines with which a submodel generates: its own, of every capacity, and what reads its prompts."""
    encoder = generation.encoder_of(engine)
    return [*generation.siblings(engine), *([] if encoder is None else [encoder])]


def _own_bytes(engine: EngineEntry) -> int:
    """Bytes of the engine for itself."""
    return (engine.weight_bytes or 0) + engine.private_bytes + engine.activation_bytes
