"""Other programs' share of the CPUs, by the system's counters, and the limits of this process's control groups.

Linux and macOS have the counters alike. The load average is no measure of that: it counts this process too, and looks
back over a minute. One rule for all that measures this host: a figure is noisy where others used more than
``MOST_OTHERS``. Commands that measure in order to keep figures refuse, unless they are forced; others mark what they
show or keep beside their work.
"""

import os
from collections.abc import Collection, Iterator
from math import inf
from pathlib import Path
from time import perf_counter, process_time, sleep

import psutil

from ..errors import MeasurementError

# The share of the CPUs that others may use.
MOST_OTHERS = 0.20
# The counters advance by 10 ms at a time.
_LEAST_SECONDS = 0.2


class OthersLoad:
    """The share of the CPUs that this process may use which other programs used since this was made, 0 to 1."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = perf_counter(), _busy_seconds(), process_time()

    def share(self) -> float | None:
        """None where the system does not say, too little time has passed to see anything, or a container's quota, and
        not the CPUs that others use, is what this process may run short of."""
        seconds, busy, own = perf_counter() - self._began, _busy_seconds(), process_time()
        if seconds < _LEAST_SECONDS or _has_quota() or busy is None or self._busy is None or busy[0] <= self._busy[0]:
            return None
        others = (busy[1] - self._busy[1]) - (own - self._own)
        return min(max(others / (busy[0] - self._busy[0]), 0.0), 1.0)


def others_now(seconds: float) -> float | None:
    """The share over the next ``seconds``, in which this process sleeps."""
    load = OthersLoad()
    sleep(seconds)
    return load.share()


def is_busy(share: float | None) -> bool:
    """Whether others use, by ``share``, too much for a measurement to be trusted; not where nothing is known."""
    return share is not None and share > MOST_OTHERS


def load_warning(share: float | None) -> str | None:
    """The warning beside figures measured while others used ``share`` of the CPUs; None where that is little."""
    return f"other programs used {share:.0%} of the CPUs (at most {MOST_OTHERS:.0%})" if is_busy(share) else None


def require_quiet(share: float | None) -> None:
    """Raises MeasurementError on a host that is too busy for figures that are to be kept."""
    if is_busy(share):
        raise MeasurementError(
            f"this host: other programs use {share:.0%} of the CPUs, expected at most {MOST_OTHERS:.0%}, so that a "
            "measurement would say little; nothing was saved. Wait until they are done, or measure with "
            "`force=True`, which marks figures as noisy"
        )


def _has_quota() -> bool:
    return min(cgroup_cpu_quotas(), default=inf) < len(_usable_cpus(os.cpu_count() or 1))


def _usable_cpus(count: int) -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)


def _busy_seconds() -> tuple[float, float] | None:
    """Seconds in all, and of those busy ones, of the CPUs that this process may use; time that a hypervisor gave to
    others is busy."""
    try:
        per_cpu = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError):  # a container may hide /proc/stat
        return None
    total = busy = 0.0
    for times in (per_cpu[cpu] for cpu in _usable_cpus(len(per_cpu)) if cpu < len(per_cpu)):
        # Linux counts what guests use as user time already.
        every = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        total += every
        busy += every - times.idle - getattr(times, "iowait", 0.0)
    return total, busy


_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


_CGROUP_ROOT = Path("/sys/fs/cgroup")


def cgroup_cpu_quotas() -> Iterator[float]:
    """CPU quotas in cores, of this process's control group and every one above it."""
    for folder in _cgroup_folders(""):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            yield int(quota) / int(period)
    for folder in _cgroup_folders("cpu"):
        quota_v1, period_v1 = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota_v1.isdigit() and period_v1.isdigit():  # "-1" is no quota
            yield int(quota_v1) / int(period_v1)


def cgroup_memory_limits() -> Iterator[int]:
    """Memory limits in bytes, of this process's control group and every one above it."""
    names = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
    for controller, name in names:
        for folder in _cgroup_folders(controller):
            limit = _read(folder / name)
            if limit.isdigit():
                yield int(limit)


def _cgroup_folders(controller: str) -> list[Path]:
    """Folders of this process's control group and its parents; ``controller`` is empty for version 2."""
    for line in _read(_CGROUP_MEMBERSHIP).splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            mount = _CGROUP_ROOT / controller
            folder = mount / group.lstrip("/")
            # Inside a container the group's path may name the host's tree: then only the mount itself is ours.
            return [mount, *(p for p in (folder, *folder.parents) if mount in p.parents)]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
