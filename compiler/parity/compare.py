"""The parity gate: an engine must equal the PyTorch submodel, output by output, case by case.

What it is held against is the submodel in float64. Rule, of the difference ``d = engine - reference`` of one output:

1. per element ``|d| <= atol * max(1, rms(reference)) + rtol * |reference|``,
2. ``rms(d) <= rms limit * max(1, rms(reference))``: in fp32 a tenth of ``atol``, since small errors everywhere are a
   fault where a single one is rounding,
3. the angle between the two, as cosine similarity, at least ``min_cosine``.

All must hold (numpy's rule; Polygraphy's default is abs OR rel, which lets a large error pass where the reference is
large or small by chance). NaN or infinity in either side fails. Of an output computed from another one (an entropy from
its logits) no angle is asked: entropies near zero have one that rounding turns at will.

Tolerances grow with depth because every layer adds its own rounding: float32 has a unit roundoff of 6e-8, a dot product
over a few thousand terms in another order moves a value of size 1 by about 1e-6, and LayerNorm keeps values near
size 1, so errors of layers add up and do not multiply. Measured on 6 layers of MiniLM: 5e-6 against 2.4e-5 allowed.

Some models do multiply them: large gains or weights make a difference of one rounding into one of thousands. How much
is measured, not guessed: PyTorch's own float32 on the same input has such an error too (``Rounding``). Where it takes
up more than half of one of the limits, four times the rest is allowed on top; other models are judged by the limits
alone. Where it exceeds a hundredth of the output, nothing that is worth the name would be proved, and the output is
refused as ``unprovable``. docs/decisions/0017 has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...profiles.precision import INTEGERS, Precision
from ...runtime.bundle.manifest import ParityOutput, TensorSpec
from ...runtime.inputs.arrays import Arrays

# Two float32 computations of one value are off by as much in the mean, but either may be lucky.
_ROUNDING_FACTOR = 4.0
# Of an output's size: what PyTorch's float32 may be off by at most.
_MAX_ROUNDING = 0.01


@dataclass(frozen=True)
class Tolerance:
    """Limits of the rule in this module's docstring."""

    atol: float
    rtol: float
    min_cosine: float
    rms: float

    @property
    def rule(self) -> str:
        return (
            f"abs <= {self.atol:.3g} * max(1, rms) + {self.rtol:.3g} * |reference| per element, rms of it <= "
            f"{self.rms:.3g} * max(1, rms), and cosine >= {self.min_cosine:g}, each wider by {_ROUNDING_FACTOR:g} "
            "times what PyTorch's own float32 is off by beyond half of it"
        )


@dataclass(frozen=True)
class Rounding:
    """What PyTorch's own float32 differs by from the reference, on one output of one case: at most, and rms."""

    max_abs: float = 0.0
    rms: float = 0.0

    def worst(self, other: Rounding) -> Rounding:
        return Rounding(max(self.max_abs, other.max_abs), max(self.rms, other.rms))


Roundings = Mapping[str, Rounding]


def widened(limit: float, own: float) -> float:
    """``limit`` where PyTorch's ``own`` error takes up at most half of it; more of it where that takes up more."""
    return limit + _ROUNDING_FACTOR * max(0.0, own - limit / 2)


def rounding(reference: np.ndarray, float32: np.ndarray) -> Rounding:
    """Of one output; infinite where ``float32`` is not finite."""
    if not np.isfinite(float32).all():
        return Rounding(float("inf"), float("inf"))
    difference = float32.astype(np.float64) - reference
    return Rounding(float(np.abs(difference).max(initial=0.0)), _rms(difference))


# Per layer of depth, by the precision of the engine's graph; docs/precision.md shows what was measured. Integers are
# held to the angle: where activations have outliers, single elements are off by several times what is usual in a layer.
# Precisions below fp32 round everywhere, so that their rms limit is no other than what holds of each element.
_TOLERANCE_PER_LAYER: Mapping[Precision, Tolerance] = {
    "fp32": Tolerance(atol=4e-6, rtol=1e-5, min_cosine=1 - 1e-6, rms=4e-7),
    "fp16": Tolerance(atol=1e-2, rtol=1e-3, min_cosine=1 - 1e-4, rms=1.1e-2),
    "bf16": Tolerance(atol=2e-1, rtol=8e-3, min_cosine=1 - 2e-3, rms=2.08e-1),
    "int8": Tolerance(atol=1.0, rtol=0.1, min_cosine=0.85, rms=1.1),
    "int8-dynamic": Tolerance(atol=1.0, rtol=0.1, min_cosine=0.85, rms=1.1),
    "int4": Tolerance(atol=2.0, rtol=0.2, min_cosine=0.75, rms=2.2),
}


def tolerance_for(precision: Precision, depth: int) -> Tolerance:
    """The tolerance for a graph of ``depth`` layers computing in ``precision``."""
    base = _TOLERANCE_PER_LAYER[precision]
    return Tolerance(base.atol * depth, base.rtol * depth, base.min_cosine, base.rms * depth)


