"""The array types that inputs, feeds, runners and answers share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import RowNeed, TensorSpec
from ...errors import InputError

Array = NDArray[Any]
# By name.
Arrays = Mapping[str, Array]


def random_feeds(inputs: Iterable[TensorSpec], bucket: Bucket, seed: int = 0) -> dict[str, Array]:
    """One value per input at ``bucket``'s shape, the same for the same seed.

    Whole numbers lie in ``[0, high)``, or are 0 where the manifest states no ``high``; floats are standard normal. In a
    mask every row has what it needs, and hides a position where it has several.
    """
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for spec in inputs:
        shape, dtype = spec.shape(bucket), np.dtype(spec.dtype)
        if dtype.kind == "f":
            feeds[spec.name] = rng.standard_normal(shape).astype(dtype)
        elif dtype.kind == "b":
            feeds[spec.name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            feeds[spec.name] = rng.integers(0, spec.high or 1, shape).astype(dtype)
        if spec.row_needs is not None:
            _mend(feeds[spec.name], spec.row_needs, rng)
    return feeds


class HasShape(Protocol):
    """An array, wherever it lies."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def nearest_shape(inputs: Iterable[TensorSpec], feeds: Mapping[str, HasShape], bucket: Bucket) -> Bucket:
    """The shape of an engine at ``bucket`` that ``feeds`` have, or come nearest to where they do not fit it."""
    if bucket.is_static:
        return bucket
    sizes = named_sizes(inputs, feeds)
    return bucket.nearest(Bucket(sizes.get("batch", bucket.batch), sizes.get("sequence", bucket.sequence)))


def named_sizes(inputs: Iterable[TensorSpec], feeds: Mapping[str, HasShape]) -> dict[str, int]:
    """The size that each named dimension has in the first of ``feeds`` with one of that name."""
    sizes: dict[str, int] = {}
    for spec in inputs:
        if spec.name in feeds:
            for dim, size in zip(spec.dims, feeds[spec.name].shape, strict=False):
                if isinstance(dim, str):
                    sizes.setdefault(dim, size)
    return sizes


def _mend(mask: Array, need: RowNeed, rng: np.random.Generator) -> None:
    """Sets positions of a random ``mask`` ``[B, S]`` so that no row is without a token, nor without a hidden one."""
    rows, length = mask.shape
    for row in range(rows):
        token = 0 if need == "first_token" else int(rng.integers(length))
        if need == "first_token" or not mask[row].any():
            mask[row, token] = 1
        if mask[row].all() and length > 1:
            mask[row, (token + 1) % length] = 0


_MAX_REMEMBERED_SHAPES = 1024
# Up to here a Python loop over the values costs less than waking numpy's reductions.
_MAX_LOOPED_VALUES = 512
# Other subclasses of arrays compute otherwise: a masked array hides values, a matrix always has two dimensions.
_PLAIN_ARRAY_TYPES = frozenset({np.ndarray, np.memmap})
_MAX_SHOWN = 80  # characters of a name, and names, in a message
# Attention over nothing has no answer that implementations agree on.
_UNMET_NEED: dict[RowNeed, str] = {
    "token": "has no token: its mask is 0 throughout, expected a 1; leave the row out",
    "first_token": "does not begin with a token: its mask starts with 0, expected 1; pad on the right",
}


