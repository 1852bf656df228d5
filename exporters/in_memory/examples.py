"""Inputs of a module, found on examples: names, dimensions, types, and the values of whole numbers."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import RowNeed, TensorSpec
from ...errors import InputError
from ...strict import nearest
from ..hugging_face import survey
from ..hugging_face.passes import nothing_left
from ..own_lines import line_of, own_line
from ..torch_internals import FakeTensorMode, schema_of, storage, tree_iter
from .checkpoint import ModuleInMemory
from .module import copied, named_outputs, plainly, without_whole_parameters
from .rows import hides_where_one, require_own_rows

_BATCH, _SEQUENCE = "batch", "sequence"
_WHOLE = {torch.int64: "int64", torch.int32: "int32", torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool"}
# Operations that hand the numbers of their first argument on as they are.
_CARRIES = frozenset(
    [
        *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "clone", "_to_copy", "t", "transpose"),
        *("permute", "slice", "select", "alias", "detach", "contiguous", "lift_fresh"),
        "constant_pad_nd",
    ]
)

# Operations that draw random numbers in training alone.
_DRAWS_IN_TRAINING = ("_scaled_dot_product", "rrelu")
# Where a torch.nn.Module keeps what it registers.
_REGISTERS = ("_parameters", "_buffers", "_modules")
_PRODUCTS = frozenset(
    ["mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "convolution", "embedding", "native_layer_norm"]
)


def module_in_memory(
    module: torch.nn.Module, examples: Any, dynamic: Mapping[str, Sequence[str | None]] | None
) -> ModuleInMemory:
    """``module`` with the inputs that ``examples`` show: tensors by the names of ``forward``'s parameters, or in their
    order. ``dynamic`` names the dimensions of each that may change.

    Raises InputError for examples that the module does not take, and UnsupportedModelError where it does not run on
    shapes alone.
    """
    _require_readable(module)
    module = without_whole_parameters(module)
    given = _by_name(module, examples)
    stated = dict(dynamic or {})
    for name in stated.keys() - given.keys():
        raise InputError(f"dynamic: no input {name!r:.80}{nearest(str(name)[:80], given)}")
    specs = tuple(_spec(name, tensor, stated.get(name, (_BATCH,))) for name, tensor in given.items())
    sizes = _sizes(given, specs)
    seen = _looked_up(ModuleInMemory(module, specs, sizes[_SEQUENCE]), sizes)
    specs = tuple(_bounded(spec, given[spec.name], seen.rows.get(spec.name)) for spec in specs)
    own = copied(module)
    with torch.no_grad(), plainly():
        before = dict(own.named_buffers())
        _answers(own, given)
        for name, buffer in own.named_buffers():
            if buffer is not before.get(name) and not _is_equal(buffer, before.get(name)):
                raise _stateful(name)
        specs = tuple(replace(spec, row_needs=_row_need(own, given, spec, seen)) for spec in specs)
        require_own_rows(own, given, seen.rows)
    return ModuleInMemory(module, specs, sizes[_SEQUENCE])


def _require_readable(module: torch.nn.Module) -> None:
    """Raises InputError for a module that has no Python code of its own, and for tensors that it does not register."""
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        made = "torch.jit" if isinstance(module, torch.jit.ScriptModule) else "torch.compile"
        raise InputError(f"model: made by {made}, which no graph has; give the torch.nn.Module that it was made of")
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for place, part in module.named_modules():
        for name, value in vars(part).items():
            own = (each for each in tree_iter(value) if isinstance(each, torch.Tensor))
            if name not in _REGISTERS and any(id(each) not in registered for each in own):
                where = f"{place}.{name}".lstrip(".")
                raise InputError(f"model: {where} is a tensor that is no buffer; use register_buffer({name!r}, ...)")


def _by_name(module: torch.nn.Module, examples: Any) -> dict[str, torch.Tensor]:
    parameters = inspect.signature(module.forward).parameters
    fixed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [name for name, each in parameters.items() if each.kind in fixed]
    if isinstance(examples, torch.Tensor | np.ndarray):
        examples = (examples,)
    if isinstance(examples, Sequence) and not isinstance(examples, str):
        if len(examples) > len(names):
            raise InputError(
                f"example_inputs: {len(examples)} of them, and forward takes {', '.join(names) or 'none by a name'}; "
                "give those, a tensor each"
            )
        examples = dict(zip(names, examples, strict=False))
    if not isinstance(examples, Mapping) or not examples:
        raise InputError(
            "example_inputs: expected those of a torch.nn.Module, tensors by name or in the order of forward, such as "
            "{'x': torch.zeros(1, 16)}"
        )
    for name, value in examples.items():
        if name not in names:
            raise InputError(f"example_inputs: forward takes no {name!r:.80}{nearest(str(name)[:80], names)}")
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise InputError(
                f"example_inputs: {name}: expected a tensor, got {type(value).__name__}; what is none belongs into the "
                "module or into a default of forward"
            )
    missing = [n for n in names if n not in examples and parameters[n].default is inspect.Parameter.empty]
    if missing:
        raise InputError(f"example_inputs: forward also takes {', '.join(missing)}; give an example of each")
    given = {name: torch.as_tensor(examples[name]).cpu() for name in names if name in examples}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in given.items()}


def _spec(name: str, tensor: torch.Tensor, stated: Sequence[str | None]) -> TensorSpec:
    dims: list[str | int] = list(map(int, tensor.shape))
    if not dims or len(stated) > len(dims) or list(stated)[:1] != [_BATCH] or not all(dims):
        raise InputError(
            f"dynamic: {name}: expected 'batch', then 'sequence' or None for each dimension of {dims}, got "
            f"{list(stated)}; every input has the batch in front"
        )
    for at, dim in enumerate(stated):
        if dim is not None and (dim not in (_BATCH, _SEQUENCE) or list(stated).count(dim) > 1):
            raise InputError(f"dynamic: {name}: {dim!r:.80} at {at}; expected 'batch' and 'sequence' once, or None")
        dims[at] = dims[at] if dim is None else dim
    if tensor.is_floating_point():
        return TensorSpec(name, "float32", tuple(dims))
    if tensor.dtype not in _WHOLE:
        raise InputError(
            f"example_inputs: {name} is {tensor.dtype}; expected floats, bool or {', '.join(_WHOLE.values())}"
        )
    return TensorSpec(name, _WHOLE[tensor.dtype], tuple(dims))


def _sizes(given: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]) -> dict[str, int]:
    """Those of the batch and the sequence, 1 where there is none. Raises InputError where inputs differ in one."""
    sizes: dict[str, tuple[int, str]] = {}
    for spec in specs:
        for dim, size in zip(spec.dims, given[spec.name].shape, strict=True):
            if isinstance(dim, str) and sizes.setdefault(dim, (size, spec.name))[0] != size:
                was, first = sizes[dim]
                raise InputError(
                    f"example_inputs: {dim} is {was} in {first} and {size} in {spec.name}; expected one size"
                )
    return {_SEQUENCE: 1, **{dim: size for dim, (size, _) in sizes.items()}}


def _looked_up(checkpoint: ModuleInMemory, sizes: Mapping[str, int]) -> Lookups:
    """Use of the whole numbers of a pass's inputs. Raises UnsupportedModelError where the module does not run
    on shapes alone, InputError where it does at one size alone."""
    name, fake = checkpoint.name, FakeTensorMode(allow_non_fake_inputs=True)
    with survey.refused(checkpoint, name):
        model = survey.faked(checkpoint.module, fake)
        lookups = _passed(model, fake, checkpoint.inputs, sizes)
        for dim in dict.fromkeys(dim for spec in checkpoint.inputs for dim in spec.dims if isinstance(dim, str)):
            elsewhere = _passed_elsewhere(model, fake, checkpoint, sizes, dim)
            for place, size in lookups.places.items():
                if elsewhere.places.get(place, size) != size:
                    raise InputError(
                        f"example_inputs: {place} has places within a {dim}, of which each request has another number; "
                        "compare it with torch.arange and choose by torch.where, or state None where the size is fixed"
                    )
    return lookups


def _passed_elsewhere(
    model: torch.nn.Module, fake: FakeTensorMode, checkpoint: ModuleInMemory, sizes: Mapping[str, int], dim: str
) -> Lookups:
    """A pass at another size of ``dim``: one less, or one more where the example has the least. Raises
    InputError where it runs at neither."""
    other = sizes[dim] - 1 if sizes[dim] > 1 else 2
    try:
        return _passed(model, fake, checkpoint.inputs, {**sizes, dim: other})
    except Exception as failure:  # of any kind: the user's code
        if dim == _SEQUENCE:
            with suppress(Exception):
                return _passed(model, fake, checkpoint.inputs, {**sizes, dim: sizes[dim] + 1})
        todo = "state None in its place" if dim == _SEQUENCE else "a model takes any number of rows"
        raise InputError(
            f"dynamic: {checkpoint.name} is made for one size of {dim}: it runs at {sizes[dim]} and not at {other}"
            f"{line_of(failure)}; {todo}: {survey.reason(failure)}"
        ) from failure


def _passed(
    model: torch.nn.Module, fake: FakeTensorMode, specs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> Lookups:
    inputs = survey.fake_inputs(fake, specs, Bucket(sizes[_BATCH], sizes[_SEQUENCE]))
    lookups = Lookups(inputs, dict(model.named_buffers()))
    with fake, torch.no_grad(), plainly(), lookups, nothing_left(model):
        found = named_outputs(model(**inputs))
    _require_own_outputs(model, inputs, found)
    return lookups


def _stateful(buffer: str, line: str = "") -> InputError:
    return InputError(
        f"model: a pass changes its buffer {buffer}{line}, which no engine keeps from one request to the next; return "
        "the new value as an output, or leave the buffer as it is in eval mode"
    )


def _is_equal(buffer: torch.Tensor, before: torch.Tensor | None) -> bool:
    """Whether a pass that put ``buffer`` in the place of another left its numbers, as rotary positions do that are
    computed again for a length."""
    return before is not None and buffer.shape == before.shape and bool((buffer == before).all())


def _require_own_outputs(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> None:
    """Raises InputError for an output that is an input or another output as it is, or is called as an input or a
    parameter: values of a graph have one name each."""
    known = {id(tensor): f"the input {name}" for name, tensor in inputs.items()}
    taken = {**dict.fromkeys(inputs, "an input"), **dict.fromkeys(model.state_dict(), "a parameter or buffer")}
    for name, tensor in found.items():
        if tensor.is_floating_point() and id(tensor) in known:
            raise InputError(f"model: output {name} is {known[id(tensor)]} as it is; return it once, and no input")
        if name in taken:
            raise InputError(f"model: output {name} is called as {taken[name]}; return it by another name")
        known[id(tensor)] = f"the output {name}"


class Lookups(survey.OwnOperators):  # type: ignore[no-untyped-call]
    """Sees what a pass does with whole numbers and bools of ``given``: ``rows`` are those of the smallest table that
    each indexes, by name; ``masks`` are those that reach scores of attention with no product on the way."""

    def __init__(self, given: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[str, int] = {}
        # The same of what is indexed by a sum with a number too.
        self.places: dict[str, int] = {}
        self.masks: set[str] = set()
        self._buffers = {storage(buffer): name for name, buffer in buffers.items()}
        self._names: Any = WeakIdKeyDictionary()
        self._sums: Any = WeakIdKeyDictionary()
        # Names of the inputs of which a tensor is made by anything but products.
        self._made_of: Any = WeakIdKeyDictionary()
        for name, tensor in given.items():
            if not tensor.is_floating_point():
                self._names[tensor], self._made_of[tensor] = name, {name}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self._require_pure(func, name, args, kwargs or {})
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self._follow(name, args, kwargs or {}, found)
        if name in _CARRIES and isinstance(found, torch.Tensor) and args[0] in self._names:
            self._names[found] = self._names[args[0]]
        elif name in ("add", "sub") and args[0] in self._names and not isinstance(args[1], torch.Tensor):
            self._sums[found] = self._names[args[0]]
        elif name == "embedding":
            self._see(args[0], 0, args[1])
        elif name in ("index_select", "gather"):
            self._see(*args[:3])
        elif name == "index":
            for at, indices in enumerate(args[1]):
                self._see(args[0], at, indices)
        return found

    def _require_pure(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Raises InputError for an operation that draws random numbers, or writes to a buffer."""
        if torch.Tag.nondeterministic_seeded in func.tags and not name.startswith(_DRAWS_IN_TRAINING):
            line = own_line(traceback.extract_stack())
            raise InputError(
                f"model: {name} draws random numbers{line}, which no two runs have in common; take them as an input"
            )
        for at, argument in enumerate(schema_of(func).arguments):
            tensor = args[at] if at < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(tensor, torch.Tensor) and storage(tensor) in self._buffers:
                raise _stateful(self._buffers[storage(tensor)], own_line(traceback.extract_stack()))

    def _follow(self, name: str, args: Any, kwargs: Mapping[str, Any], found: Any) -> None:
        scores = name.startswith("_scaled_dot_product")
        given = tree_iter((args[3:], kwargs) if scores else (args, kwargs))  # queries, keys and values are no mask
        names: set[str] = set()
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                names |= self._made_of.get(tensor, set())
        if scores or name in ("_softmax", "_safe_softmax"):
            self.masks |= names
        elif names and name not in _PRODUCTS:
            for tensor in tree_iter(found):
                if isinstance(tensor, torch.Tensor):
                    self._made_of[tensor] = names

    def _see(self, table: torch.Tensor, dim: int, indices: torch.Tensor | None) -> None:
        if indices is not None and indices in self._names:
            name = self._names[indices]
            self.rows[name] = min(int(table.shape[dim]), self.rows.get(name, 2**62))
        name = None if indices is None else self._names.get(indices, self._sums.get(indices))
        if name is not None:
            self.places[name] = min(int(table.shape[dim]), self.places.get(name, 2**62))


