"""Which dimensions of a module's parameters are one and the same, found by following them through one pass.

The pass computes nothing: its tensors have shapes alone. A dimension is a product of factors, slowest first, as in
``compiler/graph/passes/free_elastic_dims.py``: what a query projection makes is ``(heads * 32)``, and after the split
``heads, 32``. Factors that meet in an operation become one; a view splits them. What an operation does to a factor
beside carrying it, such as a norm over it, is noted as the reason why it cannot shrink.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import ExportError
from ...outside import library_errors
from .transformers_model import caches_unused


class Factor:
    """``size`` steps; ``parts`` are what it was found to be made of, or the factor that it was found to be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Factor, ...] = ()
        self.reasons: dict[str, None] = {}


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]
# Why the numbers of one head do not shrink.
WITHIN = "attention multiplies along it"
# A parameter, and one of its dimensions.
Place = tuple[str, int]


@dataclass
class Followed:
    """What one pass of a module showed. ``made`` and ``read`` are the dimensions of weights that products with
    activations make and sum over; ``batched`` are those of products of two activations that neither sums over, as
    attention has its heads. ``calls`` are the arguments, shapes alone, of each part's first call by its name;
    ``answers`` the shapes that the module returns."""

    places: dict[Place, Dim] = field(default_factory=dict)
    made: set[Place] = field(default_factory=set)
    read: set[Place] = field(default_factory=set)
    batched: list[Dim] = field(default_factory=list)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    answers: list[tuple[int, ...]] = field(default_factory=list)


