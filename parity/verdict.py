"""Whether an export's answers are the model's, by the gate's rule (compiler/parity/compare.py) and its evidence.

The reference is PyTorch in float64. The allowed difference is measured on the same inputs: of an export in fp32 by what
PyTorch's own float32 is off by, of one of lower precision by what PyTorch is off by when it rounds as that precision
does: float16 or bfloat16 after every operation, or in weights alone; integers of 8 bits in products, weights of 4 bits
in blocks of inputs. Four times that is allowed beyond the limits of fp32. Where a broken case may be one of bad luck,
passes with moved weights tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..bundle.entries.engine_entry import ParityOutput
from ..compiler.parity.compare import (
    Rounding,
    Tolerance,
    comparable,
    compare,
    rounding,
    tolerance_for,
    unprovable,
    within,
)
from ..compiler.parity.reading import nudged
from ..exporters.torch_internals import TorchDispatchMode
from ..profiles.parity_request import Preset
from ..profiles.precision import BF16, FOUR_BITS, FP16, INT8, PRECISIONS, Encoding, Precision
from ..runtime.inputs.arrays import Array, Arrays
from .cases import Trial
from .model import Model

# Limits of --preset deploy: differences that a ranking or a classifier does not notice.
_DEPLOY_COSINE, _DEPLOY_AGREEMENT = 0.99, 0.99
_PASSES = 8
# Beyond so many times what PyTorch itself is off by, no pass with moved weights explains a difference.
_BEYOND_LUCK = 64.0
_CLIPPED = 2.0


@dataclass(frozen=True)
class Figures:
    """One output on one case, by the gate's figures; its ``float32_max_abs`` is what PyTorch itself is off by there.
    ``agreement`` is the share of rows and positions with the same largest element, near ties left out; ``why`` says
    what a failure is."""

    case: str
    output: ParityOutput
    agreement: float | None
    why: str | None = None

    @property
    def is_right(self) -> bool:
        return self.why is None

    @property
    def row(self) -> tuple[str, ...]:
        """By ``COLUMNS``."""
        agreement, of = "-" if self.agreement is None else f"{self.agreement:.1%}", self.output
        sizes = f"{of.max_abs:.1e}", f"{of.max_rel:.1e}", f"{of.min_cosine:.7f}", agreement, f"{of.float32_max_abs:.1e}"
        return (self.case, of.name, *sizes, "right" if self.is_right else "differs")


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

    def judge(self, case: str, name: str, expected: Array, found: Array, own: Rounding) -> Figures:
        """The figures of ``found`` beside ``expected`` (float64), and why it is not accepted, if it is not."""
        (compared,) = compare([{name: expected}], [{name: found}], [case], self.limit)
        figures = replace(compared.output, float32_max_abs=own.largest, float32_rms=own.rms_of_all)
        if expected.shape != found.shape:
            return Figures(case, figures, None, f"shape {list(found.shape)}, expected {list(expected.shape)}")
        for whose, side in (("", found), (" of the model itself", expected)):
            if count := int((~np.isfinite(side)).sum()):
                return Figures(case, figures, None, f"{count} of {side.size} numbers{whose} are NaN or infinite")
        agreement = _agreement(expected, found, own.largest)
        return Figures(case, figures, agreement, self._problem(figures, agreement, expected, found, own))

    def _problem(self, of: ParityOutput, agreement: float | None, e: Array, f: Array, own: Rounding) -> str | None:
        if self.tolerance is not None:
            most = self.tolerance * float(np.sqrt(np.mean(np.square(e))))
            return None if of.max_abs <= most else f"max abs {of.max_abs:.3g}, allowed {most:.3g}"
        if self.preset == "deploy":
            least = min((_cosine(a, b) for a, b in zip(_rows(e), _rows(f), strict=True)), default=1.0)
            if least < _DEPLOY_COSINE:
                return f"cosine {least:.4f} of a row, accepted from {_DEPLOY_COSINE:g}"
            is_low = agreement is not None and agreement < _DEPLOY_AGREEMENT
            return f"same largest element in {agreement:.1%}" if is_low else None
        if within(e, f, self.limit, own):
            return None
        if not self.simulates and unprovable(e, own):
            return f"PyTorch's own float32 is off by {own.largest:.3g} here; nothing can be proved"
        return (
            f"max abs {of.max_abs:.3g} (PyTorch itself {own.largest:.2g}), max rel {of.max_rel:.3g}, cosine "
            f"{of.min_cosine:.7f}"
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
            own = rounding(trial.counted(expected[trial.name][output], output), trial.counted(passed[output], output))
            owns[number, output] = own.of_all if rule.simulates else own  # rounded as the export, anywhere counts
    found = []
    for (number, output), own in owns.items():
        trial = trials[number]
        wanted, got = (trial.counted(side[trial.name][output], output) for side in (expected, answered))
        if rule.simulates and PRECISIONS[rule.precision].calibration == "scales":
            own = _of_fixed_scales([each for (_, name), each in owns.items() if name == output])
        figures = rule.judge(trial.name, output, wanted, got, own)
        for seed in range(_PASSES):  # the one pass of PyTorch may have been a lucky one
            if figures.is_right or rule.simulates or not figures.output.max_abs <= _BEYOND_LUCK * own.largest:
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
    return float(np.vdot(e, f) / norm) if norm else float(not e.any() and not f.any())


def _agreement(e: Array, f: Array, own: float) -> float | None:
    if e.ndim < 2 or e.shape[-1] < 2 or not e.size:
        return None
    top = np.stack([np.partition(row, -2)[-2:] for row in _rows(e)])
    clear = top[:, 1] - top[:, 0] > 2 * own
    return float((_rows(e).argmax(-1) == _rows(f).argmax(-1))[clear].mean()) if clear.any() else None


_BLOCK = 128
_HALF_TYPES = {FP16: torch.float16, BF16: torch.bfloat16}
# By name the place of what is given to a product; its weight follows.
_PRODUCTS = {"addmm": 1, "mm": 0, "bmm": 0, "baddbmm": 1, "convolution": 0, "linear": 0}


@contextmanager
def simulated(precision: Precision) -> Iterator[None]:
    """Passes inside round as ``precision`` does."""
    with _Simulated(precision), torch.no_grad():
        yield


class _Simulated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, precision: Precision) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        spec = PRECISIONS[precision]
        self._half = _HALF_TYPES[spec.encoding] if spec.arithmetic == "half" else None
        self._rounds = _ROUNDS.get(spec.encoding)
        # With scales of every value attention's own products are integer products too.
        self._left_out = () if spec.calibration == "scales" else _OF_ACTIVATIONS.get(spec.encoding, ("bmm",))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        at = _PRODUCTS.get(name)
        if self._half is not None:
            args = tuple(map(self._rounded, args)) if at is not None else args
            return self._rounded(func(*args, **(kwargs or {})))
        if self._rounds is not None:
            given, weight, table = self._rounds
            if at is not None and name not in self._left_out:
                args = (*args[:at], given(args[at]), weight(args[at + 1]), *args[at + 2 :])
            elif name == "embedding":
                args = (table(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            assert self._half is not None
            return value.to(self._half).float()
        return tuple(map(self._rounded, value)) if isinstance(value, (tuple, list)) else value


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _halves(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float16).to(weight.dtype)


def _brains(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.bfloat16).to(weight.dtype)


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
    for start in range(0, weight.shape[0] if weight.dim() == 2 else 0, _BLOCK):
        part = found[start : start + _BLOCK]
        scale = (part.abs().amax(0, keepdim=True) / 7.5).clamp(min=1e-12)
        found[start : start + _BLOCK] = (part / scale).round().clamp(-8, 7) * scale
    return found


_Round = Callable[[torch.Tensor], torch.Tensor]
# How what is given to a product, its weight and a table of embeddings are rounded, by the weights' encoding.
_ROUNDS: Mapping[Encoding, tuple[_Round, _Round, _Round]] = {
    FP16: (_same, _halves, _halves),
    BF16: (_same, _brains, _brains),
    INT8: (_bytes, _integers, _integers),
    **dict.fromkeys(FOUR_BITS, (_same, _blocks, _same)),
}
# Products without a weight, which are not rounded.
_OF_ACTIVATIONS: Mapping[Encoding, tuple[str, ...]] = dict.fromkeys((FP16, BF16), ("bmm", "baddbmm"))