def _bounded(spec: TensorSpec, example: torch.Tensor, rows: int | None) -> TensorSpec:
    """``spec`` with the numbers that an input may hold: those of its table, else up to the largest of its example."""
    if spec.dtype in ("float32", "bool"):
        return spec
    least, most = int(example.min()), int(example.max())
    high = most + 1 if rows is None else rows
    if least < 0 or most >= high or high == 1:
        where = f"of a table of {rows} rows" if rows is not None else "such as the largest that it will have"
        raise InputError(
            f"example_inputs: {spec.name} has whole numbers {least}..{most}; expected some from 0 on, {where}"
        )
    return replace(spec, high=high)


def _answers(module: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> bool:
    """Whether ``module`` answers with numbers. Raises InputError where it does not run."""
    try:
        found = named_outputs(module(**given))
    except Exception as failure:  # of any kind: the user's code
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
        where = f"{type(module).__name__} does not run on {shapes}{line_of(failure)}"
        raise InputError(f"example_inputs: {where}: {survey.reason(failure)}") from failure
    return all(bool(torch.isfinite(tensor).all()) for tensor in found.values() if tensor.is_floating_point())


def _row_need(
    module: torch.nn.Module, given: Mapping[str, torch.Tensor], spec: TensorSpec, seen: Lookups
) -> RowNeed | None:
    """Need of every row of an input for the module's answer to be defined, of one that may be a mask: found by
    asking it, and of one of attention, which over nothing is what each implementation makes of it, by what it reaches.
    Raises InputError for a mask that hides where it is 1."""
    example, masks = given[spec.name], spec.name in seen.masks and spec.name not in seen.rows
    if spec.dims != (_BATCH, _SEQUENCE) or (spec.dtype != "bool" and spec.high != 2):
        return None
    ones, said = {**given, spec.name: torch.ones_like(example)}, f"{type(module).__name__} answers with no numbers"
    hides = not _answers(module, ones)
    if not hides and masks and hides_where_one(module, given, spec.name, seen.rows):
        hides, said = True, f"{type(module).__name__} hides every token"
    if hides:
        raise InputError(
            f"example_inputs: {spec.name}: where it is 1 throughout, {said}; expected a mask that is 1 where a token "
            "counts: turn it around within the module"
        )
    first = torch.ones_like(example)
    first[:, 0] = 0
    if example.shape[1] > 1 and not _answers(module, {**given, spec.name: first}):
        return "first_token"
    return "token" if masks or not _answers(module, {**given, spec.name: torch.zeros_like(example)}) else None
