"""Engines beside the universal model's on the same samples, batch by batch: a submodel's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.manifest import Quality
from ...bundle.open_bundle import Bundle
from ...bundle.roles import compared_outputs, continued_input
from ..engines.runner import runner_for
from ..inputs.arrays import cut_back
from .samples import Batch, Samples
from .tallies import Tally, tally_for

# Engines that are open at once beside the universal model's, which runs again for the next ones.
_ENGINES_OPEN_AT_ONCE = 8


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

    Engines have the universal's bucket, or a shorter sequence and as many rows. Of those each model runs at its own, on
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
