"""The parity gate: an engine must equal the PyTorch submodel, output by output, case by case.

The reference is the submodel in float64. Rule, of the difference ``d = engine - reference`` of one output:

1. per element ``|d| <= atol * scale + rtol * |reference|``,
2. ``rms(d) <= rms limit * scale`` of every part: in fp32 a tenth of ``atol``, since small errors everywhere are a
   fault where a single one is rounding,
3. the angle between the two, as cosine similarity, at least ``min_cosine``,
4. the size of every row (its rms) within that angle (in radians) of the reference's: what rounds may turn an output
   and stretch it alike, and an angle alone does not see a scale that is missing.

A part is the smallest of position, row and whole output that has 16 numbers, and its ``scale`` is its rms, at least a
hundredth of the output's: fewer numbers may all be near zero by chance. A whole output of fewer, and one computed from
another (below), has at least the scale 1. Where rows have fewer numbers, the fourth is asked of the output, if that has
more than one.

Answers at positions that a model's mask leaves out are not compared (``counted``).

All must hold (numpy's rule; Polygraphy's default is abs OR rel, which lets a large error pass where the reference is
large or small by chance). NaN or infinity in either side fails. Neither angle nor size is asked of an output computed
from another one (an entropy from its logits): entropies near zero have some that rounding turns at will.

Tolerances grow with depth because every layer adds its own rounding: float32 has a unit roundoff of 6e-8, a dot product
over a few thousand terms in another order moves a value of size 1 by about 1e-6, and LayerNorm keeps values near
size 1, so errors of layers add up and do not multiply. Measured on 6 layers of MiniLM: 5e-6 against 2.4e-5 allowed.

Some models do multiply them: large gains or weights make a difference of one rounding into one of thousands. How much
is measured, not guessed: PyTorch's own float32 on the same input has such an error too (``Rounding``). Where it takes
up more than half of one of the limits at one place, four times the rest is allowed on top there; other places, and
other models, are judged by the limits alone. Where it exceeds a hundredth of a row, nothing that is worth the name
would be proved, and the output is refused as ``unprovable``. docs/decisions/0020 has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...bundle.entries.engine_entry import ParityOutput
from ...profiles.precision import PRECISIONS, Precision
from ...runtime.inputs.arrays import Arrays

# Most that PyTorch's float32 may be off by, as a share of a row's size.
_MAX_ROUNDING_SHARE = 0.01
# So many numbers are not all near zero by chance, so that their own rms says what size they have.
_MIN_NUMBERS = 16
# Least scale of a part of an output, as a share of the output's rms.
_MIN_SCALE_SHARE = 0.01
# Two float32 computations of one value are off by as much in the mean, but either may be lucky.
ROUNDING_FACTOR = 4.0
# Numbers that are compared at once: what is made of so many stays in caches, where that of a vocabulary's logits took
# several times their memory.
_BLOCK = 2**16


@dataclass(frozen=True)
class Tolerance:
    """Limits of the rule in this module's docstring."""

    atol: float
    rtol: float
    min_cosine: float
    rms: float

    @property
    def angle(self) -> float:
        """For small angles a cosine is ``1 - angle^2 / 2``."""
        return math.sqrt(2 * (1 - self.min_cosine))

    @property
    def half(self) -> Tolerance:
        """Half of each limit."""
        return Tolerance(self.atol / 2, self.rtol / 2, 1 - (1 - self.min_cosine) / 4, self.rms / 2)

    @property
    def rule(self) -> str:
        return (
            f"abs <= {self.atol:.3g} * rms + {self.rtol:.3g} * |reference| per element, rms of it <= "
            f"{self.rms:.3g} * rms, cosine >= {self.min_cosine:g}, and sizes of rows within {self.angle:.3g}, each "
            f"wider by {ROUNDING_FACTOR:g} times what PyTorch's own float32 is off by there beyond half of it"
        )


def tolerance_for(precision: Precision, depth: int) -> Tolerance:
    """The tolerance for a graph of ``depth`` layers computing in ``precision``."""
    base = PRECISIONS[precision].tolerance
    return Tolerance(base.atol * depth, base.rtol * depth, base.min_cosine, base.rms * depth)


