"""Cost of a compile on the host that it runs on, told before any work: memory, disk, the processor's time.

Weights are counted in bytes. Other memory, and the time, follow a rule that was fitted to whole compiles: of
random Llamas of 30 to 1,236 million weights and of SmolLM2-135M in int4, one width, `--generate`, 1x1..512, nothing
timed, on an AMD EPYC (Zen 4) of two cores; for examples of SmolLM2-135M in fp32 and int4-g128, with 128 texts, on a
Xeon. Exits' segments and merged engines are not counted.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path

from ...bucket import Bucket
from ...elastic import Submodel
from ...errors import BuildError
from ...exporters.signature import Signature
from ...exporters.source import ModelSource
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import FOUR_BITS, INT8, PRECISIONS, TRACED
from ...profiles.probe_host import free_memory_bytes
from ...runtime.consistency.samples import ArraySamples
from ..examples.corpus import MOST_RANKED, ArrayCorpus, Corpus
from ..parity.cases import MOST_JUDGED, can_look, largest_proven
from ..work.staging import staging_folder

# Python, torch, transformers, ONNX Runtime, and the traces of a model.
_PROGRAMS_BYTES = 7e8
# The outputs of all shapes of a range on which engines are proven are together some five times those of the longest,
# in float64 beside the engine's own in float32.
_SHAPES, _OUTPUT_BYTES = 5, 8 + 4
# Measured compiles took 0.57 (a tiny BERT), 0.85 (1,236 M) to 1.1 times (30 M and 400 M, to which it was fitted) the
# memory of this rule: what is less than the least of it is refused.
_LEAST_SHARE = 0.55
# CPU seconds: what does not grow; a trace of a layer, and of one that repeats it; a GFLOP of an engine's longest run,
# for all that it is proven by.
_FIXED_SECONDS, _SECONDS_A_LAYER, _SECONDS_REPEATED, _SECONDS_A_GFLOP = 15, 0.7, 0.1, 0.14
_LAYERS_TRACED = 4
# For a large model a GFLOP of that run, which its narrower widths are not asked, and 10^9 weights of its short ones, of
# which those are asked fewer; of integers too for rounding weights, PyTorch with the rounded ones, and runs that decode
# them.
_SECONDS_A_GFLOP_OF_FEW, _SECONDS_A_BILLION, _SECONDS_A_NARROW_BILLION = 0.03, 25, 12
_MORE_OF_INTEGERS_A_GFLOP, _MORE_OF_INTEGERS_A_BILLION = 0.03, 60
# For examples: a GFLOP of the passes that rank axes by them, forward and twice back, and of a run of an engine, which
# shows what a submodel keeps; and 10^12 products of a weight and the inputs of its layer, which choosing 4 bits takes.
_SECONDS_A_GFLOP_RANKED, _SECONDS_A_GFLOP_RUN, _SECONDS_A_TRILLION_CHOSEN = 0.035, 0.012, 250
_BYTES_A_TOKEN = 4


@dataclass(frozen=True)
class CompileCost:
    """Cost of a compile on its host. ``memory_mb`` no system can drop, of it ``widened_mb`` are weights of other types
    in float32; ``mapped_mb`` are pages of files, dropped and read again where memory is short; ``disk_mb`` are written
    at least; ``cpu_seconds`` leave out timing engines."""

    memory_mb: float
    widened_mb: float
    mapped_mb: float
    disk_mb: float
    cpu_seconds: float

    def __str__(self) -> str:
        return (
            f"about {self.memory_mb:,.0f} MB of memory and {self.mapped_mb:,.0f} MB of mapped files, "
            f"{self.disk_mb:,.0f} MB of disk, {self.cpu_seconds:,.0f} CPU seconds"
        )


def compile_cost(
    source: ModelSource,
    profile: DeviceProfile,
    chosen: Sequence[Submodel],
    corpus: Corpus | ArrayCorpus | None = None,
) -> CompileCost:
    """The cost of a compile of engines of the submodels ``chosen`` with the examples of ``corpus``, on a host like the
    one of the fit."""
    universal, backend = source.spec.universal(), profile.backend
    in_fp32 = 4 * source.parameters(universal)
    disk = written_bytes(source, profile, chosen)
    outputs = max(_output_bytes(source.signature, largest_proven(bucket)) for bucket in profile.buckets)
    largest = max((prod(shape) for shape in source.shapes.values()), default=0)
    packed = max(source.weight_bytes(submodel, backend).held for submodel in chosen)
    forms = 2 if source.generates else 1
    if any(PRECISIONS[source.precision(submodel)].is_integer for submodel in chosen):
        held = 2 * outputs + packed + 18 * largest  # of the model and with its numbers rounded; a weight is decoded
    else:
        held = outputs + 4 * largest  # written engines are opened shared
    looks = can_look(source) and BACKENDS[backend].runs_graphs
    gates = sum((_gate_seconds if looks else _every_case_seconds)(source, profile, submodel) for submodel in chosen)
    traced = min(source.spec.depth, _LAYERS_TRACED)
    trace = _SECONDS_A_LAYER * traced + _SECONDS_REPEATED * (source.spec.depth - traced)
    traces = len(profile.buckets) * len({submodel.structure for submodel in chosen})
    # Until they are stored, weights of other types are in memory in float32; files in float32 are mapped.
    widened = 4 * sum(tensor.elements for tensor in source.checkpoint.tensors.values() if tensor.dtype != "F32")
    judging = held if looks else outputs + packed + 8 * largest
    return CompileCost(
        memory_mb=(_PROGRAMS_BYTES + max(judging, widened)) / 1e6,
        widened_mb=widened / 1e6,
        mapped_mb=max(disk, in_fp32) / 1e6,
        disk_mb=disk / 1e6,
        cpu_seconds=_FIXED_SECONDS
        + forms * (trace * traces + gates)
        + (_example_seconds(source, profile, chosen, corpus) if corpus is not None else 0.0),
    )


def _every_case_seconds(source: ModelSource, profile: DeviceProfile, submodel: Submodel) -> float:
    """For the proofs of an engine of ``submodel`` on every case in float64."""
    return _SECONDS_A_GFLOP * _gflops(source, profile, submodel)


def _gate_seconds(source: ModelSource, profile: DeviceProfile, submodel: Submodel) -> float:
    """For those of an engine of a large model."""
    billions = source.parameters(submodel) / 1e9 * len(profile.buckets)
    is_narrow = not replace(submodel, precision=None).has_all_widths
    gflops = 0.0 if is_narrow else _gflops(source, profile, submodel)
    seconds = _SECONDS_A_GFLOP_OF_FEW * gflops
    seconds += (_SECONDS_A_NARROW_BILLION if is_narrow else _SECONDS_A_BILLION) * billions
    if PRECISIONS[source.precision(submodel)].is_integer:
        seconds += _MORE_OF_INTEGERS_A_GFLOP * gflops + _MORE_OF_INTEGERS_A_BILLION * billions
    return seconds


def _gflops(source: ModelSource, profile: DeviceProfile, submodel: Submodel) -> float:
    """The longest runs of engines of ``submodel``."""
    shapes = [submodel.at(largest_proven(bucket)) for bucket in profile.buckets]
    return sum(op.flops / 1e9 for shape in shapes for op in source.workload(submodel, shape))


def _example_seconds(
    source: ModelSource, profile: DeviceProfile, chosen: Sequence[Submodel], corpus: Corpus | ArrayCorpus
) -> float:
    """For ranking axes by the examples, finding what precisions must know of them, and measuring on those held out."""
    universal, longest = source.spec.universal(), max(profile.buckets, key=lambda bucket: bucket.sequence)

    def gflops(part: Sequence[str] | ArraySamples, submodel: Submodel, most: int) -> float:
        shape = submodel.at(Bucket(1, longest.sequence))
        each = sum(op.flops / 1e9 for op in source.workload(submodel, shape))
        if isinstance(part, ArraySamples):
            return part.size * each
        tokens = sum(min(len(text.encode()) / _BYTES_A_TOKEN, most) for text in part)
        return each * tokens / shape.sequence

    is_ranked = bool(source.spec.orders) and not source.spec.trained_nested
    ranked = gflops(corpus.calibration, universal, MOST_RANKED) if is_ranked else 0.0
    calibrations = {PRECISIONS[source.precision(one)].calibration for one in chosen} - {None}
    runs = len(calibrations) * gflops(corpus.calibration, universal, longest.sequence)
    runs += sum(gflops(corpus.held_out, submodel, longest.sequence) for submodel in (universal, *chosen))
    of_layers = [shape for name, shape in source.shapes.items() if not source.architecture.is_embedding(name, shape)]
    in_4_bits = any(PRECISIONS[source.precision(submodel)].encoding in FOUR_BITS for submodel in chosen)
    chosen_by = sum(prod(shape) * shape[1] for shape in of_layers if len(shape) == 2) / 1e12 if in_4_bits else 0.0
    return _SECONDS_A_GFLOP_RANKED * ranked + _SECONDS_A_GFLOP_RUN * runs + _SECONDS_A_TRILLION_CHOSEN * chosen_by


def _output_bytes(signature: Signature, longest: Bucket) -> int:
    """Memory of the outputs kept of all shapes, and those that an engine makes of the ``longest``."""
    made = [prod(spec.shape(longest)) for spec in signature.outputs]
    judged = made if signature.mask is not None else [min(numbers, MOST_JUDGED) for numbers in made]
    return _SHAPES * _OUTPUT_BYTES * sum(judged) + 4 * sum(made)


def written_bytes(source: ModelSource, profile: DeviceProfile, chosen: Sequence[Submodel]) -> int:
    """At least so many bytes are written for engines of the submodels ``chosen``: every weight once in each
    encoding, and once more what other precisions than the traced one are calibrated on, and what integers stand for
    where engines are proven without the rounding of activations."""
    stored: dict[tuple[str, str], int] = {}
    rounded = 0
    for submodel in chosen:
        own = source.stored_bytes(submodel, profile.backend)
        for key, size in own.items():
            stored[key] = max(stored.get(key, 0), size)
        if PRECISIONS[source.precision(submodel)].has_exact_form:
            rounded = max(
                rounded, sum(4 * prod(source.shapes[name]) for name, held in own if held in (INT8, *FOUR_BITS))
            )
    beside = 4 * source.parameters(source.spec.universal()) if profile.precisions != (TRACED,) else 0
    return sum(stored.values()) + beside + rounded


def require_room(cost: CompileCost, output: Path) -> None:
    """Refuses a compile of this ``cost`` at ``output`` that cannot fit. Raises BuildError."""
    if (lacking := lacking_room(cost, output)) is not None:
        raise BuildError(lacking)


def lacking_room(cost: CompileCost, output: Path) -> str | None:
    """Why a compile of this ``cost`` at ``output`` cannot fit, if so: its disk has less free, what an interrupted one
    has written counted as free, or this process may have less memory than the widened weights, or little more than
    half of the whole, which is an estimate."""
    free, least = _free_bytes(output) / 1e6, max(_LEAST_SHARE * cost.memory_mb, cost.widened_mb)
    if cost.disk_mb > free:
        return (
            f"{output}: the weights alone take {cost.disk_mb:,.1f} MB, and {free:,.1f} MB of its disk are free; "
            "make room, or choose another `output`"
        )
    if least > (memory := free_memory_bytes() / 1e6):
        return (
            f"{output}: a compile of it holds about {cost.memory_mb:,.0f} MB in memory, at least {least:,.0f}, and "
            f"{memory:,.0f} MB are free here; end other programs, or compile on a host with more memory"
        )
    return None


def _free_bytes(output: Path) -> float:
    try:
        place = next(folder for folder in output.absolute().parents if folder.is_dir())
        begun = (staging_folder(output), output) if staging_folder(output).is_dir() else ()  # perhaps published
        files = (file.lstat() for folder in begun for file in folder.rglob("*") if file.is_file())
        made = {(file.st_dev, file.st_ino): file.st_size for file in files}  # a file of two names is there once
        return shutil.disk_usage(place).free + sum(made.values())
    except (OSError, ValueError):  # nothing can be written there, which is refused with its reason
        return inf
