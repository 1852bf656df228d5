"""Traces a torch module into an ONNX graph for one bucket, with every parameter under its own name."""

import ast
import contextlib
import gc
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx_ir as ir
import torch
from torch.export import Dim

from ..bucket import Bucket
from ..bundle.entries.generation_entry import CAPACITY, LOGIT_COUNT, SOURCE, WINDOW
from ..errors import ExportError
from .equal_layers import shortened
from .faster_export import decomposed_at_once, torchlib_read_once
from .frozen_dims import branching_dims, frozen_dims
from .onnx_translations import TRANSLATIONS
from .repeated_layers import NAME_SCOPES, repeat_layers
from .signature import Interface
from .universal import PREFIX

# Sizes that no other dimension of a traced model is likely to have.
_EXAMPLE_BATCH = 3
_EXAMPLE_SEQUENCE = 7
_EXAMPLE_OTHERS = {CAPACITY: 11, LOGIT_COUNT: 2, SOURCE: 13, WINDOW: 10}
# More than the windows of most models.
_LARGER = 2**13


@dataclass(frozen=True)
class Trace:
    """A traced graph, its weights still torch tensors, and the value that each submodule returns (its first output)."""

    model: ir.Model
    module_outputs: dict[str, str]


def trace(module: torch.nn.Module, interface: Interface, bucket: Bucket, opset: int) -> Trace:
    """Traces ``module``; dimensions that ``bucket`` leaves free, or does not know, keep their names, all others are
    static.

    A module that needs so many tokens to be traced for any number of them says so by ``example_tokens``. Weights are
    not folded, so every initializer keeps its parameter's name. Raises ExportError with torch's reason if the module
    does not export, or is another one for every size of a dimension that is to be free.
    """
    at = _example_shape(bucket, getattr(module, "example_tokens", _EXAMPLE_SEQUENCE))
    example = _example(interface, at)
    shorter = shortened(module, interface, example, *_larger(interface, bucket))
    if shorter is None:
        model = _exported(module, interface, bucket, opset, example)
    else:
        model = _exported(shorter.module, shorter, bucket, opset, _example(shorter, at))
        if not repeat_layers(model, shorter, module, interface):
            model = _exported(module, interface, bucket, opset, example)
    for value in model.graph.outputs:
        value.shape = _counted(value.shape)
    _require_free(module, interface, bucket, model)
    _name_outputs(interface, bucket, model)
    if bucket.free and getattr(module, "is_own_code", False):
        _require_one_branch(module, interface, bucket)
    _name_weights(model.graph, _own_names(module))
    return Trace(model, _module_outputs(model))


def _example(interface: Interface, at: Bucket) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.ones(spec.shape(at, _EXAMPLE_OTHERS), dtype=getattr(torch, spec.dtype)) for spec in interface.inputs
    )


def _larger(interface: Interface, bucket: Bucket) -> list[tuple[torch.Tensor, ...]]:
    """Inputs without numbers at the largest sizes that are free; none where no size is."""
    if not bucket.free and not any(dim in _EXAMPLE_OTHERS for spec in interface.inputs for dim in spec.dims):
        return []
    others = {name: size if name == LOGIT_COUNT else _LARGER + size for name, size in _EXAMPLE_OTHERS.items()}
    return [
        tuple(
            torch.ones(spec.shape(bucket.largest, others), dtype=getattr(torch, spec.dtype), device="meta")
            for spec in interface.inputs
        )
    ]


def _exported(
    module: torch.nn.Module, interface: Interface, bucket: Bucket, opset: int, example: tuple[torch.Tensor, ...]
) -> ir.Model:
    """The graph that torch.onnx.export makes of ``module``. Raises ExportError with torch's reason."""
    try:
        with quiet_export(), torchlib_read_once(), _without_collection(), decomposed_at_once(opset):
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                optimize=False,
                opset_version=opset,
                input_names=[spec.name for spec in interface.inputs],
                output_names=[spec.name for spec in interface.outputs],
                custom_translation_table=TRANSLATIONS,
                dynamic_shapes=_free_dims(module, interface, bucket),
                verbose=False,
            )
    except Exception as failure:  # torch.export raises many unrelated types for models it cannot trace
        reason = _reason(failure)
        raise ExportError(f"{type(module).__name__} at {bucket.label}: torch.onnx.export failed: {reason}") from failure
    assert program is not None
    return program.model


def _counted(shape: ir.Shape | None) -> ir.Shape | None:
    """A dimension of a size that torch.export worked out has that as its name."""
    return shape and ir.Shape([int(d) if isinstance(d, str) and d.isdigit() else d for d in map(_size, shape)])


def _size(dim: Any) -> Any:
    return dim if isinstance(dim, int) else dim.value


def _reason(failure: BaseException) -> str:
    """The first line of what torch.export itself said, which torch.onnx.export wraps in advice."""
    while failure.__cause__ is not None:
        failure = failure.__cause__
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]


def _example_shape(bucket: Bucket, tokens: int) -> Bucket:
    """A small shape inside ``bucket``, of ``tokens`` if it may have so many; torch.export would take a free dimension
    of 1 to be always 1."""
    least = bucket.smallest
    return Bucket(
        least.batch if bucket.min_batch is None else min(bucket.batch, max(least.batch, _EXAMPLE_BATCH)),
        least.sequence if bucket.min_sequence is None else min(bucket.sequence, max(least.sequence, tokens)),
    )