@dataclass(frozen=True)
class Rounding:
    """Difference of PyTorch's own float32 from the reference, on one output of one case: at most, and rms.

    Float64 ``[B, S]`` or ``[B]``, a figure per place; a single one stands for every place.
    """

    max_abs: np.ndarray | float = 0.0
    rms: np.ndarray | float = 0.0

    def worst(self, other: Rounding) -> Rounding:
        return Rounding(np.maximum(self.max_abs, other.max_abs), np.maximum(self.rms, other.rms))

    @property
    def largest(self) -> float:
        return float(np.max(self.max_abs))

    @property
    def rms_of_all(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.rms))))

    @property
    def of_all(self) -> Rounding:
        """The same figure for every place."""
        return Rounding(self.largest, self.rms_of_all)


Roundings = Mapping[str, Rounding]


def rounding(reference: np.ndarray, float32: np.ndarray) -> Rounding:
    """Differences of ``float32`` from the reference on one output; infinite where ``float32`` is not finite."""
    place = reference.shape[: places(reference)]
    most, squares = np.zeros(place), np.zeros(place)
    for at, exact, found in _blocks(reference, float32):
        finite = np.isfinite(found)
        difference = np.where(finite, np.subtract(found, exact, where=finite, out=found), np.inf)
        np.abs(difference, out=difference).max(axis=1, initial=0.0, out=most.reshape(-1)[at])
        squares.reshape(-1)[at] = _dot(difference, difference)
    return Rounding(most, np.sqrt(squares / (reference.size / max(most.size, 1))))


def places(array: np.ndarray) -> int:
    """How many leading dimensions of an output number its places."""
    return _places(array.ndim)


def _places(ndim: int) -> int:
    return min(2, max(1, ndim - 1), ndim)


def with_rounding(limit: np.ndarray | float, own: np.ndarray | float) -> np.ndarray:
    """``limit`` where PyTorch's ``own`` error takes up at most half of it; more of it where that takes up more."""
    return limit + ROUNDING_FACTOR * np.maximum(0.0, own - limit / 2)


@dataclass(frozen=True)
class Comparison:
    """Worst figures of one output over all cases; falsy if the rule was broken in ``failed_cases``. In the first of
    them PyTorch's own float32 may be no reference (``unprovable``), or there are no two numbers to compare
    (``incomparable`` says why). ``stretched`` is what the size of a row differs by there, relative to it."""

    output: ParityOutput
    failed_cases: tuple[str, ...] = ()
    unprovable: bool = False
    stretched: float = 0.0
    incomparable: str | None = None

    def __bool__(self) -> bool:
        return not self.failed_cases

    @property
    def failed_case(self) -> str | None:
        """The first of them, whose figures these are."""
        return next(iter(self.failed_cases), None)

    def describe(self) -> str:
        figures = self.output
        if self.unprovable:
            return (
                f"output {figures.name}, case {self.failed_case}: PyTorch's own float32 differs from its float64 by "
                f"{figures.float32_max_abs:.3g} (rms {figures.float32_rms:.3g}), in one of its rows by more than "
                f"{_MAX_ROUNDING_SHARE:.0%}; this model needs more than float32, and no comparison would prove anything"
            )
        if self.incomparable is not None:
            return f"output {figures.name}, case {self.failed_case}: {self.incomparable}"
        return (
            f"output {figures.name}, case {self.failed_case}: max abs {figures.max_abs:.3g}, "
            f"max rel {figures.max_rel:.3g}, cosine {figures.min_cosine:.7f}, size off by {self.stretched:.3g}"
        )


def compare(
    reference: Sequence[Arrays],
    found: Sequence[Arrays],
    cases: Sequence[str],
    limits: Tolerance | Sequence[Tolerance],
    roundings: Sequence[Roundings] | None = None,
    computed: Collection[str] = (),
) -> list[Comparison]:
    """Compares engine outputs ``found`` with ``reference``, one mapping of arrays per case, by its own of ``limits`` or
    the one of all.

    ``roundings`` are PyTorch's own, none where they are not known. ``computed`` names outputs that are computed from
    another one.
    """
    own = roundings or [{} for _ in cases]
    limits = [limits] * len(cases) if isinstance(limits, Tolerance) else limits
    return [
        _compare_output(
            name,
            [r[name] for r in reference],
            [f[name] for f in found],
            cases,
            limits,
            [case.get(name, Rounding()) for case in own],
            name not in computed,
        )
        for name in reference[0]
    ]


