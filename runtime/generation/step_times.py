"""The time of a step of each submodel, as the steps of this model have shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry

# Runs of a mean: a further one then counts as the last of so many, so that old ones are forgotten.
_RUNS = 8
# A step beside a busy program takes several times as long; what counts is what most of them take.
_MOST_SLOWER = 1.5
_ENOUGH_RUNS = 3
# Fewest tokens of a prompt for its time to say what a token of others takes.
_FEWEST_PROMPT_TOKENS = 8
# Until any engine has run: what an ordinary processor reads of weights in a millisecond.
_BYTES_A_MS = 1e7


@dataclass(frozen=True)
class RunTime:
    """Time of a run of so many new ``tokens`` of one row, in milliseconds: of 1 a step, of more a check."""

    engine: str
    tokens: int = field(metadata={"min": 1})
    ms: float = field(metadata={"min": 0})


class _Means:
    """Running means by engine and size of a run. The first run of a size does not count, which finds neither memory nor
    caches ready."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], tuple[float, int, int]] = {}  # milliseconds, bytes of weights, runs
        self._ran: set[tuple[str, int]] = set()

    def ran(self, engine: EngineEntry, size: int, ms: float) -> None:
        key = engine.id, size
        if key not in self._ran:
            self._ran.add(key)
            return
        mean, _, runs = self.known.get(key, (ms, 0, 0))
        if runs >= _ENOUGH_RUNS:
            ms = min(ms, _MOST_SLOWER * mean)
        runs += 1
        self.known[key] = mean + (ms - mean) / min(runs, _RUNS), engine.weight_bytes or 1, runs

    def start_from(self, engine: EngineEntry, size: int, ms: float) -> None:
        """Counts ``ms`` as one run, of a size that has not run."""
        self.known.setdefault((engine.id, size), (ms, engine.weight_bytes or 1, 1))

    def of(self, engine: EngineEntry, least_runs: int = 1) -> dict[int, float]:
        """Milliseconds by size, of those that have run so often."""
        return {
            size: ms
            for (name, size), (ms, _, runs) in list(self.known.items())
            if name == engine.id and runs >= least_runs
        }


class StepTimes:
    """By engine and number of rows. Until one has run, the figure of another is scaled by the bytes of
    weights, which is what a step reads; until any has, the bytes are taken to be read at an ordinary pace.

    Threads may share it: of two that count a run at once, one may not count.
    """

    def __init__(self) -> None:
        self._steps, self._checks = _Means(), _Means()  # by number of rows, and of tokens
        self._prompts: dict[str, tuple[float, int]] = {}  # milliseconds a token, bytes of weights

    def ran(self, engine: EngineEntry, rows: int, ms: float) -> None:
        """Counts a step."""
        self._steps.ran(engine, rows, ms)

    def ran_check(self, engine: EngineEntry, tokens: int, ms: float) -> None:
        """Counts a run of several new tokens of one row."""
        self._checks.ran(engine, tokens, ms)

    def ran_prompt(self, engine: EngineEntry, tokens: int, ms: float) -> None:
        """Counts a prompt; ``tokens`` of it were computed."""
        if tokens < _FEWEST_PROMPT_TOKENS and self._prompts:
            return  # mostly what any run takes
        mean, _ = self._prompts.get(engine.id, (ms / tokens, 0))
        self._prompts[engine.id] = (mean + ms / tokens) / 2, engine.weight_bytes or 1

    def expected_ms(self, engine: EngineEntry, rows: int) -> float:
        """Time of a step of ``rows`` rows, by the figures so far. One of fewer is taken to cost what the nearest
        larger number did, one of more in proportion, which is the most that it can."""
        alike = self._steps.of(engine)
        if rows in alike:
            return alike[rows]
        weight_bytes = engine.weight_bytes or 1
        if not alike:
            # Nearest in rows, then the engine that is nearest in size.
            others = [(r, of, ms) for (_, r), (ms, of, _) in list(self._steps.known.items())]
            nearest = min(others, key=lambda o: (abs(o[0] - rows), abs(o[1] - weight_bytes)), default=None)
            if nearest is None:
                return weight_bytes / _BYTES_A_MS * rows
            r, of, ms = nearest
            alike = {r: ms * weight_bytes / of}
        larger = [r for r in alike if r >= rows]
        return alike[min(larger)] if larger else alike[max(alike)] * rows / max(alike)

    def expected_prompt_ms(self, engine: EngineEntry, tokens: int) -> float:
        """Time of ``tokens`` of a prompt: until one has run, a step each, which is the most; until this engine has
        read one, what the engine nearest in size took, by the bytes of weights."""
        weight_bytes = engine.weight_bytes or 1
        if not self._prompts:
            return tokens * self.expected_ms(engine, 1)
        nearest = min(self._prompts.values(), key=lambda known: abs(known[1] - weight_bytes))
        each, of = self._prompts.get(engine.id, nearest)
        return tokens * each * weight_bytes / of

    def known(self, engines: Sequence[EngineEntry]) -> list[RunTime]:
        """Times of runs of one row that have run often enough to be believed: steps, and checks of several tokens."""
        found = []
        for engine in engines:
            steps, checks = self._steps.of(engine, _ENOUGH_RUNS), self._checks.of(engine, _ENOUGH_RUNS)
            times = {1: steps[1]} if 1 in steps else {}
            found += [RunTime(engine.id, tokens, ms) for tokens, ms in sorted((times | checks).items())]
        return found

    def start_from(self, engine: EngineEntry, time: RunTime) -> None:
        """Takes ``time`` for known until such runs show another."""
        (self._steps if time.tokens == 1 else self._checks).start_from(engine, time.tokens, time.ms)

    def is_known(self, engine: EngineEntry, rows: int) -> bool:
        """Whether such steps have run."""
        return (engine.id, rows) in self._steps.known

    def expected_checks_ms(self, engine: EngineEntry, most: int) -> list[float]:
        """Times of runs of 1 to ``most`` new tokens of one row: between sizes that have run in proportion, and beyond
        as long as the largest, which is the least."""
        known = {1: self.expected_ms(engine, 1)} | self._checks.of(engine)
        sizes = sorted(known)
        found: list[float] = np.interp(range(1, most + 1), sizes, [known[size] for size in sizes]).tolist()
        return found
