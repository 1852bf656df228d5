"""The worth of drafts: how many of their tokens are accepted, and what drafting and checking them takes; and the
time of a step of each submodel, as the steps of this model have shown.

This process learns it as it generates. ``nestforge calibrate`` notes it for a host in ``drafts.json``, a file that a
device adds to a bundle's folder: sealed (bundle/device_files/device_file.py), and with the manifest's hash. It replaces
the figures of its own host and leaves those of others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ...bundle.device_files.device_file import HostRecord, HostRecords
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.manifest import DRAFTS_NAME
from ...bundle.open_bundle import Bundle
from .options import NGRAM

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
        return np.interp(range(1, most + 1), sizes, [known[size] for size in sizes]).tolist()


# Acceptance hoped of a draft that has not been judged: it is tried, and a few refusals end it.
_HOPED_SHARE, _HOPED_TOKENS = 0.7, 4.0
# Judged tokens that count: older ones are forgotten.
_MOST_JUDGED = 64.0
# Share of them that counts in a later generation, so that a draft that did not pay is tried again on another text.
_CARRIED_OVER = 0.5


@dataclass(frozen=True)
class JudgedDraft:
    """Tokens of ``draft``, a submodel or n-gram, that the engine ``target`` checked: ``judged`` up to the first that
    was refused, ``accepted`` of them. Older ones count less, so that neither is a whole number."""

    target: str
    draft: str
    accepted: float = field(metadata={"min": 0})
    judged: float = field(metadata={"min": 0})


@dataclass(frozen=True)
class HostDrafts(HostRecord):
    """Findings of one host on so many ``texts``."""

    texts: int = field(metadata={"min": 1})
    times: tuple[RunTime, ...]
    drafts: tuple[JudgedDraft, ...]


@dataclass(frozen=True)
class DraftCalibration(HostRecords[HostDrafts]):
    """The calibrations of one bundle."""

    name = DRAFTS_NAME
    mend = "remove it and run `nestforge calibrate` again"
    lost = "the calibration"

    hosts: tuple[HostDrafts, ...]

    @staticmethod
    def record_problems(record: HostDrafts, bundle: Bundle) -> Iterator[str]:
        """Engines and submodels that exist, and shares of them."""
        generation = bundle.manifest.generation
        engines = {engine.id: engine.submodel for engine in generation.engines} if generation else {}
        for engine in (*(time.engine for time in record.times), *(draft.target for draft in record.drafts)):
            if engine not in engines:
                yield f"engine {engine[:80]!r} does not generate in this bundle"
        for draft in record.drafts:
            if draft.draft not in (NGRAM, *engines.values()):
                yield f"draft {draft.draft[:80]!r} is no submodel that generates in this bundle"
            if draft.accepted > draft.judged:
                yield f"draft {draft.draft[:80]}: {draft.accepted} accepted of {draft.judged}"


class Gain(NamedTuple):
    """``drafted`` tokens of ``draft`` in a run are expected to be ``factor`` times as fast as steps."""

    draft: str
    drafted: int
    factor: float


class Gains:
    """The gains of drafts of one model, by who checks and who drafts.

    Threads may share it: of two that count at once, one may not count.
    """

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._judged: dict[tuple[str, str], tuple[float, float]] = {}  # tokens: accepted, and in all

    def begin(self, target: EngineEntry) -> None:
        """A generation begins that ``target`` checks."""
        for key, (accepted, judged) in list(self._judged.items()):
            if key[0] == target.id:
                self._judged[key] = _CARRIED_OVER * accepted, _CARRIED_OVER * judged

    def found(self, engines: Sequence[EngineEntry]) -> tuple[list[RunTime], list[JudgedDraft]]:
        """Figures learned of ``engines``."""
        judged = [JudgedDraft(*key, accepted, judged) for key, (accepted, judged) in list(self._judged.items())]
        return self.times.known(engines), judged

    def start_from(self, found: HostDrafts, engines: Sequence[EngineEntry]) -> None:
        """Takes what a calibration ``found`` for learned, where nothing was."""
        by_id = {engine.id: engine for engine in engines}
        for time in found.times:
            self.times.start_from(by_id[time.engine], time)
        for draft in found.drafts:
            self._judged.setdefault((draft.target, draft.draft), (draft.accepted, draft.judged))

    def checked(self, target: EngineEntry, draft: str, drafted: int, judged: int, accepted: int, ms: float) -> None:
        """Counts a run of ``ms`` that checked ``drafted`` tokens of ``draft``'s: ``judged`` up to the first that was
        refused."""
        self.times.ran_check(target, drafted + 1, ms)
        before = self._judged.get((target.id, draft), (0.0, 0.0))
        kept = min(1.0, _MOST_JUDGED / (before[1] + judged))
        self._judged[target.id, draft] = kept * (before[0] + accepted), kept * (before[1] + judged)

    def share(self, target: EngineEntry, draft: str) -> float:
        """How likely a drafted token is expected to be accepted where those before it were."""
        accepted, judged = self._judged.get((target.id, draft), (0.0, 0.0))
        return (accepted + _HOPED_SHARE * _HOPED_TOKENS) / (judged + _HOPED_TOKENS)

    def ranked(self, target: EngineEntry, drafts: Mapping[str, float], most: int) -> list[Gain]:
        """The largest gain of each of ``drafts``, names with the milliseconds of a token, with 1 to ``most`` tokens,
        also where it is a loss; the largest first. None until the time of ``target``'s steps is known."""
        if most < 1 or not self.times.is_known(target, 1):
            return []
        step_ms = self.times.expected_ms(target, 1)
        checks_ms = self.times.expected_checks_ms(target, most + 1)
        found = []
        for draft, drafted_ms in drafts.items():
            share = self.share(target, draft)
            # One token is picked behind the accepted ones (Leviathan et al. 2023, equation 1).
            tokens, likely = 1.0, 1.0
            each = []
            for count in range(1, most + 1):
                likely *= share
                tokens += likely
                each.append(Gain(draft, count, tokens * step_ms / (count * drafted_ms + checks_ms[count])))
            found.append(max(each, key=attrgetter("factor")))
        return sorted(found, key=attrgetter("factor"), reverse=True)