def counted(array: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """``array`` ``[B, S, ...]`` with 0 at the positions that ``mask`` ``[B, S]`` leaves out.

    Nobody reads what a model answers there. It comes from scores that are nearly equal, which integers tell apart
    otherwise; and behind a window, where such a position sees no key, from none at all: a softmax over masked scores
    alone is what each library makes of it.
    """
    return np.where(mask.reshape(*mask.shape, *[1] * (array.ndim - 2)) != 0, array, 0)


def within(
    reference: np.ndarray,
    found: np.ndarray,
    limit: Tolerance,
    own: Rounding | None = None,
    has_angle: bool = True,
    least_scale: float = 0.0,
) -> bool:
    """Whether one array satisfies the rule, ``own`` being PyTorch's error on it.

    ``least_scale`` is for what lies inside a model, where small values may be added to larger ones.
    """
    if not comparable(reference, found):
        return False
    return _within(_Sums.of(reference, found), reference, found, limit, own or Rounding(), has_angle, least_scale)


@dataclass(frozen=True)
class _Sums:
    """Figures for the rule, of an output and its reference by place (float64 ``[*shape[:places]]``): sums of squares of
    the ``reference``, of what was ``found`` and of the ``difference``, the sum of ``products`` of the first two, and
    the largest difference, ``absolute`` and ``relative``."""

    shape: tuple[int, ...]
    reference: np.ndarray
    found: np.ndarray
    difference: np.ndarray
    products: np.ndarray
    absolute: np.ndarray
    relative: np.ndarray

    @classmethod
    def of(cls, reference: np.ndarray, found: np.ndarray) -> _Sums:
        """Those of two arrays of numbers of one shape."""
        sums = np.zeros((6, *reference.shape[: places(reference)]))
        flat = sums.reshape(6, -1)
        for at, r, f in _blocks(reference, found):
            flat[0, at], flat[1, at], flat[3, at] = _dot(r, r), _dot(f, f), _dot(r, f)
            off = np.subtract(f, r, out=f)
            flat[2, at] = _dot(off, off)
            np.abs(off, out=off).max(axis=1, initial=0.0, out=flat[4, at])
            (off / np.maximum(np.abs(r), 1e-3)).max(axis=1, initial=0.0, out=flat[5, at])
        return cls(reference.shape, *sums)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> int:
        return _dims_of_parts(self.shape)

    @property
    def rows(self) -> int:
        return min(1, self.parts)

    @property
    def cosine(self) -> float:
        norm = math.sqrt(self.reference.sum()) * math.sqrt(self.found.sum())
        if norm == 0.0:
            return 1.0 if self.reference.sum() == self.found.sum() else -1.0
        return float(self.products.sum() / norm)

    def rms(self, squares: np.ndarray, dims: int = 0) -> np.ndarray:
        """The root of the mean of ``squares``, one of the sums here, over all but the first ``dims`` dimensions, which
        are kept as ones."""
        return _root(squares, dims, self.shape)

    def scale(self, dims: int, least: float) -> np.ndarray:
        """The size of every part, which the first ``dims`` dimensions number."""
        if self.size < _MIN_NUMBERS:
            dims, least = 0, 1.0
        floor = max(_MIN_SCALE_SHARE * float(self.rms(self.reference).max(initial=0.0)), least)
        return np.asarray(np.maximum(self.rms(self.reference, dims), floor))


def _within(
    sums: _Sums,
    reference: np.ndarray,
    found: np.ndarray,
    limit: Tolerance,
    own: Rounding,
    has_angle: bool,
    least_scale: float = 0.0,
) -> bool:
    least, ndim = least_scale if has_angle else 1.0, sums.absolute.ndim
    allowed = with_rounding(limit.atol * sums.scale(sums.parts, least), _spread(own.max_abs, ndim))
    beyond = np.argwhere(~(sums.absolute <= allowed))  # where an element's own size is asked
    allowed = np.broadcast_to(allowed, sums.absolute.shape)
    for place in map(tuple, beyond):
        r, f = _wide(reference[place]), _wide(found[place])
        if not (np.abs(f - r) <= allowed[place] + limit.rtol * np.abs(r)).all():
            return False
    part = min(sums.parts, np.ndim(own.rms))  # a single figure is that of the whole output
    allowed = with_rounding(limit.rms * sums.scale(part, least), _pooled(own.rms, part, ndim))
    if not (sums.rms(sums.difference, part) <= allowed).all():
        return False
    size = float(sums.rms(sums.reference).max(initial=0.0))
    return not has_angle or (sums.cosine >= _least_cosine(limit, own, size) and _sizes_agree(sums, limit, own))


def _blocks(reference: np.ndarray, found: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Some places of both arrays at a time, ``[places, numbers]`` in float64: those of ``found`` may be written to."""
    count = math.prod(reference.shape[: places(reference)])
    numbers = reference.size // max(count, 1)
    r, f = reference.reshape(count, numbers), found.reshape(count, numbers)
    step = max(1, _BLOCK // max(numbers, 1))
    for first in range(0, count, step):
        at = slice(first, first + step)
        yield at, _wide(r[at]), f[at].astype(np.float64)


def _dot(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Inner product of each row ``[P, N]``; without a library whose threads wait for work in a loop."""
    return np.asarray(np.einsum("pn,pn->p", one, other))


def _root(squares: np.ndarray, dims: int, shape: tuple[int, ...]) -> np.ndarray:
    """The root of the mean of sums of ``squares`` by place, of an array of ``shape``; see ``_Sums.rms``."""
    rest = tuple(range(min(dims, squares.ndim), squares.ndim))
    return np.asarray(np.sqrt(squares.sum(axis=rest, keepdims=True) / max(math.prod(shape[dims:]), 1)))


def unprovable(reference: np.ndarray, own: Rounding, has_angle: bool = True) -> bool:
    """Whether PyTorch's own error on a row is so large that equality with it says nothing."""
    if not np.isfinite(reference).all():
        return False  # which fails for itself
    squares = np.zeros(reference.shape[: places(reference)])
    for at, r, _ in _blocks(reference, reference):
        squares.reshape(-1)[at] = _dot(r, r)
    return _unprovable(squares, reference.shape, own, has_angle)


def _unprovable(squares: np.ndarray, shape: tuple[int, ...], own: Rounding, has_angle: bool) -> bool:
    row = min(1, _dims_of_parts(shape), np.ndim(own.rms))
    size = _root(squares, row, shape)
    allowed = _MAX_ROUNDING_SHARE * (size if has_angle else np.maximum(1.0, size))
    return not (_pooled(own.rms, row, squares.ndim) <= allowed).all()


def explainable(reference: np.ndarray, found: np.ndarray, limit: Tolerance, has_angle: bool = True) -> bool:
    """Whether further passes of PyTorch's float32 could allow what was ``found``: a row that they are off by more than
    its share of is unprovable, so that this share, all of it at one place or in one number, is the most they allow."""
    sums = _Sums.of(reference, found)
    row, shape = min(1, sums.parts), sums.reference.shape
    size = _root(sums.reference, row, sums.shape)
    most = _MAX_ROUNDING_SHARE * np.broadcast_to(size if has_angle else np.maximum(1.0, size), shape)
    own = Rounding(most * math.sqrt(math.prod(sums.shape[row:])), most * math.sqrt(math.prod(shape[row:])))
    return _within(sums, reference, found, limit, own, has_angle)


def _sizes_agree(sums: _Sums, limit: Tolerance, own: Rounding) -> bool:
    if sums.size == 1:
        return True  # one number may be near zero by chance, and has no more than the first limit
    size = sums.rms(sums.reference, sums.rows)
    least = np.maximum(size, _MIN_SCALE_SHARE * sums.rms(sums.reference))
    allowed = with_rounding(limit.angle * least, _pooled(own.rms, sums.rows, size.ndim))
    return bool((np.abs(sums.rms(sums.found, sums.rows) - size) <= allowed).all())


def _stretched(sums: _Sums) -> float:
    """Largest difference of a row's size, relative to that of the reference."""
    size, found = (sums.rms(squares, sums.rows) for squares in (sums.reference, sums.found))
    return float((np.abs(found - size) / np.maximum(size, np.finfo(np.float64).tiny)).max())


def _least_cosine(limit: Tolerance, own: Rounding, size: float) -> float:
    """The angle that rounding explains is the error over the ``size`` of the output."""
    beyond = float(with_rounding(np.float64(limit.angle), own.rms_of_all / size if size else 0.0))
    return limit.min_cosine if beyond == limit.angle else 1 - beyond**2 / 2


def _dims_of_parts(shape: tuple[int, ...]) -> int:
    """How many leading dimensions number the parts."""
    deepest = _places(len(shape))
    return next((dims for dims in range(deepest, 0, -1) if math.prod(shape[dims:]) >= _MIN_NUMBERS), 0)


def _spread(figures: np.ndarray | float, ndim: int) -> np.ndarray:
    """Figures per place, to be used with those of ``ndim`` dimensions."""
    figures = np.asarray(figures)
    return figures.reshape(*figures.shape, *[1] * (ndim - figures.ndim))


def _pooled(rms: np.ndarray | float, dims: int, ndim: int) -> np.ndarray:
    """The rms per place as that of parts, which the first ``dims`` dimensions number."""
    spread = _spread(rms, ndim)
    return np.asarray(np.sqrt(np.mean(np.square(spread), axis=tuple(range(dims, ndim)), keepdims=True)))


def size_of(array: np.ndarray) -> float:
    """The rms of ``array``, 1 at least: what proofs of two computations in PyTorch, or two runs, are measured by."""
    return max(1.0, float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))))


