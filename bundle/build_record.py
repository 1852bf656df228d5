"""The build record of a bundle, as docs/bundle-format.md specifies it: time, host, and everything measured.

docs/decisions/0023-measurements.md gives the reasons for the rule when a figure is noisy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..profiles.host_load import load_warning
from .entries.engine_entry import Residency

# A figure is noisy beyond any of these. Between two submodels of a ladder lie some 10 %.
MOST_REPEAT = 1.10
MOST_SPREAD = 0.25


@dataclass(frozen=True)
class Noise:
    """Noise of a measured median: over ``runs`` timed runs the ``spread``, their interquartile range over the median;
    ``repeat_ratio``, the A/A ratio: the engine was measured again in the same minutes, in turns with others, and this
    is the next best median over the best; and ``others_share``, how much of this process's CPUs other programs used
    meanwhile, 0 to 1. The latter two are None where they are not known.
    """

    runs: int = field(metadata={"min": 1})
    spread: float = field(metadata={"min": 0})
    repeat_ratio: float | None = field(default=None, metadata={"min": 1})
    others_share: float | None = field(default=None, metadata={"min": 0, "max": 1})

    @property
    def problem(self) -> str | None:
        """Why the figure is noisy, or None where it is not."""
        problems = []
        if self.repeat_ratio is not None and self.repeat_ratio > MOST_REPEAT:
            problems.append(f"measured twice it differs by {self.repeat_ratio - 1:.0%} (at most {MOST_REPEAT - 1:.0%})")
        if self.spread > MOST_SPREAD:
            problems.append(f"its runs spread by {self.spread:.0%} (at most {MOST_SPREAD:.0%})")
        if (busy := load_warning(self.others_share)) is not None:
            problems.append(busy)
        return ", ".join(problems) or None


def is_noisy(noise: Noise | None) -> bool:
    """Whether a figure is known to be noisy."""
    return noise is not None and noise.problem is not None


def noisy_figures(figures: Iterable[tuple[str, Noise]]) -> str | None:
    """How many of the ``figures``, each by its engine's id, are noisy, and why the first one is; None if none is."""
    known = list(figures)
    noisy = [(engine, noise.problem) for engine, noise in known if noise.problem]
    if not noisy:
        return None
    engines, measured = ({engine for engine, _ in pairs} for pairs in (noisy, known))
    engine, problem = noisy[0]
    return (
        f"{len(noisy)} of {len(known)} measured latencies, in {len(engines)} of {len(measured)} engines, are noisy "
        f"({engine}: {problem})"
    )


@dataclass(frozen=True)
class LatencyPoint:
    """Time of an engine at one shape, in milliseconds, predicted and measured, never mixed: the field name says which.

    ``predicted_ms`` was stated before this engine was measured; for a profile of the compiling host itself it is
    corrected by a few measured rungs. ``noise`` says how far to trust the measured figures, and is None where there is
    none.
    """

    batch: int = field(metadata={"min": 1})
    sequence: int = field(metadata={"min": 1})
    predicted_ms: float = field(metadata={"min": 0})
    measured_p50_ms: float | None = field(default=None, metadata={"min": 0})
    measured_p95_ms: float | None = field(default=None, metadata={"min": 0})
    noise: Noise | None = None


def is_grid(sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether ``sizes`` are every batch at every sequence, once."""
    grid = len({batch for batch, _ in sizes}) * len({sequence for _, sequence in sizes})
    return bool(sizes) and grid == len(set(sizes)) == len(sizes)


@dataclass(frozen=True)
class Latency:
    """Times of one engine at its shape or, of a range, at every batch of some at every sequence of some; what was
    measured is of one ``residency``."""

    engine: str
    points: tuple[LatencyPoint, ...]
    residency: Residency | None = None

    @property
    def largest(self) -> LatencyPoint:
        """The largest shape."""
        return max(self.points, key=lambda point: (point.batch, point.sequence))

    @property
    def is_measured(self) -> bool:
        return any(point.measured_p50_ms is not None for point in self.points)

    @property
    def noises(self) -> tuple[Noise, ...]:
        """Noise of every measured figure of this engine, as far as it is known."""
        return tuple(point.noise for point in self.points if point.noise is not None)


@dataclass(frozen=True)
class BuildRecord:
    """Everything that differs between two compiles of the same inputs: time, host, and everything measured.

    ``report_sha256`` is the hash of report.md. ``seconds`` and ``cpu_seconds``, those of all threads, are by stage.
    ``job_sha256`` is that of everything that the bundle follows from (``JobKeys`` of compiler/provenance.py).
    """

    schema_version: int
    manifest_sha256: str
    created: str
    command: tuple[str, ...]
    host: Mapping[str, Any]
    seconds: Mapping[str, float] = field(metadata={"min": 0})
    cpu_seconds: Mapping[str, float] = field(metadata={"min": 0})
    latencies: tuple[Latency, ...]
    report_sha256: str | None = None
    job_sha256: str | None = None
