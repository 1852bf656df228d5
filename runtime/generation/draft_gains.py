"""The worth of drafts: how many of their tokens are accepted, and what drafting and checking them takes.

This process learns it as it generates. ``nestforge calibrate`` notes it for a host in ``drafts.json``, a file that a
device adds to a bundle's folder: sealed (bundle/device_files/device_file.py), and with the manifest's hash. It replaces
the figures of its own host and leaves those of others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ...bundle.device_files.device_file import HostRecord, HostRecords
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.manifest import DRAFTS_NAME
from ...bundle.open_bundle import Bundle
from .options import NGRAM
from .step_times import RunTime, StepTimes

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
