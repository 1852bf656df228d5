"""Speculative decoding of one row: who drafts tokens, a smaller submodel on the same KV cache or the text itself, and
how many of them in each run."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.manifest import Manifest
from ...errors import InputError, SelectionError
from .draft_gains import Gain, Gains, StepTimes
from .options import AUTO, NGRAM, GenerationRequest
from .pace import Chosen
from .row import Row
from .sampling import Drafted, Ids, Sampling
from .session import Session

# Tokens of a run, where nobody says how many: of a named draft, and the most with AUTO.
_DEFAULT, _MOST = 4, 8
# A gain below it is not worth the noise of the figures.
_LEAST_GAIN = 1.05
# Tokens at the end of the text that must be alike: one alone says too little of what follows.
_FEWEST_ALIKE, _MOST_ALIKE = 2, 3


class Draft(ABC):
    """Proposes the next tokens of one row. ``name`` is what answers call it, ``expected_ms`` the time of a token."""

    name: str
    expected_ms: float

    def bind(self) -> None:  # noqa: B027  (most have nothing to open)
        """Opens what it needs, so that no token waits for that. Raises SelectionError where a memory cap does not allow
        it."""

    def can_propose(self, row: Row) -> bool:  # noqa: ARG002
        """Whether ``propose`` would return anything."""
        return True

    @abstractmethod
    def propose(self, row: Row, count: int) -> list[Drafted]:
        """``count`` tokens behind the row's last, fewer than it has left; or none."""


class SubmodelDraft(Draft):
    """A submodel smaller than the one that checks. Its steps read the other's keys and add their own behind them, which
    the check overwrites (MatFormer, appendix C.1)."""

    def __init__(self, engine: EngineEntry, session: Session, times: StepTimes) -> None:
        self.name, self._engine, self._session, self._times = engine.submodel, engine, session, times

    @property
    def expected_ms(self) -> float:  # type: ignore[override]  # it follows what steps take
        return self._times.expected_ms(self._engine, 1)

    def bind(self) -> None:
        self._session.bind(self._engine, 1, reads_prompts=False)

    def propose(self, row: Row, count: int) -> list[Drafted]:
        drafted: list[Drafted] = []
        token = row.last
        for ahead in range(count):
            started = perf_counter()
            logits = self._session.draft(token, ahead, self._engine)
            self._times.ran(self._engine, 1, 1e3 * (perf_counter() - started))
            try:
                drafted.append(row.draft(logits, ahead))
            except InputError as failure:  # not of the submodel that checks
                raise InputError(f"draft {self.name}: {failure}") from failure
            token = drafted[-1].token
        return drafted


class NgramDraft(Draft):
    """The tokens that followed the last ones where the row had them before, or the prompt that its encoder read."""

    name, expected_ms = NGRAM, 0.0

    def can_propose(self, row: Row) -> bool:
        return bool(self.propose(row, 1))

    def propose(self, row: Row, count: int) -> list[Drafted]:
        return [Drafted(token) for token in look_up(row.seen, count).tolist()]


