"""Engines beside the universal model's on the same samples, batch by batch: a submodel's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ..bundle import Bundle
from ..manifest import EngineEntry, Quality
from ..runner import runner_for
from .roles import compared_outputs, ids_input
from .samples import Samples
from .tallies import Tally, tally_for

# Engines that are open at once beside the universal model's, which runs again for the next ones.
_AT_ONCE = 8


def measure(
    bundle: Bundle,
    universal: EngineEntry,
    engines: Sequence[EngineEntry],
    samples: Samples,
    threads: int,
    tick: Callable[[int, int], None],
) -> Iterator[tuple[EngineEntry, Quality]]:
    """Yields every engine with its figures against ``universal``, all at its bucket; nothing where no output can be
    compared (``compared_outputs``).

    At most one batch of two models' outputs is held at a time. ``tick(done, total)`` counts batches. Raises InputError
    for samples that do not fit, or outputs that are not finite.
    """
    if not compared_outputs(bundle.manifest):
        return
    groups = [engines[start : start + _AT_ONCE] for start in range(0, len(engines), _AT_ONCE)]
    batches = -(-samples.size // universal.bucket.batch)
    for index, group in enumerate(groups):

        def progress(done: int, before: int = index * batches) -> None:
            tick(before + done, len(groups) * batches)

        yield from zip(group, _measure(bundle, universal, group, samples, threads, progress), strict=True)


def _measure(
    bundle: Bundle,
    universal: EngineEntry,
    engines: Sequence[EngineEntry],
    samples: Samples,
    threads: int,
    progress: Callable[[int], None],
) -> list[Quality]:
    names = [spec.name for spec in bundle.manifest.outputs]
    compared = compared_outputs(bundle.manifest)
    ids = ids_input(bundle.manifest)
    tallies = [[tally_for(role, spec, ids) for role, spec in compared.items()] for _ in engines]
    places = [names.index(spec.name) for spec in compared.values()]
    with ExitStack() as stack:
        by_file = {engine.file: engine for engine in (universal, *engines)}
        runners = {
            file: stack.enter_context(runner_for(bundle, engine, "shared", threads)) for file, engine in by_file.items()
        }
        for done, batch in enumerate(samples.batches(bundle.manifest, universal.bucket)):
            progress(done)
            reference = runners[universal.file].run(batch.feeds)
            for engine, own in zip(engines, tallies, strict=True):
                found = reference if engine.file == universal.file else runners[engine.file].run(batch.feeds)
                for tally, place in zip(own, places, strict=True):
                    tally.add(batch, reference[place], found[place])
    return [_quality(own, samples) for own in tallies]


def _quality(tallies: Sequence[Tally], samples: Samples) -> Quality:
    # Engines compute in float32: what is behind these digits changes with the host and its threads.
    figures = {name: float(f"{value:.6g}") for tally in tallies for name, value in tally.figures().items()}
    positions = next((tally.positions for tally in tallies if tally.positions is not None), None)
    return Quality(samples.size, figures, samples.sha256, positions)
