"""How a pass of PyTorch reads weights: in float64, or moved by rounding, each where an operation takes it.

There is no copy of a module. Its parameters stay as they are, float32 in whatever memory they lie, such as a file that
is mapped; what an operation takes of them is changed for that operation, so that a pass needs memory for one of them.

Models ask for float32 by name here and there (norms, softmax, rotary angles). Values that depend on a weight stay in
float64 there; what depends on none, such as a table of rotary angles or a mixing matrix, is as much given as a weight
is, and keeps the float32 numbers that the model, and so an engine, computes with.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...errors import UnsupportedModelError
from ...exporters.torch_internals import TorchDispatchMode, disable_dispatch, schema_of

# Bytes of a changed matrix of a product at most; a larger one, such as that of a vocabulary, is taken in parts.
_MOST_BYTES_AT_ONCE = 2**27
# A multiple of the columns that kernels of products take at a time: what is left over is summed in another order.
_COLUMNS = 192
# The period of the places whose weights are moved, a prime, so that no two rows of a matrix have the same.
_PERIOD = 65_537

_aten = torch.ops.aten
# Operations that only pick of their first argument: rows of a table of words are picked before they are changed.
_PICKS = {_aten.embedding.default, _aten.index_select.default, _aten.index.Tensor, _aten.gather.default}
# They return their input's own numbers, though torch does not say so.
_VIEWS = {_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default}
# Products by the place of their second matrix ``[K, N]``.
_PRODUCTS = {_aten.mm.default: 1, _aten.addmm.default: 2}

_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]

# By parameter: dimensions, and places of each.
Cuts = Mapping[str, Sequence[tuple[int, int]]]


@contextmanager
def in_float64(module: torch.nn.Module, first: Cuts | None = None) -> Iterator[None]:
    """Within it passes of ``module`` compute in float64: nothing that depends on a weight is narrowed to float32.

    Where ``first`` names a parameter, it is 0 beyond so many first places of each dimension stated there.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of plain numbers, such as the lowest finite one of the states' type
    try:
        with _Float64(module, first or {}) as reading, _Strict.of(module, reading), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def nudged(module: torch.nn.Module, seed: int) -> Iterator[None]:
    """Within it passes of the float32 ``module`` have an eighth of its weights moved by one unit in the last place, in
    the mean what rounding each of them once does."""
    with _Nudged(module, seed), torch.no_grad():
        yield


