"""Which error of ours a failure of ONNX Runtime to open an engine is."""

from __future__ import annotations

from ....errors import BundleCorruptError, BundleError, BundleIncompatibleError

# The exceptions of ``onnxruntime.capi.onnxruntime_pybind11_state`` that a whole file never causes.
_DAMAGED_FILE_ERRORS = {"InvalidProtobuf", "NoSuchFile", "InvalidGraph"}


def open_error(failure: BaseException) -> type[BundleError]:
    """BundleCorruptError where the file is no ONNX graph, else BundleIncompatibleError."""
    # Where the graph's own text is in the message and is not UTF-8, pybind11 raises a UnicodeDecodeError in its place.
    is_damaged = type(failure).__name__ in _DAMAGED_FILE_ERRORS or isinstance(failure, UnicodeDecodeError)
    return BundleCorruptError if is_damaged else BundleIncompatibleError
