"""How each ATen operation carries the factors of its inputs' dimensions to those of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .factors import WITHIN, Dim, Dims, Factor, block, regroup, unify

# A parameter, and one of its dimensions.
Place = tuple[str, int]


@dataclass
class Followed:
    """Dimensions that one pass of a module showed. ``made`` and ``read`` are the dimensions of weights that products
    with activations make and sum over; ``batched`` are those of products of two activations that neither sums over, as
    attention has its heads. ``calls`` are the arguments, shapes alone, of each part's first call by its name;
    ``answers`` the shapes that the module returns."""

    places: dict[Place, Dim] = field(default_factory=dict)
    made: set[Place] = field(default_factory=set)
    read: set[Place] = field(default_factory=set)
    batched: list[Dim] = field(default_factory=list)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    answers: list[tuple[int, ...]] = field(default_factory=list)


class Noted:
    """The dimensions of every tensor of a pass, and what is ``found``."""

    def __init__(self, found: Followed) -> None:
        self.found = found
        self._dims: Any = WeakIdKeyDictionary()
        # Tensors that are a parameter, seen some way, and where its dimensions are.
        self._origins: Any = WeakIdKeyDictionary()

    def source(self, tensor: torch.Tensor, name: str) -> None:
        self._origins[tensor] = [(name, at) for at in range(tensor.ndim)]
        self.found.places |= {(name, at): dim for at, dim in enumerate(self.fresh(tensor))}

    def fresh(self, tensor: torch.Tensor, reason: str | None = None) -> Dims:
        dims: Dims = tuple((Factor(int(size)),) for size in tensor.shape)
        if reason is not None:
            block(dims, reason)
        self._dims[tensor] = dims
        return dims

    def dims(self, tensor: torch.Tensor) -> Dims:
        known: Dims | None = self._dims.get(tensor)
        return self.fresh(tensor) if known is None else known

    def carry(self, tensor: torch.Tensor, dims: Iterable[Iterable[Factor]]) -> None:
        self._dims[tensor] = tuple(map(tuple, dims))

    def origin(self, tensor: torch.Tensor) -> list[Place | None] | None:
        found: list[Place | None] | None = self._origins.get(tensor)
        return found

    def carry_origin(self, before: torch.Tensor, after: torch.Tensor, order: Sequence[int | None]) -> None:
        places = self.origin(before)
        if places is not None:
            self._origins[after] = [None if at is None else places[at] for at in order]


_Tensors = Sequence[torch.Tensor]
_Given = Mapping[str, Any]
Rule = Callable[[Noted, _Tensors, _Tensors, _Given], None]


def _elementwise(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    """Tensors broadcast to one shape."""
    for output in outputs:
        dims: list[Dim] = [(Factor(int(size)),) for size in output.shape]
        for tensor in inputs:
            for at, dim in enumerate(reversed(noted.dims(tensor)), start=1):
                if at <= len(dims) and tensor.shape[-at] == output.shape[-at]:
                    unify(dim, dims[-at])
        noted.carry(output, dims)


def _same(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """A copy, in whatever type."""
    _elementwise(noted, inputs[:1], outputs[:1], given)
    noted.carry_origin(inputs[0], outputs[0], range(inputs[0].ndim))


def _view(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    noted.carry(outputs[0], regroup(noted.dims(inputs[0]), [int(size) for size in outputs[0].shape]))
    if inputs[0].shape == outputs[0].shape:
        noted.carry_origin(inputs[0], outputs[0], range(inputs[0].ndim))


def _permute(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    rank, dims = inputs[0].ndim, noted.dims(inputs[0])
    if "dims" in given:
        order = [at % rank for at in given["dims"]]
    else:
        order = list(range(rank))
        a, b = (given.get("dim0", 0) % rank, given.get("dim1", 1) % rank) if rank > 1 else (0, 0)
        order[a], order[b] = order[b], order[a]
    noted.carry(outputs[0], (dims[at] for at in order))
    noted.carry_origin(inputs[0], outputs[0], order)


def _expand(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Whoever multiplies a stack of rows by one weight makes a stack of that."""
    _elementwise(noted, inputs, outputs, given)
    added = outputs[0].ndim - inputs[0].ndim
    if inputs[0].shape == outputs[0].shape[added:]:
        noted.carry_origin(inputs[0], outputs[0], (*(None,) * added, *range(inputs[0].ndim)))


