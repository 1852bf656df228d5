"""Every byte of a bundle, what a device added to it included; no engine runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .bundle.measurements import read_measurements
from .bundle.open_bundle import Bundle, open_bundle
from .bundle.plan_index import read_plan, read_plans
from .exits.calibration import read_calibration


@dataclass(frozen=True)
class CheckedBytes:
    """A bundle whose every byte is right: its listed ``files`` and their ``bytes``, calibrated ``policies``, ``plans``
    and ``measurements`` of hosts."""

    bundle: Bundle
    files: int
    bytes: int
    policies: int
    plans: int
    measurements: int

    def __str__(self) -> str:
        added = (
            (self.policies, "calibrated policies"),
            (self.plans, "plans"),
            (self.measurements, "measurements of hosts"),
        )
        also = "".join(f", {count} {what}" for count, what in added if count)
        return f"{self.files} files, {self.bytes / 1e6:.1f} MB{also}, every hash and seal as written"


def verify_bytes(path: str | os.PathLike[str]) -> CheckedBytes:
    """Checks all hashes and seals of the bundle in folder ``path``. Raises BundleFormatError or BundleCorruptError."""
    bundle = open_bundle(path, check="full")
    calibration, plans, measurements = read_calibration(bundle), read_plans(bundle), read_measurements(bundle)
    for plan in plans:
        read_plan(bundle, plan)
    files = bundle.manifest.files
    policies = len(calibration.policies) if calibration else 0
    hosts = len(measurements.hosts) if measurements else 0
    return CheckedBytes(bundle, len(files), sum(entry.bytes for entry in files), policies, len(plans), hosts)