def follow(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Followed:
    """Follows every dimension through one pass of ``module``, whose tensors, as those of its arguments, may be on the
    meta device. Raises ExportError for a module that does not answer by shapes alone."""
    tensors = [*module.parameters(), *module.buffers()]
    found, mode = Followed(), detect_fake_mode(tensors) or FakeTensorMode(allow_non_fake_inputs=True)

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            return torch.nn.Parameter(made, False) if isinstance(tensor, torch.nn.Parameter) else made

    # What a pass leaves in a module has no numbers: it runs a copy.
    module = copy.deepcopy(module, {id(tensor): shaped(tensor) for tensor in tensors})
    follower = _Follower(found)
    for name, parameter in module.named_parameters():
        follower.source(parameter, name)
    for buffer in module.buffers():
        follower.fresh(buffer, "a constant of the model has one for each")
    args, kwargs = tree_map_only(torch.Tensor, shaped, (tuple(args), dict(kwargs)))
    for tensor in _tensors((args, kwargs)):
        follower.fresh(tensor, "an input of the model has it")
    for name, part in module.named_modules():
        part.register_forward_pre_hook(_recorder(found, name), with_kwargs=True)
    failed = library_errors(lambda said: ExportError(f"cannot be followed by shapes alone: {said}"))
    with failed, torch.no_grad(), sdpa_kernel(SDPBackend.MATH), caches_unused(), mode, follower:
        outputs = module(*args, **kwargs)
    for tensor in _tensors(outputs):
        block(follower.dims(tensor), "an output of the model has it")
    found.answers = [tuple(tensor.shape) for tensor in _tensors(outputs)]
    return found


def leaves(dim: Iterable[Factor]) -> list[Factor]:
    """The factors that ``dim`` is now known to be made of, without those of one step."""
    found: list[Factor] = []
    for factor in dim:
        found += leaves(factor.parts) if factor.parts else [factor] if factor.size > 1 else []
    return found


def block(dims: Iterable[Dim], reason: str) -> None:
    """Notes why no factor of ``dims`` can shrink."""
    for dim in dims:
        for factor in leaves(dim):
            factor.reasons[reason] = None


def _recorder(found: Followed, name: str) -> Callable[..., None]:
    def record(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.calls.setdefault(name, (args, dict(kwargs)))

    return record


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def _split(factor: Factor, slower: int) -> Dim:
    """Finds that ``factor`` is ``slower`` times something."""
    parts = Factor(slower), Factor(factor.size // slower)
    for part in parts:
        part.reasons |= factor.reasons
    factor.parts = parts
    return parts


def _unify(one: Iterable[Factor], other: Iterable[Factor]) -> None:
    """Makes two dimensions of one extent the same, factor by factor."""
    left, right = leaves(one), leaves(other)
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if a.parts or b.parts:  # found by a pair before
            left[:0], right[:0] = leaves([a]), leaves([b])
        elif a.size == b.size:
            if a is not b:
                b.parts = (a,)
                a.reasons |= b.reasons
        elif a.size % b.size == 0:
            left[:0], right[:0] = _split(a, b.size), [b]
        elif b.size % a.size == 0:
            left[:0], right[:0] = [a], _split(b, a.size)
        else:
            block([(a, b, *left, *right)], "its steps are cut across")
            return


def _regroup(dims: Dims, shape: Sequence[int]) -> Dims:
    """The same factors as dimensions of ``shape``."""
    left = leaves(factor for dim in dims for factor in dim)
    found: list[Dim] = []
    for extent in shape:
        taken: list[Factor] = []
        while extent > 1:
            if not left:
                return tuple((Factor(size),) for size in shape)
            factor = left.pop(0)
            if extent % factor.size and factor.size % extent == 0:
                factor, rest = _split(factor, extent)
                left.insert(0, rest)
            if extent % factor.size:
                block([(factor, *taken, *left, *(f for dim in found for f in dim))], "a view cuts across its steps")
                return tuple((Factor(size),) for size in shape)
            extent //= factor.size
            taken.append(factor)
        found.append(tuple(taken))
    return tuple(found)


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not typed
    """Notes the dimensions of every tensor that an operation returns."""

    def __init__(self, found: Followed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        outputs = [value for value in tree_iter(returned) if isinstance(value, torch.Tensor)]
        name = func.overloadpacket.__name__
        inputs = list(_tensors((args, kwargs)))
        rule = _RULES.get(name) or (_elementwise if torch.Tag.pointwise in func.tags else None)
        if rule is not None:
            arguments = func._schema.arguments
            given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
            given |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
            rule(self, inputs, outputs, {**given, **kwargs})
        elif inputs and outputs:
            for tensor in inputs:
                block(self.dims(tensor), f"{name} is not followed")
        return returned

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


def _elementwise(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    """Tensors broadcast to one shape."""
    for output in outputs:
        dims: list[Dim] = [(Factor(int(size)),) for size in output.shape]
        for tensor in inputs:
            for at, dim in enumerate(reversed(follower.dims(tensor)), start=1):
                if at <= len(dims) and tensor.shape[-at] == output.shape[-at]:
                    _unify(dim, dims[-at])
        follower.carry(output, dims)


def _same(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """A copy, in whatever type."""
    _elementwise(follower, inputs[:1], outputs[:1], given)
    follower.carry_origin(inputs[0], outputs[0], range(inputs[0].ndim))


def _view(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    follower.carry(outputs[0], _regroup(follower.dims(inputs[0]), [int(size) for size in outputs[0].shape]))
    if inputs[0].shape == outputs[0].shape:
        follower.carry_origin(inputs[0], outputs[0], range(inputs[0].ndim))


def _permute(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    rank, dims = inputs[0].ndim, follower.dims(inputs[0])
    if "dims" in given:
        order = [at % rank for at in given["dims"]]
    else:
        order = list(range(rank))
        a, b = (given.get("dim0", 0) % rank, given.get("dim1", 1) % rank) if rank > 1 else (0, 0)
        order[a], order[b] = order[b], order[a]
    follower.carry(outputs[0], (dims[at] for at in order))
    follower.carry_origin(inputs[0], outputs[0], order)


def _expand(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Whoever multiplies a stack of rows by one weight makes a stack of that."""
    _elementwise(follower, inputs, outputs, given)
    added = outputs[0].ndim - inputs[0].ndim
    if inputs[0].shape == outputs[0].shape[added:]:
        follower.carry_origin(inputs[0], outputs[0], (*(None,) * added, *range(inputs[0].ndim)))


def _parts(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """A dimension cut in pieces, or some of it taken: equal ones are the same steps."""
    dims, at = list(follower.dims(inputs[0])), given.get("dim", 0) % inputs[0].ndim
    whole = int(inputs[0].shape[at])
    for output in outputs:
        size, start = int(output.shape[at]), int(given.get("start") or 0)
        start = max(start + whole, 0) if start < 0 else start
        if size == whole:
            follower.carry(output, dims)
            continue
        part: Dim = (Factor(size),)
        if size > 0 and whole % size == 0 and start % size == 0 and given.get("step", 1) == 1:
            pieces = Factor(whole // size)
            _unify(dims[at], (pieces, *part))
            block([(pieces,)], "parts of it are taken one by one")
        else:
            block([dims[at]], "a part of it is taken that is none of several equal ones")
        follower.carry(output, (*dims[:at], part, *dims[at + 1 :]))


def _without(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Steps of a dimension taken one by one."""
    dims, at = follower.dims(inputs[0]), given.get("dim", 0) % inputs[0].ndim
    block([dims[at]], "parts of it are taken one by one")
    for output in outputs:
        follower.carry(output, (*dims[:at], *dims[at + 1 :]))


def _join(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Several one behind the other: those of one size are the same steps."""
    at = given.get("dim", 0) % outputs[0].ndim
    dims: list[Dim] = [(Factor(int(size)),) for size in outputs[0].shape]
    whole = [tensor for tensor in inputs if tensor.ndim == len(dims)]
    for tensor in whole:
        for place, dim in enumerate(follower.dims(tensor)):
            if place != at:
                _unify(dim, dims[place])
    first, *others = (follower.dims(tensor)[at] for tensor in whole)
    if others and len({tensor.shape[at] for tensor in whole}) == 1 and len(whole) == len(inputs):
        for dim in others:
            _unify(first, dim)
        pieces = Factor(len(whole))
        block([(pieces,)], "parts lie one behind the other along it")
        dims[at] = (pieces, *first)
    else:
        block([first, *others], "it is joined with others")
    follower.carry(outputs[0], dims)


def _stacked(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    at, dims = given.get("dim", 0) % outputs[0].ndim, follower.dims(inputs[0])
    for tensor in inputs[1:]:
        for one, other in zip(dims, follower.dims(tensor), strict=True):
            _unify(one, other)
    follower.carry(outputs[0], (*dims[:at], (Factor(len(inputs)),), *dims[at:]))


def _repeated(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """The whole of a dimension so many times, one behind the other."""
    times = given["repeats"]
    dims = ((),) * (len(times) - inputs[0].ndim) + follower.dims(inputs[0])
    follower.carry(outputs[0], ((Factor(int(n)), *dim) for n, dim in zip(times, dims, strict=True)))


def _padded(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    dims: list[Dim] = []
    for dim, before, after in zip(follower.dims(inputs[0]), inputs[0].shape, outputs[0].shape, strict=True):
        if before != after:
            block([dim], "it is padded")
        dims.append(dim if before == after else (Factor(int(after)),))
    follower.carry(outputs[0], dims)


def _over(reason: str, keeps: bool = False) -> Callable[..., None]:
    """Over some dimensions, which are then gone, or have one step, or where it ``keeps`` them all are as before."""

    def rule(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
        tensor, dims = inputs[0], follower.dims(inputs[0])
        stated = given.get("dim", given.get("dims"))
        listed = [stated] if isinstance(stated, int) else list(stated or range(tensor.ndim))
        over = {at % max(tensor.ndim, 1) for at in listed}
        block((dims[at] for at in over if at < len(dims)), reason)
        kept = [dim for at, dim in enumerate(dims) if at not in over]
        for output in outputs:
            if keeps:
                follower.carry(output, dims)
            elif output.ndim == len(kept):
                follower.carry(output, kept)
            elif output.ndim == len(dims):
                one = enumerate(zip(dims, output.shape, strict=True))
                follower.carry(output, ((Factor(int(size)),) if at in over else dim for at, (dim, size) in one))

    return rule


def _normalised(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Over the last dimensions, with weights for each step."""
    dims, rank = follower.dims(inputs[0]), len(given["normalized_shape"])
    for tensor in inputs[1:]:
        for dim, own in zip(dims[-rank:], follower.dims(tensor), strict=True):
            _unify(dim, own)
    block(dims[-rank:], "a norm runs over it")
    follower.carry(outputs[0], dims)


def _looked_up(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    table, indices = inputs[:2]
    first, *rest = follower.dims(table)
    block([first], "it is a table's rows")
    follower.carry(outputs[0], (*follower.dims(indices), *rest))


def _indexed(follower: _Follower, inputs: _Tensors, outputs: _Tensors, given: _Given) -> None:
    """Steps of the first dimension by one tensor of indices, or whatever else indices may do, which is not followed."""
    indices = given["indices"]
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype != torch.bool:
        _looked_up(follower, inputs, outputs, given)
    else:
        for tensor in inputs:
            block(follower.dims(tensor), "indices pick from it")


def _product(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    """Matrices, or stacks of them: ``[.., m, k]`` and ``[.., k, n]``; with a sum before them."""
    *added, left, right = inputs
    a, b = follower.dims(left), follower.dims(right)
    _unify(a[-1], b[-2])
    for one, other in zip(a[:-2], b[:-2], strict=True):
        _unify(one, other)
    follower.carry(outputs[0], (*a[:-1], b[-1]))
    for weight, made, read in ((left, -2, -1), (right, -1, -2)):
        places = follower.origin(weight)
        if places is not None:
            follower.found.made |= {place for place in places[made:][:1] if place is not None}
            follower.found.read |= {place for place in places[read:][:1] if place is not None}
            stacked = (dim for dim, place in zip(a, places[:-2], strict=False) if place is not None)
            block(stacked, "weights lie one behind the other in it")
    if follower.origin(left) is None and follower.origin(right) is None:
        follower.found.batched += a[:-2]
        block([a[-1], a[-2], b[-1]], WITHIN)
    for tensor in added:
        _elementwise(follower, [tensor, outputs[0]], outputs, {})


def _as_complex(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    """The last dimension is the two parts of a number."""
    follower.carry(outputs[0], follower.dims(inputs[0])[:-1])


def _as_real(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    follower.carry(outputs[0], (*follower.dims(inputs[0]), (Factor(2),)))


def _new(*_: Any) -> None:
    """A tensor of the type of another."""


def _convolved(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    for tensor in inputs:
        block(follower.dims(tensor), "a convolution reads it")
    for output in outputs:
        block(follower.fresh(output), "a convolution makes it")


def _resized(follower: _Follower, inputs: _Tensors, outputs: _Tensors, _: _Given) -> None:
    """Images, each plane by itself: ``[B, C, H, W]`` to others."""
    dims = follower.dims(inputs[0])
    block(dims[2:], "an image is resized along it")
    follower.carry(outputs[0], (*dims[:2], *((Factor(int(size)),) for size in outputs[0].shape[2:])))


# Those that torch does not call pointwise.
_ELEMENTWISE = (
    *("native_dropout", "zeros_like", "ones_like", "full_like", "empty_like", "copy_"),
    *("masked_fill", "masked_fill_", "fill_", "zero_"),
)
_RULES: Mapping[str, Callable[[_Follower, _Tensors, _Tensors, _Given], None]] = {
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
