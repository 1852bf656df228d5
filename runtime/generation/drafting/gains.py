"""What drafts are worth: how many of their tokens are accepted, and what drafting and checking them takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....bundle.entries.engine_entry import EngineEntry
from ..calls.step_times import StepTimes
from ..draft_calibration import HostDrafts, JudgedDraft, RunTime
from .drafts import Draft

# Of a draft that has not been judged: it is tried, and a few refusals end it.
_HOPED_SHARE, _HOPED_TOKENS = 0.7, 4.0
# Of the judged tokens that count: older ones are forgotten.
_MOST_JUDGED = 64.0
# What a later generation keeps of them, so that a draft that did not pay is tried again on another text.
_KEPT = 0.5


class Gain(NamedTuple):
    """``drafted`` tokens of ``draft`` in a run are expected to write ``factor`` times as fast as steps."""

    draft: Draft
    drafted: int
    factor: float


class Gains:
    """Of one model, by who checks and who drafts.

    Threads may share it: of two that count at once, one may not count.
    """

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._judged: dict[tuple[str, str], tuple[float, float]] = {}  # tokens: accepted, and in all

    def begin(self, target: EngineEntry) -> None:
        """A generation begins that ``target`` checks."""
        for key, (accepted, judged) in list(self._judged.items()):
            if key[0] == target.id:
                self._judged[key] = _KEPT * accepted, _KEPT * judged

    def found(self, engines: Sequence[EngineEntry]) -> tuple[list[RunTime], list[JudgedDraft]]:
        """What was learned of ``engines``."""
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

    def ranked(self, target: EngineEntry, drafts: Sequence[Draft], most: int) -> list[Gain]:
        """Of each of ``drafts`` its largest gain with 1 to ``most`` tokens, also where it is a loss; the largest first.
        None until the time of ``target``'s steps is known."""
        if most < 1 or not self.times.is_known(target, 1):
            return []
        step_ms = self.times.expected_ms(target, 1)
        checks_ms = self.times.expected_checks_ms(target, most + 1)
        found = []
        for draft in drafts:
            share, drafted_ms = self.share(target, draft.name), draft.expected_ms
            # One token is picked behind the accepted ones (Leviathan et al. 2023, equation 1).
            tokens, likely = 1.0, 1.0
            each = []
            for count in range(1, most + 1):
                likely *= share
                tokens += likely
                each.append(Gain(draft, count, tokens * step_ms / (count * drafted_ms + checks_ms[count])))
            found.append(max(each, key=_factor))
        return sorted(found, key=_factor, reverse=True)


def _factor(gain: Gain) -> float:
    return gain.factor
