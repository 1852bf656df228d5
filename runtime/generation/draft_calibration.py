"""What hosts found of drafts: what ``drafts.json`` in a bundle's folder holds, by host.

It is a file that a device adds, sealed (bundle/device_files/device_file.py), and names the manifest's hash.
``nestforge calibrate`` replaces the figures of its own host and leaves those of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...bundle.device_files.device_file import (
    DEVICE_SCHEMA_VERSION,
    MeasuredHost,
    nearest_record,
    read_record,
    record_problems,
    with_record,
    write_device_file,
)
from ...bundle.manifest import DRAFTS_NAME
from ...bundle.open_bundle import Bundle
from ...file_lock import alone
from ...strict import unstructure
from .lookup import NGRAM

_REMEDY = "remove it and run `nestforge calibrate` again"


@dataclass(frozen=True)
class JudgedDraft:
    """Of the tokens of ``draft``, a submodel or n-gram, that the engine ``target`` checked, ``judged`` up to the first
    that was refused: ``accepted`` of them were kept. Older ones count less, so that neither is a whole number."""

    target: str
    draft: str
    accepted: float = field(metadata={"min": 0})
    judged: float = field(metadata={"min": 0})


@dataclass(frozen=True)
class RunTime:
    """What a run of so many new ``tokens`` of one row takes, in milliseconds: of 1 a step, of more a check."""

    engine: str
    tokens: int = field(metadata={"min": 1})
    ms: float = field(metadata={"min": 0})


@dataclass(frozen=True)
class HostDrafts:
    """What ``host`` found with ``threads`` cores per run on so many ``texts``; ``created`` is the time in UTC."""

    host: MeasuredHost
    threads: int = field(metadata={"min": 1})
    created: str
    texts: int = field(metadata={"min": 1})
    times: tuple[RunTime, ...]
    drafts: tuple[JudgedDraft, ...]


@dataclass(frozen=True)
class DraftCalibration:
    """Of one bundle: one for each host and number of threads."""

    schema_version: int
    manifest_sha256: str
    hosts: tuple[HostDrafts, ...]

    def of(self, host: MeasuredHost, threads: int) -> HostDrafts | None:
        """What ``host`` found with this number of threads, or the nearest to it."""
        return nearest_record(self.hosts, host, threads)


def read_drafts(bundle: Bundle) -> DraftCalibration | None:
    """What is in the bundle's folder, or None where there is nothing.

    Raises BundleFormatError for what is malformed, BundleCorruptError for a wrong seal or that of another manifest.
    """
    return read_record(bundle, DRAFTS_NAME, DraftCalibration, _problems, _REMEDY)


def keep_drafts(bundle: Bundle, found: HostDrafts) -> Path:
    """Puts ``found`` in the place of an earlier one of its host and threads, beside those of others.

    Raises OutputError where it cannot be written, or there are too many hosts; BundleError where what is there cannot
    be read.
    """
    with alone(bundle.path):
        kept = read_drafts(bundle)
        hosts = with_record(kept.hosts if kept else (), found, bundle.path / DRAFTS_NAME)
        every = DraftCalibration(DEVICE_SCHEMA_VERSION, bundle.build.manifest_sha256, hosts)
        return write_device_file(bundle, DRAFTS_NAME, unstructure(every), "the calibration")


def _problems(found: DraftCalibration, bundle: Bundle) -> Iterable[str]:
    """What the types alone do not say: engines and submodels that exist, and shares of them."""
    generation = bundle.manifest.generation
    engines = {engine.id: engine.submodel for engine in generation.engines} if generation else {}
    yield from record_problems(found.schema_version, found.hosts)
    for number, each in enumerate(found.hosts):
        where = f"hosts[{number}]"
        for engine in (*(time.engine for time in each.times), *(draft.target for draft in each.drafts)):
            if engine not in engines:
                yield f"{where}: engine {engine[:80]!r} does not generate in this bundle"
        for draft in each.drafts:
            if draft.draft not in (NGRAM, *engines.values()):
                yield f"{where}: draft {draft.draft[:80]!r} is no submodel that generates in this bundle"
            if draft.accepted > draft.judged:
                yield f"{where}: draft {draft.draft[:80]}: {draft.accepted} accepted of {draft.judged}"
