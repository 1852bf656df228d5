"""A plan opened as the engine of a bundle: found for this GPU, its bytes checked, given its weights; and what all
execution contexts do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tensorrt as trt

from ....bundle.device_files.plan_index import Gpu, PlanEntry, plan_for, read_plan
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.tensor_spec import TensorSpec
from ....bundle.open_bundle import Bundle
from ....bundle.shape_profile import Shape, shape_profiles
from ....errors import BundleCorruptError, BundleError, BundleIncompatibleError
from ...device.cuda_memory import Graph, Stream, device_name, free_bytes
from ...graphs.weight_store import store_initializers
from .layout import PlanTensor, plan_problem

_MAX_REASON_CHARACTERS = 300
_FAILURE_SEVERITIES = (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR)


def open_plan(
    bundle: Bundle,
    engine: EngineEntry,
    plan: PlanEntry | None,
    device: int,
    interface: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    own_bytes: int,
    log: Log,
) -> trt.ICudaEngine:
    """The plan of ``engine`` on the GPU ``device``, the calling thread's; ``plan`` may be given by who has just built
    it. ``interface`` is what the manifest says of its inputs and outputs, ``own_bytes`` is what a run
    takes for them.

    Raises BundleIncompatibleError where there is no plan that may run here, or too little memory, BundleCorruptError
    for one that is not this engine.
    """
    where = f"engine {engine.id}"
    plan = plan or plan_for(bundle, engine, this_gpu(device))
    data = read_plan(bundle, plan)
    _require_memory(engine, max(len(data), _weight_bytes(bundle, engine)) + plan.activation_bytes + own_bytes)
    opened = open_engine(where, data, plan.options.version_compatible, log)
    if plan.options.strip_weights:
        store_initializers(bundle, engine)
        with bundle.held(engine.file, *bundle.manifest.weight_names):
            refit(where, opened, bundle.file(engine.file), log)
    profiles = shape_profiles(bundle.manifest, engine)
    if problem := plan_problem(*interface, engine.bucket, profiles, tensors_of(opened)):
        raise BundleCorruptError(f"{where}: {plan.file}: {problem}")
    return opened


def _weight_bytes(bundle: Bundle, engine: EngineEntry) -> int:
    return engine.weight_bytes or bundle.manifest.submodel(engine.submodel).weight_bytes


def _require_memory(engine: EngineEntry, needed: int) -> None:
    """``needed`` is a lower bound: the plan or its weights, activations of one run, its inputs and outputs."""
    free = free_bytes()
    if needed > free:
        raise BundleIncompatibleError(
            f"engine {engine.id}: needs at least {needed / 1e6:.1f} MB of the GPU's memory, {free / 1e6:.1f} MB are "
            "free; close other programs on it, or choose a smaller submodel"
        )


def this_gpu(device: int = 0) -> Gpu:
    """The GPU and the TensorRT release that plans built here are bound to. Raises BundleError where there is no GPU."""
    name, capability = device_name(device)
    return Gpu(name, capability, trt.__version__)


class Log(trt.ILogger):  # type: ignore[misc]  # TensorRT ships no types
    """Keeps what TensorRT reports as errors; nothing is printed. Several threads may report at once."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self._errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT for every message."""
        if severity in _FAILURE_SEVERITIES:
            self._errors.append(" ".join(msg.split()))

    def take(self) -> str:
        """The first error since the last call, which is the cause of the others, as one line."""
        errors, self._errors = self._errors, []
        return errors[0][:_MAX_REASON_CHARACTERS] if errors else "no reason given"


def open_engine(where: str, plan: bytes, host_code: bool, log: Log) -> trt.ICudaEngine:
    """Deserialises a plan whose bytes are trusted; ``host_code``: it may bring code for the processor.

    Raises BundleIncompatibleError with TensorRT's reason.
    """
    try:
        runtime = trt.Runtime(log)
    except TypeError as failure:  # how the bindings report that TensorRT returned nothing
        raise BundleIncompatibleError(f"{where}: TensorRT {trt.__version__} does not start: {log.take()}") from failure
    runtime.engine_host_code_allowed = host_code  # version compatible plans bring their own runtime
    engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise BundleIncompatibleError(
            f"{where}: TensorRT {trt.__version__} cannot open this plan: {log.take()}; "
            "run `nestforge build BUNDLE` on this device"
        )
    return engine


