"""Whether an export's answers are the model's, by the gate's rule (compiler/parity/compare.py) and its evidence.

The reference is PyTorch in float64. The allowed difference is measured on the same inputs: of an export in fp32 by what
PyTorch's own float32 is off by, of one of lower precision by what PyTorch is off by when it rounds as that precision
does: float16 or bfloat16 after every operation, or in weights alone; integers in products, or weights in blocks of
inputs. Four times that is allowed beyond the limits of fp32. Where a broken case may be one of bad luck, passes with
moved weights tell."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..bundle.entries.engine_entry import ParityOutput
from ..compiler.graph.encodings import DTYPES
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
from ..profiles.precision import (
    BLOCK_INPUTS,
    FP32,
    HALF_ENCODINGS,
    PRECISIONS,
    TRACED,
    WEIGHT_BITS,
    Precision,
    PrecisionSpec,
)
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
        return tolerance_for(TRACED, self.depth)

    @property
    def simulates(self) -> bool:
        """Whether PyTorch rounds as the export's precision does, to measure what may differ."""
        return self.precision != TRACED and self.preset != "strict"

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
        if compared.incomparable is not None:
            return Figures(case, figures, None, compared.incomparable)
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
# By name the place of what is given to a product; its weight follows.
_PRODUCTS = {"addmm": 1, "mm": 0, "bmm": 0, "baddbmm": 1, "convolution": 0, "linear": 0}
# Those of two activations, which are attention's.
_OF_ACTIVATIONS = ("bmm", "baddbmm")
_Round = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def simulated(precision: Precision) -> Iterator[None]:
    """Passes inside round as ``precision`` does."""
    with _Simulated(PRECISIONS[precision]), torch.no_grad():
        yield


class _Simulated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds as ``spec`` says. In half precision every result is rounded. Where ``arithmetic`` is float32 over narrower
    weights, these are, in products and in tables. Integers of 8 bits are rounded on both sides of a product, those in
    blocks of inputs on the side of weights; with scales of every value attention's own products are integer ones too.
    """

    def __init__(self, spec: PrecisionSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        stored, bits = spec.encoding, WEIGHT_BITS[spec.encoding]
        self._rounded: _Round | None = None
        self._given = self._weight = self._table = _same
        self._left_out: tuple[str, ...] = ("bmm",)
        if stored in HALF_ENCODINGS:
            in_type = partial(_in_type, getattr(torch, DTYPES[stored].name))
            if spec.arithmetic == "half":
                self._rounded = in_type
            self._weight = self._table = in_type
            self._left_out = _OF_ACTIVATIONS
        elif stored in BLOCK_INPUTS:
            self._weight = partial(_in_blocks, bits)
        elif stored != FP32:
            self._given, self._weight = partial(_in_steps, bits), partial(_symmetric, bits)
            self._table = self._weight
        if spec.calibration == "scales":
            self._left_out = ()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        at = _PRODUCTS.get(name)
        if self._rounded is not None:
            args = tuple(map(self._each, args)) if at is not None else args
            return self._each(func(*args, **(kwargs or {})))
        if at is not None and name not in self._left_out:
            args = (*args[:at], self._given(args[at]), self._weight(args[at + 1]), *args[at + 2 :])
        elif name == "embedding":
            args = (self._table(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _each(self, value: Any) -> Any:
        """``value`` with every float32 tensor in it rounded."""
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            assert self._rounded is not None
            return self._rounded(value)
        return tuple(map(self._each, value)) if isinstance(value, (tuple, list)) else value


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _in_type(narrow: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(narrow).to(value.dtype)


def _symmetric(bits: int, weight: torch.Tensor) -> torch.Tensor:
    """Steps as far on both sides of 0, one scale a tensor."""
    scale: torch.Tensor = weight.abs().max().clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


def _in_steps(bits: int, value: torch.Tensor) -> torch.Tensor:
    """Steps from the least to the most, which include 0."""
    if value.numel() == 0:
        return value
    least, most = value.min().clamp(max=0), value.max().clamp(min=0)
    scale: torch.Tensor = ((most - least) / (2**bits - 1)).clamp(min=1e-12)
    return (value / scale).round() * scale


def _in_blocks(bits: int, weight: torch.Tensor) -> torch.Tensor:
    """Steps in blocks of inputs, the first dimension of ``weight`` ``[in, out]``."""
    found, half = weight.clone(), 2 ** (bits - 1)
    for start in range(0, weight.shape[0] if weight.dim() == 2 else 0, _BLOCK):
        part = found[start : start + _BLOCK]
        scale = (part.abs().amax(0, keepdim=True) / (half - 0.5)).clamp(min=1e-12)
        found[start : start + _BLOCK] = (part / scale).round().clamp(-half, half - 1) * scale
    return found
