"""The build record of a bundle, as docs/bundle-format.md specifies it: time, host, and everything measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .entries.engine_entry import Residency
from .noise import Noise


@dataclass(frozen=True)
class LatencyPoint:
    """Predicted and measured time of an engine at one shape of its range, in milliseconds, and the ``noise`` of the
    latter; see ``Latency``."""

    batch: int = field(metadata={"min": 1})
    sequence: int = field(metadata={"min": 1})
    predicted_ms: float = field(metadata={"min": 0})
    measured_p50_ms: float | None = field(default=None, metadata={"min": 0})
    measured_p95_ms: float | None = field(default=None, metadata={"min": 0})
    noise: Noise | None = None


@dataclass(frozen=True)
class Latency:
    """Predicted and measured time of one engine, in milliseconds, never mixed: the field name says which.

    ``predicted_ms`` was stated before this engine was measured; for a profile of the compiling host itself it is
    corrected by a few measured rungs. An engine of a range has ``points``, every batch of some at every sequence of
    some; its other figures are those of its largest shape. ``noise`` says how far to trust the measured ones, and is
    None where nothing was measured.
    """

    engine: str
    predicted_ms: float = field(metadata={"min": 0})
    measured_p50_ms: float | None = field(default=None, metadata={"min": 0})
    measured_p95_ms: float | None = field(default=None, metadata={"min": 0})
    residency: Residency | None = None
    points: tuple[LatencyPoint, ...] | None = None
    noise: Noise | None = None

    @property
    def noises(self) -> tuple[Noise, ...]:
        """Of every measured figure of this engine, as far as they are known."""
        return tuple(one.noise for one in self.points or (self,) if one.noise is not None)


@dataclass(frozen=True)
class BuildRecord:
    """What differs between two compiles of the same inputs: time, host, and everything measured.

    ``build`` maps the graphs of engines for TensorRT to the ``trtexec`` command that makes a plan of each.
    ``report_sha256`` is the hash of report.md. ``seconds`` and ``cpu_seconds``, those of all threads, are by stage.
    """

    schema_version: int
    manifest_sha256: str
    created: str
    command: tuple[str, ...]
    host: Mapping[str, Any]
    seconds: Mapping[str, float] = field(metadata={"min": 0})
    cpu_seconds: Mapping[str, float] = field(metadata={"min": 0})
    latencies: tuple[Latency, ...]
    build: Mapping[str, str] | None = None
    report_sha256: str | None = None
