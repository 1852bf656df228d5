"""One plan from one emitted graph: the calls of TensorRT's builder, which exist in 10.3 as in 11.

The graph carries its precision in its types, so the network is strongly typed and no precision is asked of the builder.
Weights are read by TensorRT itself from the store beside the graph.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tensorrt as trt

from ...bundle.device_files.plan_index import Gpu
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.files import private_folder
from ...bundle.shape_profile import ShapeProfile
from ...errors import BuildError
from ...profiles.device_profile import HardwareCompatibility, TensorRTOptions
from ...progress import Progress
from ...runtime.engines.tensorrt.engine import Log
from ...whole_file import alone, write_whole
from ..work.clock import Phases

_COMPATIBILITY_LEVELS: dict[HardwareCompatibility, str] = {
    "none": "NONE",
    "same_compute_capability": "SAME_COMPUTE_CAPABILITY",
    "ampere_plus": "AMPERE_PLUS",
}


class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # TensorRT ships no types
    """Passes TensorRT's reports on to ``phases``; called from several threads of the builder."""

    def __init__(self, phases: Phases) -> None:
        trt.IProgressMonitor.__init__(self)
        self._phases = phases

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Called by TensorRT when a phase begins."""
        self._phases.started(phase_name, parent_phase, num_steps)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Called by TensorRT after each step; false stops the build."""
        return self._phases.stepped(phase_name, step)

    def phase_finish(self, phase_name: str) -> None:
        """Called by TensorRT when a phase ends."""
        self._phases.finished(phase_name)


def build_plan(
    where: str,
    graph: Path,
    inputs: Sequence[TensorSpec],
    profiles: Sequence[ShapeProfile],
    options: TensorRTOptions,
    gpu: Gpu,
    progress: Progress,
) -> bytes:
    """The plan of the ONNX file ``graph`` (absolute) for the shapes of each of ``profiles`` on this host's ``gpu``.

    Raises BuildError with TensorRT's reason, or when the time limit is over; OutputError for the timing cache.
    """
    log = Log()
    limit = options.time_limit_s
    phases = Phases(progress, None if limit is None else time.monotonic() + limit)
    monitor = Monitor(phases)  # outlives everything that may call it
    try:
        builder = trt.Builder(log)
    except TypeError as failure:  # how the bindings report that TensorRT returned nothing
        raise BuildError(f"{where}: TensorRT {trt.__version__} does not start: {log.take()}") from failure
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    read = parser.parse_from_file(str(graph))
    reasons = [parser.get_error(index).desc() for index in range(parser.num_errors)]
    if not read or reasons:
        reason = " ".join(reasons[0].split())[:300] if reasons else log.take()
        raise BuildError(f"{where}: TensorRT {trt.__version__} cannot read {graph.name}: {reason}")
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    _set_options(where, config, options)
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    parsed = {tensor.name: tuple(tensor.shape) for tensor in tensors}
    for profile in profiles:
        shapes = profile.parsed_shapes(where, parsed, inputs)
        if shapes:
            optimization_profile = builder.create_optimization_profile()
            for name, (least, tuned, most) in shapes.items():
                optimization_profile.set_shape(name, trt.Dims(list(least)), trt.Dims(list(tuned)), trt.Dims(list(most)))
            config.add_optimization_profile(optimization_profile)
    with timing_cache(config, timing_cache_file(gpu)):
        plan: trt.IHostMemory | None = builder.build_serialized_network(network, config)
    if phases.timed_out:
        raise BuildError(
            f"{where}: building passed the time limit of {limit:g} s; raise time_limit_s of the profile's tensorrt "
            "options, or lower their optimization_level"
        )
    if plan is None:
        raise BuildError(f"{where}: TensorRT {trt.__version__} built no plan: {log.take()}")
    return bytes(memoryview(plan))


def _set_options(where: str, config: trt.IBuilderConfig, options: TensorRTOptions) -> None:
    if options.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mb * 10**6)
    config.builder_optimization_level = options.optimization_level
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else the inspector knows names alone
    if options.tf32:
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.strip_weights:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    level = _COMPATIBILITY_LEVELS[options.hardware_compatibility]
    if not hasattr(trt.HardwareCompatibilityLevel, level):
        raise BuildError(
            f"{where}: TensorRT {trt.__version__} has no hardware_compatibility {options.hardware_compatibility!r}; "
            "use 'ampere_plus' or 'none'"
        )
    config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)


def timing_cache_file(gpu: Gpu) -> Path:
    """Where the timings of ``gpu`` are kept. Raises OutputError if others may change that folder."""
    words = re.findall(r"[A-Za-z0-9.]+", f"{gpu.name} {gpu.compute_capability} {gpu.tensorrt}")
    return private_folder("tensorrt") / f"{'-'.join(words)}.timing"


@contextmanager
def timing_cache(config: trt.IBuilderConfig, path: Path) -> Iterator[None]:
    """Lets the build of ``config`` use the timings in ``path``, and adds what it measures to them.

    Another process may build meanwhile: what it added is kept too. Raises OutputError if the file cannot be written.
    """
    cache = config.create_timing_cache(_kept(path))
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        cache = config.create_timing_cache(b"")  # a damaged file costs its timings, no more
        config.set_timing_cache(cache, ignore_mismatch=False)
    yield
    lock = path.with_suffix(".lock")
    lock.touch()
    with alone(lock):
        others = config.create_timing_cache(_kept(path))
        if others is not None:
            cache.combine(others, ignore_mismatch=False)  # says no to a damaged file, and changes nothing
        timings = bytes(memoryview(cache.serialize()))
        write_whole(path, lambda stream: stream.write(timings), "the timing cache", mode=0o600)


def _kept(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""