def refit(where: str, engine: trt.ICudaEngine, graph: Path, log: Log) -> None:
    """Gives a stripped ``engine`` the weights that ``graph`` names; TensorRT would run without, and answer nonsense.

    ``graph`` is absolute, so that TensorRT finds the weight store beside it. Raises BundleIncompatibleError.
    """
    refitter = trt.Refitter(engine, log)
    parser = trt.OnnxParserRefitter(refitter, log)
    if not parser.refit_from_file(str(graph)):
        reasons = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        reason = " ".join(reasons[0].split())[:_MAX_REASON_CHARACTERS] if reasons else log.take()
        raise BundleIncompatibleError(f"{where}: its weights cannot be read from {graph}: {reason}")
    missing = refitter.get_missing_weights()
    if missing:
        raise BundleIncompatibleError(f"{where}: {len(missing)} weights are not in {graph}: {', '.join(missing[:3])}")
    if not refitter.refit_cuda_engine():
        raise BundleIncompatibleError(f"{where}: its weights cannot be set: {log.take()}")


def tensors_of(engine: trt.ICudaEngine) -> list[PlanTensor]:
    """Inputs and outputs as the plan states them, with the ends of its optimisation profiles."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return [_tensor_of(engine, name) for name in names]


def _tensor_of(engine: trt.ICudaEngine, name: str) -> PlanTensor:
    is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    shape = tuple(engine.get_tensor_shape(name))
    ends: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if is_input and any(size < 0 for size in shape):
        for profile in range(engine.num_optimization_profiles):
            least, _, most = engine.get_tensor_profile_shape(name, profile)
            ends.append((tuple(least), tuple(most)))
    alias = None
    if not is_input and hasattr(engine, "get_aliased_input_tensor"):  # releases that update caches have it
        alias = engine.get_aliased_input_tensor(name) or None
    on_device = engine.get_tensor_location(name) == trt.TensorLocation.DEVICE
    return PlanTensor(name, is_input, engine.get_tensor_dtype(name).name, shape, on_device, tuple(ends), alias)


def open_context(
    where: str,
    engine: trt.ICudaEngine,
    allocation: trt.ExecutionContextAllocationStrategy = trt.ExecutionContextAllocationStrategy.STATIC,
) -> trt.IExecutionContext:
    """An execution context. Raises BundleError where TensorRT opens none."""
    context: trt.IExecutionContext | None = engine.create_execution_context(allocation)
    if context is None:
        raise BundleError(f"{where}: TensorRT opened no context; the GPU may have too little free memory")
    return context


def set_shapes(where: str, context: trt.IExecutionContext, inputs: Mapping[str, Shape]) -> None:
    """Sets the shapes of ``inputs``. Raises BundleError where TensorRT refuses one."""
    for name, shape in inputs.items():
        if not context.set_input_shape(name, trt.Dims(list(shape))):
            raise BundleError(f"{where}: TensorRT refused shape {list(shape)} of {name}")
    if unknown := context.infer_shapes():
        raise BundleError(f"{where}: TensorRT does not know the shape of {', '.join(unknown)}")


def require_shapes(where: str, context: trt.IExecutionContext, outputs: Mapping[str, Shape]) -> None:
    """Raises BundleError unless ``outputs`` have these shapes: others would be written past their memory."""
    for name, shape in outputs.items():
        found = tuple(context.get_tensor_shape(name))
        if found != shape:
            raise BundleError(f"{where}: {name}: expected shape {list(shape)}, got {list(found)}")


def set_addresses(where: str, context: trt.IExecutionContext, addresses: Mapping[str, int]) -> None:
    """Sets where TensorRT finds tensors. Raises BundleError where it refuses."""
    for name, address in addresses.items():
        if not context.set_tensor_address(name, address):
            raise BundleError(f"{where}: TensorRT refused the memory of {name}")


def captured(work: Callable[[Stream], bool]) -> Graph | None:
    """As ``captured_in``, in a stream of their own: other threads may queue work in the device's, which must not be
    captured."""
    stream = Stream()
    try:
        return captured_in(stream, work)
    finally:
        stream.close()


def captured_in(stream: Stream, work: Callable[[Stream], bool]) -> Graph | None:
    """A graph of what ``work`` queues in ``stream`` and whether TensorRT took it; None where it cannot be
    captured; see ``Stream.capture``."""
    try:
        return stream.capture(lambda: _require_taken(work(stream)), own_copies=True)
    except BundleError:
        return None


def _require_taken(taken: bool) -> None:
    if not taken:
        raise BundleError("TensorRT refused to run")


def inspected(engine: trt.ICudaEngine) -> str:
    """TensorRT's engine, as the JSON of its engine inspector."""
    inspector = engine.create_engine_inspector()
    return inspector.get_engine_information(trt.LayerInformationFormat.JSON)
