"""Submodels beside the universal model on the same samples: held-out ones of a compile, or the user's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...argument_types import checked, option
from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.figures import cell, heading, present
from ...bundle.manifest import Quality, SubmodelEntry
from ...bundle.open_bundle import Bundle, BundleOrPath, bundle_of
from ...bundle.roles import compared_outputs, continued_input
from ...elastic import ElasticSpec
from ...errors import InputError, SelectionError
from ...profiles.precision import Precision
from ...progress import Progress
from ...tables import as_html
from ..device.threads import threads_or_default
from ..engines.runner import runnable_engines, runner_for
from ..inputs.arrays import cut_back
from ..inputs.options import PROGRESS, SUBMODELS, THREADS
from ..inputs.text import TextEncoder
from .samples import Batch, Samples, TextSamples, different_rows, keyed, keyed_texts, read_array_samples
from .tallies import Tally, tally_for

# Engines that are open at once beside the universal model's, which runs again for the next ones.
_ENGINES_OPEN_AT_ONCE = 8
# More samples change figures in digits that nobody prints.
MOST_SAMPLES = 2000
LEAST_SAMPLES = 20


@dataclass(frozen=True)
class SubmodelFigures:
    """One submodel and its figures against the universal model, by the names of ``figures.FIGURES``.

    ``errors`` are the standard errors of figures. A submodel of a shorter sequence was compared on the ``samples`` that
    fit it; on none, it has no figures.
    """

    submodel: str
    labels: tuple[str, ...]
    parameters: int
    samples: int
    figures: Mapping[str, float]
    errors: Mapping[str, float]


@dataclass(frozen=True, repr=False)
class Consistency:
    """Subject of the comparison: ``outputs`` by their role, at ``bucket``, on ``samples`` of the ``given`` different
    ones.

    ``universal_precision`` is that of the universal model's engine, with which everything is compared: where it is not
    fp32 the figures leave out what that precision itself has cost.
    ``positions`` is how many positions the figures per position rest on, None where outputs have none; ``truncated``
    counts texts that were cut to the bucket; ``data_sha256`` is of the samples used.
    """

    bundle: str
    universal: str
    universal_precision: Precision
    bucket: Bucket
    outputs: Mapping[str, str]
    samples: int
    given: int
    truncated: int
    positions: int | None
    data_sha256: str
    submodels: tuple[SubmodelFigures, ...]

    def __repr__(self) -> str:
        return f"Consistency({self.bundle}: {len(self.submodels)} submodels, {self.samples} of {self.given} samples)"

    def _repr_html_(self) -> str:
        names = present(row.figures for row in self.submodels)
        rows = [
            ["/".join(row.labels) or "-", row.submodel, *(cell(row.figures, name, row.errors) for name in names)]
            for row in self.submodels
        ]
        return as_html(repr(self), (), ["labels", "submodel", *map(heading, names)], rows)


@checked
def consistency(
    bundle: BundleOrPath,
    *,
    text: str | os.PathLike[str] | Sequence[str] | None = option("UTF-8 file of texts, one a line.", metavar="FILE"),
    data: str | os.PathLike[str] | None = option(
        "NPZ file with an array per input, rows first, and perhaps 'labels' of a classifier.", metavar="FILE"
    ),
    submodels: Sequence[str] = SUBMODELS,
    threads: int | None = THREADS,
    progress: Progress = PROGRESS,
) -> Consistency:
    """How much of the universal model ``submodels`` keep on your own data.

    As ``nestforge consistency``: one of ``text``, which may be a list of texts too, and ``data``. Everything runs at
    the bucket with the longest sequence that all have, or have something in the place of. Where there are more than
    ``MOST_SAMPLES`` different samples, those with the smallest hashes are used.
    Raises InputError for data that do not fit or are too few, SelectionError for a submodel that the bundle does not
    have, for a bundle without its universal model, and for a model without an output that can be compared.
    """
    bundle = bundle_of(bundle)
    manifest = bundle.manifest
    compared = compared_outputs(manifest)
    if not compared:
        raise SelectionError(
            f"bundle {bundle.path}: no output of this model is a vector or logits, so none is compared"
        )
    entries = [manifest.submodel(name) for name in submodels] or list(manifest.submodels)
    known = [entry.id for entry in manifest.submodels]
    entries = sorted({e.id: e for e in entries}.values(), key=lambda e: (e.parameters, known.index(e.id)))
    universal, engines = _engines(bundle, entries)
    lines = Path(text) if isinstance(text, str | os.PathLike) else text
    samples, given = _samples(bundle, lines, None if data is None else Path(data))
    stage = "compare"
    progress(stage, 0, 1)
    report = partial(progress, stage)
    found = measure(bundle, universal, [universal, *engines], samples, threads_or_default(threads), report)
    measured = {engine.submodel: quality for engine, quality in found}
    progress(stage, 1, 1)
    return Consistency(
        bundle=str(bundle.path),
        universal=universal.submodel,
        universal_precision=universal.precision,
        bucket=universal.bucket,
        outputs={role: spec.name for role, spec in compared.items()},
        samples=samples.size,
        given=given,
        truncated=samples.truncated(universal.bucket),
        positions=measured[universal.submodel].positions,
        data_sha256=samples.sha256,
        submodels=tuple(
            SubmodelFigures(
                entry.id,
                entry.labels,
                entry.parameters,
                measured[entry.id].samples if entry.id in measured else 0,
                measured[entry.id].figures if entry.id in measured else {},
                (measured[entry.id].errors or {}) if entry.id in measured else {},
            )
            for entry in entries
        ),
    )


def _engines(bundle: Bundle, entries: Sequence[SubmodelEntry]) -> tuple[EngineEntry, list[EngineEntry]]:
    """The universal model's engine and those of ``entries``, at one bucket that all have."""
    whole = {(e.submodel, e.bucket): e for e in runnable_engines(bundle) if e.segment is None}
    universal = ElasticSpec(bundle.manifest.axes, ()).universal().id
    if not any(name == universal for name, _ in whole):
        raise SelectionError(
            f"bundle {bundle.path}: has no engine of the universal model, with which submodels are compared; compile "
            "it with one"
        )
    shared = [
        bucket
        for bucket in (bucket for name, bucket in whole if name == universal)
        if all((entry.id, entry.at(bucket)) in whole for entry in entries)
    ]
    if not shared:
        wanted = sorted({universal, *(entry.id for entry in entries)})
        raise SelectionError(f"bundle {bundle.path}: no bucket has engines of all of {', '.join(wanted)}")
    bucket = max(shared, key=lambda b: (b.sequence, -b.batch))
    return whole[universal, bucket], [whole[entry.id, entry.at(bucket)] for entry in entries if entry.id != universal]