def look_up(tokens: Ids, count: int) -> Ids:
    """``count`` tokens that followed where ``tokens`` ``[T]`` ended alike before: at the last such place, of those with
    the most tokens alike. A find that is shorter reaches into itself. None where there is no such place.

    Texts that repeat their prompt (summaries, edited code, answers that quote) go on as they did before (Saxena 2023,
    "prompt lookup decoding").
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    alike = 1
    while len(ends) and alike < _MOST_ALIKE:
        longer = ends[ends >= alike]
        longer = longer[tokens[longer - alike] == tokens[-1 - alike]]
        if not len(longer):
            break
        ends, alike = longer, alike + 1
    if alike < _FEWEST_ALIKE:  # also where the last token was not there before
        return tokens[:0]
    start = ends[-1] + 1
    return tokens[start + np.arange(count) % (len(tokens) - start)]


class Proposal(NamedTuple):
    """The next run of a row: ``chosen`` checks the ``drafted`` tokens of the draft of this name, or steps where there
    are none."""

    chosen: Chosen
    draft: str
    drafted: list[Drafted]


class Drafting:
    """The drafting of one row: the first of ``drafts`` in every run, with at most ``most`` tokens that ``target``
    checks; ``gains`` learns from it."""

    def __init__(self, drafts: Sequence[Draft], most: int, target: EngineEntry, gains: Gains) -> None:
        self._drafts, self._most, self._target, self._gains = list(drafts), most, target, gains

    @property
    def reason(self) -> str:
        """Its part of the reason for a submodel."""
        return f"drafted by {self._drafts[0].name}, at most {self._most} a run"

    def bind(self) -> None:
        """Opens what it may need."""
        self._drafts[0].bind()

    def propose(self, row: Row, chosen: Chosen) -> Proposal:
        """For the next run of ``row``, which ``chosen`` generates."""
        # One more token than is drafted is picked.
        drafted = self._drafts[0].propose(row, min(self._most, row.tokens_left - 1))
        return Proposal(chosen, self._drafts[0].name, drafted)

    def checked(self, proposal: Proposal, judged: int, accepted: int, ms: float) -> None:
        """Counts a run of ``ms`` that checked a proposal: ``judged`` of its tokens, ``accepted`` of them."""
        self._gains.checked(self._target, proposal.draft, len(proposal.drafted), judged, accepted, ms)


class BestDraft(Drafting):
    """In every run the draft and the number of its tokens that are expected to be fastest; none of ``drafts`` where
    steps are. By what runs of this model took, and how many of the tokens were accepted."""

    reason = f"draft {AUTO}"

    def __init__(self, drafts: Sequence[Draft], most: int, target: EngineEntry, gains: Gains) -> None:
        super().__init__(drafts, most, target, gains)
        self._left_out = self._said = (
            ""  # for reasons: drafts that a memory cap does not allow, and what was judged last
        )
        self._drafter: str | None = None  # the submodel that drafts, "" for none, None until one was judged

    def bind(self) -> None:
        self._gains.begin(self._target)
        left_out = []
        for draft in list(self._drafts):
            try:
                draft.bind()
            except SelectionError:
                self._drafts.remove(draft)
                left_out.append(draft.name)
        if left_out:
            self._left_out = f" without {', '.join(left_out)}, for which the memory cap has no room"

    def propose(self, row: Row, chosen: Chosen) -> Proposal:
        able = {draft.name: draft for draft in self._drafts if draft.can_propose(row)}
        times = {name: draft.expected_ms for name, draft in able.items()}
        ranked = self._gains.ranked(self._target, times, min(self._most, row.tokens_left - 1))
        best = next((gain for gain in ranked[:1] if gain.factor >= _LEAST_GAIN), None)
        if ranked and (best is None or best.draft != NGRAM):  # which comes and goes with the text
            self._judge("" if best is None else best.draft, ranked)
        chosen = Chosen(chosen.engine, f"{chosen.reason}{self._left_out}{self._said}")
        if best is None:
            return Proposal(chosen, "", [])
        return Proposal(chosen, best.draft, able[best.draft].propose(row, best.drafted))

    def _judge(self, drafter: str, ranked: Sequence[Gain]) -> None:
        """Reasons say from now on that ``drafter`` drafts, or nothing does, where they said another."""
        if drafter != self._drafter:
            expected = ", ".join(f"{gain.draft} {gain.factor:.2f}" for gain in ranked)
            who = f"{drafter} drafts" if drafter else "nothing drafted"
            self._drafter, self._said = drafter, f": {who}; expected times as fast as steps: {expected}"


def most_checked(request: GenerationRequest) -> int:
    """How many tokens a run checks at most: the drafted ones and the last of the text; 0 without a draft."""
    if request.draft is None:
        return 0
    return 1 + (request.drafted or (_MOST if request.draft == AUTO else _DEFAULT))


def drafting_for(
    manifest: Manifest,
    request: GenerationRequest,
    sampling: Sampling,
    target: EngineEntry,
    smaller: Sequence[EngineEntry],
    session: Session,
    gains: Gains,
) -> Drafting:
    """The drafting of ``request``, for one row that ``target`` generates, with the engines that are ``smaller``. Raises
    InputError, SelectionError."""
    assert request.draft is not None
    limit = target.bucket.sequence - 1
    if request.drafted is not None and request.drafted > limit:
        raise InputError(
            f"drafted: expected at most {limit}, one less than a run of {target.id} takes, got {request.drafted}"
        )
    if request.draft == AUTO:
        if request.seed is not None and not sampling.greedy:
            raise InputError(
                f"seed: with draft {AUTO} what is drafted depends on times, so that no seed repeats a text; name a "
                "draft"
            )
        submodels = [SubmodelDraft(engine, session, gains.times) for engine in _likely(smaller, target)]
        return BestDraft([NgramDraft(), *submodels], request.drafted or min(_MOST, limit), target, gains)
    draft: Draft = NgramDraft()
    if request.draft != NGRAM:
        draft = SubmodelDraft(_named(manifest, request.draft, target, smaller), session, gains.times)
    return Drafting([draft], request.drafted or min(_DEFAULT, limit), target, gains)


def smaller_engines(manifest: Manifest, target: EngineEntry, admitted: Collection[str]) -> list[EngineEntry]:
    """The ``admitted`` ids that may draft for ``target``, the largest submodel's first: those that read its cache."""
    assert manifest.generation is not None
    order = [entry.id for entry in manifest.largest_first]
    by_submodel = {engine.submodel: engine for engine in manifest.generation.generators if engine.id in admitted}
    behind = order[order.index(target.submodel) + 1 :]
    found = [by_submodel[submodel] for submodel in behind if submodel in by_submodel]
    return [engine for engine in found if engine.can_continue(target)]


def _named(manifest: Manifest, draft: str, target: EngineEntry, smaller: Sequence[EngineEntry]) -> EngineEntry:
    try:
        wanted = manifest.submodel(draft).id
    except SelectionError as failure:
        raise SelectionError(f"draft: {failure}; or {NGRAM}, or {AUTO}") from failure
    found = next((engine for engine in smaller if engine.submodel == wanted), None)
    if found is None:
        generation = manifest.generation
        alike = generation is None or all(engine.cache_layout == target.cache_layout for engine in generation.engines)
        heads = "" if alike else " (heads of its size, and no layer with more, or it could not read its cache)"
        able = ", ".join(engine.submodel for engine in smaller) or "there is none"
        raise SelectionError(
            f"draft {wanted}: expected a submodel that generates here and is smaller than {target.submodel}, which "
            f"checks{heads}: {able}; or {NGRAM}, or {AUTO}"
        )
    return found


def _likely(smaller: Sequence[EngineEntry], target: EngineEntry) -> list[EngineEntry]:
    """The smallest, and the one nearest to half of the target: each is a copy of its weights more."""
    if not smaller:
        return []
    half = min(smaller, key=lambda engine: abs(2 * (engine.weight_bytes or 0) - (target.weight_bytes or 0)))
    return [half] if half is smaller[-1] else [half, smaller[-1]]
