"""Weights of 4 bits chosen on examples: later inputs' weights make up for what rounding those before is wrong by.

GPTQ (Frantar et al., 2023, algorithm 1): an output of a product is wrong by ``e.T H e``, with ``e`` the errors of its
weights and ``H = x.T x`` the second moments of the product's inputs. Inputs are rounded in their order, each block
by the scale that it would have without examples (encodings.py), and each error is spread over the inputs behind it
so that least is left. Outputs know nothing of each other: the first of them are those of a submodel. A block, or all of
an output, whose numbers are further from it than rounding can leave them (``beyond_rounding``) is rounded plainly: what
is chosen cannot be the numbers of another, which no proof of an engine would tell, since it goes by what is chosen.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch

from ....profiles.precision import BLOCK_INPUTS, FOUR_BITS, SCALES, Encoding
from ....runtime.inputs.arrays import Arrays
from ..encodings import beyond_rounding, encode, in_blocks, int4_scale, packed, parts_of, split_encoding, unpacked
from .calibrate import counted_rows, observe, require_finite
from .quantize import products

# Share of the mean of the diagonal that is added to it: a few thousand rows say nothing of some directions.
_DAMPING = 0.01
# Bytes of second moments that are held at once; what is more is seen in another pass over the examples.
_MOMENTS_BYTES = 1 << 31
_ROWS_AT_ONCE = 2048
# Numbers of a weight that are rounded at once, so that they stay in the processor's caches.
_AT_ONCE = 2**20

# Weights, and the second moments [in, in] of the inputs that all of them are multiplied with.
_Seen = tuple[Sequence[str], np.ndarray]
# Integers of 4 bits of some outputs, and their scales.
_Encoded = tuple[np.ndarray, np.ndarray]


def seen_moments(
    graph: onnx.ModelProto,
    folder: Path,
    feeds: Sequence[Arrays],
    in_fp32: Collection[str],
    counted: Sequence[np.ndarray],
    names: Collection[str],
) -> Iterator[_Seen]:
    """The second moments of the inputs of every weight of which a 4-bit encoding is among ``names``, unless it is a row
    of a stack; of several products of a weight the sum. Arguments else are those of ``calibrate``."""
    read: dict[str, dict[str, int]] = {}  # values and their widths, by the weight that they are multiplied with
    for product in products(graph.graph, in_fp32).values():
        for part in parts_of(product.weight):
            if any(part + encoding in names for encoding in FOUR_BITS) and not product.transposed:
                read.setdefault(part, {})[product.x] = product.inputs
    alike: dict[tuple[str, ...], list[str]] = {}
    widths: dict[tuple[str, ...], int] = {}
    for weight, values in read.items():
        alike.setdefault(tuple(values), []).append(weight)
        widths[tuple(values)] = max(values.values())
    for group in _groups(widths):
        moments = {values: _Moments(widths[values]) for values in group}

        def see(value: str, array: np.ndarray, number: int) -> None:
            rows = counted_rows(array, counted[number]).reshape(-1, array.shape[-1])
            require_finite(rows, next(alike[values][0] for values in moments if value in values))  # noqa: B023
            for total in [total for values, total in moments.items() if value in values]:  # noqa: B023  (called at once)
                total.see(rows)

        observe(graph, folder, [value for values in group for value in values], feeds, see)
        yield from ((alike[values], total.of_all()) for values, total in moments.items())


class _Moments:
    """The second moments of rows ``[n, width]``, many of which are multiplied at once: of a few at a time it takes
    longer to read and write what was summed."""

    def __init__(self, width: int) -> None:
        self._total = torch.zeros(width, width)
        self._rows: list[np.ndarray] = []

    def see(self, rows: np.ndarray) -> None:
        self._rows.append(rows)
        if sum(map(len, self._rows)) >= _ROWS_AT_ONCE:
            self.of_all()

    def of_all(self) -> np.ndarray:
        if self._rows:
            rows = torch.from_numpy(np.concatenate(self._rows))
            self._total.addmm_(rows.T, rows)
            self._rows.clear()
        return self._total.numpy()


def rounded(
    seen: Iterable[_Seen],
    stored: Callable[[str], torch.Tensor],
    names: Collection[str],
    tick: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """The 4-bit encodings, and their scales, among ``names`` of all weights that were ``seen``, made of what is
    ``stored``; of one whose inputs are 0 in every example, none. ``tick`` is told how many were done."""
    found: dict[str, np.ndarray] = {}
    done = 0
    for weights, moments in seen:
        tick(done)
        done += len(weights)
        if moments.any():
            damping = _DAMPING * float(np.diagonal(moments).mean(dtype=np.float64))
            factor = _factor(moments, damping)
            wanted = [weight + encoding for weight in weights for encoding in FOUR_BITS if weight + encoding in names]
            for name in wanted:
                weight, encoding = split_encoding(name)
                found[name], found[weight + SCALES[encoding][0]] = _rounded_by(stored(weight).numpy(), encoding, factor)
    return found


def _rounded_by(weight: np.ndarray, encoding: Encoding, factor: np.ndarray) -> _Encoded:
    """``weight`` ``[out, in]`` in ``encoding`` by the ``factor`` of its inputs' moments; blocks that are off by
    more than rounding can leave are rounded plainly."""
    step, made, (of_scales,) = max(1, _AT_ONCE // weight.shape[1]), list[_Encoded](), SCALES[encoding]
    for rows in (weight[first : first + step] for first in range(0, len(weight), step)):
        numbers, scales = _rows(rows, BLOCK_INPUTS[encoding], factor)
        integers = packed(numbers)
        if (far := beyond_rounding(unpacked(integers, scales)[:, : rows.shape[1]], rows, encoding)).any():
            plain = encode(rows, of_scales)
            scales[far], integers[far] = plain[far], encode(rows, encoding, plain)[far]
        made.append((integers, scales))
    whole, scales = (np.concatenate(parts) for parts in zip(*made, strict=True))
    return whole, scales


def _rows(weight: np.ndarray, block: int, factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers ``[out, blocks, block]`` and their scales ``[out, blocks]``."""
    left = np.array(weight.T, order="C")  # [in, out]: what is to be rounded, the errors before it made up for
    integers, scales = np.empty(left.shape, np.int8), []
    for first in range(0, len(left), block):
        last = min(first + block, len(left))
        scale, errors = int4_scale(left[first:last].T), np.empty_like(left[first:last])
        for row in range(first, last):
            integers[row] = np.clip(np.rint(left[row] / scale), -8, 7)
            errors[row - first] = (left[row] - integers[row] * scale) / factor[row, row]
            left[row + 1 : last] -= np.outer(factor[row, row + 1 : last], errors[row - first])
        left[last:] -= factor[first:last, last:].T @ errors
        scales.append(scale)
    return in_blocks(integers.T, block), np.stack(scales, axis=1)


def _factor(moments: np.ndarray, damping: float) -> np.ndarray:
    """The upper triangular ``U``, float32, with ``U.T U`` the inverse of the damped ``moments``."""
    damped = torch.from_numpy(moments).double()
    damped.diagonal().add_(damping)
    lower = torch.linalg.cholesky(damped.flip(0, 1))  # in reverse order: the inverse itself is never made
    identity = torch.eye(len(lower), dtype=lower.dtype)
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1).float().numpy()


def _groups(widths: Mapping[tuple[str, ...], int]) -> list[list[tuple[str, ...]]]:
    """Values in groups whose moments take at most _MOMENTS_BYTES together, or that hold those of one alone."""
    groups: list[list[tuple[str, ...]]] = []
    total = _MOMENTS_BYTES
    for values, width in widths.items():
        total += 4 * width**2
        if total > _MOMENTS_BYTES:
            groups.append([])
            total = 4 * width**2
        groups[-1].append(values)
    return groups