def _samples(bundle: Bundle, text: Path | Sequence[str] | None, data: Path | None) -> tuple[Samples, int]:
    """The samples to use, and of how many different ones."""
    manifest = bundle.manifest
    if (text is None) == (data is None):
        raise InputError("text and data: expected exactly one of them")
    if data is not None:
        rows = read_array_samples(data, manifest)
        numbers = [row for _, row in different_rows(rows)]
        _check_enough(data, len(numbers), "rows")
        return rows.take(numbers[:MOST_SAMPLES]), len(numbers)
    assert text is not None
    name = text if isinstance(text, Path) else "text"
    if manifest.text is None:
        raise InputError(f"{name}: bundle {bundle.path} has no tokenizer; pass arrays as .npz instead of text")
    texts = [line for _, line in (keyed_texts(text, InputError) if isinstance(text, Path) else keyed(text))]
    _check_enough(name, len(texts), "texts, one per line")
    encoder = TextEncoder(bundle.file(manifest.text.file), manifest.text, manifest.inputs)
    return TextSamples(encoder, tuple(texts[:MOST_SAMPLES])), len(texts)


def _check_enough(path: Path | str, count: int, what: str) -> None:
    if count < LEAST_SAMPLES:
        raise InputError(f"{path}: {count} different {what}; expected at least {LEAST_SAMPLES}")


