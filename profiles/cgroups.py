"""Limits of this process's control groups, of either version, on CPUs and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
