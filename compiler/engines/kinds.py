"""The kinds of engines: one table says how each is built, verified and judged with a task, and nothing else asks which
kinds there are. How one is opened says the runtime (runtime/engines/runner.py)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import ParityError
from ...profiles.device_profile import DeviceProfile
from ...runtime.graphs.task_tensors import TaskTensors
from ..parity.engine_verdict import EngineVerdict
from ..work.clock import Clock
from ..work.release_memory import release_memory
from .build_engine import EngineBuilder
from .cached import build_generating, judge_generating, verify_generating
from .engine_references import EngineReferences
from .segments import build_segments, verify_segments
from .whole import JudgedEngine, judge_whole, verify_whole


@dataclass(frozen=True)
class Kind:
    """How engines of a kind come to be: the ``stage`` of a compile that builds them, at every shape of a submodel
    (``build``) or once, where they take any (``generate``); ``verify`` holds a written one against PyTorch, as users
    run it, and ``judge`` one that has the tensors of a task."""

    stage: Literal["build", "generate"]
    build: Callable[[EngineBuilder, Submodel, Bucket], Iterable[EngineEntry]]
    verify: Callable[[Bundle, EngineReferences, EngineEntry], Iterable[EngineVerdict]]
    judge: Callable[[Bundle, EngineReferences, EngineEntry, TaskTensors], Iterable[JudgedEngine]]


def _build_whole(builder: EngineBuilder, submodel: Submodel, bucket: Bucket) -> Iterator[EngineEntry]:
    yield builder.build(submodel, bucket)


def _with_another(*_: object) -> tuple[()]:
    """Nothing: the engine is built, verified or judged with another, or takes no task."""
    return ()


KINDS = {
    "whole": Kind("build", _build_whole, verify_whole, judge_whole),
    "segment": Kind("build", build_segments, verify_segments, _with_another),
    "decode": Kind("generate", build_generating, verify_generating, judge_generating),
    # With the decoder that reads it.
    "encoder": Kind("generate", _with_another, _with_another, _with_another),
}


def shapes_of(submodel: Submodel, device: DeviceProfile) -> list[Bucket]:
    """The buckets of the profile as ``submodel`` has them; several may be one."""
    return list(dict.fromkeys(map(submodel.at, device.buckets)))


def build_engines(
    builder: EngineBuilder, submodels: Sequence[Submodel], clock: Clock, stage: str | None = None
) -> tuple[EngineEntry, ...]:
    """The engines of every kind that the model has, of each of ``submodels``, in the stages of their kinds, or all in
    ``stage``. Done work of an earlier run is kept. Raises ParityError for the first that breaks the rule of the gate.
    """
    any_shape = builder.profile.buckets[:1]
    shaped = [(submodel, bucket) for submodel in submodels for bucket in shapes_of(submodel, builder.profile)]
    unshaped = [(submodel, bucket) for submodel in submodels for bucket in any_shape if builder.source.cached]
    steps = [
        (stage or name, place, [kind.build for kind in KINDS.values() if kind.stage == name])
        for name, places in (("build", shaped), ("generate", unshaped))
        for place in places
    ]
    engines: list[EngineEntry] = []
    for name, group in groupby(steps, key=lambda step: step[0]):
        with clock(name):
            for _, (submodel, bucket), builds in clock.each(list(group)):
                engines += [engine for build in builds for engine in build(builder, submodel, bucket)]
    return tuple(engines)


def verify_engines(bundle: Bundle, references: EngineReferences, clock: Clock) -> tuple[EngineVerdict, ...]:
    """Every engine against its submodel's reference; the universal model of those is in the bundle's order."""
    return tuple(
        verdict
        for engine in clock.each(bundle.manifest.every_engine)
        for verdict in _verified(bundle, references, engine)
    )


def _verified(bundle: Bundle, references: EngineReferences, engine: EngineEntry) -> Iterator[EngineVerdict]:
    release_memory()  # what PyTorch read for the one before: this one maps the same files, or copies them
    try:
        yield from KINDS[engine.kind.name].verify(bundle, references, engine)
    except ParityError as failure:  # its numbers are no rounding of the model's
        yield EngineVerdict(engine.id, (), str(failure))
