"""What a submodel asks of a device, operation by operation, before anything is traced (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpKind = Literal["gemm", "batched_gemm", "elementwise", "gather"]


@dataclass(frozen=True)
class Op:
    """One operation of a submodel at one bucket.

    ``flops`` counts a multiply-add as two. ``weight_bytes`` are read once per pass; ``activation_bytes`` are the
    inputs read plus the outputs written.
    """

    name: str
    kind: OpKind
    flops: int
    weight_bytes: int
    activation_bytes: int
