"""This host as a device profile: what it is, and how fast ONNX Runtime works on it; and other programs' share of its
CPUs, by the system's counters, with the limits of this process's control groups.

Rates are measured once and kept in a private cache, so that two compiles on one host see the same figures.

Linux and macOS have the counters alike. The load average is no measure of others: it counts this process too, and
looks back over a minute. One rule for all that measures this host: a figure is noisy where others used more than
``MOST_OTHERS``. Commands that measure in order to keep figures refuse, unless they are forced; others mark what they
show or keep beside their work.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata, util
from math import inf
from pathlib import Path
from time import perf_counter, process_time, sleep

import psutil

from ..errors import MeasurementError, OutputError, ProfileError
from ..outside_file import read_json
from ..strict import structure, unstructure
from ..whole_file import write_whole
from .backends import BACKENDS, ONNXRUNTIME
from .device_profile import SCHEMA_VERSION, DeviceProfile, Rates, read_profile

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


HOST_PROFILE_NAME = "host-cpu"

# Part of the rates' key: raised when the micro-benchmarks change their meaning.
_MEASUREMENT_VERSION = 4
_LOOK_SECONDS = 1.0
# Before marked rates are measured again: every command that asks for this host's profile waits for it.
_GLANCE_SECONDS = 0.25
# Defaults that the probe cannot know. Shares of the universal model's latency; half is within reach of every encoder's
# ladder, also of one that shrinks the feed-forward width alone.
_DEFAULT_BUCKETS = ("1x1..512",)
_DEFAULT_BUDGET_AT = "1x128"
_DEFAULT_BUDGETS: Mapping[str, Mapping[str, str | bool]] = {
    "full": {},
    "balanced": {"latency_ms": "80 %", "optional": True},
    "fast": {"latency_ms": "65 %", "optional": True},
    "tiny": {"latency_ms": "50 %", "optional": True},
}


@dataclass(frozen=True)
class HostFacts:
    """Resources that this process may use. ``memory_mb`` is the machine's or the container's, ``backends`` name to
    version."""

    cpu: str
    architecture: str
    system: str
    cores: int
    memory_mb: float
    backends: Mapping[str, str]


def probe_host() -> HostFacts:
    """Facts of this host, within the limits of CPU affinity and control groups. Imports no backend."""
    return HostFacts(
        cpu=_cpu_name(),
        architecture=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
        cores=usable_cores(),
        memory_mb=_usable_memory_bytes() / 1e6,
        backends=dict(_installed_backends()),
    )


def measured_profile(force: bool = False) -> DeviceProfile:
    """The ``host-cpu`` profile, measured again. Raises as ``host_profile``, and MeasurementError on a host that is too
    busy to measure, unless ``force``: then its rates are marked."""
    if not force:
        require_quiet(others_now(_LOOK_SECONDS))
    profile = host_profile(refresh=True)
    if not force:  # it may have become busy since
        require_quiet(profile.rates.others_share)
    return profile


def host_profile(refresh: bool = False) -> DeviceProfile:
    """The ``host-cpu`` profile of this host; ``refresh`` measures its rates again.

    Half of the memory is counted on: the rest is left to the system and to the program around the engines. Rates that
    were measured while other programs were busy are marked (``Rates.others_share``), and measured again by the next
    call that finds a quiet host. Raises ProfileError if ONNX Runtime is not installed.
    """
    facts = probe_host()
    if ONNXRUNTIME.name not in facts.backends:
        raise ProfileError(f"profile {HOST_PROFILE_NAME}: onnxruntime is not installed; install nestforge[cpu]")
    data = {
        "schema_version": SCHEMA_VERSION,
        "name": HOST_PROFILE_NAME,
        "description": f"{facts.cpu}, {facts.cores} cores, {facts.system}",
        "backend": ONNXRUNTIME.name,
        "cores": facts.cores,
        "memory_mb": round(facts.memory_mb / 2),
        "rates": unstructure(_cached_rates(facts, refresh)),
        "width_multiple": 16,
        "buckets": list(_DEFAULT_BUCKETS),
        "budget_at": _DEFAULT_BUDGET_AT,
        "budgets": _DEFAULT_BUDGETS,
        "host": _fingerprint(facts),
    }
    return read_profile(data, HOST_PROFILE_NAME)


def free_memory_bytes() -> int:
    """Memory and swap that no program uses now, and a container's limits allow: no more can be taken."""
    return min([int(psutil.virtual_memory().available + psutil.swap_memory().free), *cgroup_memory_limits()])


def is_this_host(profile: DeviceProfile) -> bool:
    """Whether ``profile`` was probed on this machine, with this version of ONNX Runtime.

    A new kernel, another memory limit, or an environment without the compiler's packages make no other host.
    """
    return profile.host is not None and profile.host == _fingerprint(probe_host())


def cache_folder() -> Path:
    """``nestforge`` in ``$XDG_CACHE_HOME`` (default ``~/.cache``); created readable by this user alone."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nestforge"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _cached_rates(facts: HostFacts, refresh: bool) -> Rates:
    from .measure_rates import measure_host_rates

    path = kept = None
    with contextlib.suppress(OSError):  # a home that cannot be written costs only a new measurement each time
        path = cache_folder() / f"host-rates-{_rates_key(facts)}.json"
        with contextlib.suppress(ProfileError, ValueError):  # a damaged entry is measured again
            kept = structure(Rates, read_json(path, ProfileError), str(path), ProfileError)
    if kept is not None and not refresh and (kept.others_share is None or is_busy(others_now(_GLANCE_SECONDS))):
        return kept
    load = OthersLoad()
    rates = measure_host_rates(facts.cores)
    share = load.share()
    if is_busy(share):
        rates = replace(rates, others_share=share)
    # Good rates are not given up for noisy ones.
    if path is not None and (rates.others_share is None or kept is None or kept.others_share is not None):
        data = json.dumps(unstructure(rates)).encode()
        with contextlib.suppress(OutputError):
            write_whole(path, lambda stream: stream.write(data), "the rates", mode=0o600)
    return rates


def _fingerprint(facts: HostFacts) -> str:
    """Conditions under which measured latencies hold."""
    return _hash([facts.cpu, facts.architecture, facts.cores, facts.backends.get(ONNXRUNTIME.name)])


def _rates_key(facts: HostFacts) -> str:
    """Everything that the micro-benchmarks see: a new kernel, say, is measured again."""
    # With the onnx package the rates come from ONNX Runtime, without it from numpy: not the same figures.
    return _hash([_MEASUREMENT_VERSION, asdict(facts), util.find_spec("onnx") is not None])


def _hash(key: list[object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _installed_backends() -> Iterator[tuple[str, str]]:
    for backend in BACKENDS.values():
        for name in backend.distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                yield backend.name, metadata.version(name)
                break


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        table = {key.strip(): value.strip() for key, _, value in lines}
        # Arm kernels name no model; the board's name says more than the bare architecture.
        for key in ("model name", "Model", "Hardware"):
            if table.get(key):
                return table[key]
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use; hyper-threads of one core count once, dense fp32 work gains nothing there."""
    limits = [os.cpu_count() or 1, psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    limits += [max(1, round(quota)) for quota in cgroup_cpu_quotas()]
    return min(limits)


def _usable_memory_bytes() -> int:
    return min([int(psutil.virtual_memory().total), *cgroup_memory_limits()])
