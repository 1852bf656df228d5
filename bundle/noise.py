"""How far a measured latency may be trusted, as the format keeps it beside the figure, and the rule when it may not.

docs/decisions/0023-measurements.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..profiles.host_load import load_warning

# A figure is noisy beyond any of these. Between two submodels of a ladder lie some 10 %.
MOST_REPEAT = 1.10
MOST_SPREAD = 0.25


@dataclass(frozen=True)
class Noise:
    """Of a measured median: over ``runs`` timed runs the ``spread``, their interquartile range over the median;
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
