"""Which drafting a request gets: its draft found and checked against the submodel that writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.manifest import Manifest
from ....errors import InputError, SelectionError
from ..calls.options import Options
from ..calls.session import Session
from ..lookup import NGRAM
from ..sampling import Sampling
from .drafting import AskedDraft, BestDraft, Drafting
from .drafts import AUTO, Draft, NgramDraft, SubmodelDraft
from .gains import Gains

# Tokens of a run.
_ASKED, _MOST = 4, 8


def most_checked(asked: Options) -> int:
    """How many tokens a run checks at most: the drafted ones and the last of the text; 0 without a draft."""
    if asked.draft is None:
        return 0
    return 1 + (asked.drafted or (_MOST if asked.draft == AUTO else _ASKED))


def drafting_for(
    manifest: Manifest,
    asked: Options,
    sampling: Sampling,
    target: EngineEntry,
    smaller: Sequence[EngineEntry],
    session: Session,
    gains: Gains,
) -> Drafting:
    """As ``asked``, for one row that ``target`` writes, with the engines that are ``smaller``. Raises InputError,
    SelectionError."""
    assert asked.draft is not None
    limit = target.bucket.sequence - 1
    if asked.drafted is not None and asked.drafted > limit:
        raise InputError(
            f"drafted: expected at most {limit}, one less than a run of {target.id} takes, got {asked.drafted}"
        )
    if asked.draft == AUTO:
        if asked.seed is not None and not sampling.greedy:
            raise InputError(
                f"seed: with draft {AUTO} what is drafted depends on times, so that no seed repeats a text; name a "
                "draft"
            )
        submodels = [SubmodelDraft(engine, session, gains.times) for engine in _likely(smaller, target)]
        return BestDraft([NgramDraft(), *submodels], asked.drafted or min(_MOST, limit), target, gains)
    draft: Draft = NgramDraft()
    if asked.draft != NGRAM:
        draft = SubmodelDraft(_named(manifest, asked.draft, target, smaller), session, gains.times)
    return AskedDraft(draft, asked.drafted or min(_ASKED, limit), target, gains)


def smaller_engines(manifest: Manifest, target: EngineEntry, admitted: Collection[str]) -> list[EngineEntry]:
    """The ``admitted`` ids that may draft for ``target``, the largest submodel's first: those that read its cache."""
    assert manifest.generation is not None
    order = [entry.id for entry in manifest.largest_first]
    by_submodel = {engine.submodel: engine for engine in manifest.generation.writers if engine.id in admitted}
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
        alike = generation is None or all(engine.kept == target.kept for engine in generation.engines)
        heads = "" if alike else " (heads of its size, and no layer with more, or it could not read its cache)"
        able = ", ".join(engine.submodel for engine in smaller) or "there is none"
        raise SelectionError(
            f"draft {wanted}: expected a submodel that generates here and is smaller than {target.submodel}, which "
            f"writes{heads}: {able}; or {NGRAM}, or {AUTO}"
        )
    return found


def _likely(smaller: Sequence[EngineEntry], target: EngineEntry) -> list[EngineEntry]:
    """The smallest, and the one nearest to half of the target: each is a copy of its weights more."""
    if not smaller:
        return []
    half = min(smaller, key=lambda engine: abs(2 * (engine.weight_bytes or 0) - (target.weight_bytes or 0)))
    return [half] if half is smaller[-1] else [half, smaller[-1]]