@dataclass(frozen=True)
class Comparison:
    """Worst figures of one output over all cases; falsy if the rule was broken in ``failed_case``, where PyTorch's own
    float32 may be no reference (``unprovable``)."""

    output: ParityOutput
    failed_case: str | None = None
    unprovable: bool = False

    def __bool__(self) -> bool:
        return self.failed_case is None

    def describe(self) -> str:
        figures = self.output
        if self.unprovable:
            return (
                f"output {figures.name}, case {self.failed_case}: PyTorch's own float32 differs from its float64 by "
                f"{figures.float32_max_abs:.3g} (rms {figures.float32_rms:.3g}), more than {_MAX_ROUNDING:.0%} of "
                "the output; this model needs more than float32, and no comparison would prove anything"
            )
        return (
            f"output {figures.name}, case {self.failed_case}: max abs {figures.max_abs:.3g}, "
            f"max rel {figures.max_rel:.3g}, cosine {figures.min_cosine:.7f}"
        )


def compare(
    reference: Sequence[Arrays],
    found: Sequence[Arrays],
    cases: Sequence[str],
    limit: Tolerance,
    roundings: Sequence[Roundings] | None = None,
    computed: Collection[str] = (),
) -> list[Comparison]:
    """Compares engine outputs ``found`` with ``reference``, one mapping of arrays per case.

    ``roundings`` are PyTorch's own, none where they are not known. ``computed`` names outputs that are computed from
    another one.
    """
    own = roundings or [{} for _ in cases]
    return [
        _compare_output(
            name,
            [r[name] for r in reference],
            [f[name] for f in found],
            cases,
            limit,
            [case.get(name, Rounding()) for case in own],
            name not in computed,
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


def within(
    reference: np.ndarray, found: np.ndarray, limit: Tolerance, own: Rounding | None = None, has_angle: bool = True
) -> bool:
    """Whether one array satisfies the rule, ``own`` being PyTorch's error on it."""
    if not _comparable(reference, found):
        return False
    own = own or Rounding()
    r, f = reference.astype(np.float64), found.astype(np.float64)
    size = _rms(r)
    scale = max(1.0, size)
    allowed = widened(limit.atol * scale, own.max_abs) + limit.rtol * np.abs(r)
    if not (np.abs(f - r) <= allowed).all() or not _rms(f - r) <= widened(limit.rms * scale, own.rms):
        return False
    return not has_angle or _cosine(r, f) >= _least_cosine(limit, own, size)


def unprovable(reference: np.ndarray, own: Rounding, has_angle: bool = True) -> bool:
    """Whether PyTorch's own error is so large that equality with it says nothing."""
    if not np.isfinite(reference).all():
        return False  # which fails for itself
    size = _rms(reference)
    return not own.rms <= _MAX_ROUNDING * (size if has_angle else max(1.0, size))


def _least_cosine(limit: Tolerance, own: Rounding, size: float) -> float:
    """For small angles a cosine is ``1 - angle^2 / 2``, and the angle the error over the ``size`` of the output."""
    angle = math.sqrt(2 * (1 - limit.min_cosine))
    beyond = widened(angle, own.rms / size if size else 0.0)
    return limit.min_cosine if beyond == angle else 1 - beyond**2 / 2


def max_difference(left: Sequence[Arrays], right: Sequence[Arrays]) -> float:
    """Largest absolute difference over all outputs and cases."""
    return max(float(np.abs(a[name] - b[name]).max()) for a, b in zip(left, right, strict=True) for name in a)


def _compare_output(
    name: str,
    reference: list[np.ndarray],
    found: list[np.ndarray],
    cases: Sequence[str],
    limit: Tolerance,
    own: Sequence[Rounding],
    has_angle: bool,
) -> Comparison:
    blind = [unprovable(r, o, has_angle) for r, o in zip(reference, own, strict=True)]
    triples = zip(reference, found, own, strict=True)
    verdicts = [not lost and within(r, f, limit, o, has_angle) for lost, (r, f, o) in zip(blind, triples, strict=True)]
    # On failure the figures are those of the failed case, so that the message shows what broke the rule.
    chosen = list(range(len(cases))) if all(verdicts) else [verdicts.index(False)]
    pairs = [(reference[i].astype(np.float64), found[i].astype(np.float64)) for i in chosen]
    torch_abs, torch_rms = max(own[i].max_abs for i in chosen), max(own[i].rms for i in chosen)
    if not all(_comparable(r, f) for r, f in pairs):
        worst = ParityOutput(name, float("inf"), float("inf"), -1.0, float("inf"), torch_abs, torch_rms)
    else:
        worst = ParityOutput(
            name,
            max(float(np.abs(f - r).max()) for r, f in pairs),
            max(float((np.abs(f - r) / np.maximum(np.abs(r), 1e-3)).max()) for r, f in pairs),
            min(_cosine(r, f) for r, f in pairs),
            max(_rms(f - r) for r, f in pairs),
            torch_abs,
            torch_rms,
        )
    failed = None if all(verdicts) else verdicts.index(False)
    return Comparison(worst, None if failed is None else cases[failed], failed is not None and blind[failed])


def _comparable(r: np.ndarray, f: np.ndarray) -> bool:
    return r.shape == f.shape and bool(np.isfinite(r).all() and np.isfinite(f).all())


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def _cosine(r: np.ndarray, f: np.ndarray) -> float:
    norm = float(np.linalg.norm(r) * np.linalg.norm(f))
    if norm == 0.0:
        return 1.0 if not r.any() and not f.any() else -1.0
    return float(np.vdot(r, f) / norm)
