"""Whether an export's answers are the model's, by the gate's rule (compiler/parity/compare.py) and its evidence.

The reference is PyTorch in float64. What may differ is measured on the same inputs: an export in fp32 by what PyTorch's
own float32 is off by, one of lower precision by what PyTorch is off by when it rounds as that precision does
(``simulated``): float16 or bfloat16 after every operation, or in weights alone, integers of 8 bits in products, weights
of 4 bits in blocks. Four times that is allowed beyond the limits of fp32. Where a broken case may be one of bad luck,
passes with moved weights tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..compiler.parity.compare import (
    Rounding,
    Tolerance,
    comparable,
    counted,
    rounding,
    tolerance_for,
    unprovable,
    within,
)
from ..profiles.precision import PRECISIONS, Precision
from ..runtime.inputs.arrays import Array

Preset = Literal["strict", "deploy"]
# Limits of --preset deploy: differences that a ranking or a classifier does not notice.
_DEPLOY_COSINE, _DEPLOY_AGREEMENT = 0.99, 0.99
_PASSES = 8
# Beyond so many times what PyTorch itself is off by, no pass with moved weights explains a difference.
_BEYOND_LUCK = 64.0
_BLOCK = 128
_CLIPPED = 2.0
_HALF_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Figures:
    """One output on one case. ``allowed`` is what PyTorch itself is off by there, at most; ``agreement`` the share of
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

    @property
    def has_fixed_scales(self) -> bool:
        """Whether one set of scales serves every input, so that the widest decides what all are off by."""
        return self.simulates and self.precision == "int8"

    def of_fixed_scales(self, owns: Sequence[Rounding]) -> Rounding:
        """The rounding where scales were fixed on examples: the worst of all cases, and twice of it, since other
        inputs are clipped, which is not simulated."""
        largest, rms = max(own.largest for own in owns), max(own.rms_of_all for own in owns)
        return Rounding(_CLIPPED * largest, _CLIPPED * rms)

    def __str__(self) -> str:
        if self.tolerance is not None:
            return f"|difference| <= {self.tolerance:g} * rms of the output"
        if self.preset == "deploy":
            return f"cosine of every row >= {_DEPLOY_COSINE:g}, same largest element in {_DEPLOY_AGREEMENT:.0%}"
        own = f"PyTorch rounding as {self.precision}" if self.simulates else "PyTorch's own float32"
        return f"{self.limit.rule.partition(', each')[0]}; wider by 4 times what {own} is off by there"

    def judge(self, case: str, output: str, expected: Array, found: Array, own: Rounding) -> Figures:
        """The figures of ``found`` beside ``expected`` (float64), and why it is not accepted, if it is not."""
        if expected.shape != found.shape:
            why = f"shape {list(found.shape)}, expected {list(expected.shape)}"
            return Figures(case, output, np.inf, np.inf, -1.0, np.inf, None, own.largest, why)
        if not np.isfinite(found).all():
            count = int((~np.isfinite(found)).sum())
            why = f"{count} of {found.size} numbers are NaN or infinite"
            return Figures(case, output, np.inf, np.inf, -1.0, np.inf, None, own.largest, why)
        e, f = expected.astype(np.float64), found.astype(np.float64)
        off = np.abs(f - e)
        figures = Figures(
            case,
            output,
            float(off.max(initial=0.0)),
            float((off / np.maximum(np.abs(e), 1e-3)).max(initial=0.0)),
            _cosine(e, f),
            float(np.sqrt(np.mean(off**2))) if off.size else 0.0,
            _agreement(e, f, own.largest),
            own.largest,
        )
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


def is_luck_possible(figures: Figures) -> bool:
    """Whether a broken rule may be that of a lucky pass of PyTorch's."""
    return bool(np.isfinite(figures.max_abs)) and figures.max_abs <= _BEYOND_LUCK * figures.own


def own_rounding(rule: Rule, expected: Array, passed: Array) -> Rounding:
    """The rounding of one pass of PyTorch, ``passed``; where it rounds as the export does, anywhere counts."""
    found = rounding(expected, passed)
    return found.of_all if rule.simulates else found


def hidden_out(array: Array, mask: Array | None) -> Array:
    """``array`` with 0 at the positions ``[B, S]`` that a mask leaves out."""
    return counted(array, mask) if mask is not None and array.shape[:2] == mask.shape else array


def same(expected: Array, found: Array, rule: Rule, own: Rounding) -> bool:
    """Whether an intermediate value is the model's, as far as it can be told."""
    return comparable(expected, found) and within(expected, found, rule.limit, own.of_all, least_scale=0.0)


@contextmanager
def simulated(precision: Precision) -> Iterator[None]:
    """Passes inside round as ``precision`` does."""
    with _Simulated(precision), torch.no_grad():
        yield


class _Simulated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, precision: Precision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._half = _HALF_TYPES.get(precision)
        self._precision = precision

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if self._half is not None:
            args = tuple(map(self._rounded, args)) if name in _PRODUCTS else args
            return self._rounded(func(*args, **(kwargs or {})))
        if name in _PRODUCTS:
            at = _PRODUCTS[name]
            if self._precision == "fp16-weights":
                is_weight = name not in ("bmm", "baddbmm")
                args = (*args[: at + 1], _halves(args[at + 1]), *args[at + 2 :]) if is_weight else args
            elif PRECISIONS[self._precision].is_integer and (name != "bmm" or self._precision == "int8"):
                args = tuple(self._product_side(each, place - at) for place, each in enumerate(args))
        elif name == "embedding" and self._precision != "int4":
            args = ((_halves if self._precision == "fp16-weights" else _integers)(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            assert self._half is not None
            return value.to(self._half).float()
        return tuple(map(self._rounded, value)) if isinstance(value, (tuple, list)) else value

    def _product_side(self, value: Any, side: int) -> Any:
        """``side`` 0 is what is given to a product, 1 its weight."""
        if side not in (0, 1) or not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if self._precision == "int4":
            return _blocks(value) if side == 1 and value.dim() == 2 else value
        return _integers(value) if side == 1 else _bytes(value)


# By name the place of what is given to a product; its weight follows.
_PRODUCTS = {"addmm": 1, "mm": 0, "bmm": 0, "baddbmm": 1, "convolution": 0, "linear": 0}


def _halves(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float16).to(weight.dtype)


def _integers(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric, of 8 bits, one scale a tensor."""
    scale = weight.abs().max().clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """256 steps from the least to the most, which include 0."""
    if value.numel() == 0:
        return value
    least, most = value.min().clamp(max=0), value.max().clamp(min=0)
    scale = ((most - least) / 255).clamp(min=1e-12)
    return (value / scale).round() * scale


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """16 steps in blocks of inputs, the first dimension of ``weight`` ``[in, out]``."""
    found = weight.clone()
    for start in range(0, weight.shape[0], _BLOCK):
        part = found[start : start + _BLOCK]
        scale = (part.abs().amax(0, keepdim=True) / 7.5).clamp(min=1e-12)
        found[start : start + _BLOCK] = (part / scale).round().clamp(-8, 7) * scale
    return found


def remeasured(own: Rounding, expected: Array, passes: Callable[[int], Array]) -> Iterator[Rounding]:
    """``own`` after each of several more passes of float32, with weights moved by rounding."""
    for seed in range(_PASSES):
        own = own.worst(rounding(expected, passes(seed)))
        yield own


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
    top = np.sort(_rows(e), axis=-1)[:, -2:]
    clear = top[:, 1] - top[:, 0] > 2 * own
    if not clear.any():
        return None
    return float((_rows(e).argmax(-1) == _rows(f).argmax(-1))[clear].mean())