def inputs_of(feeds: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    """A module's inputs, by position; numbers as wide as it computes."""
    given = (torch.from_numpy(np.asarray(array)) for array in feeds.values())
    return tuple(tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor for tensor in given)


class _Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation but views takes other numbers than those of the parameters of a ``module``.

    A parameter or a view of one is known by where it lies, whatever made the view.
    """

    DTYPE: torch.dtype

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = [(p.data_ptr(), name, p.detach()) for name, p in module.named_parameters() if p.numel()]
        self._parameters = sorted(found, key=lambda each: each[:2])
        self._starts = [start for start, _, _ in self._parameters]
        self._ends = [start + _extent(tensor) * tensor.itemsize for start, _, tensor in self._parameters]
        self._room, self._used = torch.empty(0, dtype=self.DTYPE), 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func.is_view or func in _VIEWS:
            return func(*args, **named)
        if func in _PICKS and self.reads(args[0]):
            mark = self._mark(args[0])
            return self._changed(func(*args, **named), None if mark is None else func(mark, *args[1:], **named))
        place = _PRODUCTS.get(func)
        if place is not None and not named and self._is_large(args[place]):
            return self._in_parts(func, args, place)
        return self._computed(func, args, named)

    def _computed(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._used = 0  # the operation before has read what it took
        # A tensor that is written into is the pass's own.
        written = args[:1] if schema_of(func).is_mutable else ()
        if written and (place := self._place(written[0])) is not None:
            # It lies in a mapped file, where a write would end the process.
            raise UnsupportedModelError(
                f"a pass of the module writes into its weight {self._parameters[place][1]}; expected weights that only "
                "training changes: change them before, and take that away from forward"
            )
        return func(*written, *map(self._read, args[len(written) :]), **{k: self._read(v) for k, v in named.items()})

    def _in_parts(self, func: Any, args: tuple[Any, ...], place: int) -> torch.Tensor:
        """A product by columns of its second matrix, which are columns of what it returns."""
        matrix = args[place]
        columns = max(1, _MOST_BYTES_AT_ONCE // (8 * matrix.shape[0]) // _COLUMNS) * _COLUMNS
        found: torch.Tensor | None = None
        for start in range(0, matrix.shape[1], columns):
            part = list(args)
            part[place] = matrix[:, start : start + columns]
            if place == 2 and args[0].shape[-1] == matrix.shape[1]:
                part[0] = args[0][..., start : start + columns]
            made: torch.Tensor = self._computed(func, tuple(part), {})
            if found is None:
                found = made.new_empty(made.shape[0], matrix.shape[1])
            found[:, start : start + columns] = made
        assert found is not None
        return found

    def _is_large(self, tensor: torch.Tensor) -> bool:
        return 8 * tensor.numel() > _MOST_BYTES_AT_ONCE and self.reads(tensor)

    def _place(self, value: Any) -> int | None:
        """The number of the parameter that ``value`` is a part of."""
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return None
        at = bisect_right(self._starts, start := value.data_ptr()) - 1
        return at if at >= 0 and start < self._ends[at] else None

    def reads(self, value: Any) -> bool:
        """Whether ``value`` is a parameter or a part of one."""
        return self._place(value) is not None

    def _read(self, value: Any) -> Any:
        """``value`` with what the pass reads in the place of each parameter."""
        if isinstance(value, list | tuple):
            return [self._read(each) for each in value]
        if not self.reads(value):
            return value
        return self._changed(value, self._mark(value), self._room_like(value))

    def _room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for what is read in the place of ``tensor``, which the next operation gets again: pages that are new
        cost ten times what it costs to widen a weight."""
        numbers = tensor.numel()
        if self._used + numbers > len(self._room):
            self._room, self._used = torch.empty(max(numbers, len(self._room)), dtype=self.DTYPE), 0
        room = self._room[self._used : self._used + numbers]
        self._used += numbers
        return room.as_strided(tensor.shape, _strides_in_a_copy(tensor.shape, tensor.stride()))

    def _mark(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Marks for ``_changed`` of each number of a part of a parameter, in its shape; None for nothing."""
        raise NotImplementedError

    def _changed(
        self, numbers: torch.Tensor, mark: torch.Tensor | None, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Other numbers than these, in ``room`` where that is given."""
        raise NotImplementedError


class _Float64(_Reading):  # type: ignore[no-untyped-call]
    """Parameters are float64; an operation that takes one, or another float64 tensor, takes its float32 ones as
    float64, and returns no float32."""

    DTYPE = torch.float64

    def __init__(self, module: torch.nn.Module, first: Cuts) -> None:
        super().__init__(module)
        self._cuts = [first.get(name, ()) for _, name, _ in self._parameters]

    def _computed(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if schema_of(func).is_mutable or not (self._has_wide(args) or self._has_wide(named.values())):
            return super()._computed(func, args, named)
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        self._used = 0  # the operation before has read what it took
        return func(*map(self._wide, args), **{name: self._wide(value) for name, value in named.items()})

    def _read(self, value: Any) -> Any:
        place = self._place(value)
        if place is None or not self._cuts[place] or not _lies_as(value, parameter := self._parameters[place][2]):
            return super()._read(value)
        wide = self._room_like(value)
        kept = wide.as_strided(parameter.shape, parameter.stride(), wide.storage_offset())
        for dim, count in self._cuts[place]:
            kept.narrow(dim, count, kept.shape[dim] - count).zero_()
            kept, parameter = kept.narrow(dim, 0, count), parameter.narrow(dim, 0, count)
        kept.copy_(parameter)
        return wide

    def read_all(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of one call with parameters in float64, and then every float32 one."""
        read = self._widest if self._has_wide(args) or self._has_wide(named.values()) else self._read
        self._used = 0  # the call before has read what it took
        return tuple(map(read, args)), {name: read(value) for name, value in named.items()}

    def _widest(self, value: Any) -> Any:
        read = self._read(value)
        return read.double() if isinstance(read, torch.Tensor) and read.dtype is torch.float32 else read

    # An operation takes tensors and lists of them. Every one of a pass comes here: torch's walk through any structure
    # would take longer than the operations of a small model.
    def _has_wide(self, values: Iterable[Any]) -> bool:
        return any(
            value.dtype is torch.float64 or self.reads(value)
            if isinstance(value, torch.Tensor)
            else isinstance(value, list | tuple) and self._has_wide(value)
            for value in values
        )

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._read(value).double() if value.dtype is torch.float32 else value
        return [self._wide(each) for each in value] if isinstance(value, list | tuple) else value

    def _mark(self, tensor: torch.Tensor) -> torch.Tensor | None:
        place = self._place(tensor)
        assert place is not None
        if not self._cuts[place]:
            return None
        start, _, parameter = self._parameters[place]
        dropped = torch.zeros(_extent(parameter), dtype=torch.bool)
        whole = dropped.as_strided(parameter.shape, parameter.stride())
        for dim, count in self._cuts[place]:
            whole.narrow(dim, count, whole.shape[dim] - count).fill_(True)
        return dropped.as_strided(tensor.shape, tensor.stride(), (tensor.data_ptr() - start) // tensor.itemsize)

    def _changed(
        self, numbers: torch.Tensor, mark: torch.Tensor | None, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = numbers.double() if room is None else room.copy_(numbers)
        return wide if mark is None else wide.masked_fill_(mark, 0.0)


class _Strict(TorchFunctionMode):
    """Functions that want weights of the type of what they are given before any operation takes them get them so."""

    _NAMES = re.compile(
        r"conv(_transpose)?\dd|(lstm|gru|rnn_tanh|rnn_relu)(_cell)?|prelu|bilinear|rms_norm|scaled_dot_product_attention"
    )
    _MODULES = (torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.PReLU, torch.nn.RMSNorm)

    def __init__(self, reading: _Float64) -> None:
        super().__init__()
        self._reading = reading

    @classmethod
    def of(cls, module: torch.nn.Module, reading: _Float64) -> AbstractContextManager[object]:
        """One where ``module`` may call them, since every function of torch asks it; their other weights are stacks of
        matrices."""
        has_stacks = any(parameter.dim() > 2 for parameter in module.parameters())
        has_others = any(isinstance(part, cls._MODULES) for part in module.modules())
        return cls(reading) if has_stacks or has_others else nullcontext()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func == _DTYPE:  # which some modules look at themselves
            return torch.float64 if self._reading.reads(args[0]) else func(*args)
        if self._NAMES.fullmatch(getattr(func, "__name__", "")):
            with disable_dispatch():
                args, named = self._reading.read_all(args, named)
        return func(*args, **named)


class _Nudged(_Reading):  # type: ignore[no-untyped-call]
    """Float32 bits count up from zero: 16 of 256 places go up by one, 16 go down."""

    DTYPE = torch.int32

    def __init__(self, module: torch.nn.Module, seed: int) -> None:
        super().__init__(module)
        generator = np.random.default_rng(seed)
        chance = generator.integers(0, 256, _PERIOD)
        self._steps = torch.from_numpy((chance < 16).astype(np.int8) - ((chance >= 16) & (chance < 32)))
        # By name, so that what happens to a weight does not depend on where it lies.
        offsets = {name: int(generator.integers(_PERIOD)) for name in sorted(n for _, n, _ in self._parameters)}
        self._offsets = [offsets[name] for _, name, _ in self._parameters]

    def _mark(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self._place(tensor)
        assert place is not None
        first = self._offsets[place] + (tensor.data_ptr() - self._starts[place]) // tensor.itemsize
        numbers = _extent(tensor)
        steps = self._steps.roll(-(first % _PERIOD)).repeat(-(-numbers // _PERIOD))
        return steps.as_strided(tensor.shape, tensor.stride())

    def _changed(
        self, numbers: torch.Tensor, mark: torch.Tensor | None, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert mark is not None
        bits = numbers.view(torch.int32)
        moved = torch.add(bits, mark, out=torch.empty_like(bits) if room is None else room)
        if (zeros := numbers == 0).any():  # no sign of a zero
            moved = torch.where(zeros, bits, moved)
        return moved.view(torch.float32)


@cache
def _strides_in_a_copy(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in a copy of a tensor with ``strides``, such as a transposed one, whose products would be computed
    otherwise if it lay otherwise."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _lies_as(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a part of ``whole`` is all of it, with its dimensions in any order and without gaps."""
    is_dense = _strides_in_a_copy(tensor.shape, tensor.stride()) == tensor.stride()
    return tensor.numel() == whole.numel() and is_dense


def _extent(tensor: torch.Tensor) -> int:
    """Numbers from the first to the last one of ``tensor`` in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