def _free_dims(module: torch.nn.Module, interface: Interface, bucket: Bucket) -> Any:
    """The names of free dimensions by input and position, in the structure of ``module.forward``'s parameters."""
    dims = {
        name: Dim(name, min=getattr(bucket.smallest, name), max=getattr(bucket.largest, name)) for name in bucket.free
    }
    dims |= {name: Dim(name) for spec in interface.inputs for name in spec.dims if name in _EXAMPLE_OTHERS}
    if not dims:
        return None
    named = tuple({i: dims[dim] for i, dim in enumerate(spec.dims) if dim in dims} for spec in interface.inputs)
    parameters = list(inspect.signature(module.forward).parameters.values())
    first = next((number for number, each in enumerate(parameters) if each.kind is each.VAR_POSITIONAL), len(named))
    return (*named[:first], named[first:]) if first < len(named) else named


def _require_free(module: torch.nn.Module, interface: Interface, bucket: Bucket, model: ir.Model) -> None:
    """Checks that free dimensions are free: where the module fixes a size, torch.onnx.export goes back to a static
    graph."""
    tensors = [("input", *pair) for pair in zip(interface.inputs, model.graph.inputs, strict=True)]
    tensors += [("output", *pair) for pair in zip(interface.outputs, model.graph.outputs, strict=False)]
    for kind, spec, value in tensors:
        found, wanted = tuple(map(_size, value.shape or ())), spec.declared(bucket)
        if any(isinstance(dim, str) and isinstance(size, int) for dim, size in zip(wanted, found, strict=False)):
            wrapped = getattr(module, PREFIX.rstrip("."), module)
            at = _example_shape(bucket, getattr(module, "example_tokens", _EXAMPLE_SEQUENCE))
            where = frozen_dims(module, interface.inputs, at, bucket.free)
            said = "; ".join(f"{dim} is frozen{line}" for dim, line in where.items()) or (
                f"{kind} {spec.name} has shape {list(found)} where {list(wanted)} was requested"
            )
            raise ExportError(
                f"{type(wrapped).__name__} at {bucket}: the module is made for one size: {said}; ask for static "
                "buckets, such as 1x64; a module of your own may use the size as it is, without int() or a "
                "loop over it"
            )


def _name_outputs(interface: Interface, bucket: Bucket, model: ir.Model) -> None:
    """Declares a dimension of an output by its name where torch.export has only an expression of it, such as
    ``Min(sequence, 4*((sequence + 3)//4))`` of what was filled up to a multiple of 4 and cut back: the gate compares
    shapes too."""
    for spec, value in zip(interface.outputs, model.graph.outputs, strict=False):
        found, declared = [isinstance(dim, int) for dim in value.shape or ()], spec.declared(bucket)
        if found == [isinstance(dim, int) for dim in declared]:
            value.shape = ir.Shape(declared)


def _require_one_branch(module: torch.nn.Module, interface: Interface, bucket: Bucket) -> None:
    """Checks that the code of a module takes the same way at every size of ``bucket``: torch.export drops what it asks
    of a size."""
    at = _example_shape(bucket, getattr(module, "example_tokens", _EXAMPLE_SEQUENCE))
    found = branching_dims(module, interface.inputs, at, bucket)
    if found:
        name = type(getattr(module, PREFIX.rstrip("."), module)).__name__
        said = "; ".join(f"it branches on {size}{line}" for size, line in found.items())
        raise ExportError(
            f"{name} at {bucket}: the module does other things at some sizes: {said}; ask for static buckets, or let "
            "it do the same at every size"
        )


def _name_weights(graph: ir.Graph, own: Mapping[str, str]) -> None:
    """Gives every initializer its parameter's ``own`` name, one for all of a tied one."""
    for name, value in sorted(graph.initializers.items(), key=lambda each: own.get(each[0], each[0]) != each[0]):
        stated = own.get(name, name).removeprefix(PREFIX)
        if name in own and own[name] != name and stated in graph.initializers:
            ir.convenience.replace_all_uses_with(value, graph.initializers[stated])
            del graph.initializers[name]
        else:
            value.name = stated


def _own_names(module: torch.nn.Module) -> dict[str, str]:
    """Every name of a parameter to its first, which is its own: torch.export may choose another of a tied one."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _module_outputs(model: ir.Model) -> dict[str, str]:
    """Module name to the value it returns: the last value made inside the module's scope."""
    outputs: dict[str, str] = {}
    for node in model.graph:
        # The last name is the node's own; nodes of one module have the others in common.
        for module in _modules(node.metadata_props.get(NAME_SCOPES, "").rpartition(", ")[0]):
            outputs[module] = node.outputs[0].name or ""
    return outputs


@cache
def _modules(scopes: str) -> tuple[str, ...]:
    """Modules in the text of a list of names that is not closed."""
    return tuple(scope.removeprefix(PREFIX) for scope in ast.literal_eval(f"{scopes}]" if scopes else "[]") if scope)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """torch.onnx.export prints progress and warns about its own internals; neither helps the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Without searches for garbage among the millions of objects that an export makes and keeps,
    and for the line of the model behind every node."""
    collects, config = gc.isenabled(), torch.fx.config
    says_lines = config.do_not_emit_stack_traces
    gc.disable()
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = says_lines
        if collects:
            gc.enable()
