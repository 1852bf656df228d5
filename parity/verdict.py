"""Whether an export's answers are the model's, by the gate's rule (compiler/parity/compare.py) and its evidence.

The reference is PyTorch in float64. What may differ is measured on the same inputs: an export in fp32 by what PyTorch's
own float32 is off by, one of lower precision by what PyTorch is off by when it rounds as that precision does
(simulated.py). Four times that is allowed beyond the limits of fp32. Where a broken case may be one of bad luck, passes
with moved weights tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from ..compiler.parity.compare import Rounding, Tolerance, comparable, rounding, tolerance_for, unprovable, within
from ..compiler.parity.reading import nudged
from ..profiles.parity_request import Preset
from ..profiles.precision import Precision
from ..runtime.inputs.arrays import Array, Arrays
from .cases import Trial
from .model import Model
from .simulated import simulated

# Limits of --preset deploy: differences that a ranking or a classifier does not notice.
_DEPLOY_COSINE, _DEPLOY_AGREEMENT = 0.99, 0.99
_PASSES = 8
# Beyond so many times what PyTorch itself is off by, no pass with moved weights explains a difference.
_BEYOND_LUCK = 64.0
_CLIPPED = 2.0


@dataclass(frozen=True)
class Figures:
    """One output on one case. ``own`` is what PyTorch itself is off by there, at most; ``agreement`` the share of
    rows and positions with the same largest element, near ties left out; ``why`` says what a failure is."""

    case: str
    output: str
    max_abs: float
    max_rel: float
    cosine: float
    rms: float
    agreement: float | None
    own: float
    why: str | None = None

    @property
    def is_right(self) -> bool:
        return self.why is None

    @property
    def row(self) -> tuple[str, ...]:
        """By ``COLUMNS``."""
        agreement = "-" if self.agreement is None else f"{self.agreement:.1%}"
        sizes = f"{self.max_abs:.1e}", f"{self.max_rel:.1e}", f"{self.cosine:.7f}"
        return (self.case, self.output, *sizes, agreement, f"{self.own:.1e}", "right" if self.is_right else "differs")


COLUMNS = ("case", "output", "max abs", "max rel", "cosine", "same largest", "PyTorch's own", "verdict")


@dataclass(frozen=True)
class Rule:
    """The limits of an export in ``precision`` of a model with so many layers."""

    precision: Precision
    depth: int
    tolerance: float | None = None
    preset: Preset | None = None

    @property
    def limit(self) -> Tolerance:
        return tolerance_for("fp32", self.depth)

    @property
    def simulates(self) -> bool:
        """Whether PyTorch rounds as the export's precision does, to measure what may differ."""
        return self.precision != "fp32" and self.preset != "strict"

    def __str__(self) -> str:
        if self.tolerance is not None:
            return f"|difference| <= {self.tolerance:g} * rms of the output"
        if self.preset == "deploy":
            return f"cosine of every row >= {_DEPLOY_COSINE:g}, same largest element in {_DEPLOY_AGREEMENT:.0%}"
        own = f"PyTorch rounding as {self.precision}" if self.simulates else "PyTorch's own float32"
        return f"{self.limit.rule.partition(', each')[0]}; wider by 4 times what {own} is off by there"

    def passed(self, model: Model, trial: Trial) -> dict[str, Array]:
        """PyTorch's answers as it rounds by itself, or as the export's precision does."""
        with simulated(self.precision) if self.simulates else nullcontext():
            return model.answer(trial.feeds)

    def judge(self, case: str, output: str, expected: Array, found: Array, own: Rounding) -> Figures:
        """The figures of ``found`` beside ``expected`` (float64), and why it is not accepted, if it is not."""
        nothing = Figures(case, output, 0.0, 0.0, -1.0, 0.0, None, own.largest)
        broken = replace(nothing, max_abs=np.inf, max_rel=np.inf, rms=np.inf)
        if expected.shape != found.shape:
            return replace(broken, why=f"shape {list(found.shape)}, expected {list(expected.shape)}")
        if not np.isfinite(found).all():
            count = int((~np.isfinite(found)).sum())
            return replace(broken, why=f"{count} of {found.size} numbers are NaN or infinite")
        if not np.isfinite(expected).all():
            count = int((~np.isfinite(expected)).sum())
            return replace(broken, why=f"{count} of {expected.size} numbers of the model itself are NaN or infinite")
        e, f = expected.astype(np.float64, copy=False), found.astype(np.float64)
        figures = replace(nothing, cosine=_cosine(e, f), agreement=_agreement(e, f, own.largest))
        if e.size:
            off = np.subtract(f, e)
            rms = float(np.linalg.norm(off.reshape(-1))) / np.sqrt(off.size)
            figures = replace(figures, max_abs=float(np.abs(off, out=off).max()), rms=float(rms))
            figures = replace(figures, max_rel=float(np.divide(off, np.abs(e).clip(1e-3), out=off).max()))
            del off  # logits are large, and the rule makes as much again
        return replace(figures, why=self._problem(figures, e, f, own))

    def _problem(self, figures: Figures, e: Array, f: Array, own: Rounding) -> str | None:
        if self.tolerance is not None:
            most = self.tolerance * float(np.sqrt(np.mean(e**2)))
            return None if figures.max_abs <= most else f"max abs {figures.max_abs:.3g}, allowed {most:.3g}"
        if self.preset == "deploy":
            rows = min((_cosine(a, b) for a, b in zip(_rows(e), _rows(f), strict=True)), default=1.0)
            if rows < _DEPLOY_COSINE:
                return f"cosine {rows:.4f} of a row, accepted from {_DEPLOY_COSINE:g}"
            low = figures.agreement is not None and figures.agreement < _DEPLOY_AGREEMENT
            return f"same largest element in {figures.agreement:.1%}" if low else None
        if within(e, f, self.limit, own):
            return None
        if not self.simulates and unprovable(e, own):
            return f"PyTorch's own float32 is off by {own.largest:.3g} here; nothing can be proved"
        return (
            f"max abs {figures.max_abs:.3g} (PyTorch itself {own.largest:.2g}), max rel {figures.max_rel:.3g}, cosine "
            f"{figures.cosine:.7f}"
        )

    def same(self, expected: Array, found: Array, own: Rounding) -> bool:
        """Whether an intermediate value is the model's, as far as it can be told."""
        return comparable(expected, found) and within(expected, found, self.limit, own.of_all, least_scale=0.0)