def max_difference(left: Sequence[Arrays], right: Sequence[Arrays]) -> float:
    """Largest absolute difference over all outputs and cases."""
    return float(np.max([np.abs(a[name] - b[name]).max() for a, b in zip(left, right, strict=True) for name in a]))


def _compare_output(
    name: str,
    reference: list[np.ndarray],
    found: list[np.ndarray],
    cases: Sequence[str],
    limits: Sequence[Tolerance],
    own: Sequence[Rounding],
    has_angle: bool,
) -> Comparison:
    # One case after the other: a vocabulary's logits are many.
    judged = [_judged(*each, has_angle) for each in zip(reference, found, limits, own, strict=True)]
    # On failure the figures are those of the failed case, so that the message shows what broke the rule.
    failed = [number for number, one in enumerate(judged) if not one.is_within]
    chosen = failed[:1] or list(range(len(cases)))
    torch_abs, torch_rms = max(own[i].largest for i in chosen), max(own[i].rms_of_all for i in chosen)
    most, sums = (math.inf, math.inf, -1.0, math.inf), [judged[i].sums for i in chosen]
    known = [each for each in sums if each is not None]
    if len(known) == len(sums):
        most_abs, most_rel, cosines, rms = zip(*map(_figures, known), strict=True)
        most = max(most_abs), max(most_rel), min(cosines), max(rms)
    worst = ParityOutput(name, *most, torch_abs, torch_rms)
    if not failed:
        return Comparison(worst)
    stretched = _stretched(known[0]) if known else math.inf
    first = failed[0]
    differs = incomparable(reference[first], found[first])
    return Comparison(worst, tuple(cases[i] for i in failed), judged[first].is_blind, stretched, differs)