def _parts(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """A dimension cut in pieces, or some of it taken: equal ones are the same steps."""
    dims, at = list(noted.dims(inputs[0])), given.get("dim", 0) % inputs[0].ndim
    whole = int(inputs[0].shape[at])
    for output in outputs:
        size, start = int(output.shape[at]), int(given.get("start") or 0)
        start = max(start + whole, 0) if start < 0 else start
        if size == whole:
            noted.carry(output, dims)
            continue
        part: Dim = (Factor(size),)
        if size > 0 and whole % size == 0 and start % size == 0 and given.get("step", 1) == 1:
            pieces = Factor(whole // size)
            unify(dims[at], (pieces, *part))
            block([(pieces,)], "parts of it are taken one by one")
        else:
            block([dims[at]], "a part of it is taken that is none of several equal ones")
        noted.carry(output, (*dims[:at], part, *dims[at + 1 :]))


def _without(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Steps of a dimension taken one by one."""
    dims, at = noted.dims(inputs[0]), given.get("dim", 0) % inputs[0].ndim
    block([dims[at]], "parts of it are taken one by one")
    for output in outputs:
        noted.carry(output, (*dims[:at], *dims[at + 1 :]))


def _join(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Several one behind the other: those of one size are the same steps."""
    at = given.get("dim", 0) % outputs[0].ndim
    dims: list[Dim] = [(Factor(int(size)),) for size in outputs[0].shape]
    whole = [tensor for tensor in inputs if tensor.ndim == len(dims)]
    for tensor in whole:
        for place, dim in enumerate(noted.dims(tensor)):
            if place != at:
                unify(dim, dims[place])
    first, *others = (noted.dims(tensor)[at] for tensor in whole)
    if others and len({tensor.shape[at] for tensor in whole}) == 1 and len(whole) == len(inputs):
        for dim in others:
            unify(first, dim)
        pieces = Factor(len(whole))
        block([(pieces,)], "parts lie one behind the other along it")
        dims[at] = (pieces, *first)
    else:
        block([first, *others], "it is joined with others")
    noted.carry(outputs[0], dims)


def _stacked(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    at, dims = given.get("dim", 0) % outputs[0].ndim, noted.dims(inputs[0])
    for tensor in inputs[1:]:
        for one, other in zip(dims, noted.dims(tensor), strict=True):
            unify(one, other)
    noted.carry(outputs[0], (*dims[:at], (Factor(len(inputs)),), *dims[at:]))


def _repeated(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """The whole of a dimension so many times, one behind the other."""
    times = given["repeats"]
    dims = ((),) * (len(times) - inputs[0].ndim) + noted.dims(inputs[0])
    noted.carry(outputs[0], ((Factor(int(n)), *dim) for n, dim in zip(times, dims, strict=True)))


def _padded(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    dims: list[Dim] = []
    for dim, before, after in zip(noted.dims(inputs[0]), inputs[0].shape, outputs[0].shape, strict=True):
        if before != after:
            block([dim], "it is padded")
        dims.append(dim if before == after else (Factor(int(after)),))
    noted.carry(outputs[0], dims)


def _over(reason: str, keeps: bool = False) -> Rule:
    """Over some dimensions, which are then gone, or have one step, or where it ``keeps`` them all are as before."""

    def rule(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
        tensor, dims = inputs[0], noted.dims(inputs[0])
        stated = given.get("dim", given.get("dims"))
        listed = [stated] if isinstance(stated, int) else list(stated or range(tensor.ndim))
        over = {at % max(tensor.ndim, 1) for at in listed}
        block((dims[at] for at in over if at < len(dims)), reason)
        kept = [dim for at, dim in enumerate(dims) if at not in over]
        for output in outputs:
            if keeps:
                noted.carry(output, dims)
            elif output.ndim == len(kept):
                noted.carry(output, kept)
            elif output.ndim == len(dims):
                one = enumerate(zip(dims, output.shape, strict=True))
                noted.carry(output, ((Factor(int(size)),) if at in over else dim for at, (dim, size) in one))

    return rule


def _normalised(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Over the last dimensions, with weights for each step."""
    dims, rank = noted.dims(inputs[0]), len(given["normalized_shape"])
    for tensor in inputs[1:]:
        for dim, own in zip(dims[-rank:], noted.dims(tensor), strict=True):
            unify(dim, own)
    block(dims[-rank:], "a norm runs over it")
    noted.carry(outputs[0], dims)


def _looked_up(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    table, indices = inputs[:2]
    first, *rest = noted.dims(table)
    block([first], "it is a table's rows")
    noted.carry(outputs[0], (*noted.dims(indices), *rest))


def _indexed(noted: Noted, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Steps of the first dimension by one tensor of indices, or whatever else indices may do, which is not followed."""
    indices = given["indices"]
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype != torch.bool:
        _looked_up(noted, inputs, outputs, given)
    else:
        for tensor in inputs:
            block(noted.dims(tensor), "indices pick from it")


def _product(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    """Matrices, or stacks of them: ``[.., m, k]`` and ``[.., k, n]``; with a sum before them."""
    *added, left, right = inputs
    a, b = noted.dims(left), noted.dims(right)
    unify(a[-1], b[-2])
    for one, other in zip(a[:-2], b[:-2], strict=True):
        unify(one, other)
    noted.carry(outputs[0], (*a[:-1], b[-1]))
    for weight, made, read in ((left, -2, -1), (right, -1, -2)):
        places = noted.origin(weight)
        if places is not None:
            noted.found.made |= {place for place in places[made:][:1] if place is not None}
            noted.found.read |= {place for place in places[read:][:1] if place is not None}
            stacked = (dim for dim, place in zip(a, places[:-2], strict=False) if place is not None)
            block(stacked, "weights lie one behind the other in it")
    if noted.origin(left) is None and noted.origin(right) is None:
        noted.found.batched += a[:-2]
        block([a[-1], a[-2], b[-1]], WITHIN)
    for tensor in added:
        _elementwise(noted, [tensor, outputs[0]], outputs, {})


def _as_complex(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    """The last dimension is the two parts of a number."""
    noted.carry(outputs[0], noted.dims(inputs[0])[:-1])


def _as_real(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    noted.carry(outputs[0], (*noted.dims(inputs[0]), (Factor(2),)))


def _new(*_: Any) -> None:
    """A tensor of the type of another."""


def _convolved(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    for tensor in inputs:
        block(noted.dims(tensor), "a convolution reads it")
    for output in outputs:
        block(noted.fresh(output), "a convolution makes it")


def _resized(noted: Noted, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    """Images, each plane by itself: ``[B, C, H, W]`` to others."""
    dims = noted.dims(inputs[0])
    block(dims[2:], "an image is resized along it")
    noted.carry(outputs[0], (*dims[:2], *((Factor(int(size)),) for size in outputs[0].shape[2:])))


# Those that torch does not call pointwise.
_ELEMENTWISE = (
    *("native_dropout", "zeros_like", "ones_like", "full_like", "empty_like", "copy_"),
    *("masked_fill", "masked_fill_", "fill_", "zero_"),
)
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("clone", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous"), _same),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"), _view),
    **dict.fromkeys(("permute", "t", "transpose"), _permute),
    **dict.fromkeys(("slice", "split", "split_with_sizes", "glu"), _parts),
    **dict.fromkeys(("select", "unbind"), _without),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _product),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax"), _over("a softmax runs over it", keeps=True)),
    **dict.fromkeys(("sort", "flip", "roll", "cumsum", "cumprod"), _over("its order counts", keeps=True)),
    **dict.fromkeys(("topk", "max", "min", "argmax", "argmin"), _over("a choice of its highest runs over it")),
    **dict.fromkeys(
        ("mean", "sum", "var", "var_mean", "std", "amax", "amin", "any", "all", "prod", "linalg_vector_norm"),
        _over("a mean or a sum runs over it"),
    ),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _normalised),
    **dict.fromkeys(
        ("upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d", "_adaptive_avg_pool2d"), _resized
    ),
    "embedding": _looked_up,
    "index": _indexed,
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
    "expand": _expand,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
    "cat": _join,
    "stack": _stacked,
    "repeat": _repeated,
    "constant_pad_nd": _padded,
    "convolution": _convolved,
}


def rule_of(name: str, is_pointwise: bool) -> Rule | None:
    """The rule of an operation, None where it is not followed."""
    return _RULES.get(name) or (_elementwise if is_pointwise else None)
