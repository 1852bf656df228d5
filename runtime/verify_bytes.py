"""Every byte of a bundle, what a device added to it included; no engine runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..bundle.device_files.measurements import read_measurements
from ..bundle.device_files.plan_index import read_plan, read_plans
from ..bundle.device_files.task_index import read_tasks
from ..bundle.open_bundle import Bundle, open_bundle
from .exits.calibration import read_calibration
from .generation.draft_gains import read_drafts
from .graphs.task_tensors import read_task_tensors


@dataclass(frozen=True)
class CheckedBytes:
    """A bundle whose every byte is right: its listed ``files`` and their ``bytes``, calibrated ``policies``, ``plans``,
    ``measurements`` and ``drafts`` of hosts, and ``tasks``."""

    bundle: Bundle
    files: int
    bytes: int
    policies: int
    plans: int
    measurements: int
    drafts: int = 0
    tasks: int = 0

    def __str__(self) -> str:
        added = (
            (self.policies, "calibrated policies"),
            (self.plans, "plans"),
            (self.measurements, "measurements of hosts"),
            (self.drafts, "calibrations of drafts"),
            (self.tasks, "tasks"),
        )
        also = "".join(f", {count} {what}" for count, what in added if count)
        return f"{self.files} files, {self.bytes / 1e6:.1f} MB{also}, every hash and seal as written"


def verify_bytes(path: str | os.PathLike[str]) -> CheckedBytes:
    """Checks all hashes and seals of the bundle in folder ``path``. Raises BundleFormatError or BundleCorruptError."""
    bundle = open_bundle(path, check="full")
    calibration, plans, measurements = read_calibration(bundle), read_plans(bundle), read_measurements(bundle)
    for plan in plans:
        read_plan(bundle, plan)
    tasks = read_tasks(bundle)
    for task in tasks:
        read_task_tensors(bundle, task)
    files = bundle.manifest.files
    policies = len(calibration.policies) if calibration else 0
    hosts = len(measurements.hosts) if measurements else 0
    drafts = read_drafts(bundle)
    calibrated = len(drafts.hosts) if drafts else 0
    size = sum(entry.bytes for entry in files)
    return CheckedBytes(bundle, len(files), size, policies, len(plans), hosts, calibrated, len(tasks))
