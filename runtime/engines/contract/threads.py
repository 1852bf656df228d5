"""Sharing the cores: how many a model may use, and one pool for a whole process on request."""

from __future__ import annotations

import threading

from ....errors import InputError
from ....profiles.probe_host import probe_host

_lock = threading.Lock()
_process_wide: int | None = None


def threads_or_default(threads: int | None) -> int:
    """``threads``, or the cores that this process may use. Raises InputError below 1."""
    if threads is None:
        return probe_host().cores
    if threads < 1:
        raise InputError(f"threads: expected at least 1, got {threads}")
    return threads


def use_process_wide_threads(threads: int | None = None) -> None:
    """Makes every engine opened from now on share one ONNX Runtime thread pool of this size.

    From then on ONNX Runtime refuses every session in this process that does not set ``use_per_session_threads =
    False``, those of other libraries too; that is why no model does this by itself. It holds until the process ends.
    Raises InputError if another pool size is already in force.
    """
    global _process_wide
    import onnxruntime

    wanted = threads_or_default(threads)
    with _lock:
        if _process_wide == wanted:
            return
        try:
            onnxruntime.set_global_thread_pool_sizes(wanted, 1)
        except Exception as failure:
            in_force = f"{_process_wide} threads" if _process_wide else "made by other code"
            raise InputError(
                f"process-wide threads: expected to set {wanted}, but a pool is in force already ({in_force}); "
                "set it once, before anything else does"
            ) from failure
        _process_wide = wanted


def process_wide_threads() -> int | None:
    """Size of the process-wide pool, or None while every engine has its own."""
    return _process_wide
