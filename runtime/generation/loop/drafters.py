"""Which drafting a request gets: its draft found and checked against the submodel that writes."""

from __future__ import annotations

from collections.abc import Collection

from ....errors import InputError, SelectionError
from ...bundle.manifest import EngineEntry, Manifest
from .drafting import AskedDraft, Drafting
from .drafts import NGRAM, Draft, NgramDraft, SubmodelDraft
from .session import Session
from .step_times import StepTimes

_DRAFTED = 4


def drafting_for(
    manifest: Manifest,
    draft: str,
    drafted: int | None,
    target: EngineEntry,
    admitted: Collection[str],
    rows: int,
    session: Session,
    times: StepTimes,
) -> Drafting:
    """By ``draft`` (a submodel's id or label, or "n-gram"), ``drafted`` tokens a run, for ``target``, which writes.
    ``admitted`` are the ids of engines that may be open here. Raises InputError, SelectionError."""
    most = target.bucket.sequence - 1
    if drafted is not None and drafted > most:
        raise InputError(f"drafted: expected at most {most}, one less than a run of {target.id} takes, got {drafted}")
    if rows > 1:
        raise InputError(f"draft: tokens are drafted for one row, got {rows} prompts; call once for each")
    found: Draft = NgramDraft()
    if draft != NGRAM:
        found = SubmodelDraft(_smaller(manifest, draft, target, admitted), session, times)
    return AskedDraft(found, min(_DRAFTED, most) if drafted is None else drafted)


def smaller_engines(manifest: Manifest, target: EngineEntry, admitted: Collection[str]) -> list[EngineEntry]:
    """Those that may draft for ``target``, the largest submodel's first."""
    assert manifest.generation is not None
    order = [entry.id for entry in manifest.largest_first]
    by_submodel = {engine.submodel: engine for engine in manifest.generation.engines if engine.id in admitted}
    behind = order[order.index(target.submodel) + 1 :]
    return [by_submodel[submodel] for submodel in behind if submodel in by_submodel]


def _smaller(manifest: Manifest, draft: str, target: EngineEntry, admitted: Collection[str]) -> EngineEntry:
    try:
        wanted = manifest.submodel(draft).id
    except SelectionError as failure:
        raise SelectionError(f"draft: {failure}; or {NGRAM}") from failure
    smaller = smaller_engines(manifest, target, admitted)
    found = next((engine for engine in smaller if engine.submodel == wanted), None)
    if found is None:
        raise SelectionError(
            f"draft {wanted}: expected a submodel that generates here and is smaller than {target.submodel}, which "
            f"writes: {', '.join(engine.submodel for engine in smaller) or 'there is none'}; or {NGRAM}"
        )
    return found
