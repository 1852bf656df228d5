"""The parity gate: an engine must equal the PyTorch submodel, output by output, case by case.

Rule, per element: ``|engine - reference| <= atol * max(1, rms(reference)) + rtol * |reference|``, and per output
cosine similarity at least ``min_cosine``. Both parts must hold (numpy's rule; Polygraphy's default is abs OR rel, which
lets a large error pass where the reference is large or small by chance). NaN or infinity in either side fails.
An output computed from another one (an entropy from its logits) inherits that one's error: the larger rms of the two
counts, and no cosine is asked of it, since entropies near zero have an angle that rounding turns at will.

Tolerances grow with depth because every layer adds its own rounding: float32 has a unit roundoff of 6e-8, a dot product
over a few thousand terms in another order moves a value of size 1 by about 1e-6, and LayerNorm keeps values near
size 1, so errors of layers add up and do not multiply. Measured on 6 layers of MiniLM: 4e-6 against 2.4e-5 allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..profiles.precision import INTEGERS, Precision
from ..runtime.manifest import ParityOutput, TensorSpec

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Tolerance:
    """Limits of the rule in this module's docstring."""

    atol: float
    rtol: float
    min_cosine: float

    @property
    def rule(self) -> str:
        return (
            f"abs <= {self.atol:.3g} * max(1, rms) + {self.rtol:.3g} * |reference| per element, "
            f"and cosine >= {self.min_cosine:g}"
        )


# Per layer of depth, by the precision of the engine's graph; docs/precision.md shows what was measured. Integers are
# held to the angle: where activations have outliers, single elements are off by several times what is usual in a layer.
_PER_LAYER: Mapping[Precision, Tolerance] = {
    "fp32": Tolerance(atol=4e-6, rtol=1e-5, min_cosine=1 - 1e-6),
    "fp16": Tolerance(atol=1e-2, rtol=1e-3, min_cosine=1 - 1e-4),
    "bf16": Tolerance(atol=2e-1, rtol=8e-3, min_cosine=1 - 2e-3),
    "int8": Tolerance(atol=1.0, rtol=0.1, min_cosine=0.85),
    "int8-dynamic": Tolerance(atol=1.0, rtol=0.1, min_cosine=0.85),
    "int4": Tolerance(atol=2.0, rtol=0.2, min_cosine=0.75),
}


def tolerance_for(precision: Precision, depth: int) -> Tolerance:
    """The tolerance for a graph of ``depth`` layers computing in ``precision``."""
    base = _PER_LAYER[precision]
    return Tolerance(base.atol * depth, base.rtol * depth, base.min_cosine)


@dataclass(frozen=True)
class Comparison:
    """Worst figures of one output over all cases; falsy if the rule was broken in ``failed_case``."""

    output: ParityOutput
    failed_case: str | None = None

    def __bool__(self) -> bool:
        return self.failed_case is None

    def describe(self) -> str:
        figures = self.output
        return (
            f"output {figures.name}, case {self.failed_case}: max abs {figures.max_abs:.3g}, "
            f"max rel {figures.max_rel:.3g}, cosine {figures.min_cosine:.7f}"
        )


def compare(
    reference: Sequence[Arrays],
    found: Sequence[Arrays],
    cases: Sequence[str],
    limit: Tolerance,
    computed_from: Mapping[str, str] | None = None,
) -> list[Comparison]:
    """Compares engine outputs ``found`` with ``reference``, one mapping of arrays per case.

    ``computed_from`` names, for an output, the one that it is computed from.
    """
    sources = computed_from or {}
    return [
        _compare_output(
            name,
            [r[name] for r in reference],
            [f[name] for f in found],
            cases,
            limit,
            [_rms(r[sources[name]]) if name in sources else None for r in reference],
        )
        for name in reference[0]
    ]


def judged(arrays: Arrays, outputs: Sequence[TensorSpec], precision: Precision, mask: np.ndarray | None) -> Arrays:
    """What of ``arrays`` the rule is asked of: in integers, positions that ``mask`` ``[B, S]`` leaves out are 0.

    There a model answers what nobody reads, from scores that are nearly equal, and integers tell those apart otherwise.
    """
    if mask is None or precision not in INTEGERS:
        return arrays
    hidden = {spec.name for spec in outputs if spec.dims[:2] == ("batch", "sequence")}
    return {
        name: np.where(mask.reshape(*mask.shape, *[1] * (array.ndim - 2)) != 0, array, 0) if name in hidden else array
        for name, array in arrays.items()
    }


def within(reference: np.ndarray, found: np.ndarray, limit: Tolerance, source_rms: float | None = None) -> bool:
    """Whether one array satisfies the rule; ``source_rms`` is that of the output which it is computed from."""
    if not _comparable(reference, found):
        return False
    r, f = reference.astype(np.float64), found.astype(np.float64)
    close = np.abs(f - r) <= limit.atol * max(1.0, _rms(r), source_rms or 0.0) + limit.rtol * np.abs(r)
    return bool(close.all()) and (source_rms is not None or _cosine(r, f) >= limit.min_cosine)


def max_difference(left: Sequence[Arrays], right: Sequence[Arrays]) -> float:
    """Largest absolute difference over all outputs and cases."""
    return max(float(np.abs(a[name] - b[name]).max()) for a, b in zip(left, right, strict=True) for name in a)


def _compare_output(
    name: str,
    reference: list[np.ndarray],
    found: list[np.ndarray],
    cases: Sequence[str],
    limit: Tolerance,
    source_rms: Sequence[float | None],
) -> Comparison:
    verdicts = [within(r, f, limit, rms) for r, f, rms in zip(reference, found, source_rms, strict=True)]
    # On failure the figures are those of the failed case, so that the message shows what broke the rule.
    chosen = range(len(cases)) if all(verdicts) else [verdicts.index(False)]
    pairs = [(reference[i].astype(np.float64), found[i].astype(np.float64)) for i in chosen]
    if not all(_comparable(r, f) for r, f in pairs):
        worst = ParityOutput(name, float("inf"), float("inf"), -1.0)
    else:
        worst = ParityOutput(
            name,
            max(float(np.abs(f - r).max()) for r, f in pairs),
            max(float((np.abs(f - r) / np.maximum(np.abs(r), 1e-3)).max()) for r, f in pairs),
            min(_cosine(r, f) for r, f in pairs),
        )
    return Comparison(worst, None if all(verdicts) else cases[verdicts.index(False)])


def _comparable(r: np.ndarray, f: np.ndarray) -> bool:
    return r.shape == f.shape and bool(np.isfinite(r).all() and np.isfinite(f).all())


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def _cosine(r: np.ndarray, f: np.ndarray) -> float:
    norm = float(np.linalg.norm(r) * np.linalg.norm(f))
    if norm == 0.0:
        return 1.0 if not r.any() and not f.any() else -1.0
    return float(np.vdot(r, f) / norm)