def judged(
    model: Model, rule: Rule, trials: Sequence[Trial], expected: Mapping[str, Arrays], answered: Mapping[str, Arrays]
) -> list[Figures]:
    """The figures of every output on the cases that were ``answered``."""
    owns: dict[tuple[int, str], Rounding] = {}
    for number, trial in enumerate(trials):
        passed = rule.passed(model, trial)
        for output in answered[trial.name]:
            wanted = trial.counted(expected[trial.name][output], output)
            own = rounding(wanted, trial.counted(passed[output], output))
            owns[number, output] = own.of_all if rule.simulates else own  # rounded as the export, anywhere counts
    found = []
    for (number, output), own in owns.items():
        trial = trials[number]
        wanted, got = (trial.counted(side[trial.name][output], output) for side in (expected, answered))
        if rule.simulates and rule.precision == "int8":
            own = _of_fixed_scales([each for (_, name), each in owns.items() if name == output])
        figures = rule.judge(trial.name, output, wanted, got, own)
        for seed in range(_PASSES):  # the one pass of PyTorch may have been a lucky one
            if figures.is_right or rule.simulates or not figures.max_abs <= _BEYOND_LUCK * figures.own:
                break
            with nudged(model.module, seed):
                moved = model.answer(trial.feeds)[output]
            own = own.worst(rounding(wanted, trial.counted(moved, output)))
            figures = rule.judge(trial.name, output, wanted, got, own)
        found.append(figures)
    return found


def _of_fixed_scales(owns: Sequence[Rounding]) -> Rounding:
    """The rounding where scales were fixed on examples: one set serves every input, so that the worst of all cases
    counts, and twice of it, since other inputs are clipped, which is not simulated."""
    largest, rms = max(own.largest for own in owns), max(own.rms_of_all for own in owns)
    return Rounding(_CLIPPED * largest, _CLIPPED * rms)


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array[None]


def _cosine(e: Array, f: Array) -> float:
    norm = float(np.linalg.norm(e) * np.linalg.norm(f))
    if norm == 0.0:
        return 1.0 if not e.any() and not f.any() else 0.0
    return float(np.vdot(e, f) / norm)


def _agreement(e: Array, f: Array, own: float) -> float | None:
    if e.ndim < 2 or e.shape[-1] < 2 or not e.size:
        return None
    top = np.stack([np.partition(row, -2)[-2:] for row in _rows(e)])
    clear = top[:, 1] - top[:, 0] > 2 * own
    if not clear.any():
        return None
    return float((_rows(e).argmax(-1) == _rows(f).argmax(-1))[clear].mean())
