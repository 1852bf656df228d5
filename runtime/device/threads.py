"""Sharing the cores: how many a model may use and which, and one pool for a whole process on request."""

import os
import platform
import threading
from collections.abc import Sequence

from ...errors import InputError
from ...profiles.probe_host import usable_cores

_lock = threading.Lock()
_process_wide: int | None = None


def threads_or_default(threads: int | None) -> int:
    """``threads``, or the cores that this process may use. Raises InputError below 1 and beyond its CPUs."""
    if threads is None:
        return usable_cores()
    most = len(_cpus())
    if type(threads) is not int or not 1 <= threads <= most:
        within = f"from 1 to {most}, the CPUs that this process may use"
        raise InputError(f"threads: expected a whole number {within}, got {threads!r:.80}")
    return threads


def threads_and_affinity(threads: int | None, affinity: Sequence[int] | None) -> tuple[int, tuple[int, ...]]:
    """How many threads a run has, and the CPU of each beside the calling thread; no CPUs leave that to the system.

    The calling thread computes too, and where it runs is its owner's business, so ``affinity`` names one CPU fewer than
    there are threads; without ``threads`` there is one more. ONNX Runtime takes a CPU outside of what this process may
    use, and only logs one that does not exist. Raises InputError for such a CPU, another number of them, a system that
    does not place threads, and where a process-wide pool is in force.
    """
    if affinity is None:
        return threads_or_default(threads), ()
    if not hasattr(os, "sched_getaffinity"):
        raise InputError(f"affinity: expected none on {platform.system()}, where threads are not placed; leave it out")
    refuse_process_wide_affinity()
    cpus = tuple(affinity) if isinstance(affinity, Sequence) and not isinstance(affinity, str) else ()
    if not cpus or any(type(cpu) is not int for cpu in cpus) or len(set(cpus)) < len(cpus):
        raise InputError(f"affinity: expected numbers of CPUs, each once, such as [1, 2], got {affinity!r:.80}")
    usable = _cpus()
    for cpu in cpus:
        if cpu not in usable:
            listed = ", ".join(map(str, usable))
            raise InputError(f"affinity: expected some of the CPUs that this process may use, {listed}, got {cpu}")
    if len(cpus) >= len(usable):
        raise InputError(
            f"affinity: expected at most {len(usable) - 1} CPUs, which with the calling thread's are all that this "
            f"process may use, got {len(cpus)}"
        )
    count = threads_or_default(len(cpus) + 1 if threads is None else threads)
    if count == 1:
        raise InputError(f"affinity: expected none for 1 thread, which is the calling one, got {len(cpus)}")
    if len(cpus) != count - 1:
        raise InputError(
            f"affinity: expected {count - 1} CPUs for {count} threads, one for each beside the calling thread, got "
            f"{len(cpus)}"
        )
    return count, cpus


def use_process_wide_threads(threads: int | None = None) -> None:
    """Makes every engine opened from now on share one ONNX Runtime thread pool of this size.

    From then on ONNX Runtime refuses every session in this process that does not set ``use_per_session_threads =
    False``, those of other libraries too; that is why no model does this by itself. It holds until the process ends.
    The pool's threads spin for some 50 ms after every run, which ONNX Runtime lets no Python program turn off.
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


def refuse_process_wide_affinity() -> None:
    """Raises InputError if a process-wide pool is in force: its threads are not placed for one model."""
    if _process_wide is not None:
        raise InputError(
            f"affinity: expected none, since {_process_wide} process-wide threads are in force; use one of the two"
        )


def process_wide_threads() -> int | None:
    """Size of the process-wide pool, or None while every engine has its own."""
    return _process_wide


def _cpus() -> list[int]:
    """Numbers of the CPUs on which this process may run; each hyper-thread of a core is one."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