class _Judged(NamedTuple):
    """One output of one case: its ``sums``, None where the two cannot be compared."""

    sums: _Sums | None
    is_within: bool
    is_blind: bool


def _judged(r: np.ndarray, f: np.ndarray, limit: Tolerance, own: Rounding, has_angle: bool) -> _Judged:
    if not comparable(r, f):
        return _Judged(None, False, unprovable(r, own, has_angle))
    sums = _Sums.of(r, f)
    is_blind = _unprovable(sums.reference, sums.shape, own, has_angle)
    return _Judged(sums, not is_blind and _within(sums, r, f, limit, own, has_angle), is_blind)


def _figures(sums: _Sums) -> tuple[float, float, float, float]:
    """Absolute and relative difference at most, cosine, and rms of the difference."""
    rms = float(sums.rms(sums.difference).max(initial=0.0))
    return float(sums.absolute.max(initial=0.0)), float(sums.relative.max(initial=0.0)), sums.cosine, rms


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64, copy=False)


def comparable(r: np.ndarray, f: np.ndarray) -> bool:
    """Whether both are numbers, and as many."""
    return incomparable(r, f) is None


def incomparable(reference: np.ndarray, found: np.ndarray) -> str | None:
    """Why the two cannot be compared: their shapes differ, or one is not finite; None where they can."""
    if reference.shape != found.shape:
        return f"shape {list(found.shape)}, expected {list(reference.shape)}"
    for whose, side in (("", found), ("expected ", reference)):
        if not np.isfinite(side).all():
            return f"{int((~np.isfinite(side)).sum())} of {side.size} {whose}numbers are NaN or infinite"
    return None