def measure(
    bundle: Bundle,
    universal: EngineEntry,
    engines: Sequence[EngineEntry],
    samples: Samples,
    threads: int,
    tick: Callable[[int, int], None],
    reference: Bundle | None = None,
) -> Iterator[tuple[EngineEntry, Quality]]:
    """Yields engines with their figures against ``universal``; nothing where no output can be compared
    (``compared_outputs``).

    Engines have the universal's bucket, or a shorter sequence and as many rows. Each model runs at its own, on
    the samples that fit the shorter, and positions behind it are not compared; an engine that no sample fits is left
    out. ``universal`` lies in the bundle ``reference``, by default in ``bundle``. At most one batch of two models'
    outputs is held at a time. ``tick(done, total)`` counts batches. Raises
    InputError for samples that do not fit, or outputs that are not finite.
    """
    if not compared_outputs(bundle.manifest):
        return
    groups = list(_groups(bundle, universal, engines, samples))
    batches = [-(-part.size // universal.bucket.batch) for _, part in groups]
    for index, (group, part) in enumerate(groups):

        def progress(done: int, before: int = sum(batches[:index])) -> None:
            tick(before + done, sum(batches))

        measured = _measure(bundle, reference or bundle, universal, group, part, threads, progress)
        yield from zip(group, measured, strict=True)


def _groups(
    bundle: Bundle, universal: EngineEntry, engines: Sequence[EngineEntry], samples: Samples
) -> Iterator[tuple[list[EngineEntry], Samples]]:
    """Engines of one bucket that are open at once, in order, and the samples that they take."""
    for bucket in dict.fromkeys(engine.bucket for engine in engines):
        own = [engine for engine in engines if engine.bucket == bucket]
        part = samples if bucket == universal.bucket else samples.fitting(bundle.manifest, bucket.sequence)
        for start in range(0, len(own) if part is not None else 0, _ENGINES_OPEN_AT_ONCE):
            assert part is not None
            yield own[start : start + _ENGINES_OPEN_AT_ONCE], part


def _measure(
    bundle: Bundle,
    reference: Bundle,
    universal: EngineEntry,
    engines: Sequence[EngineEntry],
    samples: Samples,
    threads: int,
    progress: Callable[[int], None],
) -> list[Quality]:
    outputs = bundle.manifest.outputs
    names = [spec.name for spec in outputs]
    compared = compared_outputs(bundle.manifest)
    ids = continued_input(bundle.manifest)
    bucket = engines[0].bucket
    tallies = [[tally_for(role, spec, ids) for role, spec in compared.items()] for _ in engines]
    places = [names.index(spec.name) for spec in compared.values()]
    with ExitStack() as stack:
        whole_runner = stack.enter_context(runner_for(reference, universal, "shared", threads))
        runners = {
            file: stack.enter_context(runner_for(bundle, engine, "shared", threads))
            for file, engine in {engine.file: engine for engine in engines}.items()
            if reference is not bundle or file != universal.file
        }
        for done, (batch, whole) in enumerate(_batches(bundle, samples, bucket, universal.bucket)):
            progress(done)
            wanted = whole_runner.run(whole.feeds)
            if bucket != universal.bucket:
                wanted = cut_back(wanted, outputs, bucket)
            for engine, own in zip(engines, tallies, strict=True):
                found = runners[engine.file].run(batch.feeds) if engine.file in runners else wanted
                for tally, place in zip(own, places, strict=True):
                    tally.add(batch, wanted[place], found[place])
    return [_quality(own, samples) for own in tallies]


def _batches(bundle: Bundle, samples: Samples, bucket: Bucket, universal: Bucket) -> Iterator[tuple[Batch, Batch]]:
    """The same samples at both buckets."""
    own = samples.batches(bundle.manifest, bucket)
    if bucket == universal:
        return ((batch, batch) for batch in own)
    return zip(own, samples.batches(bundle.manifest, universal), strict=True)


def _quality(tallies: Sequence[Tally], samples: Samples) -> Quality:
    # Engines compute in float32: what is behind these digits changes with the host and its threads.
    means = {name: mean for tally in tallies for name, mean in tally.figures().items()}
    figures = {name: float(f"{mean.mean:.6g}") for name, mean in means.items()}
    errors = {name: float(f"{round(mean.error, 8):.2g}") for name, mean in means.items() if mean.error is not None}
    positions = next((tally.positions for tally in tallies if tally.positions is not None), None)
    return Quality(samples.size, figures, samples.sha256, positions, errors or None)
