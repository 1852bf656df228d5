"""This host as a device profile: what it is, and how fast ONNX Runtime works on it.

Rates are measured once and kept in a private cache, so that two compiles on one host see the same figures.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata, util
from pathlib import Path

import psutil

from ..errors import OutputError, ProfileError
from ..outside_file import read_json
from ..strict import structure, unstructure
from ..whole_file import write_whole
from .backends import BACKENDS, ONNXRUNTIME
from .device_profile import SCHEMA_VERSION, DeviceProfile, Rates, read_profile
from .host_load import OthersLoad, cgroup_cpu_quotas, cgroup_memory_limits, is_busy, others_now, require_quiet

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
