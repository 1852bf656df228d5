"""How TensorRT builds plans for a device; the part of a device profile that only this backend reads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..strict import unstructure

# On which GPUs a plan runs: on the model that built it; on any of its compute capability; on any from Ampere on.
HardwareCompatibility = Literal["none", "same_compute_capability", "ampere_plus"]


@dataclass(frozen=True)
class TensorRTOptions:
    """Options of the builder.

    ``workspace_mb`` (10^6 bytes) bounds what one layer may use beside its tensors; None leaves the whole device to it.
    ``optimization_level`` trades build time for speed, from 0 to 5. ``tf32``: products of float32 may drop mantissa
    bits to run on tensor cores, beyond what the parity tolerance of fp32 allows. ``strip_weights``: plans hold no
    weights, they take them from the weight store when they are opened. ``version_compatible``: plans also run on later
    releases of TensorRT, at some cost in speed. A build that takes longer than ``time_limit_s`` is stopped.
    """

    workspace_mb: int | None = field(default=None, metadata={"min": 1})
    optimization_level: Literal[0, 1, 2, 3, 4, 5] = 3
    tf32: bool = False
    strip_weights: bool = True
    version_compatible: bool = False
    hardware_compatibility: HardwareCompatibility = "none"
    time_limit_s: float | None = field(default=None, metadata={"min": 1})

    @property
    def key(self) -> dict[str, Any]:
        """What a plan follows from, as plain data: everything but how long its build may take."""
        data: dict[str, Any] = unstructure(replace(self, time_limit_s=None))
        return data
