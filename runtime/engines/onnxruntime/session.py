"""Sessions of ONNX Runtime on the processor: their options, their one arena, their failures as errors of ours.

All engines of the process take activations from one arena: they mostly run one after the other, and what one needed the
next can use. The arena is thread-safe and grows when engines do run at once.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnxruntime

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.tensor_spec import TensorSpec
from ....errors import BundleCorruptError, BundleError, BundleIncompatibleError
from ....outside import is_of_library, said_by
from ...device.threads import process_wide_threads, refuse_process_wide_affinity
from ...inputs.arrays import Array

# The compiler has folded constants and fused what pays, so ONNX Runtime need not look again: opening is a fifth faster
# than at BASIC and runs are not slower; above BASIC, fusions gained nothing on transformer graphs (0 to 5 % slower).
OPTIMIZATION_LEVEL = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
# Level at which an engine with packed weights is saved; it is opened as it was saved.
SAVED_OPTIMIZATION_LEVEL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
# Every failure reaches the caller as an exception, so ONNX Runtime need not print it as well.
_LOG_FATAL_ONLY = 4
SPIN_DURATION = "session.intra_op.spin_duration_us"
# In a step of a decoder longer: products of one token keep one thread longer than the other, which is to be awake for
# the next.
SPIN_US, STEP_SPIN_US = 50, 200
_NONE: Mapping[str, Array] = MappingProxyType({})
# Its names of the manifest's types.
_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "int8": "tensor(int8)",
    "uint8": "tensor(uint8)",
    "bool": "tensor(bool)",
}
# The exceptions of ``onnxruntime.capi.onnxruntime_pybind11_state`` that a whole file never causes.
_DAMAGED_FILE_ERRORS = {"InvalidProtobuf", "NoSuchFile", "InvalidGraph"}
_lock = threading.Lock()


def session_options(
    threads: int, level: Any, packed: bool, affinity: Sequence[int] = (), spin_us: int = SPIN_US
) -> Any:
    """Options of a session on ``threads`` cores that copies its weights into its own layout (``packed``) or not; its
    threads look for work for ``spin_us`` before they sleep.

    ``affinity`` is the CPU of each thread beside the calling one, or empty; see ``threads_and_affinity``.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_FATAL_ONLY
    options.graph_optimization_level = level
    options.add_session_config_entry("session.load_model_format", "ONNX")  # whatever the file's name says
    if process_wide_threads():
        if affinity:
            refuse_process_wide_affinity()
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        if affinity:  # ONNX Runtime counts CPUs from 1
            entry = ";".join(str(cpu + 1) for cpu in affinity)
            options.add_session_config_entry("session.intra_op_thread_affinities", entry)
    use_shared_arena(options)
    stop_spinning(options, spin_us)
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def stop_spinning(options: Any, spin_us: int = SPIN_US) -> None:
    """Threads of a session with these options look for work in a loop for ``spin_us``, and never behind its run.

    By default they do for some 50 ms after a run, on cores that other engines, libraries and processes need. Where one
    of two cores was busy, a limit of 50 us made runs 1.4 to 1.8 times as fast; with both free it costs up to 2 %, and
    no spinning at all 20 % (MiniLM, 16 to 128 tokens). Releases of ONNX Runtime that do not know the duration spin
    during a whole run.
    """
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry(SPIN_DURATION, str(spin_us))


def open_session(path: Path, options: Any, weights: Mapping[str, Array] = _NONE) -> Any:
    """A CPU session. ``path`` is absolute: ONNX Runtime then confines the weights to its folder.

    ``weights`` take the place of initializers of these names, which the graph has outside its file. ONNX Runtime copies
    them while it opens the session, and not before. Raises BundleCorruptError or BundleIncompatibleError.
    """
    provider = "CPUExecutionProvider"
    if weights:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=[provider], enable_fallback=0)
    except BaseException as failure:
        if not is_of_library(failure):
            raise
        raise open_error(failure)(
            f"{path}: onnxruntime {onnxruntime.__version__} cannot open it: {said_by(failure)}"
        ) from failure
    if session.get_providers() != [provider]:
        raise BundleIncompatibleError(f"{path}: expected {provider}, onnxruntime took {session.get_providers()}")
    return session


def require_tensors(engine: EngineEntry, kind: str, found: Iterable[Any], specs: Iterable[TensorSpec]) -> None:
    """Raises BundleCorruptError unless ``found``, a session's ``inputs`` or ``outputs`` (``kind``), are those that the
    manifest states, with the sizes of the engine's bucket."""
    have = {tensor.name: (tensor.type, tuple(tensor.shape)) for tensor in found}
    want = {spec.name: (_TYPES[spec.dtype], spec.declared(engine.bucket)) for spec in specs}
    if have != want:
        raise BundleCorruptError(f"engine {engine.id}: {kind} are {have}, the manifest says {want}")


def open_error(failure: BaseException) -> type[BundleError]:
    """BundleCorruptError where the file is no ONNX graph, else BundleIncompatibleError."""
    # Where the graph's own text is in the message and is not UTF-8, pybind11 raises a UnicodeDecodeError in its place.
    is_damaged = type(failure).__name__ in _DAMAGED_FILE_ERRORS or isinstance(failure, UnicodeDecodeError)
    return BundleCorruptError if is_damaged else BundleIncompatibleError


def use_shared_arena(options: Any) -> None:
    """Makes a session with these options take activations from the shared arena; other sessions are not touched."""
    with _lock:
        if _registered():
            options.add_session_config_entry("session.use_env_allocators", "1")


@cache
def _registered() -> bool:
    import onnxruntime

    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    try:
        onnxruntime.create_and_register_allocator(memory, None)
    except Exception:  # noqa: BLE001  (of an unnamed type: other code has registered one, perhaps capped; leave it alone)
        return False
    return True