class InputChecker:
    """Knows the inputs of one model; built once, used for every request."""

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self._specs = tuple((spec, np.dtype(spec.dtype)) for spec in inputs)
        # Those whose values are looked at: whole numbers, and masks.
        self._valued = tuple(
            (spec.name, spec.high if dtype.kind in "iu" else None, spec.row_needs)
            for spec, dtype in self._specs
            if (spec.high is not None and dtype.kind in "iu") or spec.row_needs is not None
        )
        self._names = {spec.name for spec in inputs}
        self._remembered: dict[tuple[object, ...], Bucket] = {}
        self._has_batch = any("batch" in spec.dims for spec in inputs)
        self._has_sequence = any("sequence" in spec.dims for spec in inputs)

    def shape_of(self, feeds: Mapping[str, Array]) -> Bucket:
        """The input's own batch and sequence (1 where the model has none), after checking every array.

        Raises InputError for a wrong name, type, dtype, rank or size, sizes that differ between inputs, whole
        numbers outside ``[0, high)``, and a row whose mask has none of the tokens that it needs.
        """
        shape = self.sizes_of(feeds)
        self.check_values(feeds)
        return shape

    def sizes_of(self, feeds: Mapping[str, Array]) -> Bucket:
        """As ``shape_of``, without a look at the values, which takes time in large arrays."""
        # After a run the caches hold weights, not code: what was checked once is recognised by type, dtype and shape.
        try:
            kinds = tuple([(name, type(array), array.dtype, array.shape) for name, array in feeds.items()])
            shape = self._remembered.get(kinds)
        except (AttributeError, TypeError):
            return self._shape_of(feeds)  # says which is no array, or that its name is wrong
        if shape is None:
            shape = self._shape_of(feeds)
            if len(self._remembered) >= _MAX_REMEMBERED_SHAPES:
                self._remembered.clear()
            self._remembered[kinds] = shape
        return shape

    def check_values(self, feeds: Mapping[str, Array]) -> None:
        """Raises InputError for whole numbers outside ``[0, high)``, and for a row whose mask has none of the tokens
        that it needs, in arrays whose sizes are right."""
        for name, high, need in self._valued:
            array = feeds[name]
            # One look for both questions, and as few calls of numpy: after a run each finds cold caches.
            numbers = array.ravel().tolist() if array.size <= _MAX_LOOPED_VALUES else None
            if high is not None and _exceeds(array, numbers, high):
                raise InputError(
                    f"input {name}: values {array.min()}..{array.max()}, expected 0..{high - 1}; "
                    "do they come from this bundle's own tokenizer?"
                )
            if need is not None:
                row = _lacking(array, numbers, need)
                if row is not None:
                    raise InputError(f"input {name}: row {row} {_UNMET_NEED[need]}")

    def _shape_of(self, feeds: Mapping[str, Array]) -> Bucket:
        if feeds.keys() != self._names:
            raise InputError(f"inputs {_names(feeds)}: expected exactly {_names(self._names)}")
        sizes: dict[str, int] = {}
        for spec, dtype in self._specs:
            array = feeds[spec.name]
            if type(array) not in _PLAIN_ARRAY_TYPES or array.dtype != dtype:
                raise InputError(f"input {spec.name}: expected a numpy array of {spec.dtype}, got {_kind(array)}")
            if len(array.shape) != len(spec.dims):
                raise InputError(f"input {spec.name}: expected {_dims(spec)}, got shape {list(array.shape)}")
            for dim, size in zip(spec.dims, array.shape, strict=True):
                expected = dim if type(dim) is int else sizes.setdefault(str(dim), size)
                if size != expected or not size:
                    found = f"got shape {list(array.shape)}"
                    where = f" ({dim} is {expected} in another input)" if size and isinstance(dim, str) else ""
                    raise InputError(f"input {spec.name}: expected {_dims(spec)}, {found}{where}")
        return Bucket(sizes.get("batch", 1), sizes.get("sequence", 1))

    def own_shape(self, shape: Bucket, bucket: Bucket) -> Bucket:
        """``shape`` with the bucket's size in every dimension that the inputs do not have."""
        if self._has_batch and self._has_sequence:
            return shape
        return Bucket(
            shape.batch if self._has_batch else bucket.batch, shape.sequence if self._has_sequence else bucket.sequence
        )

    def taken(self, feeds: Mapping[str, Array], rows: Array, sequence: int) -> dict[str, Array]:
        """Copies of the rows of these numbers, of the first ``sequence`` steps, from ``feeds`` with rows first."""
        cuts: dict[str, Any] = {"batch": rows, "sequence": slice(sequence)}
        taken = {}
        for spec, _ in self._specs:
            cut: tuple[Any, ...] = tuple(cuts.get(str(dim), slice(None)) for dim in spec.dims)
            taken[spec.name] = np.ascontiguousarray(feeds[spec.name][cut])
        return taken

    def filled(self, feeds: Mapping[str, Array], bucket: Bucket) -> dict[str, Array]:
        """Copies of ``feeds`` at ``bucket``'s shape. Raises InputError for an input that cannot be padded."""
        full: dict[str, Array] = {}
        for spec, dtype in self._specs:
            array, shape = feeds[spec.name], spec.shape(bucket)
            if array.shape == shape:
                full[spec.name] = array
                continue
            if spec.pad is None:
                raise InputError(
                    f"input {spec.name}: cannot be padded, and shape {list(array.shape)} is not the bucket's "
                    f"{list(shape)}; send exactly that"
                )
            target = np.full(shape, spec.pad, dtype)
            target[tuple(map(slice, array.shape))] = array
            full[spec.name] = target
        return full


def _exceeds(array: Array, numbers: list[int] | None, high: int) -> bool:
    """Whether a value of ``array`` lies outside ``[0, high)``; ``numbers`` are its values, where they are few."""
    if numbers is not None:
        return max(numbers) >= high or min(numbers) < 0
    # Without a sign, a negative number is larger than any bound.
    return bool(array.view(np.dtype(f"u{array.dtype.itemsize}")).max() >= high)


def _lacking(mask: Array, numbers: list[int] | None, need: RowNeed) -> int | None:
    """The first row of ``mask`` ``[B, S]`` that lacks what it needs; ``numbers`` are its values, where they are few."""
    length = mask.shape[1]
    firsts = mask[:, 0].tolist() if numbers is None else numbers[::length]
    if 0 not in firsts:  # rows are nearly always padded on the right, and no other is looked through
        return None
    for row, first in enumerate(firsts):
        if not first:
            tokens = numbers[row * length : (row + 1) * length] if numbers is not None else (mask[row].any(),)
            if need == "first_token" or not any(tokens):
                return row
    return None


def cut_back(outputs: Sequence[Array], specs: Sequence[TensorSpec], given: Bucket) -> list[Array]:
    """Outputs without the rows and steps that padding added, as arrays of their own."""
    return [
        output[tuple(slice(n) for n in spec.shape(given))].copy() if _elastic(spec) else output
        for output, spec in zip(outputs, specs, strict=True)
    ]


def _elastic(spec: TensorSpec) -> bool:
    return any(isinstance(dim, str) for dim in spec.dims)


def _dims(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.dims))}]"


def _kind(array: object) -> str:
    """Type of ``array``, which stands in place of the expected one, and advice where it holds more than one array."""
    if type(array) in _PLAIN_ARRAY_TYPES and isinstance(array, np.ndarray):
        return f"{array.dtype!s:.{_MAX_SHOWN}}"
    mend = ""
    if isinstance(array, np.ma.MaskedArray):
        mend = ", whose mask no model sees; fill it: array.filled(value)"
    elif isinstance(array, np.ndarray):
        mend = "; pass numpy.asarray of it"
    return f"{type(array).__name__:.{_MAX_SHOWN}}{mend}"


def _names(names: Iterable[object]) -> str:
    shown = sorted(str(name)[:_MAX_SHOWN] for name in names)
    more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    return (", ".join(shown[:_MAX_SHOWN]) or "none") + more
